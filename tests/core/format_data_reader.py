"""A second reader of data files and whole checkpoints, written from docs/reference/format.md alone."""

from __future__ import annotations

import base64
import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from tests.core.format_reader import TYPES, DataFile, Description, Object, Tensor
from tests.core.format_records import cut, require, unique_json
from tests.core.format_value_reader import decode_value

Bits: TypeAlias = npt.NDArray[np.uint8]
Place: TypeAlias = tuple[Tensor, int]
"""A tensor, and which of its chunks."""
MEBIBYTE = 1 << 20


# -- .safetensors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredChunk:
    """What the header of a data file says of a chunk; shape with the tail of its type."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    OPENING = b'{"__metadata__":{"dcp.format":"1","dcp.save_id":"'
    BETWEEN = b'","dcp.checksums":"'

    def __init__(self, blob: bytes, listed: DataFile, save_id: str) -> None:
        require(len(blob) == listed.nbytes, "the file's size")
        (length,) = struct.unpack_from("<Q", blob)
        require(8 + length == listed.data_start and listed.data_start % 64 == 0, "where data starts")
        head = blob[: listed.data_start]
        id_start = 8 + len(self.OPENING)
        require(id_start == 57 and head[8:57] == self.OPENING, "how a header opens")
        require(head[57:89] == save_id.encode(), "the save's id")
        start, stop = listed.field_start, listed.field_start + listed.field_nbytes
        require(start == 108, "where the field starts")
        require(head[89:start] == self.BETWEEN and head[stop : stop + 3] == b'"},', "what lies around the field")
        check_field(head[start:stop], listed)
        words = np.frombuffer(base64.b64decode(head[start:stop], validate=True), "<u8").tolist()
        blank = head[:57] + b"0" * 32 + head[89:start] + b"A" * listed.field_nbytes + head[stop:]
        require(xxhash.xxh3_64_intdigest(blank) == words[0], "the header's checksum")
        self.data = memoryview(blob)[listed.data_start :]
        self.chunks = self.read_header(head)
        lengths, self.checksums = words[2 : 2 + words[1]], words[2 + words[1] : 2 + 2 * words[1]]
        require([chunk.stop - chunk.start for chunk in self.chunks] == lengths, "lengths of the chunks")
        self.check_blocks(words[2 + 2 * words[1] :])

    def read_header(self, head: bytes) -> list[StoredChunk]:
        header = unique_json(head[8:])
        require(set(header.pop("__metadata__")) == {"dcp.format", "dcp.save_id", "dcp.checksums"}, "the strings")
        chunks = [
            StoredChunk(key, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for key, entry in header.items()
        ]
        ends = [0, *(chunk.stop for chunk in chunks)]
        require(ends[:-1] == [chunk.start for chunk in chunks] and ends[-1] == len(self.data), "chunks back to back")
        return chunks

    def check_blocks(self, expected: list[int]) -> None:
        at = 0
        for chunk, checksum in zip(self.chunks, self.checksums, strict=True):
            starts = range(chunk.start, chunk.stop, MEBIBYTE)
            found = [xxhash.xxh3_64_intdigest(self.data[at : min(at + MEBIBYTE, chunk.stop)]) for at in starts]
            require(expected[at : at + len(found)] == found, f"blocks of {chunk.key}")
            require(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(found)}Q", *found)) == checksum, chunk.key)
            at += len(found)
        require(at == len(expected), "a checksum for each block")


def check_field(field: bytes, listed: DataFile) -> None:
    """The digest that `.metadata` has of a file's field: low word first."""
    low_first = xxhash.xxh3_128_intdigest(field).to_bytes(16, "little")
    require(low_first == listed.digest, "the field's digest")


# -- .bytes -----------------------------------------------------------------------------------------------------------


class ObjectFile:
    def __init__(self, blob: bytes, listed: DataFile) -> None:
        require(len(blob) == listed.nbytes >= 16, "the file's size")
        magic, version, count = struct.unpack_from("<8sII", blob)
        require((magic, version) == (b"DCPBYTES", 1), "magic and version")
        stop = listed.field_start + listed.field_nbytes
        require((listed.field_start, stop) == (16, 16 + 16 * count), "where the index lies")
        require(stop == listed.data_start, "where values start")
        check_field(blob[16:stop], listed)
        index = list(struct.iter_unpack("<QQ", blob[16:stop]))
        self.values = cut([nbytes for nbytes, _ in index], blob[stop:])
        for value, (_, digest) in zip(self.values, index, strict=True):
            require(xxhash.xxh3_64_intdigest(value) == digest, "a value's digest")


