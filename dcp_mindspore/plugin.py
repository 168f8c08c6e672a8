"""What dcp_mindspore registers with the core. Imports nothing heavy: MindSpore is imported by the factories."""

from __future__ import annotations

from dcp_core.hookspecs import AdapterEntry, ObjectCodecEntry, hookimpl


@hookimpl
def dcp_adapters() -> list[AdapterEntry]:
    """The MindSpore adapter; it describes HyperParallel's DTensor itself."""
    return [AdapterEntry("mindspore", framework="mindspore", factory="dcp_mindspore.adapter:MindSporeAdapter")]


@hookimpl
def dcp_object_codecs() -> list[ObjectCodecEntry]:
    """Safe encodings of the MindSpore values that stand inside objects; the adapter registers more."""
    return [ObjectCodecEntry("mindspore.common.tensor.Tensor", "dcp_mindspore.codecs:tensor_codec")]
