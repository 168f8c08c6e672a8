"""Files that are damaged, in the way, of a larger world, or refused, with DTensors on real ranks: as with numpy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import dcp_torch
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.formats.metadata_file import file_names
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.states import assert_same, poison, raised, same_on_all, shard, values

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="needs jobs of several sizes"),
]

Change = Callable[[Path], None]
State = dict[str, torch.Tensor | int]


def state_of(rank: TorchRank, tag: int) -> State:
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    return {"w": shard(values((12, 5), seed=tag), mesh, [Shard(0)]), "step": tag}


def save(rank: TorchRank, directory: Path, tag: int, background: bool) -> None:
    if background:
        dcp_torch.async_save(state_of(rank, tag), checkpoint_id=directory).get_result(60)
    else:
        dcp_torch.save(state_of(rank, tag), checkpoint_id=directory)


def load(rank: TorchRank, directory: Path) -> tuple[str, str]:
    """Load into a target that holds nothing of the kind; the first save must be what is found, where one is."""
    target = state_of(rank, 1)
    poison(target)
    target["step"] = -1
    found = raised(lambda: dcp_torch.load(target, checkpoint_id=directory))
    if not found[0]:
        assert_same(target, state_of(rank, 1))
    return found


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize("change", [flip, cut, empty, Path.unlink], ids=["flipped", "cut", "emptied", "missing"])
def test_a_damaged_file_is_one_error_on_all_ranks_that_names_it(
    change: Change, background: bool, tmp_path: Path
) -> None:
    run_gloo(save, 2, tmp_path, 1, background)
    (tmp_path / "stray").write_bytes(b"of nobody")
    for name in (".metadata", "_rank0_.bytes", "_rank1_.safetensors"):
        before = (tmp_path / name).read_bytes()
        change(tmp_path / name)
        kind, text = same_on_all(run_gloo(load, 2, tmp_path))
        assert kind in ("CorruptError", "IncompleteError", "NotFoundError"), text
        assert name in text
        (tmp_path / name).write_bytes(before)
        assert {kind for kind, _ in run_gloo(load, 2, tmp_path)} == {""}


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
def test_a_save_over_that_of_a_larger_world_leaves_nothing_of_it(background: bool, tmp_path: Path) -> None:
    run_gloo(save, 3, tmp_path, 2, background)
    assert (tmp_path / "_rank2_.safetensors").exists()
    run_gloo(save, 2, tmp_path, 1, background)
    assert {kind for kind, _ in run_gloo(load, 2, tmp_path)} == {""}
    named = {".metadata", *file_names((tmp_path / ".metadata").read_bytes())}
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".mailbox-")} == named


def save_on_a_broken_disk(rank: TorchRank, directory: Path, operation: str) -> tuple[str, str]:
    operations = FaultyOperations(fail_at=1, operations=[operation], error_number=28, forever=True)
    storage = LocalStorage(directory, operations if rank.rank == 1 else None)
    writer = FileSystemWriter(storage=storage)
    return raised(lambda: dcp_torch.save(state_of(rank, 2), storage_writer=writer))


@pytest.mark.parametrize("operation", ["create", "pwritev", "fsync"])
def test_a_full_disk_on_one_rank_is_one_error_on_all_and_the_old_checkpoint_stays(
    operation: str, tmp_path: Path
) -> None:
    run_gloo(save, 2, tmp_path, 1, False)
    before = sorted(path.name for path in tmp_path.iterdir())
    kind, text = same_on_all(run_gloo(save_on_a_broken_disk, 2, tmp_path, operation))
    assert (kind, "ENOSPC" in text) == ("StorageError", True), text
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert {kind for kind, _ in run_gloo(load, 2, tmp_path)} == {""}
