"""A save in the background holds the values of the moment of its call, whatever is done to them right afterwards."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.api import allow_pickled, clear_plan_cache, wait_all
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.background_processes import end_own, wait_until
from tests.core.async_jobs import (
    MODES,
    RESULT_SECONDS,
    async_save,
    checkpoint_directory,
    spoil,
    staged_nbytes,
    tag_in,
    was_hit,
)
from tests.core.async_writers import Gate, GatedWriter, ThreadWriter
from tests.core.fault_jobs import Seat, checkpoint_names, names_in, same, state_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path


# -- what is done after the return ------------------------------------------------------------------------------------


def _spoil_before_it_is_written(context: RankContext, root: Path, mode_name: str) -> None:
    """Each round: save new objects, spoil all of them, and only then let the background processes write."""
    seat, mode = Seat.of(context), MODES[mode_name]
    for tag in (1, 2, 3):
        directory = root / f"step {tag}"
        gate = Gate(directory).close()
        seat.share()
        state = state_of(seat.rank, seat.world, tag)
        response = async_save(seat, state, directory, storage_writer=GatedWriter(), **mode.save)
        spoil(state)
        assert not response.persist_completion.done()
        seat.share()
        gate.open()
        metadata = response.get_result(RESULT_SECONDS)
        assert "model.w" in metadata.state_dict_metadata
        seat.share()
        assert tag_in(seat, directory, mode) == tag
        seat.share()
    for tag in (1, 2, 3):
        assert tag_in(seat, root / f"step {tag}", mode) == tag


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_what_changes_before_it_is_written_is_saved_as_it_was(directory: Path, mode: str, world: int) -> None:
    run_ranks(_spoil_before_it_is_written, world, directory, mode)


def _train_in_place(context: RankContext, root: Path, mode_name: str) -> None:
    """One state for all saves, changed in place while they run; nobody waits for one but the next save."""
    seat, mode = Seat.of(context), MODES[mode_name]
    shape = (40, 5)
    whole = np.arange(200.0).reshape(shape)
    w = ShardedArray.cut(whole, even_boxes(shape, seat.world, seat.rank))
    common, history = np.zeros(9), [0]
    state = {"w": w, "common": common, "history": history, "counts": {"step": 0}}
    for step in range(1, 7):
        w.arrays[0][...] += 1
        common[...] = step
        history.append(step)
        state["counts"] = {"step": step}
        async_save(seat, state, root / f"{step}", **mode.save)
    w.arrays[0][...] = -1
    history.clear()
    wait_all()
    seat.share()
    for step in range(1, 7):
        target: dict[str, Any] = {
            "w": ShardedArray.cut(np.full(shape, np.nan), even_boxes(shape, seat.world, seat.rank)),
            "common": np.full(9, np.nan),
            "history": [0] * (step + 1),
            "counts": {"step": -1},
        }
        seat.load(target, checkpoint_id=root / f"{step}", **mode.load)
        assert same(target["w"], ShardedArray.cut(whole + step, even_boxes(shape, seat.world, seat.rank))), step
        assert same(target["common"], np.full(9, float(step))), step
        assert target["history"] == list(range(step + 1))
        assert target["counts"] == {"step": step}


@pytest.mark.parametrize("mode", MODES)
def test_a_training_loop_that_never_waits_leaves_every_moment_in_its_own_checkpoint(directory: Path, mode: str) -> None:
    run_ranks(_train_in_place, 2, directory, mode)


@pytest.mark.parametrize("kind", [GatedWriter, ThreadWriter])
def test_threads_that_save_at_the_same_time_each_leave_their_own_moment(
    directory: Path, kind: type[GatedWriter]
) -> None:
    """Both wait for a third save, and then one for the other."""
    places = {tag: directory / f"{tag}" for tag in (1, 2, 3)}
    gates = {tag: Gate(place).close() for tag, place in places.items()}

    def save(tag: int) -> api.AsyncSaveResponse:
        state = {"a": np.full(1000, tag)}
        return api.async_save(state, checkpoint_id=places[tag], storage_writer=kind(), durable=False)

    responses = [save(1)]
    gates[1].await_writing(0)
    threads = [threading.Thread(target=lambda tag=tag: responses.append(save(tag))) for tag in (2, 3)]
    for thread in threads:
        thread.start()
    gates[1].open()
    wait_until(lambda: any((gates[tag].directory / "writing-0").exists() for tag in (2, 3)), "the second save")
    time.sleep(0.2)  # for a third save that would not wait
    for gate in gates.values():
        gate.open()
    for thread in threads:
        thread.join(RESULT_SECONDS)
    for response in responses:
        response.get_result(RESULT_SECONDS)
    end_own()
    for tag, place in places.items():
        assert (api.read(place, "a") == tag).all()


@dataclass
class Remark:
    """What has no exact encoding and is pickled."""

    words: list[str] = field(default_factory=list)


def _odd_values(rank: int, tag: int) -> dict[str, Any]:
    base = np.arange(24.0).reshape(4, 6) + tag
    tied = np.arange(5, dtype=np.int16) * tag
    raw = (np.arange(8) + 16000 + tag).astype(np.uint16)
    return {
        "tied": {"first": tied, "second": tied},
        "transposed": base.T,
        "every other": base[:, ::2],
        "backwards": base[::-1],
        "scalar": np.array(tag + 0.5),
        "nothing": np.zeros((0, 3)),
        "truths": np.arange(6) % 2 == tag % 2,
        "bfloat16": ShardedArray.cut(raw, even_boxes((8,), 2, rank), "bfloat16"),
        "in a tuple": (np.full(3, tag), [np.full(2, -tag), {"deep": tag}]),
        "set": {tag, "a"},
        "bytes": bytearray(b"%d" % tag),
        "remark": Remark(["at", str(tag)]),
        "own": {f"of {rank}": [rank, tag]},
    }


def _spoil_odd(state: dict[str, Any]) -> None:
    values, remark, pair, odd_set = dict(state), state["remark"], state["in a tuple"], state["set"]
    spoil({key: value for key, value in values.items() if isinstance(value, (np.ndarray, ShardedArray))})
    spoil(state["tied"])
    remark.words[:] = ["spoilt"]
    for part in pair:
        spoil(part)
    odd_set.clear()
    values["bytes"][:] = b"spoilt"
    spoil(state["own"])


def _save_odd_values(context: RankContext, root: Path) -> None:
    seat = Seat.of(context)
    allow_pickled(Remark)
    for tag in (1, 2):
        directory = root / f"{tag}"
        gate = Gate(directory).close()
        seat.share()
        state = _odd_values(seat.rank, tag)
        response = async_save(seat, state, directory, storage_writer=GatedWriter())
        _spoil_odd(state)
        assert not same(state, _odd_values(seat.rank, tag))
        seat.share()
        gate.open()
        response.get_result(RESULT_SECONDS)
        target = _odd_values(seat.rank, 77)
        target["every other"] = target["every other"].copy()  # targets may not overlap
        seat.load(target, checkpoint_id=directory)
        assert same(target, _odd_values(seat.rank, tag)), (tag, target)


def test_views_ties_empty_arrays_and_objects_are_copied_whole(directory: Path) -> None:
    run_ranks(_save_odd_values, 2, directory)


# -- plans ------------------------------------------------------------------------------------------------------------


def _a_b_a(context: RankContext, root: Path, mode_name: str) -> list[bool]:
    """Rank 1 changes what it holds and back; the others hold the same all the time."""
    seat, mode = Seat.of(context), MODES[mode_name]
    hits = []
    for number, wide in enumerate((False, True, False, True, True, False)):
        size = 4 + (wide and seat.rank == 1)
        state = {"common": np.arange(6) * number, f"own{seat.rank}": np.arange(size) + number, "at": [number]}
        expected = copy.deepcopy(state)

        def save(state: dict[str, Any] = state, number: int = number) -> None:
            response = async_save(seat, state, root / f"{number}", **mode.save)
            spoil(state)
            response.get_result(RESULT_SECONDS)

        hits.append(was_hit(save))
        seat.share()
        target = {"common": np.full(6, -1), f"own{seat.rank}": np.full(size, -1), "at": [-1]}
        seat.load(target, checkpoint_id=root / f"{number}", **mode.load)
        assert same(target, expected), (number, target)
    return hits


@pytest.mark.parametrize("mode", MODES)
def test_structures_that_change_on_one_rank_and_back_are_always_right(directory: Path, mode: str) -> None:
    found = run_ranks(_a_b_a, 3, directory, mode)
    assert len({tuple(hits) for hits in found}) == 1, found
    if mode == "mailbox":
        assert found[0] == [False, False, True, True, True, True]
    if mode == "alone":
        assert not any(found[0])


def _share_plans(context: RankContext, root: Path) -> list[list[bool]]:
    """Save one structure again and again, in the background or not, each time with other values."""
    seat, tag = Seat.of(context), 0
    found = []
    for order in ("asas", "saas"):
        clear_plan_cache()
        hits = []
        for kind in order:
            tag += 1
            state = state_of(seat.rank, seat.world, tag)

            def save(kind: str = kind, state: Any = state) -> None:
                if kind == "a":
                    async_save(seat, state, root).get_result(RESULT_SECONDS)
                else:
                    seat.save(state, checkpoint_id=root, durable=False)

            hits.append(was_hit(save))
            assert tag_in(seat, root) == tag
            seat.share()
            assert names_in(root) == checkpoint_names(root)
            seat.share()
        found.append(hits)
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_saves_in_the_background_and_others_use_each_others_plans(directory: Path, world: int) -> None:
    for found in run_ranks(_share_plans, world, directory):
        assert found == [[False, True, True, True]] * 2


_SHAPE, _COUNT = (256, 128), 16  # 128 KiB of float32 each: larger than what always goes to the lowest rank


def _replicated(tag: int) -> dict[str, Any]:
    return {f"p{number}": np.full(_SHAPE, tag * 100 + number, np.float32) for number in range(_COUNT)}


def _stage_replicas(context: RankContext, root: Path) -> list[int]:
    """All ranks hold the same; how many bytes each stages, save by save."""
    seat = Seat.of(context)
    staged = []
    for tag in (1, 2, 3):
        state = _replicated(tag)

        def save(state: Any = state, tag: int = tag) -> None:
            response = async_save(seat, state, root / f"{tag}")
            spoil(state)
            response.get_result(RESULT_SECONDS)

        staged.append(staged_nbytes(save))
        target = _replicated(50)
        seat.load(target, checkpoint_id=root / f"{tag}")
        assert same(target, _replicated(tag)), tag
    return staged


def test_of_what_four_ranks_hold_alike_each_stages_a_quarter_from_the_second_save_on(directory: Path) -> None:
    found = run_ranks(_stage_replicas, 4, directory)
    total = _COUNT * 4 * _SHAPE[0] * _SHAPE[1]
    for first, second, third in found:
        assert total <= first <= 1.1 * total
        assert second == third <= 1.1 * total / 4
    assert total <= sum(second for _, second, _ in found) <= 1.1 * total
    for tag in "123":
        sizes = [(directory / tag / f"_rank{rank}_.safetensors").stat().st_size for rank in range(4)]
        assert max(sizes) <= 1.1 * total / 4
