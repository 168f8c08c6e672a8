"""Checkpoints of torch DCP that are damaged, or made to harm: a clear error, no code run, no target touched."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex as TorchIndex

import dcp_torch as dcp
from dcp_core import api
from dcp_core.errors import (
    CorruptError,
    CoverageError,
    DcpError,
    IncompleteError,
    MissingKeysError,
    NotFoundError,
    UnsupportedValueError,
    UntrustedObjectError,
)
from dcp_torch.torch_dcp import TorchDCPReader
from dcp_torch.torch_dcp_entries import find_tensor

FILE = "__0_0.distcp"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"w": torch.arange(12.0).reshape(3, 4), "v": torch.ones(5), "step": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(state, checkpoint_id=str(tmp_path))  # type: ignore[attr-defined]  # torch lists no exports
    return tmp_path


def load(path: Path, **more: Any) -> dict[str, Any]:
    target = {"w": torch.full((3, 4), 7.0), "v": torch.full((5,), 7.0), "step": 0, **more}
    try:
        dcp.load(target, storage_reader=TorchDCPReader(path))
    except DcpError:
        assert target["step"] == 0
        raise
    return target


def change(path: Path, edit: Callable[[TorchMetadata], object]) -> None:
    """Change what `.metadata` says."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def place(metadata: TorchMetadata, name: str) -> tuple[TorchIndex, _StorageInfo]:
    return next((index, found) for index, found in metadata.storage_data.items() if index.fqn == name)


class _Harm:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(saved: Path) -> None:
    marker = saved / "ran"
    for blob in (
        pickle.dumps(_Harm(marker)),
        pickle.dumps({"state_dict_metadata": _Harm(marker)}, protocol=2),
        b"\x80\x02cbuiltins\neval\nX\x04\x00\x00\x002**9\x85R.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nos\n.",
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
    ):
        (saved / ".metadata").write_bytes(blob)
        with pytest.raises(UntrustedObjectError, match="nothing was run"):
            load(saved)
    assert not marker.exists()


def test_a_value_that_needs_a_class_is_refused_and_runs_nothing(saved: Path) -> None:
    marker = saved / "ran"
    stream = io.BytesIO()
    torch.save(_Harm(marker), stream)
    (saved / "evil.distcp").write_bytes(stream.getvalue())

    def edit(metadata: TorchMetadata) -> None:
        index, _ = place(metadata, "step")
        metadata.storage_data[index] = _StorageInfo("evil.distcp", 0, len(stream.getvalue()))

    change(saved, edit)
    with pytest.raises(UntrustedObjectError, match=r"'step'.*mkdir.*add_safe_globals"):
        load(saved)
    assert not marker.exists()


def test_a_tensor_whose_pickle_would_run_code_is_refused(saved: Path) -> None:
    marker = saved / "ran"
    stream = io.BytesIO()
    torch.save(_Harm(marker), stream)
    blob = stream.getvalue()
    with pytest.raises(UntrustedObjectError, match=r"entry.*mkdir"):
        find_tensor(lambda offset, nbytes: blob[offset : offset + nbytes], len(blob), "entry")
    assert not marker.exists()


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x80",
        b"\x80\x04N.",
        b"\x80\x04]q\x00.",
        b"\x80\x04" + b"\xff" * 50,
        b"\x10\0\0\0\0\0\0\0{}",
        b"\x80\x04}.",
    ],
)
def test_what_is_no_description_is_refused(saved: Path, blob: bytes) -> None:
    (saved / ".metadata").write_bytes(blob)
    with pytest.raises(CorruptError, match=r"\.metadata"):
        load(saved)


def test_every_description_that_is_cut_short_or_has_a_changed_byte_gives_a_clear_error_or_loads(saved: Path) -> None:
    blob = (saved / ".metadata").read_bytes()
    for at in range(1, len(blob), 13):
        for damaged in (blob[:at], blob[:at] + bytes([blob[at] ^ 0x41]) + blob[at + 1 :]):
            (saved / ".metadata").write_bytes(damaged)
            with contextlib.suppress(DcpError):
                load(saved)


def test_every_data_file_that_has_a_changed_byte_gives_a_clear_error_or_loads(saved: Path) -> None:
    blob = (saved / FILE).read_bytes()
    for at in range(0, len(blob), 29):
        (saved / FILE).write_bytes(blob[:at] + bytes([blob[at] ^ 0x41]) + blob[at + 1 :])
        with contextlib.suppress(DcpError):
            load(saved)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "a/b", "a\0b"])
def test_names_that_leave_the_directory_are_refused(saved: Path, name: str) -> None:
    def edit(metadata: TorchMetadata) -> None:
        index, found = place(metadata, "w")
        metadata.storage_data[index] = _StorageInfo(name, found.offset, found.length)

    change(saved, edit)
    with pytest.raises(CorruptError):
        load(saved)


