"""What the sweep of SIGKILLs does to a directory: saves, saves in the background and conversions, by one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.errors import DcpError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.core.async_jobs import async_save
from tests.core.fault_jobs import Seat, state_of
from tests.core.mortal_writer import MortalWriter

OLD, NEW = 1, 2
AT_ONCE = 8
SHARD_NBYTES = 300

Work = Callable[[Seat, Path, int, Path], bool]
"""Works in a directory, from a source, and dies after an operation; True: all was done."""


def mortal(directory: Path, number: int) -> LocalStorage:
    return LocalStorage(directory, FaultyOperations(kill_at=number, kill_moment="after"))


def save(seat: Seat, directory: Path, number: int, source: Path) -> bool:
    writer = FileSystemWriter(storage=mortal(directory, number))
    seat.save(state_of(0, 1, NEW), storage_writer=writer)
    return True


def save_in_the_background(seat: Seat, directory: Path, number: int, source: Path) -> bool:
    writer = MortalWriter(kill_after=number, spared=os.getpid())
    try:
        async_save(seat, state_of(0, 1, NEW), directory, storage_writer=writer, durable=True).get_result(60)
    except DcpError as error:
        if "SIGKILL" in str(error):
            return False
        raise
    return True


def convert_from_hugging_face(seat: Seat, directory: Path, number: int, source: Path) -> bool:
    writer = FileSystemWriter(storage=mortal(directory, number))
    convert_to_dcp(HuggingFaceReader(source), directory, storage_writer=writer)
    return True


def reshard(seat: Seat, directory: Path, number: int, source: Path) -> bool:
    writer = FileSystemWriter(storage=mortal(directory, number))
    convert_to_dcp(FileSystemReader(source), directory, storage_writer=writer)
    return True


WORK: dict[str, Work] = {
    "save": save,
    "save in the background": save_in_the_background,
    "convert from Hugging Face": convert_from_hugging_face,
    "reshard": reshard,
}


def do_and_die(context: RankContext, work: str | Work, root: Path, first: int, source: Path) -> bool:
    """Each process works in a directory of its own, and dies after an operation of its own; True: all was done."""
    number = first + context.rank
    call = WORK[work] if isinstance(work, str) else work
    return call(Seat.of(context, 1), root / str(number), number, source)


# -- what the tests do ------------------------------------------------------------------------------------------------


def sweep(root: Path, work: str | Work, template: Path | None, source: Path) -> list[tuple[Path, bool]]:
    """Die after operation 1, 2, 3 and so on, until all is done before that; the directories, and whether all was.

    Args:
        root: Where the directories are made.
        work: A name in `WORK`, or a function of a module.
        template: What is in each directory before; None: nothing.
        source: Handed to `work`.
    """
    found: list[tuple[Path, bool]] = []
    while not (found and found[-1][1]):
        first = len(found) + 1
        if template is not None:
            for number in range(first, first + AT_ONCE):
                shutil.copytree(template, root / str(number))
        ended = run_ranks(do_and_die, AT_ONCE, work, root, first, source, return_exceptions=True)
        for number, end in enumerate(ended, first):
            if isinstance(end, RankProcessError):
                assert "was killed by SIGKILL" in str(end)
            elif isinstance(end, BaseException):
                raise end
            found.append((root / str(number), end is True))
    done = [end for _, end in found]
    assert done == sorted(done) and 8 < done.index(True) < 60
    return found


def check_order(tags: list[int | None], done: list[bool], old: int | None) -> None:
    """The old one at first, from some operation on the new one, and nothing else."""
    switch = tags.index(NEW)
    assert tags == [old] * switch + [NEW] * (len(tags) - switch)
    assert 0 < switch <= done.index(True)
