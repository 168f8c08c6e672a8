"""Checkpoints become Hugging Face directories: right bits, right names, bounded memory, whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors
from safetensors.numpy import load_file

from dcp_core import api
from dcp_core.box import Box
from dcp_core.convert.huggingface_files import INDEX_NAME, SINGLE_NAME, STALE_SECONDS
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.convert.to_huggingface import ConversionReport, HuggingFaceConversion
from dcp_core.dtype import DTYPES, Kind, dtype_named
from dcp_core.errors import (
    ArgumentError,
    CorruptError,
    DcpError,
    IncompleteError,
    MissingKeysError,
    ShapeMismatchError,
    UnsupportedValueError,
)
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.formats.cuts import Joined, Narrowed, Selected, Stacked
from dcp_core.formats.safetensors_parser import header_nbytes, parse_header
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray
from tests.core.interrupts import interrupted_at
from tests.core.peak_memory import need_peak_counter, peak_rise

Array = npt.NDArray[Any]
STORABLE = [dtype for dtype in DTYPES if not dtype.file_tail]


def cut_up(array: Array, edges: list[list[int]], name: str | None = None) -> ShardedArray:
    """An array as a grid of shards, all held by one rank."""
    spans = [list(itertools.pairwise([0, *inner, size])) for inner, size in zip(edges, array.shape, strict=True)]
    boxes = [
        Box(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        for cell in itertools.product(*spans)
    ]
    parts = [array[tuple(slice(a, a + b) for a, b in zip(box.offsets, box.sizes, strict=True))].copy() for box in boxes]
    return ShardedArray(array.shape, boxes, parts, dtype_name=name)


def save(state: Mapping[str, Any], path: Path) -> None:
    api.save(state, checkpoint_id=path, durable=False, adapter=NumpyRankAdapter())


def convert(source: Path, target: Path, overwrite: bool = False, **options: Any) -> ConversionReport:
    return HuggingFaceConversion(FileSystemReader(source), **options).run(target, durable=False, overwrite=overwrite)


def raw_of(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of everything in the safetensors files of a directory."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        blob = file.read_bytes()
        start = header_nbytes(blob[:8], len(blob), file.name)
        for array in parse_header(blob[:start], len(blob), file.name)[0]:
            at = start + array.byte_offset
            assert array.key not in found
            found[array.key] = (array.file_dtype, array.shape, blob[at : at + array.nbytes])
    return found


def values(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", STORABLE, ids=lambda dtype: dtype.name)
def test_every_type_keeps_its_bits(dtype: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    high = 2 if dtype.name == "bool" else 256
    bits = rng.integers(0, high, (5, 3, dtype.itemsize), dtype=np.uint8).view(dtype.bits).reshape(5, 3)
    whole = ShardedArray((5, 3), [Box.whole((5, 3))], [bits], dtype_name=dtype.name)
    save({"whole": whole, "cut": cut_up(bits, [[2], [1]], dtype.name)}, tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "hf")
    is_half = dtype.kind is Kind.OPAQUE  # two 4-bit floats are one element
    expected = ("F4" if is_half else dtype.file_dtype, (5, 6 if is_half else 3), bits.tobytes())
    assert raw_of(tmp_path / "hf") == {"whole": expected, "cut": expected}
    convert_to_dcp(HuggingFaceReader(tmp_path / "hf"), tmp_path / "again", durable=False)
    assert api.read(tmp_path / "again", "cut").tobytes() == bits.tobytes()


def test_scalars_and_empty_tensors_keep_value_and_shape(tmp_path: Path) -> None:
    state = {"five": np.array(5.0), "none": np.zeros((0, 3), np.float32), "one": np.ones((1, 1), np.int64)}
    save(state, tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / SINGLE_NAME)
    assert {name: (array.shape, array.tolist()) for name, array in found.items()} == {
        name: (array.shape, array.tolist()) for name, array in state.items()
    }


@pytest.mark.parametrize("limit", [1, 100, 4096, 10_000, "100KB", "5GB"])
def test_shards_of_every_size_hold_the_state_and_an_index_names_their_files(limit: int | str, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    state = {f"layers.{number}.w": values(rng, (number + 1, 37)) for number in range(12)}
    save(
        {name: cut_up(array, [[1] if len(array) > 2 else [], [5, 30]]) for name, array in state.items()}, tmp_path / "a"
    )
    report = convert(tmp_path / "a", tmp_path / "hf", max_shard_size=limit)
    assert sorted(report.files) == sorted(os.listdir(tmp_path / "hf"))
    found: dict[str, Array] = {}
    where: dict[str, str] = {}
    for name in report.files:
        if name != INDEX_NAME:
            inside = load_file(tmp_path / "hf" / name)
            where |= dict.fromkeys(inside, name)
            found |= inside
            with safetensors.safe_open(tmp_path / "hf" / name, "np") as opened:
                assert opened.metadata() == {"format": "pt"}
            if isinstance(limit, int):
                assert len(inside) == 1 or sum(array.nbytes for array in inside.values()) <= limit
    assert found.keys() == state.keys()
    assert all(np.array_equal(found[name], array) for name, array in state.items())
    if report.files == (SINGLE_NAME,):
        return
    index = json.loads((tmp_path / "hf" / INDEX_NAME).read_text())
    total = sum(array.nbytes for array in state.values())
    assert index == {"metadata": {"total_parameters": total // 4, "total_size": total}, "weight_map": where}
    count = len(report.files) - 1
    assert report.files[:-1] == tuple(f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1))


@pytest.mark.parametrize("limit", [0, -1, "0GB", "", "GB", "5 apples", "1e9GB", True, None, 2.5, "-5GB", "nan"])
def test_sizes_that_are_none_are_refused_before_anything_is_read(limit: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="max_shard_size") as caught:
        convert(tmp_path / "nothing", tmp_path / "hf", max_shard_size=limit)
    assert isinstance(caught.value, ValueError)
    assert not (tmp_path / "hf").exists()


def test_only_what_is_under_the_prefix_is_converted_and_the_rest_is_named(tmp_path: Path) -> None:
    weight = np.arange(6.0)
    save(
        {"model": {"w": weight}, "modeling": weight + 1, "optimizer": {"w": weight, "lr": 0.1}, "step": 3},
        tmp_path / "a",
    )
    report = convert(tmp_path / "a", tmp_path / "hf", prefix="model")
    assert load_file(tmp_path / "hf" / SINGLE_NAME).keys() == {"w"}
    assert {entry.name: entry.reason for entry in report.skipped} == {
        "modeling": "not under 'model.'",
        "optimizer.w": "not under 'model.'",
        "optimizer.lr": "not a tensor",
        "step": "not a tensor",
    }
    with pytest.raises(ArgumentError, match=r"'modle\.'.*'model'"):
        convert(tmp_path / "a", tmp_path / "other", prefix="modle")


def test_names_change_by_patterns_functions_and_prefixes(tmp_path: Path) -> None:
    save({"a.w": np.ones(1), "b.w": np.ones(1)}, tmp_path / "a")
    maps: list[tuple[Any, set[str]]] = [
        ("base.", {"base.a.w", "base.b.w"}),
        ({r"^a\.": "x."}, {"x.w", "b.w"}),
        (lambda name: None if name == "b.w" else name.upper(), {"A.W"}),
    ]
    for number, (key_map, names) in enumerate(maps):
        convert(tmp_path / "a", tmp_path / f"hf{number}", key_map=key_map)
        assert load_file(tmp_path / f"hf{number}" / SINGLE_NAME).keys() == names
    with pytest.raises(ArgumentError, match="'same'"):
        convert(tmp_path / "a", tmp_path / "no", key_map=lambda name: "same")


def test_tensors_are_joined_stacked_narrowed_and_selected_from_their_shards(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    parts = {name: values(rng, (6, 4)) for name in "abcdefgh"}
    save({"m": {name: cut_up(array, [[2], [3]]) for name, array in parts.items()}}, tmp_path / "a")
    cuts = {
        "joined": Joined(["a", Narrowed("b", 0, 1, 3)]),
        "columns": Joined(["c", "d"], dim=1),
        "stacked": Stacked(["e", "f"]),
        **{f"row{number}": cut for number, cut in enumerate(Selected.unstack("g", 6))},
    }
    report = convert(tmp_path / "a", tmp_path / "hf", prefix="m", cuts=cuts)
    found = load_file(tmp_path / "hf" / SINGLE_NAME)
    expected = {
        "h": parts["h"],
        "joined": np.concatenate([parts["a"], parts["b"][1:4]]),
        "columns": np.concatenate([parts["c"], parts["d"]], axis=1),
        "stacked": np.stack([parts["e"], parts["f"]]),
        **{f"row{number}": parts["g"][number] for number in range(6)},
    }
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], array) for name, array in expected.items())
    assert report.skipped == ()
    with pytest.raises(MissingKeysError, match="'nix'"):
        convert(tmp_path / "a", tmp_path / "no", prefix="m", cuts={"x": Selected("nix", 0)})
    with pytest.raises(ShapeMismatchError):
        convert(tmp_path / "a", tmp_path / "no", prefix="m", cuts={"x": Narrowed("a", 0, 5, 2)})
    assert not (tmp_path / "no").exists()


def test_floating_point_tensors_become_another_type_and_others_stay(tmp_path: Path) -> None:
    weight = np.array([[1, 2.5], [-3, 1e-9]], np.float32)
    state = {"i": np.arange(3), "flag": np.array([True])}
    save({**state, "w": cut_up(weight, [[1], []])}, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "hf", dtype="float16")
    found = load_file(tmp_path / "hf" / SINGLE_NAME)
    assert found["w"].dtype == np.float16
    assert np.array_equal(found["w"], weight.astype(np.float16))
    assert found["i"].dtype == np.int64
    assert found["flag"].dtype == np.bool_
    for wrong in ("int32", "floaty", "float4_e2m1fn_x2"):
        with pytest.raises(ArgumentError, match="bfloat16"):
            convert(tmp_path / "a", tmp_path / "no", dtype=wrong)


def test_a_tied_tensor_is_stored_once_under_the_name_of_the_input(tmp_path: Path) -> None:
    shared = np.arange(12.0).reshape(4, 3)
    state = {"lm_head.weight": shared, "model.embed_tokens.weight": shared, "same_values": shared.copy()}
    save(state, tmp_path / "a")
    report = convert(tmp_path / "a", tmp_path / "hf")
    assert load_file(tmp_path / "hf" / SINGLE_NAME).keys() == {"model.embed_tokens.weight", "same_values"}
    assert [(entry.name, "embed_tokens" in entry.reason) for entry in report.skipped] == [("lm_head.weight", True)]


@pytest.mark.parametrize("name", ["complex128", "complex32"])
def test_types_that_others_cannot_read_are_refused(name: str, tmp_path: Path) -> None:
    bits = np.zeros(4, dtype_named(name).bits)
    save({"z": ShardedArray((4,), [Box.whole((4,))], [bits], dtype_name=name)}, tmp_path / "a")
    with pytest.raises(UnsupportedValueError, match=rf"'z'.*{name}"):
        convert(tmp_path / "a", tmp_path / "hf")
    convert(tmp_path / "a", tmp_path / "hf", key_map=lambda key: None)


@pytest.mark.parametrize("name", ["__metadata__", "\udc80"])
def test_names_that_no_file_can_hold_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    save({"w": np.ones(3)}, tmp_path / "a")
    with pytest.raises(DcpError, match="name"):
        convert(tmp_path / "a", tmp_path / "hf", key_map=lambda key: name)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("name", ["", "with space/slash", 'quote"\\', "ünïcödé.層", "x" * 5000])
def test_names_of_all_kinds_are_kept(name: str, tmp_path: Path) -> None:
    save({"w": np.ones(3)}, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "hf", key_map=lambda key: name)
    assert load_file(tmp_path / "hf" / SINGLE_NAME).keys() == {name}


def test_what_is_damaged_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    save({"w": cut_up(values(rng, (700, 1000)), [[300], [500]])}, tmp_path / "a")
    (data,) = (tmp_path / "a").glob("*.safetensors")
    blob = bytearray(data.read_bytes())
    blob[len(blob) // 2] ^= 1
    data.write_bytes(blob)
    with pytest.raises(CorruptError, match="checksum"):
        convert(tmp_path / "a", tmp_path / "hf")
    assert os.listdir(tmp_path / "hf") == []
    data.write_bytes(blob[:-1])
    with pytest.raises(IncompleteError, match=data.name):
        convert(tmp_path / "a", tmp_path / "hf")
    assert os.listdir(tmp_path / "hf") == []


def looks_complete(path: Path) -> dict[str, bytes] | None:
    """The weights that a loader would find: None where it finds no model. Fails where they are not whole."""
    names = set(os.listdir(path)) if path.exists() else set()
    if SINGLE_NAME in names:
        files = [SINGLE_NAME]
    elif INDEX_NAME in names:
        index = json.loads((path / INDEX_NAME).read_text())["weight_map"]
        files = sorted(set(index.values()))
    else:
        return None
    return {name: array.tobytes() for file in files for name, array in load_file(path / file).items()}


def loaded(path: Path) -> dict[str, bytes] | None:
    """What our own reader finds, which needs no index where files tell that they are all there; None: an error."""
    target = {key: np.zeros((3, 5)) for key in STATES["new"]}
    try:
        api.load(target, storage_reader=HuggingFaceReader(path), adapter=NumpyRankAdapter())
    except DcpError:
        return None
    return {key: array.tobytes() for key, array in target.items()}


STATES = {name: {f"w{n}": np.full((3, 5), n + shift) for n in range(6)} for name, shift in (("old", 0.5), ("new", 9.5))}
SIZES: dict[str, int | str] = {"single": "1MB", "two": 3 * 120, "three": 2 * 120}


def whole(name: str) -> dict[str, bytes]:
    return {key: array.tobytes() for key, array in STATES[name].items()}


@pytest.mark.parametrize("before", ["nothing", *SIZES])
@pytest.mark.parametrize("after", list(SIZES))
def test_a_conversion_that_fails_anywhere_leaves_the_old_weights_or_nothing(
    before: str, after: str, tmp_path: Path
) -> None:
    for name, state in STATES.items():
        save(state, tmp_path / name)
    for number in itertools.count(1):
        target = tmp_path / f"hf{number}"
        if before != "nothing":
            convert(tmp_path / "old", target, max_shard_size=SIZES[before])
        operations = FaultyOperations(fail_at=number)
        conversion = HuggingFaceConversion(FileSystemReader(tmp_path / "new"), max_shard_size=SIZES[after])
        try:
            conversion.run(LocalStorage(target, operations), overwrite=True)
            failed = False
        except DcpError:
            failed = True
        found = looks_complete(target)
        assert found in ([None, whole("old")] if failed and before != "nothing" else [None, whole("new")]) or (
            failed and found == whole("new")
        )
        assert loaded(target) in (None, whole("new"), *([whole("old")] if before != "nothing" else []))
        if number > len(operations.log):
            assert not failed
            assert found == whole("new")
            assert not [name for name in os.listdir(target) if name.endswith(".tmp")]
            return
    raise AssertionError("unreachable")


_CONVERT_AND_DIE = """
import os, sys
from dcp_core.convert.to_huggingface import HuggingFaceConversion
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
source, targets = sys.argv[1], sys.argv[2:]
for number, target in enumerate(targets, 1):
    child = os.fork()
    if not child:
        operations = FaultyOperations(kill_at=number, kill_moment="after")
        conversion = HuggingFaceConversion(FileSystemReader(source), max_shard_size=360)
        conversion.run(LocalStorage(target, operations), overwrite=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.faults
@pytest.mark.parametrize("before", ["nothing", *SIZES])
def test_a_conversion_that_is_killed_leaves_nothing_that_looks_complete(before: str, tmp_path: Path) -> None:
    for name, state in STATES.items():
        save(state, tmp_path / name)
    targets = [tmp_path / f"hf{number}" for number in range(1, 41)]
    for target in targets if before != "nothing" else []:
        convert(tmp_path / "old", target, max_shard_size=SIZES[before])
    command = [sys.executable, "-c", _CONVERT_AND_DIE, str(tmp_path / "new"), *map(str, targets)]
    said = subprocess.run(command, timeout=60, check=True, stdout=subprocess.PIPE, text=True).stdout
    codes = list(map(int, said.split()))
    kept = [whole("old")] if before != "nothing" else []
    has_gap = before in ("nothing", "two")  # where files of the same names are replaced, there is no model for a moment
    for target in targets:
        assert looks_complete(target) in (*kept, whole("new"), *([None] if has_gap else []))
        assert loaded(target) in (None, *kept, whole("new"))
    complete = [loaded(target) == looks_complete(target) == whole("new") for target in targets]
    assert set(codes) == {0, -signal.SIGKILL}
    assert all(is_complete for code, is_complete in zip(codes, complete, strict=True) if code == 0)
    assert not complete[0]


@pytest.mark.parametrize("before", ["nothing", *SIZES])
def test_who_interrupts_a_conversion_keeps_the_old_weights_or_has_nothing(before: str, tmp_path: Path) -> None:
    for name, state in STATES.items():
        save(state, tmp_path / name)
    for number in itertools.count(1):
        target = tmp_path / f"hf{number}"
        if before != "nothing":
            convert(tmp_path / "old", target, max_shard_size=SIZES[before])
        operations = interrupted_at(number)
        conversion = HuggingFaceConversion(FileSystemReader(tmp_path / "new"), max_shard_size=SIZES["two"])
        try:
            conversion.run(LocalStorage(target, operations), overwrite=True)
            time.sleep(0)  # a signal that came last is heard here
        except KeyboardInterrupt:
            pass
        allowed = (None, whole("new"), *([whole("old")] if before != "nothing" else []))
        assert looks_complete(target) in allowed
        assert loaded(target) in allowed
        left = list(target.glob(".*.tmp"))
        assert not left or looks_complete(target) is None
        assert not left or before == "two", "only where files of the same names were replaced"
        if number > len(operations.log):
            assert looks_complete(target) == whole("new")
            return
    raise AssertionError("unreachable")


def test_old_weights_come_back_when_the_new_ones_cannot_get_their_names(tmp_path: Path) -> None:
    for name, state in STATES.items():
        save(state, tmp_path / name)
    convert(tmp_path / "old", tmp_path / "hf", max_shard_size=SIZES["two"])
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    for number in range(1, 7):
        operations = FaultyOperations(fail_at=number, operations=["rename"])
        conversion = HuggingFaceConversion(FileSystemReader(tmp_path / "new"), max_shard_size=SIZES["two"])
        with pytest.raises(DcpError):
            conversion.run(LocalStorage(tmp_path / "hf", operations), overwrite=True)
        assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before, number


def test_weights_are_not_put_beside_the_checkpoint_that_they_are_made_of(tmp_path: Path) -> None:
    save(STATES["new"], tmp_path / "a")
    before = sorted(os.listdir(tmp_path / "a"))
    with pytest.raises(ArgumentError, match=r"sharded checkpoint.*another directory"):
        convert(tmp_path / "a", tmp_path / "a", overwrite=True)
    assert sorted(os.listdir(tmp_path / "a")) == before


def test_left_overs_of_a_killed_conversion_go_once_they_are_old(tmp_path: Path) -> None:
    save({"w": np.ones(3)}, tmp_path / "a")
    target = tmp_path / "hf"
    target.mkdir()
    fresh, stale, other = (
        target / name for name in (f".model.safetensors.{'a' * 16}.tmp", f".model.safetensors.{'b' * 16}.tmp", "x.tmp")
    )
    for path in (fresh, stale, other):
        path.write_bytes(b"")
    past = stale.stat().st_mtime - STALE_SECONDS - 60
    os.utime(stale, (past, past))
    convert(tmp_path / "a", target)
    assert sorted(os.listdir(target)) == sorted([fresh.name, other.name, SINGLE_NAME])


def test_weights_that_are_there_are_only_replaced_when_that_is_asked_for(tmp_path: Path) -> None:
    save({"w": np.ones(3)}, tmp_path / "a")
    save({"w": np.zeros(3)}, tmp_path / "b")
    convert(tmp_path / "a", tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(ArgumentError, match=r"model\.safetensors.*overwrite"):
        convert(tmp_path / "b", tmp_path / "hf")
    convert(tmp_path / "b", tmp_path / "hf", overwrite=True)
    assert load_file(tmp_path / "hf" / SINGLE_NAME)["w"].tolist() == [0, 0, 0]
    assert (tmp_path / "hf" / "config.json").exists()


def test_a_directory_converts_into_itself(tmp_path: Path) -> None:
    save({"w": np.arange(5), "v": np.arange(3)}, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "hf", max_shard_size=1)
    reader = HuggingFaceReader(tmp_path / "hf", key_map="x.")
    report = HuggingFaceConversion(reader).run(tmp_path / "hf", overwrite=True, durable=False)
    assert report.files == (SINGLE_NAME,)
    assert os.listdir(tmp_path / "hf") == [SINGLE_NAME]
    assert load_file(tmp_path / "hf" / SINGLE_NAME)["x.w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("edges", [[[], []], [[100, 3000], []], [[], [700, 1000]], [[5], [300]]], ids=str)
def test_memory_stays_small_whatever_the_shards(edges: list[list[int]], tmp_path: Path) -> None:
    need_peak_counter()
    big = np.arange(4096 * 4096, dtype=np.float32).reshape(4096, 4096)  # 64 MiB
    save({f"w{number}": cut_up(big, edges) for number in range(3)}, tmp_path / "a")
    expected = big.tobytes()
    del big
    rise = peak_rise(lambda: convert(tmp_path / "a", tmp_path / "hf"))
    assert rise < 64
    for array in raw_of(tmp_path / "hf").values():
        assert array[2] == expected
