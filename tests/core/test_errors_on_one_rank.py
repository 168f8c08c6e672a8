"""Something goes wrong on one rank: all ranks raise the same error at once, nothing is lost, and the next call works.

The deadline is a quarter of an hour everywhere but in the tests about deadlines, and every error must be there in a
few seconds: so nobody waited for a rank that does not come. Each job runs through many failures in turn, which also
shows that the ranks stay in step.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from dcp_core.box import Box
from dcp_core.errors import CoordinationTimeoutError, CorruptError, InDoubtError, PlanningError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.state_path import PerRank
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.faults import FaultyOperations, OperationRecord
from dcp_core.testing.numpy_ranks import ShardedArray
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import (
    SOON_SECONDS,
    Outcome,
    Seat,
    checkpoint_names,
    is_untouched,
    loaded_tag,
    memory_directory,
    names_in,
    outcome_of,
    poison_of,
    state_of,
)

pytestmark = pytest.mark.faults

WORLD = 3
RANKS = range(WORLD)


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "checkpoint"


# --- what goes wrong ---------------------------------------------------------------------------------


class Unspeakable(Exception):
    """An error that cannot be pickled, and whose text cannot be had."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no text")


def failing(base: type[Any], method: str, error: BaseException | None, *, late: bool = False) -> type[Any]:
    """Make a subclass, the same on all ranks, in which one method raises where `error` is given.

    Args:
        base: What it derives from.
        method: Which method.
        error: None: it works as in `base`.
        late: Raise after doing all the work.
    """

    def instead(self: Any, *args: Any, **kwargs: Any) -> Any:
        if error is not None and not late:
            raise error
        result = getattr(super(made, self), method)(*args, **kwargs)
        if error is not None:
            raise error
        return result

    made = type(f"Failing{base.__name__}", (base,), {method: instead})
    return made


def failing_flag(error: BaseException | None) -> type[StandardSavePlanner]:
    """A planner whose property raises."""

    class FailingFlag(StandardSavePlanner):
        @property
        def enable_plan_caching(self) -> bool:
            if error is not None:
                raise error
            return True

    return FailingFlag


class FailingState:
    """A Stateful object that raises where it is told to."""

    def __init__(self, tag: int, saves: BaseException | None = None, loads: BaseException | None = None) -> None:
        self.array = np.full(3, float(tag))
        self._saves, self._loads = saves, loads

    def state_dict(self) -> dict[str, Any]:
        if self._saves is not None:
            raise self._saves
        return {"array": self.array}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._loads is not None:
            raise self._loads


Arguments = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """One call of which one rank's part goes wrong.

    Attributes:
        name: Tells it from others.
        rank: Where it goes wrong.
        kind: Class of the error that all ranks raise.
        text: Stands in its message.
        arguments: Makes the arguments of the call from whether it goes wrong here; `state_dict` replaces the state, a
            mapping under `more` is added to it.
        interrupt: What the rank itself raises instead.
        warm: Let the call succeed once before, so that the plan is known.
    """

    name: str
    rank: int
    kind: str
    text: str
    arguments: Callable[[bool], Arguments]
    interrupt: str = ""
    warm: bool = False


@dataclass(frozen=True)
class Aftermath:
    """What one rank saw of a fault.

    Attributes:
        outcome: Of the failing call.
        names: What lay in the directory afterwards, when every rank was done, and had been added since.
        tag: Which save a load gave then.
        untouched: Of a load: whether its target still held poison only.
    """

    outcome: Outcome
    added: tuple[str, ...]
    removed: tuple[str, ...]
    tag: int
    untouched: bool = True


def _raising(method: str, base: type[Any], role: str, error: BaseException, **more: Any) -> Callable[[bool], Arguments]:
    return lambda here: {role: failing(base, method, error if here else None, **more)()}


def _each(ranks: Sequence[int], name: str, make: Callable[[], Callable[[bool], Arguments]], **more: Any) -> list[Fault]:
    """The same fault on each of some ranks, raised by code that is not ours."""
    given: Arguments = {"kind": "RankFailedError", "text": "RuntimeError: out of luck"} | more
    return [Fault(f"{name} on rank {rank}", rank, arguments=make(), **given) for rank in ranks]


def _methods(base: type[Any], role: str, everywhere: Sequence[str], coordinator: Sequence[str]) -> list[Fault]:
    """A user's error in each method of a planner or storage."""
    faults = []
    for method in (*everywhere, *coordinator):
        ranks = RANKS if method in everywhere else [0]
        make = lambda method=method: _raising(method, base, role, RuntimeError("out of luck"))  # noqa: E731
        faults += _each(ranks, f"{base.__name__}.{method}", make)
    return faults


