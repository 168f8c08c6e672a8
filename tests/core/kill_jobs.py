"""What the sweep of SIGKILLs does to a directory: saves, saves in the background and conversions, by one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.errors import DcpError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from dcp_core.testing.ranks import RankContext
from tests.core.async_jobs import async_save
from tests.core.fault_jobs import Seat, state_of

SHARD_NBYTES = 300


class MortalWriter(FileSystemWriter):
    """A writer whose process dies after an operation, unless it is the process that made the save.

    Args:
        path: The checkpoint's directory.
        kill_after: The operation, from 1.
        spared: The process that it spares.
    """

    def __init__(self, path: CheckpointId | None = None, *, kill_after: int, spared: int) -> None:
        self._fate = {"kill_after": kill_after, "spared": spared}
        operations = FaultyOperations(kill_at=None if os.getpid() == spared else kill_after, kill_moment="after")
        super().__init__(storage=LocalStorage("/nowhere" if path is None else os.fspath(path), operations))

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        return self._fate | {"path": self._directory.storage.describe().strip("'")}


def _mortal(directory: Path, number: int) -> LocalStorage:
    return LocalStorage(directory, FaultyOperations(kill_at=number, kill_moment="after"))


def save(seat: Seat, directory: Path, number: int, source: Path) -> bool:
    writer = FileSystemWriter(storage=_mortal(directory, number))
    seat.save(state_of(0, 1, 2), storage_writer=writer)
    return True


def save_in_the_background(seat: Seat, directory: Path, number: int, source: Path) -> bool:
    writer = MortalWriter(kill_after=number, spared=os.getpid())
    response = async_save(seat, state_of(0, 1, 2), directory, storage_writer=writer, durable=True)
    try:
        response.get_result(60)
    except DcpError as error:
        if "SIGKILL" in str(error):
            return False
        raise
    return True


def convert_from_hugging_face(seat: Seat, directory: Path, number: int, source: Path) -> bool:
    writer = FileSystemWriter(storage=_mortal(directory, number))
    convert_to_dcp(HuggingFaceReader(source), directory, storage_writer=writer)
    return True


WORK: dict[str, Callable[[Seat, Path, int, Path], bool]] = {
    "save": save,
    "save in the background": save_in_the_background,
    "convert from Hugging Face": convert_from_hugging_face,
}


def do_and_die(context: RankContext, work: str, root: Path, first: int, source: Path) -> bool:
    """Each process works in a directory of its own, and dies after an operation of its own; True: all was done."""
    number = first + context.rank
    return WORK[work](Seat.of(context, 1), root / str(number), number, source)
