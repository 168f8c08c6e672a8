"""The seam: what a framework hands to the core.

An `Adapter` serves one framework: it recognises its tensors, describes them, reaches their elements, and knows the
process group. A `Describer` serves one foreign tensor type on top of an adapter. Both are found through the plugins
of `dcp_core.hookspecs`.
"""

from __future__ import annotations

from dcp_core.adapter.adapter_set import AdapterSet
from dcp_core.adapter.broadcasts import BroadcastGroup, Broadcasts, BroadcastWork
from dcp_core.adapter.channels import ChannelSpec, KeyValueChannel, PlainArgument, drain, rendezvous_address
from dcp_core.adapter.protocols import Adapter, Describer, ProcessGroup
from dcp_core.adapter.state_rules import StateRules

__all__ = [
    "Adapter",
    "AdapterSet",
    "BroadcastGroup",
    "BroadcastWork",
    "Broadcasts",
    "ChannelSpec",
    "Describer",
    "KeyValueChannel",
    "PlainArgument",
    "ProcessGroup",
    "StateRules",
    "drain",
    "rendezvous_address",
]
