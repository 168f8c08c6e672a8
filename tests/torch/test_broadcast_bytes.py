"""What several ranks want is taken from storage once, and the ranks read about as much each."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist

import dcp_torch
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import PlannedRead
from dcp_core.execution.read_probe import PROBE_BYTES
from dcp_core.storage.local import LocalStorage
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.shared_reads import (
    CountedOperations,
    Layout,
    Opened,
    Part,
    data_nbytes,
    filled,
    load,
    poisoned,
    reader_on,
    save_whole,
    watched,
    wrong_in,
)
from tests.torch.states import LogLines

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


@dataclass(frozen=True)
class Read:
    """What one rank took from storage in one load.

    Attributes:
        ranges: File, first byte, one past the last.
        received: Bytes that came by broadcast.
        by_calls: Bytes that all read calls of the process returned; sockets are read by other calls.
        wrong: Tensors that are not right.
    """

    ranges: list[tuple[str, int, int]]
    received: int
    by_calls: int
    wrong: list[str]

    @property
    def nbytes(self) -> int:
        return sum(last - first for _, first, last in self.ranges)


def bytes_by_calls() -> int:
    """Bytes that read calls of this process have returned."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("rchar:")).split()[1])


def even(rank: int, replicas: int) -> Layout:
    """Tensors of many sizes, cut between the groups of `replicas` ranks; and one that each rank has for itself."""
    parts, part = 8 // replicas, rank // replicas
    layout = {f"w{number:02}": Part.even((32 + 8 * number, 512), parts, part) for number in range(30)}
    layout |= {f"tiny{number}": Part.even((8, 3), parts, part) for number in range(40)}
    return layout | {f"own{rank}": Part((16, 1024))}


def uneven(rank: int, replicas: int) -> Layout:
    """One tensor is most of the bytes; and a rank of each group has much for itself."""
    group = rank // replicas
    layout = {f"big{group}": Part((8000, 512)), f"small{group}": Part((64, 256))}
    return layout | ({f"own{rank}": Part((1000, 512))} if rank % replicas == 0 else {})


def read_watched(rank: TorchRank, layout: Layout, directory: Path, **options: object) -> Read:
    state, operations = poisoned(layout), CountedOperations()
    dist.barrier()
    before = bytes_by_calls()
    with watched() as seen:
        load(state, None, storage_reader=reader_on(directory, operations), **options)
    by_calls = bytes_by_calls() - before
    received = sum(seen.sizes) - seen.sent
    return Read(operations.ranges, received, by_calls, wrong_in(state, layout))


def save_and_load(rank: TorchRank, root: Path, layout: Callable[..., Layout], counts: Sequence[int]) -> list[Read]:
    """Save with as many replicas, and load the same."""
    reads = []
    for count in counts:
        own = layout(rank.rank, count)
        dcp_torch.save(filled(own), checkpoint_id=root / str(count), durable=False)
        reads.append(read_watched(rank, own, root / str(count)))
    return reads


def read_twice(ranges: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Ranges that begin before the one before them ends."""
    ordered = sorted(ranges)
    return [after for before, after in pairwise(ordered) if before[0] == after[0] and after[1] < before[2]]


@pytest.mark.parametrize("layout", [even, uneven])
def test_what_2_4_or_8_ranks_want_is_taken_from_storage_once(layout: Callable[..., Layout], tmp_path: Path) -> None:
    counts = (2, 4, 8)
    found = run_gloo(save_and_load, 8, tmp_path, layout, counts, timeout_seconds=100)
    for count, *reads in zip(counts, *found, strict=True):
        layouts = [layout(rank, count) for rank in range(8)]
        assert [read.wrong for read in reads] == [[]] * 8
        assert read_twice([piece for read in reads for piece in read.ranges]) == []
        read = [read.nbytes for read in reads]
        assert sum(read) == data_nbytes(layouts)
        for own, wanted in zip(reads, layouts, strict=True):
            assert own.nbytes + own.received == data_nbytes([wanted])
            assert own.nbytes <= own.by_calls <= own.nbytes + MIB  # and what is not data
        if layout is even:
            assert max(read) <= 1.1 * min(read)
        else:
            assert max(read) <= 1.02 * sum(read) / 8 + MIB  # a buffer is cut at multiples of that


# -- whether sharing is worth it --------------------------------------------------------------------------------------


@contextmanager
def on_host(name: str) -> Iterator[None]:
    """Let this process seem to run on a host of this name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: name)
        yield


