"""Tensors that a state cuts otherwise than the files do, against numpy's own concatenate, stack and slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core import api
from dcp_core.box import Box, slices
from dcp_core.dtype import BY_NAME
from dcp_core.errors import (
    ArgumentError,
    DcpError,
    DTypeMismatchError,
    MissingKeysError,
    PlanningError,
    ShapeMismatchError,
)
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.formats.cuts import Cut, Joined, Narrowed, Selected, Stacked, lay_out
from dcp_core.formats.key_map import KeyMap, key_map_text, map_keys
from dcp_core.formats.stored_layout import Layout, Piece
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray
from tests.core.huggingface_files import (
    MODEL,
    Array,
    assert_equal,
    load,
    numbered,
    write_file,
    write_saved_shard,
    zeros_like,
)
from tests.core.io_probes import path_of

SEEDS = st.integers(0, 2**32)


# -- any expression ------------------------------------------------------------------------------------------------


class Expressions:
    """Makes cuts at random together with what numpy makes of them."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.stored: dict[str, Array] = {}

    def stored_of(self, shape: tuple[int, ...]) -> tuple[Cut, Array]:
        known = [name for name, array in self.stored.items() if array.shape == shape]
        if known and self.rng.random() < 0.3:
            name = self.rng.choice(known)
        else:
            name = f"s{len(self.stored)}"
            self.stored[name] = numbered(*shape, dtype="int32", start=1000 * len(self.stored))
        return name, self.stored[name]

    def of(self, shape: tuple[int, ...], depth: int) -> tuple[Cut, Array]:
        """A cut that gives a tensor of this shape."""
        makers: list[Callable[[tuple[int, ...], int], tuple[Cut, Array]]] = []
        if depth and shape:
            makers = [self.narrowed, self.joined, self.selected]
            if shape[0]:
                makers.append(self.stacked)
        if not makers or self.rng.random() < 0.2:
            return self.stored_of(shape)
        return self.rng.choice(makers)(shape, depth - 1)

    def narrowed(self, shape: tuple[int, ...], depth: int) -> tuple[Cut, Array]:
        dim = self.rng.randrange(len(shape))
        start, more = self.rng.randrange(3), self.rng.randrange(3)
        cut, array = self.of((*shape[:dim], start + shape[dim] + more, *shape[dim + 1 :]), depth)
        part = np.take(array, range(start, start + shape[dim]), axis=dim)
        return Narrowed(cut, dim - len(shape) * self.rng.randrange(2), start, shape[dim]), part

    def joined(self, shape: tuple[int, ...], depth: int) -> tuple[Cut, Array]:
        dim = self.rng.randrange(len(shape))
        bounds = sorted(self.rng.randrange(shape[dim] + 1) for _ in range(self.rng.randrange(3)))
        sizes = np.diff([0, *bounds, shape[dim]]).tolist()
        parts = [self.of((*shape[:dim], size, *shape[dim + 1 :]), depth) for size in sizes]
        return Joined([cut for cut, _ in parts], dim), np.concatenate([array for _, array in parts], dim)

    def stacked(self, shape: tuple[int, ...], depth: int) -> tuple[Cut, Array]:
        dim = self.rng.choice([dim for dim in range(len(shape)) if shape[dim]])
        parts = [self.of((*shape[:dim], *shape[dim + 1 :]), depth) for _ in range(shape[dim])]
        return Stacked([cut for cut, _ in parts], dim), np.stack([array for _, array in parts], dim)

    def selected(self, shape: tuple[int, ...], depth: int) -> tuple[Cut, Array]:
        dim, count = self.rng.randrange(len(shape)), self.rng.randint(1, 3)
        index = self.rng.randrange(count)
        cut, array = self.of((*shape[:dim], count, *shape[dim:]), depth)
        return Selected(cut, index, dim), np.take(array, index, axis=dim)


def random_shape(rng: Random) -> tuple[int, ...]:
    return tuple(rng.choice([0, 1, 2, 3, 5, 8]) if rng.random() < 0.9 else 0 for _ in range(rng.randint(1, 3)))


