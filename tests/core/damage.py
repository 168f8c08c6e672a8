"""Damage to the files of a checkpoint: what is done to a copy, and what a load must say about it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from dcp_core.formats.block_container import BlockContainer
from dcp_core.formats.bytes_file import ENTRY_NBYTES, PREAMBLE_NBYTES, parse_index, parse_preamble
from dcp_core.formats.checksums import BLOCK_BYTES
from dcp_core.formats.safetensors_file import SAVE_ID_START

Change = Callable[[Path], None]


@dataclass(frozen=True)
class Damage:
    """What happens to a checkpoint.

    Attributes:
        name: Tells it from others; names the directory of the copy.
        change: Does it to a directory.
        kinds: Classes of the error that a load may raise.
        text: Stands in its message: the name of the damaged file, as a rule.
        touches: Whether it can only be found once reading has begun; targets are undefined then.
    """

    name: str
    change: Change
    kinds: tuple[str, ...]
    text: str
    touches: bool = False


def copy_linked(template: Path, directory: Path) -> None:
    """Copy a checkpoint; its files are links to the same content until `rewrite` parts them."""
    shutil.copytree(template, directory, copy_function=os.link)


def rewrite(path: Path, content: bytes) -> None:
    """Give a file other content without changing its other links."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def edited(file: str, edit: Callable[[bytes], bytes]) -> Change:
    """Change the content of a file."""
    return lambda directory: rewrite(directory / file, edit((directory / file).read_bytes()))


def flipped(file: str, position: int, mask: int = 1) -> Change:
    """Flip bits of one byte; positions before 0 count from the end."""

    def edit(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= mask
        return bytes(changed)

    return edited(file, edit)


def flips(file: str, positions: Sequence[int], kinds: tuple[str, ...], *, touches: bool = False) -> list[Damage]:
    """One damage for each position."""
    return [
        Damage(f"{file} flipped at {position}", flipped(file, position, 1 << position % 7), kinds, file, touches)
        for position in positions
    ]


def safetensors_header_positions(content: bytes) -> list[int]:
    """Bytes of each part of a data file's header: length, names, id, checksums, entries, padding."""
    data_start = 8 + int.from_bytes(content[:8], "little")
    field_start = content.index(b'"dcp.checksums":"') + len(b'"dcp.checksums":"')
    field_stop = content.index(b'"', field_start)
    entries = (field_stop + data_start) // 2
    return [
        0, 2, 7, 8, 10, SAVE_ID_START - 1, SAVE_ID_START, SAVE_ID_START + 31,
        field_start, (field_start + field_stop) // 2, field_stop - 1, field_stop, entries, entries + 1, data_start - 1,
    ]  # fmt: skip


def data_block_positions(content: bytes) -> list[int]:
    """The first and the last byte of every checksum block of a data file, and one within."""
    data_start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:data_start])
    positions = []
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            for first in range(start, stop, BLOCK_BYTES):
                last = min(first + BLOCK_BYTES, stop) - 1
                positions += [first, (first + last) // 2, last]
    return sorted({data_start + position for position in positions})


def bytes_file_positions(content: bytes) -> list[int]:
    """Bytes of each part of a `.bytes` file: magic, version, count, index, and each value."""
    count = parse_preamble(content[:PREAMBLE_NBYTES], len(content))
    data_start = PREAMBLE_NBYTES + count * ENTRY_NBYTES
    index = parse_index(content[PREAMBLE_NBYTES:data_start], None, len(content))
    values = [int(offset) for offset in index.offsets] + [int(offset) - 1 for offset in index.offsets[1:]]
    return sorted(
        {0, 7, 8, 11, 12, 15, PREAMBLE_NBYTES, PREAMBLE_NBYTES + 8, data_start - 1, *values, len(content) - 1}
    )


def metadata_positions(content: bytes) -> list[int]:
    """Bytes of each part of a `.metadata`: length, header digest, strings, entries, and each block."""
    container = BlockContainer(lambda offset, nbytes: content[offset : offset + nbytes], len(content))
    data_start = 8 + int.from_bytes(content[:8], "little")
    lengths = [len(container.block(name)) for name in container.block_names]
    ends = [data_start + end for end in accumulate(lengths)]
    blocks = [
        position for end, n in zip(ends, lengths, strict=True) if n for position in (end - n, end - n // 2, end - 1)
    ]
    strings = [content.index(key) + len(key) for key in (b'"save_id":"', b'"world_size":"', b'"block_xxh3":"')]
    return sorted({0, 3, 7, 8, 20, 45, 60, *strings, data_start // 2, data_start - 1, *blocks})


def other_lengths(file: str, nbytes: int, kinds: tuple[str, ...]) -> list[Damage]:
    """A file cut short by a byte, to half, to nothing, grown, gone, or something that is no file."""
    whole = {"by a byte": nbytes - 1, "to half": nbytes // 2, "to one byte": 1, "to nothing": 0}
    return [
        *(Damage(f"{file} cut {name}", edited(file, lambda raw, n=stop: raw[:n]), kinds, file)  # type: ignore[misc]
          for name, stop in whole.items()),
        Damage(f"{file} with a byte more", edited(file, lambda content: content + b"\0"), kinds, file),
    ]  # fmt: skip


def no_files(file: str, missing_kinds: tuple[str, ...]) -> list[Damage]:
    """Nothing, or something that is no file, in the place of a file."""

    def replaced_by(make: Callable[[Path], object]) -> Change:
        def change(directory: Path) -> None:
            (directory / file).unlink()
            make(directory / file)

        return change

    return [
        Damage(f"{file} missing", replaced_by(lambda path: None), missing_kinds, file),
        Damage(f"{file} a broken link", replaced_by(lambda path: path.symlink_to("nowhere")), missing_kinds, file),
        Damage(f"{file} a link to itself", replaced_by(lambda path: path.symlink_to(path)), ("StorageError",), file),
        Damage(f"{file} a directory", replaced_by(lambda path: path.mkdir()), ("CorruptError",), file),
        Damage(f"{file} a pipe", replaced_by(os.mkfifo), ("CorruptError",), file),
        Damage(f"{file} a device", replaced_by(lambda path: path.symlink_to("/dev/zero")), ("CorruptError",), file),
    ]


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self._command,)


def malicious_pickle(command: str, protocol: int) -> bytes:
    """A pickle that runs a command."""
    return pickle.dumps({"state_dict_metadata": Malicious(command)}, protocol)


def bomb(nbytes: int) -> bytes:
    """Zeros, compressed a thousandfold."""
    deflater = zlib.compressobj(9)
    piece = bytes(1 << 20)
    parts = [deflater.compress(piece) for _ in range(nbytes >> 20)]
    return b"".join((*parts, deflater.flush()))