def load_on_hosts(rank: TorchRank, directory: Path) -> list[tuple[list[Opened], int, list[str]]]:
    """Let "auto" decide: on one host; on eight hosts where the group must be made; where it is given."""
    layout, lines, found = {"w": Part((8 * MIB // 512 // 4, 512))}, LogLines(logging.INFO), []
    world = {tuple(range(8)): dist.group.WORLD}
    for host, groups in (("one", world), (f"host{rank.rank}", None), (f"host{rank.rank}", world)):
        state, operations = poisoned(layout), CountedOperations()
        lines.lines.clear()
        with on_host(host), watched() as seen:
            load(
                state, None, storage_reader=reader_on(directory, operations), broadcast_replicated_tensors="auto",
                broadcast_groups=groups,
            )  # fmt: skip
        assert wrong_in(state, layout) == []
        found.append((seen.opened, operations.nbytes, lines.with_words("auto:", "of 1 groups")))
    return found


def test_auto_shares_what_hosts_would_read_many_times_where_the_group_is_there(tmp_path: Path) -> None:
    save_whole(tmp_path / "c", {"w": Part((8 * MIB // 512 // 4, 512))})
    found = run_gloo(load_on_hosts, 8, tmp_path / "c")
    for opened, nbytes, _ in [*[rank[0] for rank in found], *[rank[1] for rank in found]]:
        assert (opened, nbytes) == ([], 8 * MIB)
    assert sum(rank[2][1] for rank in found) == 8 * MIB
    assert {group for rank in found for group in rank[2][0]} == {Opened(tuple(range(8)), "given")}
    assert found[0][2][2] and "1 of 1 groups of ranks share reads" in found[0][2][2][0]


class ProbedReader(FileSystemReader):
    """Says how fast its storage is."""

    def __init__(self, storage: LocalStorage, same_rate: float, own_rate: float) -> None:
        super().__init__(storage=storage)
        self.asked: list[float] = []
        self._rates = same_rate, own_rate

    def probe_rate(self, plan: PlannedRead, fraction: float) -> float:
        assert super().probe_rate(plan, fraction) > 0
        self.asked.append(fraction)
        return self._rates[len(self.asked) - 1]


def load_at_rates(rank: TorchRank, directory: Path) -> list[tuple[int, list[float], list[str]]]:
    """Let "auto" decide on one host: storage that limits each reader, a warm page cache, a cold disk."""
    layout, lines, found = {"w": Part((64 * MIB // 512 // 4, 512))}, LogLines(logging.INFO), []
    for rates in ((1e8, 1e8), (4e9, 4e9), (2e9, 3e8)):
        state, operations = poisoned(layout), CountedOperations()
        reader = ProbedReader(LocalStorage(directory, operations), *rates)
        lines.lines.clear()
        load(state, None, storage_reader=reader, broadcast_replicated_tensors="auto")
        assert wrong_in(state, layout) == []
        found.append((operations.nbytes, reader.asked, lines.with_words("auto:", "reading the same at")))
    return found


def test_auto_measures_storage_before_it_decides_about_much(tmp_path: Path) -> None:
    save_whole(tmp_path / "c", {"w": Part((64 * MIB // 512 // 4, 512))})
    found = run_gloo(load_at_rates, 2, tmp_path / "c")
    slow, cached, disk = zip(*found, strict=True)
    probed = 2 * PROBE_BYTES
    assert sum(nbytes for nbytes, _, _ in slow) == 64 * MIB + 2 * probed
    assert [nbytes for nbytes, _, _ in (*cached, *disk)] == [64 * MIB + probed] * 4
    for rank, own in enumerate(found):
        assert [asked for _, asked, _ in own] == [[0.0, (rank + 1) / 3]] * 3
    assert [bool(lines) for _, _, lines in found[0]] == [True] * 3


def load_little(rank: TorchRank, directory: Path) -> list[float]:
    layout = {"w": Part((63 * MIB // 512 // 4, 512))}
    reader = ProbedReader(LocalStorage(directory), 1e8, 1e8)
    load(poisoned(layout), None, storage_reader=reader, broadcast_replicated_tensors="auto")
    load(poisoned(layout), None, storage_reader=reader, broadcast_replicated_tensors=True)
    return reader.asked


def test_storage_is_not_measured_where_that_would_cost_much_or_decide_nothing(tmp_path: Path) -> None:
    save_whole(tmp_path / "c", {"w": Part((63 * MIB // 512 // 4, 512))})
    assert run_gloo(load_little, 2, tmp_path / "c") == [[], []]
