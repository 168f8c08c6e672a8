"""Writes the files of a Hugging Face directory: safetensors files, and their index where there are several.

Goes in: tensors whose bits are in memory, or are fetched when their turn comes. Comes out: files that have temporary
names until all of them are there; the index comes last, so that what is not complete does not look so.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod

from dcp_core.dtype import DType, Kind
from dcp_core.errors import ArgumentError, DcpError, NotFoundError, PlanningError, UnsupportedValueError
from dcp_core.execution.planner_answers import Bits
from dcp_core.execution.write_runs import Run
from dcp_core.execution.write_stream import FileStream
from dcp_core.file_names import METADATA_NAME
from dcp_core.formats.safetensors_file import MAX_HEADER_BYTES
from dcp_core.planning.leaves import DeviceBits, DeviceTransfers
from dcp_core.storage.base import Storage, WriteHandle
from dcp_core.storage.leftovers import remove_quietly

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
STALE_SECONDS = 3600.0
"""Temporary files that nobody has written to for so long are left over from a conversion that was killed."""

_LOG = logging.getLogger("dcp.convert")
_WEIGHTS = re.compile(r"model(?:-\d{5,}-of-\d{5,})?\.safetensors")
_TEMPORARY = re.compile(r"\.model.*\.[0-9a-f]{16}\.tmp")
_HEADER = '{"__metadata__":{"format":"pt"}'
_PAIRS_OF_F4 = "float4_e2m1fn_x2"
_ALIGNMENT = 8
_TYPE_ORDER = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ", "F8_E4M3FNUZ",
    "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL",
)  # fmt: skip
_TYPE_RANK = {file_dtype: rank for rank, file_dtype in enumerate(_TYPE_ORDER)}


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """A tensor to write.

    Attributes:
        name: Its key.
        dtype: Element type.
        shape: Its shape.
        bits: Gives its raw bits; not asked for a tensor without elements.
        transfers: How they travel, where they are `DeviceBits`.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    bits: Callable[[], Bits]
    transfers: DeviceTransfers | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def shard_names(count: int) -> list[str]:
    """The names of so many files.

    >>> shard_names(1), shard_names(2)[1]
    (['model.safetensors'], 'model-00002-of-00002.safetensors')
    """
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_text(files: Sequence[tuple[str, Sequence[FileTensor]]]) -> str:
    """The index of some files, as `save_pretrained` spells it."""
    tensors = [tensor for _, inside in files for tensor in inside]
    weight_map = {tensor.name: name for name, inside in files for tensor in inside}
    totals = {
        "total_parameters": sum(prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.nbytes for tensor in tensors),
    }
    return json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def write_directory(
    storage: Storage, files: Sequence[Sequence[FileTensor]], *, overwrite: bool, durable: bool
) -> tuple[str, ...]:
    """Write all files of a directory.

    Args:
        storage: The directory.
        files: The tensors of each file.
        overwrite: Whether weights that are there may go. They stay until the new ones are all written.
        durable: Whether to wait for the disk.

    Returns:
        The names of the files, the index last.

    Raises:
        ArgumentError: There are weights, and `overwrite` is False.
        DcpError: Nothing of the new files is left then, unless it is the last step, replacing files of the same names,
            that failed: what is written keeps its temporary names then.
    """
    named = list(zip(shard_names(len(files)), map(_in_file_order, files), strict=True))
    headers = [_header(tensors) for _, tensors in named]
    storage.prepare()
    old = existing_weights(storage)
    refuse_overwriting(storage, old, overwrite)
    _sweep(storage)
    mark = secrets.token_hex(8)
    written: dict[str, str] = {}
    try:
        storage.check_space(sum(tensor.nbytes for tensors in files for tensor in tensors))
        for (name, tensors), header in zip(named, headers, strict=True):
            written[name] = f".{name}.{mark}.tmp"
            _write_file(storage, written[name], header, tensors, durable=durable)
        if len(named) > 1:
            written[INDEX_NAME] = f".{INDEX_NAME}.{mark}.tmp"
            storage.write_file(written[INDEX_NAME], index_text(named).encode(), durable=durable)
        _publish(storage, written, old, durable=durable)
    except BaseException:
        _clean_up(storage, written, old)
        raise
    return tuple(written)


