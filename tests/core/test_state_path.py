"""Typed paths, their bytes and names, and walks through nested states."""

from __future__ import annotations

import copy
import math
import pickle
import random
import types
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_core.errors import CorruptError, DcpError, UnsupportedValueError
from dcp_core.key_codec import encode_key
from dcp_core.state_path import (
    MAX_DEPTH,
    PathKey,
    PerRank,
    StatePath,
    canonical_name,
    decode_path,
    encode_path,
    key_path,
    plain_name,
    plain_names,
    position,
    spell_names,
)
from dcp_core.state_tree import (
    check_settable,
    collect_stateful,
    expand_stateful,
    flatten,
    is_stateful,
    rebuild,
    set_value,
)


class Tensor:
    """Stands for a framework's tensor."""

    def __init__(self, name: str = "") -> None:
        self.name = name


class Pair(NamedTuple):
    first: Any
    second: Any


class Counter:
    """A Stateful object."""

    def __init__(self, state: Any = None, log: list[str] | None = None, name: str = "") -> None:
        self.state = {"count": 0} if state is None else state
        self.log = log
        self.name = name

    def state_dict(self) -> Any:
        if self.log is not None:
            self.log.append(self.name)
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def is_tensor(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


NASTY_STRINGS = ["", ".", "a.b", "a", "b", "1", "True", "None", "__metadata__", "$", '$["a"]', "@", "w", "w@0", "w@0,1"]
NASTY_STRINGS += ["\ud800", "\udc00", "\ud800\udc00", "\U00010000", "\\u0040", '"', "\\", "\n", "\0", "é", "x" * 500]
strings = st.sampled_from(NASTY_STRINGS) | st.text(st.characters(exclude_categories=()), max_size=6)
atoms = (
    strings
    | st.sampled_from(
        [0, 1, -1, 255, 256, -128, 2**63, -(2**64), 10**4000, True, False, None, 0.0, -0.0, 1.0, math.inf]
    )
    | st.integers()
    | st.floats(allow_nan=False)
    | st.binary(max_size=5)
)
keys = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
components = (
    keys.map(lambda key: PathKey("key", key))
    | st.integers(0, 300).map(lambda index: position("list", index))
    | st.integers(0, 300).map(lambda index: position("tuple", index))
)
paths = st.lists(components, max_size=5).map(tuple)


def exactly(value: Any) -> Any:
    """Something that is equal only for values of the same types and bits."""
    if isinstance(value, tuple):
        return "tuple", tuple(exactly(item) for item in value)
    return type(value), value, math.copysign(1, value) if isinstance(value, float) else None


# Paths


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, "1"), (1, 1.0), (0.0, -0.0), (0, False), (None, "None"), (b"a", "a"), ((1,), (True,)), ((), "()")],
)
def test_keys_of_different_types_or_bits_are_different_paths(one: Any, other: Any) -> None:
    assert PathKey("key", one) != PathKey("key", other)
    assert len({key_path(one), key_path(other)}) == 2
    assert encode_path(key_path(one)) != encode_path(key_path(other))
    assert canonical_name(key_path(one)) != canonical_name(key_path(other))


def test_a_list_position_a_tuple_position_and_an_int_key_are_different() -> None:
    found = [(PathKey("key", 2),), (position("list", 2),), (position("tuple", 2),), key_path((2,))]
    assert len(set(found)) == len({encode_path(path) for path in found}) == 4
    assert [canonical_name(path) for path in found] == ["$[2]", "$[#2]", "$[(2)]", "$[(2,)]"]
    assert [plain_name(path) for path in found] == ["2", "2", "2", "(2)"]


@given(paths)
def test_a_path_comes_back_from_its_bytes_with_exact_types(path: StatePath) -> None:
    decoded = decode_path(encode_path(path))
    assert decoded == path
    assert hash(decoded) == hash(path)
    assert [key.kind for key in decoded] == [key.kind for key in path]
    assert [exactly(key.value) for key in decoded] == [exactly(key.value) for key in path]
    assert pickle.loads(pickle.dumps(path)) == path


