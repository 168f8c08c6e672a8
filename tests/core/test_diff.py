"""In what two checkpoints differ: the same answer as numpy gives on whole arrays, whatever the layouts."""

from __future__ import annotations

import cmath
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_core import api
from dcp_core.arrays import convert
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, Kind
from dcp_core.errors import ArgumentError, NotFoundError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.inspection import value_differences
from dcp_core.inspection.comparison import Comparison, Difference, compare
from dcp_core.inspection.scope import Scope, Tolerance
from dcp_core.inspection.value_differences import split
from dcp_core.state_path import PerRank
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core import hostile
from tests.core.huggingface_files import write_shards
from tests.core.peak_memory import need_peak_counter, peak_rise

Array = npt.NDArray[Any]
WORLD = 3


class Odd:
    """Pickled, and never made again."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch it-ran-{self.value}",)


def save(path: Path, state: dict[str, Any]) -> FileSystemReader:
    api.save(state, checkpoint_id=path, adapter=NumpyRankAdapter(), durable=False)
    return FileSystemReader(path)


def differences(one: dict[str, Any], other: dict[str, Any], root: Path) -> dict[str, Difference]:
    found = compare(save(root / "a", one), save(root / "b", other))
    return {each.key: each for each in found.differences}


# --- keys and types ----------------------------------------------------------------------------------


def test_equal_checkpoints_do_not_differ(tmp_path: Path) -> None:
    state = {"x": np.arange(7.0), "empty": np.zeros((0, 3)), "scalar": np.array(2.5), "step": 3, "rng": PerRank([1])}
    found = compare(save(tmp_path / "a", state), save(tmp_path / "b", state))
    assert found == Comparison(3, 2, 7 * 8 + 8, True, ())
    assert (found.is_equal, found.is_sure) == (True, True)


def test_keys_kinds_shapes_and_values_that_differ_are_told_apart(tmp_path: Path) -> None:
    same = {"same": np.ones(3), "value": 1}
    one = same | {"left": np.ones(2), "kind": np.ones(3), "shape": np.ones((4, 8)), "plain": {"lr": 0.1}, "tuple": (1,)}
    other = same | {"right": 5, "kind": 3, "shape": np.ones((8, 4)), "plain": {"lr": 0.2}, "tuple": [1]}
    found = {key: (each.kind, each.a, each.b) for key, each in differences(one, other, tmp_path).items()}
    assert found.pop("tuple", found.pop("tuple.0", None)) is not None
    assert found == {
        "left": ("only in a", "float64 [2]", ""),
        "right": ("only in b", "", "a value"),
        "kind": ("kind", "float64 [3]", "a value"),
        "shape": ("shape", "float64 [4, 8]", "float64 [8, 4]"),
        "plain.lr": ("object", "0.1", "0.2"),
    }


def test_a_position_in_a_list_is_not_a_key_of_the_same_name(tmp_path: Path) -> None:
    found = differences({"x": [np.ones(2)]}, {"x": {0: np.ones(2)}}, tmp_path)
    assert found["x.0"].kind == "path"


def test_a_type_that_differs_is_told_with_the_values_that_do(tmp_path: Path) -> None:
    values = np.array([1.0, 2.0, 1 / 3, np.nan])
    (found,) = differences({"x": values}, {"x": values.astype(np.float32)}, tmp_path).values()
    assert (found.kind, found.a, found.b) == ("type", "float64 [4]", "float32 [4]")
    assert (found.elements, found.of, found.first, found.nans) == (1, 4, (2,), 0)
    assert found.max_abs == abs(float(np.float32(1 / 3)) - 1 / 3)


# --- values ------------------------------------------------------------------------------------------


def test_every_type_is_compared_by_its_bits(tmp_path: Path) -> None:
    for dtype in BY_NAME.values():
        root = tmp_path / dtype.name
        one = np.arange(32, dtype=np.uint8)
        if dtype.kind is Kind.BOOL:
            one &= 1
        other = one.copy()
        other[dtype.itemsize * 1] ^= 1
        states = [
            {"x": ShardedArray((len(raw) // dtype.itemsize,), [Box((0,), (len(raw) // dtype.itemsize,))],
                               [raw.view(dtype.bits)], dtype.name)}
            for raw in (one, other)
        ]  # fmt: skip
        found = differences(states[0], states[1], root)
        assert (found["x"].kind, found["x"].elements, found["x"].first) == ("values", 1, (1,)), dtype.name
        assert (found["x"].max_abs is None) == (dtype.kind is Kind.OPAQUE or found["x"].nans > 0), dtype.name


def test_zeros_of_both_signs_differ_by_nothing_and_nans_are_counted(tmp_path: Path) -> None:
    one = {"x": np.array([0.0, 1.0, np.nan, np.inf, np.inf]), "same": np.array([np.nan, np.inf])}
    other = {"x": np.array([-0.0, np.nan, np.nan, -np.inf, np.inf]), "same": np.array([np.nan, np.inf])}
    found = compare(save(tmp_path / "a", one), save(tmp_path / "b", other))
    (x,) = found.differences
    assert (x.elements, x.nans, x.max_abs, x.first) == (3, 1, np.inf, (0,))
    assert json.loads(json.dumps(found.to_values(), allow_nan=False))["differences"][0]["max_abs"] == "inf"


def save_cut(context: RankContext, directory: Path, dim: int, spoiled: bool) -> None:
    whole = whole_array()
    if spoiled:
        whole[2, 30, 5] += 0.25
        whole[7, 1, 11] -= 4.0
    state = {
        "w": ShardedArray.cut(whole, even_boxes(whole.shape, WORLD, context.rank, dim), "float64"),
        "b": np.arange(5),
        "seed": PerRank(context.rank * (1 + spoiled)),
    }
    api.save(state, checkpoint_id=directory, adapter=NumpyRankAdapter(), durable=False)


def whole_array() -> Array:
    return np.random.default_rng(0).standard_normal((9, 32, 12))


def test_layouts_make_no_difference_and_values_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for dim in range(3):
        run_ranks(save_cut, WORLD, tmp_path / f"{dim}", dim, False)
    run_ranks(save_cut, WORLD, tmp_path / "spoiled", 1, True)
    for piece_bytes in (4 << 20, 4096, 712):
        monkeypatch.setattr(value_differences, "PIECE_BYTES", piece_bytes)
        monkeypatch.setattr(value_differences, "_SMALL_BOX_BYTES", 0)
        for dim in range(3):
            assert compare(FileSystemReader(tmp_path / "0"), FileSystemReader(tmp_path / f"{dim}")).is_equal
            found = compare(FileSystemReader(tmp_path / f"{dim}"), FileSystemReader(tmp_path / "spoiled"))
            w, *seeds = sorted(found.differences, key=lambda each: each.kind != "values")
            assert (w.key, w.elements, w.of, w.first) == ("w", 2, 9 * 32 * 12, (2, 30, 5))
            assert w.max_abs == pytest.approx(4.0)
            assert [(each.key, each.rank, each.kind) for each in seeds] == [
                ("seed", 1, "object"),
                ("seed", 2, "object"),
            ]


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_counts_places_and_largest_differences_are_those_of_numpy(data: st.DataObject, tmp_path: Path) -> None:
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dtype = BY_NAME[data.draw(st.sampled_from(["float32", "float64", "int32", "bfloat16", "complex64"]))]
    size = int(np.prod(shape))
    raw = np.frombuffer(data.draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize)), np.uint8)
    other = raw.copy()
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=3)):
        other[at] ^= data.draw(st.integers(1, 255))
    arrays = [each.view(dtype.bits).reshape(shape) for each in (raw, other)]
    cuts = [even_boxes(shape, 1, 0), [Box.whole(shape)]]
    states = [{"x": ShardedArray.cut(array, boxes, dtype.name)} for array, boxes in zip(arrays, cuts, strict=True)]
    found = differences(states[0], states[1], root)
    differs = (raw.reshape(size, -1) != other.reshape(size, -1)).any(axis=1).reshape(shape)
    assert bool(found) == bool(differs.any())
    if found:
        each = found["x"]
        assert (each.elements, each.of) == (int(differs.sum()), size)
        assert each.first == tuple(int(at) for at in np.argwhere(differs)[0])
        target = BY_NAME["complex128" if dtype.kind is Kind.COMPLEX else "float64"]
        one, two = (convert(array[differs], dtype, target) for array in arrays)
        nan = np.isnan(one), np.isnan(two)
        both = ~(nan[0] | nan[1])
        assert each.nans == int((nan[0] ^ nan[1]).sum())
        with np.errstate(all="ignore"):
            apart = np.abs(one[both] - two[both])
        assert each.max_abs == (float(np.nan_to_num(apart, nan=0.0, posinf=np.inf).max()) if both.any() else None)


@given(sizes=st.lists(st.integers(1, 9), max_size=4), most=st.integers(1, 50))
def test_parts_of_a_box_are_small_enough_and_cover_it_once(sizes: list[int], most: int) -> None:
    box = Box((3,) * len(sizes), tuple(sizes))
    held = np.zeros([3 + size for size in sizes], np.int64)
    for part in split(box, most):
        assert part.numel <= most
        held[tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes, strict=True))] += 1
    assert held.sum() == box.numel and held.max() == 1


# --- names, ranks, tolerance -------------------------------------------------------------------------


def save_own(context: RankContext, directory: Path, tag: int, alone: bool = False) -> None:
    rows = [2 * context.rank, 2 * context.rank + 2]
    part = np.arange(12.0).reshape(6, 2)[slice(*rows)] + tag
    state = {
        "w": ShardedArray((6, 2), [Box((rows[0], 0), (2, 2))], [part], "float64"),
        "seed": PerRank(context.rank * 10 + tag * (context.rank == 1)),
        "step": tag,
        "generator": np.full(3, context.rank),
    }
    api.save(state, checkpoint_id=directory, adapter=NumpyRankAdapter(), use_collectives=not alone, durable=False)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranked")
    for tag in (0, 1):
        run_ranks(save_own, WORLD, root / f"all_{tag}", tag)
        run_ranks(save_own, WORLD, root / f"alone_{tag}", tag, True)
    run_ranks(save_cut, WORLD, root / "cut", 0, False)
    return root


def compared(root: Path, a: str, b: str, scope: Scope | None = None) -> list[tuple[str, int | None, str]]:
    found = compare(FileSystemReader(root / a), FileSystemReader(root / b), scope)
    return [(each.key, each.rank, each.kind) for each in found.differences]


def test_values_of_ranks_are_compared_each_with_each_or_those_of_one_rank(ranked: Path) -> None:
    everywhere = [("step", None, "object"), ("w", None, "values")]
    assert compared(ranked, "all_0", "all_1") == [("seed", 1, "object"), *everywhere]
    assert compared(ranked, "all_0", "all_1", Scope(rank=1)) == [("seed", None, "object"), *everywhere]
    assert compared(ranked, "all_0", "all_1", Scope(rank=2)) == everywhere
    with pytest.raises(ArgumentError, match="no rank 3 .* saved by 3 ranks"):
        compared(ranked, "all_0", "all_1", Scope(rank=3))


def test_a_value_of_every_rank_is_told_from_one_for_all_ranks(tmp_path: Path, ranked: Path) -> None:
    save(tmp_path / "shared", {"generator": np.zeros(3, np.int64), "seed": 0})
    found = compare(FileSystemReader(ranked / "all_0"), FileSystemReader(tmp_path / "shared"), Scope(only_common=True))
    assert [(each.key, each.kind, each.a, each.b) for each in found.differences] == [
        ("generator", "ranks", "one for each rank", "one for all ranks"),
        ("seed", "ranks", "one for each rank", "one for all ranks"),
    ]
    mine = compare(
        FileSystemReader(ranked / "all_0"), FileSystemReader(tmp_path / "shared"), Scope(only_common=True, rank=0)
    )
    assert (mine.is_equal, mine.tensors, mine.objects, mine.left_out) == (True, 1, 1, 2)


def test_what_ranks_saved_alone_is_compared_as_far_as_it_goes(ranked: Path) -> None:
    with pytest.raises(NotFoundError, match="these ranks saved alone there: 0, 1, 2. Pass --rank"):
        compared(ranked, "alone_0", "alone_0")
    for rank in range(WORLD):
        assert compared(ranked, "alone_0", "alone_0", Scope(rank=rank)) == []
        own = [("seed", None, "object")] if rank == 1 else []
        changed = [*own, ("step", None, "object"), ("w", None, "values")]
        assert compared(ranked, "alone_0", "alone_1", Scope(rank=rank)) == changed
        assert compared(ranked, "alone_0", "all_0", Scope(rank=rank)) == []  # its part is that of the whole
        assert compared(ranked, "all_1", "alone_0", Scope(rank=rank)) == changed


def test_parts_of_other_boxes_differ(ranked: Path, tmp_path: Path) -> None:
    os.link(ranked / "alone_0" / "1.metadata", tmp_path / "0.metadata")
    for file in (ranked / "alone_0").glob("_rank1_*"):
        os.link(file, tmp_path / file.name)
    found = compare(
        FileSystemReader(ranked / "alone_0"), FileSystemReader(tmp_path), Scope(rank=0, wanted=lambda name: name == "w")
    )
    assert [(each.key, each.kind, each.a) for each in found.differences] == [
        ("w", "part", "4 of 12 elements, other boxes")
    ]


def test_names_are_compared_under_a_prefix_and_as_they_are_renamed(tmp_path: Path) -> None:
    inner = {"a": np.ones(3), "layers": [np.arange(4), np.arange(5)]}
    one = save(tmp_path / "a", {"model": inner, "optimizer": {"a": np.zeros(3)}})
    other = save(tmp_path / "b", {"a": np.ones(3), "h.0": np.arange(4), "h.1": np.arange(5)})
    assert not compare(one, other).is_equal
    renamed = Scope(prefix="model", rename={"^layers": "h"})
    assert compare(one, other, renamed).is_equal
    assert compare(one, other, Scope(rename={r"^model\.layers": "h", r"^model\.": "", "^optimizer": None})).is_equal
    with pytest.raises(ArgumentError, match="begins with 'nix.'"):
        compare(one, other, Scope(prefix="nix"))
    with pytest.raises(ArgumentError, match="keep names different"):
        compare(one, other, Scope(rename=lambda name: "x"))


def test_only_what_both_have_is_compared_if_asked_for(tmp_path: Path) -> None:
    one = save(tmp_path / "a", {"x": np.ones(3), "left": np.ones(1), "step": 1})
    other = save(tmp_path / "b", {"x": np.ones(3), "right": 5})
    found = compare(one, other, Scope(only_common=True))
    assert (found.is_equal, found.tensors, found.left_out) == (True, 1, 3)


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbers_count_as_equal_within_a_tolerance_as_numpy_has_it(data: st.DataObject, tmp_path: Path) -> None:
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    dtype = data.draw(st.sampled_from(["float32", "float64", "int16", "complex64"]))
    numbers = st.sampled_from([0.0, -0.0, 1.0, 1.0001, 1.01, -3.0, 100.0, 101.0, np.nan, -np.nan, np.inf, -np.inf])
    if dtype == "int16":
        numbers = st.sampled_from([0.0, 1.0, 99.0, 100.0, -100.0])
    one, two = (np.array(data.draw(st.lists(numbers, min_size=5, max_size=5))).astype(dtype) for _ in range(2))
    rtol, atol = data.draw(st.sampled_from([(1e-3, 0.0), (0.0, 0.05), (0.02, 1.0)]))
    found = compare(save(root / "a", {"x": one}), save(root / "b", {"x": two}), Scope(tolerance=Tolerance(rtol, atol)))
    far = np.array([not is_near(x, y, rtol, atol) for x, y in zip(one.tolist(), two.tolist(), strict=True)])
    assert sum(each.elements for each in found.differences) == far.sum()
    if far.any():
        assert found.differences[0].first == (int(np.flatnonzero(far)[0]),)


def is_near(x: complex, y: complex, rtol: float, atol: float) -> bool:
    if cmath.isnan(x) or cmath.isnan(y):
        return cmath.isnan(x) and cmath.isnan(y)
    if cmath.isinf(x) or cmath.isinf(y):
        return x == y
    return abs(x - y) <= atol + rtol * abs(y)


def test_other_types_count_as_equal_if_asked_for_and_their_values_are_near(tmp_path: Path) -> None:
    values = np.array([1.0, 1 / 3, np.nan, -0.0])
    one, other = save(tmp_path / "a", {"x": values}), save(tmp_path / "b", {"x": values.astype(np.float32)})
    near = Tolerance(relative=1e-6)
    scopes = [
        (Scope(), False),
        (Scope(tolerance=near), False),
        (Scope(types=False), False),
        (Scope(types=False, tolerance=near), True),
        (Scope(types=False, values=False), True),
    ]
    for scope, is_equal in scopes:
        assert compare(one, other, scope).is_equal == is_equal, scope
    for wrong in ((-1.0, 0.0), (0.0, float("nan"))):
        with pytest.raises(ArgumentError, match="0 or more"):
            Tolerance(*wrong)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (np.array([7, 2**53 + 1]), np.array([7, 2**53], np.uint64), 1.0),
        (np.array([7, 2**53 + 1]), np.array([7.0, 2.0**53]), 1.0),
        (np.array([7, 2**63 - 1]), np.array([7.0, 2.0**63], np.float32), 1.0),
        (np.array([7, 2**64 - 1], np.uint64), np.array([7, 2**63 - 1]), 2.0**63),
        (np.array([7, 2**60 + 1]), np.array([7, 2**60], np.complex128), 1.0),
        (np.array([7, 2**60 + 1]), np.array([7, 2**60]), 1.0),
    ],
)
def test_integers_that_a_float_cannot_tell_apart_differ(tmp_path: Path, one: Array, other: Array, apart: float) -> None:
    readers = save(tmp_path / "a", {"x": one}), save(tmp_path / "b", {"x": other})
    for tolerance in (Tolerance(), Tolerance(absolute=0.5)):
        (found,) = compare(*readers, Scope(types=False, tolerance=tolerance)).differences
        assert (found.kind, found.elements, found.first, found.max_abs) == ("values", 1, (1,), apart)
    assert compare(*readers, Scope(types=False, tolerance=Tolerance(absolute=apart))).is_equal


def test_a_checkpoint_that_is_replaced_meanwhile_is_compared_anew(tmp_path: Path) -> None:
    one, other = save(tmp_path / "a", {"x": np.ones(3)}), save(tmp_path / "b", {"x": np.ones(3)})
    saves: list[FileSystemReader] = []

    def wanted(name: str) -> bool:  # asked once the descriptions have been read
        if len(saves) < 2:
            saves.append(save(tmp_path / "b", {"x": np.ones(3)}))
        return True

    assert compare(one, other, Scope(wanted=wanted)).is_equal
    assert len(saves) == 2


# --- formats, trouble, memory ------------------------------------------------------------------------


def test_a_checkpoint_is_compared_with_the_safetensors_that_it_was_made_of(tmp_path: Path) -> None:
    shards: list[dict[str, Array]] = [
        {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(4, np.float32)},
        {"c": np.arange(5)},
    ]
    (tmp_path / "hf").mkdir()
    write_shards(tmp_path / "hf", shards)
    reader = save(tmp_path / "c", {name: array for shard in shards for name, array in shard.items()})
    assert compare(HuggingFaceReader(tmp_path / "hf"), reader).is_equal


def test_what_cannot_be_read_is_told_and_the_rest_is_compared(tmp_path: Path) -> None:
    state = {"x": np.ones(3), "step": 1}
    one, other = save(tmp_path / "a", state), save(tmp_path / "b", state | {"step": 2})
    (data,) = (tmp_path / "b").glob("*.safetensors")
    data.unlink()
    found = compare(one, other)
    assert [(each.key, each.kind) for each in found.differences] == [("step", "object"), ("x", "unreadable")]
    assert (found.differences[1].a, data.name in found.differences[1].b) == ("", True)
    assert not found.is_sure
    (objects,) = (tmp_path / "a").glob("*.bytes")
    objects.write_bytes(objects.read_bytes()[:-1] + b"\xff")
    found = compare(one, other)
    assert [(each.key, each.kind) for each in found.differences] == [("step", "unreadable"), ("x", "unreadable")]
    assert (objects.name in found.differences[0].a, found.differences[0].b) == (True, "")
    assert not compare(one, one).is_equal


def test_a_changed_byte_is_damage_and_no_value_even_where_both_sides_have_it(tmp_path: Path) -> None:
    state = {"x": np.ones(3), "y": np.ones(2)}
    one, other = save(tmp_path / "a", state), save(tmp_path / "b", state)
    (data,) = (tmp_path / "b").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    for pair in ((one, other), (other, one), (other, other)):
        found = compare(*pair)
        (damaged,) = found.differences
        assert (damaged.kind, "checksum" in damaged.a + damaged.b) == ("unreadable", True)
        assert not found.is_sure


def test_what_can_be_read_is_compared_though_it_was_to_be_read_together_with_what_cannot(tmp_path: Path) -> None:
    for name, spoiled in (("a", False), ("b", True)):
        run_ranks(save_cut, WORLD, tmp_path / name, 0, spoiled)
    (tmp_path / "b" / "_rank1_.safetensors").unlink()
    found = compare(
        FileSystemReader(tmp_path / "a"), FileSystemReader(tmp_path / "b"), Scope(wanted=lambda name: name in "wb")
    )
    assert [(each.key, each.kind) for each in found.differences] == [("w", "unreadable")]
    assert found.nbytes == 5 * 8


def test_a_tensor_with_a_hole_equals_none_not_even_itself(
    ranked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "holed"):
        shutil.copytree(ranked / "cut", tmp_path / name)
    (damage,) = hostile.holes()
    damage.change(tmp_path / "holed")
    monkeypatch.setattr(value_differences, "_SMALL_BOX_BYTES", 0)
    for piece_bytes in (4 << 20, 712):
        monkeypatch.setattr(value_differences, "PIECE_BYTES", piece_bytes)
        for one, other in (("holed", "whole"), ("whole", "holed"), ("holed", "holed")):
            found = compare(FileSystemReader(tmp_path / one), FileSystemReader(tmp_path / other))
            assert [(each.key, each.kind) for each in found.differences] == [("w", "unreadable")], (one, other)
            assert not found.is_sure


def test_nans_of_other_bits_differ_and_are_nan_on_both_sides(tmp_path: Path) -> None:
    bits = np.array([0x7FF8000000000000, 0x7FF8000000000001], np.uint64)
    (found,) = differences({"x": bits[:1].view(np.float64)}, {"x": bits[1:].view(np.float64)}, tmp_path).values()
    assert (found.elements, found.nans, found.max_abs) == (1, 0, None)


def test_pickled_objects_are_compared_by_their_bytes_and_never_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = differences({"x": [Odd(1)], "y": [Odd(1)]}, {"x": [Odd(1)], "y": [Odd(2)]}, tmp_path)
    assert {key: (each.kind, each.a) for key, each in found.items()} == {"y": ("object", "pickled: posix.system")}
    assert not list(tmp_path.glob("it-ran*"))


def test_without_values_nothing_but_descriptions_is_read(tmp_path: Path) -> None:
    one, other = save(tmp_path / "a", {"x": np.ones(3), "n": 1}), save(tmp_path / "b", {"x": np.zeros(3), "n": 2})
    for data in [*(tmp_path / "a").glob("_rank*"), *(tmp_path / "b").glob("_rank*")]:
        data.unlink()
    found = compare(one, other, Scope(values=False))
    assert (found.is_equal, found.nbytes, found.values_compared) == (True, 0, False)


def test_only_wanted_names_are_compared_and_progress_is_told(tmp_path: Path) -> None:
    state = {"a": {"x": np.ones(3)}, "b": {"x": np.ones(5)}, "n": 1}
    told: list[int] = []
    one, other = save(tmp_path / "a", state), save(tmp_path / "b", {"b": {"x": np.ones(5)}})
    found = compare(one, other, Scope(wanted=lambda name: name.startswith("b")), advance=told.append)
    assert (found.is_equal, found.tensors, sum(told)) == (True, 1, 40)


def test_memory_stays_small_however_large_a_tensor_is(tmp_path: Path) -> None:
    need_peak_counter()
    state = {"x": np.zeros((48, 1 << 20), np.uint8)}
    one, other = save(tmp_path / "a", state), save(tmp_path / "b", state)
    assert peak_rise(lambda: compare(one, other)) < 72
