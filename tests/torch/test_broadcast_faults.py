"""Loads that share reads while a reader fails, is slow or dies: all learn of it, nobody hangs, the next load works."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_torch
from dcp_core.errors import CoordinationError, CorruptError, DcpError, IncompleteError, PlanningError, StorageError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import PlannedRead, ReadTarget
from dcp_core.metadata import StoredObject
from dcp_core.recipes.loaded_objects import OBJECT_HANDED_OUT_BYTES
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.ranks import RankProcessError
from dcp_torch import wires
from dcp_torch.broadcasts import TorchBroadcasts
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.shared_reads import (
    SECONDS,
    CountedOperations,
    Layout,
    Part,
    filled,
    footprint,
    load,
    poisoned,
    reader_on,
    save_whole,
    watched,
    wrong_in,
)

pytestmark = pytest.mark.timeout(120)

SOON = SECONDS / 2
"""Much less than what a wait may take."""

MIB = 1 << 20
Print = tuple[int, int, int]
Raised = tuple[type[BaseException] | None, str, float]


def layout_of(rank: int) -> Layout:
    """Buffers on all ranks, on pairs, and one that is cut between readers; many more than may be under way."""
    layout = {f"w{number:02}": Part((50 + number, 80)) for number in range(24)}
    layout |= {f"pair{rank // 2}.{number}": Part((40, 30)) for number in range(12)}
    return layout | {"big": Part((4096, 512))}


def save_all(directory: Path, ranks: int = 4) -> None:
    save_whole(directory, *[layout_of(rank) for rank in range(ranks)])


def outcome_of_load(state: dict[str, Any], directory: Path | None, **options: Any) -> Raised:
    """What a load raised, and how long it took."""
    began = time.monotonic()
    try:
        load(state, directory, **options)
    except DcpError as error:
        return type(error), str(error), time.monotonic() - began
    return None, "", time.monotonic() - began


class FailingOperations(CountedOperations):
    """Reads are short, and reads of data fail from one on.

    Args:
        fail_at: Which of them is the first to fail, from 1.
    """

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self._fail_at = fail_at

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        count = super().preadv(descriptor, [memoryview(buffers[0]).cast("B")[:16384]], offset)
        if len(self.ranges) >= self._fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return count


class SlowOperations(CountedOperations):
    """The first read of data takes long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        count = super().preadv(descriptor, buffers, offset)
        if len(self.ranges) == 1:
            time.sleep(self._seconds)
        return count


class KillingOperations(CountedOperations):
    """The process dies when it has read some data."""

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        count = super().preadv(descriptor, buffers, offset)
        if self.ranges:
            os.kill(os.getpid(), signal.SIGKILL)
        return count


# -- readers that fail ------------------------------------------------------------------------------------------------


def load_while_reads_fail(rank: TorchRank, directory: Path) -> tuple[list[Raised], list[str]]:
    """Each rank's disk fails in turn, at its first read of data and later; then all is well."""
    layout, raised, wrong = layout_of(rank.rank), [], []
    for failing in range(rank.world_size):
        for fail_at in (1, 40):
            operations = FailingOperations(fail_at) if rank.rank == failing else CountedOperations()
            reader = reader_on(directory, operations)
            batch_bytes = (0, 6 * MIB)[failing % 2]
            state = poisoned(layout)
            with watched():
                raised.append(outcome_of_load(state, None, storage_reader=reader, broadcast_batch_bytes=batch_bytes))
            state = poisoned(layout)
            load(state, directory)
            wrong += wrong_in(state, layout)
    return raised, wrong


def test_the_error_of_a_disk_is_the_same_on_all_ranks_and_the_next_load_works(tmp_path: Path) -> None:
    save_all(tmp_path / "c")
    found = run_gloo(load_while_reads_fail, 4, tmp_path / "c", timeout_seconds=100)
    assert [wrong for _, wrong in found] == [[]] * 4
    for turn, raised in enumerate(zip(*[rank for rank, _ in found], strict=True)):
        kinds, texts, seconds = zip(*raised, strict=True)
        assert set(kinds) == {StorageError}, texts
        assert len(set(texts)) == 1
        assert f"rank {turn // 2}" in texts[0] and "undefined" in texts[0]
        assert max(seconds) < SOON


