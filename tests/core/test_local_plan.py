"""From a state to the columns of the local plan: order, names, descriptions, and the table row by row."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_core.arrays import ArrayAccess, NumpyAdapter
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, DTYPES, DType, numpy_dtype
from dcp_core.errors import AdapterError, UnsupportedValueError
from dcp_core.formats.objects import needs_pickle, value_digest
from dcp_core.planning import leaves as leaves_module
from dcp_core.planning.leaves import LocalTensor, WholeShape, whole_shape, whole_tensor
from dcp_core.planning.local_plan import LocalState, read_state, special_containers, tabulate
from dcp_core.planning.local_table import (
    COMPARED,
    OBJECT,
    PER_RANK,
    PICKLED,
    RAGGED,
    TENSOR,
    LocalTable,
    decode_table,
    encode_table,
)
from dcp_core.planning.value_samples import tensor_digest
from dcp_core.state_path import PerRank, decode_path, encode_path, key_path, plain_name, position, spell_names

FLOAT32 = BY_NAME["float32"]
ACCESS = ArrayAccess()


class Held:
    """Stands for a framework's tensor that is described as it says."""

    def __init__(self, tensor: LocalTensor | Exception) -> None:
        self.tensor = tensor
        self.asked = 0

    def described(self) -> LocalTensor:
        self.asked += 1
        if isinstance(self.tensor, Exception):
            raise self.tensor
        return self.tensor


def describe(value: Any) -> LocalTensor | None:
    return value.described() if isinstance(value, Held) else None


# Leaves in plan order

names = st.text(st.sampled_from("ab.@$[_0\n\ud800\udfff\uffff\U00010000é"), max_size=4) | st.integers(0, 3)


@given(st.dictionaries(names, st.integers() | st.dictionaries(names, st.integers(), max_size=3), max_size=6))
@example({"\uffff": 1, "\U00010000": 2, "\ud800": 3, "é": 4})
@example({"a.b": 1, "a": {"b": 2}, "a.": {"": 3}})
def test_leaves_are_sorted_by_the_bytes_of_their_names_and_then_by_path(state: dict[Any, Any]) -> None:
    found = read_state(state, describe)
    paths = sorted(
        found.flat.leaves, key=lambda path: (plain_name(path).encode("utf-8", "surrogatepass"), encode_path(path))
    )
    assert [decode_path(path) for path in found.paths] == paths
    assert list(found.plain_names) == [plain_name(path) for path in paths]
    assert list(found.names) == spell_names(paths)
    assert list(found.values) == [found.flat.leaves[path] for path in paths]
    for rows in (list(found.leaves), found.leaves[:], [found.leaves[row] for row in range(-len(paths), 0)]):
        assert [(leaf.path, leaf.name, leaf.value, leaf.tensor) for leaf in rows] == list(
            zip(paths, found.names, found.values, found.tensors, strict=True)
        )


def test_a_tensor_in_several_places_is_described_once() -> None:
    held = Held(LocalTensor((), FLOAT32, (), (), ACCESS))
    found = read_state({"a": held, "b": [held, {"c": held}], "d": 1}, describe)
    assert held.asked == 1
    assert [tensor is held.tensor for tensor in found.tensors] == [True, True, True, False]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (UnsupportedValueError("it is sparse"), UnsupportedValueError, r"'b\.c': it is sparse"),
        (ValueError("odd"), AdapterError, r"'b\.c': describing a value of type .*Held failed: ValueError: odd"),
    ],
)
def test_the_first_tensor_that_cannot_be_described_is_named_by_its_key(error: Exception, kind: Any, words: str) -> None:
    fine = Held(LocalTensor((), FLOAT32, (), (), ACCESS))
    state = {"z": fine, "b": {"c": Held(error)}, "a": Held(TypeError("later in the state"))}
    with pytest.raises(kind, match=words):
        read_state(state, describe)


