"""Plans that are used again: never a wrong one, and always when they could be."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core import api
from dcp_core.box import Box
from dcp_core.errors import ArgumentsDifferError, PlanningError, StorageError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.metadata import EVERY_RANK, Metadata
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.state_path import PerRank
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.random_states import Tensor, Value, build, random_bits, random_tree, saved_state, wanted_state
from tests.core.rank_jobs import Counter, counted_saves, error_of, heard_warnings, load, save, together

pytestmark = pytest.mark.timeout(120)

Array = npt.NDArray[Any]
MOST_BYTES = 200


def open_checkpoint(directory: str) -> Metadata:
    reader = FileSystemReader(directory)
    reader.initialize_reader()
    return reader.load_metadata()


def hits(counter: Counter, state: Any, directory: str, **options: Any) -> bool:
    """Save; was it a hit?"""
    save(state, directory, **options)
    return counter.was_hit


# -- what a hit costs -------------------------------------------------------------------------------------------------


def large_state(context: RankContext, value: float) -> dict[str, Any]:
    shape = (64, 3)
    boxes = even_boxes(shape, context.world_size, context.rank)
    return {
        "model": {f"layer{i}": ShardedArray.cut(np.full(shape, value + i), boxes) for i in range(300)},
        "optimizer": {"state": {i: {"step": np.float32(value), "buffer": np.full(3, value)} for i in range(300)}},
        "history": [value] * 50,
        "rng": np.full(624, context.rank, np.uint32),
    }


def save_large_states(context: RankContext, directory: str) -> list[tuple[str, int, int]]:
    with counted_saves() as counter:
        for number in range(3):
            save(large_state(context, float(number)), directory)
        assert not _stages(counter.saves[0]) == _stages(counter.saves[1]) == _stages(counter.saves[2])
        return [(record.stage, record.bytes_in, record.bytes_out) for record in counter.last]


def _stages(log: Any) -> list[str]:
    return [record.stage for record in log]


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_second_save_of_a_structure_takes_two_exchanges_of_200_bytes(ranks: int, tmp_path: Path) -> None:
    for log in run_ranks(save_large_states, ranks, str(tmp_path)):
        assert [stage for stage, _, _ in log] == ["save/agree", "save/commit"]
        assert max(max(bytes_in, bytes_out) for _, bytes_in, bytes_out in log) <= MOST_BYTES


def save_with_many_partners(context: RankContext, directory: str) -> tuple[int, bool]:
    """Rank 0 keeps one structure and gets to know many plans for it, since rank 1 changes."""
    with counted_saves() as counter:
        for number in [*range(7), 6]:
            state = {"same": np.arange(5.0)} if context.rank == 0 else {f"other{number}": np.arange(5.0)}
            save(state, directory)
        most = max(max(record.bytes_in, record.bytes_out) for log in counter.saves for record in (log[0], log[-1]))
        return most, counter.was_hit


def test_a_rank_that_knows_many_plans_still_sends_at_most_200_bytes(tmp_path: Path) -> None:
    for most, was_hit in run_ranks(save_with_many_partners, 2, str(tmp_path)):
        assert most <= MOST_BYTES
        assert was_hit


def save_in_turn(context: RankContext, directory: str) -> list[bool]:
    found = []
    with counted_saves() as counter:
        for number in range(4):
            boxes = even_boxes((8, 2), context.world_size, context.rank)
            model = {"w": ShardedArray.cut(np.full((8, 2), number), boxes, "int64")}
            optimizer = {"w": {"exp_avg": ShardedArray.cut(np.full((8, 2), -number), boxes, "int64"), "step": number}}
            found.append(hits(counter, {"model": model}, f"{directory}/model"))
            found.append(hits(counter, {"optimizer": optimizer}, f"{directory}/optimizer"))
            assert (api.read(f"{directory}/model", "model.w") == number).all()
            assert (api.read(f"{directory}/optimizer", "optimizer.w.exp_avg") == -number).all()
    return found


def test_model_and_optimizer_saved_in_turn_hit_from_the_second_round_on(tmp_path: Path) -> None:
    for found in run_ranks(save_in_turn, 3, str(tmp_path)):
        assert found == [False, False] + [True] * 6


# -- never a wrong plan -----------------------------------------------------------------------------------------------


def revalued(tree: Any, rng: Random) -> Any:
    """The same structure with other elements and values."""

    def change(place: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return Tensor(random_bits(rng, leaf.bits.shape, leaf.dtype), leaf.dtype, leaf.is_sharded)
        return Value([type(leaf.value).__name__, rng.random()]) if rng.random() < 0.5 else leaf

    return build(tree, change)


def save_structures_in_turn(context: RankContext, directory: str, seed: int, rounds: int) -> int:
    """Each rank's structure goes back and forth between versions, alone; values change with every save."""
    fixed = Random(seed)
    common = random_tree(fixed)
    own = {(rank, version): random_tree(fixed, 2, 3) for rank in range(context.world_size) for version in range(2)}
    layouts = [fixed.randrange(1 << 30) for _ in range(2)]
    known: list[Any] = []
    count = 0
    with counted_saves() as counter:
        for number in range(rounds):
            rng = Random(f"{seed} {number}")
            versions = [rng.randrange(2) if rng.random() < 0.4 else 0 for _ in range(context.world_size)]
            layout = layouts[rng.random() < 0.3]
            values = rng.randrange(1 << 30)
            shared = revalued(common, Random(values))
            stages = {
                f"stage{rank}": revalued(own[rank, version], Random(values + rank + 1))
                for rank, version in enumerate(versions)
            }
            state = {
                "common": saved_state(shared, Random(layout), context.world_size, context.rank),
                f"stage{context.rank}": saved_state(stages[f"stage{context.rank}"], Random(0), 1, 0),
            }
            with together(context):
                save(state, directory)
            combination = (tuple(versions), layout)
            if combination in known[-1:]:
                assert counter.was_hit
            count += counter.was_hit
            known.append(combination)
            with together(context):
                target = wanted_state({"common": shared, **stages}, Random(f"{values} {context.rank}"))
                load(target.state, directory)
                target.check()
                names = open_checkpoint(directory).source.names()
                assert sum(name.startswith("stage") for name in names) > 0
                assert not [name for name in names if name.startswith("stage") and int(name[5]) >= context.world_size]
    return count