@settings(max_examples=150)
@given(SEEDS)
def test_any_cut_gives_what_numpy_gives(seed: int) -> None:
    made = Expressions(seed)
    cut, expected = made.of(random_shape(made.rng), 4)
    buffer, layouts = bytearray(), {}
    for name, array in made.stored.items():
        piece = Piece((0,) * array.ndim, array.shape, 0, len(buffer), (0,) * array.ndim, array.shape)
        layouts[name] = Layout(BY_NAME["int32"], array.shape, (piece,) if array.size else ())
        buffer += array.tobytes()
    layout = lay_out(cut, "w", layouts.__getitem__)
    assert layout.shape == expected.shape
    found, times = np.zeros_like(expected), np.zeros(expected.shape, int)
    for piece in (piece.settled(4) for piece in layout.pieces):
        whole = np.frombuffer(buffer, np.int32, int(np.prod(piece.array_sizes)), piece.byte_offset)
        inside = slices(Box(piece.array_offsets, piece.sizes))
        found[slices(Box(piece.offsets, piece.sizes))] = whole.reshape(piece.array_sizes)[inside]
        times[slices(Box(piece.offsets, piece.sizes))] += 1
    np.testing.assert_array_equal(found, expected)
    assert (times == 1).all()


@settings(max_examples=60)
@given(SEEDS)
def test_a_load_fills_any_part_of_any_cut(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    made = Expressions(seed)
    cuts, expected = {}, {}
    for number in range(made.rng.randint(1, 3)):
        cuts[f"w{number}"], expected[f"w{number}"] = made.of(random_shape(made.rng), 3)
    directory = tmp_path_factory.mktemp("cuts")
    write_file(directory / MODEL, made.stored)
    state: dict[str, Any] = {}
    for name, array in expected.items():
        low = [made.rng.randint(0, size) for size in array.shape]
        sizes = [made.rng.randint(0, size - at) for at, size in zip(low, array.shape, strict=True)]
        box = Box(tuple(low), tuple(sizes))
        state[name] = ShardedArray(array.shape, [box], [np.zeros(box.sizes, np.int32)])
    load(state, directory, cuts=cuts)
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name].arrays[0], array[slices(state[name].boxes[0])])


# -- cuts that models have -------------------------------------------------------------------------------------------


def test_projections_are_fused_and_a_fused_one_is_cut(tmp_path: Path) -> None:
    stored = {
        f"{name}_proj.weight": numbered(rows, 6, start=100 * rows) for name, rows in zip("qkv", (8, 4, 2), strict=True)
    }
    stored["fused"] = numbered(14, 6, start=5000)
    write_file(tmp_path / MODEL, stored)
    cuts: dict[str, Cut] = {"qkv": Joined([f"{name}_proj.weight" for name in "qkv"])}
    cuts |= dict(zip("qkv", Narrowed.split("fused", [8, 4, 2]), strict=True))
    expected = {"qkv": np.concatenate([stored[f"{name}_proj.weight"] for name in "qkv"])}
    expected |= dict(zip("qkv", np.split(stored["fused"], [8, 12]), strict=True))
    target = zeros_like(expected)
    load(target, tmp_path, cuts=cuts)
    assert_equal(target, expected)


def test_heads_that_are_fused_group_by_group(tmp_path: Path) -> None:
    groups, heads, width = 3, 2, 4
    q, k, v = (numbered(groups * count * width, 5, start=1000 * count) for count in (heads, 1, 1))
    write_file(tmp_path / MODEL, {"q": q, "k": k, "v": v + 7})
    parts: list[Cut] = []
    for group in range(groups):
        parts.append(Narrowed("q", 0, group * heads * width, heads * width))
        parts += [Narrowed(name, 0, group * width, width) for name in "kv"]
    rows = [(q, heads * width), (k, width), (v + 7, width)]
    expected = np.concatenate([array[g * n : (g + 1) * n] for g in range(groups) for array, n in rows])
    target = {"qkv": np.zeros_like(expected)}
    load(target, tmp_path, cuts={"qkv": Joined(parts)})
    np.testing.assert_array_equal(target["qkv"], expected)


def test_one_tensor_per_expert_against_a_stack_both_ways(tmp_path: Path) -> None:
    gate, up = ([numbered(3, 4, start=100 * e + 50 * s) for e in range(5)] for s in (0, 1))
    stored = {f"experts.{e}.{name}": array for name, own in (("gate", gate), ("up", up)) for e, array in enumerate(own)}
    stored["stack"] = np.stack(up)
    write_file(tmp_path / MODEL, stored)
    cuts: dict[str, Cut] = {
        "gate_up": Stacked([Joined([f"experts.{e}.gate", f"experts.{e}.up"]) for e in range(5)]),
        **{f"single.{e}": part for e, part in enumerate(Selected.unstack("stack", 5))},
    }
    expected = {"gate_up": np.stack([np.concatenate(pair) for pair in zip(gate, up, strict=True)])}
    expected |= {f"single.{e}": array for e, array in enumerate(up)}
    target = zeros_like(expected)
    load(target, tmp_path, cuts=cuts)
    assert_equal(target, expected)


