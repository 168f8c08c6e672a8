"""Loads that share reads, under layouts of real jobs: every element right, in groups of every origin, nothing left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import dcp_torch
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.shared_reads import (
    Layout,
    Opened,
    Part,
    filled,
    footprint,
    load,
    poisoned,
    save_whole,
    watched,
    wrong_in,
)
from tests.torch.states import assert_same, poison, shard, values

pytestmark = pytest.mark.timeout(120)

MODES: tuple[bool | str, ...] = (True, False, "auto")
BATCH_BYTES = (0, 1000, 6 << 20)


# -- pp2 x dp2 x tp2 with DTensors ------------------------------------------------------------------------------------


def stage_mesh() -> tuple[DeviceMesh, int]:
    """The mesh of data and tensor parallelism of this rank's stage, and the stage."""
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    coordinate = whole.get_coordinate()
    assert coordinate is not None
    return whole["dp", "tp"], coordinate[0]


def training_state(mesh: DeviceMesh, stage: int, seed: int) -> dict[str, Any]:
    """Layers of one stage: cut by rows and by columns over tp, norms on all four ranks; values in between."""
    state: dict[str, Any] = {"step": seed, "rates": [seed / 7, (seed, "x")], "plain": values((3, 2), seed=seed)}
    for layer in range(2 * stage, 2 * stage + 2):
        dtype = (torch.float32, torch.bfloat16)[layer % 2]
        whole = [values((18, 6), dtype, seed + 10 * layer + number) for number in range(3)]
        state[f"layers.{layer}"] = {
            "up": shard(whole[0], mesh, [Replicate(), Shard(0)]),
            "name": f"layer {layer}",
            "down": shard(whole[1], mesh, [Replicate(), Shard(1)]),
            "norm": shard(whole[2][0], mesh, [Replicate(), Replicate()]),
            "count": torch.tensor(seed + layer),
        }
    return state


def turned(value: Any) -> Any:
    """A value of the same type that is another."""
    if isinstance(value, Mapping):
        return {key: turned(inner) for key, inner in value.items()}
    return value if isinstance(value, Tensor) else type(value)()


def spoilt(mesh: DeviceMesh, stage: int, seed: int) -> dict[str, Any]:
    state: dict[str, Any] = turned(training_state(mesh, stage, seed))
    poison(state)
    return state


def load_in_every_mode(rank: TorchRank, directory: Path) -> list[Opened]:
    mesh, stage = stage_mesh()
    expected = training_state(mesh, stage, 5)
    dcp_torch.save(expected, checkpoint_id=directory, durable=False)
    opened: list[Opened] = []
    for batch_bytes in BATCH_BYTES:
        for mode in MODES:
            state = spoilt(mesh, stage, 5)
            with watched() as seen:
                load(state, directory, broadcast_replicated_tensors=mode, broadcast_batch_bytes=batch_bytes)
            assert_same(state, expected)
            if mode is True:
                assert not opened or opened == seen.opened
                opened = seen.opened
            else:  # on one host the page cache reads once
                assert seen.opened == []
    return opened


def test_a_job_of_pipeline_data_and_tensor_parallelism_loads_every_element(tmp_path: Path) -> None:
    everybody = (0, 1, 2, 3, 4, 5, 6, 7)
    for rank, opened in enumerate(run_gloo(load_in_every_mode, 8, tmp_path, timeout_seconds=100)):
        stage, tp = divmod(rank, 4)[0], rank % 2
        own_dp = (4 * stage + tp, 4 * stage + 2 + tp)
        own_stage = tuple(range(4 * stage, 4 * stage + 4))
        expected = {Opened(own_dp, "existing"), Opened(own_stage, "made"), Opened(everybody, "made")}
        assert set(opened) == expected
        assert [group.ranks for group in opened] == sorted(group.ranks for group in opened)


# -- pp4 x dp2, tied between the first and the last stage -------------------------------------------------------------


def tied_layout(rank: int) -> Layout:
    """Stage 1 has nothing that anybody else wants; the tied weight is on ranks 0, 1, 6, 7; keys differ per stage."""
    stage = rank // 2
    if stage == 1:
        return {f"expert{rank}.{number}": Part((7, 3)) for number in range(3)}
    layout = {f"stage{stage}.w{number:02}": Part((5 + number, 9)) for number in range(20)}
    if stage in (0, 3):
        layout["tied"] = Part((64, 40))
    return layout


def load_tied(rank: TorchRank, directory: Path, batch_bytes: int) -> tuple[list[Opened], int, int, list[str]]:
    layout = tied_layout(rank.rank)
    wrong: list[str] = []
    with watched() as seen:
        for mode in MODES:
            state = poisoned(layout)
            load(state, directory, broadcast_replicated_tensors=mode, broadcast_batch_bytes=batch_bytes)
            wrong += wrong_in(state, layout)
    return seen.opened, seen.most_in_flight, len(seen.sizes), wrong


