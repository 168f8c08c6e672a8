"""Random checkpoints as metadata columns, built one Python object at a time: the oracle of the metadata tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
from hypothesis import strategies as st

from dcp_core.dtype import BY_CODE, DTYPES
from dcp_core.formats.block_container import Block, BlockContainer, build_container
from dcp_core.formats.metadata_file import ColumnsSource, MetadataColumns, assemble, encode_body
from dcp_core.metadata import (
    EVERY_RANK,
    ChunkColumns,
    FileColumns,
    MetadataSource,
    Nesting,
    ObjectColumns,
    SaveRecord,
    TensorColumns,
    WriterRecord,
)
from dcp_core.state_path import PathKey, encode_path

SAVE_ID = "0123456789abcdef" * 2
SAVE = SaveRecord(SAVE_ID, "." + SAVE_ID)
WRITER = WriterRecord("dcp 0.1", "torch", "2.13", 4)
DATA_START = 4096

Cells = list[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...]
    boxes: Cells
    dtype: int = 12
    rank: int = EVERY_RANK
    files: list[int] = field(default_factory=list)
    byte_offsets: list[int] = field(default_factory=list)

    def nbytes(self, box: int) -> int:
        return int(np.prod(self.boxes[box][1], dtype=np.int64)) * BY_CODE[self.dtype].itemsize


@dataclass
class Checkpoint:
    tensors: list[Tensor]
    objects: list[tuple[str, int, bool, int]]
    """Name, rank, per_rank, writing rank."""
    ranks: int
    containers: dict[bytes, str] = field(default_factory=dict)
    save: SaveRecord = SAVE
    writer: WriterRecord = WRITER

    def place(self) -> None:
        """Lay all chunks back to back in the files that they name."""
        ends = [0] * self.ranks
        for tensor in self.tensors:
            tensor.byte_offsets = []
            for box, file in enumerate(tensor.files):
                tensor.byte_offsets.append(ends[file])
                ends[file] += tensor.nbytes(box)

    def columns(self) -> MetadataColumns:
        objects = sorted(self.objects, key=lambda entry: (entry[0].encode(), entry[1]))
        object_columns = ObjectColumns(
            [entry[0] for entry in objects],
            [path_of(entry[0]) for entry in objects],
            np.array([entry[1] for entry in objects], dtype=np.int32),
            np.array([entry[2] for entry in objects], dtype=np.uint8),
            np.array([self.ranks + entry[3] for entry in objects], dtype=np.int32),
            np.arange(len(objects), dtype=np.int32),
        )
        containers = tuple(sorted(self.containers.items()))
        return MetadataColumns(*tensor_columns(self.tensors), object_columns, Nesting(containers))

    def files(self) -> FileColumns:
        """`ranks` tensor files, then as many object files (as parts, so that the order is by rank, kind, part)."""
        count = 2 * self.ranks
        ends = [0] * self.ranks
        for tensor in self.tensors:
            for box, (file, start) in enumerate(zip(tensor.files, tensor.byte_offsets, strict=True)):
                ends[file] = max(ends[file], start + tensor.nbytes(box))
        return FileColumns(
            rank=np.arange(count, dtype=np.int32),
            part=np.zeros(count, dtype=np.int32),
            kind=np.repeat(np.array([0, 1], dtype=np.uint8), self.ranks),
            nbytes=np.array([DATA_START + end for end in ends] + [DATA_START + 99] * self.ranks, dtype=np.int64),
            data_start=np.full(count, DATA_START, dtype=np.int64),
            field_start=np.full(count, 64, dtype=np.int64),
            field_nbytes=np.arange(count, dtype=np.int64),
            digest=np.random.default_rng(count).integers(0, 2**63, (count, 2)).astype(np.uint64) * np.uint64(2),
        )

    def blob(self) -> bytes:
        return assemble(encode_body(self.columns()), self.files(), self.save, self.writer)

    def source(self) -> ColumnsSource:
        return ColumnsSource(self.columns(), self.files(), self.save, self.writer)


def path_of(name: str) -> bytes:
    return encode_path(tuple(PathKey("key", part) for part in name.split(".")))


def tensor_columns(tensors: list[Tensor]) -> tuple[TensorColumns, ChunkColumns]:
    depth = max((len(tensor.shape) for tensor in tensors), default=0)
    boxes = [(tensor, box) for tensor in tensors for box in tensor.boxes]
    described = TensorColumns(
        names=[tensor.name for tensor in tensors],
        paths=[path_of(tensor.name) for tensor in tensors],
        rank=np.array([tensor.rank for tensor in tensors], dtype=np.int32),
        dtype=np.array([tensor.dtype for tensor in tensors], dtype=np.uint8),
        ndim=np.array([len(tensor.shape) for tensor in tensors], dtype=np.uint8),
        shape=_padded([tensor.shape for tensor in tensors], depth, 1),
        row=np.cumsum([0, *(len(tensor.boxes) for tensor in tensors)]),
    )
    chunks = ChunkColumns(
        offsets=_padded([box[0] for _, box in boxes], depth, 0),
        sizes=_padded([box[1] for _, box in boxes], depth, 1),
        file=np.array([file for tensor in tensors for file in tensor.files], dtype=np.int32),
        byte_offset=np.array([start for tensor in tensors for start in tensor.byte_offsets], dtype=np.int64),
    )
    return described, chunks


def _padded(rows: list[tuple[int, ...]], depth: int, filler: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    table = np.full((len(rows), depth), filler, dtype=np.int64)
    for row, values in enumerate(rows):
        table[row, : len(values)] = values
    return table


def grid_cells(shape: tuple[int, ...], cuts: list[list[int]], copies: int = 1) -> Cells:
    """The cells between sorted inner cut positions along each dimension, in row-major order."""
    edges = [[0, *inner, extent] for inner, extent in zip(cuts, shape, strict=True)]
    spans = [list(pairwise(along)) for along in edges]
    cells = [
        (tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell)) for cell in product(*spans)
    ]
    return [cell for cell in cells for _ in range(copies)]


@st.composite
def cut_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], Cells]:
    """A shape, and boxes in it: a grid, a grid with cells missing or cut again, or none."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    if 0 in shape:
        return shape, []
    cuts = [sorted(draw(st.sets(st.integers(1, extent - 1), max_size=3))) if extent > 1 else [] for extent in shape]
    cells = grid_cells(shape, cuts, draw(st.sampled_from([1, 1, 1, 2, 3])))
    if draw(st.booleans()):
        return shape, cells
    kept = [cell for cell in cells if draw(st.integers(0, 3))]
    return shape, sorted(_cut_again(cell) for cell in kept) if draw(st.booleans()) else kept


