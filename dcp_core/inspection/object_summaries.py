"""Says in a few words what the objects of a checkpoint are, without running anything that lies in them.

In: a reader, and objects as the description has them. Out: size and summary of each. A pickled object is never made:
the classes that it names are read off its bytes.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dcp_core.errors import CorruptError, DcpError
from dcp_core.formats.columns_source import MetadataColumns
from dcp_core.formats.objects import decode_value, pickled_classes
from dcp_core.metadata import EVERY_RANK, StoredObject

READ_BYTES = 1 << 20
"""Longer objects are not read, only measured."""

_CHARS = 80
_CLASSES = 4
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 4


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One value that is no tensor.

    Attributes:
        name: Its name.
        rank: Whose own value it is; None for all ranks'.
        per_rank: Every rank was told to keep its own.
        nbytes: Length of its encoding; None where that cannot be read.
        summary: What it is, in a few words.
        classes: Classes that a load would have to be allowed, to make it.
    """

    name: str
    rank: int | None
    per_rank: bool
    nbytes: int | None
    summary: str
    classes: tuple[str, ...] = ()


def summarize_objects(
    columns: MetadataColumns, rows: Iterable[int], read: Callable[[StoredObject], bytes],
    measure: Callable[[StoredObject], int] | None,
) -> list[ObjectEntry]:  # fmt: skip
    """Describe some objects. What cannot be read says so in its summary.

    Args:
        columns: All that is described.
        rows: Which objects.
        read: Gives the encoding of one.
        measure: Gives the length of an encoding without reading it; None where that is not known.
    """
    return [_entry(columns, row, read, measure) for row in rows]


def _entry(
    columns: MetadataColumns, row: int, read: Callable[[StoredObject], bytes],
    measure: Callable[[StoredObject], int] | None,
) -> ObjectEntry:  # fmt: skip
    objects = columns.objects
    rank, per_rank = int(objects.rank[row]), bool(objects.per_rank[row])
    stored = StoredObject(objects.names[row], (), rank, per_rank, int(objects.file[row]), int(objects.ordinal[row]))
    shown_rank = None if rank == EVERY_RANK else rank
    nbytes = None
    try:
        nbytes = None if measure is None else measure(stored)
        if nbytes is not None and nbytes > READ_BYTES:
            return ObjectEntry(stored.name, shown_rank, per_rank, nbytes, "too long to be shown")
        blob = read(stored)
        classes = pickled_classes(blob)
        return ObjectEntry(stored.name, shown_rank, per_rank, len(blob), summary_of(blob), classes)
    except DcpError as error:
        return ObjectEntry(stored.name, shown_rank, per_rank, nbytes, f"unreadable: {error}")


def summary_of(blob: bytes) -> str:
    """Say what an encoding stands for; plain values as Python prints them, cut short.

    Raises:
        CorruptError: It is no encoding.
    """
    classes = pickled_classes(blob)
    if classes:
        more = f" and {len(classes) - _CLASSES} more" if len(classes) > _CLASSES else ""
        return f"pickled: {', '.join(classes[:_CLASSES])}{more}"
    try:
        value = decode_value(blob)
    except CorruptError:
        raise
    except DcpError as error:  # a codec of a framework that is not loaded
        return f"not shown: {error}"
    try:
        text = " ".join(_SHORT.repr(value).split())
    except Exception as error:  # of values whose codecs are not ours
        text = f"{type(value).__name__}, which cannot be shown: {type(error).__name__}"
    return text if len(text) <= _CHARS else f"{text[: _CHARS - 3]}..."