@given(paths, paths)
@example(key_path("a", "b"), key_path("a.b"))
@example(key_path("\ud800\udc00"), key_path("\U00010000"))
@example(key_path("@"), key_path("\\u0040"))
def test_bytes_and_canonical_names_are_injective(one: StatePath, other: StatePath) -> None:
    assert (one == other) == (encode_path(one) == encode_path(other))
    assert (one == other) == (canonical_name(one) == canonical_name(other))


@given(paths)
def test_a_canonical_name_is_unicode_without_an_at_sign(path: StatePath) -> None:
    name = canonical_name(path)
    assert name.startswith("$")
    assert "@" not in name
    name.encode()


@given(st.binary(max_size=40))
@example(b"L\x80\x00")
@example(b"s\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01")
@example(b"(\xff\xff\xff\xff\xff\xff\xff\xff\x7f")
@example(b"(\x01" * 20_000)
@example(b"N" * 20_000)
@example(b"f\x00\x00\x00\x00\x00\x00\xf8\x7f")
@example(b"i\x02\x01\x00")
def test_bytes_that_are_no_path_are_refused_and_others_are_canonical(blob: bytes) -> None:
    try:
        path = decode_path(blob)
    except CorruptError:
        return
    assert encode_path(path) == blob


@given(paths, st.data())
def test_a_path_cut_short_is_no_other_path_with_a_leftover(path: StatePath, data: st.DataObject) -> None:
    blob = encode_path(path)
    cut = data.draw(st.integers(0, len(blob)))
    try:
        found = decode_path(blob[:cut])
    except CorruptError:
        return
    assert found == path[: len(found)]


@given(st.lists(paths, max_size=4))
@example([key_path("x" * 126), key_path("x" * 127), key_path("x" * 128), key_path("é" * 64), key_path("ab", "x" * 126)])
@example([key_path(2**1023, -(2**63)), key_path("\ud800", "\udc00"), ()])
def test_plain_names_are_read_from_bytes_as_from_paths(found: list[StatePath]) -> None:
    assert plain_names(map(encode_path, found)) == [plain_name(path) for path in found]


@given(st.binary(max_size=40))
@example(b"s")
@example(b"s\x05ab")
@example(b"s\x02\xff\xff")
@example(b"i\x40\x01")
def test_names_of_bytes_that_are_no_path_are_refused_or_some_name(blob: bytes) -> None:
    try:
        (name,) = plain_names([blob])
    except CorruptError:
        return
    assert isinstance(name, str)


@given(keys)
def test_a_key_is_written_as_its_component_is(key: Any) -> None:
    assert encode_key(key) == PathKey("key", key).encoded


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "key", [Text("a"), np.int64(1), np.str_("a"), float("nan"), (1, float("nan")), frozenset(), object(), 1j, range(2)]
)
def test_a_key_that_no_path_can_hold_is_refused_with_its_place(key: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"'model\.inner': a mapping has a key of"):
        flatten({"model": {"inner": {key: 1}}}, is_tensor)


def test_tuple_keys_nested_too_deep_are_refused() -> None:
    key: Any = ()
    for _ in range(50_000):
        key = (key,)
    with pytest.raises(UnsupportedValueError, match="nested"):
        PathKey("key", key)


@pytest.mark.parametrize(("kind", "value"), [("list", -1), ("list", True), ("tuple", "0"), ("set", 0)])
def test_a_position_that_is_none_is_refused(kind: Any, value: Any) -> None:
    with pytest.raises(UnsupportedValueError, match="expected a position"):
        PathKey(kind, value)


# Names


def names_of(*wanted: StatePath) -> list[str]:
    return spell_names(list(wanted))


def test_without_collisions_names_are_the_keys_joined_by_dots() -> None:
    assert names_of(key_path("model", "layers.0.w"), (*key_path("opt"), position("list", 3), *key_path(7))) == [
        "model.layers.0.w",
        "opt.3.7",
    ]


