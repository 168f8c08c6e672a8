"""What makes up a directory of Hugging Face safetensors files: which files, what their index says, what their headers.

Goes in: names of files, and bytes of an index or of headers, none of them trusted. Comes out: `SafetensorsFile`s, or an
error that names the file. Also how torch's `HuggingFaceStorageWriter` notes where the shards of a tensor lie in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from dcp_core.errors import ArgumentError, CorruptError, IncompleteError, NotFoundError
from dcp_core.formats.safetensors_parser import StoredArray, parse_header, unique_fields

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000
"""As long as a header of safetensors may be."""

_NUMBERED = re.compile(r"(?!shard-)(.*)-(\d{5,})-of-(\d{5,})\.safetensors")
_SHARDING_NOTE = "DCP_SHARDING_INFO"
_LARGEST = 1 << 62
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A safetensors file, as its header describes it.

    Attributes:
        name: Its name in the directory.
        nbytes: Its size.
        data_start: Where its data section starts.
        arrays: The tensors that are of interest, by byte offset.
        offsets: Where those arrays start that are shards of a larger tensor, by key; elements.
    """

    name: str
    nbytes: int
    data_start: int
    arrays: tuple[StoredArray, ...]
    offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def choose_files(names: Collection[str], where: str) -> str | tuple[str, ...]:
    """Choose what to read of a directory.

    Args:
        names: Of the files in it.
        where: The directory, for errors.

    Returns:
        The name of an index, or names of safetensors files, sorted, that need none.

    Raises:
        NotFoundError: There are no safetensors files.
        ArgumentError: Several things are there, each of which may be meant.
        IncompleteError: There is no index, and files of a numbered series are missing.
    """
    indices = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    if MODEL_FILE in names and INDEX_FILE not in names:
        return (MODEL_FILE,)
    if INDEX_FILE in names:
        return INDEX_FILE
    if len(indices) > 1:
        raise ArgumentError(f"{where} has {len(indices)} indices, {indices[:8]}: pass the path of the one to read")
    if indices:
        return indices[0]
    files = tuple(sorted(name for name in names if name.endswith(SUFFIX)))
    if ".metadata" in names and all(name.startswith("_rank") for name in files):
        how = "load it without HuggingFaceReader"
        if not files:
            how += ", or with TorchDCPReader if torch.distributed.checkpoint wrote it"
        raise ArgumentError(f"{where} holds a sharded checkpoint (.metadata), and no Hugging Face files; {how}")
    if not files:
        raise NotFoundError(
            f"there are no safetensors files in {where}: check the path (and convert pytorch_model.bin and the like to "
            "safetensors)"
        )
    _check_series(files, where)
    return files


def _check_series(files: Sequence[str], where: str) -> None:
    """Refuse a part of a series such as `model-00001-of-00003.safetensors`, as a copy that was interrupted leaves it.

    Of the files that torch's ranks write ("shard-..."), not every number needs to be there.
    """
    series: dict[tuple[str, int], set[int]] = {}
    for name in files:
        if match := _NUMBERED.fullmatch(name):
            series.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (start, count), numbers in series.items():
        missing = list(islice((number for number in range(1, count + 1) if number not in numbers), _SHOWN))
        if missing:
            shown = ", ".join([*map(str, missing), "..."] if len(missing) == _SHOWN else map(str, missing))
            raise IncompleteError(
                f"{where} has {len(numbers)} of the {count} files {start}-NNNNN-of-{count:05d}{SUFFIX}, and no index; "
                f"missing are {shown}: restore them, or pass the path of the one file to read"
            )


def parse_index(raw: bytes, name: str) -> dict[str, str]:
    """Read an index.

    Args:
        raw: Its bytes.
        name: The file, for errors.

    Returns:
        For each tensor the name of its file.

    Raises:
        CorruptError: It is no such index.
    """
    try:
        fields = json.loads(raw, object_pairs_hook=unique_fields)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{name}: this index is not valid: {error}") from error
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CorruptError(f"{name}: this index has no weight_map from names of tensors to names of files")
    for file in set(weight_map.values()):
        if not file.endswith(SUFFIX):
            raise CorruptError(f"{name}: it names {file[:200]!a}, which is no safetensors file")
    return weight_map


def check_choice(weight_map: Mapping[str, str], index: str, names: Collection[str], where: str) -> None:
    """Refuse an index beside a whole model that it does not speak of: one of the two is older.

    Raises:
        ArgumentError: So it is.
    """
    if index == INDEX_FILE and MODEL_FILE in names and MODEL_FILE not in weight_map.values():
        raise ArgumentError(
            f"{where} holds {MODEL_FILE}, and {INDEX_FILE} of other files: pass the path of the one to read, or remove "
            "the older one"
        )


