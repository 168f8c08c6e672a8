"""A checkpoint of any format becomes one of ours, piece by piece.

source -> lazy leaves, nested as they were -> an ordinary save by one rank: checksums are computed as bytes go by, and
the checkpoint exists whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_core import api
from dcp_core.convert.huggingface_files import refuse_beside_weights
from dcp_core.convert.lazy_tensors import ConversionAdapter, LazyTensor, ReadAhead
from dcp_core.convert.progress import progress_bar
from dcp_core.execution.checkpoint_place import refuse_options
from dcp_core.execution.interfaces import CheckpointId, StorageReader, StorageWriter
from dcp_core.formats.objects import decode_value
from dcp_core.metadata import Metadata, StoredTensor
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.plugins import activate_codecs
from dcp_core.recipes.places import dcp_writer, storage_at
from dcp_core.recipes.stored_source import StoredSource
from dcp_core.state_nest import rebuild
from dcp_core.state_path import StatePath, decode_path


def convert_to_dcp(
    reader: StorageReader,
    dst: CheckpointId,
    *,
    storage_writer: StorageWriter | None = None,
    durable: bool = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Metadata:
    """Write what a reader reads as a checkpoint of this library.

    Memory stays bounded, whatever the size: a few pieces of tensors are under way at a time.

    Args:
        reader: Where from; any format.
        dst: The directory of the new checkpoint; one that is there stays until the new one is complete.
        storage_writer: Where to write instead of a directory.
        durable: Whether data reaches the disk before this returns.
        progress: Whether to show a bar; None: where a person watches.
        storage_options: What fsspec gets beside `dst`; the reader has its own.

    Returns:
        The description of the new checkpoint.

    Raises:
        ArgumentError: There are weights of a Hugging Face directory at `dst`.
        DcpError: Nothing is changed at `dst` then.
    """
    if storage_writer is None:
        refuse_beside_weights(storage_at(dst, storage_options))
        storage_writer = dcp_writer(storage_options)
    else:
        refuse_options(storage_options, "a storage_writer was given, which has its own")
    activate_codecs()
    source = StoredSource(reader)
    tensors = source.tensors()
    source.check(tensors)
    total = sum(map(stored_nbytes, tensors))
    with progress_bar("convert", total, progress) as advance, ReadAhead(source, advance) as ahead:
        return api.save(
            _state(source, tensors, ahead),
            checkpoint_id=dst,
            storage_writer=storage_writer,
            planner=StandardSavePlanner(enable_plan_caching=False),
            durable=durable,
            adapter=ConversionAdapter(),
        )


def stored_nbytes(stored: StoredTensor) -> int:
    """Bytes of a tensor's elements, as stored."""
    nbytes = stored.dtype.itemsize
    for size in stored.shape:
        nbytes *= size
    return nbytes


def containers_of(source: StoredSource) -> Mapping[StatePath, str]:
    """The containers that the paths of leaves do not tell, for `state_nest.rebuild`."""
    return {decode_path(path): kind for path, kind in source.metadata.source.nesting.containers}


def _state(source: StoredSource, tensors: list[StoredTensor], ahead: ReadAhead) -> Mapping[Any, Any]:
    leaves: dict[StatePath, object] = {}
    for stored in tensors:
        leaves[stored.path] = LazyTensor(stored, stored.dtype, ahead)
    for entry in source.objects():
        leaves[entry.path] = decode_value(source.read_object(entry), name=entry.name)
    state: Mapping[Any, Any] = rebuild(leaves, containers_of(source))
    return state