# --- running them ------------------------------------------------------------------------------------


def _run_saves(context: RankContext, directory: Path, group: str) -> list[Aftermath]:
    """Save; then for each fault: fail over it, look, and save again."""
    seat = Seat.of(context)
    seat.save(state_of(seat.rank, WORLD, 1), checkpoint_id=directory)
    found = []
    for tag, fault in enumerate(SAVE_FAULTS[group], 1):
        if fault.warm:
            _call_save(seat, directory, tag, fault.arguments(False))
        seat.share()
        before = set(names_in(directory))
        seat.share()
        arguments = fault.arguments(seat.rank == fault.rank)
        outcome = outcome_of(lambda tag=tag, arguments=arguments: _call_save(seat, directory, 1000 + tag, arguments))
        seat.share()
        after = set(names_in(directory))
        found.append(_aftermath(outcome, before, after, loaded_tag(seat, directory)))
        seat.save(state_of(seat.rank, WORLD, tag + 1), checkpoint_id=directory)
    assert loaded_tag(seat, directory) == len(SAVE_FAULTS[group]) + 1
    assert names_in(directory) == checkpoint_names(directory)
    return found


def _call_save(seat: Seat, directory: Path, tag: int, arguments: Arguments) -> None:
    arguments = {"checkpoint_id": directory, "state_dict": state_of(seat.rank, WORLD, tag)} | arguments
    state = arguments.pop("state_dict")
    if "more" in arguments:
        state = state | arguments.pop("more")
    seat.save(state, **arguments)


def _run_loads(context: RankContext, directory: Path, group: str) -> list[Aftermath]:
    """Save once; then for each fault: fail to load over it, look at the target, and load well."""
    seat = Seat.of(context)
    seat.save(_with_stateful(state_of(seat.rank, WORLD, 1), FailingState(1)), checkpoint_id=directory)
    before = set(names_in(directory))
    found = []
    for fault in LOAD_FAULTS[group]:
        target = poison_of(seat.rank, WORLD)
        arguments = {"checkpoint_id": directory, "state_dict": target} | fault.arguments(seat.rank == fault.rank)
        state = arguments.pop("state_dict")
        if "more" in arguments:
            state = state | arguments.pop("more")
        outcome = outcome_of(lambda state=state, arguments=arguments: seat.load(state, **arguments))
        target = {key: state[key] for key in target} if isinstance(state, Mapping) and target.keys() <= state.keys() else target
        untouched = is_untouched(target, seat.rank, WORLD)
        found.append(_aftermath(outcome, before, set(names_in(directory)), loaded_tag(seat, directory), untouched))
    return found


def _with_stateful(state: dict[str, Any], value: FailingState) -> dict[str, Any]:
    return state | {"stateful": value}


def _aftermath(outcome: Outcome, before: set[str], after: set[str], tag: int, untouched: bool = True) -> Aftermath:
    return Aftermath(outcome, tuple(sorted(after - before)), tuple(sorted(before - after)), tag, untouched)


def _check_one_error(fault: Fault, ranks: Sequence[Aftermath]) -> None:
    """All ranks raised the same error, soon; the one that was interrupted, its interrupt."""
    outcomes = [seen.outcome for seen in ranks]
    if fault.interrupt:
        assert outcomes[fault.rank].kind == fault.interrupt, (fault.name, outcomes)
        outcomes.pop(fault.rank)
    assert {(outcome.kind, outcome.message) for outcome in outcomes} == {(fault.kind, outcomes[0].message)}, (
        fault.name,
        outcomes,
    )
    assert fault.text in outcomes[0].message, (fault.name, outcomes[0])
    assert max(seen.outcome.seconds for seen in ranks) < SOON_SECONDS, (fault.name, outcomes)


def _check_failed_saves(directory: Path, group: str) -> None:
    found = run_ranks(_run_saves, WORLD, directory, group, timeout_seconds=150)
    for number, fault in enumerate(SAVE_FAULTS[group]):
        ranks = [seen[number] for seen in found]
        _check_one_error(fault, ranks)
        for seen in ranks:
            assert (seen.added, seen.removed, seen.tag) == ((), (), number + 1), (fault.name, seen)


