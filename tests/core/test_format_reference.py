"""A second reader of `.metadata`, written from docs/reference/format.md alone, against what the writer writes."""

from __future__ import annotations

import json
import re
import struct
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

import xxhash
from hypothesis import given

from dcp_core.dtype import DTYPES
from dcp_core.metadata import EVERY_RANK
from tests.core.metadata_samples import Checkpoint, checkpoints, path_of, small_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "format.md"


class Container:
    def __init__(self, blob: bytes) -> None:
        (length,) = struct.unpack_from("<Q", blob)
        header = json.loads(blob[8 : 8 + length])
        self.strings = header.pop("__metadata__")
        start = 8 + len(b'{"__metadata__":{"header_xxh3":"')
        blank = blob[:start] + b"0" * 32 + blob[start + 32 : 8 + length]
        assert xxhash.xxh3_128_hexdigest(blank) == self.strings["header_xxh3"] == blob[start : start + 32].decode()
        assert (8 + length) % 8 == 0
        self.blocks = {}
        for row, (name, entry) in enumerate(header.items()):
            first, last = entry["data_offsets"]
            self.blocks[name] = blob[8 + length + first : 8 + length + last]
            digest = self.strings["block_xxh3"][32 * row : 32 * row + 32]
            assert xxhash.xxh3_128_hexdigest(self.blocks[name]) == digest


class Records:
    def __init__(self, block: bytes) -> None:
        self.block, self.at = block, 0

    def unpack(self, layout: str) -> tuple[int, ...]:
        fields: tuple[int, ...] = struct.unpack_from("<" + layout, self.block, self.at)
        self.at += struct.calcsize("<" + layout)
        return fields

    def stored(self, nbytes: int, compressed: bool) -> bytes:
        raw = self.block[self.at : self.at + nbytes]
        self.at += nbytes
        return zlib.decompress(raw) if compressed else raw

    def string(self) -> bytes:
        coding, raw_nbytes, nbytes = self.unpack("BQQ")
        raw = self.stored(nbytes, coding == 1)
        assert len(raw) == raw_nbytes
        return raw

    def column(self, count: int) -> list[int]:
        coding, width, nbytes, first, base = self.unpack("BBQqq")
        differences = bool(coding & 2)
        length = max(count - 1, 0) if differences else count
        planes = self.stored(nbytes, bool(coding & 1))
        assert len(planes) == length * width
        steps = [base + sum(planes[p * length + row] << 8 * p for p in range(width)) for row in range(length)]
        if differences:
            values = [first] * min(count, 1)
            for step in steps:
                values.append(values[-1] + step)
        else:
            values = steps
        return [(value + 2**63) % 2**64 - 2**63 for value in values]

    def table(self, count: int) -> list[bytes]:
        lengths, joined = self.column(count), self.string()
        ends = [sum(lengths[: row + 1]) for row in range(count)]
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def end(self) -> None:
        assert self.at == len(self.block)


@dataclass
class Group:
    names: list[str]
    paths: list[bytes]
    ranks: list[int]
    dtypes: list[int]
    shapes: list[tuple[int, ...]]
    chunks: list[int]


def names_and_paths(records: Records, runs: int) -> tuple[list[str], list[bytes]]:
    repeats, names, paths = records.column(runs), records.table(runs), records.table(runs)
    rows = [run for run in range(runs) for _ in range(repeats[run])]
    return [names[run].decode() for run in rows], [paths[run] for run in rows]


def directory(container: Container, kind: str) -> list[tuple[int, int, int]]:
    records = Records(container.blocks[f"directory.{kind}"])
    (groups,) = records.unpack("Q")
    records.table(groups)
    columns = [records.column(groups) for _ in range(3)]
    records.end()
    return list(zip(*columns, strict=True))


def read_tensors(block: bytes, runs: int, entries: int) -> Group:
    records = Records(block)
    names, paths = names_and_paths(records, runs)
    ranks, dtypes, ndims = (records.column(entries) for _ in range(3))
    extents = iter(records.column(sum(ndims)))
    shapes = [tuple(next(extents) for _ in range(ndim)) for ndim in ndims]
    chunks = records.column(entries)
    records.end()
    return Group(names, paths, ranks, dtypes, shapes, chunks)


Box = tuple[tuple[int, ...], tuple[int, ...]]


