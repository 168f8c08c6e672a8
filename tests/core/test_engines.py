"""What the write engine puts into a data file, any region of it comes back by the read engine, checked."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from dcp_core.arrays import ArrayAccess
from dcp_core.box import Box, slices
from dcp_core.dtype import BY_NAME, DTYPES, DType, dtype_named
from dcp_core.errors import (
    CorruptError,
    DcpError,
    DTypeMismatchError,
    IncompleteError,
    PlanningError,
    ShapeMismatchError,
    StorageError,
    UnsupportedValueError,
)
from dcp_core.execution.data_files import TensorFiles
from dcp_core.execution.filesystem import file_columns
from dcp_core.execution.interfaces import FileRecord, ReadContext, Verify, WriteContext, WriteResult
from dcp_core.execution.read_engine import read_tensors
from dcp_core.execution.read_requests import TASK_BYTES
from dcp_core.execution.write_engine import write_files
from dcp_core.formats.checksums import BLOCK_BYTES
from dcp_core.metadata import MetadataIndex, SaveRecord
from dcp_core.planning.items import ItemType, ReadItem
from dcp_core.storage.local import LocalStorage
from tests.core.engine_fakes import (
    SAVE_ID,
    Array,
    ArraySource,
    CountingStorage,
    DeviceAccess,
    Region,
    Span,
    ViewTarget,
    bits_of,
    same,
    spans_of,
)


@dataclass
class Checkpoint:
    """One data file, and how to read it."""

    storage: CountingStorage
    spans: list[Span]
    record: FileRecord

    @property
    def path(self) -> Path:
        return Path(self.storage.path, "_rank0_.safetensors")

    def region(self, number: int, row: int, box: Box, target_dtype: DType | None = None) -> Region:
        span = self.spans[row]
        item = ReadItem(
            ItemType.TENSOR,
            MetadataIndex("wanted", None, number),
            box.offsets,
            MetadataIndex(span.key),
            box.offsets,
            box.sizes,
        )
        sizes = span.item.sizes
        return Region(item, 0, span.byte_offset, sizes, span.dtype, target_dtype or span.dtype)

    def read(self, regions: Sequence[Region], target: ViewTarget, verify: Verify = True) -> None:
        columns = file_columns([WriteResult(0, (self.record,), 0.0, 0)])
        files = TensorFiles(self.storage, columns, SaveRecord(SAVE_ID, ""), verify=verify is not False)
        with files:
            read_tensors(files, ReadContext(0, 1, verify), regions, target)

    def read_all(self, verify: Verify = True) -> list[Array]:
        """Every chunk whole, into fresh arrays."""
        arrays = [np.full(span.item.sizes, 0x55).astype(span.dtype.bits) for span in self.spans]
        target = ViewTarget(arrays, [ArrayAccess(span.dtype) for span in self.spans])
        regions = [self.region(i, i, Box.whole(span.item.sizes)) for i, span in enumerate(self.spans)]
        self.read(regions, target, verify)
        assert target.applied == list(range(len(self.spans)))
        return arrays


def saved(directory: Path, values: Mapping[str, tuple[Array, DType]], rank: int = 0) -> Checkpoint:
    storage = CountingStorage(directory)
    context = WriteContext(rank, rank + 1, True, SAVE_ID, "", durable=False)
    spans = spans_of(values)
    source = ArraySource({key: array for key, (array, _) in values.items()})
    return Checkpoint(storage, spans, write_files(storage, context, spans, (), source)[0])


# --- whole chunks ------------------------------------------------------------------------------------


def test_every_dtype_comes_back_bit_for_bit_and_opens_with_safetensors(tmp_path: Path) -> None:
    values = {
        f"{dtype.name}{shape}": (bits_of(shape, dtype), dtype)
        for dtype, shape in itertools.product(DTYPES, [(), (1,), (3, 5), (2, 1, 4)])
    }
    checkpoint = saved(tmp_path, values)
    for found, (expected, _) in zip(checkpoint.read_all(), values.values(), strict=True):
        assert same(found, expected)
    with safe_open(checkpoint.path, framework="numpy") as opened:
        assert set(opened.keys()) == set(values)
        for key, (expected, dtype) in values.items():
            shape = [*expected.shape, *dtype.file_tail]
            assert opened.get_slice(key).get_shape() == shape
            if dtype.numpy is not None:
                assert opened.get_tensor(key).tobytes() == expected.tobytes()


@pytest.mark.parametrize("verify", [True, False, "full"])
def test_chunks_of_any_length_come_back(verify: Verify, tmp_path: Path) -> None:
    uint8 = dtype_named("uint8")
    lengths = [1, 7, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 2 * TASK_BYTES + 12345, 3]
    values = {f"k{i}": (bits_of((length,), uint8, i), uint8) for i, length in enumerate(lengths)}
    for found, (expected, _) in zip(saved(tmp_path, values).read_all(verify), values.values(), strict=True):
        assert same(found, expected)


def test_many_small_chunks_are_gathered_and_come_back(tmp_path: Path) -> None:
    dtype = dtype_named("float32")
    values = {f"k{i}": (bits_of((i % 17 + 1,), dtype, i), dtype) for i in range(3000)}
    for found, (expected, _) in zip(saved(tmp_path, values).read_all(), values.values(), strict=True):
        assert same(found, expected)


def strided_views(base: Array) -> dict[str, Array]:
    return {
        "transposed": base.transpose(),
        "channels last": base.transpose(1, 2, 0),
        "every other": base[:, ::2, 1:],
        "reversed": base[::-1, :, ::-1],
        "expanded": np.broadcast_to(base[:1], base.shape),
        "column": base[:, 1, 1],
        "0-d": base[1, 2, 3],
    }


@pytest.mark.parametrize("shape", [(4, 6, 5), (70, 90, 80)])
def test_non_contiguous_sources_are_written_by_their_logical_values(shape: tuple[int, ...], tmp_path: Path) -> None:
    dtype = dtype_named("float64")
    views = strided_views(bits_of(shape, dtype))
    values = {key: (np.asarray(view), dtype) for key, view in views.items()}
    for found, view in zip(saved(tmp_path, values).read_all(), views.values(), strict=True):
        assert same(found, np.asarray(view))


@pytest.mark.parametrize("shape", [(4, 6, 5), (70, 90, 80)])
@pytest.mark.parametrize("verify", [True, False, "full"])
def test_non_contiguous_targets_are_filled_and_their_surroundings_left_alone(
    shape: tuple[int, ...], verify: Verify, tmp_path: Path
) -> None:
    dtype = dtype_named("float64")
    for number, name in enumerate(strided_views(np.zeros(shape))):
        if name in ("expanded", "0-d"):
            continue
        base = bits_of(shape, dtype, 1)
        expected_base = base.copy()
        target, expected_target = strided_views(base)[name], strided_views(expected_base)[name]
        new = bits_of(target.shape, dtype, 2)
        expected_target[...] = new
        (tmp_path / str(number)).mkdir()
        checkpoint = saved(tmp_path / str(number), {"a": (new, dtype)})
        whole = checkpoint.region(0, 0, Box.whole(target.shape))
        checkpoint.read([whole], ViewTarget([target], [ArrayAccess(dtype)]), verify)
        assert same(base, expected_base)


def test_a_target_out_of_the_hosts_reach_is_filled_by_copies(tmp_path: Path) -> None:
    dtype = dtype_named("int32")
    source = bits_of((300, 7000), dtype)
    checkpoint = saved(tmp_path, {"a": (source, dtype)})
    for box in (Box((0, 0), (300, 7000)), Box((3, 10), (280, 6000)), Box((299, 6999), (1, 1)), Box((5, 0), (9, 7000))):
        view = np.zeros(box.sizes, np.int32)
        checkpoint.read([checkpoint.region(0, 0, box)], ViewTarget([view], [DeviceAccess(dtype)]))
        assert same(view, source[slices(box)])


def test_another_dtype_is_converted_by_the_access(tmp_path: Path) -> None:
    source = np.arange(2_000_000, dtype=np.float32).reshape(2000, 1000) / 7
    checkpoint = saved(tmp_path, {"a": (source, BY_NAME["float32"])})
    for box in (Box((0, 0), (2000, 1000)), Box((3, 4), (1990, 900)), Box((7, 8), (1, 1))):
        view = np.zeros(box.sizes, np.float64)
        region = checkpoint.region(0, 0, box, BY_NAME["float64"])
        checkpoint.read([region], ViewTarget([view], [ArrayAccess()]))
        assert np.array_equal(view, source[slices(box)].astype(np.float64))


def test_a_zero_d_target_of_another_dtype_is_converted_too(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"a": (np.array(5.0, np.float32), BY_NAME["float32"])})
    view = np.zeros((), np.float64)
    region = checkpoint.region(0, 0, Box((), ()), BY_NAME["float64"])
    checkpoint.read([region], ViewTarget([view], [ArrayAccess()]))
    assert view == 5.0


# --- regions -----------------------------------------------------------------------------------------

_shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@st.composite
def chunk_and_region(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(_shapes)
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, offsets, strict=True))
    return shape, Box(offsets, sizes)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Array]:
    dtype = dtype_named("int16")
    source = bits_of((40, 30, 3000), dtype)
    odd = bits_of((3,), dtype_named("uint8"))
    return saved(tmp_path_factory.mktemp("big"), {"odd": (odd, dtype_named("uint8")), "a": (source, dtype)}), source


@pytest.mark.parametrize("verify", [True, False, "full"])
@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0, 0), (40, 30, 3000)),
        Box((7, 0, 0), (20, 30, 3000)),
        Box((7, 3, 0), (20, 20, 3000)),
        Box((7, 3, 100), (20, 20, 2000)),
        Box((0, 0, 2999), (40, 30, 1)),
        Box((39, 29, 2999), (1, 1, 1)),
        Box((3, 0, 0), (1, 30, 3000)),
        Box((0, 10, 0), (40, 1, 3000)),
    ],
    ids=str,
)
def test_any_region_comes_back_and_lands_in_any_layout(big: tuple[Checkpoint, Array], box: Box, verify: Verify) -> None:
    checkpoint, source = big
    expected = source[slices(box)]
    plain = np.zeros(box.sizes, np.int16)
    wider = np.zeros((box.sizes[0], box.sizes[1] + 1, box.sizes[2] + 2), np.int16)
    inner = wider[:, 1:, 1:-1]
    turned = np.zeros(box.sizes[::-1], np.int16).T
    device = np.zeros(box.sizes, np.int16)
    dtype = dtype_named("int16")
    views = [plain, inner, turned, device]
    target = ViewTarget(views, [ArrayAccess(dtype)] * 3 + [DeviceAccess(dtype)])
    checkpoint.read([checkpoint.region(i, 1, box) for i in range(4)], target, verify)
    for view in views:
        assert same(view, expected)
    assert not wider[:, 0].any()
    assert not wider[:, :, 0].any()
    assert not wider[:, :, -1].any()


@given(chunk_and_region(), st.integers(0, 2**32 - 1), st.sampled_from([True, False, "full"]))
def test_small_regions_come_back_whatever_their_shape(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], Box], seed: int, verify: Verify
) -> None:
    shape, box = case
    dtype = random.Random(seed).choice(DTYPES)
    source = bits_of(shape, dtype, seed)
    checkpoint = saved(tmp_path_factory.mktemp("small"), {"a": (source, dtype)})
    view = np.zeros(box.sizes[::-1], dtype.bits).T
    checkpoint.read([checkpoint.region(0, 0, box)], ViewTarget([view], [ArrayAccess(dtype)]), verify)
    assert same(view, source[slices(box)])


def test_only_the_bytes_that_are_needed_are_read(big: tuple[Checkpoint, Array]) -> None:
    checkpoint, _ = big
    header = checkpoint.record.data_start
    cases: list[tuple[Box, Verify, float]] = [
        (Box((10, 0, 0), (2, 30, 3000)), True, 2 * 30 * 3000 * 2),
        (Box((10, 0, 0), (2, 30, 3000)), "full", 2 * BLOCK_BYTES),
        (Box((0, 0, 0), (40, 15, 3000)), True, 1.1 * 40 * 15 * 3000 * 2),
    ]
    for box, verify, limit in cases:
        checkpoint.storage.nbytes_read = 0
        view = np.zeros(box.sizes, np.int16)
        target = ViewTarget([view], [ArrayAccess(dtype_named("int16"))])
        checkpoint.read([checkpoint.region(0, 1, box)], target, verify)
        assert checkpoint.storage.nbytes_read <= limit + header


# --- damage ------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_a_file_is_noticed_when_blocks_are_read_whole(tmp_path: Path) -> None:
    float32 = BY_NAME["float32"]
    values = {"a": (bits_of((5, 3), float32), float32), "b": (bits_of((3,), BY_NAME["uint8"]), BY_NAME["uint8"])}
    checkpoint = saved(tmp_path, values)
    good = checkpoint.path.read_bytes()
    for position in range(len(good)):
        broken = bytearray(good)
        broken[position] ^= 0x10
        checkpoint.path.write_bytes(broken)
        with pytest.raises(CorruptError, match="_rank0_.safetensors"):
            checkpoint.read_all()
    checkpoint.path.write_bytes(good)
    checkpoint.read_all()


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_byte_in_a_block_read_in_part_is_noticed_on_request_only(tmp_path: Path) -> None:
    dtype = dtype_named("uint8")
    source = bits_of((3 * BLOCK_BYTES,), dtype)
    checkpoint = saved(tmp_path, {"a": (source, dtype)})
    flip(checkpoint.path, checkpoint.record.data_start + 10)

    def read(start: int, length: int, verify: Verify) -> Array:
        view = np.zeros(length, np.uint8)
        region = checkpoint.region(0, 0, Box((start,), (length,)))
        checkpoint.read([region], ViewTarget([view], [ArrayAccess()]), verify)
        return view

    assert same(read(20, BLOCK_BYTES, True), source[20 : 20 + BLOCK_BYTES])
    assert same(read(BLOCK_BYTES, 2 * BLOCK_BYTES, "full"), source[BLOCK_BYTES:])
    with pytest.raises(CorruptError, match="rank 0"):
        read(20, 5, "full")
    with pytest.raises(CorruptError, match="^a: "):
        read(0, BLOCK_BYTES, True)
    assert not same(read(0, BLOCK_BYTES, False), source[:BLOCK_BYTES])


def test_inner_slices_notice_a_flipped_byte_in_full_mode(tmp_path: Path) -> None:
    dtype = dtype_named("uint8")
    source = bits_of((30, 200_000), dtype)
    checkpoint = saved(tmp_path, {"a": (source, dtype)})
    box = Box((2, 1000), (20, 100_000))
    view = np.zeros(box.sizes, np.uint8)
    target = ViewTarget([view], [ArrayAccess()])
    checkpoint.read([checkpoint.region(0, 0, box)], target, "full")
    assert same(view, source[slices(box)])
    flip(checkpoint.path, checkpoint.record.data_start + 5 * 200_000 + 150_000)
    checkpoint.read([checkpoint.region(0, 0, box)], target, True)
    with pytest.raises(CorruptError):
        checkpoint.read([checkpoint.region(0, 0, box)], target, "full")


def test_a_short_a_longer_or_a_missing_file_is_an_error_before_any_target_is_touched(tmp_path: Path) -> None:
    dtype = dtype_named("uint8")
    checkpoint = saved(tmp_path, {"a": (bits_of((100,), dtype), dtype)})
    good = checkpoint.path.read_bytes()
    for content in (good[:-1], b"", good + b"x", None):
        checkpoint.path.unlink()
        if content is not None:
            checkpoint.path.write_bytes(content)
        for verify in (True, False, "full"):
            view = np.zeros(100, np.uint8)
            target = ViewTarget([view], [ArrayAccess()])
            region = checkpoint.region(0, 0, Box((0,), (100,)))
            expected = "is missing" if content is None else f"has {len(content)} bytes, expected {len(good)}"
            with pytest.raises(IncompleteError, match=f"_rank0_.safetensors {expected}"):
                checkpoint.read([region], target, verify)
            assert not view.any()
            assert not target.applied
        checkpoint.path.touch()


@pytest.mark.parametrize("verify", [True, False, "full"])
def test_another_saves_file_of_the_same_size_is_refused(verify: Verify, tmp_path: Path) -> None:
    dtype = dtype_named("uint8")
    checkpoint = saved(tmp_path, {"a": (bits_of((100,), dtype), dtype)})
    content = checkpoint.path.read_bytes().replace(SAVE_ID.encode(), b"f" * 32)
    checkpoint.path.write_bytes(content)
    view = np.zeros(100, np.uint8)
    with pytest.raises(CorruptError, match="belongs to the save"):
        checkpoint.read([checkpoint.region(0, 0, Box((0,), (100,)))], ViewTarget([view], [ArrayAccess()]), verify)
    assert not view.any()


def test_a_chunk_that_the_file_does_not_have_is_refused(tmp_path: Path) -> None:
    dtype = dtype_named("uint8")
    checkpoint = saved(tmp_path, {"a": (bits_of((100,), dtype), dtype)})
    view = np.zeros(50, np.uint8)
    region = checkpoint.region(0, 0, Box((0,), (50,)))
    target = ViewTarget([view], [ArrayAccess()])
    with pytest.raises(CorruptError, match="has no chunk"):
        checkpoint.read([Region(region.item, 0, 10, (50,), dtype, dtype)], target)
    with pytest.raises(IncompleteError, match="outside of _rank0_.safetensors"):
        checkpoint.read([Region(region.item, 0, 60, (50,), dtype, dtype)], target)
    with pytest.raises(PlanningError, match="outside of its chunk"):
        checkpoint.read([Region(region.item, 0, 0, (49,), dtype, dtype)], target)
    assert not view.any()


# --- what the planner gives --------------------------------------------------------------------------


def test_an_array_of_another_kind_than_planned_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    context = WriteContext(0, 1, True, SAVE_ID, "", durable=False)
    spans = spans_of({"a": (np.zeros((2, 3), np.float32), BY_NAME["float32"])})
    for value, error in (
        (np.zeros((2, 3), np.int32), DTypeMismatchError),
        (np.zeros((2, 3), ">f4"), DTypeMismatchError),
        (np.zeros((3, 2), np.float32), ShapeMismatchError),
        (b"bytes", UnsupportedValueError),
    ):
        with pytest.raises(error, match="^a on rank 0: "):
            write_files(storage, context, spans, (), ArraySource({"a": value}))
        assert storage.list() == []


def test_a_target_of_another_shape_is_refused(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"a": (np.zeros((2, 3), np.float32), BY_NAME["float32"])})
    region = checkpoint.region(0, 0, Box((0, 0), (2, 3)))
    with pytest.raises(ShapeMismatchError, match="acquire_tensor"):
        checkpoint.read([region], ViewTarget([np.zeros((3, 2), np.float32)], [ArrayAccess()]))


def test_a_file_that_exists_is_never_written_over(tmp_path: Path) -> None:
    values = {"a": (np.zeros(3, np.float32), BY_NAME["float32"])}
    checkpoint = saved(tmp_path, values)
    before = checkpoint.path.read_bytes()
    with pytest.raises(StorageError):
        saved(tmp_path, values)
    assert checkpoint.path.read_bytes() == before


def test_an_empty_region_touches_nothing_and_is_applied(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"a": (np.ones((2, 3), np.float32), BY_NAME["float32"])})
    target = ViewTarget([np.zeros((2, 0), np.float32)], [ArrayAccess()])
    checkpoint.read([checkpoint.region(0, 0, Box((0, 1), (2, 0)))], target)
    assert target.applied == [0]


# --- limits ------------------------------------------------------------------------------------------


def test_memory_above_the_state_stays_small(tmp_path: Path) -> None:
    dtype = dtype_named("float32")
    source = bits_of((3000, 5000), dtype)
    target = np.zeros((5000, 3000), np.float32).T
    contiguous = np.zeros((3000, 5000), np.float32)
    tracemalloc.start()
    try:
        checkpoint = saved(tmp_path, {"a": (source, dtype), "b": (source.T, dtype)})
        views = [target, contiguous, target]
        regions = [
            checkpoint.region(0, 0, Box((0, 0), (3000, 5000))),
            checkpoint.region(1, 0, Box((0, 0), (3000, 5000))),
            checkpoint.region(2, 0, Box((0, 0), (3000, 5000))),
        ]
        accesses = [ArrayAccess(dtype), ArrayAccess(dtype), DeviceAccess(dtype)]
        checkpoint.read(regions, ViewTarget(views, accesses), "full")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert same(target, source)
    assert same(contiguous, source)
    assert peak <= 24 << 20


def test_a_chunk_and_a_file_beyond_4_gib_are_read_at_the_right_places(tmp_path: Path) -> None:
    """A sparse file: only its header and a few bytes at the end exist."""
    dtype = dtype_named("uint8")
    checkpoint = saved(tmp_path, {"a": (bits_of((8,), dtype), dtype)})
    sizes = (5, 1 << 30)
    start, data_start = 4 * (1 << 30), checkpoint.record.data_start
    with checkpoint.path.open("r+b") as file:
        file.truncate(data_start + 5 * (1 << 30))
        file.seek(data_start + start + 77)
        file.write(b"found")
    fields = {name: getattr(checkpoint.record, name) for name in FileRecord.__slots__}
    checkpoint.record = FileRecord(**{**fields, "nbytes": data_start + 5 * (1 << 30)})
    view = np.zeros((1, 7), np.uint8)
    region = checkpoint.region(0, 0, Box((4, 76), (1, 7)))
    big_region = Region(region.item, 0, 0, sizes, dtype, dtype)
    checkpoint.read([big_region], ViewTarget([view], [ArrayAccess()]), verify=False)
    assert view.tobytes() == b"\0found\0"


def test_a_result_travels_in_120_bytes() -> None:
    files = (
        FileRecord(70_000, 0, 0, 1 << 50, 1 << 26, 131, 12345, 2**128 - 3),
        FileRecord(70_000, 3, 1, 1 << 33, 1 << 33, 16, 16, 5),
    )
    result = WriteResult(70_000, files, 12.25, 1 << 50)
    raw = result.to_bytes()
    assert len(raw) <= 120
    assert WriteResult.from_bytes(raw) == result
    assert WriteResult.from_bytes(WriteResult(0, (), 0.5, 0).to_bytes()) == WriteResult(0, (), 0.5, 0)
    for junk in (b"", raw[:-1], raw + b"x"):
        with pytest.raises(DcpError):
            WriteResult.from_bytes(junk)