def test_of_colliding_paths_the_shallowest_keeps_the_plain_name() -> None:
    assert names_of(key_path("a", "b"), key_path("a.b")) == ['$["a"]["b"]', "a.b"]
    assert names_of(key_path(1), key_path("1"), key_path(True)) == ["1", '$["1"]', "True"]
    assert names_of(key_path("x", "", "y"), key_path("x.", "y"), key_path("x", ".y")) == [
        '$["x"]["", "y"]'.replace(", ", "]["),
        '$["x."]["y"]',
        "x..y",
    ]


@pytest.mark.parametrize("name", ["", "$", "$[", '$["a"]', "__metadata__", "\ud800", "a\udfff"])
def test_reserved_and_unwritable_names_are_spelled_canonically(name: str) -> None:
    assert names_of(key_path(name)) == [canonical_name(key_path(name))]


def test_a_name_that_looks_like_a_chunk_of_another_is_spelled_canonically() -> None:
    assert names_of(key_path("w"), key_path("w@0,12"), key_path("w@x"), key_path("v@0")) == [
        "w",
        '$["w\\u00400,12"]',
        "w@x",
        "v@0",
    ]


@given(st.lists(paths, unique=True, max_size=12), st.randoms(use_true_random=False))
@example([key_path("a", "b"), key_path("a.b"), key_path('$["a"]["b"]')], random.Random(0))
def test_names_are_unique_writable_and_independent_of_order(found: list[StatePath], rng: random.Random) -> None:
    names = spell_names(found)
    assert len(set(names)) == len(names)
    assert "__metadata__" not in names
    assert all(names)
    for name in names:
        name.encode()
    shuffled = list(found)
    rng.shuffle(shuffled)
    assert dict(zip(shuffled, spell_names(shuffled), strict=True)) == dict(zip(found, names, strict=True))


@given(st.lists(paths, unique=True, max_size=12))
@example([key_path("_a"), key_path("__metadata__")])
@example([key_path("a"), key_path("$")])
@example([key_path("a"), key_path("")])
@example([key_path("a"), key_path("\n"), key_path("$[x")])
@example([key_path("a"), key_path("a@1")])
@example([key_path("a"), key_path("\ud800")])
def test_names_follow_the_rule_one_by_one(found: list[StatePath]) -> None:
    plain = [plain_name(path) for path in found]
    for path, name, given_name in zip(found, plain, spell_names(found), strict=True):
        rivals = [other for other in found if plain_name(other) == name]
        is_kept = min(rivals, key=lambda other: (len(other), encode_path(other))) == path
        is_odd = name in ("", "$", "__metadata__") or name.startswith("$[") or not is_writable(name)
        base, at, offsets = name.rpartition("@")
        is_chunk = bool(at) and base in plain and all(p.isascii() and p.isdigit() for p in offsets.split(","))
        assert given_name == (name if is_kept and not is_odd and not is_chunk else canonical_name(path))


def is_writable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@given(st.lists(paths, unique=True, max_size=12))
def test_no_chunk_key_of_one_name_is_another_name(found: list[StatePath]) -> None:
    names = set(spell_names(found))
    for name in names:
        base, at, offsets = name.rpartition("@")
        if at and offsets.replace(",", "0").isdigit() and not offsets.startswith(",") and offsets.isascii():
            assert base not in names or not all(part.isdigit() for part in offsets.split(","))


# Flatten


def flat(state: Mapping[Any, Any]) -> dict[str, Any]:
    return {canonical_name(path): value for path, value in flatten(state, is_tensor).leaves.items()}


def test_mappings_are_entered_and_leaves_keep_their_order() -> None:
    tensor = Tensor()
    found = flat({"b": {"x": tensor, 1: 2}, "a": types.MappingProxyType({"n": None})})
    assert list(found.items()) == [('$["b"]["x"]', tensor), ('$["b"][1]', 2), ('$["a"]["n"]', None)]


@pytest.mark.parametrize("leaf", [[1, 2], (1, [2, (3,)]), ["a", None, b"x"], [[[]]], [{1}, object]])
def test_a_list_of_plain_values_is_one_leaf(leaf: Any) -> None:
    assert flat({"a": leaf}) == {'$["a"]': leaf}


