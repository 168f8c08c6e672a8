"""A second reader of `.metadata`, written from docs/reference/format.md alone; it imports nothing of the packages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeAlias

from tests.core.format_records import Container, Records, cut, require

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


@dataclass(frozen=True)
class ElementType:
    name: str
    itemsize: int
    spelled: str
    tail: tuple[int, ...] = ()


TYPES = {
    1: ElementType("bool", 1, "BOOL"),
    2: ElementType("int8", 1, "I8"),
    3: ElementType("int16", 2, "I16"),
    4: ElementType("int32", 4, "I32"),
    5: ElementType("int64", 8, "I64"),
    6: ElementType("uint8", 1, "U8"),
    7: ElementType("uint16", 2, "U16"),
    8: ElementType("uint32", 4, "U32"),
    9: ElementType("uint64", 8, "U64"),
    10: ElementType("float16", 2, "F16"),
    11: ElementType("bfloat16", 2, "BF16"),
    12: ElementType("float32", 4, "F32"),
    13: ElementType("float64", 8, "F64"),
    14: ElementType("complex32", 4, "F16", (2,)),
    15: ElementType("complex64", 8, "C64"),
    16: ElementType("complex128", 16, "F64", (2,)),
    17: ElementType("float8_e4m3fn", 1, "F8_E4M3"),
    18: ElementType("float8_e5m2", 1, "F8_E5M2"),
    19: ElementType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    20: ElementType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    21: ElementType("float8_e8m0fnu", 1, "F8_E8M0"),
    22: ElementType("float4_e2m1fn_x2", 1, "U8"),
}


@dataclass(frozen=True)
class Tensor:
    name: str
    path: bytes
    rank: int
    dtype: int
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    files: tuple[int, ...]
    byte_offsets: tuple[int, ...]

    def nbytes(self, chunk: int) -> int:
        return prod(self.boxes[chunk][1]) * TYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Object:
    name: str
    path: bytes
    rank: int
    per_rank: int
    file: int
    ordinal: int


@dataclass(frozen=True)
class DataFile:
    rank: int
    part: int
    kind: int
    nbytes: int
    data_start: int
    field_start: int
    field_nbytes: int
    digest: bytes

    def name(self, suffix: str) -> str:
        part = f"{self.part}_" if self.part else ""
        return f"_rank{self.rank}_{part}{suffix}.{('safetensors', 'bytes')[self.kind]}"


class Description:
    """All that a `.metadata` says, checked."""

    def __init__(self, blob: bytes) -> None:
        container = Container(blob)
        self.strings = container.strings
        self.files = read_files(container.blocks["files"])
        self.nesting = read_nesting(container.blocks["nesting"])
        self.tensors: list[Tensor] = []
        groups = read_directory(container.blocks["directory.tensors"])
        self.groups = len(groups)
        for number, group in enumerate(groups):
            blocks = container.blocks[f"tensors.{number}"], container.blocks[f"chunks.{number}"]
            self.tensors += read_tensors(*blocks, group)
        self.objects: list[Object] = []
        for number, group in enumerate(read_directory(container.blocks["directory.objects"])):
            self.objects += read_objects(container.blocks[f"objects.{number}"], group)
        check_places(self)


def check_places(description: Description) -> None:
    """Chunks and objects lie in files of their kind, chunks inside the data section, and no two share bytes."""
    files, spans = description.files, set()
    for tensor in description.tensors:
        for chunk, (row, start) in enumerate(zip(tensor.files, tensor.byte_offsets, strict=True)):
            stop = start + tensor.nbytes(chunk)
            require(0 <= row < len(files) and files[row].kind == 0, "a chunk lies in a file of tensors")
            require(start >= 0 and files[row].data_start + stop <= files[row].nbytes, "a chunk lies in its file")
            spans.add((row, start, stop))
    for one, other in pairwise(sorted(spans)):
        require(one[0] != other[0] or one[2] <= other[1], "two chunks share bytes")
    for stored in description.objects:
        require(0 <= stored.file < len(files) and files[stored.file].kind == 1, "an object lies in a file of objects")


# -- blocks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    first: bytes
    next_first: bytes | None
    runs: int
    entries: int
    chunks: int


@dataclass(frozen=True)
class Leaf:
    name: str
    path: bytes


def read_directory(block: bytes) -> list[Group]:
    records = Records(block)
    count = records.count()
    firsts = records.table(count)
    columns = [records.column(count) for _ in range(3)]
    records.end()
    require(all(one < other for one, other in pairwise(firsts)), "first names ascend")
    require(all(runs >= 1 for runs in columns[0]), "no group is empty")
    nexts: list[bytes | None] = [*firsts[1:], None][: len(firsts)]
    return [Group(*row) for row in zip(firsts, nexts, *columns, strict=True)]


def read_leaves(records: Records, group: Group) -> list[Leaf]:
    """The name and path of each entry."""
    repeats, names, paths = records.column(group.runs), records.table(group.runs), records.table(group.runs)
    require(all(repeat >= 1 for repeat in repeats) and sum(repeats) == group.entries, "runs hold all entries")
    require(names == sorted(names) and names[:1] in ([], [group.first]), "names ascend from the group's first")
    require(group.next_first is None or names[-1:] < [group.next_first], "names stay below the next group's")
    runs = zip(names, paths, repeats, strict=True)
    return [Leaf(name.decode(), path) for name, path, repeat in runs for _ in range(repeat)]


def check_ranks(leaves: Sequence[Leaf], ranks: Sequence[int]) -> None:
    for one, other in pairwise(zip(leaves, ranks, strict=True)):
        require(one[0].name != other[0].name or one[1] < other[1], "ranks ascend among entries of one name")


def read_tensors(block: bytes, chunk_block: bytes, group: Group) -> list[Tensor]:
    records = Records(block)
    leaves = read_leaves(records, group)
    ranks, dtypes, ndims = (records.column(group.entries) for _ in range(3))
    extents = iter(records.column(sum(ndims)))
    shapes = [tuple(next(extents) for _ in range(ndim)) for ndim in ndims]
    counts = records.column(group.entries)
    records.end()
    check_ranks(leaves, ranks)
    require(max(ndims, default=0) <= 64 and sum(counts) == group.chunks, "dimensions and chunks")
    boxes, files, byte_offsets = read_chunks(chunk_block, shapes, counts)
    tensors, at = [], 0
    for row, leaf in enumerate(leaves):
        own = slice(at, at + counts[row])
        places = tuple(boxes[row]), tuple(files[own]), tuple(byte_offsets[own])
        tensors.append(Tensor(leaf.name, leaf.path, ranks[row], dtypes[row], shapes[row], *places))
        at += counts[row]
    return tensors


def read_chunks(
    block: bytes, shapes: list[tuple[int, ...]], chunks: list[int]
) -> tuple[list[list[Box]], list[int], list[int]]:
    records = Records(block)
    is_grid = records.column(len(shapes))
    grids = [row for row, flag in enumerate(is_grid) if flag]
    counts = iter(records.column(sum(len(shapes[row]) for row in grids)))
    cells = {row: [next(counts) for _ in shapes[row]] for row in grids}
    inner = iter(records.column(sum(count - 1 for along in cells.values() for count in along)))
    boxes: list[list[Box]] = [[] for _ in shapes]
    for row in grids:
        edges = []
        for extent, count in zip(shapes[row], cells[row], strict=True):
            along = [0]
            for _ in range(count - 1):
                along.append(along[-1] + next(inner))
            edges.append([*along, extent])
        require(chunks[row] >= 1 and chunks[row] % prod(cells[row]) == 0, "each cell of a grid occurs equally often")
        copies = chunks[row] // prod(cells[row])
        boxes[row] = [cell_of(edges, cells[row], number // copies) for number in range(chunks[row])]
    read_loose_boxes(records, [row for row, flag in enumerate(is_grid) if not flag], shapes, chunks, boxes)
    for shape, own in zip(shapes, boxes, strict=True):
        check_boxes(shape, own)
    files, byte_offsets = records.column(sum(chunks)), records.column(sum(chunks))
    records.end()
    return boxes, files, byte_offsets


def read_loose_boxes(
    records: Records, rows: list[int], shapes: list[tuple[int, ...]], chunks: list[int], boxes: list[list[Box]]
) -> None:
    """Add the boxes of tensors that are no grid."""
    if not rows:
        return
    loose = [row for row in rows for _ in range(chunks[row])]
    offsets: list[list[int]] = [[] for _ in loose]
    sizes: list[list[int]] = [[] for _ in loose]
    for dimension in range(max(map(len, shapes))):
        present = [place for place, row in enumerate(loose) if len(shapes[row]) > dimension]
        for target in (offsets, sizes):
            for place, value in zip(present, records.column(len(present)), strict=True):
                target[place].append(value)
    for place, row in enumerate(loose):
        boxes[row].append((tuple(offsets[place]), tuple(sizes[place])))


def cell_of(edges: list[list[int]], cells: list[int], number: int) -> Box:
    starts, extents = [], []
    for along, count in zip(reversed(edges), reversed(cells), strict=True):
        number, index = divmod(number, count)
        starts.append(along[index])
        extents.append(along[index + 1] - along[index])
    return tuple(reversed(starts)), tuple(reversed(extents))


def check_boxes(shape: tuple[int, ...], boxes: list[Box]) -> None:
    require(all(one[0] <= other[0] for one, other in pairwise(boxes)), "chunks are sorted by offsets")
    for offsets, sizes in boxes:
        for offset, size, extent in zip(offsets, sizes, shape, strict=True):
            require(
                offset >= 0 and size >= 1 and offset + size <= extent, "a box lies in the shape, and holds something"
            )


def read_objects(block: bytes, group: Group) -> list[Object]:
    records = Records(block)
    leaves = read_leaves(records, group)
    ranks, per_rank, files, ordinals = (records.column(group.entries) for _ in range(4))
    records.end()
    check_ranks(leaves, ranks)
    require(group.chunks == 0, "objects have no chunks")
    rows = zip(leaves, ranks, per_rank, files, ordinals, strict=True)
    return [Object(leaf.name, leaf.path, *columns) for leaf, *columns in rows]


def read_nesting(block: bytes) -> dict[bytes, str]:
    records = Records(block)
    count = records.count()
    paths, kinds = records.table(count), records.table(count)
    records.end()
    require(len(set(paths)) == count, "a container is named once")
    require(set(kinds) <= {b"dict", b"OrderedDict", b"list", b"tuple", b"namedtuple"}, "kinds of containers")
    return {path: kind.decode() for path, kind in zip(paths, kinds, strict=True)}


def read_files(block: bytes) -> list[DataFile]:
    records = Records(block)
    count = records.count()
    digests = cut([16] * count, records.string())
    columns = zip(*(records.column(count) for _ in range(7)), digests, strict=True)
    records.end()
    files = [DataFile(*row) for row in columns]
    for one, other in pairwise(files):
        require((one.rank, one.kind, one.part) < (other.rank, other.kind, other.part), "files ascend")
    for file in files:
        require(file.kind in (0, 1), "a file's kind")
        require(file.field_start + file.field_nbytes <= file.data_start <= file.nbytes, "a file's layout")
    return files
