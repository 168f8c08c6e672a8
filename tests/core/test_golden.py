"""Checkpoints that older versions wrote load for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from dcp_core.api import load, read
from dcp_core.dtype import DTYPES
from dcp_core.state_path import PerRank
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.golden.make_golden import WORLD_SIZE, bits_of, state_of

GOLDEN = Path(__file__).parent.parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name.startswith("v"))


def _poison(value: Any) -> Any:
    """The same structure with other values."""
    if isinstance(value, ShardedArray):
        for array in value.arrays:
            array.view(np.uint8 if array.itemsize == 1 else array.dtype)[...] = 1
        return value
    if isinstance(value, dict):
        return type(value)((key, _poison(item)) for key, item in value.items())
    if isinstance(value, list):
        return [_poison(item) for item in value]
    if isinstance(value, np.ndarray):
        return np.full_like(value, 99)
    return PerRank("poison") if isinstance(value, PerRank) else "poison"


def _assert_equal(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, ShardedArray):
        for ours, theirs in zip(found.arrays, expected.arrays, strict=True):
            assert ours.tobytes() == theirs.tobytes(), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            _assert_equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        for position, value in enumerate(expected):
            _assert_equal(found[position], value, f"{where}.{position}")
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, where
        assert found.tobytes() == expected.tobytes(), where
    else:
        assert type(found) is type(expected), where
        assert found == expected, where


def _load(context: RankContext, directory: str, left_out: tuple[str, ...]) -> None:
    expected = state_of(context.rank, context.world_size)
    target = _poison(state_of(context.rank, context.world_size))
    for key in left_out:
        del expected[key], target[key]
    load(target, checkpoint_id=directory, adapter=NumpyRankAdapter(), timeout_seconds=30)
    if context.world_size != WORLD_SIZE:
        expected["differs"] = np.array([0], dtype=np.int32)
    _assert_equal(target, expected, "state")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_checkpoint_loads_bit_for_bit_in_its_own_world(version: str) -> None:
    run_ranks(_load, WORLD_SIZE, str(GOLDEN / version), ())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_golden_checkpoint_loads_bit_for_bit_in_another_world(version: str, world_size: int) -> None:
    run_ranks(_load, world_size, str(GOLDEN / version), ("own",))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_tensor_of_a_golden_checkpoint_can_be_read_alone(version: str) -> None:
    for dtype in DTYPES:
        found = read(GOLDEN / version, f"types.{dtype.name}")
        assert found.tobytes() == bits_of(dtype, (5, 3)).tobytes()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_data_files_of_a_golden_checkpoint_open_with_plain_safetensors(version: str) -> None:
    with safe_open(GOLDEN / version / "_rank0_.safetensors", framework="np") as file:
        assert file.metadata()["dcp.format"] == "1"
        found = file.get_tensor("types.float32")
    assert np.array_equal(found.view(np.uint8), bits_of(DTYPES[11], (5, 3))[:3].view(np.uint8))


def test_version_1_is_among_the_golden_checkpoints() -> None:
    assert "v1" in VERSIONS
