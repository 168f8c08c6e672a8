"""Open weights: a Hugging Face directory of whole tensors, loaded into shards by this project and by torch."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from benchmarks.cases import Case
from benchmarks.contestant import Contestant

if TYPE_CHECKING:
    from benchmarks.states import State

_FILES = 4


class OpenWeights(Contestant):
    """Rank 0 writes the directory, as `save_pretrained` does: a few files, and an index."""

    packages = ("torch", "safetensors")

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return "saves as safetensors does" if case.measure == "save" else None

    def save(self, state: State, directory: str) -> None:
        import torch.distributed as dist

        if self.rank.is_first:
            _write_directory(state, directory)
        dist.barrier()


class OursOpenWeights(OpenWeights):
    """`dcp_torch.load` with a `HuggingFaceReader`."""

    name = "ours-open"
    about = "dcp_torch, HuggingFaceReader; there are no checksums to check"

    def load(self, state: State, directory: str) -> None:
        import dcp_torch

        dcp_torch.load(state.tensors, storage_reader=dcp_torch.HuggingFaceReader(directory))


class TorchOpenWeights(OpenWeights):
    """torch DCP with its `HuggingFaceStorageReader`."""

    name = "torch-open"
    about = "torch DCP, HuggingFaceStorageReader"

    def load(self, state: State, directory: str) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        load(state.tensors, storage_reader=HuggingFaceStorageReader(directory))


def _write_directory(state: State, directory: str) -> None:
    from safetensors.torch import save_file

    from benchmarks.states import whole_tensor

    os.makedirs(directory)
    weight_map: dict[str, str] = {}
    for row in range(_FILES):
        name = f"model-{row + 1:05}-of-{_FILES:05}.safetensors"
        own = state.specs[len(state.specs) * row // _FILES : len(state.specs) * (row + 1) // _FILES]
        save_file({spec.name: whole_tensor(spec) for spec in own}, os.path.join(directory, name))
        weight_map |= {spec.name: name for spec in own}
    with open(os.path.join(directory, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {}, "weight_map": weight_map}, file)
