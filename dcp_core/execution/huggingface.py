"""The reader over Hugging Face safetensors: a file, a directory with an index, or shards that torch DCP wrote.

Goes in: the path. Comes out: a description made from headers alone, and the ranges that a plan asks for, read by the
engine that reads our own files. Nothing in these files says whether their bytes are right: sizes are checked, no more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest, xxh3_128_digest

from dcp_core.dtype import DTYPES, Kind
from dcp_core.errors import ArgumentError, CorruptError, IncompleteError, NotFoundError
from dcp_core.execution.checkpoint_place import OpenUrl, is_other_url, local_path
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import CheckpointId, Plan
from dcp_core.formats.cuts import Cut, Joined, Narrowed, Selected, Stacked, checked_cuts
from dcp_core.formats.huggingface_directory import (
    INDEX_SUFFIX,
    MAX_INDEX_BYTES,
    SUFFIX,
    SafetensorsFile,
    check_choice,
    check_duplicates,
    choose_files,
    decode_files,
    describe_file,
    encode_files,
    parse_index,
)
from dcp_core.formats.huggingface_source import HuggingFaceSource
from dcp_core.formats.key_map import KeyMap, key_function, key_map_text
from dcp_core.formats.safetensors_parser import header_nbytes
from dcp_core.metadata import Metadata, SaveRecord, StoredObject
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.tiling import check_tiling
from dcp_core.storage.base import Storage, check_name

__all__ = ["HuggingFaceReader", "Joined", "Narrowed", "Selected", "Stacked"]

_LOG = logging.getLogger("dcp.execution")
_HEADERS_AT_ONCE = 8
_NEAR_SECONDS = 0.002
"""Headers are read by the calling thread for so long: starting threads takes about as much."""

_NAMES_SHOWN = 8
_SCALES = ("_scale_inv", "_scale")
_IS_FLOAT8 = np.isin(
    np.arange(256), [dtype.code for dtype in DTYPES if dtype.kind is Kind.FLOAT and dtype.itemsize == 1]
)


class HuggingFaceReader(FileSystemReader):
    """Reads safetensors as Hugging Face lays them out, straight into a state of any layout.

    Of a directory, it reads `model.safetensors`, or what `model.safetensors.index.json` names, or another index if it
    is the only one; without any, all its safetensors files, as the shards that torch's
    `HuggingFaceStorageWriter(save_distributed=True)` writes. Each rank reads the ranges that it needs, and what several
    ranks need is read once.

    Args:
        path: The directory, one safetensors file, or an index, as a path or a `file://` URL; `checkpoint_id` of a load
            replaces it.
        key_map: How the names in the files become the names in the state: a prefix that is put before every name; a
            mapping of regular expressions to replacements; or a function, which gives None to leave a tensor out.
        cuts: For each tensor of the state that is cut otherwise than in the files, how it is made of those: `Joined`,
            `Stacked`, `Narrowed` or `Selected`, over names as they are in the files, or one such name. What is named
            here takes the place of what `key_map` would give that name.
        storage: A storage to use instead of `path`.
        open_url: Makes storages of URLs that name no file; fsspec makes those of which this knows nothing.
        storage_options: What fsspec gets beside a URL.

    Raises:
        ArgumentError: A key map or a cut that is none.
    """

    def __init__(
        self,
        path: CheckpointId | None = None,
        *,
        key_map: KeyMap | None = None,
        cuts: Mapping[str, Cut] | None = None,
        storage: Storage | None = None,
        open_url: OpenUrl | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        directory, self._chosen = split_path(path)
        super().__init__(directory, storage=storage, open_url=open_url, storage_options=storage_options)
        key_function(key_map)
        self._key_map = key_map
        self._cuts = checked_cuts(cuts)
        self._warned: set[str] = set()

    def initialize_reader(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Point the reader at a directory or a file; None keeps the one that it was made with."""
        if checkpoint_id is not None:
            checkpoint_id, self._chosen = split_path(checkpoint_id)
        super().initialize_reader(checkpoint_id)

    def options(self) -> str:
        """The key map and the cuts, as far as they can be told apart: functions by their names."""
        cuts = xxh3_64_hexdigest(repr(sorted(self._cuts.items())).encode()) if self._cuts else ""
        return f"key_map={key_map_text(self._key_map)} cuts={cuts}"

    def load_metadata(self, rank: int | None = None, header_digest: bytes | None = None) -> Metadata:
        """Read the index, if there is one, and the headers.

        Raises:
            NotFoundError: There are no safetensors files.
            CorruptError, IncompleteError: An index or a header is not sound; it names the file.
            PlanningError, ArgumentError: The key map or a cut does not fit.
        """
        storage = self._directory.storage
        if rank is not None:
            raise NotFoundError(f"{storage.describe()} is read as Hugging Face files, which no rank has of its own")
        files = _read_headers(storage, self._chosen)
        if header_digest is not None and xxh3_128_digest(encode_files(files)) != header_digest:
            raise CorruptError(
                f"the safetensors files in {storage.describe()} are not those that rank 0 sees: they changed "
                "meanwhile, or this rank has another directory under that path; load again"
            )
        return self._described(files)

    def optimize_local_plan(self, plan: Plan) -> Plan:
        """The plan as it is; a warning where numbers mean nothing without the scales that lie beside them."""
        if isinstance(plan, LoadPlan) and self._metadata is not None and self._context.rank == 0:
            new = [name for name in _unscaled(plan, self._metadata) if name not in self._warned]
            if new:
                self._warned.update(new)
                _LOG.warning(
                    "%d tensors of 8-bit floats become other types, but the scales beside them are not applied: load "
                    "and apply them, or take weights that are not quantised: %s",
                    len(new), new[:_NAMES_SHOWN],
                )  # fmt: skip
        return plan

    def encode_metadata(self, metadata: Metadata) -> bytes:
        """What the headers say, as bytes for the other ranks."""
        source = metadata.source
        if not isinstance(source, HuggingFaceSource):
            raise ArgumentError("this description was not read by a HuggingFaceReader")
        return source.encoded

    def decode_metadata(self, raw: bytes) -> Metadata:
        """What the headers say, as another rank has read them."""
        return self._described(decode_files(raw), raw)

    def read_object(self, stored: StoredObject) -> bytes:
        """There are no objects in safetensors files."""
        raise ArgumentError(f"safetensors files hold tensors only; there is no value {stored.name!r}")

    def _described(self, files: tuple[SafetensorsFile, ...], encoded: bytes | None = None) -> Metadata:
        source = HuggingFaceSource(files, self._key_map, self._cuts, encoded)
        if not source.is_whole:
            _check_whole(source)
        return Metadata(source)

    def _explained(self, save: SaveRecord) -> AbstractContextManager[None]:
        return nullcontext()