def test_a_cut_of_shards_that_torch_dcp_wrote(tmp_path: Path) -> None:
    whole = numbered(6, 8)
    for row in range(3):
        write_saved_shard(tmp_path / f"{row}.safetensors", {"w": ((2 * row, 0), whole[2 * row : 2 * row + 2])})
    target = {"left": np.zeros((3, 4), np.float32)}
    load(target, tmp_path, cuts={"left": Narrowed(Narrowed("w", 0, 1, 3), 1, 2, 4)})
    np.testing.assert_array_equal(target["left"], whole[1:4, 2:6])


def test_a_transposed_target_takes_a_tensor_as_it_is_stored(tmp_path: Path) -> None:
    write_file(tmp_path / MODEL, {"w": numbered(300, 70)})
    weight = np.zeros((70, 300), np.float32)
    load({"w": weight.T}, tmp_path)
    np.testing.assert_array_equal(weight, numbered(300, 70).T)


def test_what_a_cut_names_stays_loadable_and_its_own_name_takes_the_place_of_another(tmp_path: Path) -> None:
    write_file(tmp_path / MODEL, {"a": numbered(2), "b": numbered(2, start=5)})
    target = {"a": np.zeros(4, np.float32), "b": np.zeros(2, np.float32), "tied": np.zeros(2, np.float32)}
    load(target, tmp_path, cuts={"a": Joined(["a", "b"]), "tied": "b"})
    assert_equal(target, {"a": np.array([0, 1, 5, 6], np.float32), "b": numbered(2, start=5)})
    np.testing.assert_array_equal(target["tied"], target["b"])


class _Counted(FileOperations):
    """Counts what is read of data."""

    def __init__(self, data_start: int) -> None:
        self.nbytes = 0
        self._data_start = data_start

    def preadv(self, descriptor: int, buffers: Any, offset: int) -> int:
        count = super().preadv(descriptor, buffers, offset)
        if path_of(descriptor).endswith(MODEL):
            self.nbytes += max(0, offset + count - max(offset, self._data_start))
        return count


def test_only_the_part_of_a_source_that_a_target_wants_is_read(tmp_path: Path) -> None:
    stored = {f"e{e}": numbered(256, 512, dtype="float32") for e in range(4)}
    write_file(tmp_path / MODEL, stored)
    start = 8 + int.from_bytes((tmp_path / MODEL).read_bytes()[:8], "little")
    operations = _Counted(start)
    reader = HuggingFaceReader(
        storage=LocalStorage(tmp_path, operations), cuts={"w": Stacked([f"e{e}" for e in range(4)])}
    )
    box = Box((1, 64, 0), (2, 32, 512))
    target = ShardedArray((4, 256, 512), [box], [np.zeros(box.sizes, np.float32)])
    api.load({"w": target}, storage_reader=reader, adapter=NumpyRankAdapter())
    np.testing.assert_array_equal(target.arrays[0], np.stack([stored["e1"][64:96], stored["e2"][64:96]]))
    assert operations.nbytes == box.numel * 4


# -- what does not fit -----------------------------------------------------------------------------------------------


BAD: list[tuple[Cut, type[DcpError], str]] = [
    (Joined(["a", "nothing"]), MissingKeysError, "'w' is to be made of 'nothing'"),
    ("nothing", MissingKeysError, "nothing"),
    (Joined(["a", "b"]), ShapeMismatchError, r"'w' is joined.*'a' of shape \(2, 3\).*'b' of shape \(4, 5\)"),
    (Joined(["a", "flat"]), ShapeMismatchError, "differ elsewhere"),
    (Joined(["a", "a"], dim=2), ShapeMismatchError, "dimension 2 of 2"),
    (Joined(["a", "double"]), DTypeMismatchError, "float32.*float64"),
    (Stacked(["a", "b"]), ShapeMismatchError, "stacked"),
    (Stacked(["a", "a"], dim=-4), ShapeMismatchError, "dimension -4 of 3"),
    (Narrowed("a", 0, 1, 2), ShapeMismatchError, "elements 1 to 3 of dimension 0"),
    (Narrowed("a", 0, -1, 1), ShapeMismatchError, "elements -1"),
    (Narrowed("a", 0, 1, -1), ShapeMismatchError, "are not all there"),
    (Selected("a", 2), ShapeMismatchError, "no index 2"),
    (Selected("a", -1), ShapeMismatchError, "no index -1"),
    (Selected("a", 0, dim=1), PlanningError, "select from it in memory"),
    (Selected("scalar", 0), ShapeMismatchError, "dimension 0 of 0"),
]


