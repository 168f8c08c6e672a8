"""Inputs that broke other checkpoint libraries, in their general form, on real ranks without a framework."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core.api import allow_pickled, read
from dcp_core.box import Box, flat_range_to_boxes
from dcp_core.dtype import BY_NAME, DTYPES, DType
from dcp_core.errors import (
    AdapterError,
    CoverageError,
    DcpError,
    DTypeMismatchError,
    MissingKeysError,
    OverlapError,
    PlanningError,
    ShapeMismatchError,
    UnsupportedValueError,
    UntrustedObjectError,
)
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.file_names import METADATA_NAME
from dcp_core.formats.objects import value_digest
from dcp_core.metadata import Metadata
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.random_states import poisoned, random_bits
from tests.core.rank_jobs import error_of, heard_warnings, load, save, together

pytestmark = pytest.mark.timeout(120)

Array = npt.NDArray[Any]
Raised = tuple[type[BaseException], str]


def open_checkpoint(directory: str | Path) -> Metadata:
    reader = FileSystemReader(directory)
    reader.initialize_reader()
    return reader.load_metadata()


def bits_of(value: Any) -> list[bytes]:
    """The elements of an array or of the shards of one, as bytes."""
    arrays = value.arrays if isinstance(value, ShardedArray) else [value]
    return [np.ascontiguousarray(array).tobytes() for array in arrays]


def the_error(found: Sequence[Raised], *texts: str) -> type[BaseException]:
    """All ranks raised the same error, of this library, and it says all this; returns its class."""
    kind, text = found[0]
    assert list(found) == [found[0]] * len(found)
    assert issubclass(kind, DcpError)
    for expected in texts:
        assert expected in text, text
    return kind


def cut(array: Array, ranks: int, rank: int, dim: int = 0, dtype: DType | None = None) -> ShardedArray:
    """The even shard of a global array, copied."""
    return ShardedArray.cut(array, even_boxes(array.shape, ranks, rank, dim), (dtype or BY_NAME[array.dtype.name]).name)


def blank(shard: ShardedArray) -> ShardedArray:
    """A target of the same layout, with other bits in every element."""
    arrays = [poisoned(array) for array in shard.arrays]
    return ShardedArray(shard.global_shape, shard.boxes, arrays, shard.dtype.name)


# -- row 1: short dimensions ------------------------------------------------------------------------------------------

SHORT_SHAPES = ((5,), (1,), (0,), (5, 3), (1, 9), (0, 4), (4, 0), (3, 1, 2), (8, 1))


def short_arrays() -> dict[str, Array]:
    return {
        str(shape): np.arange(1, 1 + int(np.prod(shape, dtype=np.int64)), dtype=np.int16).reshape(shape)
        for shape in SHORT_SHAPES
    }


def save_short_dimensions(context: RankContext, directory: str) -> None:
    arrays = short_arrays()
    state = {name: cut(array, context.world_size, context.rank) for name, array in arrays.items()}
    for name, array in arrays.items():  # frameworks may also say it with a box of no elements
        if not state[name].boxes:
            box = Box((array.shape[0], *[0] * (array.ndim - 1)), (0, *array.shape[1:]))
            state[name] = ShardedArray(array.shape, [box], [np.zeros(box.sizes, np.int16)])
    save(state, directory)
    for ranks in (1, 2, 3, 8):
        for dim in (0, -1):
            with together(context):
                if context.rank < ranks:
                    expected = {n: cut(a, ranks, context.rank, dim % a.ndim) for n, a in arrays.items()}
                    target = {name: blank(shard) for name, shard in expected.items()}
                    load(target, directory, process_group=range(ranks))
                    for name, shard in expected.items():
                        assert bits_of(target[name]) == bits_of(shard), (name, ranks, dim)


def test_dimensions_shorter_than_the_group_save_and_load_on_any_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save_short_dimensions, 8, str(tmp_path))
    source = open_checkpoint(tmp_path).source
    for name, array in short_arrays().items():
        (stored,) = source.tensors(name)
        assert stored.shape == array.shape
        assert (stored.chunks.sizes[:, : array.ndim] > 0).all()
        assert len(stored.chunks) == (0 if 0 in array.shape else min(array.shape[0], 8))
        np.testing.assert_array_equal(read(tmp_path, name), array)


# -- rows 4 and 5: several boxes a rank -------------------------------------------------------------------------------


def save_separate_chunks(context: RankContext, directory: str) -> None:
    """Rank 0 holds rows 0-1 and 4-6, rank 1 the rest; and a flat, uneven shard of the same on each."""
    array = np.arange(35, dtype=np.float64).reshape(7, 5)
    rows = [[Box((0, 0), (2, 5)), Box((4, 0), (3, 5))], [Box((2, 0), (2, 5))]][context.rank]
    bounds = [0, 13, 35]
    flat = list(flat_range_to_boxes(array.shape, bounds[context.rank], bounds[context.rank + 1]))
    save({"rows": ShardedArray.cut(array, rows), "flat": ShardedArray.cut(array, flat)}, directory)
    for dim in (0, 1):
        with together(context):
            expected = cut(array, 2, context.rank, dim)
            target = {"rows": blank(expected), "flat": blank(expected)}
            load(target, directory)
            assert bits_of(target["rows"]) == bits_of(target["flat"]) == bits_of(expected)
    with together(context):
        own = {"rows": blank(ShardedArray.cut(array, rows)), "flat": blank(ShardedArray.cut(array, flat))}
        load(own, directory)
        assert bits_of(own["rows"]) == bits_of(ShardedArray.cut(array, rows))
        assert bits_of(own["flat"]) == bits_of(ShardedArray.cut(array, flat))


def test_separate_chunks_and_flat_shards_of_a_rank_are_all_stored_and_all_come_back(tmp_path: Path) -> None:
    run_ranks(save_separate_chunks, 2, str(tmp_path))
    source = open_checkpoint(tmp_path).source
    assert len(source.tensors("rows")[0].chunks) == 3
    assert len(source.tensors("flat")[0].chunks) == 4


# -- row 6: ranks that disagree ---------------------------------------------------------------------------------------

WRONG_STATES: dict[str, Callable[[RankContext], dict[str, Any]]] = {
    "shape": lambda ctx: {"w": ShardedArray.cut(np.zeros((4, 2 + ctx.rank // 2)), [Box((ctx.rank, 0), (1, 2))])},
    "rank": lambda ctx: {"w": cut(np.zeros((3, 2) if ctx.rank < 2 else (3, 2, 1)), 3, ctx.rank)},
    "dtype": lambda ctx: {"w": cut(np.zeros((3, 2), np.float32 if ctx.rank < 2 else np.float16), 3, ctx.rank)},
    "kind": lambda ctx: {"w": 5 if ctx.rank == 2 else np.zeros(3)},
    "plain shape": lambda ctx: {"w": np.zeros(3 + ctx.rank // 2)},
    "hole": lambda ctx: {"w": ShardedArray.cut(np.zeros((5, 2)), even_boxes((4, 2), 3, ctx.rank))},
    "overlap": lambda ctx: {"w": ShardedArray.cut(np.zeros((6, 2)), [Box((2 * ctx.rank, 0), (2 + ctx.rank % 2, 2))])},
    "outside": lambda ctx: {"w": ShardedArray((3, 2), [Box((ctx.rank * 2, 0), (1, 2))], [np.zeros((1, 2))])},
}  # fmt: skip
WRONG_TEXTS: dict[str, tuple[type[DcpError], tuple[str, ...]]] = {
    "shape": (ShapeMismatchError, ("'w'", "(4, 2)", "(4, 3)", "rank 0", "rank 2")),
    "rank": (ShapeMismatchError, ("'w'", "(3, 2)", "(3, 2, 1)", "rank 0", "rank 2")),
    "dtype": (DTypeMismatchError, ("'w'", "float32", "float16", "rank 0", "rank 2")),
    "kind": (PlanningError, ("'w'", "a tensor", "a plain value", "rank 0", "rank 2")),
    "plain shape": (ShapeMismatchError, ("'w'", "(3,)", "(4,)", "rank 0", "rank 2")),
    "hole": (CoverageError, ("'w'", "(5, 2)", "offsets (4, 0) sizes (1, 2)")),
    "overlap": (OverlapError, ("'w'", "(6, 2)", "offsets (2, 0) sizes (3, 2) on rank 1", "on rank 2")),
    "outside": (AdapterError, ("'w'", "(3, 2)", "offsets=(4, 0), sizes=(1, 2)", "the box leaves", "rank 2")),
}


def save_wrong_states(context: RankContext, directory: str) -> dict[str, Raised]:
    save({"good": np.arange(3)}, directory)
    before = ["_rank0_.safetensors", METADATA_NAME]
    found = {}
    for name, make in WRONG_STATES.items():
        with together(context):
            found[name] = error_of(save, make(context), directory)
        with together(context):
            assert sorted(path.name for path in Path(directory).iterdir()) == sorted(before)
            assert read(directory, "good").tolist() == [0, 1, 2]
    return found


def test_ranks_that_disagree_get_one_error_before_anything_is_written(tmp_path: Path) -> None:
    results = run_ranks(save_wrong_states, 3, str(tmp_path))
    for name, (kind, texts) in WRONG_TEXTS.items():
        assert the_error([result[name] for result in results], *texts) is kind, name


def test_a_hole_on_a_single_rank_is_refused_at_the_save_and_without_collectives_at_the_load(tmp_path: Path) -> None:
    holed = ShardedArray.cut(np.arange(10.0), [Box((0,), (4,)), Box((6,), (4,))])
    kind, text = error_of(save, {"w": holed}, str(tmp_path))
    assert kind is CoverageError
    assert "'w'" in text
    assert "offsets (4,) sizes (2,)" in text
    assert not list(tmp_path.glob("_rank*")) + list(tmp_path.glob("*metadata"))
    save({"w": holed}, str(tmp_path), use_collectives=False)
    whole = np.full(10, -1.0)
    kind, text = error_of(load, {"w": whole}, str(tmp_path))
    assert kind is CoverageError
    assert "'w'" in text
    assert "offsets (4,) sizes (2,)" in text
    assert (whole == -1).all()
    own = blank(holed)
    load({"w": own}, str(tmp_path))
    assert bits_of(own) == bits_of(holed)


# -- row 9: ranks that hold nothing -----------------------------------------------------------------------------------


def save_on_some_ranks(context: RankContext, directory: str) -> None:
    array = np.arange(24, dtype=np.int32).reshape(6, 4)
    place = {1: 0, 3: 1}.get(context.rank)
    state: dict[str, Any] = {} if place is None else {"w": cut(array, 2, place), "note": "odd"}
    save(state, directory)
    with together(context):
        target: dict[str, Any] = (
            {} if place is not None else {"w": blank(cut(array, 2, context.rank // 2, 1)), "note": 0}
        )
        load(target, directory)
        if place is None:
            assert bits_of(target["w"]) == bits_of(cut(array, 2, context.rank // 2, 1))
            assert target["note"] == "odd"
        else:
            assert target == {}


def save_nothing(context: RankContext, directory: str) -> None:
    save({}, directory)
    with together(context):
        load({}, directory)


def test_a_mesh_on_some_ranks_and_ranks_with_an_empty_state(tmp_path: Path) -> None:
    run_ranks(save_on_some_ranks, 4, str(tmp_path))
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {METADATA_NAME, "_rank1_.safetensors", "_rank3_.safetensors", "_rank1_.bytes"}
    run_ranks(save_nothing, 2, str(tmp_path / "nothing"))
    assert {path.name for path in (tmp_path / "nothing").iterdir()} == {METADATA_NAME}


# -- row 10: memory of any shape --------------------------------------------------------------------------------------


def views(base: Array) -> dict[str, Array]:
    """Views of one (4, 6, 8) array, none of them contiguous in the usual order."""
    return {
        "transposed": base.T,
        "permuted": base.transpose(1, 2, 0),
        "strided": base[::2, 1::3, ::-1],
        "reversed": base[::-1],
        "column": base[:, :, 3],
        "fortran": np.asfortranarray(base),
        "offset": base[1:, 2:, 3:],
        "thin": base[1:2, :, 5:6],
        "scalar": base[2, 3, 4:5].reshape(()),
    }


def save_views(context: RankContext, directory: str) -> None:
    base = np.random.default_rng(7).integers(-(10**6), 10**6, (4, 6, 8))
    saved: dict[str, Any] = {**views(base), "expanded": np.broadcast_to(base[:1], (4, 6, 8))}
    saved["sharded"] = ShardedArray((8, 6, 8), [Box((4 * context.rank, 0, 0), (4, 6, 8))], [base.transpose(0, 1, 2)])
    saved["flipped"] = ShardedArray((6, 8), [Box((0, 4 * context.rank), (6, 4))], [base[0, :, ::-2]])
    save(saved, directory)
    with together(context):
        for name in views(base):
            memory = np.full((4, 6, 8), -1)
            target = views(memory)[name]
            load({name: target}, directory)
            np.testing.assert_array_equal(target, saved[name])
            if np.shares_memory(target, memory):
                assert int((memory != -1).sum()) == target.size
        whole = np.full((4, 6, 8), -1)
        load({"expanded": whole}, directory)
        np.testing.assert_array_equal(whole, saved["expanded"])
        own = {name: blank(saved[name]) for name in ("sharded", "flipped")}
        load(own, directory)
        assert bits_of(own["sharded"]) == bits_of(saved["sharded"])
        assert bits_of(own["flipped"]) == bits_of(saved["flipped"])


def test_views_of_any_strides_are_saved_and_filled_by_their_logical_values(tmp_path: Path) -> None:
    run_ranks(save_views, 2, str(tmp_path))


def load_into_bad_memory(context: RankContext, directory: str) -> dict[str, Raised]:
    """Rank 1 has a target that can't be filled, the others good ones: nobody's is touched."""
    save({"w": np.arange(12.0).reshape(3, 4), "v": np.arange(3)}, directory)
    frozen = np.full((3, 4), -1.0)
    frozen.flags.writeable = False
    window = np.lib.stride_tricks.as_strided(np.full(8, -1.0), (3, 4), (8, 8))
    bad = {"read-only": frozen, "expanded": np.broadcast_to(np.full(4, -1.0), (3, 4)), "windows": window}
    bad["expanded"].flags.writeable = True
    found = {}
    for name, memory in bad.items():
        target = {"w": memory if context.rank == 1 else np.full((3, 4), -1.0), "v": np.full(3, -1)}
        with together(context):
            found[name] = error_of(load, target, directory)
            assert (target["w"] == -1).all()
            assert (target["v"] == -1).all()
    return found


def test_targets_that_are_read_only_or_repeat_their_elements_are_refused(tmp_path: Path) -> None:
    results = run_ranks(load_into_bad_memory, 3, str(tmp_path))
    for name in ("read-only", "expanded", "windows"):
        assert the_error([result[name] for result in results], "'w'", "rank 1") is UnsupportedValueError, name


# -- row 11: every element type ---------------------------------------------------------------------------------------


def every_type(shape: tuple[int, ...]) -> dict[str, tuple[Array, DType]]:
    """All bit patterns of the 8-bit types, random ones of the others: NaNs with payloads, infinities, subnormals."""
    rng = Random(11)
    found = {dtype.name: (random_bits(rng, shape, dtype), dtype) for dtype in DTYPES}
    for name, (bits, dtype) in found.items():
        if dtype.itemsize == 1 and name != "bool":
            bits.reshape(-1)[:256].view(np.uint8)[:] = np.arange(256)
    return found


def save_every_type(context: RankContext, directory: str) -> None:
    shape = (18, 15)
    state: dict[str, Any] = {}
    for name, (bits, dtype) in every_type(shape).items():
        state[f"sharded.{name}"] = cut(bits, context.world_size, context.rank, 0, dtype)
        if dtype.numpy is not None:
            state[f"plain.{name}"] = bits
            state[f"swapped.{name}"] = bits.astype(bits.dtype.newbyteorder(">"))
            state[f"scalar.{name}"] = bits[3, 4:5].reshape(())
    save(state, directory)


def load_every_type(context: RankContext, directory: str) -> None:
    for name, (bits, dtype) in every_type((18, 15)).items():
        expected = cut(bits, context.world_size, context.rank, 1, dtype)
        target: dict[str, Any] = {f"sharded.{name}": blank(expected)}
        if dtype.numpy is not None:
            target |= {f"plain.{name}": poisoned(bits), f"scalar.{name}": poisoned(bits[0, 0:1]).reshape(())}
            target[f"swapped.{name}"] = np.zeros(bits.shape, bits.dtype.newbyteorder(">"))
        with together(context):
            load(target, directory)
        assert bits_of(target[f"sharded.{name}"]) == bits_of(expected)
        assert bits_of(ShardedArray.cut(read(directory, f"sharded.{name}"), expected.boxes, dtype.name)) == bits_of(
            expected
        )
        if dtype.numpy is not None:
            assert bits_of(target[f"plain.{name}"]) == bits_of(bits)
            assert bits_of(target[f"scalar.{name}"]) == bits_of(bits[3, 4:5])
            swapped = target[f"swapped.{name}"]
            assert bits_of(swapped.byteswap().view(bits.dtype)) == bits_of(bits)


def test_every_element_type_comes_back_to_the_last_bit_in_another_layout(tmp_path: Path) -> None:
    run_ranks(save_every_type, 3, str(tmp_path))
    run_ranks(load_every_type, 2, str(tmp_path))


def test_arrays_that_no_tensor_format_holds_come_back_as_values(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "text": np.array([["a", "längere"]]), "bytes": np.array([b"x", b"yz\x00w"]),
        "times": np.array(["2024-02-29", "NaT"], "datetime64[s]"), "spans": np.array([3, -4], "timedelta64[us]"),
        "records": np.array([(1, 2.5)], [("i", "<i4"), ("f", ">f8")]), "extended": np.array([np.longdouble(1) / 3]),
    }  # fmt: skip
    save(values, str(tmp_path))
    target: dict[str, Any] = dict.fromkeys(values)
    load(target, str(tmp_path))
    for name, value in values.items():
        assert target[name].dtype == value.dtype, name
        same = target[name] == value
        assert (same | (value != value)).all(), name  # not a time


# -- row 12: keys and values of any kind ------------------------------------------------------------------------------


class Color(Enum):
    RED = 1


@dataclass
class Settings:
    rate: float
    names: tuple[str, ...]


Point = namedtuple("Point", ["x", "y"])
NASTY_KEYS: tuple[Any, ...] = (
    "a.b", "a/b", "../up", "ключ 🗝", " lead and trail ", "k" * 3000, "__metadata__", "", ".", "..", "new\nline", "\x00",
    "quote\"'\\", "$", '$["a"]', "w@0", "w@0,0", "\udcff", 0, 1, -7, 2**80, "0", "1", "-7", None, "None", True, "True",
    2.5, "2.5", b"b", (1, "x"), "(1, x)",
)  # fmt: skip
NASTY_KEYS = tuple(key for key in NASTY_KEYS if key is not True)  # 1 and True are one key of a dict


def nasty_state(context: RankContext, scale: int) -> dict[Any, Any]:
    """Under each key a shard, a plain array, a value, and a nested dict, in one place or another."""

    def shard(number: int) -> ShardedArray:
        return cut(np.full((4, 3), scale * number), context.world_size, context.rank)

    state: dict[Any, Any] = {"as keys": {key: shard(number) for number, key in enumerate(NASTY_KEYS)}}
    state |= {"values": {key: [scale, number] for number, key in enumerate(NASTY_KEYS)}}
    state |= {key: {"inner": {key: shard(100 + number)}} for number, key in enumerate(NASTY_KEYS)}
    state |= {"a": {"b": shard(200), "b.c": {"d": shard(201)}}, "a.b.c": {"d": shard(202)}, "a.b.c.d": shard(203)}
    state["a.b"]["x"] = np.full(3, scale)
    return state


def leaves_of(state: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    if not isinstance(state, dict):
        return {path: state}
    return {
        place: leaf
        for key, child in state.items()
        for place, leaf in leaves_of(child, (*path, (type(key).__name__, key))).items()
    }


def save_nasty_keys(context: RankContext, directory: str) -> None:
    state, target = nasty_state(context, 1), nasty_state(context, -1)
    save(state, directory)
    with together(context):
        load(target, directory)
        expected, found = leaves_of(state), leaves_of(target)
        assert len(expected) == 3 * len(NASTY_KEYS) + 5
        assert expected.keys() == found.keys()
        for place, leaf in expected.items():
            if isinstance(leaf, list):
                assert found[place] == leaf, place
            else:
                assert bits_of(found[place]) == bits_of(leaf), place


@pytest.mark.parametrize("ranks", [1, 2])
def test_keys_of_any_kind_are_told_apart_and_come_back(ranks: int, tmp_path: Path) -> None:
    run_ranks(save_nasty_keys, ranks, str(tmp_path))
    names = list(open_checkpoint(tmp_path).source.names())
    assert len(set(names)) == len(names) == 3 * len(NASTY_KEYS) + 5


def test_nested_and_flat_states_find_each_other_by_name(tmp_path: Path) -> None:
    save({"model": {"layers": [{"w": np.arange(3)}, {"w": np.arange(3, 6)}]}, "step": 3}, str(tmp_path / "nested"))
    flat = {"model.layers.0.w": np.zeros(3, int), "model.layers.1.w": np.zeros(3, int), "step": 0}
    load(flat, str(tmp_path / "nested"))
    assert [flat[key].tolist() for key in list(flat)[:2]] == [[0, 1, 2], [3, 4, 5]]  # type: ignore[attr-defined]
    save(flat, str(tmp_path / "flat"))
    nested: dict[str, Any] = {"model": {"layers": [{"w": np.zeros(3, int)}, {"w": np.zeros(3, int)}]}, "step": 0}
    load(nested, str(tmp_path / "flat"))
    assert [layer["w"].tolist() for layer in nested["model"]["layers"]] == [[0, 1, 2], [3, 4, 5]]
    assert nested["step"] == 3


def value_state() -> dict[str, Any]:
    return {
        "none": None, "true": True, "int": -(2**90), "float": 0.1, "complex": 1 - 2j, "text": "tëxt\x00",
        "bytes": b"\xff", "list": [1, [2.5, None]], "tuple": (1, ("x",)), "set": {3, (4, "y")},
        "frozen": frozenset("z"), "date": date(2024, 2, 29), "scalar": np.float16(0.1), "dtype": np.dtype(">i4"),
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "ordered": OrderedDict(b=1, a=OrderedDict()),
        "mixed": (np.arange(3.0), {"deep": [np.int8(1), (np.arange(2), "s")]}, 5),
        "point": Point(np.arange(4), [1, 2]),
        "pairs": [(np.arange(2), 1), (np.arange(3), 2)],
    }  # fmt: skip


def blanked(value: Any) -> Any:
    """The same containers and arrays, with other values in them."""
    if isinstance(value, np.ndarray):
        return np.full_like(value, -1)
    if isinstance(value, dict):
        return type(value)((key, blanked(child)) for key, child in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[blanked(child) for child in value])
    if isinstance(value, (list, tuple)) and any(isinstance(child, (np.ndarray, dict, tuple)) for child in value):
        return type(value)(blanked(child) for child in value)
    return "blank"


def same_value(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same_value(a, b) for a, b in zip(one, other, strict=True))
    return value_digest(one) == value_digest(other)


def save_values(context: RankContext, directory: str) -> None:
    save(value_state(), directory)
    target = blanked(value_state())
    arrays = [target["mixed"][0], target["mixed"][1]["deep"][1][0], target["point"].x, target["pairs"][1][0]]
    containers = [target["mixed"][1], target["pairs"], target["empty"]]
    with together(context):
        load(target, directory)
        for key, value in value_state().items():
            assert same_value(target[key], value), (key, target[key], value)
    now = [target["mixed"][0], target["mixed"][1]["deep"][1][0], target["point"].x, target["pairs"][1][0]]
    assert all(one is other for one, other in zip(arrays, now, strict=True))
    assert all(a is b for a, b in zip(containers, [target["mixed"][1], target["pairs"], target["empty"]], strict=True))


@pytest.mark.parametrize("ranks", [1, 3])
def test_values_and_containers_of_any_kind_come_back_and_tuples_are_replaced_in_their_parents(
    ranks: int, tmp_path: Path
) -> None:
    run_ranks(save_values, ranks, str(tmp_path))


def save_pickled(context: RankContext, directory: str) -> Raised:
    save({"config": Settings(0.5, ("a",)), "color": [Color.RED, 1], "w": np.arange(3)}, directory)
    target: dict[str, Any] = {"config": None, "color": None, "w": np.full(3, -1)}
    found = error_of(load, target, directory)
    assert target["config"] is None
    assert target["color"] is None
    assert (target["w"] == -1).all()
    with together(context):
        allow_pickled(Settings, Color)
        load(target, directory)
        assert target["config"] == Settings(0.5, ("a",))
        assert target["color"] == [Color.RED, 1]
        assert target["w"].tolist() == [0, 1, 2]
    return found


def test_pickled_values_need_their_exact_class_allowed_and_nothing_is_touched_before(tmp_path: Path) -> None:
    found = run_ranks(save_pickled, 2, str(tmp_path))
    assert the_error(found, "allow_pickled(", "test_state_cases.") is UntrustedObjectError
    assert "Settings" in found[0][1] or "Color" in found[0][1]
    assert "'config'" in found[0][1] or "'color'" in found[0][1]


def test_values_that_cannot_be_stored_are_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    values: list[Any] = [
        lambda: 1,
        (number for number in range(3)),
        frozenset({lambda: 2}),
        np.array([lambda: 1], object),
    ]
    for value in values:
        kind, text = error_of(save, {"good": 1, "bad": {"inner": value}}, str(tmp_path))
        assert kind is UnsupportedValueError
        assert "'bad.inner'" in text
        assert not list(tmp_path.glob("_rank*"))
        assert not (tmp_path / METADATA_NAME).exists()


# -- row 14: empty containers -----------------------------------------------------------------------------------------


def load_into_empty(context: RankContext, directory: str) -> dict[str, Raised]:
    odd = "\udcff"
    save(
        {"optimizer": {"state": {0: {"exp_avg": np.arange(3)}}, "groups": [{"lr": 0.1}]}, "x.y": np.arange(2), "v": 3,
         odd: {"w": np.arange(2)}},
        directory,
    )  # fmt: skip
    bad: dict[str, dict[str, Any]] = {
        "state": {"optimizer": {"state": {}, "groups": [{"lr": 0.0}]}},
        "all": {"optimizer": {}},
        "flat": {"x": {}},
        "groups": {"optimizer": {"groups": [{}]}},
        "value": {"v": {}},
        "odd name": {odd: {}},
    }
    found = {}
    for name, state in bad.items():
        target: dict[str, Any] = {**(state if context.rank == 1 else {}), "x.y": np.full(2, -1)}
        with together(context):
            found[name] = error_of(load, target, directory)
            assert (target["x.y"] == -1).all()
    with together(context):
        load({}, directory)
        load({"nothing like it": {}}, directory)
    return found


def test_an_empty_container_where_the_checkpoint_has_entries_asks_to_be_warmed_up(tmp_path: Path) -> None:
    results = run_ranks(load_into_empty, 2, str(tmp_path))
    for name, key in {
        "state": "'optimizer.state'",
        "all": "'optimizer'",
        "flat": "'x'",
        "groups": "'optimizer.groups.0'",
    }.items():
        kind = the_error([result[name] for result in results], key, "rank 1", "warm", "empty")
        assert kind is MissingKeysError, name
    assert issubclass(the_error([result["value"] for result in results], "'v'", "rank 1"), PlanningError)
    assert the_error([result["odd name"] for result in results], "rank 1", "warm") is MissingKeysError


@pytest.mark.parametrize(
    ("saved", "target"),
    [([1, 2], []), ([], [1, 2]), ((1,), ()), ((), (1,)), ([], []), (None, []), ([], None), ({1}, set()), (3, ())],
)
def test_an_empty_list_is_a_value_like_another(saved: Any, target: Any, tmp_path: Path) -> None:
    save({"history": saved, "n": {"history": saved}}, str(tmp_path))
    state = {"history": target, "n": {"history": target}}
    load(state, str(tmp_path))
    assert state == {"history": saved, "n": {"history": saved}}
    assert type(state["history"]) is type(saved)


# -- row 15: load, go on, save, load ----------------------------------------------------------------------------------


def train_on(context: RankContext, directory: str) -> None:
    array = np.arange(12.0).reshape(6, 2)
    state: dict[str, Any] = {"w": cut(array, 2, context.rank), "m": [np.zeros(4), (np.ones(2), 1)], "step": 0}
    save(state, directory)
    arrays = [*state["w"].arrays, state["m"][0], state["m"][1][0]]
    for step in range(1, 4):
        with together(context):
            load(state, directory)
            now = [*state["w"].arrays, state["m"][0], state["m"][1][0]]
            assert all(one is other for one, other in zip(arrays, now, strict=True))
            assert state["step"] == state["m"][1][1] - 1 == step - 1
            for array in arrays:
                array += step
        state["step"], state["m"] = step, [state["m"][0], (state["m"][1][0], step + 1)]
        with together(context):
            save(state, directory)
        expected = [np.copy(array) for array in arrays]
        for array in arrays:
            array[...] = -1
        with together(context):
            load(state, directory)
            for array, value in zip(arrays, expected, strict=True):
                np.testing.assert_array_equal(array, value)


def test_after_a_load_the_arrays_are_the_same_objects_and_the_next_save_has_their_new_values(tmp_path: Path) -> None:
    run_ranks(train_on, 2, str(tmp_path))


# -- row 16: keys and shapes that don't fit ---------------------------------------------------------------------------

STORED: dict[str, Any] = {
    "w": np.arange(32.0).reshape(4, 8),
    "step": 3,
    "only stored": np.arange(5),
    "nested": {"a": 1},
}
MISFITS: dict[str, tuple[dict[str, Any], type[PlanningError], tuple[str, ...]]] = {
    "a missing key": ({"absent": 0}, MissingKeysError, ("'absent'",)),
    "ten missing keys": (
        {f"absent{i}": np.zeros(2) if i % 2 else i for i in range(10)}, MissingKeysError,
        ("10 keys", *(f"'absent{i}'" for i in range(10))),
    ),
    "a missing nested key": ({"nested": {"b": 1}}, MissingKeysError, ("'nested.b'",)),
    "another shape": ({"w": np.full((8, 4), -1.0)}, ShapeMismatchError, ("'w'", "(4, 8)", "(8, 4)")),
    "another rank": ({"w": np.full((4, 8, 1), -1.0)}, ShapeMismatchError, ("'w'", "(4, 8)", "(4, 8, 1)")),
    "a tensor for an int": ({"step": np.full((), -1)}, PlanningError, ("'step'", "tensor", "plain value")),
    "an int for a tensor": ({"w": 7}, PlanningError, ("'w'", "tensor", "int")),
    "another type": ({"w": np.full((4, 8), -1)}, DTypeMismatchError, ("'w'", "float64", "int64")),
}  # fmt: skip


def load_misfits(context: RankContext, directory: str) -> dict[str, Raised]:
    """Rank 1 asks for something that does not fit; the others for something good."""
    save(STORED, directory)
    found = {}
    for name, (wrong, _, _) in MISFITS.items():
        target: dict[str, Any] = {"w": np.full((4, 8), -1.0), "step": -1, **(wrong if context.rank == 1 else {})}
        before = {key: np.copy(value) if isinstance(value, np.ndarray) else value for key, value in target.items()}
        with together(context):
            found[name] = error_of(load, target, directory)
            for key, value in before.items():
                np.testing.assert_array_equal(target[key], value)
    return found


def test_what_does_not_fit_on_one_rank_is_one_error_on_all_and_touches_nothing(tmp_path: Path) -> None:
    results = run_ranks(load_misfits, 3, str(tmp_path))
    for name, (_, kind, texts) in MISFITS.items():
        assert the_error([result[name] for result in results], "rank 1", *texts) is kind, name


def load_partly(context: RankContext, directory: str) -> None:
    save(STORED, directory)
    target: dict[str, Any] = {"w": np.full((4, 8), -1.0), "absent": np.full(2, -1), "also": {"absent": "kept"}}
    with together(context):
        load(target, directory, planner=StandardLoadPlanner(allow_partial_load=True))
        np.testing.assert_array_equal(target["w"], STORED["w"])
        assert target["absent"].tolist() == [-1, -1]
        assert target["also"] == {"absent": "kept"}
        assert "only stored" not in target


def test_a_partial_load_keeps_what_the_checkpoint_lacks_and_ignores_what_it_has_more(tmp_path: Path) -> None:
    run_ranks(load_partly, 2, str(tmp_path))


# -- row 17: other element types --------------------------------------------------------------------------------------


BFLOAT16 = BY_NAME["bfloat16"]


def nearest_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Of the two neighbours the nearer, of equally near ones the even; by exact arithmetic."""
    found = []
    for value in values.reshape(-1).tolist():
        bits = int(np.float32(value).view(np.uint32))
        if value != value:
            found.append(-1)
            continue
        low, high = bits >> 16, (bits >> 16) + 1
        down, up = (abs(_from_bfloat16(code) - value) for code in (low, high))
        is_low = down < up or (down == up and low % 2 == 0) or bits & 0xFFFF == 0
        found.append(low if is_low else high)
    return np.array(found).reshape(values.shape)


