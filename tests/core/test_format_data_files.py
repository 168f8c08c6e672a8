"""The second reader, written from docs/reference/format.md alone, against whole checkpoints that ranks saved."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.api import save
from dcp_core.box import Box
from dcp_core.dtype import DTYPES
from dcp_core.formats.objects import encode_value, needs_pickle
from dcp_core.state_path import encode_path, key_path, spell_names
from dcp_core.testing.ranks import run_ranks
from tests.core import format_value_reader as values_by_the_page
from tests.core.format_data_reader import Checkpoint
from tests.core.format_jobs import (
    MEBIBYTE,
    REPLICATED,
    WORLD_SIZE,
    global_arrays,
    keys,
    leaves_by_path,
    objects,
    save_alone,
    save_random,
    save_state,
    tree_of,
)
from tests.core.format_reader import TYPES, Tensor
from tests.core.format_records import DeviationError
from tests.core.format_value_reader import Pickled, decode_path, decode_value
from tests.core.layouts import at
from tests.core.random_states import Tensor as RandomTensor
from tests.core.test_objects import EXACT, Color, Config, Frozen, exactly, values
from tests.golden.make_golden import bits_of, state_of

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def tensor_at(checkpoint: Checkpoint, path: Any, rank: int = -1) -> Tensor:
    """The tensor of a path; keys are told apart by their type too."""
    (found,) = (
        tensor
        for tensor in checkpoint.description.tensors
        if repr(decode_path(tensor.path)) == repr(path) and tensor.rank == rank
    )
    return found


def value_at(checkpoint: Checkpoint, path: Any, rank: int = -1) -> Any:
    (found,) = (
        stored
        for stored in checkpoint.description.objects
        if repr(decode_path(stored.path)) == repr(path) and stored.rank == rank
    )
    return checkpoint.value(found)


def assert_is(checkpoint: Checkpoint, tensor: Tensor, expected: Any, type_name: str) -> None:
    assert TYPES[tensor.dtype].name == type_name
    assert tensor.shape == expected.shape
    assert checkpoint.bits(tensor).tobytes() == np.ascontiguousarray(expected).tobytes(), tensor.name


def assert_nothing_else_is_there(checkpoint: Checkpoint, directory: Path) -> None:
    named = [file.name(checkpoint.suffix) for file in checkpoint.description.files]
    assert sorted(path.name for path in directory.iterdir()) == sorted([*named, ".metadata"])


def assert_is_named_by_the_rule(checkpoint: Checkpoint) -> None:
    stored = [(entry.path, entry.name) for entry in checkpoint.description.tensors]
    stored += [(entry.path, entry.name) for entry in checkpoint.description.objects]
    names = dict(stored)
    assert list(names.values()) == values_by_the_page.spell_names(list(names))
    assert all(names[path] == name for path, name in stored)


def assert_holds(checkpoint: Checkpoint, version: int) -> None:
    """Everything that `format_jobs.state_of` gives the ranks, and no more."""
    arrays, plain = global_arrays(version), objects(version)
    for path, array in arrays.items():
        type_name = "bfloat16" if path == keys("brain", 16) else array.dtype.name
        assert_is(checkpoint, tensor_at(checkpoint, path), array, type_name)
    for path, value in plain.items():
        if path != keys("point"):
            assert exactly(value_at(checkpoint, path)) == exactly(value)
    for rank in range(WORLD_SIZE):
        assert value_at(checkpoint, keys("own"), rank) == {"rank": rank}
        differs = np.array([rank, version])
        assert_is(checkpoint, tensor_at(checkpoint, keys("differs"), rank), differs, differs.dtype.name)
    assert len(checkpoint.description.tensors) == len(arrays) + WORLD_SIZE
    assert len(checkpoint.description.objects) == len(plain) + WORLD_SIZE


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint, Path]:
    """What two saves into one directory left there, after the first and after the second."""
    directory = tmp_path_factory.mktemp("twice") / "checkpoint"
    run_ranks(save_state, WORLD_SIZE, str(directory), 1)
    first = Checkpoint.read(directory)
    assert_nothing_else_is_there(first, directory)
    run_ranks(save_state, WORLD_SIZE, str(directory), 2)
    return first, Checkpoint.read(directory), directory


def test_every_tensor_and_value_that_ranks_saved_is_read(saved_twice: tuple[Checkpoint, Checkpoint, Path]) -> None:
    assert_holds(saved_twice[0], 1)
    assert saved_twice[0].suffix == ""


def test_so_are_those_of_a_save_over_a_checkpoint(saved_twice: tuple[Checkpoint, Checkpoint, Path]) -> None:
    _, second, directory = saved_twice
    assert_holds(second, 2)
    assert second.suffix == f".{second.save_id}"
    assert_nothing_else_is_there(second, directory)


def test_that_state_has_every_kind_of_chunk(saved_twice: tuple[Checkpoint, Checkpoint, Path]) -> None:
    checkpoint = saved_twice[0]
    lengths = [chunk.stop - chunk.start for file in checkpoint.tensor_files.values() for chunk in file.chunks]
    assert any(length % 8 for length in lengths)
    assert max(lengths) > 3 * MEBIBYTE
    assert len(tensor_at(checkpoint, keys(*REPLICATED)).boxes) > 1
    assert max(Counter(tensor_at(checkpoint, keys("patches")).files).values()) > 1
    tied = [tensor_at(checkpoint, keys("tied", name)) for name in "az"]
    assert (tied[0].files, tied[0].byte_offsets) == (tied[1].files, tied[1].byte_offsets)
    nesting = {decode_path(path): kind for path, kind in checkpoint.description.nesting.items()}
    assert nesting == {keys("ordered"): "OrderedDict", keys("empty"): "dict"}


def test_a_pickled_object_is_left_as_it_is(saved_twice: tuple[Checkpoint, Checkpoint, Path]) -> None:
    assert isinstance(value_at(saved_twice[0], keys("point")), Pickled)


@pytest.mark.parametrize("seed", range(2))
def test_random_states_are_read_back_whole(seed: int, tmp_path: Path) -> None:
    rounds = 20
    run_ranks(save_random, 3, str(tmp_path), seed, rounds)
    for number in range(rounds):
        directory = tmp_path / str(number)
        checkpoint = Checkpoint.read(directory)
        assert_nothing_else_is_there(checkpoint, directory)
        leaves = list(leaves_by_path(tree_of(seed, number)))
        for path, leaf in leaves:
            if isinstance(leaf, RandomTensor):
                assert_is(checkpoint, tensor_at(checkpoint, path), leaf.bits, leaf.dtype.name)
            else:
                assert exactly(value_at(checkpoint, path)) == exactly(leaf.value)
        assert_is_named_by_the_rule(checkpoint)
        assert len(checkpoint.description.tensors) + len(checkpoint.description.objects) == len(leaves)


def test_a_checkpoint_of_many_tensors_is_read_group_by_group(tmp_path: Path) -> None:
    state = {f"t{number}": np.array([number] * (number % 3 + 1), np.int16) for number in range(5000)}
    save(state, checkpoint_id=tmp_path / "many", durable=False)
    checkpoint = Checkpoint.read(tmp_path / "many")
    found = {tensor.name: checkpoint.bits(tensor).tobytes() for tensor in checkpoint.description.tensors}
    assert found == {name: array.tobytes() for name, array in state.items()}
    assert checkpoint.description.groups > 1


def test_what_ranks_saved_each_for_itself_is_read(tmp_path: Path) -> None:
    run_ranks(save_alone, WORLD_SIZE, str(tmp_path), 3)
    whole = global_arrays(3)
    for rank in range(WORLD_SIZE):
        checkpoint = Checkpoint.read(tmp_path, f"{rank}.metadata")
        assert checkpoint.description.strings["rank"] == str(rank)
        assert {file.rank for file in checkpoint.description.files} == {rank}
        for tensor in checkpoint.description.tensors:
            expected = whole.get(decode_path(tensor.path), np.array([rank, 3]))
            for chunk, (offsets, sizes) in enumerate(tensor.boxes):
                part = expected[at(Box(offsets, sizes))]
                assert checkpoint.chunk(tensor, chunk).tobytes() == part.tobytes()


def test_the_golden_checkpoint_of_version_1_is_read_whole() -> None:
    checkpoint = Checkpoint.read(GOLDEN)
    state = state_of(0, 1)  # all of it, on one rank
    expected = {keys("types", dtype.name): (bits_of(dtype, (5, 3)), dtype.name) for dtype in DTYPES}
    for name in ("columns", "two boxes"):
        whole = np.zeros(state[name].global_shape, state[name].dtype.bits)
        state[name].put_into(whole.view(state[name].dtype.numpy))
        expected[keys(name)] = (whole, state[name].dtype.name)
    tied = state["tied"]["first"]
    expected[keys("tied", "first")] = expected[keys("tied", "second")] = (tied, "float32")
    expected[keys("empty")] = (np.zeros((0, 3)), "float64")
    expected[keys("scalar")] = (state["scalar"], "float64")
    expected[keys("replicated")] = (state["replicated"], "int64")
    expected[("key", "list"), ("list", 0)] = (state["list"][0], "uint8")
    for path, (bits, type_name) in expected.items():
        assert_is(checkpoint, tensor_at(checkpoint, path), bits, type_name)
    for rank in range(2):
        assert_is(checkpoint, tensor_at(checkpoint, keys("differs"), rank), np.array([rank], np.int32), "int32")
        assert value_at(checkpoint, keys("own"), rank) == {"rank": rank}
    assert len(checkpoint.description.tensors) == len(expected) + 2
    plain: dict[Any, Any] = {keys("a.b"): 1, keys("a", "b"): 2, keys("a", 5): "five", keys("a", True): None}
    plain |= {keys("plain", key): value for key, value in state["plain"].items()}
    plain[("key", "list"), ("list", 1), ("key", "x")] = 1.5
    for path, value in plain.items():
        assert exactly(value_at(checkpoint, path)) == exactly(value)
    assert len(checkpoint.description.objects) == len(plain) + 2
    assert_is_named_by_the_rule(checkpoint)


# -- values and paths -------------------------------------------------------------------------------------------------


@given(values)
def test_every_plain_value_is_read(value: Any) -> None:
    if not needs_pickle(value):
        assert exactly(decode_value(encode_value(value))) == exactly(value)


@pytest.mark.parametrize("value", EXACT, ids=lambda value: type(value).__name__)
def test_nasty_values_are_read(value: Any) -> None:
    assert exactly(decode_value(encode_value(value))) == exactly(value)


@pytest.mark.parametrize("value", [Config("a", {"b": 1j, "c": np.arange(3)}), Frozen((..., np.float32(2))), Color.BLUE])
def test_a_pickle_holds_what_the_page_says(value: Any) -> None:
    kind = type(value)
    (found,) = decode_value(encode_value([value]))
    again = found.load({(kind.__module__, kind.__qualname__): kind})
    assert repr(again) == repr(value)


path_keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary(max_size=3)
    | st.text(st.sampled_from("ab.@0,$[]\"\\é\ud800"), max_size=4) | st.sampled_from([-128, 2**1024, -(2**1024), ""]),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)  # fmt: skip


@given(st.lists(st.lists(path_keys, min_size=1, max_size=3), max_size=8))
def test_paths_are_read_and_named_as_the_page_says(listed: list[list[Any]]) -> None:
    paths = {encode_path(key_path(*path)): path for path in listed}
    for blob, path in paths.items():
        assert exactly(list(decode_path(blob))) == exactly(list(keys(*path)))
    names = spell_names([key_path(*path) for path in paths.values()])
    assert values_by_the_page.spell_names(list(paths)) == names


# -- damage -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_no_byte_of_a_checkpoint_can_change_unseen(data: st.DataObject) -> None:
    files = files_in(GOLDEN)
    name = data.draw(st.sampled_from(sorted(files)))
    damaged = bytearray(files[name])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DeviationError):
        Checkpoint(files | {name: bytes(damaged)})


def test_a_data_file_of_another_save_is_told_apart(tmp_path: Path) -> None:
    for name in ("one", "other"):
        run_ranks(save_state, WORLD_SIZE, str(tmp_path / name), 1)
    mixed = files_in(tmp_path / "one") | {"_rank2_.safetensors": (tmp_path / "other/_rank2_.safetensors").read_bytes()}
    with pytest.raises(DeviationError, match="the save's id"):
        Checkpoint(mixed)