def test_containers_that_paths_do_not_tell_are_special() -> None:
    found = read_state({"d": {"x": {}}, "l": [], "n": [{}], "o": OrderedDict(p=1)}, describe)
    expected = [
        (key_path("d", "x"), "dict"),
        ((*key_path("n"), position("list", 0)), "dict"),
        (key_path("o"), "OrderedDict"),
    ]
    assert special_containers(found) == tuple(sorted((encode_path(path), kind) for path, kind in expected))


# The table

shapes = st.sampled_from([(), (2,), (2, 2)]) | st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> LocalTensor:
    shape = draw(shapes)
    box = st.builds(
        lambda parts: Box(tuple(part[0] for part in parts), tuple(part[1] for part in parts)),
        st.tuples(*(st.sampled_from([(0, 2), (1, 1), (2, 3)]) for _ in shape)),
    )
    boxes = tuple(draw(st.lists(box, max_size=3)))
    dtype = draw(st.sampled_from([FLOAT32, BY_NAME["int64"]]))
    views = tuple(np.full(box.sizes, draw(st.integers(0, 2)), dtype.bits) for box in boxes)
    return LocalTensor(
        shape, dtype, boxes, views, ACCESS, draw(st.sampled_from(["cpu", "npu"])),
        draw(st.none() | st.integers(0, 1)), draw(st.booleans()), draw(st.booleans()),
    )  # fmt: skip


def row_by_row(state: LocalState, compare: bool) -> list[tuple[Any, ...]]:
    """Kind, dtype, ndim, flags, shape, boxes, alias and digest of each leaf."""
    rows: list[tuple[Any, ...]] = []
    for row, (value, tensor) in enumerate(zip(state.values, state.tensors, strict=True)):
        if tensor is None:
            per_rank = isinstance(value, PerRank)
            flags = 0 if per_rank else COMPARED | PICKLED * needs_pickle(value)
            digest = value_digest(value) if compare and flags & COMPARED else 0
            rows.append((PER_RANK if per_rank else OBJECT, 0, 0, flags, (), (), row, digest))
            continue
        flags = COMPARED * (tensor.plain and tensor.device == "cpu") | RAGGED * tensor.ragged
        alias = row
        if tensor.storage is not None and tensor.boxes:
            mine = tensor.storage, tensor.boxes, tensor.global_shape, tensor.dtype
            same = [
                i
                for i, other in enumerate(state.tensors[:row])
                if other and (other.storage, other.boxes, other.global_shape, other.dtype) == mine
            ]
            alias = min(same, default=row)
        digest = tensor_digest(tensor) if compare and flags & COMPARED else 0
        shape = tensor.global_shape
        rows.append((TENSOR, tensor.dtype.code, len(shape), flags, shape, tensor.boxes, alias, digest))
    return rows


def rows_of(table: LocalTable) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    at = 0
    for row, ndim in enumerate(table.ndim.tolist()):
        assert (table.shape[row, ndim:] == 1).all()
        boxes = []
        for _ in range(int(table.boxes[row])):
            offsets, sizes = table.offsets[at], table.sizes[at]
            assert (offsets[ndim:] == 0).all()
            assert (sizes[ndim:] == 1).all()
            boxes.append(Box(tuple(offsets[:ndim].tolist()), tuple(sizes[:ndim].tolist())))
            at += 1
        low, high = table.values[row].tolist()
        rows.append(
            (int(table.kind[row]), int(table.dtype[row]), ndim, int(table.flags[row]),
             tuple(table.shape[row, :ndim].tolist()), tuple(boxes), int(table.alias[row]), low | high << 64)
        )  # fmt: skip
    assert at == len(table.offsets) == len(table.sizes)
    return rows


values = tensors().map(Held) | st.integers() | st.just({1: object}) | st.builds(PerRank, st.integers())


def tied(code: str, *boxes: Box, storage: int = 0) -> Held:
    views = tuple(np.zeros(box.sizes) for box in boxes)
    return Held(LocalTensor((2,), BY_NAME[code], boxes, views, ACCESS, "npu", storage))


HALF, WHOLE = Box((0,), (1,)), Box((0,), (2,))