def load_damaged(rank: TorchRank, root: Path) -> tuple[list[Raised], list[str], Print, Print]:
    """A flipped byte, a missing file, a whole checkpoint, several times over."""
    layout, raised, wrong = layout_of(rank.rank), [], []
    prints = []
    gc.freeze()
    for _ in range(3):
        for place in ("flipped", "missing"):
            state = poisoned(layout)
            raised.append(outcome_of_load(state, root / place))
        state = poisoned(layout)
        load(state, root / "whole")
        wrong += wrong_in(state, layout)
        dist.barrier()
        prints.append(footprint())
        dist.barrier()
    return raised, wrong, prints[1], prints[2]


def test_damage_that_one_reader_finds_is_an_error_on_all_ranks_that_names_the_file(tmp_path: Path) -> None:
    for place in ("whole", "flipped", "missing"):
        save_all(tmp_path / place)
    (file,) = (tmp_path / "flipped").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    next((tmp_path / "missing").glob("*.safetensors")).unlink()
    found = run_gloo(load_damaged, 4, tmp_path)
    for raised in zip(*[rank[0] for rank in found], strict=True):
        assert len({text for _, text, _ in raised}) == 1, raised
        assert file.name in raised[0][1]
        assert max(seconds for _, _, seconds in raised) < SOON
    for raised, wrong, before, after in found:
        assert [kind for kind, _, _ in raised] == [CorruptError, IncompleteError] * 3
        assert wrong == []
        assert before == after


# -- a reader that is slow --------------------------------------------------------------------------------------------


def load_while_one_waits(rank: TorchRank, directory: Path) -> tuple[list[str], list[Raised]]:
    """Rank 1 takes long to read, then longer than the deadline, then reads as all do."""
    layout = layout_of(rank.rank)
    raised = []
    wrong = []
    for seconds, patience in ((0.2, SECONDS), (7.0, 3.0), (0.0, SECONDS)):
        operations = SlowOperations(seconds if rank.rank == 1 else 0.0)
        reader = reader_on(directory, operations)
        state = poisoned(layout)
        raised.append(outcome_of_load(state, None, storage_reader=reader, timeout_seconds=patience))
        if raised[-1][0] is None:
            wrong += wrong_in(state, layout)
        dist.barrier()
    return wrong, raised


def test_a_slow_reader_is_waited_for_until_the_deadline_and_then_named(tmp_path: Path) -> None:
    save_all(tmp_path / "c")
    found = run_gloo(load_while_one_waits, 4, tmp_path / "c", timeout_seconds=100)
    for wrong, raised in found:
        assert wrong == []
        assert raised[0][0] is None and raised[2][0] is None, raised
        assert raised[1][0] is not None and issubclass(raised[1][0], CoordinationError), raised
        assert "rank 1" in raised[1][1] or "ranks 1" in raised[1][1], raised


# -- a reader that dies -----------------------------------------------------------------------------------------------


def load_while_one_dies(rank: TorchRank, directory: Path, dying: int, batch_bytes: int) -> Raised:
    operations = KillingOperations() if rank.rank == dying else CountedOperations()
    reader = reader_on(directory, operations)
    state = poisoned(layout_of(rank.rank))
    options = {"broadcast_batch_bytes": batch_bytes, "timeout_seconds": 3.0}
    return outcome_of_load(state, None, storage_reader=reader, **options)


@pytest.mark.parametrize(("dying", "batch_bytes"), [(2, 0), (3, 6 * MIB)])
def test_a_rank_that_is_killed_while_it_reads_is_noticed_by_all_others(
    dying: int, batch_bytes: int, tmp_path: Path
) -> None:
    save_all(tmp_path / "c")
    found = run_gloo(load_while_one_dies, 4, tmp_path / "c", dying, batch_bytes, return_exceptions=True)
    assert isinstance(found.pop(dying), RankProcessError)
    for kind, text, seconds in found:
        assert kind is not None and issubclass(kind, CoordinationError), text
        assert f"rank {dying}" in text or f"ranks {dying}" in text, text
        assert seconds < 40.0


# -- a planner that fails late ----------------------------------------------------------------------------------------


class LateReader(FileSystemReader):
    """Fails on one rank before it reads or sends anything."""

    fails = False

    def _read(self, *args: object, **options: object) -> None:
        if self.fails:
            raise StorageError("this disk is not for today")
        super()._read(*args, **options)  # type: ignore[arg-type]


def load_while_one_reads_nothing(rank: TorchRank, directory: Path) -> list[tuple[Raised, int]]:
    found = []
    for failing in range(3):
        reader = LateReader()
        reader.fails = rank.rank == failing
        state = poisoned(layout_of(rank.rank))
        with watched() as seen:
            raised = outcome_of_load(state, directory, storage_reader=reader)
        found.append((raised, len(seen.sizes)))
    return found