@pytest.mark.parametrize(("seed", "ranks"), [(0, 2), (1, 3), (2, 4), (3, 3)])
def test_structures_in_turn_where_some_ranks_change_are_always_right(seed: int, ranks: int, tmp_path: Path) -> None:
    counts = run_ranks(save_structures_in_turn, ranks, str(tmp_path / "c"), seed, 40, timeout_seconds=100)
    assert counts[0] >= 8
    assert counts == [counts[0]] * ranks


def save_halves_of_other_plans(context: RankContext, directory: str) -> list[bool]:
    """A, B, A on rank 1 while rank 0 never changes: what it writes of `shared` depends on what rank 1 holds."""
    found, size = [], 300_000
    with counted_saves() as counter:
        for number, structure in enumerate("ABABBA"):
            shared = np.arange(number, size + number)
            state: dict[str, Any] = {"shared": ShardedArray.cut(shared, [Box((0,), (size,))])}
            if context.rank == 1 and structure == "B":
                state["own"] = np.arange(size, 0, -1) * number
            with together(context):
                found.append(hits(counter, state, directory))
            with together(context):
                np.testing.assert_array_equal(api.read(directory, "shared"), shared)
                names = list(open_checkpoint(directory).source.names())
                assert names == (["own", "shared"] if structure == "B" else ["shared"])
                if structure == "B":
                    np.testing.assert_array_equal(api.read(directory, "own"), np.arange(size, 0, -1) * number)
    return found


