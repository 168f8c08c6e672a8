"""Checkpoints of other formats become ours: right bits, checksums, bounded memory, whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from dcp_core import api
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.errors import ArgumentError, CorruptError, DcpError, IncompleteError, NotFoundError, UnsupportedValueError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.huggingface import HuggingFaceReader, Joined, Stacked
from dcp_core.formats.cuts import Cut
from dcp_core.formats.metadata_file import open_bytes
from dcp_core.inspection.detection import checkpoint_format
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from tests.core.huggingface_files import file_bytes
from tests.core.interrupts import interrupted_at
from tests.core.peak_memory import need_peak_counter, peak_rise

Array = npt.NDArray[Any]


def write_huggingface(path: Path, files: list[dict[str, Array]]) -> None:
    """A directory as `save_pretrained` writes it, by safetensors' own writer."""
    path.mkdir()
    names = [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    for name, arrays in zip(names, files, strict=True):
        save_file(arrays, path / name, {"format": "pt"})
    weight_map = {key: name for name, arrays in zip(names, files, strict=True) for key in arrays}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def sample(seed: int, count: int = 6) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {
        f"layers.{n}.w": rng.standard_normal((n + 3, 70)).astype(np.float32) for n in range(count)
    }
    arrays |= {"scalar": np.array(5.0), "empty": np.zeros((0, 4)), "flag": np.array([True, False])}
    names = list(arrays)
    return [{name: arrays[name] for name in names[part::3]} for part in range(3)]


def joined(files: list[dict[str, Array]]) -> dict[str, Array]:
    return {name: array for file in files for name, array in file.items()}


def loaded(path: Path) -> dict[str, Array]:
    names = open_bytes((path / ".metadata").read_bytes()).names()
    return {name: api.read(path, name) for name in names}


def assert_equal(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype, found[name].tobytes()) == (
            array.shape,
            array.dtype,
            array.tobytes(),
        )


def test_a_directory_of_safetensors_becomes_a_checkpoint_that_loads_and_is_checked(tmp_path: Path) -> None:
    files = sample(1)
    write_huggingface(tmp_path / "hf", files)
    metadata = convert_to_dcp(HuggingFaceReader(tmp_path / "hf"), tmp_path / "dcp")
    assert_equal(loaded(tmp_path / "dcp"), joined(files))
    assert metadata.state_dict_metadata.keys() == joined(files).keys()
    target = {"layers": [{"w": np.zeros((n + 3, 70), np.float32)} for n in range(6)]}
    api.load(target, checkpoint_id=tmp_path / "dcp", verify="full")
    assert all(np.array_equal(target["layers"][n]["w"], joined(files)[f"layers.{n}.w"]) for n in range(6))
    (data,) = (tmp_path / "dcp").glob("*.safetensors")
    blob = bytearray(data.read_bytes())
    blob[-1] ^= 1
    data.write_bytes(blob)
    with pytest.raises(CorruptError, match="checksum"):
        loaded(tmp_path / "dcp")


def test_a_single_file_and_names_and_cuts_of_the_users_own(tmp_path: Path) -> None:
    arrays = {f"e.{n}": np.arange(6.0).reshape(2, 3) + n for n in range(3)} | {
        "q": np.ones((1, 3)),
        "k": np.zeros((2, 3)),
    }
    save_file(arrays, tmp_path / "x.safetensors")
    cuts: dict[str, Cut] = {"experts": Stacked([f"e.{n}" for n in range(3)]), "qk": Joined(["q", "k"])}
    reader = HuggingFaceReader(tmp_path / "x.safetensors", key_map=lambda name: None, cuts=cuts)
    convert_to_dcp(reader, tmp_path / "dcp")
    stacked = np.stack([arrays[f"e.{n}"] for n in range(3)])
    assert_equal(loaded(tmp_path / "dcp"), {"experts": stacked, "qk": np.concatenate([arrays["q"], arrays["k"]])})


def test_a_checkpoint_of_ours_is_written_anew_with_nesting_values_and_ties(tmp_path: Path) -> None:
    shared = np.arange(10.0)
    state = {"a": shared, "tied": shared, "n": [{"lr": 0.1}, {}], "step": 3, 5: {"x": np.ones((2, 2), np.int8)}}
    api.save(state, checkpoint_id=tmp_path / "a")
    convert_to_dcp(FileSystemReader(tmp_path / "a"), tmp_path / "b")
    target = {
        "a": np.zeros(10),
        "tied": np.zeros(10),
        "n": [{"lr": 0.0}, {}],
        "step": 0,
        5: {"x": np.zeros((2, 2), np.int8)},
    }
    api.load(target, checkpoint_id=tmp_path / "b")
    assert target["n"] == state["n"]
    assert target["step"] == 3
    assert np.array_equal(target["tied"], shared)  # type: ignore[arg-type]  # an array
    sizes = [
        sum(os.path.getsize(path / name) for name in os.listdir(path)) for path in (tmp_path / "a", tmp_path / "b")
    ]
    assert abs(sizes[0] - sizes[1]) < 64


def test_a_damaged_source_is_refused_and_what_was_there_stays(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "hf", sample(1))
    api.save({"old": np.ones(3)}, checkpoint_id=tmp_path / "dcp")
    file = tmp_path / "hf" / "model-00002-of-00003.safetensors"
    blob = file.read_bytes()
    for damaged, error in ((blob[:-1], IncompleteError), (b"", IncompleteError), (b"\xff" * 100, CorruptError)):
        file.write_bytes(damaged)
        with pytest.raises(error, match=file.name):
            convert_to_dcp(HuggingFaceReader(tmp_path / "hf"), tmp_path / "dcp")
    file.unlink()
    with pytest.raises(DcpError, match=file.name):
        convert_to_dcp(HuggingFaceReader(tmp_path / "hf"), tmp_path / "dcp")
    with pytest.raises(NotFoundError):
        convert_to_dcp(HuggingFaceReader(tmp_path / "nix"), tmp_path / "dcp")
    assert_equal(loaded(tmp_path / "dcp"), {"old": np.ones(3)})


@pytest.mark.parametrize("has_old", [False, True])
def test_a_conversion_that_fails_anywhere_leaves_the_old_checkpoint_or_nothing(has_old: bool, tmp_path: Path) -> None:
    files = sample(2, count=2)
    write_huggingface(tmp_path / "hf", files)
    for number in itertools.count(1):
        target = tmp_path / f"dcp{number}"
        if has_old:
            api.save({"old": np.ones(3)}, checkpoint_id=target)
        operations = FaultyOperations(fail_at=number)
        writer = FileSystemWriter(storage=LocalStorage(target, operations))
        try:
            convert_to_dcp(HuggingFaceReader(tmp_path / "hf"), target, storage_writer=writer)
            failed = False
        except DcpError:
            failed = True
        is_there = (target / ".metadata").exists()
        if is_there and loaded(target).keys() != {"old"}:
            assert_equal(loaded(target), joined(files))
        else:
            assert failed
            assert is_there == has_old
        if number > len(operations.log):
            assert not failed
            return
    raise AssertionError("unreachable")


@pytest.mark.parametrize("has_old", [False, True])
def test_who_interrupts_a_conversion_keeps_the_old_checkpoint_or_has_nothing(has_old: bool, tmp_path: Path) -> None:
    files = sample(2, count=2)
    write_huggingface(tmp_path / "hf", files)
    for number in itertools.count(1):
        target = tmp_path / f"dcp{number}"
        if has_old:
            api.save({"old": np.ones(3)}, checkpoint_id=target)
        operations = interrupted_at(number)
        writer = FileSystemWriter(storage=LocalStorage(target, operations))
        try:
            convert_to_dcp(HuggingFaceReader(tmp_path / "hf"), target, storage_writer=writer)
            time.sleep(0)  # a signal that came last is heard here
        except KeyboardInterrupt:
            pass
        if (target / ".metadata").exists() and loaded(target).keys() != {"old"}:
            assert_equal(loaded(target), joined(files))
        else:
            assert (target / ".metadata").exists() == has_old
        if number > len(operations.log):
            return
    raise AssertionError("unreachable")


def test_types_that_no_framework_has_are_not_lost_silently(tmp_path: Path) -> None:
    header = {
        "odd": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        "w": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
    }
    (tmp_path / "model.safetensors").write_bytes(file_bytes(header, b"abcde"))
    with pytest.raises(UnsupportedValueError, match=r"odd \(F6_E2M3\); a key_map that gives None"):
        convert_to_dcp(HuggingFaceReader(tmp_path), tmp_path / "dcp", durable=False)
    assert not (tmp_path / "dcp").exists()
    convert_to_dcp(HuggingFaceReader(tmp_path, key_map={"^odd": None}), tmp_path / "dcp", durable=False)
    assert loaded(tmp_path / "dcp")["w"].tobytes() == b"de"


def test_a_checkpoint_is_not_put_beside_the_weights_that_it_is_made_of(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "hf", sample(2))
    before = sorted(os.listdir(tmp_path / "hf"))
    with pytest.raises(ArgumentError, match=r"hf' holds model-00001-of-00003\.safetensors, beside which.*another"):
        convert_to_dcp(HuggingFaceReader(tmp_path / "hf"), tmp_path / "hf")
    assert sorted(os.listdir(tmp_path / "hf")) == before


@pytest.mark.parametrize("shape", [(4096, 4096), (16 << 20,), (2, 3, 1_500_000)], ids=str)
def test_memory_stays_small_whatever_the_tensors(shape: tuple[int, ...], tmp_path: Path) -> None:
    need_peak_counter()
    big = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    write_huggingface(tmp_path / "hf", [{"a": big}, {"b": big, "c": np.ones(3)}, {"d": big}])
    rise = peak_rise(lambda: convert_to_dcp(HuggingFaceReader(tmp_path / "hf"), tmp_path / "dcp", durable=False))
    assert rise < 96
    assert np.array_equal(api.read(tmp_path / "dcp", "d"), big)


def test_many_small_tensors_are_read_many_at_a_time(tmp_path: Path) -> None:
    arrays = {f"t{n:05d}": np.full(5, n, np.int16) for n in range(3000)}
    write_huggingface(tmp_path / "hf", [arrays])
    convert_to_dcp(HuggingFaceReader(tmp_path / "hf"), tmp_path / "dcp", durable=False)
    target = {name: np.zeros(5, np.int16) for name in arrays}
    api.load(target, checkpoint_id=tmp_path / "dcp")
    assert_equal(target, arrays)


def test_what_lies_at_a_path_is_found_out(tmp_path: Path) -> None:
    api.save({"a": np.ones(1)}, checkpoint_id=tmp_path / "dcp")
    write_huggingface(tmp_path / "hf", [{"a": np.ones(1)}])
    for name, first in (("torch-dcp", b"\x80\x04"), ("own", b"\x10\x00")):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(first)
    (tmp_path / "full.pt").write_bytes(b"")
    (tmp_path / "bins").mkdir()
    (tmp_path / "bins" / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "bare").mkdir()
    found = {name: checkpoint_format(tmp_path / name) for name in ("dcp", "hf", "torch-dcp", "own", "full.pt", "bins")}
    assert found == {
        "dcp": "dcp",
        "hf": "huggingface",
        "torch-dcp": "torch-dcp",
        "own": "dcp",
        "full.pt": "torch",
        "bins": "torch",
    }
    assert checkpoint_format(next((tmp_path / "hf").glob("*.safetensors"))) == "huggingface"
    for name in ("bare", "nothing"):
        with pytest.raises(ArgumentError, match=name):
            checkpoint_format(tmp_path / name)