def _check_failed_loads(directory: Path, group: str, *, untouched: bool) -> None:
    found = run_ranks(_run_loads, WORLD, directory, group, timeout_seconds=150)
    for number, fault in enumerate(LOAD_FAULTS[group]):
        ranks = [seen[number] for seen in found]
        _check_one_error(fault, ranks)
        for seen in ranks:
            assert (seen.added, seen.removed, seen.tag) == ((), (), 1), (fault.name, seen)
            assert seen.untouched or not untouched, (fault.name, "a target was touched")


# --- saves -------------------------------------------------------------------------------------------


def _bad(**wrong: Any) -> Callable[[bool], Arguments]:
    return lambda here: dict(wrong) if here else {}


def _other(**values: tuple[Any, Any]) -> Callable[[bool], Arguments]:
    return lambda here: {name: pair[here] for name, pair in values.items()}


def _bad_arguments(calls: Mapping[str, Callable[[bool], Arguments]]) -> list[Fault]:
    return [
        Fault(f"{name} on rank {rank}", rank, "ArgumentError", f"rank {rank}: ", arguments)
        for number, (name, arguments) in enumerate(calls.items())
        for rank in [number % WORLD]
    ]


def _differing(calls: Mapping[str, Callable[[bool], Arguments]]) -> list[Fault]:
    """One rank passes something else; told from rank 0 as the one who is right."""
    faults = []
    for number, (name, arguments) in enumerate(calls.items()):
        rank = number % WORLD
        others = "1, 2" if rank == 0 else str(rank)
        text = f"on rank 0 and something else on rank {others}"
        faults.append(Fault(f"{name} on rank {rank}", rank, "ArgumentsDifferError", text, arguments))
    return faults


def _stateful(error: BaseException) -> Callable[[bool], Arguments]:
    return lambda here: {"more": {"stateful": FailingState(1, saves=error if here else None)}}


class OtherSavePlanner(StandardSavePlanner):
    pass


class OtherLoadPlanner(StandardLoadPlanner):
    pass


class OtherWriter(FileSystemWriter):
    pass


class OtherReader(FileSystemReader):
    pass


def _local_class() -> object:
    class Local:
        pass

    return Local()


def _own_loop() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    return loop


