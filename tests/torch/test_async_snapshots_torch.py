"""Background saves of torch states: each checkpoint holds its own moment, in every way that ranks can agree."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

import dcp_torch
from tests.background_processes import children_of
from tests.core.async_jobs import staged_nbytes
from tests.torch.async_torch import (
    HIT,
    IS_LAUNCHED,
    MODES,
    RESULT_SECONDS,
    async_save,
    begin_at_gate,
    no_process_left,
    run_job,
)
from tests.torch.gloo_ranks import TorchRank
from tests.torch.states import LogLines, assert_same, poison, shard, values, whole

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def directory(shared_path: Path) -> Iterator[Path]:
    with no_process_left():
        yield shared_path / "step 1"


# -- values of the moment ---------------------------------------------------------------------------------------------


def mixed(rank: TorchRank, tag: int) -> dict[str, Any]:
    """Shards, replicas, views, ties, types that numpy lacks, arrays, and plain values."""
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    tied = values((6, 3), seed=tag)
    return {
        "rows": shard(values((7, 4), seed=tag), mesh, [Shard(0)]),
        "columns": shard(values((3, 5), torch.bfloat16, seed=tag + 1), mesh, [Shard(1)]),
        "replica": shard(values((9,), torch.float8_e4m3fn, seed=tag), mesh, [Replicate()]),
        "tied": {"in": tied, "out": tied},
        "transposed": values((4, 6), seed=tag + 2).t(),
        "parameter": nn.Parameter(values((5,), seed=tag + 3)),
        "scalar": torch.tensor(float(tag)),
        "empty": torch.empty(0, 3),
        "array": np.arange(6, dtype=np.int16) * tag,
        "list": [tag, {"inner": (tag, values((2,), seed=tag + 4))}],
        f"own{rank.rank}": {"step": tag},
    }


def spoil(state: dict[str, Any]) -> None:
    """Change all that can be changed, and let go of it."""
    for name in ("rows", "columns", "replica", "transposed", "parameter", "scalar", "array"):
        poison({name: state[name]})
    poison({"tied": state["tied"]["in"], "inner": state["list"][1]["inner"][1]})
    state["list"][1].clear()
    state["list"][:] = ["spoilt"]
    state.clear()


def poisoned(rank: TorchRank) -> dict[str, Any]:
    target = mixed(rank, 99)
    target["array"][...] = -1
    return target


def save_and_spoil(rank: TorchRank, root: Path, mode_name: str) -> list[list[str]]:
    mode, loaded = MODES[mode_name], []
    for tag in (1, 2, 3):
        state = mixed(rank, tag)
        gate, response = begin_at_gate(state, root / f"{tag}", **mode.save)
        spoil(state)
        loaded.append(gate.await_writing(rank.rank)[0]["frameworks"])
        assert not response.persist_completion.done()
        dist.barrier()
        gate.open()
        metadata = response.get_result(RESULT_SECONDS)
        assert isinstance(metadata, dcp_torch.Metadata)
        assert "rows" in metadata.state_dict_metadata
        dist.barrier()
    for tag in (1, 2, 3):
        target = poisoned(rank)
        dcp_torch.load(target, checkpoint_id=root / f"{tag}", **mode.load)
        assert_same(target, mixed(rank, tag))
    assert IS_LAUNCHED or len(children_of(os.getpid())) == 1
    return loaded


@pytest.mark.parametrize("mode", MODES)
def test_what_changes_before_it_is_written_is_saved_as_it_was(directory: Path, mode: str) -> None:
    for loaded in run_job(save_and_spoil, 2, directory, mode):
        if mode != "gloo":
            assert loaded == [[], [], []]


def train_job(rank: TorchRank) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    fully_shard(model, mesh=init_device_mesh(rank.device.type, (rank.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optim": optimizer, "step": 0}


def train(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = parameter.detach() * 0.5 + 0.1
    state["optim"].step()
    state["step"] += 1


def as_values(state: dict[str, Any]) -> dict[str, Any]:
    return whole({"model": state["model"].state_dict(), "optim": state["optim"].state_dict(), "step": state["step"]})


def train_without_waiting(rank: TorchRank, root: Path, mode_name: str) -> None:
    """A loop with collectives of its own, on the default group, beside saves that nobody waits for."""
    mode, state, expected = MODES[mode_name], train_job(rank), []
    for step in range(5):
        train(state)
        expected.append(as_values(state))
        async_save(state, root / f"{step}", **mode.save)
        total = torch.ones(1000) * step
        dist.all_reduce(total)
        assert total[0] == step * rank.world_size
    dcp_torch.wait_all()
    dist.barrier()
    for step in (4, 0, 3, 1, 2):
        dcp_torch.load(state, checkpoint_id=root / f"{step}", **mode.load)
        assert_same(as_values(state), expected[step])


@pytest.mark.parametrize("mode", MODES)
def test_a_training_loop_that_never_waits_leaves_every_step_in_its_own_checkpoint(directory: Path, mode: str) -> None:
    run_job(train_without_waiting, 2, directory, mode)


# -- plans ------------------------------------------------------------------------------------------------------------


def hits(lines: LogLines, call: Callable[[], object]) -> bool:
    lines.lines.clear()
    call()
    return bool(lines.with_words(HIT))


def a_b_a(rank: TorchRank, root: Path, mode_name: str) -> list[bool]:
    """Rank 1 changes what it holds and back; the others hold the same all the time. Every third save is a plain one."""
    mode, lines, found = MODES[mode_name], LogLines(level=20), []
    dcp_torch.clear_plan_cache()
    for number, wide in enumerate((False, True, False, True, True, False)):
        size = 4 + (wide and rank.rank == 1)
        state: dict[str, Any] = {
            "common": values((6,), seed=number),
            f"own{rank.rank}": values((size,), seed=number),
            "n": [number],
        }
        expected = {"common": state["common"].clone(), f"own{rank.rank}": state[f"own{rank.rank}"].clone(),
                    "n": [number]}  # fmt: skip

        def save(state: dict[str, Any] = state, number: int = number) -> None:
            plain = {key: value for key, value in mode.save.items() if key != "use_gloo"}
            if number % 3 == 2:
                dcp_torch.save(state, checkpoint_id=root / f"{number}", durable=False, **plain)
                return
            response = async_save(state, root / f"{number}", **mode.save)
            poison(state)
            state["n"].clear()
            response.get_result(RESULT_SECONDS)

        found.append(hits(lines, save))
        target = {"common": torch.zeros(6), f"own{rank.rank}": torch.zeros(size), "n": [-1]}
        dcp_torch.load(target, checkpoint_id=root / f"{number}", **mode.load)
        assert_same(target, expected)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_structures_that_change_on_one_rank_and_back_are_always_right(directory: Path, mode: str) -> None:
    found = run_job(a_b_a, 3, directory, mode)
    assert len({tuple(of_rank) for of_rank in found}) == 1
    assert found[0] == ([False] * 6 if mode == "alone" else [False, False, True, True, True, True])


_SHAPE, _COUNT = (256, 128), 12


def replicated(rank: TorchRank, tag: int) -> dict[str, Tensor]:
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    return {f"p{number}": shard(values(_SHAPE, seed=tag + number), mesh, [Replicate()]) for number in range(_COUNT)}


def stage_replicas(rank: TorchRank, root: Path, mode_name: str) -> list[int]:
    staged = []
    dcp_torch.clear_plan_cache()
    for tag in (100, 200):
        state = replicated(rank, tag)

        def save(state: Any = state, tag: int = tag) -> None:
            response = async_save(state, root / f"{tag}", **MODES[mode_name].save)
            poison(state)
            response.get_result(RESULT_SECONDS)

        staged.append(staged_nbytes(save))
        target = replicated(rank, 0)
        dcp_torch.load(target, checkpoint_id=root / f"{tag}")
        assert_same(target, replicated(rank, tag))
    return staged


@pytest.mark.parametrize("mode", ["mailbox", "gloo"])
def test_data_parallel_ranks_stage_their_own_share_from_the_second_save_on(directory: Path, mode: str) -> None:
    total = _COUNT * 4 * _SHAPE[0] * _SHAPE[1]
    found = run_job(stage_replicas, 4, directory, mode)
    for first, second in found:
        assert total <= first <= 1.1 * total
        assert second <= 1.1 * total / 4
    assert total <= sum(second for _, second in found) <= 1.1 * total


# -- kinds of jobs ----------------------------------------------------------------------------------------------------


def without_a_group(rank: TorchRank, root: Path) -> None:
    for tag, how in enumerate(({}, {"use_collectives": False}, {"no_dist": True}), 1):
        state: dict[str, Any] = {"t": values((3, 4), seed=tag), "n": [tag]}
        response = async_save(state, root / f"{tag}", **how)
        poison(state)
        state["n"].clear()
        response.get_result(RESULT_SECONDS)
        target = {"t": torch.zeros(3, 4), "n": [0]}
        dcp_torch.load(target, checkpoint_id=root / f"{tag}")
        assert_same(target, {"t": values((3, 4), seed=tag), "n": [tag]})


def two_groups(rank: TorchRank, root: Path) -> None:
    """Two subgroups save at the same time, one of them not in the order of the ranks; then all together."""
    groups = {(0, 2): dist.new_group([0, 2]), (3, 1): dist.new_group([3, 1])}
    mine = next(ranks for ranks in groups if rank.rank in ranks)
    for mode_name in ("mailbox", "gloo"):
        for tag in (1, 2):
            state = {"t": values((4,), seed=tag), "own": {rank.rank: values((5,), seed=rank.rank)}, "n": min(mine)}
            place = root / f"{min(mine)}-{mode_name}"
            response = async_save(state, place, process_group=groups[mine], **MODES[mode_name].save)
            poison(state)
            assert response.get_result(RESULT_SECONDS).world_size == 2
            target = {"t": torch.zeros(4), "own": {rank.rank: torch.zeros(5)}, "n": -1}
            dcp_torch.load(target, checkpoint_id=place, process_group=groups[mine])
            assert_same(target, {"t": values((4,), seed=tag), "own": {rank.rank: values((5,), seed=rank.rank)},
                                 "n": min(mine)})  # fmt: skip
        state = {"t": values((4,), seed=5), "n": 5}
        assert async_save(state, root / f"all-{mode_name}", **MODES[mode_name].save).get_result(60).world_size == 4
    assert len(children_of(os.getpid())) == 2  # one for each way to agree


def test_a_process_without_a_group_saves_in_the_background_alone(directory: Path) -> None:
    from tests.torch.gloo_ranks import run_gloo

    run_gloo(without_a_group, 1, directory, init=False)


def test_subgroups_save_beside_each_other(directory: Path) -> None:
    run_job(two_groups, 4, directory)
