"""How the files of a checkpoint are called.

A plain name (`_rank0_.safetensors`) carries no id; every other carries the id of its save as a suffix
(`_rank0_.<id>.safetensors`), so that a save over a checkpoint never touches the old files.
"""

from __future__ import annotations

import re

METADATA_NAME = ".metadata"
INTENT_PREFIX = ".intent-"
MAILBOX_PREFIX = ".mailbox-"
JOIN_NAME = "join"
"""After `MAILBOX_PREFIX` in the place of a save's id: where ranks meet that have no id yet."""

TENSOR_FILE = 0
OBJECT_FILE = 1

_ENDINGS = {TENSOR_FILE: "safetensors", OBJECT_FILE: "bytes"}
_KINDS = {ending: kind for kind, ending in _ENDINGS.items()}
_NUMBER = r"(?:0|[1-9][0-9]{0,9})"
_DATA_NAME = re.compile(rf"_rank({_NUMBER})_(?:({_NUMBER})_)?(\.[0-9a-f]{{32}})?\.(safetensors|bytes)")
_RANK_METADATA_NAME = re.compile(rf"({_NUMBER})\.metadata")


def data_file_name(rank: int, part: int, kind: int, suffix: str) -> str:
    """Name a data file.

    Args:
        rank: Who writes it.
        part: 0 for the first file of a rank, else the number of the further part.
        kind: `TENSOR_FILE` or `OBJECT_FILE`.
        suffix: "" or "." and the 32 hex digits of the save's id.

    >>> data_file_name(3, 1, TENSOR_FILE, "")
    '_rank3_1_.safetensors'
    """
    further = f"{part}_" if part else ""
    return f"_rank{rank}_{further}{suffix}.{_ENDINGS[kind]}"


def parse_data_file_name(name: str) -> tuple[int, int, int, str] | None:
    """Undo `data_file_name`: (rank, part, kind, suffix), or None for another name.

    >>> parse_data_file_name("_rank3_.bytes")
    (3, 0, 1, '')
    """
    match = _DATA_NAME.fullmatch(name)
    if match is None or match[2] == "0":
        return None
    return int(match[1]), int(match[2] or 0), _KINDS[match[4]], match[3] or ""


def rank_metadata_name(rank: int) -> str:
    """Name the metadata of a rank that saved without collectives.

    >>> rank_metadata_name(2)
    '2.metadata'
    """
    return f"{rank}{METADATA_NAME}"


def parse_rank_metadata_name(name: str) -> int | None:
    """Undo `rank_metadata_name`; None for another name."""
    match = _RANK_METADATA_NAME.fullmatch(name)
    return int(match[1]) if match else None
