"""The offline functions of every framework's package: full states and Hugging Face directories, in one process.

In: what a framework's package knows of its tensors. Out: checkpoints, directories, or states with its tensors.
`dcp_torch.offline_transform` and `dcp_mindspore.offline_transform` wrap these.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from dcp_core import api
from dcp_core.adapter import Adapter, AdapterSet
from dcp_core.arrays import NumpyAdapter
from dcp_core.box import Box
from dcp_core.convert.huggingface_files import (
    FileTensor,
    check_names,
    file_type,
    refuse_beside_weights,
    write_directory,
)
from dcp_core.convert.huggingface_plan import Skipped, choose_tied
from dcp_core.convert.lazy_tensors import AloneAdapter
from dcp_core.convert.progress import Advance, progress_bar
from dcp_core.convert.shard_sizes import MAX_SHARD_SIZE, parse_shard_size, share_out
from dcp_core.convert.to_dcp import containers_of, convert_to_dcp, stored_nbytes
from dcp_core.convert.to_huggingface import ConversionReport, log_skipped
from dcp_core.dtype import DType
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.execution.checkpoint_place import local_path
from dcp_core.execution.interfaces import CheckpointId, StorageReader
from dcp_core.execution.planner_answers import Bits
from dcp_core.formats.cuts import Cut
from dcp_core.formats.key_map import KeyMap
from dcp_core.formats.objects import decode_value
from dcp_core.metadata import Metadata, StoredTensor
from dcp_core.planning.leaves import DeviceBits, LocalTensor
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.planning.write_columns import PlannedChunk
from dcp_core.plugins import activate_codecs
from dcp_core.recipes.places import dcp_reader, dcp_writer, huggingface_reader, options_for, storage_at
from dcp_core.recipes.stored_source import PieceRequest, StoredSource, place_of
from dcp_core.state_nest import rebuild
from dcp_core.state_path import StatePath

PLATFORMS = ("huggingface", "torch")
_TORCH_FILES = (".bin", ".pt", ".pth")
BATCH_BYTES = 256 << 20
"""So much is read at once, at least one tensor: as often a bar moves."""


class OfflineFramework(Protocol):
    """What the offline functions need of a framework."""

    @property
    def adapter(self) -> Adapter:
        """Its adapter."""
        ...

    def tensor_of_bits(self, bits: npt.NDArray[Any], dtype: DType) -> Any:
        """A tensor in host memory that shares the memory of raw bits, where it can."""
        ...

    def load_full(self, path: str) -> Mapping[Any, Any]:
        """The state in a file that `torch.save` wrote, or in a directory of such files; safe to call on any file."""
        ...


def convert_full_checkpoint_to_dcp(
    framework: OfflineFramework,
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
    """Convert a full checkpoint; see `dcp_torch.offline_transform`."""
    if src_platform not in PLATFORMS:
        raise ArgumentError(f"src_platform={src_platform!r}: expected one of {', '.join(map(repr, PLATFORMS))}")
    if src_platform == "huggingface" and str(src).endswith(_TORCH_FILES):
        raise ArgumentError(f"{str(src)!r} has the name of a file that torch.save wrote: pass src_platform='torch'")
    of_src, of_dst = options_for(storage_options, src, dst)
    if src_platform == "huggingface" or str(src).endswith(".safetensors"):
        reader = huggingface_reader(src, of_src, key_map=key_map, cuts=cuts)
        return convert_to_dcp(reader, dst, durable=durable, progress=progress, storage_options=of_dst)
    if key_map is not None or cuts is not None:
        raise ArgumentError("key_map and cuts are for safetensors; change the names of a torch state in memory")
    state = framework.load_full(local_path(src))
    return full_state_dict_to_dcp_format(
        framework, state, dst, durable=durable, progress=progress, storage_options=of_dst
    )


def full_state_dict_to_dcp_format(
    framework: OfflineFramework,
    state_dict: Mapping[Any, Any],
    dst: CheckpointId,
    *,
    durable: bool = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Metadata:
    """Save a full state by this process alone; see `dcp_torch.offline_transform`."""
    refuse_beside_weights(storage_at(dst, storage_options))
    with _WatchedPlanner(progress) as planner:
        return api.save(
            state_dict,
            checkpoint_id=dst,
            storage_writer=dcp_writer(storage_options),
            planner=planner,
            durable=durable,
            adapter=cast(Adapter, AloneAdapter(framework.adapter)),
        )


class _WatchedPlanner(StandardSavePlanner):
    """A planner that moves a bar when bytes are asked for; a context manager."""

    def __init__(self, progress: bool | None) -> None:
        super().__init__(enable_plan_caching=False)
        self._progress = progress
        self._advance: Advance | None = None
        self._bar = ExitStack()

    def __enter__(self) -> _WatchedPlanner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def get_batch(self, spans: Sequence[PlannedChunk]) -> Sequence[npt.NDArray[Any] | DeviceBits]:
        """The bits of some regions, as ever."""
        if self._advance is None:
            total = sum(tensor.nbytes for tensor in self.state.tensors if tensor is not None)
            self._advance = self._bar.enter_context(progress_bar("write", total, self._progress))
        self._advance(sum(span.nbytes for span in spans) if self._progress is not False else 0)
        return super().get_batch(spans)


def dcp_to_full_state_dict(
    framework: OfflineFramework,
    src: CheckpointId | StorageReader,
    *,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Load everything, nested as it was saved; see `dcp_torch.offline_transform`."""
    activate_codecs()
    (of_src,) = options_for(storage_options, src)
    reader = src if isinstance(src, StorageReader) else dcp_reader(src, of_src)
    source = StoredSource(reader, verify=True)
    leaves: dict[StatePath, object] = {}
    for entry in source.objects():
        leaves[entry.path] = decode_value(source.read_object(entry), name=entry.name)
    stored = source.tensors()
    leaves |= {tensor.path: value for tensor, value in zip(stored, _whole(framework, source, progress), strict=True)}
    return rebuild(dict(sorted(leaves.items(), key=_by_keys)), containers_of(source))


