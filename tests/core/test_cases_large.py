"""A tensor and a file beyond 2 and 4 GiB, end to end, in little memory: what is zero takes none, nor space on disk."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dcp_core import api
from dcp_core.box import Box
from dcp_core.errors import CorruptError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.inspection.verify import verify
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import BytesLike, FileOperations

GIBIBYTE = 1 << 30
ROW_BYTES = 1 << 20
ROWS = 4 * 1024 + 37
"""Rows of 1 MiB: a little more than 4 GiB."""

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Linux; Python has no name for it before 3.13
_MARKED = [0, 1, 2047, 2048, 2049, 4094, 4095, 4096, 4097, ROWS - 1]


class _Sparse(FileOperations):
    """Writes no zeros: the file has its size already, so that they are there without taking space."""

    def __init__(self) -> None:
        self.written_nbytes = 0

    def preallocate(self, descriptor: int, nbytes: int, path: str) -> None:
        os.ftruncate(descriptor, nbytes)

    def pwritev(self, descriptor: int, buffers: Sequence[BytesLike], offset: int, path: str) -> int:
        first = memoryview(buffers[0]).cast("B")
        if not np.frombuffer(first[:: max(len(first) // 64, 1)].tobytes(), np.uint8).any() and not _any(first):
            return len(first)
        self.written_nbytes += len(first)
        return super().pwritev(descriptor, [first], offset, path)


def _any(content: memoryview) -> bool:
    whole = len(content) // 8 * 8
    return bool(np.frombuffer(content[:whole], np.uint64).any()) or any(content[whole:])


@pytest.fixture
def large() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """More than 4 GiB, of which some rows are not zero; what was never written takes no memory."""
    untouched = mmap.mmap(-1, ROWS * ROW_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    untouched.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(untouched, np.uint8).reshape(ROWS, ROW_BYTES)
    for row in _MARKED:
        array[row, :16] = row % 251 + 1
        array[row, -16:] = row % 241 + 2
    return array


def test_a_tensor_and_a_file_beyond_4_gib_keep_every_byte(
    large: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], tmp_path: Path
) -> None:
    operations = _Sparse()
    writer = FileSystemWriter(storage=LocalStorage(tmp_path / "step", operations))
    api.save({"large": large, "after": np.arange(5.0)}, storage_writer=writer, durable=False)
    file = max((tmp_path / "step").glob("_rank0_*.safetensors"), key=lambda path: path.stat().st_size)
    about = file.stat()
    assert about.st_size > 4 * GIBIBYTE + ROW_BYTES
    if about.st_blocks * 512 > GIBIBYTE:
        pytest.skip("the file system has no sparse files")
    for first in (0, 2046, 4093, ROWS - 3):
        rows = slice(first, min(first + 5, ROWS))
        box = Box(offsets=(rows.start, 0), sizes=(rows.stop - rows.start, ROW_BYTES))
        assert np.array_equal(api.read(tmp_path / "step", "large", box), large[rows]), first
    assert np.array_equal(api.read(tmp_path / "step", "after"), np.arange(5.0))
    with open(file, "r+b") as opened:  # a byte far behind 4 GiB
        opened.seek(about.st_size - ROW_BYTES // 2 - 100)
        opened.write(b"\x01")
    damaged = Box(offsets=(ROWS - 1, 0), sizes=(1, ROW_BYTES))
    with pytest.raises(CorruptError, match=re.escape(file.name)):
        api.read(tmp_path / "step", "large", damaged)
    report = verify(tmp_path / "step")
    assert [problem.file for problem in report.problems] == [file.name], report
