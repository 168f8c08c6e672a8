"""What a broken or malicious `.metadata` does: an error of ours, soon, in little memory, and never a wrong value."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.errors import CorruptError
from dcp_core.formats.block_container import MAX_HEADER_NBYTES, BlockContainer
from dcp_core.formats.column_codec import ColumnWriter
from dcp_core.formats.group_directory import GroupDirectory, encode_directory
from dcp_core.formats.metadata_blocks import encode_files
from dcp_core.formats.metadata_file import open_bytes, open_metadata
from dcp_core.metadata import FileColumns
from tests.core.metadata_samples import everything, replaced, small_checkpoint

SMALL = small_checkpoint().blob()
BLOCK_NAMES = ["directory.tensors", "directory.objects", "nesting", "objects.0", "tensors.0", "chunks.0", "files"]


@contextmanager
def little_memory(nbytes: int = 32 << 20) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def read_all(blob: bytes) -> list[object]:
    opened = open_bytes(blob)
    opened.columns()
    opened.file_names()
    return everything(opened)


def refused(blob: bytes, reason: str = ".") -> None:
    with little_memory(), pytest.raises(CorruptError, match=reason):
        read_all(blob)


def block_of(name: str) -> bytes:
    return BlockContainer(lambda offset, nbytes: SMALL[offset : offset + nbytes], len(SMALL)).block(name)


def test_every_bit_flip_is_noticed() -> None:
    for position in range(len(SMALL)):
        broken = bytearray(SMALL)
        broken[position] ^= 1 << position % 8
        with pytest.raises(CorruptError):
            read_all(bytes(broken))


def test_every_byte_replaced_by_any_other_is_noticed_in_the_first_kilobyte() -> None:
    for position in range(0, 1024, 7):
        for value in (0, 32, 48, 57, 125, 128, 255):
            if SMALL[position] != value:
                with pytest.raises(CorruptError):
                    read_all(SMALL[:position] + bytes([value]) + SMALL[position + 1 :])


def test_a_file_cut_anywhere_or_with_bytes_behind_it_is_refused() -> None:
    for nbytes in range(len(SMALL)):
        with pytest.raises(CorruptError):
            read_all(SMALL[:nbytes])
    refused(SMALL + b"\0", "should have")


def test_a_file_shorter_than_its_size_says_is_refused() -> None:
    with pytest.raises(CorruptError, match="ends early"):
        open_metadata(lambda offset, nbytes: SMALL[offset : offset + nbytes][:-1], len(SMALL))


class Boom:
    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return exec, ("raise SystemExit('code ran')",)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_is_refused_unopened(protocol: int) -> None:
    blob = pickle.dumps({"a": Boom(), "filler": bytes(1000)}, protocol=protocol)
    refused(blob, "is a pickle" if protocol else "was not written by this library")


@pytest.mark.parametrize(
    "blob", [b"", b"\0", bytes(8), bytes(1000), b"\xff" * 1000, b"{}" * 500, SMALL[8:], b"PK\3\4" * 50]
)
def test_an_arbitrary_file_is_refused(blob: bytes) -> None:
    refused(blob)


def sealed(text: bytes, blocks: bytes = b"") -> bytes:
    """A file with this header (its first string a place for the digest), its digest right."""
    header = len(text).to_bytes(8, "little") + text
    place = header.index(b"0" * 32)
    return header[:place] + xxhash.xxh3_128_hexdigest(header).encode() + header[place + 32 :] + blocks


PLACE = '{"__metadata__":{"header_xxh3":"' + "0" * 32 + '"'


@pytest.mark.parametrize(
    "header",
    [
        PLACE + "}}",
        PLACE + ',"block_xxh3":5}}',
        PLACE + ',"block_xxh3":"zz"}}',
        PLACE + ',"block_xxh3":""},"__metadata__":{}}',
        PLACE + ',"block_xxh3":"","block_xxh3":""}}',
        PLACE + ',"block_xxh3":"","x":1}}',
        PLACE + ',"block_xxh3":""},"a":' + "[" * 5000 + "]" * 5000 + "}",
        PLACE + ',"block_xxh3":""},"a":' + "9" * 10_000 + "}",
        PLACE + ',"block_xxh3":""},"a":{}}',
        PLACE + ',"block_xxh3":"' + "0" * 32 + '"},"a":{}}',
        PLACE + ',"block_xxh3":"' + "0" * 32 + '"},"a":[]}',
        PLACE + ',"block_xxh3":""',
        PLACE + ',"block_xxh3":"","format":"other"}}',
        PLACE + ',"block_xxh3":"","format":"dcp","version":"-1"}}',
        PLACE + ',"block_xxh3":"","format":"dcp","version":"1"}}',
    ],
)
def test_a_malformed_header_is_refused_even_with_the_right_digest(header: str) -> None:
    refused(sealed(header.encode()))


@pytest.mark.parametrize(
    ("dtype", "shape", "offsets"),
    [
        ("F32", [4], [0, 4]),
        ("U8", [2], [0, 4]),
        ("U8", [2, 2], [0, 4]),
        ("U8", [4], [-4, 0]),
        ("U8", [-4], [4, 0]),
        ("U8", [3], [1, 4]),
        ("U8", [5], [0, 5]),
        ("U8", [2**64], [0, 2**64]),
        ("U8", [4], [0, 4, 4]),
        ("U8", [4], [0.0, 4.0]),
        ("U8", [4], None),
    ],
)
def test_blocks_that_overlap_leave_holes_or_lie_outside_are_refused(
    dtype: str, shape: list[int], offsets: object
) -> None:
    entry = json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})
    refused(sealed(f'{PLACE},"block_xxh3":"{"0" * 32}"}},"a":{entry}}}'.encode(), b"1234"), "malformed")


def test_a_header_of_absurd_length_is_refused() -> None:
    for length in (2**63, 2**64 - 1, MAX_HEADER_NBYTES + 1, len(SMALL)):
        refused(length.to_bytes(8, "little") + SMALL[8:], "announces a header")
    refused(sealed((PLACE + "}}" + " " * MAX_HEADER_NBYTES).encode()), "announces a header")


@pytest.mark.parametrize("suffix", ["../../etc/x", "/etc/passwd", ".", ".abc", "." + "A" * 32, "." + "0" * 32 + "\n"])
def test_a_suffix_that_leads_elsewhere_is_refused(suffix: str) -> None:
    refused(replaced(SMALL, {}, {"suffix": suffix}), "suffix")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("save_id", "x" * 32),
        ("save_id", ""),
        ("rank", "-1"),
        ("rank", "\u0661"),
        ("world_size", ""),
        ("world_size", "9" * 5000),
        ("version", "one"),
        ("format", "torch"),
    ],
)
def test_a_header_string_that_makes_no_sense_is_refused(key: str, value: str) -> None:
    refused(replaced(SMALL, {}, {key: value}))


@pytest.mark.parametrize("name", BLOCK_NAMES)
def test_a_block_cut_anywhere_is_refused_even_with_the_right_digest(name: str) -> None:
    block = block_of(name)
    for nbytes in range(len(block)):
        refused(replaced(SMALL, {name: block[:nbytes]}))
    refused(replaced(SMALL, {name: block + b"\0"}), "follow")


@given(
    st.sampled_from(BLOCK_NAMES),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_forged_blocks_raise_nothing_but_corrupt_and_take_little_memory(
    name: str, edits: list[tuple[int, int]]
) -> None:
    block = bytearray(block_of(name))
    for position, value in edits:
        block[position % len(block)] = value
    forged = replaced(SMALL, {name: bytes(block)})
    with little_memory(256 << 20):
        try:
            read_all(forged)
        except CorruptError:
            return


@pytest.mark.parametrize(
    "directory",
    [
        GroupDirectory(["a"], np.array([2**26]), np.array([2**26]), np.array([0])),
        GroupDirectory(["empty"], np.array([7]), np.array([8]), np.array([2**27])),
        GroupDirectory(["empty"], np.array([7]), np.array([9]), np.array([15])),
        GroupDirectory(["empty"], np.array([8]), np.array([8]), np.array([15])),
        GroupDirectory(["empty"], np.array([9]), np.array([8]), np.array([15])),
        GroupDirectory(["a"], np.array([7]), np.array([8]), np.array([15])),
        GroupDirectory(["empty", "f"], np.array([7, 1]), np.array([8, 1]), np.array([15, 0])),
        GroupDirectory(["f", "empty"], np.array([7, 1]), np.array([8, 1]), np.array([15, 0])),
        GroupDirectory(["empty", "zz"], np.array([7, 1]), np.array([8, 1]), np.array([15, 0])),
    ],
)
def test_a_directory_that_says_other_than_the_groups_is_refused(directory: GroupDirectory) -> None:
    refused(replaced(SMALL, {"directory.tensors": encode_directory(directory)}))


def test_a_directory_of_absurd_counts_is_refused() -> None:
    for groups in (1025, 2**40, 2**64 - 1):
        writer = ColumnWriter()
        writer.count(groups)
        refused(replaced(SMALL, {"directory.tensors": writer.to_bytes() + block_of("directory.tensors")[8:]}))


@pytest.mark.parametrize("depth", [9, 64])
def test_tensors_of_many_dimensions_are_refused_before_they_take_a_place_each(depth: int) -> None:
    """A few bytes announce as many tensors as take memory for all their dimensions."""
    count = (8 << 22) // depth + 1
    directory = encode_directory(GroupDirectory(["a"], np.array([1]), np.array([count]), np.array([0])))
    writer = ColumnWriter()
    writer.integers(np.array([count]))
    writer.texts(["a"])
    writer.strings([b"path"])
    for value in (0, 1, depth):  # whose they are, types, dimensions: one number for all takes no bytes
        writer.integers(np.full(count, value))
    forged = replaced(SMALL, {"directory.tensors": directory, "tensors.0": writer.to_bytes()})
    with little_memory(22 * count + (8 << 20)), pytest.raises(CorruptError, match="too many in one group"):
        read_all(forged)


def test_a_name_table_of_a_gigabyte_is_refused() -> None:
    names = ColumnWriter()
    names.integers(np.ones(8, dtype=np.int64))
    names.integers(np.full(8, 2**27))
    names.blob(bytes(100))
    forged = names.to_bytes()
    huge = forged[:-17] + forged[-17:].replace((100).to_bytes(8, "little"), (2**30).to_bytes(8, "little"))
    refused(replaced(SMALL, {"tensors.0": huge}))


def forged_files(**columns: Any) -> bytes:
    return replaced(SMALL, {"files": encode_files(replace(small_checkpoint().files(), **columns))})


def test_files_that_contradict_themselves_are_refused() -> None:
    files: FileColumns = small_checkpoint().files()
    refused(forged_files(rank=files.rank[::-1]), "order")
    refused(forged_files(rank=np.zeros_like(files.rank), kind=np.zeros_like(files.kind)), "order")
    refused(forged_files(rank=files.rank - 1), "outside")
    refused(forged_files(nbytes=files.data_start - 1), "outside it")
    refused(forged_files(data_start=-files.data_start), "outside")
    refused(forged_files(field_start=files.data_start), "outside it")
    refused(forged_files(field_nbytes=files.field_nbytes + 2**61), "outside it")
    refused(forged_files(digest=files.digest[:-1]), "digests")
    refused(forged_files(kind=files.kind + 1), "outside")


def test_chunks_outside_their_file_are_refused() -> None:
    files = small_checkpoint().files()
    refused(forged_files(nbytes=files.nbytes - 1), "outside the data of file")
    refused(forged_files(kind=np.ones_like(files.kind)), "outside the data of file")
    fewer = FileColumns(*(getattr(files, name)[:3] for name in FileColumns.__slots__))
    refused(replaced(SMALL, {"files": encode_files(fewer)}))
    refused(forged_files(kind=np.zeros_like(files.kind)), "no .bytes file")


def forged_spans(file: list[int], byte_offset: list[int]) -> bytes:
    """The sample with other `file` and `byte_offset` columns, which are the last two of the block."""
    columns = small_checkpoint().columns().chunks
    files, starts = columns.file.copy(), columns.byte_offset.copy()
    files[: len(file)] = file
    starts[: len(byte_offset)] = byte_offset
    kept, honest = ColumnWriter(), ColumnWriter()
    for writer, values in ((honest, (columns.file, columns.byte_offset)), (kept, (files, starts))):
        for column in values:
            writer.integers(column, delta=True)
    block = block_of("chunks.0")
    assert block.endswith(honest.to_bytes())
    return replaced(SMALL, {"chunks.0": block[: -len(honest.to_bytes())] + kept.to_bytes()})


def test_chunks_that_overlap_or_lie_before_or_beyond_their_file_are_refused() -> None:
    assert read_all(forged_spans([], [])) == everything(small_checkpoint().source())
    refused(forged_spans([], [4]), "overlap")
    refused(forged_spans([], [-4]), "outside")
    refused(forged_spans([], [2**61]), "outside")
    refused(forged_spans([99], []), "lies in file 99")
    refused(forged_spans([-1], []), "outside")


def grid_block(cells: list[int], extents: list[int], is_grid: list[int] | None = None) -> bytes:
    """A chunks block for the sample whose grids are these."""
    writer = ColumnWriter()
    writer.integers(np.array(is_grid if is_grid is not None else [0, 1, 0, 1, 1, 1, 1, 1]))
    writer.integers(np.array(cells))
    writer.integers(np.array(extents, dtype=np.int64))
    for column in ([0, 3], [2, 3], [], [], [0] * 15, [0] * 15):
        writer.integers(np.array(column, dtype=np.int64))
    return replaced(SMALL, {"chunks.0": writer.to_bytes()})


def test_grids_that_contradict_shape_or_chunks_are_refused() -> None:
    refused(grid_block([2, 3, 1, 1, 2, 1, 2, 1], [2, 2, 1, 2, 2]), "overlap")
    refused(grid_block([3, 3, 1, 1, 2, 1, 2, 1], [1, 1, 2, 1, 2, 2]), "not as many")
    refused(grid_block([1, 4, 1, 1, 2, 1, 2, 1], [2, 1, 1, 2, 2]), "not as many")
    refused(grid_block([14] * 8, [1] * 100), "not as many")
    refused(grid_block([2, 3, 1, 1, 2, 1, 2, 1], [4, 2, 1, 2, 2]), "do not fit")
    refused(grid_block([2, 3, 1, 1, 2, 1, 2, 1], [2, 2**62 - 1, 1, 2, 2]), "do not fit")
    refused(grid_block([2, 3, 1, 1, 2, 1, 2, 1], [2, 0, 1, 2, 2]), "outside")
    refused(grid_block([1] * 10, [], [1] * 8))


def with_column(name: str, honest: Any, forged: Any, *, delta: bool = False) -> bytes:
    """The sample with other values in a column of one of its blocks."""
    written, lying = ColumnWriter(), ColumnWriter()
    written.integers(np.asarray(honest), delta=delta)
    lying.integers(np.asarray(forged), delta=delta)
    block = block_of(name)
    assert block.count(written.to_bytes()) == 1
    return replaced(SMALL, {name: block.replace(written.to_bytes(), lying.to_bytes())})


def test_a_shape_whose_bytes_overflow_is_refused() -> None:
    honest = [0, 3, 4, 6, 6, 8, 8, 4, 6, 4, 6]
    refused(with_column("tensors.0", honest, [0, 3, 2**40, 2**40, *honest[4:]]), "too large")


@pytest.mark.parametrize("code", [0, 23, 127, 255, 256, -1])
def test_a_type_that_nobody_knows_is_refused(code: int) -> None:
    honest = small_checkpoint().columns().tensors.dtype.astype(np.int64)
    for row in range(len(honest)):
        forged = honest.copy()
        forged[row] = code
        refused(with_column("tensors.0", honest, forged), "dtype code|outside")


@pytest.mark.parametrize("file", [-1, 8, 99, 2**31 - 1, 2**40])
def test_an_object_in_a_file_that_is_not_there_is_refused(file: int) -> None:
    honest = small_checkpoint().columns().objects.file.astype(np.int64)
    assert int(honest.max()) < len(small_checkpoint().files()) == 8
    for row in range(len(honest)):
        forged = honest.copy()
        forged[row] = file
        refused(with_column("objects.0", honest, forged, delta=True), "no .bytes file|outside")