def split_path(path: CheckpointId | None) -> tuple[CheckpointId | None, str | None]:
    """A directory, and the one file of it that is meant: a safetensors file or an index; None for all of it."""
    if path is None:
        return None, None
    if is_other_url(path):
        directory, _, name = str(path).rpartition("/")
        return (directory, name) if name.endswith((SUFFIX, INDEX_SUFFIX)) else (path, None)
    local = local_path(path)
    if os.path.isfile(local) or (local.endswith((SUFFIX, INDEX_SUFFIX)) and not os.path.isdir(local)):
        return os.path.dirname(local) or ".", os.path.basename(local)
    return path, None


def _unscaled(plan: LoadPlan, metadata: Metadata) -> list[str]:
    """Stored tensors of 8-bit floats that a plan converts, while it leaves their scales where they are."""
    wanted = plan.wanted
    rows = np.flatnonzero((wanted.dtype != wanted.stored_dtype) & _IS_FLOAT8[wanted.stored_dtype]).tolist()
    if not rows:
        return []
    loaded, there = set(wanted.stored_names), set(metadata.source.names())
    names = dict.fromkeys(wanted.stored_names[row] for row in rows)
    return [name for name in names if any(name + end in there - loaded for end in _SCALES)]


def _read_headers(storage: Storage, chosen: str | None) -> tuple[SafetensorsFile, ...]:
    where = storage.describe()
    names = [] if chosen is not None else storage.list()
    choice = chosen if chosen is not None else choose_files(names, where)
    if isinstance(choice, str) and not choice.endswith(INDEX_SUFFIX):
        choice = (choice,)
    if not isinstance(choice, str):
        files = _read_all_headers(storage, dict.fromkeys(choice))
        check_duplicates(files)
        return files
    weight_map = parse_index(read_index(storage, choice), f"{choice} in {where}")
    check_choice(weight_map, choice, names, where)
    wanted: dict[str, set[str]] = {check_name(name, CorruptError): set() for name in dict.fromkeys(weight_map.values())}
    for key, name in weight_map.items():
        wanted[name].add(key)
    return _read_all_headers(storage, {name: wanted[name] for name in sorted(wanted)})


