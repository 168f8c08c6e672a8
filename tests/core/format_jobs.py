"""What ranks save for the tests of the format: a state in which every kind of chunk occurs, and random ones."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

from dcp_core.box import Box
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.state_path import PerRank
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext
from tests.core.layouts import deal, irregular_cut
from tests.core.random_states import Tensor, Value, random_tree, saved_state
from tests.core.rank_jobs import save

Point = namedtuple("Point", "x y")
KeyPath = tuple[tuple[str, Any], ...]
"""Kind and key of each component, as `format_value_reader.decode_path` gives them."""

MEBIBYTE = 1 << 20
WORLD_SIZE = 4
REPLICATED = ("replicated",)


def keys(*path: Any) -> KeyPath:
    return tuple(("key", key) for key in path)


# -- one state --------------------------------------------------------------------------------------------------------


def global_arrays(version: int) -> dict[KeyPath, Any]:
    """Every tensor whose value all ranks share, by path."""
    rng = np.random.default_rng(version)
    tied = rng.standard_normal((3, 5)).astype(np.float32)
    return {
        keys("rows"): rng.standard_normal((1031, 3)).astype(np.float32),
        keys("columns"): rng.integers(-9, 9, (5, 22), dtype=np.int16),
        keys("patches"): rng.integers(0, 255, (9, 7, 5), dtype=np.uint8),
        keys("patches@0,0,0"): rng.integers(0, 255, (3,), dtype=np.uint8),
        keys("brain", 16): rng.integers(0, 1 << 16, (6, 3), dtype=np.uint16),
        keys("complex"): rng.standard_normal((8, 3)) + 1j * rng.standard_normal((8, 3)),
        keys("large"): rng.integers(0, 255, 3 * MEBIBYTE + 17, dtype=np.uint8),
        keys(*REPLICATED): rng.standard_normal((1500, 1001)),
        keys("scalar"): np.array(version + 0.5),
        keys("one byte"): np.array(version, dtype=np.int8),
        keys("none"): np.zeros((4, 0, 2), np.float16),
        (("key", "list"), ("list", 1), ("tuple", 0)): np.arange(version, version + 3, dtype=np.uint32),
        keys("tied", "z"): tied,
        keys("tied", "a"): tied,
    }


def objects(version: int) -> dict[KeyPath, Any]:
    """Every plain value that all ranks share, by path."""
    return {
        keys("step"): version,
        (("key", "list"), ("list", 0)): [1, (2.5, None)],
        keys("point"): Point(1, 2),
        keys("texts"): np.array(["a", "bc"]),
        keys("ordered", "b"): {"x", "y"},
    }


def state_of(rank: int, version: int) -> dict[str, Any]:
    arrays = global_arrays(version)
    values = objects(version)
    patches = irregular_cut(Random(7), (9, 7, 5), 13)

    def cut(path: KeyPath, boxes: list[Box], dtype: str | None = None) -> ShardedArray:
        return ShardedArray.cut(arrays[path], boxes, dtype or arrays[path].dtype.name)

    tied = arrays[keys("tied", "a")]
    return {
        "rows": cut(keys("rows"), even_boxes((1031, 3), WORLD_SIZE, rank)),
        "columns": cut(keys("columns"), even_boxes((5, 22), WORLD_SIZE, rank, dim=1)),
        "patches": cut(keys("patches"), deal(Random(8), patches, WORLD_SIZE)[rank]),
        "patches@0,0,0": arrays[keys("patches@0,0,0")],
        "brain": {16: cut(keys("brain", 16), even_boxes((6, 3), WORLD_SIZE, rank), "bfloat16")},
        "complex": cut(keys("complex"), even_boxes((8, 3), WORLD_SIZE, rank)),
        "large": cut(keys("large"), [Box.whole((3 * MEBIBYTE + 17,))] if rank == 1 else []),
        "replicated": arrays[keys(*REPLICATED)],
        "scalar": arrays[keys("scalar")],
        "one byte": arrays[keys("one byte")],
        "none": cut(keys("none"), []),
        "list": [values[("key", "list"), ("list", 0)], (arrays[("key", "list"), ("list", 1), ("tuple", 0)],)],
        "tied": {"z": tied, "a": tied},
        "step": version,
        "point": values[keys("point")],
        "texts": values[keys("texts")],
        "ordered": OrderedDict(b=values[keys("ordered", "b")]),
        "empty": {},
        "own": PerRank({"rank": rank}),
        "differs": np.array([rank, version]),
    }


def save_state(context: RankContext, directory: str, version: int, **options: Any) -> None:
    save(state_of(context.rank, version), directory, **options)


def save_alone(context: RankContext, directory: str, version: int) -> None:
    """Every rank for itself, with what it holds."""
    save(state_of(context.rank, version), directory, use_collectives=False, planner=StandardSavePlanner(False, True))


# -- random states ----------------------------------------------------------------------------------------------------


def save_random(context: RankContext, directory: str, seed: int, count: int) -> None:
    """Save random states of known seeds, each into a directory of its own; every other one over an older save."""
    for number in range(count):
        place = f"{directory}/{number}"
        if number % 2:
            save({"old": np.arange(5.0), "gone": "yes"}, place)
        planner = StandardSavePlanner(True, number % 3 != 0)
        state = saved_state(tree_of(seed, number), Random(number), context.world_size, context.rank)
        save(state, place, planner=planner)


def tree_of(seed: int, number: int) -> Any:
    return random_tree(Random(f"{seed} {number}"))


def leaves_by_path(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Tensor | Value]]:
    """The leaves of a random tree."""
    if isinstance(node, (Tensor, Value)):
        yield path, node
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from leaves_by_path(child, (*path, ("key", key)))
    else:
        kind = "list" if isinstance(node, list) else "tuple"
        for index, child in enumerate(node):
            yield from leaves_by_path(child, (*path, (kind, index)))