def test_a_rank_that_cannot_read_walks_its_schedule_to_the_end(tmp_path: Path) -> None:
    save_all(tmp_path / "c")
    found = run_gloo(load_while_one_reads_nothing, 4, tmp_path / "c")
    for raised in zip(*found, strict=True):
        assert {kind for (kind, _, _), _ in raised} == {StorageError}
        assert len({text for (_, text, _), _ in raised}) == 1 and "not for today" in raised[0][0][1]
        assert max(seconds for (_, _, seconds), _ in raised) < SOON
        assert len({count for _, count in raised}) == 1  # all operations were started, by all


def load_short_of_memory(rank: TorchRank, directory: Path) -> list[tuple[Raised, int]]:
    """On rank 1 there is no memory to pack buffers in, for groups that are made and for given ones; then there is.

    Batches are small, so that many come after the one that fails.
    """
    new_wire, found = wires.new_wire, []

    def failing(nbytes: int, view: torch.Tensor) -> torch.Tensor:
        if rank.rank == 1:
            raise RuntimeError("no memory left for this")
        return new_wire(nbytes, view)

    everybody = tuple(range(rank.world_size))
    for groups in (None, {everybody: dist.group.WORLD}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wires, "new_wire", failing)
            outcome = outcome_of_load(
                poisoned(layout_of(0)), directory, broadcast_batch_bytes=40_000, broadcast_groups=groups
            )
        state = poisoned(layout_of(0))
        load(state, directory, broadcast_batch_bytes=40_000)
        found.append((outcome, len(wrong_in(state, layout_of(0)))))
    return found


def test_a_rank_without_memory_for_a_batch_says_so_and_nobody_waits_for_it(tmp_path: Path) -> None:
    save_all(tmp_path / "checkpoint", ranks=1)
    told = run_gloo(load_short_of_memory, 4, tmp_path / "checkpoint", timeout_seconds=100)
    for (kind, text, seconds), wrong in [each for of_rank in told for each in of_rank]:
        assert kind is not None and issubclass(kind, DcpError)
        assert "rank 1" in text and "RuntimeError: no memory left for this" in text
        assert seconds < SOON
        assert wrong == 0
    for of_rank in told:
        assert [text for (_, text, _), _ in of_rank] == [text for (_, text, _), _ in told[0]]


class LeavingReader(FileSystemReader):
    """On rank 1, fails when the others count on it: at an object too large to be handed out, or before it reads."""

    def __init__(self, directory: Path, where: str) -> None:
        super().__init__(directory)
        self._where = where if dist.get_rank() == 1 else ""

    def read_object(self, stored: StoredObject) -> bytes:
        if self._where == "object":
            raise StorageError("could not read the object: it is gone")
        if self._where == "quit before groups are open":
            raise SystemExit("it is gone")
        return super().read_object(stored)

    def execute_read(self, plan: PlannedRead, *args: Any, **options: Any) -> None:
        if self._where == "start":
            raise StorageError("could not begin: it is gone")
        if self._where == "quit":
            raise SystemExit("it is gone")
        super().execute_read(plan, *args, **options)
        if self._where == "end":
            raise StorageError("could not end: it is gone")


def load_while_one_leaves(rank: TorchRank, directory: Path) -> list[tuple[Raised, list[str]]]:
    """In groups made for the load, and in given ones; then all is well."""
    found = []
    everybody = tuple(range(rank.world_size))
    for where in ("object", "start", "end"):
        for groups in (None, {everybody: dist.group.WORLD}):
            target = poisoned(layout_of(0)) | {"object": b""}
            reader = LeavingReader(directory, where)
            outcome = outcome_of_load(target, None, storage_reader=reader, broadcast_groups=groups)
            state = poisoned(layout_of(0)) | {"object": b""}
            load(state, directory)
            found.append((outcome, wrong_in(state, layout_of(0))))
    return found


class RecoveringReader(FileSystemReader):
    """On rank 1, goes on after reads have failed, reads twice, or does not read together at all."""

    def __init__(self, directory: Path, how: str, operations: CountedOperations) -> None:
        super().__init__(storage=LocalStorage(directory, operations))
        self._how = how if dist.get_rank() == 1 else ""

    def execute_read(self, plan: PlannedRead, planner: ReadTarget, *args: Any, **options: Any) -> None:
        if self._how == "does nothing":
            return
        try:
            super().execute_read(plan, planner, *args, **options)
        except StorageError:
            if self._how == "reads again":
                super().execute_read(plan, planner, *args, **options)