def test_a_rank_that_never_changed_does_not_keep_half_of_another_plan(tmp_path: Path) -> None:
    for found in run_ranks(save_halves_of_other_plans, 2, str(tmp_path)):
        assert found == [False, False, True, True, True, True]


def save_paths_in_turn(context: RankContext, directory: str) -> list[tuple[Any, Any]]:
    """Only the typed paths or the containers change, on rank 1 alone; names, shapes and bytes stay."""
    array = np.arange(3)
    versions: list[dict[Any, Any]] = [
        {"a": {"b": array}}, {"a.b": array}, {"a": OrderedDict({"b": array})}, {"a": {"b": array}, "none": {}},
        {"a": {"b": array}, "none": []}, {"a": [array]}, {"a": (array,)}, {"a": {0: array}},
    ]  # fmt: skip
    seen: dict[int, tuple[Any, Any]] = {}
    for version in [*range(len(versions)), *range(len(versions)), 3, 2, 1, 0]:
        with together(context):
            save(versions[version] if context.rank == 1 else {"same": np.zeros(2)}, directory)
        with together(context):
            source = open_checkpoint(directory).source
            names = source.names()
            tensors = [tensor.path for name in names for tensor in source.tensors(name)]
            paths = (*tensors, *(entry.path for name in names for entry in source.objects(name)))
            assert seen.setdefault(version, (paths, source.nesting)) == (paths, source.nesting), versions[version]
    return list(seen.values())


def test_a_cached_plan_never_brings_back_the_paths_or_containers_of_another_state(tmp_path: Path) -> None:
    found = run_ranks(save_paths_in_turn, 2, str(tmp_path))[0]
    for number, one in enumerate(found):
        assert one not in found[:number]


def save_tied_and_untied(context: RankContext, directory: str) -> None:
    def state(tied: bool, value: float) -> dict[str, ShardedArray]:
        boxes = even_boxes((6, 2), context.world_size, context.rank)
        first = ShardedArray.cut(np.full((6, 2), value), boxes)
        second = ShardedArray(first.global_shape, boxes, first.arrays)
        return {"embed": first, "head": second if tied else ShardedArray.cut(np.full((6, 2), -value), boxes)}

    for number, tied in enumerate([True, True, False, False, True, False, True]):
        with together(context):
            save(state(tied, number + 1.0), directory)
        with together(context):
            assert (api.read(directory, "embed") == number + 1).all()
            assert (api.read(directory, "head") == (number + 1 if tied else -number - 1)).all()
            files = open_checkpoint(directory).source.files
            assert int((files.nbytes - files.data_start).sum()) == (96 if tied else 192)


def test_names_that_were_tied_and_are_no_longer_are_stored_apart(tmp_path: Path) -> None:
    run_ranks(save_tied_and_untied, 3, str(tmp_path))


def save_on_changing_worlds(context: RankContext, directory: str) -> list[bool]:
    found = []
    with counted_saves() as counter:
        for number, ranks in enumerate([2, 4, 2, 3, 4, 2, 1, 1, 4]):
            with together(context):
                if context.rank < ranks:
                    boxes = even_boxes((12, 2), ranks, context.rank)
                    state = {"w": ShardedArray.cut(np.full((12, 2), number), boxes), "rank": PerRank(context.rank)}
                    save(state, directory, process_group=range(ranks))
                    if context.rank == 0:
                        found.append(counter.was_hit)
            with together(context):
                assert (api.read(directory, "w") == number).all()
                metadata = open_checkpoint(directory)
                assert metadata.world_size == ranks
                assert [entry.rank for entry in metadata.source.objects("rank")] == list(range(ranks))
    return found


def test_a_plan_serves_only_the_world_that_it_was_made_for(tmp_path: Path) -> None:
    found = run_ranks(save_on_changing_worlds, 4, str(tmp_path))[0]
    assert found == [False, False, True, False, True, True, False, True, True]


# -- when nothing is cached -------------------------------------------------------------------------------------------