@pytest.mark.parametrize("reason", [Tensor(), np.zeros(2), {}, {"lr": 1}, Counter(), PerRank(3)])
def test_a_list_that_holds_more_than_plain_values_is_entered(reason: Any) -> None:
    found = flatten({"a": [1, ("x", [reason, 2])]}, is_tensor)
    names = [canonical_name(path) for path in (*found.leaves, *found.empty)]
    assert '$["a"][#0]' in names
    assert '$["a"][#1][(0)]' in names
    assert '$["a"][#1][(1)][#1]' in names
    assert any(name.startswith('$["a"][#1][(1)][#0]') for name in names)


def test_containers_are_recorded_with_their_kind_and_empty_ones_apart() -> None:
    state = {
        "o": OrderedDict(x=1),
        "d": defaultdict(list, k=[]),
        "l": [Tensor()],
        "n": Pair(Tensor(), ()),
        "t": (Tensor(), {}),
    }
    found = flatten(state, is_tensor)
    kinds = {plain_name(path): kind for path, kind in found.containers.items()}
    assert kinds == {
        "": "dict",
        "o": "OrderedDict",
        "d": "dict",
        "l": "list",
        "n": "namedtuple",
        "t": "tuple",
        "t.1": "dict",
    }
    assert {plain_name(path) for path in found.empty} == {"d.k", "n.1", "t.1"}
    assert {plain_name(path) for path in found.leaves} == {"o.x", "d.k", "l.0", "n.0", "n.1", "t.0"}


def test_an_empty_state_is_an_empty_root() -> None:
    found = flatten({}, is_tensor)
    assert (found.leaves, found.containers, found.empty) == ({}, {(): "dict"}, frozenset({()}))


def test_a_per_rank_value_is_a_leaf_whatever_it_holds() -> None:
    value = PerRank({"a": [Tensor()]})
    assert flat({"rng": value}) == {'$["rng"]': value}
    assert repr(PerRank(3)) == "PerRank(value=3)"
    assert PerRank(3) == PerRank(3)


def test_a_root_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="must be a mapping"):
        flatten([1], is_tensor)  # type: ignore[arg-type]  # the point of the test


def cycle_through_dict() -> dict[str, Any]:
    state: dict[str, Any] = {"a": {"t": Tensor()}}
    state["a"]["again"] = state["a"]
    return state


def cycle_through_list() -> dict[str, Any]:
    loop: list[Any] = [Tensor()]
    loop.append(loop)
    return {"a": loop}


def cycle_of_plain_lists() -> dict[str, Any]:
    loop: list[Any] = [1]
    loop.append((loop,))
    return {"a": loop}


def cycle_through_both() -> dict[str, Any]:
    inner: dict[str, Any] = {}
    inner["l"] = [(inner,)]
    return inner


@pytest.mark.parametrize("make", [cycle_through_dict, cycle_through_list, cycle_of_plain_lists, cycle_through_both])
def test_a_cycle_is_refused(make: Any) -> None:
    with pytest.raises(UnsupportedValueError, match="holds itself"):
        flatten(make(), is_tensor)


def test_one_container_in_two_places_is_no_cycle() -> None:
    shared = {"t": Tensor()}
    assert list(flat({"a": shared, "b": [shared, shared]})) == [
        '$["a"]["t"]',
        '$["b"][#0]["t"]',
        '$["b"][#1]["t"]',
    ]


@pytest.mark.parametrize("wrap", [lambda inner: {"k": inner}, lambda inner: [inner], lambda inner: (inner,)])
def test_nesting_without_end_is_refused_not_a_recursion_error(wrap: Any) -> None:
    for core in (Tensor(), 1):
        state: Any = core
        for _ in range(5000):
            state = wrap(state)
        with pytest.raises(UnsupportedValueError, match="nest more than"):
            flatten({"root": state}, is_tensor)
        while isinstance(state, (dict, list, tuple)) and state:  # freed level by level
            state = next(iter(state.values())) if isinstance(state, dict) else state[0]


