"""What can go wrong on one rank of a load: in planner, reader, objects, arguments, targets, and in reading the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.metadata import MetadataIndex
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from tests.core.one_rank_faults import (
    BAD_PLACES,
    BAD_TIMES,
    RANKS,
    Arguments,
    Call,
    FailingState,
    Fault,
    UnspeakableError,
    answering,
    bad,
    bad_arguments,
    differing,
    each,
    methods,
    other,
    raising,
    stateful,
)


class OtherLoadPlanner(StandardLoadPlanner):
    pass


class OtherReader(FileSystemReader):
    pass


_READER_METHODS = ("initialize_reader", "configure_reader", "optimize_local_plan", "check_files")
_BAD_LOADS = {
    **{name: bad(checkpoint_id=value) for name, value in BAD_PLACES.items()},
    **{name: bad(timeout_seconds=value) for name, value in BAD_TIMES.items()},
    "a reader that is none": bad(storage_reader="x"),
    "a writer for a reader": bad(storage_reader=FileSystemWriter()),
    "a planner that is none": bad(planner=StandardSavePlanner()),
    "verify in words": bad(verify="yes"),
    "verify 1": bad(verify=1),
    "verify an array": bad(verify=np.zeros(2)),
    "no_dist in words": bad(no_dist="no"),
    "use_collectives None": bad(use_collectives=None),
    "broadcast in words": bad(broadcast_replicated_tensors="perhaps"),
    "broadcast an array": bad(broadcast_replicated_tensors=np.zeros(2)),
    "broadcast 1": bad(broadcast_replicated_tensors=1),
    "a list of groups": bad(broadcast_groups=[(0, 1)]),
    "groups without broadcast": lambda here: (
        {"broadcast_replicated_tensors": False} | ({"broadcast_groups": {}} if here else {})
    ),
    "a negative batch": bad(broadcast_batch_bytes=-1),
    "half a batch": bad(broadcast_batch_bytes=0.5),
    "True for a batch": bad(broadcast_batch_bytes=True),
    "a list for a state": bad(state_dict=[1]),
}
_OTHER_LOADS = {
    "checkpoint_id": lambda here: {"checkpoint_id": "/dev/null/elsewhere"} if here else {},
    "timeout_seconds": other(timeout_seconds=(800, 801)),
    "verify": other(verify=(True, "full")),
    "broadcast": other(broadcast_replicated_tensors=(False, "auto")),
    "batch": other(broadcast_batch_bytes=(1, 2)),
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
    expanded = np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,))
    cases: dict[str, tuple[str, str, dict[str, Any]]] = {
        "a key that is not there": ("MissingKeysError", "absent", {"absent": 0}),
        "another shape": ("ShapeMismatchError", "'stateful.array'", {"stateful": {"array": np.zeros(4)}}),
        "another dtype": ("DTypeMismatchError", "'stateful.array'", {"stateful": {"array": np.zeros(3, "int8")}}),
        "a number for a tensor": ("PlanningError", "'stateful.array'", {"stateful": {"array": 0}}),
        "a read-only array": ("UnsupportedValueError", "read-only", {"stateful": {"array": _read_only(np.zeros(3))}}),
        "an expanded array": ("UnsupportedValueError", "cannot be loaded into", {"stateful": {"array": expanded}}),
        "an empty container": ("MissingKeysError", "warm", {"stateful": {}}),
    }  # fmt: skip
    return [
        Fault(f"{name} on rank {rank}", rank, kind, text, bad(more=more))
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


def _unreadable(method: str, number: int, pattern: str = "") -> Call:
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


class Misdirecting(StandardLoadPlanner):
    """Answers one rank with items that it never planned."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def build_global_plan(self, all_plans: Sequence[LoadPlan]) -> Sequence[LoadPlan]:
        plans = list(all_plans)
        items = [replace(item, dest_index=MetadataIndex("nobody", (0,), 0)) for item in plans[self._rank].items]
        plans[self._rank] = plans[self._rank].with_items(items)
        return plans