def save_without_cache(context: RankContext, directory: str) -> dict[str, list[bool]]:
    def state(ragged: bool = False) -> dict[str, Any]:
        box = even_boxes((4,), context.world_size, context.rank)
        arrays = [np.full(part.sizes, 1.0) for part in box]
        return {"w": ShardedArray((4,), box, arrays, ragged=ragged and context.rank == 1), "x": 1}

    found = {}
    with counted_saves() as counter:

        def twice(state: Any, **options: Any) -> list[bool]:
            return [hits(counter, state, directory, **options) for _ in range(2)]

        found["cached"] = twice(state())
        api.clear_plan_cache()
        found["cleared"] = twice(state())
        found["off"] = twice(state(), planner=StandardSavePlanner(enable_plan_caching=False))
        found["other options"] = twice(state(), planner=StandardSavePlanner(remove_redundancy=False))
        found["back"] = twice(state())
        found["ragged"] = twice(state(ragged=True))
        if context.rank == 0:
            api.clear_plan_cache()
        found["cleared on one rank"] = twice(state())
    return found


def test_a_plan_is_made_anew_when_caching_is_off_cleared_or_impossible(tmp_path: Path) -> None:
    for found in run_ranks(save_without_cache, 2, str(tmp_path)):
        assert found == {
            "cached": [False, True],
            "cleared": [False, True],
            "off": [False, False],
            "other options": [False, True],
            "back": [True, True],
            "ragged": [False, False],
            "cleared on one rank": [False, True],
        }


class FailingWriter(FileSystemWriter):
    """Fails when it is told to write."""

    def execute_write(self, plan: Any, planner: Any) -> Any:
        raise StorageError("the disk is on fire")


class Writer(FileSystemWriter):
    """Writes."""


Writer.__qualname__ = FailingWriter.__qualname__  # so that the arguments of the ranks agree


def fail_to_save_first(context: RankContext, directory: str) -> list[bool]:
    state = {"w": ShardedArray.cut(np.arange(8.0), even_boxes((8,), context.world_size, context.rank))}
    writer = FailingWriter() if context.rank == 1 else Writer()
    with together(context):
        kind, text = error_of(save, state, directory, storage_writer=writer)
    assert kind is StorageError
    assert "rank 1" in text
    assert "on fire" in text
    with together(context):
        assert not list(Path(directory).glob("_rank*"))
    with counted_saves() as counter:
        return [hits(counter, state, directory) for _ in range(2)]


def test_a_plan_is_cached_only_after_its_save_was_committed(tmp_path: Path) -> None:
    assert run_ranks(fail_to_save_first, 2, str(tmp_path)) == [[False, True]] * 2


def save_with_other_options(context: RankContext, directory: str) -> tuple[type[BaseException], str]:
    planner = StandardSavePlanner(save_to_minimum_rank=context.rank == 1)
    for _ in range(2):
        found = error_of(save, {"x": 1}, directory, planner=planner)
    return found


def test_planners_that_differ_between_ranks_are_an_error_on_all(tmp_path: Path) -> None:
    found = run_ranks(save_with_other_options, 3, str(tmp_path))
    assert found == [found[0]] * 3
    kind, text = found[0]
    assert kind is ArgumentsDifferError
    assert "planner" in text
    assert "rank 1" in text


# -- values that differ between ranks (row 13) ------------------------------------------------------------------------


def differing_state(context: RankContext, number: int, differs: bool) -> dict[str, Any]:
    """RNG states and the like; with `differs` every rank has its own."""
    own = 100 * number + (context.rank if differs else 0)
    return {
        "rng": {"numpy": np.full(624, own, np.uint32), "python": (3, (own, own + 1), None)},
        "loader": {"position": own},
        "bytes": np.frombuffer(bytes([own % 251] * 16), np.uint8).copy(),
        "scalar": np.array(own, np.int64),
        "step": number,
        "w": ShardedArray.cut(np.full((5, 2), number), even_boxes((5, 2), context.world_size, context.rank), "int64"),
    }


