"""Random states of numpy ranks: made of a seed, so that every rank, in every job, knows what should be where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from random import Random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box
from dcp_core.dtype import DTYPES, DType
from dcp_core.formats.objects import value_digest
from dcp_core.testing.numpy_ranks import ShardedArray
from tests.core.layouts import at, deal, random_cut, random_shape

Bits: TypeAlias = npt.NDArray[Any]
Place: TypeAlias = tuple[Any, ...]
KEYS: tuple[Any, ...] = ("a", "b", "a.b", 0, 1, "0", "a@0", "слой 1/w", "", 7, None, "__metadata__")
OBJECTS: tuple[Any, ...] = (
    None, True, 3, -(2**70), 0.1, float("nan"), 1j, "tëxt", b"\x00\xff", [1, [2, "x"]], (1, (2,)), {3, "s"},
    frozenset({1}), date(2024, 2, 29), np.float32(1.5), np.int64(7), np.array(["a", "bc"]), np.dtype("float32"),
)  # fmt: skip
GUARD = 0xA5


@dataclass(frozen=True, eq=False)
class Tensor:
    """A global tensor: its raw bits; cut into shards, or whole on every rank that has it."""

    bits: Bits
    dtype: DType
    is_sharded: bool


@dataclass(frozen=True, eq=False)
class Value:
    """A plain value."""

    value: Any


def random_bits(rng: Random, shape: tuple[int, ...], dtype: DType) -> Bits:
    """Any bit pattern: NaNs with payloads, infinities, subnormal numbers."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.frombuffer(rng.randbytes(count * dtype.itemsize), np.uint8)
    if dtype.name == "bool":
        raw = raw & np.uint8(1)
    return raw.copy().view(dtype.bits).reshape(shape)


def random_tree(rng: Random, depth: int = 3, width: int = 5) -> dict[Any, Any]:
    """Nested dicts, lists and tuples of `Tensor` and `Value`."""
    keys = rng.sample(KEYS, rng.randint(1, width))
    return {key: _random_node(rng, depth - 1) for key in keys}


def _random_node(rng: Random, depth: int) -> Any:
    kind = rng.random()
    if depth > 0 and kind < 0.25:
        return random_tree(rng, depth, 4)
    if depth > 0 and kind < 0.4:
        nodes = [_random_node(rng, depth - 1) for _ in range(rng.randint(0, 3))]
        nodes.append(_random_tensor(rng))  # else all of it is one value
        return nodes if rng.random() < 0.5 else tuple(nodes)
    return Value(rng.choice(OBJECTS)) if kind < 0.55 else _random_tensor(rng)


def _random_tensor(rng: Random) -> Tensor:
    dtype = rng.choice(DTYPES)
    is_sharded = dtype.numpy is None or rng.random() < 0.7
    shape = random_shape(rng, 3 if is_sharded else 2)
    return Tensor(random_bits(rng, shape, dtype), dtype, is_sharded)


NEVER, SAVING, ALWAYS = 0, 1, 2
"""When a rank may leave a leaf out: never (in a list), when it saves (the first of its dict), always."""


def leaves(node: Any, place: Place = (), droppable: int = NEVER) -> Iterator[tuple[Place, Any, int]]:
    """(place, leaf, when a rank may leave it out) of every leaf, in one order on all ranks."""
    if isinstance(node, (Tensor, Value)):
        yield place, node, droppable
    elif isinstance(node, dict):
        for number, (key, child) in enumerate(node.items()):
            yield from leaves(child, (*place, (type(key).__name__, key)), ALWAYS if number else SAVING)
    else:
        for index, child in enumerate(node):
            yield from leaves(child, (*place, index))


def build(node: Any, make: Callable[[Place, Any], Any], place: Place = ()) -> Any:
    """The same containers with what `make` gives for each leaf; in dicts, leaves of `ABSENT` are left out."""
    if isinstance(node, (Tensor, Value)):
        return make(place, node)
    if isinstance(node, dict):
        made = {key: build(child, make, (*place, (type(key).__name__, key))) for key, child in node.items()}
        return {key: child for key, child in made.items() if child is not ABSENT}
    items = [build(child, make, (*place, index)) for index, child in enumerate(node)]
    return items if isinstance(node, list) else tuple(items)


ABSENT = object()


def tensor_bytes(tree: Any) -> int:
    return sum(leaf.bits.nbytes for _, leaf, _ in leaves(tree) if isinstance(leaf, Tensor))


# -- what is saved ----------------------------------------------------------------------------------------------------


def saved_state(tree: Any, rng: Random, ranks: int, rank: int) -> dict[Any, Any]:
    """What one of `ranks` ranks holds of a tree; `rng` must be at the same place on all of them."""
    holdings: dict[Place, Any] = {}
    for place, leaf, droppable in leaves(tree):
        holders = set(rng.sample(range(ranks), rng.randint(1, ranks))) if droppable else set(range(ranks))
        layout = rng.randrange(1 << 30)
        if isinstance(leaf, Value):
            holdings[place] = leaf.value if rank in holders else ABSENT
            continue
        hands = deal(rng, random_cut(rng, leaf.bits.shape), ranks)
        memory = Random(layout + rank)
        if leaf.is_sharded:
            missing = droppable and not hands[rank] and rank not in holders
            anybody = any(hands) or 0 in holders  # an empty tensor needs one rank that has it
            holdings[place] = ABSENT if missing and anybody else _shards(memory, leaf, hands[rank])
        else:
            holdings[place] = strided(memory, leaf.bits)[0] if rank in holders else ABSENT
    state: dict[Any, Any] = build(tree, lambda place, leaf: holdings[place])
    return state


