"""The regions of a load plan as bytes, for a coordinator that looks at all ranks' plans."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_core.formats.objects import decode_value, encode_value
from dcp_core.metadata import MetadataIndex
from dcp_core.planning.items import ItemType, ReadItem


def encode_items(items: Sequence[ReadItem]) -> bytes:
    """Flatten the regions of a plan."""
    rows = tuple(
        (
            item.type.value, item.dest_index.fqn, item.dest_index.offset, item.dest_index.index, item.dest_offsets,
            item.storage_index.fqn, item.storage_index.offset, item.storage_index.index, item.storage_offsets,
            item.lengths, item.source,
        )
        for item in items
    )  # fmt: skip
    return encode_value(rows)


def decode_items(blob: bytes) -> list[ReadItem]:
    """Undo `encode_items`."""
    found = decode_value(blob, name="a load plan")
    assert isinstance(found, tuple)
    return [
        ReadItem(
            ItemType(kind), MetadataIndex(dest, dest_offset, dest_index), dest_offsets,
            MetadataIndex(storage, storage_offset, storage_index), storage_offsets, lengths, source,
        )
        for (kind, dest, dest_offset, dest_index, dest_offsets, storage, storage_offset, storage_index, storage_offsets,
             lengths, source) in found
    ]  # fmt: skip