def blank_state(context: RankContext) -> dict[str, Any]:
    return {
        "rng": {"numpy": np.zeros(624, np.uint32), "python": None},
        "loader": {"position": None},
        "bytes": np.zeros(16, np.uint8),
        "scalar": np.array(-1, np.int64),
        "step": None,
        "w": ShardedArray.cut(np.full((5, 2), -1), even_boxes((5, 2), context.world_size, context.rank), "int64"),
    }


DIFFERING = ("bytes", "loader.position", "rng.numpy", "rng.python", "scalar")


def assert_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_state(found[key], value)
        elif isinstance(value, ShardedArray):
            for one, other in zip(found[key].arrays, value.arrays, strict=True):
                np.testing.assert_array_equal(one, other)
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[key], value)
        else:
            assert (found[key], type(found[key])) == (value, type(value))


def save_differing(context: RankContext, directory: str, differs: list[bool]) -> tuple[list[bool], list[list[str]]]:
    """Save several times; after each, everything must come back as this rank had it."""
    found, heard = [], []
    for number, own_values in enumerate(differs):
        state = differing_state(context, number, own_values)
        with counted_saves() as counter, heard_warnings() as lines, together(context):
            found.append(hits(counter, state, directory))
        heard.append(list(lines))
        with together(context):
            target = blank_state(context)
            load(target, directory)
            assert_state(target, state)
    return found, heard


def check_divergence_warning(lines: list[str], ranks: int) -> None:
    (line,) = lines
    assert all(line.count(repr(key)) == 1 for key in DIFFERING)
    assert ", ".join(str(rank) for rank in range(ranks)) in line
    assert "PerRank" in line


def test_values_that_differ_at_the_first_save_are_kept_for_each_rank(tmp_path: Path) -> None:
    results = run_ranks(save_differing, 3, str(tmp_path), [True, True, True, False])
    for found, _ in results:
        assert found == [False, True, True, True]
    check_divergence_warning(results[0][1][0], 3)
    assert not any(results[0][1][1:])
    source = open_checkpoint(str(tmp_path)).source
    for key in DIFFERING:
        ranks = [tensor.rank for tensor in source.tensors(key)] + [entry.rank for entry in source.objects(key)]
        assert ranks == [0, 1, 2]
    assert [entry.rank for entry in source.objects("step")] == [EVERY_RANK]


def test_values_that_differ_only_from_a_later_save_on_are_noticed_in_spite_of_a_hit(tmp_path: Path) -> None:
    results = run_ranks(save_differing, 3, str(tmp_path), [False, False, True, True, False, True])
    for found, _ in results:
        assert found == [False, True, False, True, True, True]
    heard = results[0][1]
    assert not heard[0] + heard[1]
    check_divergence_warning(heard[2], 3)
    assert not any(heard[3:])