@given(st.lists(values, max_size=8), st.booleans())
@example([tied("int8", WHOLE), tied("uint8", WHOLE), 5, tied("uint8", WHOLE), tied("int8", WHOLE)], False)
@example([tied("int8", HALF), tied("int8", WHOLE), tied("int8", HALF, storage=1), tied("int8", HALF)], False)
@example([tied("int8"), tied("int8")], False)
def test_the_table_says_of_each_leaf_what_is_known_of_it(found: list[Any], compare: bool) -> None:
    state = read_state({f"k{i}": value for i, value in enumerate(found)}, describe)
    table = tabulate(state, value_digest, needs_pickle, compare=compare)
    assert table.paths == state.paths
    assert rows_of(table) == row_by_row(state, compare)
    assert rows_of(decode_table(encode_table(table).payload)) == rows_of(table)


@pytest.mark.parametrize("dtype", ["u1", "<f2", "<f4", "<c16", "?"])
@pytest.mark.parametrize("shape", [(), (7,), (100_000,), (300, 701), (3, 5, 30_011)])
def test_values_of_any_strides_have_the_digest_of_their_elements(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(int(np.prod(shape))) % 997).reshape(shape).astype(dtype)
    spread = np.repeat(array[..., None], 2, axis=-1)[..., 0]
    assert spread.size == 1 or not spread.flags.c_contiguous
    tensor = NumpyAdapter().describe(array)
    assert tensor is not None
    digest = tensor_digest(tensor)
    for other in (spread, np.asfortranarray(array), array.copy()):
        described = NumpyAdapter().describe(other)
        assert described is not None
        assert tensor_digest(described) == digest
    changed = array.copy()
    changed.reshape(-1)[0] = not changed.reshape(-1)[0]
    described = NumpyAdapter().describe(changed)
    assert described is not None
    assert tensor_digest(described) != digest


# Cheap descriptions are the same values


def test_a_whole_tensor_made_the_cheap_way_is_like_any_other() -> None:
    array = np.zeros((2, 3), np.float32)
    made = whole_tensor(whole_shape((2, 3)), FLOAT32, array, ACCESS, "npu", "here")
    box = Box((0, 0), (2, 3))
    expected = LocalTensor((2, 3), FLOAT32, (box,), (array,), ACCESS, "npu", "here", plain=True)
    assert type(made) is LocalTensor
    assert {field.name: getattr(made, field.name) for field in fields(made)} == {
        field.name: getattr(expected, field.name) for field in fields(expected)
    }
    assert repr(made) == repr(expected)
    assert made.nbytes == 24
    with pytest.raises(FrozenInstanceError):
        made.plain = False  # type: ignore[misc]  # the point of the test
    assert copy.copy(made).views[0] is array
    assert pickle.loads(pickle.dumps(made)).boxes == (box,)


def test_a_whole_tensor_without_elements_holds_nothing() -> None:
    made = whole_tensor(whole_shape((2, 0)), FLOAT32, np.zeros((2, 0)), ACCESS, "cpu", "here")
    assert (made.global_shape, made.boxes, made.views, made.storage) == ((2, 0), (), (), None)


def test_more_shapes_than_are_remembered_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves_module, "_MOST_SHAPES", 2)
    for size in (*range(5), *range(5)):
        assert whole_shape((size, 2)) == WholeShape((size, 2), (Box.whole((size, 2)),) if size else ())


def test_dtypes_are_equal_by_code_and_carry_their_bits() -> None:
    assert len(set(DTYPES)) == len(DTYPES)
    for dtype in DTYPES:
        again: DType = pickle.loads(pickle.dumps(dtype))
        assert again == dtype
        assert hash(again) == hash(dtype)
        assert again.bits == dtype.bits
        assert dtype.bits.itemsize == dtype.itemsize
        assert dtype.bits.byteorder in "<|=" or np.dtype("=u2").str == ">u2"


def test_numpy_types_are_told_apart_each_time_they_are_asked_for() -> None:
    for _ in range(2):
        assert numpy_dtype(np.dtype(">i4")) == numpy_dtype(np.dtype("<i4")) == BY_NAME["int32"]
        for other in ("U3", "O", "datetime64[s]", "f4,i4", "V4", "longdouble"):
            assert numpy_dtype(np.dtype(other)) is None