@pytest.mark.parametrize(
    ("offset", "nbytes", "error"),
    [
        (-1, 100, CorruptError),
        (0, -1, CorruptError),
        (1 << 70, 1, CorruptError),
        (0, 10, CorruptError),
        (1 << 40, 4000, IncompleteError),
        (5, 1641, CorruptError),
    ],
)
def test_places_that_cannot_be_are_refused(saved: Path, offset: int, nbytes: int, error: type[DcpError]) -> None:
    def edit(metadata: TorchMetadata) -> None:
        metadata.storage_data[place(metadata, "w")[0]] = _StorageInfo(FILE, offset, nbytes)

    change(saved, edit)
    with pytest.raises(error):
        load(saved)


def test_shapes_and_types_that_the_entry_contradicts_are_refused(saved: Path) -> None:
    def swap(metadata: TorchMetadata) -> None:
        (one, first), (two, second) = place(metadata, "w"), place(metadata, "v")
        metadata.storage_data[one], metadata.storage_data[two] = second, first

    change(saved, swap)
    with pytest.raises(CorruptError, match=r"'[vw]' in __0_0\.distcp.*the metadata says"):
        load(saved)


def test_chunks_outside_of_their_tensor_and_missing_chunks_are_refused(saved: Path) -> None:
    def outside(metadata: TorchMetadata) -> None:
        metadata.state_dict_metadata["w"].size = torch.Size([2, 4])  # type: ignore[union-attr]  # a tensor

    def hole(metadata: TorchMetadata) -> None:
        metadata.state_dict_metadata["w"].size = torch.Size([5, 4])  # type: ignore[union-attr]  # a tensor

    whole = (saved / ".metadata").read_bytes()
    change(saved, outside)
    with pytest.raises(CorruptError, match="outside"):
        load(saved)
    (saved / ".metadata").write_bytes(whole)
    change(saved, hole)
    with pytest.raises(CoverageError, match="'w'"):
        load(saved, w=torch.zeros(5, 4))


def test_missing_and_short_files_and_no_checkpoint_at_all(
    saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    blob = (saved / FILE).read_bytes()
    (saved / FILE).write_bytes(blob[:-1])
    with pytest.raises(IncompleteError, match=FILE):
        load(saved)
    (saved / FILE).unlink()
    with pytest.raises(IncompleteError, match=f"{FILE} is missing"):
        load(saved)
    with pytest.raises(NotFoundError, match="torch DCP"):
        load(tmp_path_factory.mktemp("empty"))


def test_a_checkpoint_of_ours_and_a_key_that_is_missing(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.mktemp("own")
    api.save({"w": torch.ones(2)}, checkpoint_id=own)
    with pytest.raises(CorruptError, match="without a TorchDCPReader"):
        load(own)
    with pytest.raises(MissingKeysError, match="'more'"):
        load(saved, more=torch.zeros(1))
    with pytest.raises(DcpError):
        dcp.load({"w": torch.ones(3, 4)}, checkpoint_id=saved)


def test_entries_written_through_extensions_are_refused(saved: Path) -> None:
    def edit(metadata: TorchMetadata) -> None:
        index, found = place(metadata, "w")
        metadata.storage_data[index] = _StorageInfo(FILE, found.offset, found.length, transform_descriptors=["zstd"])

    change(saved, edit)
    with pytest.raises(UnsupportedValueError, match=r"'w'.*zstd"):
        load(saved)


def entry_of(
    tensor: torch.Tensor, edit: Callable[[dict[str, bytes]], object], method: int = zipfile.ZIP_STORED
) -> bytes:
    """What `torch.save` writes for a tensor, with its records changed."""
    stream = io.BytesIO()
    torch.save(tensor, stream)
    with zipfile.ZipFile(stream) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    edit(records)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return made.getvalue()


@pytest.mark.parametrize(
    ("edit", "method", "message"),
    [
        (lambda records: None, zipfile.ZIP_DEFLATED, "compressed"),
        (lambda records: records.pop("archive/data/0"), zipfile.ZIP_STORED, "no record 'data/0'"),
        (lambda records: records.pop("archive/data.pkl"), zipfile.ZIP_STORED, r"no record 'data\.pkl'"),
        (lambda records: records.update({"archive/byteorder": b"big"}), zipfile.ZIP_STORED, "big-endian"),
        (lambda records: records.update({"archive/data/0": b"1234"}), zipfile.ZIP_STORED, "outside of its 4 bytes"),
        (lambda records: records.update({"archive/data.pkl": b"\x80\x02N."}), zipfile.ZIP_STORED, "not a tensor"),
        (lambda records: records.update({"archive/data.pkl": b"\x80\x02"}), zipfile.ZIP_STORED, "damaged"),
    ],
)
def test_entries_that_torch_never_writes_are_refused(edit: Any, method: int, message: str) -> None:
    blob = entry_of(torch.ones(1000), edit, method)
    with pytest.raises(CorruptError, match=f"the entry.*{message}"):
        find_tensor(lambda offset, nbytes: blob[offset : offset + nbytes], len(blob), "the entry")


def test_an_entry_rebuilt_by_another_zip_writer_is_read() -> None:
    tensor = torch.arange(1000.0)
    blob = entry_of(tensor, lambda records: None)
    found = find_tensor(lambda offset, nbytes: blob[offset : offset + nbytes], len(blob), "the entry")
    assert struct.unpack("<1000f", blob[found.start : found.start + 4000]) == tuple(tensor.tolist())