def test_the_deepest_nesting_that_is_allowed_works_all_the_way() -> None:
    state: Any = {"k": Tensor()}
    for _ in range(MAX_DEPTH - 1):
        state = {"k": state}
    found = flatten(state, is_tensor)
    assert rebuild(found.leaves, found.containers) == state
    assert expand_stateful(state, is_tensor)[0] == state


@given(st.data())
def test_the_columns_of_a_flat_state_say_what_its_paths_say(data: st.DataObject) -> None:
    tree = st.recursive(
        st.none() | st.builds(Tensor) | st.builds(PerRank, st.none()),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        max_leaves=10,
    )
    found = flatten(data.draw(st.dictionaries(keys, tree, max_size=3)), is_tensor)
    assert [encode_path(path) for path in found.leaves] == list(found.paths)
    assert [plain_name(path) for path in found.leaves] == list(found.plain_names)
    assert all(one is other for one, other in zip(found.leaves.values(), found.values, strict=True))
    assert {encode_path(path): kind for path, kind in found.containers.items()} == found.kinds
    assert {encode_path(path) for path in found.empty} == found.hollow


class Twice(Mapping[str, int]):
    """A mapping that tells a key twice."""

    def __getitem__(self, key: str) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter(["a", "b", "a"])

    def __len__(self) -> int:
        return 3


def test_a_key_that_a_mapping_tells_twice_is_one_leaf() -> None:
    found = flatten(Twice(), is_tensor)
    assert (found.plain_names, found.values) == (("a", "b"), (2, 2))


# Rebuild

values = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
trees = st.recursive(
    values | st.builds(Tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3) | st.booleans(), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=15,
)
states = st.dictionaries(strings, trees, max_size=4)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            PathKey("key", a) == PathKey("key", b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def in_order(one: Any) -> Any:
    """Empty containers come last in a rebuilt mapping: sort all keys."""
    if isinstance(one, dict):
        return type(one)(sorted(((key, in_order(value)) for key, value in one.items()), key=lambda item: repr(item[0])))
    return type(one)([in_order(item) for item in one]) if isinstance(one, (list, tuple)) else one


@given(states)
def test_a_state_comes_back_as_nested_as_it_was(state: dict[Any, Any]) -> None:
    found = flatten(state, is_tensor)
    assert same(in_order(rebuild(found.leaves, found.containers)), in_order(state))
    needed = {path: kind for path, kind in found.containers.items() if path in found.empty or kind == "OrderedDict"}
    leaves = {decode_path(encode_path(path)): value for path, value in found.leaves.items()}
    assert same(in_order(rebuild(leaves, needed)), in_order(state))


def test_a_namedtuple_comes_back_as_a_tuple() -> None:
    found = flatten({"p": Pair({"a": 1}, 2)}, is_tensor)
    assert rebuild(found.leaves, found.containers) == {"p": ({"a": 1}, 2)}


@pytest.mark.parametrize(
    ("leaves", "containers", "reason"),
    [
        ([(position("list", 1),)], {}, "gap"),
        ([(position("list", 10**12),)], {}, "gap"),
        ([(position("list", 0),), (position("tuple", 1),)], {}, "of kind"),
        ([(position("list", 0),), key_path("a")], {}, "of kind"),
        ([key_path("a"), key_path("a", "b")], {}, "both a value and a container"),
        ([key_path("a")], {key_path("a"): "dict"}, "both a value and a container"),
        ([key_path("a", 1), key_path("a", True)], {}, "equal for Python"),
        ([key_path("a", "b")], {key_path("a"): "list"}, "of kind"),
        ([], {key_path("a"): "os.system"}, "of kind"),
        ([key_path(*["a"] * (MAX_DEPTH + 1))], {}, "components"),
        ([], {key_path(*["a"] * 100_000): "dict"}, "components"),
    ],
)
def test_paths_that_contradict_each_other_are_refused(
    leaves: list[StatePath], containers: dict[StatePath, str], reason: str
) -> None:
    with pytest.raises(CorruptError, match=reason):
        rebuild(dict.fromkeys(leaves, 0), containers)


@given(st.dictionaries(paths, st.integers(), max_size=6), st.dictionaries(paths, st.text(max_size=3), max_size=3))
def test_any_set_of_paths_nests_or_is_refused(leaves: dict[StatePath, int], containers: dict[StatePath, str]) -> None:
    try:
        rebuilt = rebuild(leaves, containers)
    except CorruptError:
        return
    if isinstance(rebuilt, dict) and leaves:
        assert len(flatten(rebuilt, lambda value: isinstance(value, int)).leaves) <= len(leaves)


# Set in place


def test_a_value_is_put_into_its_own_container() -> None:
    state: dict[str, Any] = {"a": [1, {"b": 2}], "c": {5: 0}}
    inner, mapping = state["a"], state["c"]
    set_value(state, (*key_path("a"), position("list", 1), *key_path("b")), 7)
    set_value(state, (*key_path("a"), position("list", 0)), 8)
    set_value(state, key_path("c", 5), 9)
    set_value(state, key_path("new"), 10)
    assert state == {"a": [8, {"b": 7}], "c": {5: 9}, "new": 10}
    assert state["a"] is inner
    assert state["c"] is mapping


def test_tuples_on_the_way_are_rebuilt_in_their_nearest_mutable_parent() -> None:
    state: dict[str, Any] = {"a": [(1, Pair(2, (3, 4)))]}
    holder = state["a"]
    path = (*key_path("a"), position("list", 0), position("tuple", 1), position("tuple", 1), position("tuple", 0))
    set_value(state, path, 30)
    assert state == {"a": [(1, Pair(2, (30, 4)))]}
    assert state["a"] is holder
    assert type(state["a"][0][1]) is Pair


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": 1}, ()),
        ({"a": 1}, key_path("a", "b")),
        ({"a": {}}, key_path("x", "b")),
        ({"a": [1]}, (*key_path("a"), position("list", 1))),
        ({"a": [1]}, (*key_path("a"), position("tuple", 0))),
        ({"a": (1,)}, (*key_path("a"), position("list", 0))),
        ((1,), (position("tuple", 0),)),
        ({"a": types.MappingProxyType({"b": 1})}, key_path("a", "b")),
        ({"a": types.MappingProxyType({"b": (1,)})}, (*key_path("a", "b"), position("tuple", 0))),
    ],
)
def test_a_place_that_is_not_there_or_cannot_change_is_refused(state: Any, path: StatePath) -> None:
    before = copy.deepcopy(state) if isinstance(state, tuple) else dict(state)
    with pytest.raises(UnsupportedValueError):
        set_value(state, path, 2)
    with pytest.raises(UnsupportedValueError):
        check_settable(state, path)
    assert state == before


@given(states, st.data())
def test_setting_one_leaf_changes_that_leaf_only(state: dict[Any, Any], data: st.DataObject) -> None:
    found = flatten(state, is_tensor)
    if not found.leaves:
        return
    path = data.draw(st.sampled_from(list(found.leaves)))
    check_settable(state, path)
    marker = Tensor("new")
    set_value(state, path, marker)
    again = flatten(state, is_tensor)
    assert again.leaves == {**found.leaves, path: marker}
    assert again.containers == found.containers


# Stateful


def test_stateful_objects_are_told_by_their_methods() -> None:
    class Half:
        def state_dict(self) -> None: ...

    class Raises:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert is_stateful(Counter())
    others: list[object] = [Counter, Half(), Raises(), 1, "x", None, {}]
    assert not any(is_stateful(value) for value in others)


def test_stateful_objects_are_called_in_one_order_whatever_the_insertion_order() -> None:
    objects = {name: Counter(name=name) for name in ("b", "a", "c.d", "c")}
    one = {"b": objects["b"], "a": [objects["a"]], "c": {"d": objects["c"]}, "c.d": objects["c.d"]}
    other = dict(reversed(one.items()))
    found = collect_stateful(one)
    assert found == collect_stateful(other)
    assert [plain_name(path) for path, _ in found] == ["a.0", "b", "c.d", "c.d"]


