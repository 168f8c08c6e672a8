"""Peers from PyPI, where they are installed: torchsnapshot, orbax-checkpoint, torch_checkpointing.

None of them is needed to run the benchmarks, and none is known to type checkers: `importlib` imports them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case, Settings
from benchmarks.contestant import Contestant
from benchmarks.places import sync_tree

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from benchmarks.ranks import Rank
    from benchmarks.states import State


class TorchSnapshot(Contestant):
    """`Snapshot.take` and `Snapshot.restore`; shards are torch's ShardedTensor, as it knows no DTensor."""

    name = "torchsnapshot"
    about = "torchsnapshot Snapshot.take + fsync, Snapshot.restore"
    module = "torchsnapshot"
    packages = ("torchsnapshot",)

    def save(self, state: State, directory: str) -> None:
        import torch.distributed as dist

        snapshots = importlib.import_module("torchsnapshot")
        snapshots.Snapshot.take(directory, {"state": snapshots.StateDict(**_as_sharded_tensors(state))})
        if self.settings.durable:
            dist.barrier()
            if self.rank.is_first:
                sync_tree(directory)

    def load(self, state: State, directory: str) -> None:
        snapshots = importlib.import_module("torchsnapshot")
        targets = snapshots.StateDict(**_as_sharded_tensors(state))
        snapshots.Snapshot(directory).restore({"state": targets})


def _as_sharded_tensors(state: State) -> dict[str, Any]:
    """The same memory as torch's older kind of shards; plain tensors on one rank."""
    if state.rank.world_size == 1:
        return dict(state.tensors)
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

    sharded = {}
    for spec in state.specs:
        local = state.locals[spec.name]
        offsets = [0] * local.ndim
        offsets[state.cut] = state.rank.rank * local.shape[state.cut]
        metadata = ShardMetadata(offsets, list(local.shape), f"rank:{state.rank.rank}/cpu")
        sharded[spec.name] = ShardedTensor._init_from_local_shards([Shard(local, metadata)], *spec.shape)
    return sharded


class Orbax(Contestant):
    """`PyTreeCheckpointer` over numpy views of the tensors; what it restores is copied into the targets."""

    name = "orbax"
    about = "orbax-checkpoint PyTreeCheckpointer + fsync; restored arrays are copied into the targets"
    module = "orbax.checkpoint"
    packages = ("orbax-checkpoint", "tensorstore", "jax")

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return "takes part on one rank: several would need a jax cluster" if case.world_size > 1 else None

    def save(self, state: State, directory: str) -> None:
        orbax = importlib.import_module("orbax.checkpoint")
        with orbax.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(directory, {name: _as_array(tensor) for name, tensor in state.locals.items()})
        if self.settings.durable:
            sync_tree(directory)

    def load(self, state: State, directory: str) -> None:
        import numpy as np
        import torch

        orbax = importlib.import_module("orbax.checkpoint")
        wanted = {name: orbax.RestoreArgs(restore_type=np.ndarray) for name in state.locals}
        with orbax.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(directory, restore_args=wanted)
        for name, tensor in state.locals.items():
            bits = restored[name].view(np.uint8).reshape(-1)
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(bits))


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A numpy view of a tensor's memory; bfloat16 by jax's own numpy type."""
    import torch

    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    types = importlib.import_module("ml_dtypes")
    view: np.ndarray[Any, Any] = tensor.view(torch.int16).numpy().view(types.bfloat16)
    return view


class TorchCheckpointing(Contestant):
    """`CheckpointManager` with synchronous saves, one rank, no resharder.

    Direct I/O, its default, is off: version 0.1.1 hands unaligned buffers to it, which ext4 refuses.
    """

    name = "torch_checkpointing"
    about = "torch_checkpointing CheckpointManager, synchronous saves + fsync"
    module = "torch_checkpointing"
    packages = ("torch_checkpointing",)

    def __init__(self, settings: Settings, rank: Rank) -> None:
        super().__init__(settings, rank)
        self._manager: Any = None

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return "takes part on one rank" if case.world_size > 1 else None

    @property
    def manager(self) -> Any:
        if self._manager is None:
            package = importlib.import_module("torch_checkpointing")
            files = importlib.import_module("torch_checkpointing.storage.filesystem")
            config = package.CheckpointManager.Config.with_sync_save()
            config.storage_config = files.LocalFileSystemStorageConfig(use_direct_io=False)
            self._manager = config.build()
        return self._manager

    def save(self, state: State, directory: str) -> None:
        self.manager.save(directory, {"state": dict(state.tensors)})
        if self.settings.durable:
            sync_tree(directory)

    def load(self, state: State, directory: str) -> None:
        self.manager.load(directory, into={"state": dict(state.tensors)})