def save_where_one_rank_differs(context: RankContext, directory: str) -> list[bool]:
    """Each key differs on another rank, at another save."""
    found = []
    for number in range(8):
        state = {f"k{i}": [i, i == number and context.rank == i % context.world_size] for i in range(8)}
        with counted_saves() as counter, together(context):
            found.append(hits(counter, state, directory))
        with together(context):
            target: dict[str, Any] = dict.fromkeys(state)
            load(target, directory)
            assert target == state
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_rank_that_differs_in_one_value_is_noticed_each_time(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(save_where_one_rank_differs, ranks, str(tmp_path)):
        assert found == [False] * 8


def load_in_another_world(context: RankContext, directory: str, number: int) -> list[str]:
    target = blank_state(context)
    with heard_warnings() as lines, together(context):
        load(target, directory)
    expected = differing_state(RankContext(0, context.world_size, context.channel_directory), number, True)
    expected["w"] = differing_state(context, number, True)["w"]
    assert_state(target, expected)
    return lines


@pytest.mark.parametrize("loaders", [1, 2, 5])
def test_in_another_world_size_values_that_differed_are_the_lowest_ranks_with_a_warning(
    loaders: int, tmp_path: Path
) -> None:
    run_ranks(save_differing, 3, str(tmp_path), [True, True])
    for lines in run_ranks(load_in_another_world, loaders, str(tmp_path), 1):
        assert len(lines) == 1
        assert all(key in lines[0] for key in DIFFERING)


def save_equal_in_another_order(context: RankContext, directory: str) -> list[bool]:
    """Dicts and sets that are equal but were built in another order on each rank, and at each save."""
    words = [f"word{i}" for i in range(20)]
    found = []
    with heard_warnings() as lines:
        for number in range(3):
            rng = Random(f"{context.rank} {number}")
            order = rng.sample(words, len(words))
            state = {
                "set": set(order),
                "inside": [1, ({*order}, frozenset(order))],
                "dict": {word: {word, 1} for word in order},
                "list": [{word: len(word) for word in order}, 2],
            }
            with counted_saves() as counter, together(context):
                found.append(hits(counter, state, directory))
    source = open_checkpoint(directory).source
    assert all(entry.rank == EVERY_RANK for name in source.names() for entry in source.objects(name))
    assert not lines
    return found


def test_equal_sets_and_dicts_built_in_another_order_do_not_differ(tmp_path: Path) -> None:
    for found in run_ranks(save_equal_in_another_order, 3, str(tmp_path)):
        assert found == [False, True, True]


def save_per_rank(context: RankContext, directory: str) -> list[bool]:
    found = []
    with counted_saves() as counter, heard_warnings() as lines:
        for number in range(3):
            state = {"own": PerRank({"seed": context.rank + number}), "array": PerRank(np.full(3, context.rank))}
            with together(context):
                found.append(hits(counter, state, directory))
            with together(context):
                target = {"own": PerRank(None), "array": PerRank(None)}
                load(target, directory)
                assert target["own"] == PerRank({"seed": context.rank + number})
                assert type(target["array"]) is PerRank
                np.testing.assert_array_equal(target["array"].value, np.full(3, context.rank))
    assert not lines
    return found


def load_per_rank(context: RankContext, directory: str) -> tuple[type[BaseException], str]:
    target = {"own": PerRank("mine"), "array": PerRank("mine")}
    found = error_of(load, target, directory)
    assert target == {"own": PerRank("mine"), "array": PerRank("mine")}
    return found


def test_per_rank_values_come_back_to_their_ranks_and_to_no_other_world(tmp_path: Path) -> None:
    assert run_ranks(save_per_rank, 3, str(tmp_path)) == [[False, True, True]] * 3
    for loaders in (1, 2, 4):
        found = run_ranks(load_per_rank, loaders, str(tmp_path))
        assert found == [found[0]] * loaders
        kind, text = found[0]
        assert kind is PlanningError
        assert "'own'" in text or "'array'" in text
        assert "3 ranks" in text
        assert f"{loaders}" in text


def save_values_that_change_everywhere(context: RankContext, directory: str) -> list[bool]:
    """What changes from save to save, but alike on all ranks, is no reason to plan anew."""
    found = []
    with counted_saves() as counter:
        for number in range(4):
            state: dict[str, Any] = {
                "step": number, "history": list(range(number)), "lr": np.float64(number), "small": np.full(4, number),
                "large": np.full(100_000, number), "text": "x" * number, "maybe": None if number % 2 else b"\x00",
            }  # fmt: skip
            with together(context):
                found.append(hits(counter, state, directory))
            with together(context):
                target: dict[str, Any] = {
                    **dict.fromkeys(state),
                    "small": np.zeros(4, int),
                    "large": np.zeros(100_000, int),
                }
                load(target, directory)
                for key, value in state.items():
                    np.testing.assert_array_equal(target[key], value)
    return found


def test_values_that_change_alike_on_all_ranks_hit_and_are_stored_new(tmp_path: Path) -> None:
    for found in run_ranks(save_values_that_change_everywhere, 3, str(tmp_path)):
        assert found == [False, True, True, True]
