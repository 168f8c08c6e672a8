"""The good checkpoints that attacks are put into: one of this library, one of Hugging Face, one of torch DCP.

Always the same bytes: the id of the save, the versions of the writers, and what compression makes of columns are left
out of the one that this library writes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

from dcp_core.formats import column_codec
from dcp_core.formats.metadata_file import assemble, encode_body, open_bytes
from dcp_core.formats.safetensors_file import SAVE_ID_START
from dcp_core.metadata import SaveRecord, WriterRecord
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.attacks import assembly as a
from tests.core.fault_jobs import Seat, state_of

SAVE_ID = "0123456789abcdef" * 2
WORLD = 2
WRITER = WriterRecord("dcp 0", "numpy", "0", WORLD)
TORCH_FILE = "__0_0.distcp"
_METADATA = "torch.distributed.checkpoint.metadata"

Files = dict[str, bytes]


@contextmanager
def uncompressed() -> Iterator[None]:
    """Write columns as they are: what compression gives differs between machines."""
    with mock.patch.object(column_codec, "_pack", lambda raw: (raw, False)):
        yield


def _save(context: RankContext, directory: Path) -> None:
    Seat.of(context).save(state_of(context.rank, context.world_size, 1), checkpoint_id=directory)


def dcp_base() -> Files:
    """Two ranks' checkpoint: two sharded tensors, a replicated one, values of all and of each."""
    with tempfile.TemporaryDirectory() as path:
        run_ranks(_save, WORLD, Path(path) / "saved")
        files = {entry.name: entry.read_bytes() for entry in (Path(path) / "saved").iterdir()}
    for name, content in files.items():
        if name.endswith(".safetensors"):
            files[name] = content[:SAVE_ID_START] + SAVE_ID.encode() + content[SAVE_ID_START + 32 :]
    source = open_bytes(files[".metadata"])
    with uncompressed():
        files[".metadata"] = assemble(
            encode_body(source.columns()), source.files, SaveRecord(SAVE_ID, ""), WRITER
        )  # fmt: skip
    return dict(sorted(files.items()))


def huggingface_base() -> Files:
    """Two files and their index."""
    first = {"w": a.entry("F32", (3, 4), 0, 48), "step": a.entry("I64", (), 48, 56)}
    second = {"b": a.entry("F16", (5,), 0, 10)}
    data = np.arange(12, dtype="<f4").tobytes() + (7).to_bytes(8, "little")
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    return {
        names[0]: a.safetensors(first, data),
        names[1]: a.safetensors(second, np.arange(5, dtype="<f2").tobytes()),
        "model.safetensors.index.json": index({"w": names[0], "step": names[0], "b": names[1]}),
    }


def index(weight_map: object) -> bytes:
    """A Hugging Face index."""
    return json.dumps({"metadata": {"total_size": 66}, "weight_map": weight_map}, indent=1).encode()


def torch_entry(pickled: bytes, data: bytes, **more: bytes) -> bytes:
    """What `torch.save` writes."""
    records = {"data.pkl": pickled, "byteorder": b"little", "data/0": data, "version": b"3\n", **more}
    return a.archive({f"archive/{name}": content for name, content in records.items()})


def torch_tensor(*, key: str = "0", storage: str = "FloatStorage", count: int = 12, start: bytes = a.number(0),
                 sizes: bytes | None = None, strides: bytes | None = None, after: bytes = b"") -> bytes:  # fmt: skip
    """The pickle of a tensor of 3 by 4 numbers."""
    place = a.tuple_of(a.text("storage"), a.named("torch", storage), a.text(key), a.text("cpu"), a.number(count))
    size = a.tuple_of(a.number(3), a.number(4)) if sizes is None else sizes
    stride = a.tuple_of(a.number(4), a.number(1)) if strides is None else strides
    hooks = a.named("collections", "OrderedDict") + a.EMPTY_TUPLE + a.REDUCE
    rebuilt = a.call(a.named("torch._utils", "_rebuild_tensor_v2"), place + b"Q", start, size, stride, b"\x89", hooks)
    return a.proto(2, rebuilt, after)


def torch_metadata(
    *,
    place: bytes | None = None,
    size: bytes | None = None,
    chunks: bytes | None = None,
    properties: bytes | None = None,
    fqn: bytes = a.text("w"),
    offset: bytes | None = None,
    planner: bytes = a.NONE,
    nbytes: tuple[int, int],
) -> bytes:
    """What torch DCP writes as `.metadata` for a tensor `w` and a value `step`, with some of it another way."""
    zero = torch_size(0, 0)
    shape = torch_size(3, 4)
    dtype = a.named("torch", "float32")
    kind = a.named(_METADATA, "TensorProperties") + a.EMPTY_TUPLE + a.NEWOBJ
    known = kind + a.tuple_of(dtype, a.NONE, b"\x89", a.NONE, b"\x89") + a.BUILD if properties is None else properties
    chunk = a.made(a.named(_METADATA, "ChunkStorageMetadata"), ("offsets", zero), ("sizes", shape))
    tensor = a.made(
        a.named(_METADATA, "TensorStorageMetadata"),
        ("properties", known),
        ("size", shape if size is None else size),
        ("chunks", a.list_of(chunk) if chunks is None else chunks),
    )
    value = a.named(_METADATA, "BytesStorageMetadata") + a.EMPTY_TUPLE + a.NEWOBJ
    first, second = torch_index(fqn, zero if offset is None else offset), torch_index(a.text("step"), a.NONE)
    places = a.dict_of(
        (first, torch_place(0, nbytes[0]) if place is None else place), (second, torch_place(nbytes[0], nbytes[1]))
    )
    whole = a.made(
        a.named(_METADATA, "Metadata"),
        ("state_dict_metadata", a.dict_of((a.text("w"), tensor), (a.text("step"), value))),
        ("planner_data", planner),
        ("storage_data", places),
    )
    return a.proto(4, whole)


def torch_size(*sizes: int) -> bytes:
    """A `torch.Size`."""
    return a.call(a.named("torch", "Size"), a.tuple_of(*map(a.number, sizes)))


def torch_index(fqn: bytes, offset: bytes) -> bytes:
    """A `MetadataIndex`."""
    kind = a.named(_METADATA, "MetadataIndex")
    return a.made(kind, ("fqn", fqn), ("offset", offset), ("index", a.NONE))


def torch_place(start: int, nbytes: int, file: bytes = a.text(TORCH_FILE)) -> bytes:
    """A `_StorageInfo`."""
    kind = a.named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    return a.made(kind, ("relative_path", file), ("offset", a.number(start)), ("length", a.number(nbytes)))


def torch_parts() -> tuple[bytes, bytes]:
    """The two entries of the data file: a tensor, and a value."""
    return torch_entry(torch_tensor(), np.arange(12, dtype="<f4").tobytes()), torch_entry(a.proto(2, a.number(3)), b"")


def torch_base() -> Files:
    """A tensor and a value in one file."""
    tensor, value = torch_parts()
    return {".metadata": torch_metadata(nbytes=(len(tensor), len(value))), TORCH_FILE: tensor + value}


def all_bases() -> dict[str, Files]:
    """All of them by name."""
    return {"dcp": dcp_base(), "huggingface": huggingface_base(), "torch": torch_base()}
