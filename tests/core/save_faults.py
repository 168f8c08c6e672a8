"""What can go wrong on one rank of a save, but for the disk: in planner, writer, objects, arguments, states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dcp_core.box import Box
from dcp_core.errors import CorruptError, PlanningError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.state_path import PerRank
from dcp_core.testing.numpy_ranks import ShardedArray
from tests.core.one_rank_faults import (
    BAD_PLACES,
    BAD_TIMES,
    RANKS,
    WORLD,
    Arguments,
    FailingState,
    Fault,
    UnspeakableError,
    answering,
    bad,
    bad_arguments,
    differing,
    each,
    failing,
    methods,
    other,
    raising,
    stateful,
)


def failing_flag(error: BaseException | None) -> type[StandardSavePlanner]:
    """A planner whose property raises."""

    class FailingFlag(StandardSavePlanner):
        @property
        def enable_plan_caching(self) -> bool:
            if error is not None:
                raise error
            return True

    return FailingFlag


class OtherSavePlanner(StandardSavePlanner):
    pass


class OtherWriter(FileSystemWriter):
    pass


def _local_class() -> object:
    class Local:
        pass

    return Local()


def _own_loop() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    return loop


_BAD_SAVES = {
    **{name: bad(checkpoint_id=value) for name, value in BAD_PLACES.items()},
    **{name: bad(timeout_seconds=value) for name, value in BAD_TIMES.items()},
    "a writer that is none": bad(storage_writer="x"),
    "a reader for a writer": bad(storage_writer=FileSystemReader()),
    "a planner that is none": bad(planner=StandardLoadPlanner()),
    "a class for a planner": bad(planner=StandardSavePlanner),
    "durable in words": bad(durable="yes"),
    "durable an array": bad(durable=np.zeros(2)),
    "no_dist in words": bad(no_dist="no"),
    "use_collectives None": bad(use_collectives=None),
    "use_collectives 0": bad(use_collectives=0),
    "a list for a state": bad(state_dict=[1]),
    "None for a state": bad(state_dict=None),
}
_OTHER_SAVES = {
    "checkpoint_id": lambda here: {"checkpoint_id": "/dev/null/elsewhere"} if here else {},
    "timeout_seconds": other(timeout_seconds=(800, 801)),
    "durable": other(durable=(True, False)),
    "planner": lambda here: {"planner": OtherSavePlanner() if here else StandardSavePlanner()},
    "plan caching": lambda here: {"planner": StandardSavePlanner(enable_plan_caching=here)},
    "redundancy": lambda here: {"planner": StandardSavePlanner(remove_redundancy=here)},
    "minimum rank": lambda here: {"planner": StandardSavePlanner(save_to_minimum_rank=here)},
    "storage_writer": lambda here: {"storage_writer": OtherWriter() if here else FileSystemWriter()},
}

_UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "a lambda": lambda: lambda: None,
    "a lock in a list": lambda: [1, threading.Lock()],
    "an instance of a local class": _local_class,
    "a dict that holds itself": _own_loop,
    "an object for a key": lambda: {object(): 1},
    "an unpicklable value of one rank": lambda: PerRank(threading.Lock()),
}


def _with_strange(make: Callable[[], Any], here: bool) -> Arguments:
    return {"more": {"strange": make()}} if here else {}


def _unsupported() -> list[Fault]:
    return [
        Fault(
            f"{name} on rank {rank}", rank, "UnsupportedValueError", "strange",
            partial(_with_strange, make),
        )
        for number, (name, make) in enumerate(_UNSUPPORTED.items())
        for rank in [number % WORLD]
    ]  # fmt: skip


def _contradictions() -> list[Fault]:
    """States of the ranks that make no checkpoint together."""
    shape = (6, 2)

    def sharded(rows: tuple[int, int], dtype: str = "float32", shape: tuple[int, ...] = shape) -> ShardedArray:
        box = Box((rows[0], 0), (rows[1] - rows[0], shape[1]))
        return ShardedArray(shape, [box], [np.zeros(box.sizes, dtype)], dtype)

    def on(rank: int, kind: str, name: str, value: ShardedArray) -> Fault:
        return Fault(
            f"{name} on rank {rank}", rank, kind, "torn",
            lambda here: {"more": {"torn": value if here else sharded((0, 6))}},
        )  # fmt: skip

    return [
        *(on(rank, "ShapeMismatchError", "another shape", sharded((0, 6), shape=(7, 2))) for rank in RANKS),
        *(on(rank, "DTypeMismatchError", "another dtype", sharded((0, 6), "int32")) for rank in RANKS),
        *(on(rank, "OverlapError", "an overlap", sharded((3, 5))) for rank in RANKS),
        Fault("a hole before rank 1", 1, "CoverageError", "torn",
              lambda here: {"more": {"torn": sharded((4, 6) if here else (0, 3))}}),
    ]  # fmt: skip


_PLANNER_METHODS = ("configure_planner", "build_local_plan", "finalize_plan", "get_data", "options")
_WRITER_METHODS = ("initialize_writer", "configure_writer", "optimize_local_plan", "execute_write")
_WRITER_COORDINATOR_METHODS = ("begin_checkpoint", "optimize_global_plan", "finalize_checkpoint")


def _interrupts() -> list[Fault]:
    told = "KeyboardInterrupt"
    spots: list[tuple[str, type[Any], str, Sequence[int]]] = [
        ("planner", StandardSavePlanner, "build_local_plan", RANKS),
        ("planner", StandardSavePlanner, "get_data", [0, 2]),
        ("storage_writer", FileSystemWriter, "execute_write", [1, 2]),
        ("storage_writer", FileSystemWriter, "begin_checkpoint", [0]),
    ]
    faults = []
    for role, base, method, ranks in spots:
        for error in (KeyboardInterrupt(), SystemExit(3)) if method == "build_local_plan" else (KeyboardInterrupt(),):
            told = type(error).__name__
            call = raising(method, base, role, error)
            faults += each(ranks, f"{told} in {method}", call, text=told, interrupt=told)
    faults += each(RANKS, "KeyboardInterrupt in state_dict", stateful(KeyboardInterrupt()),
                    text="KeyboardInterrupt", interrupt="KeyboardInterrupt")  # fmt: skip
    return faults


SAVE_FAULTS: dict[str, list[Fault]] = {
    "planner": [
        *methods(StandardSavePlanner, "planner", _PLANNER_METHODS, ["build_global_plan"]),
        *each(RANKS, "enable_plan_caching", lambda here: {
            "planner": failing_flag(RuntimeError("out of luck") if here else None)()}),
        *each(RANKS, "a local plan that is none", answering(
            "build_local_plan", StandardSavePlanner, "planner"), kind="PlanningError", text="return a SavePlan"),
        *each([0], "too few plans", answering(
            "build_global_plan", StandardSavePlanner, "planner", []),
            kind="PlanningError", text="returned 0 plans for 3 ranks"),
        *each(RANKS, "a final plan that is none", answering(
            "finalize_plan", StandardSavePlanner, "planner"), text="AttributeError"),
        *each(RANKS, "data that is none", answering(
            "get_data", StandardSavePlanner, "planner"), kind="UnsupportedValueError", text="get_data gives NoneType"),
        *each(RANKS, "get_data of a known plan", raising(
            "get_data", StandardSavePlanner, "planner", RuntimeError("out of luck")), warm=True),
        *each(RANKS, "get_data at its end", raising(
            "get_data", StandardSavePlanner, "planner", RuntimeError("out of luck"), late=True)),
    ],
    "writer": [
        *methods(FileSystemWriter, "storage_writer", _WRITER_METHODS, _WRITER_COORDINATOR_METHODS),
        *each(RANKS, "execute_write at its end", raising(
            "execute_write", FileSystemWriter, "storage_writer", RuntimeError("out of luck"), late=True)),
        *each([0], "begin_checkpoint at its end", raising(
            "begin_checkpoint", FileSystemWriter, "storage_writer", RuntimeError("out of luck"), late=True)),
        *each(RANKS, "execute_write without a result", answering(
            "execute_write", FileSystemWriter, "storage_writer"), text="AttributeError"),
        *each(RANKS, "execute_write with another result", answering(
            "execute_write", FileSystemWriter, "storage_writer", "done"), text="AttributeError"),
        *each([0], "begin_checkpoint without a suffix", answering(
            "begin_checkpoint", FileSystemWriter, "storage_writer"), text="AttributeError"),
        *each(RANKS, "execute_write and abort_checkpoint", lambda here: {
            "storage_writer": failing(
                failing(FileSystemWriter, "execute_write", RuntimeError("out of luck") if here else None),
                "abort_checkpoint", OSError("no way back") if here else None, late=True)()}),
    ],
    "errors of all kinds": [
        *each(RANKS, "one of ours", raising(
            "build_local_plan", StandardSavePlanner, "planner", PlanningError("out of luck")),
            kind="PlanningError", text="out of luck"),
        *each(RANKS, "a corrupt file of the user's", raising(
            "get_data", StandardSavePlanner, "planner", CorruptError("out of luck")),
            kind="CorruptError", text="out of luck"),
        *each(RANKS, "one that can't be pickled or printed", raising(
            "get_data", StandardSavePlanner, "planner", UnspeakableError(1, 2)), text="UnspeakableError"),
        *each(RANKS, "one without a text", raising(
            "build_local_plan", StandardSavePlanner, "planner", StopIteration()), text="StopIteration"),
        *each(RANKS, "one of a million letters", raising(
            "get_data", StandardSavePlanner, "planner", RuntimeError("out of luck" * 100_000))),
        *each(RANKS, "memory", raising(
            "execute_write", FileSystemWriter, "storage_writer", MemoryError()), text="MemoryError"),
    ],
    "stateful": [
        *each(RANKS, "state_dict", stateful(RuntimeError("out of luck"))),
        *each(RANKS, "nested state_dict", lambda here: {
            "more": {"deep": [{"er": FailingState(1, saves=RuntimeError("out of luck") if here else None)}]}}),
    ],
    "interrupts": _interrupts(),
    "bad arguments": bad_arguments(_BAD_SAVES),
    "different arguments": [*differing(_OTHER_SAVES), *differing(dict(reversed(_OTHER_SAVES.items())))],
    "unsupported values": _unsupported(),
    "contradictions": _contradictions(),
}  # fmt: skip
