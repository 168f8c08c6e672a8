"""Safetensors files as other programs write them: made by hand here, so that they may be wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core import api
from dcp_core.dtype import numpy_dtype
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.testing.numpy_ranks import NumpyRankAdapter

Array = npt.NDArray[Any]
INDEX = "model.safetensors.index.json"
MODEL = "model.safetensors"


def header_entry(array: Array, start: int) -> dict[str, object]:
    dtype = numpy_dtype(array.dtype)
    assert dtype is not None
    return {"dtype": dtype.file_dtype, "shape": list(array.shape), "data_offsets": [start, start + array.nbytes]}


def file_bytes(header: Mapping[str, object] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file of any header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def write_file(path: Path, arrays: Mapping[str, Array], notes: Mapping[str, str] | None = None) -> None:
    """Write arrays one after the other."""
    header: dict[str, object] = {"__metadata__": dict(notes)} if notes else {}
    start = 0
    for name, array in arrays.items():
        header[name] = header_entry(array, start)
        start += array.nbytes
    path.write_bytes(file_bytes(header, b"".join(array.tobytes() for array in arrays.values())))


def write_shards(directory: Path, shards: Sequence[Mapping[str, Array]]) -> list[str]:
    """Write several files and their index; gives the names of the files."""
    names = [f"model-{row + 1:05}-of-{len(shards):05}.safetensors" for row in range(len(shards))]
    for name, arrays in zip(names, shards, strict=True):
        write_file(directory / name, arrays)
    write_index(directory, {key: name for name, arrays in zip(names, shards, strict=True) for key in arrays})
    return names


def write_index(directory: Path, weight_map: Mapping[str, str], name: str = INDEX) -> None:
    (directory / name).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}))


def write_saved_shard(path: Path, arrays: Mapping[str, tuple[tuple[int, ...], Array]]) -> None:
    """Write parts of tensors with their offsets, as torch's `HuggingFaceStorageWriter` does."""
    places = {name: {"saved_offsets": list(offsets)} for name, (offsets, _) in arrays.items()}
    notes = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    write_file(path, {name: array for name, (_, array) in arrays.items()}, notes)


def load(state: Mapping[str, Any], path: Path | str | None, **options: Any) -> None:
    """Load in this process alone; options of the reader among them."""
    ours = {key: options.pop(key) for key in ("key_map", "cuts") if key in options}
    api.load(state, storage_reader=HuggingFaceReader(path, **ours), adapter=NumpyRankAdapter(), **options)


def numbered(*shape: int, dtype: str = "float32", start: int = 0) -> Array:
    return np.arange(start, start + int(np.prod(shape)), dtype=dtype).reshape(shape)


def zeros_like(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.zeros_like(array) for name, array in arrays.items()}


def assert_equal(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].dtype == array.dtype