@pytest.mark.parametrize("batch_bytes", BATCH_BYTES)
def test_a_parameter_tied_between_stages_is_shared_by_four_ranks(batch_bytes: int, tmp_path: Path) -> None:
    save_whole(tmp_path / "c", *[tied_layout(rank) for rank in range(8)])
    tied = Opened((0, 1, 6, 7), "made")
    for rank, (opened, in_flight, count, wrong) in enumerate(run_gloo(load_tied, 8, tmp_path / "c", batch_bytes)):
        stage = Opened((rank // 2 * 2, rank // 2 * 2 + 1), "made")
        assert opened == {0: [stage, tied], 1: [], 2: [stage], 3: [tied, stage] if rank > 5 else []}[rank // 2]
        assert wrong == []
        assert in_flight <= 8
        if batch_bytes == 0:  # each buffer travels alone, so there are more of them than may be under way
            assert count == (0 if rank // 2 == 1 else 20 + (rank // 2 != 2))
        elif batch_bytes > 1 << 20:
            assert count <= 4


# -- groups of every origin -------------------------------------------------------------------------------------------


def quarters(rank: int) -> Layout:
    """Four ranks; w on all, x on the pairs (0, 1) and (2, 3), y on the pairs (0, 2) and (1, 3)."""
    return {
        "w": Part((9, 4)),
        "x": Part.even((8, 5), 2, rank // 2),
        "y": Part.even((4, 6), 2, rank % 2, dim=1),
        "z": Part.even((8, 3), 4, rank),
    }


def everywhere(rank: int) -> dict[tuple[int, ...], Any]:
    """Every group of this rank, each by another spelling of its ranks."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3))}
    return {ranks[::-1]: group for ranks, group in made.items() if rank in ranks}


def all_given(rank: int, held: dict[tuple[int, ...], Any]) -> tuple[dict[tuple[int, ...], Any], set[tuple[int, ...]]]:
    return held, {tuple(sorted(ranks)) for ranks in held}


def pairs_given(rank: int, held: dict[tuple[int, ...], Any]) -> tuple[dict[tuple[int, ...], Any], set[tuple[int, ...]]]:
    given = {ranks: group for ranks, group in held.items() if set(ranks) in ({0, 1}, {2, 3})}
    return given, {tuple(sorted(ranks)) for ranks in given}


def by_some_members(
    rank: int, held: dict[tuple[int, ...], Any]
) -> tuple[dict[tuple[int, ...], Any], set[tuple[int, ...]]]:
    return (held if rank == 0 else {}), set()


def with_one_more(
    rank: int, held: dict[tuple[int, ...], Any]
) -> tuple[dict[tuple[int, ...], Any], set[tuple[int, ...]]]:
    """A group of the world, and a key for ranks that share nothing."""
    given: dict[tuple[int, ...], Any] = {(0, 1, 2, 3): dist.group.WORLD}
    if rank in (0, 3):
        given[1, 2] = None
    return given, {(0, 1, 2, 3)}


GIVEN: dict[str, Callable[..., Any]] = {
    "all": all_given, "pairs": pairs_given, "some members only": by_some_members, "world and others'": with_one_more
}  # fmt: skip


def load_with_groups(rank: TorchRank, directory: Path) -> list[str]:
    layout, wrong = quarters(rank.rank), []
    held = everywhere(rank.rank)
    for mode in (True, "auto"):
        for name, choose in GIVEN.items():
            given, expected = choose(rank.rank, held)
            state = poisoned(layout)
            with watched() as seen:
                load(state, directory, broadcast_replicated_tensors=mode, broadcast_groups=given)
            wrong += [f"{name}: {key}" for key in wrong_in(state, layout)]
            found = {group.ranks for group in seen.opened if group.how == "given"}
            count = len(seen.opened)
            if mode is True and (found != expected or count != 3):
                wrong.append(f"{name}: {seen.opened}")
    for ranks, group in held.items():  # what was given is in working order
        tensor = torch.tensor([float(rank.rank)])
        dist.broadcast(tensor, min(ranks), group=group)
        wrong += [] if tensor.item() == min(ranks) else [f"group {ranks}"]
    return wrong


def test_groups_are_taken_where_all_members_hold_them_and_made_where_not(tmp_path: Path) -> None:
    save_whole(tmp_path / "c", quarters(0))
    assert run_gloo(load_with_groups, 4, tmp_path / "c") == [[]] * 4


# -- nothing is left ---------------------------------------------------------------------------------------------------


def load_again_and_again(rank: TorchRank, directory: Path) -> list[tuple[int, int, int]]:
    layout, prints = quarters(rank.rank), []
    gc.freeze()
    for _ in range(8):
        state = poisoned(layout)
        load(state, directory)
        load(state, directory)
        assert wrong_in(state, layout) == []
        dist.barrier()
        prints.append(footprint())
        dist.barrier()
    return prints


def test_loads_one_after_the_other_leave_no_thread_group_or_descriptor(tmp_path: Path) -> None:
    save_whole(tmp_path / "c", quarters(0))
    for prints in run_gloo(load_again_and_again, 4, tmp_path / "c"):
        assert prints[1:] == [prints[1]] * 7
        assert prints[0][0] == prints[1][0]


def save_and_load_shards(rank: TorchRank, directory: Path) -> list[str]:
    """What was loaded by sharing is saved from there and loaded again."""
    layout = quarters(rank.rank)
    dcp_torch.save(filled(layout), checkpoint_id=directory / "1", durable=False)
    state = poisoned(layout)
    memory = [value.data_ptr() for value in state.values()]
    load(state, directory / "1")
    dcp_torch.save(state, checkpoint_id=directory / "2", durable=False)
    poison(state)
    load(state, directory / "2")
    assert memory == [value.data_ptr() for value in state.values()]
    return wrong_in(state, layout)


def test_what_was_received_is_in_the_targets_own_memory_and_can_be_saved(tmp_path: Path) -> None:
    assert run_gloo(save_and_load_shards, 4, tmp_path) == [[]] * 4
