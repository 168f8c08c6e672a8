"""What dcp_torch registers with the core. Imports nothing heavy: torch is imported by the factories."""

from __future__ import annotations

from dcp_core.hookspecs import AdapterEntry, ObjectCodecEntry, hookimpl


@hookimpl
def dcp_adapters() -> list[AdapterEntry]:
    """The torch adapter; it describes DTensor and ShardedTensor itself."""
    return [AdapterEntry("torch", framework="torch", factory="dcp_torch.adapter:TorchAdapter")]


@hookimpl
def dcp_object_codecs() -> list[ObjectCodecEntry]:
    """Safe encodings of the torch values that stand inside objects."""
    return [
        ObjectCodecEntry("torch.Tensor", "dcp_torch.codecs:tensor_codec"),
        ObjectCodecEntry("torch.nn.parameter.Parameter", "dcp_torch.codecs:parameter_codec"),
        ObjectCodecEntry("torch.Size", "dcp_torch.codecs:size_codec"),
        ObjectCodecEntry("torch.dtype", "dcp_torch.codecs:dtype_codec"),
        ObjectCodecEntry("torch.device", "dcp_torch.codecs:device_codec"),
    ]
