"""Every way in for bytes of a stranger, as functions that take bytes and raise nothing but errors of ours.

`run_target` drives one of them with inputs that coverage guides; `tests/core/test_fuzz_targets.py` runs each on every
seed. The seeds are the files of `tests/attacks` of the right kind. Digests stand in the way of a fuzzer, so that some
targets make them right first.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.coordination.exchange import Exchange, forget
from dcp_core.coordination.frames import decode_frame, unpack
from dcp_core.coordination.verdict import decode_failure, judge, was_missed
from dcp_core.errors import CorruptError, DcpError, UnsupportedValueError, merge_errors
from dcp_core.formats.block_container import BlockContainer
from dcp_core.formats.bytes_file import PREAMBLE_NBYTES, parse_preamble
from dcp_core.formats.bytes_file import parse_index as parse_bytes_index
from dcp_core.formats.checksums import decode_field
from dcp_core.formats.huggingface_directory import describe_file, parse_index
from dcp_core.formats.huggingface_source import HuggingFaceSource
from dcp_core.formats.metadata_file import open_bytes
from dcp_core.formats.objects import decode_value, encode_value, pickled_classes
from dcp_core.formats.pickle_scan import scan_pickle
from dcp_core.formats.safetensors_parser import header_nbytes
from dcp_core.inspection.census import take_census
from dcp_core.metadata import Metadata
from dcp_core.planning.local_table import decode_table
from dcp_core.recipes.agreement import Agreement
from dcp_core.state_path import decode_path
from dcp_core.storage.intent import is_dead
from dcp_core.storage.local import LocalStorage
from tests.attacks.assembly import sealed
from tests.attacks.manifest import BASE, FOLDER, read_folder
from tests.core.metadata_samples import everything, replaced

INTENT = f".intent-{'b' * 32}"
_MOST_NBYTES = 1 << 16


@dataclass(frozen=True)
class Target:
    """One way in.

    Attributes:
        run: Takes bytes; raises nothing else than a `DcpError`, which `run_one` takes for an answer.
        seeds: Bytes to begin with.
        needs_torch: Whether it needs torch.
    """

    run: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    needs_torch: bool = False


def run_one(name: str, raw: bytes) -> None:
    """Give a target bytes."""
    with contextlib.suppress(DcpError), np.errstate(all="ignore"):
        TARGETS[name].run(raw)


def _seeds(*ways: str, place: Callable[[str], bool] = lambda name: True, base: str = "") -> Callable[[], list[bytes]]:
    """The files of some ways in, and those of a good checkpoint."""

    def read() -> list[bytes]:
        files = [entry for entry in sorted((FOLDER / BASE / base).iterdir()) if place(entry.name)] if base else []
        found = [entry.read_bytes() for entry in files]
        found += [
            content
            for attack in read_folder()
            if attack.way in ways
            for name, content in attack.files.items()
            if place(name)
        ]
        return [content for content in found if len(content) <= _MOST_NBYTES]

    return read


# --- .metadata ---------------------------------------------------------------------------------------


@cache
def _good() -> bytes:
    return (FOLDER / BASE / "dcp" / ".metadata").read_bytes()


def _container() -> BlockContainer:
    good = _good()
    return BlockContainer(lambda offset, nbytes: good[offset : offset + nbytes], len(good))


def _metadata(raw: bytes) -> None:
    source = open_bytes(raw)
    everything(source)
    source.columns()
    source.file_names()
    take_census(Metadata(source))


def _metadata_block(raw: bytes) -> None:
    """The first byte says which block of a good description the others take the place of, with a right digest."""
    names = _container().block_names
    _metadata(replaced(_good(), {names[raw[0] % len(names)]: raw[1:]}) if raw else b"")


def _metadata_header(raw: bytes) -> None:
    """The bytes go on behind the digest of the header, which is right."""
    _metadata(sealed(b'{"__metadata__":{"header_xxh3":"' + b"0" * 32 + b'"' + raw))


def _blocks() -> list[bytes]:
    container = _container()
    return [bytes([at]) + container.block(name) for at, name in enumerate(container.block_names)]


def _headers() -> list[bytes]:
    found = _seeds("metadata", base="dcp", place=lambda name: name == ".metadata")()
    return [raw[8 + 65 : 8 + int.from_bytes(raw[:8], "little")] for raw in found if raw[8:10] == b'{"']


# --- values ------------------------------------------------------------------------------------------


def _value(raw: bytes) -> None:
    with contextlib.suppress(DcpError):
        pickled_classes(raw)
    found = decode_value(raw, allow=(Counter,))
    with contextlib.suppress(UnsupportedValueError):
        encode_value(found)


def _values() -> list[bytes]:
    found = [encode_value(value) for value in (1, "a", [1.5, {"a": b"x"}], {1, 2}, np.arange(3.0), Counter("ab"), 1j)]
    for raw in _seeds("values", base="dcp", place=lambda name: name.endswith(".bytes"))():
        with contextlib.suppress(DcpError):
            start = PREAMBLE_NBYTES + 16 * parse_preamble(raw[:PREAMBLE_NBYTES], len(raw))
            index = parse_bytes_index(raw[PREAMBLE_NBYTES:start], None, len(raw))
            found += [raw[at : at + n] for at, n in zip(index.offsets.tolist(), index.nbytes.tolist(), strict=True)]
    return sorted(set(found))


def _pickles() -> list[bytes]:
    return [raw[raw.index(b"\x80\x05") :] for raw in _values() if raw[:1] == b"P" and b"\x80\x05" in raw]


def _bytes_file(raw: bytes) -> None:
    start = PREAMBLE_NBYTES + 16 * parse_preamble(raw[:PREAMBLE_NBYTES], len(raw))
    index = parse_bytes_index(raw[PREAMBLE_NBYTES:start], None, len(raw))
    assert int(index.nbytes.sum()) == len(raw) - start and (not len(index) or int(index.offsets.min()) >= start)


# --- safetensors -------------------------------------------------------------------------------------


def _safetensors(raw: bytes) -> None:
    start = header_nbytes(raw[:8], len(raw), "file")
    file = describe_file(raw[:start], len(raw), "x.safetensors", "file", None)
    source = HuggingFaceSource([file], None, {})
    everything(source)


def _safetensors_header(raw: bytes) -> None:
    """The bytes are the header of a file of 64 bytes of data."""
    _safetensors(len(raw).to_bytes(8, "little") + raw + bytes(64))


def _plain_headers() -> list[bytes]:
    found = _seeds("header", base="huggingface", place=lambda name: name.endswith(".safetensors"))()
    return [raw[8 : 8 + int.from_bytes(raw[:8], "little")] for raw in found]


def _field(raw: bytes) -> None:
    """The first two bytes say how long the data are."""
    decode_field(raw[2:], int.from_bytes(raw[:2], "little"), "file")


def _fields() -> list[bytes]:
    found = _seeds("data", base="dcp", place=lambda name: name.endswith(".safetensors"))()
    mark = b'"dcp.checksums":"'
    fields = [raw[raw.index(mark) + len(mark) :].partition(b'"')[0] for raw in found if mark in raw]
    return [length.to_bytes(2, "little") + field for field in sorted(set(fields)) for length in (0, 240, 244, 280)]


# --- torch -------------------------------------------------------------------------------------------


def _torch_metadata(raw: bytes) -> None:
    from dcp_torch.torch_dcp_metadata import TorchSource, describe

    found = describe(raw, ".metadata")
    everything(TorchSource(found, [1 << 20 for _ in found.files]))


def _torch_entry(raw: bytes) -> None:
    from dcp_torch.torch_dcp_entries import find_tensor

    def read(offset: int, nbytes: int) -> bytes:
        assert offset >= 0 and nbytes >= 0
        return raw[offset : offset + nbytes]

    found = find_tensor(read, len(raw), "entry")
    assert 0 <= found.start <= len(raw)


def _torch_tensor(raw: bytes) -> None:
    from dcp_torch.torch_dcp_pickles import load_tensor_ref

    ref = load_tensor_ref(raw, "entry")
    assert ref.start >= 0 and all(size >= 0 for size in (*ref.sizes, *ref.strides))
    assert isinstance(ref.key, str) and ref.dtype.itemsize > 0


def _torch_value(raw: bytes) -> None:
    from dcp_torch.torch_values import load_value

    with contextlib.suppress(UnsupportedValueError):
        encode_value(load_value(raw, "entry"))


def _entries() -> list[bytes]:
    """The two entries of each data file."""
    found = []
    for raw in _seeds("torch", base="torch", place=lambda name: name.endswith(".distcp"))():
        ends = [at + 22 for at in range(len(raw)) if raw.startswith(b"PK\5\6", at)]
        found += [raw[: ends[0]], raw[ends[0] :]] if ends else [raw]
    return sorted(set(found))


def _entry_pickles() -> list[bytes]:
    found = []
    for raw in _entries():
        at = raw.find(b"data.pkl")
        end = raw.find(b"PK\3\4", at)
        found += [raw[at + 8 : end]] if 0 <= at < end else []
    return sorted(set(found))


# --- messages and records ----------------------------------------------------------------------------


def _message(raw: bytes) -> None:
    frame = decode_frame(raw)
    failure = decode_failure(frame.body)
    was_missed(failure, 1)
    if failure.causes:
        str(merge_errors(failure.causes))
    judge("meet", {0: frame, 1: frame}, 2, 1.0)
    with contextlib.suppress(DcpError):
        unpack(frame.body)
    with contextlib.suppress(DcpError):
        Agreement.from_bytes(frame.body)
    json.dumps(failure.message)


def _table(raw: bytes) -> None:
    """What goes wrong in a coordinator's computation is an error of ours on all ranks, but for memory."""
    try:
        decode_table(raw)
    except MemoryError:
        raise
    except Exception as error:
        raise CorruptError(str(error)) from error


@cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="dcp fuzz ", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


def _intent(raw: bytes) -> None:
    (_scratch() / INTENT).write_bytes(raw)
    storage = LocalStorage(_scratch())
    assert is_dead(storage, INTENT, storage.modified_seconds(INTENT) or 0.0) in (True, False)


def _mailbox(raw: bytes) -> None:
    """The first byte says which rank reads the others as a message."""
    rank = raw[0] % 2 if raw else 0
    for name in ("k.0.1", "k.0.answers"):
        (_scratch() / name).write_bytes(raw[1:])
    forget("k", rank)
    side = Exchange(rank, 2, DirectoryChannel(_scratch(), make=False), key="k", timeout_seconds=0.001)
    side.run("meet", b"mine", compute=lambda payloads: payloads[1])


def _rank_messages() -> list[bytes]:
    return [bytes([rank]) + raw for raw in _seeds("messages")() for rank in (0, 1)]


TARGETS: dict[str, Target] = {
    "metadata": Target(_metadata, _seeds("metadata", base="dcp", place=lambda name: name == ".metadata")),
    "metadata_block": Target(_metadata_block, _blocks),
    "metadata_header": Target(_metadata_header, _headers),
    "value": Target(_value, _values),
    "pickle": Target(scan_pickle, _pickles),
    "bytes_file": Target(_bytes_file, _seeds("values", base="dcp", place=lambda name: name.endswith(".bytes"))),
    "safetensors": Target(
        _safetensors, _seeds("header", base="huggingface", place=lambda name: name.endswith(".safetensors"))
    ),
    "safetensors_header": Target(_safetensors_header, _plain_headers),
    "checksum_field": Target(_field, _fields),
    "huggingface_index": Target(
        lambda raw: parse_index(raw, "index"),
        _seeds("index", base="huggingface", place=lambda name: name.endswith(".json")),
    ),
    "state_path": Target(decode_path, lambda: list(open_bytes(_good()).columns().tensors.paths)),
    "message": Target(_message, _seeds("messages", "payloads")),
    "mailbox": Target(_mailbox, _rank_messages),
    "plan_table": Target(_table, _seeds("payloads")),
    "intent": Target(_intent, _seeds("intents", place=lambda name: name == INTENT)),
    "torch_metadata": Target(
        _torch_metadata, _seeds("torch", base="torch", place=lambda name: name == ".metadata"), needs_torch=True
    ),
    "torch_entry": Target(_torch_entry, _entries, needs_torch=True),
    "torch_tensor": Target(_torch_tensor, _entry_pickles, needs_torch=True),
    "torch_value": Target(_torch_value, _entries, needs_torch=True),
}
"""Every target by its name."""


def names(*, with_torch: bool) -> list[str]:
    """Names of the targets that can run here."""
    return [name for name, target in TARGETS.items() if with_torch or not target.needs_torch]


@cache
def seeds_of(name: str) -> tuple[bytes, ...]:
    """What a target begins with."""
    found: Any = TARGETS[name].seeds()
    return tuple(bytes(raw) for raw in found)