def read_chunks(block: bytes, group: Group) -> tuple[list[list[Box]], list[int], list[int]]:
    records = Records(block)
    is_grid = records.column(len(group.names))
    grids = [row for row, flag in enumerate(is_grid) if flag]
    counts = iter(records.column(sum(len(group.shapes[row]) for row in grids)))
    cells = {row: [next(counts) for _ in group.shapes[row]] for row in grids}
    inner = iter(records.column(sum(count - 1 for along in cells.values() for count in along)))
    boxes: list[list[Box]] = [[] for _ in group.names]
    for row in grids:
        edges = []
        for extent, count in zip(group.shapes[row], cells[row], strict=True):
            along = [0]
            for _ in range(count - 1):
                along.append(along[-1] + next(inner))
            edges.append([*along, extent])
        copies = group.chunks[row] // prod(cells[row])
        boxes[row] = [cell_of(edges, cells[row], number // copies) for number in range(group.chunks[row])]
    loose = [row for row, flag in enumerate(is_grid) if not flag for _ in range(group.chunks[row])]
    if not all(is_grid):
        offsets: list[list[int]] = [[] for _ in loose]
        sizes: list[list[int]] = [[] for _ in loose]
        for dimension in range(max(map(len, group.shapes), default=0)):
            present = [place for place, row in enumerate(loose) if len(group.shapes[row]) > dimension]
            for target in (offsets, sizes):
                for place, value in zip(present, records.column(len(present)), strict=True):
                    target[place].append(value)
        for place, row in enumerate(loose):
            boxes[row].append((tuple(offsets[place]), tuple(sizes[place])))
    total = sum(group.chunks)
    files, byte_offsets = records.column(total), records.column(total)
    records.end()
    return boxes, files, byte_offsets


def cell_of(edges: list[list[int]], cells: list[int], number: int) -> Box:
    starts, extents = [], []
    for along, count in zip(reversed(edges), reversed(cells), strict=True):
        number, index = divmod(number, count)
        starts.append(along[index])
        extents.append(along[index + 1] - along[index])
    return tuple(reversed(starts)), tuple(reversed(extents))


@given(checkpoints())
def test_a_reader_that_knows_only_the_page_reads_every_tensor_and_chunk(made: Checkpoint) -> None:
    container = Container(made.blob())
    found = []
    for number, (runs, entries, rows) in enumerate(directory(container, "tensors")):
        group = read_tensors(container.blocks[f"tensors.{number}"], runs, entries)
        boxes, files, byte_offsets = read_chunks(container.blocks[f"chunks.{number}"], group)
        assert sum(map(len, boxes)) == rows
        for row, name in enumerate(group.names):
            own = slice(sum(map(len, boxes[:row])), sum(map(len, boxes[: row + 1])))
            key = (name, group.paths[row], group.ranks[row], group.dtypes[row], group.shapes[row])
            found.append((*key, boxes[row], files[own], byte_offsets[own]))
    assert found == [
        (t.name, path_of(t.name), t.rank, t.dtype, t.shape, t.boxes, t.files, t.byte_offsets) for t in made.tensors
    ]


@given(checkpoints())
def test_it_reads_every_object_and_file_and_container_too(made: Checkpoint) -> None:
    container = Container(made.blob())
    found = []
    for number, (runs, entries, rows) in enumerate(directory(container, "objects")):
        records = Records(container.blocks[f"objects.{number}"])
        names, paths = names_and_paths(records, runs)
        columns = [records.column(entries) for _ in range(4)]
        records.end()
        assert rows == 0
        assert paths == [path_of(name) for name in names]
        found += list(zip(names, *columns, strict=True))
    ordered = sorted(made.objects, key=lambda entry: (entry[0].encode(), entry[1]))
    assert found == [(name, rank, own, made.ranks + file, row) for row, (name, rank, own, file) in enumerate(ordered)]
    files, columns_read = made.files(), Records(container.blocks["files"])
    (count,) = columns_read.unpack("Q")
    assert columns_read.string() == files.digest.astype("<u8").tobytes()
    for name in ("rank", "part", "kind", "nbytes", "data_start", "field_start", "field_nbytes"):
        assert columns_read.column(count) == getattr(files, name).tolist()
    columns_read.end()
    nesting = Records(container.blocks["nesting"])
    (containers,) = nesting.unpack("Q")
    paths, kinds = nesting.table(containers), nesting.table(containers)
    assert dict(zip(paths, map(bytes.decode, kinds), strict=True)) == made.containers


def test_it_reads_who_saved() -> None:
    strings = Container(small_checkpoint().blob()).strings
    assert (strings["format"], strings["version"], strings["rank"], strings["world_size"]) == ("dcp", "1", "", "4")
    assert strings["suffix"] == "." + strings["save_id"]
    assert (strings["library"], strings["framework"], strings["framework_version"]) == ("dcp 0.1", "torch", "2.13")
    assert EVERY_RANK == -1


def test_the_page_lists_every_element_type_as_it_is_stored() -> None:
    rows = re.findall(r"^\| ([0-9, ]+) \| ([\w, ]+) \| ([0-9, ]+) \| ([\w, ]+) \|$", PAGE.read_text(), re.MULTILINE)
    listed = set()
    for codes, names, sizes, spelled in rows:
        tail = spelled.partition(", tail ")[2]
        spellings = spelled.partition(", tail ")[0].split(", ")
        for row in zip(codes.split(", "), names.split(", "), sizes.split(", "), spellings, strict=True):
            listed.add((*row, tail))
    expected = {(str(d.code), d.name, str(d.itemsize), d.file_dtype, ",".join(map(str, d.file_tail))) for d in DTYPES}
    assert listed == expected