def test_expanding_replaces_objects_by_their_states_and_changes_nothing_of_the_users() -> None:
    log: list[str] = []
    momentum = {0: {"step": Tensor()}}
    optimizer = Counter({"state": momentum, "groups": [{"lr": 0.1}]}, log, "optimizer")
    model = Counter(OrderedDict(w=Tensor()), log, "model")
    state = {"z": (optimizer, Pair(1, model)), "plain": [1, 2], "n": {"k": (Tensor(),)}}
    expanded, called = expand_stateful(state, is_tensor)
    assert log == ["optimizer", "model"]
    assert expanded["z"] == (optimizer.state, Pair(1, model.state))
    assert type(expanded["z"][1]) is Pair
    assert expanded["plain"] is state["plain"]
    assert [entry.value for entry in called] == [optimizer, model]
    assert called[0].state_dict is expanded["z"][0]
    set_value(expanded, (*key_path("z"), position("tuple", 0), *key_path("state", 0, "step")), 5)
    set_value(expanded, (*key_path("n", "k"), position("tuple", 0)), 6)
    assert called[0].state_dict["state"] == {0: {"step": 5}}
    assert isinstance(momentum[0]["step"], Tensor)
    assert isinstance(state["n"]["k"][0], Tensor)  # type: ignore[index]  # a tuple
    assert state["z"] == (optimizer, Pair(1, model))


def test_attributes_of_a_module_state_survive_the_copy() -> None:
    state = OrderedDict(w=Tensor())
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]  # as torch does
    expanded, _ = expand_stateful({"m": Counter(state)}, is_tensor)
    assert expanded["m"] == state
    assert expanded["m"] is not state
    assert expanded["m"]._metadata == {"": {"version": 2}}


def test_stateful_objects_inside_a_state_are_opened_right_after_it() -> None:
    log: list[str] = []
    inner = Counter({"x": 1}, log, "inner")
    outer = Counter({"inner": [inner], "y": 2}, log, "outer")
    last = Counter({}, log, "last")
    expanded, called = expand_stateful({"b": last, "a": outer}, is_tensor)
    assert expanded == {"b": {}, "a": {"inner": [{"x": 1}], "y": 2}}
    assert log == ["outer", "inner", "last"]
    assert [(plain_name(path), value.name) for path, value, _ in called] == [
        ("a.inner.0", "inner"),
        ("a", "outer"),
        ("b", "last"),
    ]
    assert called[0].state_dict is expanded["a"]["inner"][0]
    assert outer.state == {"inner": [inner], "y": 2}


def test_objects_that_hold_each_other_are_refused() -> None:
    one, other = Counter({}), Counter({})
    one.state["other"], other.state["one"] = other, one
    with pytest.raises(UnsupportedValueError, match="holds itself"):
        expand_stateful({"one": one}, is_tensor)


@pytest.mark.parametrize("bad", [5, [1], Tensor()])
def test_a_state_dict_that_is_no_mapping_is_refused(bad: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"'model': .*Counter.state_dict\(\) returned a .*, expected"):
        expand_stateful({"model": Counter(bad)}, is_tensor)


def test_what_the_users_state_dict_raises_comes_through() -> None:
    def call(path: StatePath, value: Any) -> object:
        raise KeyError(plain_name(path))

    with pytest.raises(KeyError, match="model"):
        expand_stateful({"model": Counter()}, is_tensor, call)


@given(states)
def test_without_stateful_objects_expanding_copies(state: dict[Any, Any]) -> None:
    expanded, called = expand_stateful(state, is_tensor)
    assert called == []
    assert same(expanded, state)
    assert expanded is not state


def test_errors_are_ours() -> None:
    assert issubclass(CorruptError, DcpError)
    assert issubclass(UnsupportedValueError, TypeError)


def test_an_int_key_too_long_to_print_in_decimal_has_names() -> None:
    path = key_path(10**5000, (10**5000,))
    assert decode_path(encode_path(path)) == path
    assert plain_name(path).startswith("0x")
    assert canonical_name(path).startswith("$[0x")
