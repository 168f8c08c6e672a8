"""Kinds of jobs and what callers pass: torchrun, no group, subgroups, other backends, modules, errors of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import dcp_torch
from dcp_core.errors import DcpError
from dcp_torch.adapter import TorchAdapter
from tests.torch.gloo_ranks import TorchRank, free_port, run_gloo
from tests.torch.states import LogLines, assert_same, local_of, poison, raised, same_on_all, shard, values, whole

_PROMPT_SECONDS = 10.0
_HIT = "Hit final plan and metadata cache."


def sharded(rank: TorchRank, ranks: list[int] | None = None, seed: int = 0) -> dict[str, Any]:
    """A sharded tensor over some ranks, a replicated one, a value."""
    mesh = DeviceMesh(rank.device.type, list(range(rank.world_size)) if ranks is None else ranks)
    return {"t": shard(values((7, 4), seed=seed), mesh, [Shard(0)]), "r": values((5,), seed=seed + 1), "n": seed}


def save_and_load(rank: TorchRank, state: dict[str, Any], directory: Path, **how: Any) -> dcp_torch.Metadata:
    """Save, load back into poisoned targets, compare."""
    metadata = dcp_torch.save(state, checkpoint_id=directory, **how)
    expected = {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    poison(state)
    state["n"] = None
    dcp_torch.load(state, checkpoint_id=directory, **how)
    assert_same(state, expected)
    return metadata


# -- jobs ----------------------------------------------------------------------------------------------------------

_PROGRAM = """
import torch, torch.distributed as dist
import dcp_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 5)
expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
dcp_torch.save({"model": model, "optimizer": optimizer, "step": 3}, checkpoint_id=CHECKPOINT)
for parameter in model.parameters():
    parameter.detach().to_local().zero_()