def _clean_up(storage: Storage, written: dict[str, str], old: Sequence[str]) -> None:
    """Remove new files that have no names yet, unless old ones went for them: then they are the only ones."""
    with suppress(DcpError):
        gone = set(old) - set(storage.list())
        for name, temporary in written.items():
            if not gone:
                with suppress(DcpError):
                    storage.remove(temporary)
            elif storage.size(temporary) is not None:
                _LOG.error("%s is written, as %s in %s; it did not get its name", name, temporary, storage.describe())


def existing_weights(storage: Storage) -> list[str]:
    """The weights that are in a directory, and their index."""
    try:
        names = storage.list()
    except NotFoundError:
        return []
    return [name for name in names if name == INDEX_NAME or _WEIGHTS.fullmatch(name)]


def refuse_overwriting(storage: Storage, old: Sequence[str], overwrite: bool) -> None:
    """Refuse to replace weights by mistake, or to put weights beside a sharded checkpoint.

    Raises:
        ArgumentError: There are some, and they may not go; or there is such a checkpoint.
    """
    if old and not overwrite:
        raise ArgumentError(
            f"{storage.describe()} holds weights already ({', '.join(old[:4])}{', ...' if len(old) > 4 else ''}); "
            "choose another directory, or pass overwrite=True (--overwrite) to replace them"
        )
    if storage.exists(METADATA_NAME):
        raise ArgumentError(
            f"{storage.describe()} holds a sharded checkpoint ({METADATA_NAME}), beside which nobody could tell what "
            "the directory is; choose another directory"
        )


def refuse_beside_weights(storage: Storage) -> None:
    """Refuse to put a checkpoint beside the weights of a Hugging Face directory.

    Raises:
        ArgumentError: There are some.
    """
    old = existing_weights(storage)
    if old:
        raise ArgumentError(
            f"{storage.describe()} holds {old[0]}, beside which nobody could tell what the directory is; choose "
            "another directory for the checkpoint"
        )


def _sweep(storage: Storage) -> None:
    """Remove what a conversion that was killed has left."""
    for name in storage.list():
        if _TEMPORARY.fullmatch(name):
            modified = storage.modified_seconds(name)
            if modified is not None and time.time() - modified > STALE_SECONDS:
                storage.remove(name)


def _publish(storage: Storage, written: dict[str, str], old: Sequence[str], *, durable: bool) -> None:
    """Give the files their names, and remove the weights that they replace.

    Until the index, or a single file, has its name, the directory is what it was. Only where files have the names of
    old ones it is no model for a moment: the old ones are put aside first, so that new and old never mix. What fails
    then is taken back, all of it, or, where a single file has replaced another, only logged.
    """
    if durable:
        storage.sync()
    final = INDEX_NAME if INDEX_NAME in written else SINGLE_NAME
    shards = [name for name in written if name not in (SINGLE_NAME, INDEX_NAME)]
    aside: dict[str, str] = {}
    published: list[str] = []
    try:
        if any(name in old for name in shards):
            _put_aside(storage, old, aside, durable=durable)
        for name in shards:
            published.append(name)
            storage.publish(written[name], name)
        if shards and durable:
            storage.sync()
        storage.publish(written[final], final)
        published.append(final)
        is_settled = _settle(storage, final, old, aside, durable=durable)
    except BaseException:
        if final in published and (final in old or _has_lost(storage, old, aside)) and not aside:
            raise  # the new files are the only ones
        for name in reversed(published):  # what makes the directory a model goes first
            with suppress(DcpError):
                storage.remove(name)
        for name, other in reversed(aside.items()):  # the index comes last
            with suppress(DcpError):
                storage.publish(other, name)
        raise
    obsolete = [aside.get(name, name) for name in old if name in aside or name not in written]
    if obsolete and is_settled:
        _remove_obsolete(storage, obsolete, durable=durable)


def _has_lost(storage: Storage, old: Sequence[str], aside: Mapping[str, str]) -> bool:
    """Whether old weights are gone, or that cannot be seen."""
    try:
        return not set(old) - set(aside) <= set(storage.list())
    except DcpError:
        return True


def _settle(storage: Storage, final: str, old: Sequence[str], aside: Mapping[str, str], *, durable: bool) -> bool:
    """Make the new files last, and remove what could be taken for the weights in their place; whether that was done.

    Raises:
        DcpError: It was not, and the old weights are all there still.
    """
    has_replaced = final in old and final not in aside
    try:
        if durable:
            storage.sync()
        for name in (SINGLE_NAME, INDEX_NAME):
            if name in old and name not in aside and name != final:
                storage.remove(name)
    except DcpError as error:
        if not has_replaced:
            raise
        _LOG.error("%s is complete, but what it replaced stays: %s", storage.describe(), error)
        return False
    return True


