"""Conversions in one process: full states and Hugging Face directories, with tensors of MindSpore.

Imports MindSpore when a function needs its tensors, and torch when a file that `torch.save` wrote is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from dcp_core.adapter import Adapter
from dcp_core.convert import offline
from dcp_core.convert.shard_sizes import MAX_SHARD_SIZE
from dcp_core.convert.to_huggingface import ConversionReport, HuggingFaceConversion
from dcp_core.dtype import DType
from dcp_core.errors import UnsupportedValueError
from dcp_core.execution.interfaces import CheckpointId, StorageReader
from dcp_core.formats.cuts import Cut
from dcp_core.formats.key_map import KeyMap
from dcp_core.metadata import Metadata
from dcp_core.plugins import adapter_named
from dcp_core.recipes.places import dcp_reader, options_for
from dcp_core.recipes.torch_package import torch_package_module

__all__ = [
    "ConversionReport",
    "convert_dcp_to_huggingface",
    "convert_full_checkpoint_to_dcp",
    "dcp_to_full_state_dict",
    "full_state_dict_to_dcp_format",
    "parse_checkpoint_from_huggingface",
    "save_state_dict_as_huggingface_format",
]


class _MindSpore:
    """`dcp_core.convert.offline.OfflineFramework` for MindSpore."""

    @property
    def adapter(self) -> Adapter:
        return adapter_named("mindspore")

    def tensor_of_bits(self, bits: npt.NDArray[Any], dtype: DType) -> Any:
        mindspore = importlib.import_module("mindspore")
        tensor = mindspore.Tensor.from_numpy(bits)
        if dtype.numpy is not None:
            return tensor
        kind = getattr(mindspore, dtype.name, None)
        if kind is None:
            raise UnsupportedValueError(f"MindSpore {mindspore.__version__} has no dtype {dtype.name}")
        return tensor.view(kind)

    def load_full(self, path: str) -> Mapping[Any, Any]:
        found: Mapping[Any, Any] = torch_package_module("offline_transform").load_full_checkpoint(path)
        return found


_MINDSPORE = _MindSpore()


def convert_full_checkpoint_to_dcp(
    src: CheckpointId,
    dst: CheckpointId,
    src_platform: str = "huggingface",
    *,
    key_map: KeyMap | None = None,
    cuts: Mapping[str, Cut] | None = None,
    durable: bool = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Metadata:
    """Convert a full, unsharded checkpoint into one that any layout loads.

    Args:
        src: With "huggingface" a safetensors file, or a directory with `model.safetensors` or an index. With "torch" a
            file that `torch.save` wrote (read by torch, with weights-only safety), a directory with `pytorch_model.bin`
            files, or a safetensors file.
        dst: The directory of the new checkpoint.
        src_platform: "huggingface" or "torch".
        key_map: How names change, for safetensors: a prefix that is put before every name, a mapping of regular
            expressions to replacements, or a function, which gives None to leave a tensor out.
        cuts: For tensors that the state cuts otherwise than the files, how they are made of those in the files.
        durable: Whether data reaches the disk before this returns.
        progress: Whether to show a bar; None: where a person watches.
        storage_options: What fsspec gets beside a URL.

    Returns:
        The description of the new checkpoint.

    Raises:
        DcpError: What is at `dst` is as it was.
    """
    return offline.convert_full_checkpoint_to_dcp(
        _MINDSPORE,
        src,
        dst,
        src_platform,
        key_map=key_map,
        cuts=cuts,
        durable=durable,
        progress=progress,
        storage_options=storage_options,
    )


def full_state_dict_to_dcp_format(
    state_dict: Mapping[Any, Any],
    dst: CheckpointId,
    *,
    durable: bool = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Metadata:
    """Save a full state by this process alone, whatever job it belongs to.

    Args:
        state_dict: A state with whole tensors.
        dst: The directory of the new checkpoint.
        durable: Whether data reaches the disk before this returns.
        progress: Whether to show a bar; None: where a person watches.
        storage_options: What fsspec gets beside a URL.

    Returns:
        The description of the new checkpoint.

    Raises:
        DcpError: What is at `dst` is as it was.
    """
    return offline.full_state_dict_to_dcp_format(
        _MINDSPORE, state_dict, dst, durable=durable, progress=progress, storage_options=storage_options
    )


def dcp_to_full_state_dict(
    src: CheckpointId | StorageReader,
    *,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Load a whole checkpoint into new tensors in host memory.

    Of values that every rank has for itself the lowest rank's is taken, with a warning.

    Args:
        src: The checkpoint's directory, or a reader of another format.
        progress: Whether to show a bar; None: where a person watches.
        storage_options: What fsspec gets beside a URL.

    Returns:
        The state, nested as it was saved; tied tensors are one tensor. A namedtuple comes back as a tuple.

    Raises:
        DcpError: There is no such checkpoint, it is damaged, or a pickled value in it is not allowed.
    """
    return offline.dcp_to_full_state_dict(_MINDSPORE, src, progress=progress, storage_options=storage_options)


