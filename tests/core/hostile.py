"""Checkpoints that a stranger made to do harm: sound at first sight, every digest right.

Each makes a `Damage` out of a good checkpoint. Wherever a number or a name is written, another one is put.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dcp_core.formats.block_container import BlockContainer
from dcp_core.formats.column_codec import ColumnWriter
from dcp_core.formats.group_directory import GroupDirectory, encode_directory
from dcp_core.formats.metadata_blocks import encode_files, encode_objects
from dcp_core.formats.metadata_file import MetadataColumns, assemble, encode_body, open_bytes
from dcp_core.metadata import FileColumns
from tests.core.damage import Change, Damage, bomb, edited, malicious_pickle
from tests.core.metadata_samples import replaced

_REFUSED = ("CorruptError",)
_GIGABYTE = 1 << 30


def _metadata(change: Callable[[bytes], bytes]) -> Change:
    return edited(".metadata", change)


def _strings(**strings: str) -> Change:
    return _metadata(lambda blob: replaced(blob, {}, strings))


def _blocks(make: Callable[[bytes], Mapping[str, bytes]]) -> Change:
    return _metadata(lambda blob: replaced(blob, dict(make(blob))))


def pickles(marker: Path) -> list[Damage]:
    """Pickles that make a file when they are opened, in every protocol."""
    return [
        Damage(
            f"a pickle of protocol {protocol}",
            _metadata(lambda blob, protocol=protocol: malicious_pickle(f"touch '{marker}'", protocol)),  # type: ignore[misc]
            _REFUSED,
            ".metadata",
        )
        for protocol in range(6)
    ]  # fmt: skip


def headers() -> list[Damage]:
    """Lies in the header of `.metadata`."""
    texts = {
        "a suffix that leads out": {"suffix": "../../etc/x"},
        "a suffix with a path": {"suffix": "/../../../../etc/passwd"},
        "a save id that leads out": {"save_id": "../" * 10 + "ab"},
        "a save id in capitals": {"save_id": "A" * 32},
        "a suffix of another kind": {"suffix": ".." + "a" * 31},
        "a negative version": {"version": "-1"},
        "an unknown old version": {"version": "0"},
        "a version of many digits": {"version": "9" * 5000},
        "a world of many digits": {"world_size": "9" * 5000},
        "a negative world": {"world_size": "-2"},
        "another format": {"format": "dpc"},
        "a rank that is none": {"rank": "x"},
    }
    return [
        *(Damage(name, _strings(**strings), _REFUSED, ".metadata") for name, strings in texts.items()),
        Damage("a newer version", _strings(version="2"), ("NewerVersionError",), ".metadata"),
        Damage("an endless header", _metadata(lambda blob: b"\xff" * 8 + blob[8:]), _REFUSED, ".metadata"),
        Damage("a header of a gigabyte", _metadata(lambda blob: struct.pack("<Q", _GIGABYTE) + blob[8:]), _REFUSED,
               ".metadata"),
        Damage("a header that is nested deeply",
               _metadata(lambda blob: _with_header(blob, b',"x":' + b"[" * 100_000)), _REFUSED, ".metadata"),
        Damage("negative offsets", _spans(lambda start, stop: [start - 8, stop - 8]), _REFUSED, ".metadata"),
        Damage("overlapping blocks", _spans(lambda start, stop: [0, stop]), _REFUSED, ".metadata"),
        Damage("blocks beyond the file", _spans(lambda start, stop: [start, stop + 2**62]), _REFUSED, ".metadata"),
        Damage("offsets in words", _spans(lambda start, stop: [str(start), str(stop)]), _REFUSED, ".metadata"),
        Damage("endless offsets", _spans(lambda start, stop: [start, 10**400]), _REFUSED, ".metadata"),
    ]  # fmt: skip


def _with_header(blob: bytes, tail: bytes) -> bytes:
    """Put other bytes behind the digest of the header, and make the digest right."""
    start = blob.index(b'"header_xxh3":"') + len(b'"header_xxh3":"')
    head, rest = blob[8:start], blob[start + 32 :]
    nbytes = int.from_bytes(blob[:8], "little")
    text = head + b"0" * 32 + b'"' + tail
    text += b" " * (-(8 + len(text)) % 8)
    whole = struct.pack("<Q", len(text)) + text
    digest = xxhash.xxh3_128_hexdigest(whole).encode()
    return whole[:start] + digest + whole[start + 32 :] + rest[nbytes - (start - 8) - 32 :]


def _spans(change: Callable[[int, int], list[Any]]) -> Change:
    """Change the place of the last block of the header, with a right digest."""

    def edit(blob: bytes) -> bytes:
        nbytes = int.from_bytes(blob[:8], "little")
        entries = json.loads(blob[8 : 8 + nbytes])
        name = list(entries)[-1]
        entries[name]["data_offsets"] = change(*entries[name]["data_offsets"])
        text = json.dumps(entries, separators=(",", ":")).encode()
        mark = b'"header_xxh3":"'
        return _with_header(blob, text[text.index(mark) + len(mark) + 33 :])

    return _metadata(edit)


def _columns(blob: bytes) -> tuple[MetadataColumns, FileColumns]:
    source = open_bytes(blob)
    return source.columns(), source.files


def _files(**columns: Callable[[Any], Any]) -> Change:
    """Change columns of the files block, as functions of what they were."""

    def make(blob: bytes) -> Mapping[str, bytes]:
        _, files = _columns(blob)
        changed = {name: change(getattr(files, name).copy()) for name, change in columns.items()}
        return {"files": encode_files(dataclasses.replace(files, **changed))}

    return _blocks(make)


def _filled(value: int) -> Callable[[Any], Any]:
    return lambda column: np.full(len(column), value, np.int64)


def files() -> list[Damage]:
    """Lies about the data files."""
    return [
        Damage("negative sizes", _files(nbytes=_filled(-1)), _REFUSED, ".metadata"),
        Damage("absurd sizes", _files(nbytes=_filled(2**62)), _REFUSED, ".metadata"),
        Damage("sizes of other files", _files(nbytes=_filled(2**61)), ("IncompleteError",), "_rank"),
        Damage("headers longer than files", _files(data_start=_filled(2**61)), _REFUSED, ".metadata"),
        Damage("headers of nothing", _files(data_start=_filled(0)), _REFUSED, ".metadata"),
        Damage("negative headers", _files(data_start=_filled(-64)), _REFUSED, ".metadata"),
        Damage("checksums elsewhere", _files(field_start=_filled(0)), _REFUSED, "_rank"),
        Damage("checksums beyond the header", _files(field_nbytes=_filled(2**61)), _REFUSED, ".metadata"),
        Damage("no checksums", _files(field_nbytes=_filled(0)), _REFUSED, "_rank"),
        Damage("files of absent ranks", _files(rank=lambda rank: rank + 5), ("IncompleteError",), "_rank"),
        Damage("negative ranks", _files(rank=lambda rank: rank - 7), _REFUSED, ".metadata"),
        Damage("ranks beyond 32 bits", _files(rank=lambda rank: rank.astype(np.int64) + 2**40), _REFUSED, ".metadata"),
        Damage("the same file twice", _files(rank=lambda rank: rank * 0), _REFUSED, ".metadata"),
        Damage("files of an unknown kind", _files(kind=_filled(7)), _REFUSED, ".metadata"),
        Damage("all files for tensors", _files(kind=_filled(0)), _REFUSED, ".metadata"),
        Damage("no files", _blocks(lambda blob: {"files": encode_files(_no_files(_columns(blob)[1]))}), _REFUSED,
               ".metadata"),
        Damage("trillions of files", _blocks(lambda blob: {"files": struct.pack("<Q", 1 << 40)}),
               _REFUSED, ".metadata"),
    ]  # fmt: skip


def _no_files(files: FileColumns) -> FileColumns:
    return FileColumns(**{field.name: getattr(files, field.name)[:0] for field in dataclasses.fields(FileColumns)})


def _chunks(**columns: Callable[[Any], Any]) -> Change:
    """Change columns of the chunks and write the whole anew, past the checks of the writer."""

    def edit(blob: bytes) -> bytes:
        found, file_columns = _columns(blob)
        source = open_bytes(blob)
        changed = {name: change(getattr(found.chunks, name).copy()) for name, change in columns.items()}
        body = encode_body(dataclasses.replace(found, chunks=dataclasses.replace(found.chunks, **changed)))
        body = dataclasses.replace(body, tensor_files=np.zeros(0, np.int64))
        return assemble(body, file_columns, source.save, source.writer)

    return _metadata(edit)


def chunks() -> list[Damage]:
    """Lies about where the chunks lie."""
    return [
        Damage("chunks beyond the file", _chunks(byte_offset=lambda at: at + 2**40), _REFUSED, ".metadata"),
        Damage("chunks before the file", _chunks(byte_offset=lambda at: at - 2**20), _REFUSED, ".metadata"),
        Damage("chunks that overlap", _chunks(byte_offset=lambda at: at // 2), _REFUSED, ".metadata"),
        Damage("chunks in files that are not there", _chunks(file=lambda file: file + 100), _REFUSED, ".metadata"),
        Damage("chunks in files of objects", _chunks(file=lambda file: file * 0 + 1), _REFUSED, ".metadata"),
        Damage("chunks at bytes beyond 64 bits", _chunks(byte_offset=_filled(2**63 - 1)), _REFUSED, ".metadata"),
    ]  # fmt: skip


def holes() -> list[Damage]:
    """Chunks that do not make up their tensor: the half of each that rank 1 saved is gone."""

    def edit(blob: bytes) -> bytes:
        found, file_columns = _columns(blob)
        source = open_bytes(blob)
        counts = np.diff(found.tensors.row)
        first = np.ones(len(found.chunks), bool)
        first[found.tensors.row[:-1][counts > 1] + 1] = False
        fewer = found.chunks.part(first)
        row = np.concatenate(([0], np.cumsum(np.where(counts > 1, counts - 1, counts))))
        tensors = dataclasses.replace(found.tensors, row=row)
        body = encode_body(MetadataColumns(tensors, fewer, found.objects, found.nesting))
        return assemble(body, file_columns, source.save, source.writer)

    return [Damage("tensors with holes", _metadata(edit), ("CoverageError",), "large")]


def objects() -> list[Damage]:
    """Lies about where the objects lie."""

    def changed(**columns: Callable[[Any], Any]) -> Change:
        def make(blob: bytes) -> Mapping[str, bytes]:
            found = _columns(blob)[0].objects
            new = {name: change(getattr(found, name).copy()) for name, change in columns.items()}
            return {"objects.0": encode_objects(dataclasses.replace(found, **new))[0]}

        return _blocks(make)

    return [
        Damage("objects that are not there", changed(ordinal=lambda at: at + 1000), _REFUSED, "_rank"),
        Damage("objects before the first", changed(ordinal=lambda at: at - 5), _REFUSED, ".metadata"),
        Damage("objects in files of tensors", changed(file=lambda file: file * 0), _REFUSED, ".metadata"),
        Damage("objects in files that are not there", changed(file=lambda file: file + 9), _REFUSED, ".metadata"),
    ]


def tables() -> list[Damage]:
    """Tables that would take a gigabyte."""

    def counted(name: str, **columns: int) -> Change:
        def make(blob: bytes) -> Mapping[str, bytes]:
            container = BlockContainer(lambda offset, nbytes: blob[offset : offset + nbytes], len(blob))
            first = open_bytes(blob).names()[0] if name == "directory.tensors" else ""
            assert container.block(name)
            one = {key: np.array([columns.get(key, 1)], np.int64) for key in ("runs", "entries", "rows")}
            return {name: encode_directory(GroupDirectory([first or "notes"], **one))}

        return _blocks(make)

    names = _bomb_of_names()
    return [
        Damage("billions of tensors", counted("directory.tensors", runs=2**40, entries=2**40), _REFUSED, ".metadata"),
        Damage("a hundred million tensors", counted("directory.tensors", runs=10**8, entries=10**8),
               _REFUSED, ".metadata"),
        Damage("a hundred million chunks", counted("directory.tensors", rows=10**8), _REFUSED, ".metadata"),
        Damage("a hundred million objects", counted("directory.objects", runs=10**8, entries=10**8),
               _REFUSED, ".metadata"),
        Damage("a name table of a gigabyte", _blocks(lambda blob: {"tensors.0": names}), _REFUSED, ".metadata"),
        Damage("files in a gigabyte", _blocks(lambda blob: {"files": _bomb_of_files(honest=True)}),
               _REFUSED, ".metadata"),
        Damage("files in more than is said", _blocks(lambda blob: {"files": _bomb_of_files(honest=False)}), _REFUSED,
               ".metadata"),
    ]  # fmt: skip


def _bomb_of_names() -> bytes:
    """A name table whose only name is a gigabyte long."""
    writer = ColumnWriter()
    writer.integers(np.ones(1, np.int64))
    writer.integers(np.array([_GIGABYTE]))
    packed = bomb(_GIGABYTE >> 2)
    return writer.to_bytes() + struct.pack("<BQQ", 1, _GIGABYTE, len(packed)) + packed


def _bomb_of_files(*, honest: bool) -> bytes:
    """As many files as make a gigabyte of digests; or just one, whose digest unpacks to more than it should."""
    packed = bomb(_GIGABYTE >> 2)
    count = _GIGABYTE // 16 if honest else 1
    return struct.pack("<Q", count) + struct.pack("<BQQ", 1, 16 * count, len(packed)) + packed