def _shards(rng: Random, tensor: Tensor, boxes: list[Box]) -> ShardedArray:
    arrays = [strided(rng, tensor.bits[at(box)])[0] for box in boxes]
    return ShardedArray(tensor.bits.shape, boxes, arrays, tensor.dtype.name)


def strided(rng: Random, array: Bits) -> tuple[Bits, Bits]:
    """A copy in memory of some other layout, and all of that memory."""
    kind = rng.randrange(4)
    if kind == 0 or array.ndim == 0:
        copy = array.copy()
        return copy, copy
    if kind == 1:
        copy = np.asfortranarray(array.copy())
        return copy, copy
    step = 2 if kind == 2 else -2
    memory = np.empty([2 * size + 3 for size in array.shape], array.dtype)
    memory.view(np.uint8)[...] = GUARD
    stop = [slice(1, 1 + 2 * size, 2) if step > 0 else slice(2 * size + 1, 1, -2) for size in array.shape]
    view = memory[tuple(stop)]
    view[...] = array
    return view, memory


# -- what is loaded ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Target:
    """A poisoned target of one rank, and what must be in it after a load."""

    state: dict[Any, Any]
    expected: dict[Place, Any]
    memories: list[tuple[Bits, Bits]]
    tree: Any

    def check(self) -> None:
        """Every element that was wanted is right, and nothing beside it was written."""
        found: dict[Place, Any] = {}
        build(self.tree, lambda place, leaf: found.setdefault(place, _at(self.state, place)))
        for place, (leaf, value) in self.expected.items():
            present = found[place]
            if isinstance(leaf, Value):
                assert value_digest(present) == value_digest(leaf.value), (place, present, leaf.value)
            elif isinstance(value, ShardedArray):
                assert present is value, place
                for box, array in zip(value.boxes, value.arrays, strict=True):
                    _check_bits(place, array, leaf.bits[at(box)])
            else:
                assert present is value, place
                _check_bits(place, value, leaf.bits)
        for view, memory in self.memories:
            untouched = memory.copy()
            untouched.view(np.uint8)[...] = GUARD
            mine = memory.copy()
            window = mine[_window(memory, view)]
            window[...] = untouched[_window(memory, view)]
            assert mine.tobytes() == untouched.tobytes(), "a load wrote beside its target"


def _window(memory: Bits, view: Bits) -> Any:
    starts_low = view.strides[0] > 0
    sizes = view.shape
    return tuple(slice(1, 1 + 2 * size, 2) if starts_low else slice(2 * size + 1, 1, -2) for size in sizes)


def _check_bits(place: Place, found: Bits, expected: Bits) -> None:
    same = np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(expected).tobytes()
    assert same, (place, found, expected)


def _at(state: Any, place: Place) -> Any:
    for step in place:
        key = step[1] if isinstance(step, tuple) else step
        if isinstance(state, dict) and key not in state:
            return ABSENT
        state = state[key]
    return state


def poisoned(bits: Bits) -> Bits:
    """Other bits in every element."""
    if bits.dtype == np.bool_:
        return np.logical_not(bits, out=np.empty_like(bits))
    flipped = np.invert(np.ascontiguousarray(bits).reshape(-1).view(np.uint8))
    return flipped.view(bits.dtype).reshape(bits.shape)


def wanted_state(tree: Any, rng: Random) -> Target:
    """A random target: any boxes of the sharded tensors, whole ones now and then, some keys left out."""
    values: dict[Place, Any] = {}
    expected: dict[Place, Any] = {}
    memories: list[tuple[Bits, Bits]] = []

    def memory_for(bits: Bits) -> Bits:
        view, memory = strided(rng, poisoned(bits))
        if memory is not view and view.size:
            memories.append((view, memory))
        return view

    for place, leaf, droppable in leaves(tree):
        if droppable == ALWAYS and rng.random() < 0.15:
            values[place] = ABSENT
            continue
        if isinstance(leaf, Value):
            values[place] = "poison"
        elif leaf.dtype.numpy is not None and rng.random() < (0.2 if leaf.is_sharded else 0.7):
            values[place] = memory_for(leaf.bits)
        else:
            boxes = _wanted_boxes(rng, leaf.bits.shape)
            arrays = [memory_for(leaf.bits[at(box)]) for box in boxes]
            values[place] = ShardedArray(leaf.bits.shape, boxes, arrays, leaf.dtype.name)
        expected[place] = (leaf, values[place])
    return Target(build(tree, lambda place, leaf: values[place]), expected, memories, tree)


def _wanted_boxes(rng: Random, shape: tuple[int, ...]) -> list[Box]:
    boxes = random_cut(rng, shape)
    chosen = rng.sample(boxes, rng.randint(0, len(boxes)))
    if 0 not in shape and rng.random() < 0.4:
        offsets = tuple(rng.randrange(size) for size in shape)
        chosen.append(Box(offsets, tuple(rng.randint(1, n - start) for n, start in zip(shape, offsets, strict=True))))
    return chosen