def _misdirected(rank: int, here: bool) -> Arguments:
    return {"planner": Misdirecting(rank)}


def _load_stateful(error: BaseException) -> Call:
    return lambda here: {"more": {"stateful": FailingState(1, loads=error if here else None)}}


LOAD_FAULTS: dict[str, list[Fault]] = {
    "before reading": [
        *methods(StandardLoadPlanner, "planner", ("configure_planner", "build_local_plan", "options"),
                  ["build_global_plan"]),
        *methods(FileSystemReader, "storage_reader", _READER_METHODS, ["load_metadata", "optimize_global_plan"]),
        *each([0], "read_object", raising(
            "read_object", FileSystemReader, "storage_reader", RuntimeError("out of luck"))),
        *each(RANKS, "state_dict", stateful(RuntimeError("out of luck"))),
        *each(RANKS, "a strange error", raising(
            "build_local_plan", StandardLoadPlanner, "planner", UnspeakableError(1, 2)), text="UnspeakableError"),
        *each(RANKS, "KeyboardInterrupt", raising(
            "build_local_plan", StandardLoadPlanner, "planner", KeyboardInterrupt()),
            text="KeyboardInterrupt", interrupt="KeyboardInterrupt"),
        *each(RANKS, "KeyboardInterrupt in state_dict", stateful(KeyboardInterrupt()),
            text="KeyboardInterrupt", interrupt="KeyboardInterrupt"),
        *[Fault(f"a state that can't be changed on rank {rank}", rank, "UnsupportedValueError", "in place", _fixed)
          for rank in RANKS],
        *each(RANKS, "check_files without a plan", answering(
            "build_local_plan", StandardLoadPlanner, "planner"), kind="PlanningError", text="return a LoadPlan"),
        *each([0], "too few plans", answering("build_global_plan", StandardLoadPlanner, "planner", []),
               kind="PlanningError", text="returned 0 plans for 3 ranks"),
        *_refused([0], "stat", errno.EACCES, ".metadata"),
        *_refused([0], "open_read", errno.EACCES, ".metadata"),
        *_refused([0], "preadv", errno.EIO, ".metadata"),
        *_refused([0], "open_read", errno.EIO, ".bytes"),
        *_refused([0], "preadv", errno.EIO, ".bytes"),
        *_refused(RANKS, "stat", errno.ESTALE, ".safetensors"),
    ],
    "bad arguments": bad_arguments(_BAD_LOADS),
    "different arguments": [*differing(_OTHER_LOADS), *differing(dict(reversed(_OTHER_LOADS.items())))],
    "misfits": _misfits(),
    "while reading": [
        *methods(StandardLoadPlanner, "planner",
                  ("finalize_plan", "acquire_tensor", "access", "apply_tensor", "apply_bytes"), []),
        *methods(FileSystemReader, "storage_reader", ["execute_read"], []),
        *each(RANKS, "execute_read at its end", raising(
            "execute_read", FileSystemReader, "storage_reader", RuntimeError("out of luck"), late=True)),
        *each(RANKS, "KeyboardInterrupt in execute_read", raising(
            "execute_read", FileSystemReader, "storage_reader", KeyboardInterrupt()),
            text="KeyboardInterrupt", interrupt="KeyboardInterrupt"),
        *each(RANKS, "load_state_dict", _load_stateful(RuntimeError("out of luck"))),
        *each(RANKS, "load_state_dict on one rank alone", lambda here: {
            "more": {"stateful": FailingState(1, loads=RuntimeError("out of luck"))} if here else {}}),
        *each(RANKS, "KeyboardInterrupt in load_state_dict", _load_stateful(KeyboardInterrupt()),
            text="KeyboardInterrupt", interrupt="KeyboardInterrupt"),
        *[Fault(f"a plan with items of nobody on rank {rank}", rank, "PlanningError", "derive the items",
                partial(_misdirected, rank)) for rank in RANKS],
        *_refused(RANKS, "open_read", errno.EACCES, ".safetensors"),
        *_refused(RANKS, "preadv", errno.EIO, ".safetensors"),
    ],
}  # fmt: skip