def _from_bfloat16(code: int) -> float:
    """The value; one past the largest counts as if the exponents went on."""
    sign, magnitude = -1.0 if code >> 15 else 1.0, code & 0x7FFF
    if magnitude == 0x7F80:
        return sign * 2.0**128
    return sign * float(np.uint32(magnitude << 16).view(np.float32))


def load_other_types(context: RankContext, directory: str) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    floats = rng.standard_normal((6, 50)).astype(np.float32) * np.float32(10.0) ** rng.integers(-44, 38, (6, 50))
    floats[0, :8] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38, 1.00390625, 1.01171875]
    halves = rng.integers(0, 1 << 16, (6, 50), np.uint16)
    state: dict[str, Any] = {"f32": floats.astype(np.float32), "bf16": cut(halves, 2, context.rank, 0, BFLOAT16)}
    state |= {"i16": np.arange(-4, 4, dtype=np.int16), "flag": np.array([True, False])}
    save(state, directory)
    lossy = cut(np.zeros((6, 50), np.uint16), 2, context.rank, 1, BFLOAT16)
    lossless = cut(np.zeros((6, 50), np.float32), 2, context.rank, 1)
    found: dict[str, Any] = {}
    with heard_warnings() as lines, together(context):
        load({"f32": lossy, "bf16": lossless}, directory)
    found["warnings"] = lines
    mine = slice(25 * context.rank, 25 * context.rank + 25)
    expected = nearest_bfloat16(state["f32"][:, mine])
    same = lossy.arrays[0] == expected
    is_nan = (lossy.arrays[0] & 0x7FFF) > 0x7F80
    assert np.where(expected == -1, is_nan, same).all()
    wide = (halves[:, mine].astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(lossless.arrays[0], wide)
    found["into int"] = error_of(load, {"f32": np.full((6, 50), -1, np.int32)}, directory)
    exact = StandardLoadPlanner(cast="exact")
    found["exact"] = error_of(load, {"f32": np.zeros((6, 50))}, directory, planner=exact)
    with heard_warnings() as quiet, together(context):
        target: dict[str, Any] = {
            "f32": np.zeros((6, 50)),
            "i16": np.zeros(8, np.float32),
            "flag": np.full(2, 7, np.int8),
        }
        load(target, directory)
        np.testing.assert_array_equal(target["f32"], state["f32"].astype(np.float64))
        assert target["i16"].tolist() == list(range(-4, 4))
        assert target["flag"].tolist() == [1, 0]
        wrapped = np.zeros(8, np.uint8)
        load({"i16": wrapped}, directory, planner=StandardLoadPlanner(cast="any"))
        assert wrapped.tolist() == [252, 253, 254, 255, 0, 1, 2, 3]
    assert not quiet
    return found


def test_other_element_types_are_converted_reported_or_refused(tmp_path: Path) -> None:
    results = run_ranks(load_other_types, 2, str(tmp_path))
    for result in results:
        (line,) = result["warnings"]
        assert "f32" in line
        assert "float32" in line
        assert "bfloat16" in line
        assert "bf16:" not in line
    assert the_error([r["into int"] for r in results], "'f32'", "float32", "int32", "cast") is DTypeMismatchError
    assert the_error([r["exact"] for r in results], "'f32'", "float32", "float64", "exact") is DTypeMismatchError