def parse_checkpoint_from_huggingface(
    framework: OfflineFramework,
    path: CheckpointId,
    *,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Load all tensors of safetensors files; see `dcp_torch.offline_transform`."""
    source = StoredSource(huggingface_reader(path, storage_options))
    names = [tensor.name for tensor in source.tensors()]
    return dict(zip(names, _whole(framework, source, progress), strict=True))


def save_state_dict_as_huggingface_format(
    framework: OfflineFramework,
    directory: CheckpointId,
    state_dict: Mapping[str, Any],
    max_shard_size: int | str = MAX_SHARD_SIZE,
    *,
    overwrite: bool = True,
    durable: bool = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ConversionReport:
    """Write a full state as a Hugging Face directory; see `dcp_torch.offline_transform`."""
    limit = parse_shard_size(max_shard_size)
    if not isinstance(state_dict, Mapping):
        raise ArgumentError(f"state_dict must be a mapping of names to tensors, found {type(state_dict).__name__}")
    adapters = AdapterSet((framework.adapter, NumpyAdapter()))
    skipped: list[Skipped] = []
    local: dict[str, LocalTensor] = {}
    names = []
    for name, value in _named(state_dict, ()):
        found = adapters.describe(value)
        if found is None:
            skipped.append(Skipped(name, "not a tensor"))
        else:
            names.append(name)
            local[name] = _checked(name, found)
    check_names(names)
    kept, tied = _without_ties(local)
    tensors = [_file_tensor(name, local[name]) for name in kept]
    files = [[tensors[at] for at in positions] for positions in share_out([t.nbytes for t in tensors], limit)]
    storage = storage_at(directory, storage_options)
    with progress_bar("write", sum(tensor.nbytes for tensor in tensors), progress) as advance:
        watched = [[_watched(tensor, advance) for tensor in inside] for inside in files]
        written = write_directory(storage, watched, overwrite=overwrite, durable=durable)
    report = ConversionReport(written, len(tensors), sum(t.nbytes for t in tensors), (*skipped, *tied))
    log_skipped(report.skipped)
    return report


def _whole(framework: OfflineFramework, source: StoredSource, progress: bool | None) -> Iterator[Any]:
    """The tensors of a source, in its order; those that are the same bytes are one tensor."""
    stored = source.tensors()
    source.check(stored)
    keys = [_identity(number, tensor) for number, tensor in enumerate(stored)]
    distinct = dict(zip(keys, stored, strict=True))
    made: dict[Hashable, Any] = {}
    with progress_bar("read", sum(map(stored_nbytes, distinct.values())), progress) as advance:
        batch: list[PieceRequest] = []
        for key, tensor in distinct.items():
            array = np.empty(tensor.shape, tensor.dtype.bits)
            made[key] = framework.tensor_of_bits(array, tensor.dtype)
            if array.size:
                batch.append(
                    PieceRequest(tensor, Box.whole(tensor.shape), tensor.dtype, array.reshape(-1).view(np.uint8))
                )
            if sum(request.target.nbytes for request in batch) >= BATCH_BYTES:
                source.fill(batch)
                advance(sum(request.target.nbytes for request in batch))
                batch = []
        source.fill(batch)
        advance(sum(request.target.nbytes for request in batch))
    return iter([made[key] for key in keys])


def _identity(number: int, tensor: StoredTensor) -> Hashable:
    """Equal for tensors that are the same bytes of a checkpoint."""
    return (place_of(tensor.chunks), tensor.dtype, tensor.shape) if len(tensor.chunks) else number


def _by_keys(entry: tuple[StatePath, object]) -> list[tuple[str, int, str]]:
    return [(key.kind, key.value if type(key.value) is int else -1, str(key.value)) for key in entry[0]]


def _named(state: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, and of the state of modules in them, named by their keys joined by dots."""
    for key, value in state.items():
        own = (*path, str(key))
        inner = value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        if isinstance(inner, Mapping):
            yield from _named(inner, own)
        else:
            yield ".".join(own), value


def _checked(name: str, tensor: LocalTensor) -> LocalTensor:
    whole = Box.whole(tensor.global_shape)
    if tensor.boxes != (() if whole.is_empty else (whole,)):
        raise ArgumentError(
            f"{name!r} is sharded: this process holds {list(map(str, tensor.boxes))} of shape {tensor.global_shape}. "
            "Save it with dcp.save, and convert that with convert_dcp_to_huggingface"
        )
    file_type(name, tensor.dtype, tensor.global_shape)
    return tensor


def _without_ties(tensors: Mapping[str, LocalTensor]) -> tuple[list[str], list[Skipped]]:
    same: dict[Any, list[str]] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        key = number if tensor.storage is None else (tensor.storage, tensor.dtype, tensor.global_shape)
        same.setdefault(key, []).append(name)
    kept = {choose_tied(names) for names in same.values()}
    skipped = []
    for names in same.values():
        reason = f"tied: the same tensor as {choose_tied(names)!r}, which holds it"
        skipped += [Skipped(name, reason) for name in names if name not in kept]
    return [name for name in tensors if name in kept], skipped


def _file_tensor(name: str, tensor: LocalTensor) -> FileTensor:
    if not tensor.views:
        return FileTensor(name, tensor.dtype, tensor.global_shape, _no_bits)
    view, access = tensor.views[0], tensor.access

    def bits() -> Bits:
        found = access.host_array(view) if tensor.device == "cpu" else None
        return DeviceBits(view, access, tensor.global_shape, tensor.dtype.bits) if found is None else found

    transfers = access.transfers(view) if tensor.device != "cpu" else None
    return FileTensor(name, tensor.dtype, tensor.global_shape, bits, transfers)


def _watched(tensor: FileTensor, advance: Advance) -> FileTensor:
    """The same tensor; whoever watches is told when its turn comes."""

    def bits() -> Bits:
        advance(tensor.nbytes)
        return tensor.bits()

    return replace(tensor, bits=bits)


def _no_bits() -> Bits:
    raise UnsupportedValueError("a tensor without elements has no bits")


__all__ = [
    "OfflineFramework",
    "convert_full_checkpoint_to_dcp",
    "dcp_to_full_state_dict",
    "full_state_dict_to_dcp_format",
    "parse_checkpoint_from_huggingface",
    "save_state_dict_as_huggingface_format",
]
