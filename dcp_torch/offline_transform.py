"""Conversions in one process: full states, Hugging Face directories, and checkpoints of torch DCP.

Tensors of a checkpoint that is converted into another one are read and written piece by piece: memory stays bounded,
whatever the size. Functions that take or return a whole state hold it once. On a terminal a bar shows how far it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch

from dcp_core.adapter import Adapter
from dcp_core.convert import offline
from dcp_core.convert.shard_sizes import MAX_SHARD_SIZE
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.convert.to_huggingface import ConversionReport, HuggingFaceConversion
from dcp_core.dtype import DType
from dcp_core.errors import ArgumentError, CorruptError, IncompleteError, NotFoundError
from dcp_core.execution.checkpoint_place import local_path
from dcp_core.execution.interfaces import CheckpointId, StorageReader
from dcp_core.formats.cuts import Cut
from dcp_core.formats.key_map import KeyMap
from dcp_core.metadata import Metadata
from dcp_core.plugins import adapter_named, open_storage
from dcp_core.recipes.places import dcp_reader, options_for
from dcp_core.storage.base import check_name
from dcp_torch.elements import dtype_of, tensor_of_bits
from dcp_torch.torch_dcp import TorchDCPReader
from dcp_torch.torch_values import load_value

__all__ = [
    "ConversionReport",
    "convert_dcp_to_huggingface",
    "convert_full_checkpoint_to_dcp",
    "convert_torch_dcp_to_dcp",
    "dcp_to_full_state_dict",
    "full_state_dict_to_dcp_format",
    "parse_checkpoint_from_huggingface",
    "save_state_dict_as_huggingface_format",
]

_BIN_NAME = "pytorch_model.bin"
_BIN_INDEX = "pytorch_model.bin.index.json"


class _Torch:
    """`dcp_core.convert.offline.OfflineFramework` for torch."""

    @property
    def adapter(self) -> Adapter:
        return adapter_named("torch")

    def tensor_of_bits(self, bits: npt.NDArray[Any], dtype: DType) -> torch.Tensor:
        return tensor_of_bits(bits, dtype)

    def load_full(self, path: str) -> Mapping[Any, Any]:
        return load_full_checkpoint(path)


_TORCH = _Torch()


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
            file that `torch.save` wrote (read with weights-only safety), a directory with `pytorch_model.bin` files, or
            a safetensors file.
        dst: The directory of the new checkpoint.
        src_platform: "huggingface" or "torch".
        key_map: How names change, for safetensors: a prefix that is put before every name, a mapping of regular
            expressions to replacements, or a function, which gives None to leave a tensor out.
        cuts: For tensors that the state cuts otherwise than the files, how they are made of those in the files; see
            `HuggingFaceReader`.
        durable: Whether data reaches the disk before this returns.
        progress: Whether to show a bar; None: where a person watches.
        storage_options: What fsspec gets beside a URL.

    Returns:
        The description of the new checkpoint.

    Raises:
        DcpError: What is at `dst` is as it was.
    """
    return offline.convert_full_checkpoint_to_dcp(
        _TORCH,
        src,
        dst,
        src_platform,
        key_map=key_map,
        cuts=cuts,
        durable=durable,
        progress=progress,
        storage_options=storage_options,
    )


