"""Probes of storage: where they read, how much, and that the rate is that of the bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from dcp_core import api
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import PlannedRead, ReadContext, StorageReader
from dcp_core.execution.read_probe import PROBE_BYTES
from dcp_core.metadata import Metadata
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from tests.core.fault_jobs import memory_directory

MIB = 1 << 20
Reads = list[tuple[int, int]]
"""Where, and how many bytes."""


class Watched(FileOperations):
    """Notes where data is read, and sleeps before it."""

    def __init__(self, pause_seconds: float = 0.0) -> None:
        self.reads: Reads = []
        self._pause_seconds = pause_seconds

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        count = super().preadv(descriptor, buffers, offset)
        if count > 100_000:
            time.sleep(self._pause_seconds)
            self.reads.append((offset, count))
        return count


class KeptReader(FileSystemReader):
    """Keeps the plan of a load."""

    plan: PlannedRead

    def check_files(self, plan: PlannedRead) -> None:
        super().check_files(plan)
        self.plan = plan


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def probed(
    directory: Path, sizes: Sequence[int], fractions: Sequence[float], pause: float = 0.0
) -> tuple[list[float], Reads]:
    """Save arrays of so many bytes, load them, then probe: the rates, and what was read."""
    state = {f"w{number}": np.ones(size, dtype=np.uint8) for number, size in enumerate(sizes)}
    api.save(state, checkpoint_id=directory, durable=False)
    operations = Watched(pause)
    reader = KeptReader(storage=LocalStorage(directory, operations))
    api.load(state, storage_reader=reader)
    operations.reads.clear()
    return [reader.probe_rate(reader.plan, fraction) for fraction in fractions], operations.reads


def test_a_probe_reads_so_much_at_the_place_that_was_asked_for(directory: Path) -> None:
    rates, reads = probed(directory, [3 * MIB, 4 * MIB, 5 * MIB], [0.0, 0.25, 0.5, 0.99])
    assert all(rate > 0 for rate in rates)
    assert [nbytes for _, nbytes in reads] == [PROBE_BYTES] * 4
    first = reads[0][0]
    assert [offset - first for offset, _ in reads] == [0, 3 * MIB - 1, 6 * MIB - 1, 10 * MIB]


def test_a_probe_at_the_end_of_a_file_stays_inside_it(directory: Path) -> None:
    _, reads = probed(directory, [2 * MIB, 4096], [0.0, 0.999])
    size = max(path.stat().st_size for path in directory.iterdir())
    assert [nbytes for _, nbytes in reads] == [PROBE_BYTES] * 2
    assert max(offset + nbytes for offset, nbytes in reads) == size


def test_little_is_not_probed(directory: Path) -> None:
    assert probed(directory, [MIB, MIB // 2], [0.0, 0.5]) == ([0.0, 0.0], [])
    assert probed(directory, [], [0.0]) == ([0.0], [])


def test_the_rate_is_bytes_by_seconds(directory: Path) -> None:
    [rate], _ = probed(directory, [3 * MIB], [0.0], pause=0.1)
    assert 0 < rate <= PROBE_BYTES / 0.1


class OtherReader(StorageReader):
    """Knows nothing of probes."""

    def initialize_reader(self, checkpoint_id: object = None) -> None: ...

    def load_metadata(self, rank: int | None = None, header_digest: bytes | None = None) -> Metadata:
        raise NotImplementedError

    def configure_reader(self, metadata: Metadata, context: ReadContext) -> None: ...

    def execute_read(self, *args: object, **options: object) -> None: ...

    def read_object(self, stored: object) -> bytes:
        raise NotImplementedError


def test_a_reader_that_cannot_say_how_fast_its_storage_is_need_not(directory: Path) -> None:
    class NoPlan:
        def spans(self) -> Sequence[object]:
            raise AssertionError("nobody looks")

    assert OtherReader().probe_rate(NoPlan(), 0.5) == 0.0  # type: ignore[arg-type]  # no plan is needed
