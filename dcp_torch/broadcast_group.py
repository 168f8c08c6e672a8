"""One group of torch ranks that broadcast to each other: the core's, with torch tensors as wires."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcp_core.coordination import broadcast_group
from dcp_torch import wires
from dcp_torch.wires import View


class TorchBroadcastGroup(broadcast_group.BroadcastGroup):
    """`dcp_core.adapter.BroadcastGroup` for torch."""

    def wire(self, view: View) -> torch.Tensor | None:
        """The view's own memory as bytes; None where it is not plain bytes."""
        return wires.wire_of(view)

    def temporary(self, nbytes: int, view: View) -> torch.Tensor:
        """Bytes on the device of a view, of undefined content."""
        return wires.new_wire(nbytes, view)

    def pack(self, views: Sequence[View], wire: torch.Tensor) -> None:
        """Copy the raw bits of views, one after the other, row-major, to a wire."""
        wires.pack(views, wire)

    def unpack(self, wire: torch.Tensor, views: Sequence[View]) -> None:
        """Undo `pack`, in one operation."""
        wires.unpack(wire, views)
