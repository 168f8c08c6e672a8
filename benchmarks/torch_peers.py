"""What torch and safetensors bring: torch DCP with its two formats, and `safetensors.torch`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from benchmarks.cases import Case
from benchmarks.contestant import Contestant, is_resharded
from benchmarks.places import sync

if TYPE_CHECKING:
    from benchmarks.states import State


class TorchDcp(Contestant):
    """`torch.distributed.checkpoint` with FileSystemWriter and FileSystemReader, as they are by default."""

    name = "torch-dcp"
    about = "torch DCP, FileSystemWriter / FileSystemReader"
    packages = ("torch",)

    def save(self, state: State, directory: str) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state.tensors, storage_writer=FileSystemWriter(directory, sync_files=self.settings.durable))

    def load(self, state: State, directory: str) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        load(state.tensors, storage_reader=FileSystemReader(directory))


class TorchHuggingFace(Contestant):
    """torch DCP with safetensors files, each rank its own; it always syncs them."""

    name = "torch-hf"
    about = "torch DCP, HuggingFaceStorageWriter / HuggingFaceStorageReader"
    packages = ("torch", "safetensors")

    def save(self, state: State, directory: str) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state.tensors, storage_writer=HuggingFaceStorageWriter(directory, save_distributed=True))

    def load(self, state: State, directory: str) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        load(state.tensors, storage_reader=HuggingFaceStorageReader(directory))


class Safetensors(Contestant):
    """A file of this rank's own tensors; loaded ones are copied into the targets."""

    name = "safetensors"
    about = "safetensors.torch save_file + fsync, load_file + copy into the targets"
    packages = ("safetensors",)

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return "has no loads under another layout" if is_resharded(case) else None

    def save(self, state: State, directory: str) -> None:
        from safetensors.torch import save_file

        os.makedirs(directory, exist_ok=True)
        save_file(state.locals, self._file(directory))
        if self.settings.durable:
            sync(self._file(directory))
            sync(directory)

    def load(self, state: State, directory: str) -> None:
        from safetensors.torch import load_file

        for name, tensor in load_file(self._file(directory)).items():
            state.locals[name].copy_(tensor)

    def _file(self, directory: str) -> str:
        return os.path.join(directory, f"rank{self.rank.rank}.safetensors")