dcp_torch.load({"model": model, "optimizer": optimizer}, checkpoint_id=CHECKPOINT)
assert all(torch.equal(tensor.full_tensor(), expected[name]) for name, tensor in model.state_dict().items())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_under_torchrun_saves_and_loads_and_a_plain_process_reads_it(shared_path: Path) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pytest.skip("starts a job of its own")
    script, checkpoint = shared_path / "train.py", shared_path / "step 1"
    script.write_text(textwrap.dedent(_PROGRAM).replace("CHECKPOINT", repr(str(checkpoint))))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    done = subprocess.run(
        [*command, str(free_port()), str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    torch.manual_seed(0)
    expected, model = nn.Linear(8, 5), nn.Linear(8, 5)
    state = {"model": model, "step": 0}
    dcp_torch.load(state, checkpoint_id=checkpoint)
    assert_same(state, {"model": model, "step": 3})
    assert_same(model.state_dict(), expected.state_dict())


def without_a_group(rank: TorchRank, directory: Path) -> int:
    state: dict[str, Any] = {"t": values((3, 4)), "n": 5}
    return save_and_load(rank, state, directory).world_size


def test_a_process_without_a_group_is_a_world_of_one(shared_path: Path) -> None:
    assert run_gloo(without_a_group, 1, shared_path, init=False) == [1]
    assert {file.name for file in shared_path.iterdir()} == {".metadata", "_rank0_.safetensors", "_rank0_.bytes"}


def two_groups(rank: TorchRank, root: Path) -> list[str]:
    """Two subgroups save and load at the same time, one of them not in the order of the ranks."""
    groups: dict[tuple[int, ...], Any] = {(0, 2): dist.new_group([0, 2]), (3, 1): dist.new_group([3, 1])}
    for ranks in groups:
        DeviceMesh(rank.device.type, list(ranks))
    mine = next(ranks for ranks in groups if rank.rank in ranks)
    state = sharded_on(rank, groups, mine)
    metadata = save_and_load(rank, state, root / f"{min(mine)}", process_group=groups[mine])
    assert metadata.world_size == 2
    other = next(group for ranks, group in groups.items() if ranks != mine)
    kind, text = raised(lambda: dcp_torch.save(state, checkpoint_id=root / "x", process_group=other))
    assert kind == "ArgumentError"
    return [text]


def sharded_on(rank: TorchRank, groups: dict[tuple[int, ...], Any], mine: tuple[int, ...]) -> dict[str, Any]:
    meshes = {ranks: DeviceMesh.from_group(group, rank.device.type) for ranks, group in groups.items() if ranks == mine}
    return {"t": shard(values((7, 4), seed=min(mine)), meshes[mine], [Shard(0)]), "n": min(mine)}


def test_subgroups_save_and_load_beside_each_other(shared_path: Path) -> None:
    found = run_gloo(two_groups, 4, shared_path)
    assert all("no member" in texts[0] for texts in found)
    for name in ("0", "1"):
        assert {file.name for file in (shared_path / name).glob("*.safetensors")} == {
            "_rank0_.safetensors",
            "_rank1_.safetensors",
        }
    assert not (shared_path / "x").exists()


def with_a_mesh(rank: TorchRank, root: Path) -> tuple[str, str]:
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    row = mesh["tp"]
    first = rank.rank // 2 * 2
    state = {"t": shard(values((7, 4), seed=first), row, [Shard(0)]), "n": first}
    assert save_and_load(rank, state, root / f"{first}", process_group=row).world_size == 2
    return raised(lambda: dcp_torch.save(state, checkpoint_id=root / "x", process_group=mesh))


def test_a_one_dimensional_mesh_is_a_process_group_and_a_larger_one_is_refused(shared_path: Path) -> None:
    for kind, text in run_gloo(with_a_mesh, 4, shared_path):
        assert kind == "ArgumentError"
        assert "1-d" in text


def on_hccl(rank: TorchRank, directory: Path) -> str:
    save_and_load(rank, {"r": values((5, 2)), "n": 3, "own": values((3,), seed=rank.rank)}, directory)
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    state = {"t": shard(values((7, 4)), mesh, [Shard(0)]), "n": 1}
    save_and_load(rank, state, directory)
    return str(dist.get_backend())


@pytest.mark.skipif(os.environ.get("DCP_TEST_DEVICE", "cpu") != "cpu", reason="a stand-in for hosts without devices")
def test_a_job_on_hccl_saves_and_loads(shared_path: Path) -> None:
    assert run_gloo(on_hccl, 2, shared_path, backend="hccl") == ["hccl", "hccl"]


# -- ranks that save alone -----------------------------------------------------------------------------------------


def alone(rank: TorchRank, directory: Path, how: dict[str, Any]) -> None:
    """Each rank saves by itself, at its own time; a load with collectives finds `{rank}.metadata`."""
    time.sleep(0.05 * rank.rank)
    state = sharded(rank, seed=3)
    state["own"] = rank.rank
    dcp_torch.save(state, checkpoint_id=directory, **how)
    dist.barrier()
    for load_how in ({}, how, {"use_collectives": False}):
        target = sharded(rank, seed=3)
        poison(target)
        target.update(n=0, own=-1)
        dcp_torch.load(target, checkpoint_id=directory, **load_how)
        assert_same(target, state)


@pytest.mark.parametrize("how", [{"use_collectives": False}, {"no_dist": True}], ids=str)
def test_ranks_that_save_alone_load_their_own_files(how: dict[str, Any], shared_path: Path) -> None:
    run_gloo(alone, 3, shared_path, how)
    names = {file.name for file in shared_path.iterdir()}
    assert names == {
        f"{prefix}{rank}{suffix}"
        for rank in range(3)
        for prefix, suffix in (("", ".metadata"), ("_rank", "_.safetensors"), ("_rank", "_.bytes"))
    }


def with_a_missing_rank(rank: TorchRank, directory: Path) -> tuple[str, str]:
    state = sharded(rank)
    if rank.rank != 2:
        dcp_torch.save(state, checkpoint_id=directory, use_collectives=False)
    dist.barrier()
    poison(state)
    before = sharded(rank)
    poison(before)
    found = raised(lambda: dcp_torch.load(state, checkpoint_id=directory))
    assert_same(state, before)
    return found


def test_a_rank_whose_metadata_is_missing_is_one_error_on_all(shared_path: Path) -> None:
    kind, text = same_on_all(run_gloo(with_a_missing_rank, 3, shared_path))
    assert kind == "NotFoundError"
    assert "2.metadata" in text
    assert "rank 2" in text


def over_a_collective_save(rank: TorchRank, directory: Path) -> tuple[str, str]:
    state = sharded(rank)
    dcp_torch.save(state, checkpoint_id=directory)
    found = raised(lambda: dcp_torch.save(state, checkpoint_id=directory, use_collectives=False))
    dist.barrier()
    return found


def test_saving_alone_over_a_collective_checkpoint_is_refused(shared_path: Path) -> None:
    for kind, text in run_gloo(over_a_collective_save, 2, shared_path):
        assert kind == "ArgumentError"
        assert ".metadata" in text
    dcp_torch.load({"r": torch.zeros(5)}, checkpoint_id=shared_path)


def nothing_there(rank: TorchRank, directory: Path) -> list[tuple[str, str]]:
    state = sharded(rank)
    return [
        raised(lambda: dcp_torch.load(state, checkpoint_id=directory / "never")),
        raised(lambda: dcp_torch.load(state, checkpoint_id=directory)),
    ]


def test_a_directory_without_a_checkpoint_is_one_error_on_all(shared_path: Path) -> None:
    (shared_path / "_rank0_.safetensors").write_bytes(b"left over")
    for of_ranks in zip(*run_gloo(nothing_there, 2, shared_path), strict=True):
        kind, text = same_on_all(of_ranks)
        assert kind == "NotFoundError"
        assert str(shared_path) in text


def save_over(rank: TorchRank, directory: Path, seed: int) -> None:
    save_and_load(rank, sharded(rank, seed=seed), directory)


def test_a_save_by_fewer_ranks_over_a_checkpoint_leaves_nothing_of_the_larger_one(shared_path: Path) -> None:
    for seed, world_size in enumerate((4, 2, 3)):
        run_gloo(save_over, world_size, shared_path, seed)
        kinds = [file.name.split("_")[1] for file in shared_path.glob("_rank*")]
        assert set(kinds) == {f"rank{rank}" for rank in range(world_size)}
        assert len(list(shared_path.iterdir())) == world_size + 2  # .metadata, and the values


# -- modules and optimizers as they are ----------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 + 0.1
    optimizer.step()


def job_of(rank: TorchRank, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    fully_shard(model, mesh=init_device_mesh(rank.device.type, (rank.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1 / (seed + 1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=1 / (seed + 2))
    for _ in range(seed):
        train(model, optimizer)
        schedule.step()
    return {"model": model, "optim": optimizer, "schedule": schedule, "extra": {"n": seed, "nested": [nn.Linear(2, 2)]}}


def as_values(state: dict[str, Any]) -> dict[str, Any]:
    """Whole values of all Stateful objects."""
    objects = {name: state[name].state_dict() for name in ("model", "optim", "schedule")}
    return whole({**objects, "n": state["extra"]["n"], "inner": state["extra"]["nested"][0].state_dict()})


def check_modules(rank: TorchRank, directory: Path) -> None:
    state, other = job_of(rank, 1), job_of(rank, 2)
    before = as_values(state)
    dcp_torch.save(state, checkpoint_id=directory)
    memory = [local_of(parameter).data_ptr() for parameter in other["model"].parameters()]
    objects = [other["model"], other["optim"], other["extra"], other["extra"]["nested"][0]]
    dcp_torch.load(other, checkpoint_id=directory)
    assert_same(as_values(other), before)
    assert memory == [local_of(parameter).data_ptr() for parameter in other["model"].parameters()]
    assert objects == [other["model"], other["optim"], other["extra"], other["extra"]["nested"][0]]
    train(state["model"], state["optim"])
    train(other["model"], other["optim"])
    assert_same(as_values(other), as_values(state))
    dcp_torch.save(other, checkpoint_id=directory / "again")
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(as_values(state), before)


def test_modules_and_optimizers_are_saved_as_they_are_and_loaded_in_place(shared_path: Path) -> None:
    run_gloo(check_modules, 2, shared_path)


class Counter:
    """A Stateful object of the user's own; fails where it is told to."""

    def __init__(self, value: int = 0, fails_in: str = "", error: BaseException | None = None) -> None:
        self.value = value
        self.fails_in = fails_in
        self.error = error or RuntimeError("the disk of the user is full")
        self.loaded: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        if self.fails_in == "state_dict":
            raise self.error
        return {"value": self.value, "t": torch.full((3,), float(self.value))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails_in == "load_state_dict":
            raise self.error
        self.loaded.append(state)
        self.value = state["value"]


def failing(rank: TorchRank, directory: Path, where: str) -> tuple[tuple[str, str], float, int]:
    good = {"a": Counter(1), "z": Counter(2), **sharded(rank, seed=3)}
    dcp_torch.save(good, checkpoint_id=directory)
    state = {"a": Counter(8), "z": Counter(9, where if rank.rank == 1 else ""), **sharded(rank, seed=3)}
    started = time.monotonic()
    if where == "state_dict while saving":
        state["z"].fails_in = "state_dict" if rank.rank == 1 else ""
        found = raised(lambda: dcp_torch.save(state, checkpoint_id=directory))
    else:
        found = raised(lambda: dcp_torch.load(state, checkpoint_id=directory))
    seconds = time.monotonic() - started
    target = {"a": Counter(), "z": Counter(), **sharded(rank, seed=3)}
    poison({"t": target["t"], "r": target["r"]})
    dcp_torch.load(target, checkpoint_id=directory)
    assert (target["a"].value, target["z"].value) == (1, 2)
    assert_same({"t": target["t"], "r": target["r"]}, {"t": good["t"], "r": good["r"]})
    return found, seconds, len(state["a"].loaded)


@pytest.mark.parametrize("where", ["state_dict while saving", "state_dict", "load_state_dict"])
def test_an_exception_in_a_stateful_object_of_one_rank_is_one_error_on_all_at_once(
    where: str, shared_path: Path
) -> None:
    found = run_gloo(failing, 3, shared_path, where)
    kind, text = same_on_all([of_rank[0] for of_rank in found])
    assert kind == "RankFailedError"
    assert all(word in text for word in ("rank 1", "RuntimeError", "the disk of the user is full"))
    assert max(of_rank[1] for of_rank in found) < _PROMPT_SECONDS
    if where == "state_dict":
        assert [of_rank[2] for of_rank in found] == [0, 0, 0]


def interrupted(rank: TorchRank, directory: Path) -> str:
    state = {"c": Counter(1, "state_dict" if rank.rank == 1 else "", KeyboardInterrupt())}
    try:
        dcp_torch.save(state, checkpoint_id=directory)
    except DcpError as error:
        return type(error).__name__
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "nothing"


def test_an_interrupt_on_one_rank_ends_it_there_and_is_an_error_on_the_others(shared_path: Path) -> None:
    assert run_gloo(interrupted, 3, shared_path) == ["RankFailedError", "KeyboardInterrupt", "RankFailedError"]
    assert not list(shared_path.iterdir())


# -- the second save -----------------------------------------------------------------------------------------------


def saved_bytes(rank: TorchRank, save: Callable[[], object]) -> list[int]:
    """How large the messages were that this rank put on the channel."""
    channel: Any = TorchAdapter().process_group().channel
    put, sizes = channel.put, []

    def counted(name: str, payload: bytes) -> None:
        sizes.append(len(payload))
        put(name, payload)

    channel.put = counted
    try:
        save()
    finally:
        channel.put = put
    return sizes


def check_hits(rank: TorchRank, root: Path) -> list[list[int]]:
    lines = LogLines(level=20)
    state = job_of(rank, 1)
    model, optimizer = {"model": state["model"]}, {"optim": state["optim"], "n": 1}
    hits, messages = [], []
    for number in range(3):
        for name, part in (("model", model), ("optim", optimizer)):
            lines.lines.clear()
            place = root / f"{name}{number}"
            messages.append(saved_bytes(rank, lambda part=part, place=place: dcp_torch.save(part, checkpoint_id=place)))  # type: ignore[misc]  # mypy cannot type it
            hits.append(bool(lines.with_words(_HIT)))
            expected = whole({"m": state["model"].state_dict(), "o": state["optim"].state_dict()})
        train(state["model"], state["optim"])
    assert hits == [False, False, True, True, True, True]
    dcp_torch.load(model, checkpoint_id=root / "model2")
    dcp_torch.load(optimizer, checkpoint_id=root / "optim2")
    assert_same(whole({"m": state["model"].state_dict(), "o": state["optim"].state_dict()}), expected)
    dcp_torch.clear_plan_cache()
    lines.lines.clear()
    dcp_torch.save(model, checkpoint_id=root / "model3")
    assert not lines.with_words(_HIT)
    return messages


def test_saves_of_known_structures_hit_the_plan_cache_and_exchange_little(shared_path: Path) -> None:
    found = run_gloo(check_hits, 3, shared_path)
    for of_rank in found[1:]:
        assert all(len(messages) == 2 and max(messages) <= 200 for messages in of_rank[2:])
    assert [len(messages) for messages in found[1]][:2] == [3, 3]


def a_b_a(rank: TorchRank, root: Path) -> list[bool]:
    """Rank 1 changes what it holds and back; the others hold the same all the time."""
    lines = LogLines(level=20)
    hits = []
    for number, wide in enumerate((False, True, False, True, True, False)):
        state = {
            "common": values((6,), seed=number),
            f"own{rank.rank}": values((4 + (wide and rank.rank == 1),), seed=number),
        }
        expected = {key: tensor.clone() for key, tensor in state.items()}
        lines.lines.clear()
        dcp_torch.save(state, checkpoint_id=root / f"{number}")
        hits.append(bool(lines.with_words(_HIT)))
        poison(state)
        dcp_torch.load(state, checkpoint_id=root / f"{number}")
        assert_same(state, expected)
    return hits


def test_structures_that_change_on_one_rank_and_back_are_always_right(shared_path: Path) -> None:
    found = run_gloo(a_b_a, 3, shared_path)
    assert len({tuple(hits) for hits in found}) == 1
    assert found[0][:2] == [False, False]
    assert all(found[0][2:])