def describe_file(header: bytes, nbytes: int, name: str, label: str, wanted: Collection[str] | None) -> SafetensorsFile:
    """Describe one file by its header.

    Args:
        header: From byte 0 to the start of the data section.
        nbytes: Size of the file.
        name: Its name.
        label: What to call it in errors.
        wanted: The tensors that are of interest; None: all.

    Raises:
        CorruptError: The header is not sound, or lacks a tensor that the index says is there.
        IncompleteError: The file is cut short.
    """
    arrays, notes = parse_header(header, nbytes, label)
    keys = {array.key for array in arrays}
    missing = sorted(set(wanted or ()) - keys)
    if missing:
        raise CorruptError(
            f"{label}: lacks {len(missing)} tensors that the index says are in it, such as "
            f"{[key[:200] for key in missing[:4]]!a}; restore the file or its index"
        )
    for array in arrays:
        _check_array(array, label)
    chosen = arrays if wanted is None else tuple(array for array in arrays if array.key in wanted)
    return SafetensorsFile(name, nbytes, len(header), chosen, _shard_offsets(notes, chosen, keys, label))


def _check_array(array: StoredArray, name: str) -> None:
    try:
        array.key.encode()
    except UnicodeEncodeError as error:
        raise CorruptError(f"{name}: {array.key[:200]!a} is no name of a tensor: it is not valid Unicode") from error


def _shard_offsets(
    notes: Mapping[str, str], arrays: Sequence[StoredArray], keys: Collection[str], name: str
) -> dict[str, tuple[int, ...]]:
    """Where arrays start that torch DCP wrote as shards."""
    text = notes.get(_SHARDING_NOTE)
    if not text:
        return {}
    try:
        found = json.loads(text, object_pairs_hook=unique_fields)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{name}: its {_SHARDING_NOTE} is not valid: {error}") from error
    if not isinstance(found, dict) or found.keys() != set(keys):
        raise CorruptError(f"{name}: its {_SHARDING_NOTE} does not name the tensors of the file")
    offsets = {}
    for array in arrays:
        entry = found[array.key]
        start: Any = entry.get("saved_offsets") if isinstance(entry, dict) else None
        is_list = isinstance(start, list) and len(start) == len(array.shape)
        if not is_list or not all(map(_fits, start, array.shape)):
            raise CorruptError(f"{name}: its {_SHARDING_NOTE} has no offsets for {array.key[:200]!a}")
        offsets[array.key] = tuple(start)
    return offsets


def _fits(offset: object, size: int) -> bool:
    return type(offset) is int and 0 <= offset <= _LARGEST - size


def check_duplicates(files: Sequence[SafetensorsFile]) -> None:
    """Refuse a tensor that two files hold whole, or the same shard of.

    Raises:
        CorruptError: One does; it names both.
    """
    seen: dict[tuple[str, tuple[int, ...] | None], str] = {}
    for file in files:
        for array in file.arrays:
            place = array.key, file.offsets.get(array.key)
            other = seen.setdefault(place, file.name)
            if other != file.name:
                raise CorruptError(
                    f"{file.name}: the tensor {array.key[:200]!a} is in {other} too; keep the files of one checkpoint "
                    "in the directory, or pass the path of an index that names them"
                )


def encode_files(files: Sequence[SafetensorsFile]) -> bytes:
    """Flatten what headers said, so that other ranks need not read them."""
    plain = [
        (
            file.name, file.nbytes, file.data_start, list(file.offsets.items()),
            [(array.key, array.file_dtype, array.shape, array.byte_offset, array.nbytes) for array in file.arrays],
        )
        for file in files
    ]  # fmt: skip
    return json.dumps(plain, separators=(",", ":")).encode()


def decode_files(raw: bytes) -> tuple[SafetensorsFile, ...]:
    """Undo `encode_files`; the bytes come from another rank.

    Raises:
        IncompleteError: They do not.
    """
    try:
        return tuple(
            SafetensorsFile(
                name, nbytes, data_start,
                tuple(StoredArray(key, dtype, tuple(shape), at, size) for key, dtype, shape, at, size in arrays),
                {key: tuple(start) for key, start in offsets},
            )
            for name, nbytes, data_start, offsets, arrays in json.loads(raw)
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise IncompleteError(f"the description of the files from another rank is not whole: {error}") from error
