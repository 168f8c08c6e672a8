"""One group of MindSpore ranks that broadcast to each other: the core's, with what MindSpore's memory is as wires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcp_core.coordination import broadcast_group
from dcp_mindspore import wires


class MindSporeBroadcastGroup(broadcast_group.BroadcastGroup):
    """`dcp_core.adapter.BroadcastGroup` for MindSpore."""

    def wire(self, view: Any) -> Any | None:
        """The view's own memory as bytes; None where it is not plain bytes."""
        return wires.wire_of(view)

    def temporary(self, nbytes: int, view: Any) -> Any:
        """Bytes where a view lies, of undefined content."""
        return wires.new_wire(nbytes, view)

    def pack(self, views: Sequence[Any], wire: Any) -> None:
        """Copy the raw bits of views, one after the other, row-major, to a wire."""
        wires.pack(views, wire)

    def unpack(self, wire: Any, views: Sequence[Any]) -> None:
        """Undo `pack`."""
        wires.unpack(wire, views)