@pytest.mark.parametrize("row", range(len(BAD)))
def test_a_cut_that_does_not_fit_is_refused_by_name_before_anything_is_read(tmp_path: Path, row: int) -> None:
    cut, error, words = BAD[row]
    arrays = {"a": numbered(2, 3), "b": numbered(4, 5), "flat": numbered(2), "double": numbered(2, 3, dtype="float64")}
    write_file(tmp_path / MODEL, {**arrays, "scalar": np.array(1.0, np.float32)})
    target = {"a": np.full((2, 3), -1, np.float32)}
    with pytest.raises(error, match=words):
        load(target, tmp_path, cuts={"w": cut})
    assert (target["a"] == -1).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Joined("abc"),
        lambda: Joined([]),
        lambda: Stacked([3]),  # type: ignore[list-item]
        lambda: Joined(["a"], dim=0.0),  # type: ignore[arg-type]
        lambda: Narrowed("a", 0, 0, True),
        lambda: Selected(None, 0),  # type: ignore[arg-type]
        lambda: HuggingFaceReader(cuts={"w": ["a", "b"]}),  # type: ignore[dict-item]
        lambda: HuggingFaceReader(cuts=[("w", "a")]),  # type: ignore[arg-type]
        lambda: HuggingFaceReader(key_map=3),  # type: ignore[arg-type]
        lambda: HuggingFaceReader(key_map={"(": ""}),
        lambda: HuggingFaceReader(key_map={"a": 3}),  # type: ignore[dict-item]
    ],
)
def test_what_is_no_cut_and_no_key_map_is_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError):
        make()


# -- names -----------------------------------------------------------------------------------------------------------


def _function(name: str) -> str | None:
    return None if name.startswith("drop") else name.upper()


@pytest.mark.parametrize(
    ("key_map", "expected"),
    [
        (None, {"model.a": "model.a", "drop.b": "drop.b"}),
        ("top.", {"top.model.a": "model.a", "top.drop.b": "drop.b"}),
        ({r"^model\.": "", r"^(\w+)\.(\w)$": r"\2.\1"}, {"a": "model.a", "b.drop": "drop.b"}),
        ({r"^drop": None}, {"model.a": "model.a"}),
        (_function, {"MODEL.A": "model.a"}),
    ],
)
def test_names_are_mapped(key_map: KeyMap | None, expected: dict[str, str]) -> None:
    assert map_keys(key_map, ["model.a", "drop.b"]) == expected


@pytest.mark.parametrize(
    ("key_map", "words"),
    [
        ({r"\d": ""}, "for 'w1' and for 'w2'"),
        (lambda name: 3, "gives 3 for 'w1'"),
        (lambda name: name[5], "IndexError"),
    ],
)
def test_key_maps_that_fail_say_where(tmp_path: Path, key_map: Any, words: str) -> None:
    write_file(tmp_path / MODEL, {"w1": numbered(2), "w2": numbered(2)})
    with pytest.raises(ArgumentError, match=words):
        load({"w1": np.zeros(2, np.float32)}, tmp_path, key_map=key_map)


def test_a_mapped_name_is_loaded_and_cuts_name_what_the_files_have(tmp_path: Path) -> None:
    write_file(tmp_path / MODEL, {"model.a": numbered(2), "model.b": numbered(2, start=5)})
    target = {"net": {"a": np.zeros(2, np.float32), "both": np.zeros(4, np.float32)}}
    load(target, tmp_path, key_map={r"^model\.": "net."}, cuts={"net.both": Joined(["model.b", "model.a"])})
    assert_equal(target["net"], {"a": numbered(2), "both": np.array([5, 6, 0, 1], np.float32)})


def test_key_maps_are_told_apart_between_ranks() -> None:
    texts = [key_map_text(key_map) for key_map in (None, "", "a.", {"a": "b"}, {"b": "a"}, _function)]
    assert len(set(texts)) == len(texts)
    assert key_map_text(_function) == key_map_text(_function)