def _read_all_headers(storage: Storage, wanted: Mapping[str, Collection[str] | None]) -> tuple[SafetensorsFile, ...]:
    """Read headers, one after the other while files are near, else several at a time: each is little but waiting."""
    names = list(wanted)
    found: list[SafetensorsFile] = []
    started = time.perf_counter()
    while len(found) < len(names) and time.perf_counter() - started < _NEAR_SECONDS:
        found.append(read_header(storage, names[len(found)], wanted[names[len(found)]]))
    left = names[len(found) :]
    if left:
        with ThreadPoolExecutor(min(_HEADERS_AT_ONCE, len(left))) as pool:
            found += pool.map(lambda name: read_header(storage, name, wanted[name]), left)
    return tuple(found)


def read_index(storage: Storage, name: str) -> bytes:
    """Read an index.

    Raises:
        NotFoundError: There is none.
        CorruptError: It is too long for an index.
    """
    found = storage.size(name)
    if found is None:
        raise NotFoundError(f"there is no {name!r} in {storage.describe()}: check the path")
    if found > MAX_INDEX_BYTES:
        raise CorruptError(f"{name} in {storage.describe()} has {found} bytes, too many for an index")
    return storage.read(name)


def read_header(storage: Storage, name: str, wanted: Collection[str] | None) -> SafetensorsFile:
    """Read the header of a file.

    Args:
        storage: Where it lies.
        name: Its name.
        wanted: The tensors that an index says are in it; None: there is no index.

    Raises:
        IncompleteError: It is cut short; or an index names it, and it is missing.
        CorruptError: It is not sound, or lacks a tensor that the index says is in it.
    """
    label = f"{name} in {storage.describe()}"
    try:
        handle = storage.open_read(name)
    except NotFoundError as error:
        if wanted is None:
            raise
        raise IncompleteError(f"{label} is missing, and the index names it: restore the file") from error
    with handle:
        prefix = bytearray(min(8, handle.nbytes))
        handle.read_into(0, memoryview(prefix))
        header = bytearray(header_nbytes(bytes(prefix), handle.nbytes, label))
        handle.read_into(0, memoryview(header))
        return describe_file(bytes(header), handle.nbytes, name, label, wanted)


def _check_whole(source: HuggingFaceSource) -> None:
    """See that the pieces of every tensor are all there, and none twice.

    Raises:
        IncompleteError: Some are missing.
        CorruptError: Some overlap.
    """
    tensors, chunks = source.columns.tensors, source.columns.chunks
    counts = np.diff(tensors.row)
    owner = np.repeat(np.arange(len(counts)), counts)
    faults = check_tiling(owner, chunks.offsets, chunks.sizes, tensors.shape, tensors.ndim, is_sorted=True)
    if not faults:
        return
    fault = faults[0]
    files = sorted({source.files.names[int(chunks.file[row])] for row in fault.rows})
    where = f"{tensors.names[fault.tensor]!r} at offsets {fault.box.offsets} sizes {fault.box.sizes}"
    if fault.kind == "hole":
        raise IncompleteError(f"no file has {where}, next to what {files} have: is a shard missing?")
    raise CorruptError(f"more than one shard has {where}: {files}; keep the files of one checkpoint in the directory")
