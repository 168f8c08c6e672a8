"""The bytes that an exchange puts on a board: several parts in one payload, and the frame around a payload.

A packed payload is the number of its parts, their lengths (both as base-128 numbers, low digits first), then the parts
back to back. A frame is one byte for what it is, one for the length of the stage's label, the label, then the body.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import xxhash

from dcp_core.errors import CoordinationError
from dcp_core.key_codec import varint

STAGE_BYTES = 22
FRAME_BYTES = 2 + STAGE_BYTES
"""The most that a frame adds to its body."""

_MOST_DIGITS = 9


class FrameKind(IntEnum):
    """What a message is: from a rank its payload or its error, from the coordinator an answer or the error."""

    PAYLOAD = 1
    ERROR = 2
    SHARED = 3
    OWN = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of an exchange.

    Attributes:
        kind: What the body is. `OWN` has none: it says that every rank's own answer has been posted.
        label: `stage_label` of the stage that its sender is in.
        body: The payload, the answer, or `errors.encode_error` bytes.
    """

    kind: FrameKind
    label: str
    body: bytes = b""


def stage_label(stage: str) -> str:
    """Shorten a stage's name so that a frame stays small; names of up to 22 bytes stay whole.

    >>> stage_label("save/agree"), len(stage_label("load/some-very-long-name-of-a-stage"))
    ('save/agree', 22)
    """
    name = stage.encode("ascii", "backslashreplace")
    if len(name) <= STAGE_BYTES:
        return name.decode()
    return f"{name[:13].decode()}~{xxhash.xxh3_64_hexdigest(name)[:8]}"


def encode_frame(frame: Frame) -> bytes:
    """Flatten a frame."""
    label = frame.label.encode("ascii")
    return bytes((frame.kind, len(label))) + label + frame.body


def decode_frame(message: bytes) -> Frame:
    """Undo `encode_frame`.

    Raises:
        CoordinationError: Not a frame.
    """
    try:
        end = 2 + message[1]
        label = message[2:end].decode("ascii")
        kind = FrameKind(message[0])
    except (IndexError, ValueError) as error:
        raise CoordinationError(f"a message of {len(message)} bytes is no frame of an exchange: {error}") from error
    if end > len(message) or end > FRAME_BYTES:
        raise CoordinationError(f"a message of {len(message)} bytes is no frame of an exchange: it is cut short")
    return Frame(kind, label, message[end:])


def pack(*parts: bytes) -> bytes:
    """Join parts into one payload.

    >>> unpack(pack(b"a", b"", b"bc"))
    [b'a', b'', b'bc']
    """
    lengths = b"".join(varint(len(part)) for part in parts)
    return b"".join((varint(len(parts)), lengths, *parts))


def unpack(payload: bytes) -> list[bytes]:
    """Undo `pack`.

    Raises:
        CoordinationError: Bytes that `pack` never makes.
    """
    count, position = _decode_number(payload, 0)
    if count > len(payload) - position:
        raise CoordinationError(f"a payload of {len(payload)} bytes claims to hold {count} parts")
    lengths = []
    for _ in range(count):
        length, position = _decode_number(payload, position)
        lengths.append(length)
    if position + sum(lengths) != len(payload):
        found = len(payload) - position
        raise CoordinationError(f"a payload's parts should have {sum(lengths)} bytes and have {found}")
    parts = []
    for length in lengths:
        parts.append(payload[position : position + length])
        position += length
    return parts


def _decode_number(payload: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    number = 0
    for index, digit in enumerate(payload[position : position + _MOST_DIGITS]):
        number |= (digit & 127) << 7 * index
        if digit < 128:
            return number, position + index + 1
    raise CoordinationError(f"a payload of {len(payload)} bytes ends, or goes wrong, inside a number")