# -- the whole --------------------------------------------------------------------------------------------------------


class Checkpoint:
    """A description and all data files that it names, checked against each other.

    Args:
        files: The directory: contents by name.
        name: Which description.
    """

    def __init__(self, files: Mapping[str, bytes], name: str = ".metadata") -> None:
        self.description = Description(files[name])
        self.save_id, self.suffix = self.description.strings["save_id"], self.description.strings["suffix"]
        self.tensor_files: dict[int, TensorFile] = {}
        self.object_files: dict[int, ObjectFile] = {}
        for row, listed in enumerate(self.description.files):
            blob = files[listed.name(self.suffix)]
            if listed.kind == 0:
                self.tensor_files[row] = TensorFile(blob, listed, self.save_id)
            else:
                self.object_files[row] = ObjectFile(blob, listed)
        places: dict[tuple[int, int], list[Place]] = {}
        for tensor in self.description.tensors:
            for chunk, place in enumerate(zip(tensor.files, tensor.byte_offsets, strict=True)):
                places.setdefault(place, []).append((tensor, chunk))
        for row, file in self.tensor_files.items():
            check_chunks(file, {start: found for (owner, start), found in places.items() if owner == row})

    @classmethod
    def read(cls, directory: Path, name: str = ".metadata") -> Checkpoint:
        return cls({path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}, name)

    def chunk(self, tensor: Tensor, chunk: int) -> Bits:
        """The raw bytes of a chunk: its sizes, and a dimension for the bytes of an element."""
        start, sizes = tensor.byte_offsets[chunk], tensor.boxes[chunk][1]
        raw = self.tensor_files[tensor.files[chunk]].data[start : start + tensor.nbytes(chunk)]
        return np.frombuffer(raw, np.uint8).reshape(*sizes, TYPES[tensor.dtype].itemsize)

    def bits(self, tensor: Tensor) -> Bits:
        """The raw bytes of a whole tensor: its shape, and a dimension for the bytes of an element."""
        found = np.zeros((*tensor.shape, TYPES[tensor.dtype].itemsize), np.uint8)
        covered = np.zeros(tensor.shape, np.bool_)
        for chunk, (offsets, sizes) in enumerate(tensor.boxes):
            box = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            found[box] = self.chunk(tensor, chunk)
            covered[box] = True
        require(covered.all(), f"chunks cover {tensor.name}")
        return found

    def value(self, stored: Object) -> Any:
        return decode_value(self.object_files[stored.file].values[stored.ordinal])


def check_chunks(file: TensorFile, listed: Mapping[int, list[Place]]) -> None:
    """A data file's header says the same as `.metadata`, and its chunks stand in the order that the page gives."""
    require([chunk.start for chunk in file.chunks] == sorted(listed), "each chunk is in both, and no other")
    named = []
    for stored in file.chunks:
        for tensor, chunk in listed[stored.start]:
            kind, sizes = TYPES[tensor.dtype], tensor.boxes[chunk][1]
            require(stored.stop - stored.start == tensor.nbytes(chunk), f"the length of {stored.key}")
            require(
                (stored.dtype, stored.shape) == (kind.spelled, sizes + kind.tail), f"type and shape of {stored.key}"
            )
        named.append(next((place for place in listed[stored.start] if stored.key in keys_of(*place)), None))
    places = [place for place in named if place is not None]
    require(len(places) == len(named), "a key has the name of its tensor")
    order = [(tensor.nbytes(n) % 8 != 0, tensor.name.encode(), tensor.boxes[n][0]) for tensor, n in places]
    require(all(one < other for one, other in pairwise(order)), "chunks in order")
    chunks = Counter(tensor.name for tensor, _ in places)
    plain = {keys_of(*place)[min(chunks[place[0].name], 2) - 1] for place in places}
    for stored, place in zip(file.chunks, places, strict=True):
        alone, with_offsets, canonical = keys_of(*place)
        expected = alone if chunks[alone] == 1 else with_offsets
        require(stored.key == expected or (stored.key == canonical and expected in plain), f"the key {stored.key}")


def keys_of(tensor: Tensor, chunk: int) -> tuple[str, str, str]:
    """The key of the only chunk of a tensor, of one of several, and of one of several that would meet another."""
    offsets = ",".join(map(str, tensor.boxes[chunk][0]))
    spelled = json.dumps(tensor.name, ensure_ascii=False).replace("@", "\\u0040")
    return tensor.name, f"{tensor.name}@{offsets}", f"$[{spelled}]@{offsets}"