def convert_torch_dcp_to_dcp(
    src: CheckpointId,
    dst: CheckpointId,
    *,
    durable: bool = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Metadata:
    """Convert a checkpoint that `torch.distributed.checkpoint` wrote, tensors and values, in bounded memory.

    Args:
        src: Its directory.
        dst: The directory of the new checkpoint.
        durable: Whether data reaches the disk before this returns.
        progress: Whether to show a bar; None: where a person watches.
        storage_options: What fsspec gets beside a URL.

    Returns:
        The description of the new checkpoint.

    Raises:
        DcpError: What is at `dst` is as it was.
    """
    of_src, of_dst = options_for(storage_options, src, dst)
    reader = TorchDCPReader(src, open_url=open_storage, storage_options=of_src)
    return convert_to_dcp(reader, dst, durable=durable, progress=progress, storage_options=of_dst)


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
        state_dict: A state as `dcp_torch.save` takes it, with whole tensors.
        dst: The directory of the new checkpoint.
        durable: Whether data reaches the disk before this returns.
        progress: Whether to show a bar; None: where a person watches.
        storage_options: What fsspec gets beside a URL.

    Returns:
        The description of the new checkpoint.

    Raises:
        CoverageError: A tensor is sharded.
        DcpError: What is at `dst` is as it was.
    """
    return offline.full_state_dict_to_dcp_format(
        _TORCH, state_dict, dst, durable=durable, progress=progress, storage_options=storage_options
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
    return offline.dcp_to_full_state_dict(_TORCH, src, progress=progress, storage_options=storage_options)


def parse_checkpoint_from_huggingface(
    path: CheckpointId,
    *,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
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
    return offline.parse_checkpoint_from_huggingface(_TORCH, path, progress=progress, storage_options=storage_options)


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
    """Write a full state as a Hugging Face directory, as `save_pretrained` lays one out.

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
        _TORCH,
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
    dtype: torch.dtype | str | None = None,
    key_map: KeyMap | None = None,
    *,
    cuts: Mapping[str, Cut] | None = None,
    overwrite: bool = True,
    durable: bool = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ConversionReport:
    """Convert a checkpoint into a Hugging Face directory, piece by piece: no tensor is put together in memory.

    Args:
        src: The checkpoint's directory, or a reader of another format.
        dst: The directory. Weights that are there stay until the new ones are written; give it its `config.json`
            beside.
        max_shard_size: Largest size of a file's tensors, as "5GB" or a number of bytes; a tensor that is larger has a
            file of its own.
        prefix: Only names under it are converted, without it: "model" where the state was `{"model": ...}`.
        dtype: What floating-point tensors become; None: they stay.
        key_map: How names (without the prefix) change: a prefix that is put before every name, a mapping of regular
            expressions to replacements, or a function, which gives None to leave a tensor out.
        cuts: For tensors of the directory that are cut otherwise than in the checkpoint, how they are made of those:
            `Joined`, `Stacked`, `Narrowed` or `Selected`, over names without the prefix.
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
    name = dtype_of(dtype).name if isinstance(dtype, torch.dtype) else dtype
    conversion = HuggingFaceConversion(
        reader, max_shard_size=max_shard_size, prefix=prefix, dtype=name, key_map=key_map, cuts=cuts
    )
    return conversion.run(dst, overwrite=overwrite, durable=durable, progress=progress, storage_options=of_dst)


def load_full_checkpoint(path: str) -> Mapping[Any, Any]:
    """Read a state that `torch.save` wrote, without running code; its tensors are mapped from the files.

    Args:
        path: A file, or a directory with `pytorch_model.bin`, or with its index and what that names.

    Raises:
        ArgumentError: That is no path.
        NotFoundError: There is no such file.
        UntrustedObjectError: It needs classes that nobody allowed.
        CorruptError: It is damaged, or holds no state.
    """
    path = local_path(path)
    if not os.path.isdir(path):
        return _load_file(path)
    if os.path.exists(os.path.join(path, _BIN_NAME)):
        return _load_file(os.path.join(path, _BIN_NAME))
    index = os.path.join(path, _BIN_INDEX)
    if not os.path.exists(index):
        if os.path.exists(os.path.join(path, ".metadata")):
            raise ArgumentError(f"{path!r} is a sharded checkpoint: use convert_torch_dcp_to_dcp, or load it as it is")
        raise NotFoundError(f"there is neither {_BIN_NAME} nor {_BIN_INDEX} in {path!r}; name the file itself")
    state: dict[Any, Any] = {}
    weight_map = _weight_map(index)
    for name in sorted(set(weight_map.values())):
        found = _load_file(os.path.join(path, check_name(name, CorruptError)))
        state |= {key: value for key, value in found.items() if weight_map.get(key) == name}
    missing = sorted(weight_map.keys() - state.keys())
    if missing:
        raise IncompleteError(f"{index} names {missing[:10]}, which its files lack")
    return state


def _weight_map(index: str) -> dict[str, str]:
    try:
        with open(index, encoding="utf-8") as file:
            found = json.load(file)["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{index} is no index: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CorruptError(f"{index} does not map names to files")
    return found


def _load_file(path: str) -> Mapping[Any, Any]:
    if not os.path.isfile(path):
        raise NotFoundError(f"there is no file {path!r}")
    state = load_value(path, path, mapped=True)
    if not isinstance(state, Mapping):
        raise CorruptError(f"{path} holds {type(state).__name__}, not a state: expected a mapping")
    return state