def _cut_again(cell: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The upper half of a cell along its first dimension that is longer than 1."""
    offsets, sizes = list(cell[0]), list(cell[1])
    for dimension, extent in enumerate(sizes):
        if extent > 1:
            half = extent // 2
            offsets[dimension] += half
            sizes[dimension] -= half
            break
    return tuple(offsets), tuple(sizes)


names = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=1, max_size=3).map(
    ".".join
)


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    ranks = draw(st.integers(1, 5))
    tensors = []
    for name in sorted(draw(st.sets(names, max_size=8)), key=str.encode):
        owners = [EVERY_RANK] if draw(st.integers(0, 3)) else sorted(draw(st.sets(st.integers(0, 9), max_size=3)))
        for owner in owners:
            shape, boxes = draw(cut_shapes())
            files = [draw(st.integers(0, ranks - 1)) for _ in boxes]
            tensors.append(Tensor(name, shape, boxes, draw(st.sampled_from(DTYPES)).code, owner, files))
    objects = [
        (name, owner, owner != EVERY_RANK and draw(st.booleans()), draw(st.integers(0, ranks - 1)))
        for name in draw(st.sets(names, max_size=4))
        for owner in ([EVERY_RANK] if draw(st.booleans()) else range(draw(st.integers(1, 3))))
    ]
    containers = {
        path_of(name): draw(st.sampled_from(["dict", "OrderedDict", "tuple"]))
        for name in draw(st.sets(names, max_size=3))
    }
    suffix, rank = draw(st.sampled_from(["", "." + SAVE_ID])), draw(st.sampled_from([None, 0, 3]))
    writer = WriterRecord(draw(st.text(max_size=4)), "torch", "2.13", draw(st.integers(1, 10**6)))
    made = Checkpoint(tensors, objects, ranks, containers, SaveRecord(SAVE_ID, suffix, rank), writer)
    made.place()
    return made


def small_checkpoint() -> Checkpoint:
    """A grid, loose boxes, a scalar, an empty tensor, values per rank, two names on one storage."""
    tensors = [
        Tensor("empty", (0, 3), []),
        Tensor("grid", (4, 6), grid_cells((4, 6), [[2], [2, 3]]), files=[0, 1, 2, 3, 0, 1]),
        Tensor("loose", (6,), [((0,), (2,)), ((3,), (3,))], dtype=11, files=[2, 0]),
        Tensor("rng", (8,), [((0,), (8,))], dtype=6, rank=0, files=[0]),
        Tensor("rng", (8,), [((0,), (8,))], dtype=6, rank=1, files=[1]),
        Tensor("scalar", (), [((), ())], files=[3]),
        Tensor("tied", (4, 6), grid_cells((4, 6), [[2], []]), files=[0, 1]),
        Tensor("tied.too", (4, 6), grid_cells((4, 6), [[2], []]), files=[0, 1]),
    ]
    objects = [("epoch", EVERY_RANK, False, 0), ("note", 0, True, 0), ("note", 1, True, 1)]
    made = Checkpoint(tensors, objects, 4, {path_of("none"): "dict"})
    made.place()
    tensors[-1].byte_offsets = list(tensors[-2].byte_offsets)
    return made


def everything(source: MetadataSource) -> list[object]:
    """All answers of a source as plain values."""
    answers: list[object] = [source.writer, source.save, source.nesting, list(source.names())]
    columns = source.files
    for column in (columns.rank, columns.part, columns.kind, columns.nbytes, columns.data_start, columns.field_start):
        answers.append(column.tolist())
    answers += [columns.field_nbytes.tolist(), columns.digest.tolist()]
    for name in source.names():
        for tensor in source.tensors(name):
            chunks = tensor.chunks
            answers.append((tensor.name, tensor.path, tensor.rank, tensor.dtype, tensor.shape))
            answers.append((chunks.offsets.tolist(), chunks.sizes.tolist(), chunks.file.tolist()))
            answers.append(chunks.byte_offset.tolist())
        answers += source.objects(name)
    return answers


def replaced(blob: bytes, blocks: dict[str, bytes], strings: dict[str, str] | None = None) -> bytes:
    """The same file with other blocks or strings and right digests: what a liar would write."""
    container = BlockContainer(lambda offset, nbytes: blob[offset : offset + nbytes], len(blob))
    kept = [Block.of(name, blocks.get(name, container.block(name))) for name in container.block_names]
    texts = {key: value for key, value in container.strings.items() if key != "header_xxh3"}
    return build_container({**texts, **(strings or {})}, kept)