def load_while_one_recovers(rank: TorchRank, directory: Path) -> list[tuple[Raised, list[str]]]:
    found = []
    for how in ("does nothing", "recovers", "reads again"):
        operations = FailingOperations(2) if rank.rank == 1 and how != "does nothing" else CountedOperations()
        reader = RecoveringReader(directory, how, operations)
        outcome = outcome_of_load(poisoned(layout_of(0)), None, storage_reader=reader)
        state = poisoned(layout_of(0))
        load(state, directory)
        found.append((outcome, wrong_in(state, layout_of(0))))
    return found


def test_a_reader_that_does_not_send_what_others_wait_for_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    save_all(tmp_path / "c", ranks=1)
    for of_rank in run_gloo(load_while_one_recovers, 2, tmp_path / "c", timeout_seconds=100):
        for ((kind, text, seconds), wrong), expected in zip(
            of_rank, ("did not carry out", "went on after a read had failed", "carried out already"), strict=True
        ):
            assert kind is PlanningError
            assert expected in text and "shares_reads = False" in text
            assert seconds < SOON
            assert wrong == []


def load_while_one_quits(rank: TorchRank, directory: Path) -> list[tuple[str, float, list[str]]]:
    found = []
    for where in ("quit before groups are open", "quit"):
        target, began, text = poisoned(layout_of(0)) | {"object": b""}, time.monotonic(), ""
        try:
            load(target, None, storage_reader=LeavingReader(directory, where))
        except (DcpError, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        state = poisoned(layout_of(0)) | {"object": b""}
        load(state, directory)
        found.append((text, seconds, wrong_in(state, layout_of(0))))
    return found


def test_a_rank_that_is_told_to_end_before_it_broadcasts_is_heard_at_once(tmp_path: Path) -> None:
    big = {"object": b"x" * (OBJECT_HANDED_OUT_BYTES + 1)}
    dcp_torch.save(filled(layout_of(0)) | big, checkpoint_id=tmp_path / "c", no_dist=False, durable=False)
    for of_rank in run_gloo(load_while_one_quits, 4, tmp_path / "c", timeout_seconds=100):
        for text, seconds, wrong in of_rank:
            assert "it is gone" in text and "SystemExit" in text
            assert seconds < SOON
            assert wrong == []


def test_a_rank_that_fails_before_it_broadcasts_or_after_is_heard_at_once(tmp_path: Path) -> None:
    big = {"object": b"x" * (OBJECT_HANDED_OUT_BYTES + 1)}
    dcp_torch.save(filled(layout_of(0)) | big, checkpoint_id=tmp_path / "c", no_dist=False, durable=False)
    told = run_gloo(load_while_one_leaves, 4, tmp_path / "c", timeout_seconds=100)
    for of_rank in told:
        assert [kind for (kind, _, _), _ in of_rank] == [StorageError] * 6
        assert [text for (_, text, _), _ in of_rank] == [text for (_, text, _), _ in told[0]]
        for (_, text, seconds), wrong in of_rank:
            assert text.startswith("rank 1: could not ") and "it is gone" in text
            assert seconds < SOON
            assert wrong == []


def load_while_one_does_not_come(rank: TorchRank, directory: Path) -> tuple[Raised, int]:
    """Rank 1 comes to its group when the others have given up; how often did this rank try to open it?"""
    open_group, tries = TorchBroadcasts.open, []

    def counted(self: TorchBroadcasts, *args: Any, **options: Any) -> Any:
        tries.append(args)
        if rank.rank == 1:
            time.sleep(4.0)
        return open_group(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBroadcasts, "open", counted)
        outcome = outcome_of_load(poisoned(layout_of(0)), directory, timeout_seconds=2.0)
    return outcome, len(tries)


def test_a_group_that_could_not_be_opened_is_not_waited_for_once_more(tmp_path: Path) -> None:
    save_all(tmp_path / "c", ranks=1)
    for (kind, text, _), tries in run_gloo(load_while_one_does_not_come, 3, tmp_path / "c", timeout_seconds=60):
        assert kind is not None and issubclass(kind, CoordinationError)
        assert "rank 1" in text or "ranks 1" in text
        assert tries == 1