_BAD_PLACES: dict[str, Any] = {
    "no place": None,
    "a number for a place": 5,
    "an empty path": "",
    "a path with a NUL": "a\0b",
    "a foreign scheme": "s3://bucket/key",
    "a file URL with a host": "file://elsewhere/tmp",
    "bytes for a path": b"/tmp",
}
_BAD_TIMES: dict[str, Any] = {
    "no time": 0,
    "negative time": -1.0,
    "time in words": "long",
    "not a number": float("nan"),
    "True for time": True,
    "None for time": None,
}
_BAD_SAVES = {
    **{name: _bad(checkpoint_id=value) for name, value in _BAD_PLACES.items()},
    **{name: _bad(timeout_seconds=value) for name, value in _BAD_TIMES.items()},
    "a writer that is none": _bad(storage_writer="x"),
    "a reader for a writer": _bad(storage_writer=FileSystemReader()),
    "a planner that is none": _bad(planner=StandardLoadPlanner()),
    "a class for a planner": _bad(planner=StandardSavePlanner),
    "durable in words": _bad(durable="yes"),
    "durable an array": _bad(durable=np.zeros(2)),
    "no_dist in words": _bad(no_dist="no"),
    "use_collectives None": _bad(use_collectives=None),
    "use_collectives 0": _bad(use_collectives=0),
    "a list for a state": _bad(state_dict=[1]),
    "None for a state": _bad(state_dict=None),
}
_OTHER_SAVES = {
    "checkpoint_id": lambda here: {"checkpoint_id": "/dev/null/elsewhere"} if here else {},
    "timeout_seconds": _other(timeout_seconds=(800, 801)),
    "durable": _other(durable=(True, False)),
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


def _unsupported() -> list[Fault]:
    return [
        Fault(
            f"{name} on rank {rank}", rank, "UnsupportedValueError", "strange",
            lambda here, make=make: {"more": {"strange": make()}} if here else {},
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
        Fault("a hole on rank 1", 1, "CoverageError", "torn",
              lambda here: {"more": {"torn": sharded((0, 6))} if False else {"torn": sharded((4, 6) if here else (0, 3))}}),
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
            make = lambda role=role, base=base, method=method, error=error: _raising(method, base, role, error)  # noqa: E731
            faults += _each(ranks, f"{told} in {method}", make, text=told, interrupt=told)
    faults += _each(RANKS, "KeyboardInterrupt in state_dict", lambda: _stateful(KeyboardInterrupt()),
                    text="KeyboardInterrupt", interrupt="KeyboardInterrupt")  # fmt: skip
    return faults


SAVE_FAULTS: dict[str, list[Fault]] = {
    "planner": [
        *_methods(StandardSavePlanner, "planner", _PLANNER_METHODS, ["build_global_plan"]),
        *_each(RANKS, "enable_plan_caching", lambda: lambda here: {
            "planner": failing_flag(RuntimeError("out of luck") if here else None)()}),
        *_each(RANKS, "get_data of a known plan", lambda: _raising(
            "get_data", StandardSavePlanner, "planner", RuntimeError("out of luck")), warm=True),
        *_each(RANKS, "get_data at its end", lambda: _raising(
            "get_data", StandardSavePlanner, "planner", RuntimeError("out of luck"), late=True)),
    ],
    "writer": [
        *_methods(FileSystemWriter, "storage_writer", _WRITER_METHODS, _WRITER_COORDINATOR_METHODS),
        *_each(RANKS, "execute_write at its end", lambda: _raising(
            "execute_write", FileSystemWriter, "storage_writer", RuntimeError("out of luck"), late=True)),
        *_each([0], "begin_checkpoint at its end", lambda: _raising(
            "begin_checkpoint", FileSystemWriter, "storage_writer", RuntimeError("out of luck"), late=True)),
        *_each(RANKS, "execute_write and abort_checkpoint", lambda: lambda here: {
            "storage_writer": failing(
                failing(FileSystemWriter, "execute_write", RuntimeError("out of luck") if here else None),
                "abort_checkpoint", OSError("no way back") if here else None, late=True)()}),
    ],
    "errors of all kinds": [
        *_each(RANKS, "one of ours", lambda: _raising(
            "build_local_plan", StandardSavePlanner, "planner", PlanningError("out of luck")),
            kind="PlanningError", text="out of luck"),
        *_each(RANKS, "a corrupt file of the user's", lambda: _raising(
            "get_data", StandardSavePlanner, "planner", CorruptError("out of luck")),
            kind="CorruptError", text="out of luck"),
        *_each(RANKS, "one that can't be pickled or printed", lambda: _raising(
            "get_data", StandardSavePlanner, "planner", Unspeakable(1, 2)), text="Unspeakable"),
        *_each(RANKS, "one without a text", lambda: _raising(
            "build_local_plan", StandardSavePlanner, "planner", StopIteration()), text="StopIteration"),
        *_each(RANKS, "one of a million letters", lambda: _raising(
            "get_data", StandardSavePlanner, "planner", RuntimeError("out of luck" * 100_000))),
        *_each(RANKS, "memory", lambda: _raising(
            "execute_write", FileSystemWriter, "storage_writer", MemoryError()), text="MemoryError"),
    ],
    "stateful": [
        *_each(RANKS, "state_dict", lambda: _stateful(RuntimeError("out of luck"))),
        *_each(RANKS, "nested state_dict", lambda: lambda here: {
            "more": {"deep": [{"er": FailingState(1, saves=RuntimeError("out of luck") if here else None)}]}}),
    ],
    "interrupts": _interrupts(),
    "bad arguments": _bad_arguments(_BAD_SAVES),
    "different arguments": [*_differing(_OTHER_SAVES), *_differing(dict(reversed(_OTHER_SAVES.items())))],
    "unsupported values": _unsupported(),
    "contradictions": _contradictions(),
}  # fmt: skip


@pytest.mark.parametrize("group", SAVE_FAULTS)
def test_a_failing_save_is_one_error_on_all_ranks_and_leaves_the_old_checkpoint_alone(
    directory: Path, group: str
) -> None:
    _check_failed_saves(directory, group)


# --- loads -------------------------------------------------------------------------------------------

_READER_METHODS = ("initialize_reader", "configure_reader", "optimize_local_plan", "check_files")
_BAD_LOADS = {
    **{name: _bad(checkpoint_id=value) for name, value in _BAD_PLACES.items()},
    **{name: _bad(timeout_seconds=value) for name, value in _BAD_TIMES.items()},
    "a reader that is none": _bad(storage_reader="x"),
    "a writer for a reader": _bad(storage_reader=FileSystemWriter()),
    "a planner that is none": _bad(planner=StandardSavePlanner()),
    "verify in words": _bad(verify="yes"),
    "verify 1": _bad(verify=1),
    "verify an array": _bad(verify=np.zeros(2)),
    "no_dist in words": _bad(no_dist="no"),
    "use_collectives None": _bad(use_collectives=None),
    "broadcast in words": _bad(broadcast_replicated_tensors="perhaps"),
    "broadcast an array": _bad(broadcast_replicated_tensors=np.zeros(2)),
    "broadcast 1": _bad(broadcast_replicated_tensors=1),
    "a list of groups": _bad(broadcast_groups=[(0, 1)]),
    "groups without broadcast": lambda here: (
        {"broadcast_replicated_tensors": False} | ({"broadcast_groups": {}} if here else {})
    ),
    "a negative batch": _bad(broadcast_batch_bytes=-1),
    "half a batch": _bad(broadcast_batch_bytes=0.5),
    "True for a batch": _bad(broadcast_batch_bytes=True),
    "a list for a state": _bad(state_dict=[1]),
}
_OTHER_LOADS = {
    "checkpoint_id": lambda here: {"checkpoint_id": "/dev/null/elsewhere"} if here else {},
    "timeout_seconds": _other(timeout_seconds=(800, 801)),
    "verify": _other(verify=(True, "full")),
    "broadcast": _other(broadcast_replicated_tensors=(False, "auto")),
    "batch": _other(broadcast_batch_bytes=(1, 2)),
    "planner": lambda here: {"planner": OtherLoadPlanner() if here else StandardLoadPlanner()},
    "partial": lambda here: {"planner": StandardLoadPlanner(allow_partial_load=here)},
    "cast": lambda here: {"planner": StandardLoadPlanner(cast="any" if here else "auto")},
    "storage_reader": lambda here: {"storage_reader": OtherReader() if here else FileSystemReader()},
}


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.setflags(write=False)
    return array


def _misfits() -> list[Fault]:
    """Targets of one rank that the checkpoint does not fit."""
    cases: dict[str, tuple[str, str, dict[str, Any]]] = {
        "a key that is not there": ("MissingKeysError", "absent", {"absent": 0}),
        "another shape": ("ShapeMismatchError", "'stateful.array'", {"stateful": {"array": np.zeros(4)}}),
        "another dtype": ("DTypeMismatchError", "'stateful.array'", {"stateful": {"array": np.zeros(3, "int8")}}),
        "a number for a tensor": ("PlanningError", "'stateful.array'", {"stateful": {"array": 0}}),
        "a read-only array": ("UnsupportedValueError", "read-only", {"stateful": {"array": _read_only(np.zeros(3))}}),
        "an expanded array": ("UnsupportedValueError", "repeats", {"stateful": {"array": np.lib.stride_tricks.as_strided(
            np.zeros(1), (3,), (0,))}}),
        "an empty container": ("MissingKeysError", "warm", {"stateful": {}}),
    }  # fmt: skip
    return [
        Fault(f"{name} on rank {rank}", rank, kind, text, lambda here, more=more: {"more": more} if here else {})
        for name, (kind, text, more) in cases.items()
        for rank in RANKS
    ]


def _fixed(here: bool) -> Arguments:
    """A state whose values nobody can replace."""
    return {"state_dict": MappingProxyType({"step": -1})} if here else {"state_dict": {"step": -1}}


class UnreadableOperations(FileOperations):
    """Reading fails, from the first call of one kind on."""

    def __init__(self, method: str, number: int, pattern: str = "") -> None:
        self._method, self._number, self._pattern = method, number, pattern

    def _fail(self, method: str, path: str) -> None:
        if method == self._method and self._pattern in path:
            raise OSError(self._number, os.strerror(self._number), path)

    def open_read(self, path: str) -> int:
        self._fail("open_read", path)
        return super().open_read(path)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        self._fail("preadv", os.readlink(f"/proc/self/fd/{descriptor}"))
        return super().preadv(descriptor, buffers, offset)

    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        self._fail("stat", path)
        return super().stat(path, follow_symlinks=follow_symlinks)


def _unreadable(method: str, number: int, pattern: str = "") -> Callable[[bool], Arguments]:
    """Each rank reads with operations of its own; a reader keeps them when it turns to `checkpoint_id`."""

    def arguments(here: bool) -> Arguments:
        operations = UnreadableOperations(method, number, pattern) if here else FileOperations()
        return {"storage_reader": FileSystemReader(storage=LocalStorage("/nowhere", operations))}

    return arguments


def _refused(ranks: Sequence[int], method: str, number: int, pattern: str) -> list[Fault]:
    code = f"[{errno.errorcode[number]}]"
    return [
        Fault(f"{method} {code} of {pattern} on rank {rank}", rank, "StorageError", code,
              _unreadable(method, number, pattern))
        for rank in ranks
    ]  # fmt: skip


def _load_stateful(error: BaseException) -> Callable[[bool], Arguments]:
    return lambda here: {"more": {"stateful": FailingState(1, loads=error if here else None)}}


LOAD_FAULTS: dict[str, list[Fault]] = {
    "before reading": [
        *_methods(StandardLoadPlanner, "planner", ("configure_planner", "build_local_plan", "options"),
                  ["build_global_plan"]),
        *_methods(FileSystemReader, "storage_reader", _READER_METHODS, ["load_metadata", "optimize_global_plan"]),
        *_each([0], "read_object", lambda: _raising(
            "read_object", FileSystemReader, "storage_reader", RuntimeError("out of luck"))),
        *_each(RANKS, "state_dict", lambda: _stateful(RuntimeError("out of luck"))),
        *_each(RANKS, "a strange error", lambda: _raising(
            "build_local_plan", StandardLoadPlanner, "planner", Unspeakable(1, 2)), text="Unspeakable"),
        *_each(RANKS, "KeyboardInterrupt", lambda: _raising(
            "build_local_plan", StandardLoadPlanner, "planner", KeyboardInterrupt()),
            text="KeyboardInterrupt", interrupt="KeyboardInterrupt"),
        *_each(RANKS, "KeyboardInterrupt in state_dict", lambda: _stateful(KeyboardInterrupt()),
            text="KeyboardInterrupt", interrupt="KeyboardInterrupt"),
        *_refused([0], "stat", errno.EACCES, ".metadata"),
        *_refused([0], "open_read", errno.EACCES, ".metadata"),
        *_refused([0], "preadv", errno.EIO, ".metadata"),
        *_refused([0], "open_read", errno.EIO, ".bytes"),
        *_refused([0], "preadv", errno.EIO, ".bytes"),
        *_refused(RANKS, "stat", errno.ESTALE, ".safetensors"),
    ],
    "bad arguments": _bad_arguments(_BAD_LOADS),
    "different arguments": [*_differing(_OTHER_LOADS), *_differing(dict(reversed(_OTHER_LOADS.items())))],
    "misfits": _misfits(),
    "while reading": [
        *_methods(StandardLoadPlanner, "planner",
                  ("finalize_plan", "acquire_tensor", "access", "apply_tensor", "apply_bytes"), []),
        *_methods(FileSystemReader, "storage_reader", ["execute_read"], []),
        *_each(RANKS, "execute_read at its end", lambda: _raising(
            "execute_read", FileSystemReader, "storage_reader", RuntimeError("out of luck"), late=True)),
        *_each(RANKS, "KeyboardInterrupt in execute_read", lambda: _raising(
            "execute_read", FileSystemReader, "storage_reader", KeyboardInterrupt()),
            text="KeyboardInterrupt", interrupt="KeyboardInterrupt"),
        *_each(RANKS, "load_state_dict", lambda: _load_stateful(RuntimeError("out of luck"))),
        *_each(RANKS, "load_state_dict on one rank alone", lambda: lambda here: {
            "more": {"stateful": FailingState(1, loads=RuntimeError("out of luck"))} if here else {}}),
        *_each(RANKS, "KeyboardInterrupt in load_state_dict", lambda: _load_stateful(KeyboardInterrupt()),
            text="KeyboardInterrupt", interrupt="KeyboardInterrupt"),
        *_refused(RANKS, "open_read", errno.EACCES, ".safetensors"),
        *_refused(RANKS, "preadv", errno.EIO, ".safetensors"),
        *[Fault(f"a state that can't be changed on rank {rank}", rank, "ArgumentError", "mutable", _fixed)
          for rank in RANKS],
    ],
}  # fmt: skip


@pytest.mark.parametrize("group", ["before reading", "bad arguments", "different arguments", "misfits"])
def test_an_error_found_before_reading_is_one_error_on_all_ranks_and_touches_no_target(
    directory: Path, group: str
) -> None:
    _check_failed_loads(directory, group, untouched=True)


def test_an_error_while_reading_is_one_error_on_all_ranks(directory: Path) -> None:
    _check_failed_loads(directory, "while reading", untouched=False)
