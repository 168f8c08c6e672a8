"""How large a file of a Hugging Face directory may become, and which tensors share one. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from dcp_core.errors import ArgumentError

MAX_SHARD_SIZE = "5GB"

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_EXPECTED = 'expected a positive number of bytes, or a text such as "5GB" or "512MiB"'


def parse_shard_size(size: int | str) -> int:
    """Read the largest size of a file.

    Args:
        size: Bytes, or a number with a unit: KB, MB, GB, TB count by 1000, KiB, MiB, GiB, TiB by 1024.

    Returns:
        Bytes, at least 1.

    Raises:
        ArgumentError: 0, or no size at all.

    >>> parse_shard_size("5GB"), parse_shard_size("1.5 KiB"), parse_shard_size(7)
    (5000000000, 1536, 7)
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = None if match is None else _UNITS.get(match[2].upper())
        nbytes = 0 if match is None or unit is None else int(Decimal(match[1]) * unit)
    else:
        nbytes = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if nbytes <= 0:
        raise ArgumentError(f"max_shard_size={size!r}: {_EXPECTED}")
    return nbytes


def share_out(nbytes: Sequence[int], limit: int) -> list[list[int]]:
    """Which tensors share a file: in order, each file as full as the limit allows, as `save_pretrained` does it.

    A tensor larger than the limit has a file of its own; those around it may share one, which comes after it.

    Args:
        nbytes: Bytes of each tensor.
        limit: Of a file's tensors.

    Returns:
        Positions of the tensors of each file; one empty file where there are no tensors.

    >>> share_out([6, 6, 2, 11, 2, 2], 10)
    [[0], [3], [1, 2, 4], [5]]
    """
    files: list[list[int]] = []
    current: list[int] = []
    room = limit
    for position, size in enumerate(nbytes):
        if size > limit:
            files.append([position])
            continue
        if size > room:
            files.append(current)
            current, room = [], limit
        current.append(position)
        room -= size
    return [*files, current] if current or not files else files