def parse_checkpoint_from_huggingface(
    path: CheckpointId,
    *,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Load all tensors of a Hugging Face checkpoint into host memory.

    Args:
        path: A safetensors file, or a directory with `model.safetensors` or an index; only what the index names is
            read.
        progress: Whether to show a bar; None: where a person watches.
        storage_options: What fsspec gets beside a URL.

    Returns:
        The tensors by name.

    Raises:
        DcpError: There are no such files, or they are damaged.
    """
    return offline.parse_checkpoint_from_huggingface(
        _MINDSPORE, path, progress=progress, storage_options=storage_options
    )


def save_state_dict_as_huggingface_format(
    dir: CheckpointId,
    state_dict: Mapping[str, Any],
    max_shard_size: int | str = MAX_SHARD_SIZE,
    *,
    overwrite: bool = True,
    durable: bool = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ConversionReport:
    """Write a full state as a Hugging Face directory.

    Args:
        dir: The directory. Weights that are there stay until the new ones are written.
        state_dict: Whole tensors by name; of nested mappings, and of modules in them, the keys are joined by dots.
        max_shard_size: Largest size of a file's tensors, as "5GB" or a number of bytes; a tensor that is larger has a
            file of its own.
        overwrite: False: refuse to replace weights that are there.
        durable: Whether data reaches the disk before this returns.
        progress: Whether to show a bar; None: where a person watches.
        storage_options: What fsspec gets beside a URL.

    Returns:
        The files, and what was left out: values that are no tensors, and further names of tied tensors.

    Raises:
        ArgumentError: A tensor is sharded; a size that is none.
        DcpError: Nothing of the new files is left then.
    """
    return offline.save_state_dict_as_huggingface_format(
        _MINDSPORE,
        dir,
        state_dict,
        max_shard_size,
        overwrite=overwrite,
        durable=durable,
        progress=progress,
        storage_options=storage_options,
    )


def convert_dcp_to_huggingface(
    src: CheckpointId | StorageReader,
    dst: CheckpointId,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    prefix: str = "",
    dtype: Any = None,
    key_map: KeyMap | None = None,
    *,
    cuts: Mapping[str, Cut] | None = None,
    overwrite: bool = True,
    durable: bool = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ConversionReport:
    """Convert a checkpoint into a Hugging Face directory, piece by piece; MindSpore itself is not needed.

    Args:
        src: The checkpoint's directory, or a reader of another format.
        dst: The directory. Weights that are there stay until the new ones are written.
        max_shard_size: Largest size of a file's tensors, as "5GB" or a number of bytes; a tensor that is larger has a
            file of its own.
        prefix: Only names under it are converted, without it: "model" where the state was `{"model": ...}`.
        dtype: What floating-point tensors become, a MindSpore dtype or its name; None: they stay.
        key_map: How names (without the prefix) change: a prefix that is put before every name, a mapping of regular
            expressions to replacements, or a function, which gives None to leave a tensor out.
        cuts: For tensors of the directory that are cut otherwise than in the checkpoint, how they are made of those.
        overwrite: False: refuse to replace weights that are there.
        durable: Whether data reaches the disk before this returns.
        progress: Whether to show a bar; None: where a person watches.
        storage_options: What fsspec gets beside a URL.

    Returns:
        The files, and what of the checkpoint is not in them and why; a warning names it, too.

    Raises:
        ArgumentError: A size, type, name or prefix that makes no sense.
        DcpError: The checkpoint is damaged, or the storage refused. Nothing of the new files is left then.
    """
    of_src, of_dst = options_for(storage_options, src, dst)
    reader = src if isinstance(src, StorageReader) else dcp_reader(src, of_src)
    name = dtype if dtype is None or isinstance(dtype, str) else str(dtype).rpartition(".")[2].lower()
    conversion = HuggingFaceConversion(
        reader, max_shard_size=max_shard_size, prefix=prefix, dtype=name, key_map=key_map, cuts=cuts
    )
    return conversion.run(dst, overwrite=overwrite, durable=durable, progress=progress, storage_options=of_dst)