def _remove_obsolete(storage: Storage, names: Sequence[str], *, durable: bool) -> None:
    """Remove old files that nobody takes for the weights any more; what stays is logged."""
    remove_quietly(storage, names)
    if durable:
        try:
            storage.sync()
        except DcpError as error:
            _LOG.warning("%s", error)


def _put_aside(storage: Storage, old: Sequence[str], aside: dict[str, str], *, durable: bool) -> None:
    """Give old weights other names, written down in `aside`; the index goes first."""
    mark = secrets.token_hex(8)
    for name in sorted(old, key=lambda name: name != INDEX_NAME):
        aside[name] = f".{name}.{mark}.old"
        storage.publish(name, aside[name])
        if name == INDEX_NAME and durable:
            storage.sync()
    if durable:
        storage.sync()


def _in_file_order(tensors: Sequence[FileTensor]) -> list[FileTensor]:
    """The tensors of a file as safetensors' own writer orders them: by type, larger elements first, then by name.

    So all are aligned, and the same tensors make the same file.
    """

    def place(tensor: FileTensor) -> tuple[int, str]:
        return _TYPE_RANK[file_type(tensor.name, tensor.dtype, tensor.shape)[0]], tensor.name

    return sorted(tensors, key=place)


def _write_file(
    storage: Storage, name: str, header: bytes, tensors: Sequence[FileTensor], *, durable: bool
) -> None:  # fmt: skip
    with storage.create(name, len(header) + sum(tensor.nbytes for tensor in tensors)) as handle:
        handle.write(0, [header])
        _write_data(handle, len(header), tensors, durable=durable)
        if durable:
            handle.sync()


def _write_data(handle: WriteHandle, start: int, tensors: Sequence[FileTensor], *, durable: bool) -> None:
    stream = FileStream(handle, start, _go_on, durable=durable, has_checksums=False)
    try:
        for tensor in tensors:
            if tensor.nbytes:
                bits = tensor.bits()
                transfers = (tensor.transfers,) if isinstance(bits, DeviceBits) else ()
                stream.send(Run((bits,), tensor.nbytes, is_plain=False, transfers=transfers))
        stream.finish()
    finally:
        stream.close()


def _go_on() -> None:
    """Nothing else can fail meanwhile."""


def _header(tensors: Sequence[FileTensor]) -> bytes:
    start, entries = 0, []
    for tensor in tensors:
        file_dtype, shape = file_type(tensor.name, tensor.dtype, tensor.shape)
        entries.append(
            f',{json.dumps(tensor.name, ensure_ascii=False)}:{{"dtype":"{file_dtype}",'
            f'"shape":[{",".join(map(str, shape))}],"data_offsets":[{start},{start + tensor.nbytes}]}}'
        )
        start += tensor.nbytes
    try:
        body = "".join([_HEADER, *entries, "}"]).encode()
    except UnicodeEncodeError as error:
        raise PlanningError(f"a name of a tensor is no valid Unicode text: {error}; rename it") from error
    if len(body) > MAX_HEADER_BYTES:
        raise PlanningError(
            f"the header of one file would take {len(body)} bytes for {len(tensors)} tensors; safetensors allows "
            f"{MAX_HEADER_BYTES}: pass a smaller max_shard_size"
        )
    body += b" " * (-(8 + len(body)) % _ALIGNMENT)
    return struct.pack("<Q", len(body)) + body


def file_type(name: str, dtype: DType, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """How safetensors calls a type, and the shape that a tensor of it has there.

    Args:
        name: The tensor's, for the error.
        dtype: Element type.
        shape: Shape in elements. Two 4-bit floats are one element, and two there.

    Raises:
        UnsupportedValueError: safetensors has no such type.
    """
    if dtype.name == _PAIRS_OF_F4 and shape:
        return "F4", (*shape[:-1], 2 * shape[-1])
    if dtype.file_tail or dtype.kind is Kind.OPAQUE:
        raise UnsupportedValueError(
            f"{name!r} has the type {dtype.name}, which safetensors does not know; convert it before, or leave it out "
            "with key_map"
        )
    return dtype.file_dtype, shape


def check_names(names: Sequence[str]) -> None:
    """Refuse names of which one would hide another, and the one that the file format reserves.

    Raises:
        ArgumentError: Such a name.
    """
    if "__metadata__" in names:
        raise ArgumentError("a tensor has the name '__metadata__', which safetensors reserves; rename it")
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ArgumentError(f"two tensors have the name {twice!r}")
