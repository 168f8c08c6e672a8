"""What is timed beside MindSpore: saves, loads, and the call of a background save, of one state in one process.

`load_checkpoint` of a safetensors file maps the file, and puts the mapping in the place of the parameters' memory. Its
pages come when they are looked at, and each is copied to fresh memory when it is first written: by the first step of
training. `load` of ours fills the memory that is there. So loads are compared at the point where both are the same:
when every page of every parameter has been written once.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import nn

import dcp_mindspore
from benchmarks.places import sync
from benchmarks.workloads import TensorSpec
from dcp_core.dtype import dtype_named
from dcp_mindspore.elements import memory_of, tensor_of_bits

PAGE_NBYTES = 4096

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that is timed.

    Attributes:
        fills: Whether it fills a net of touched memory; else it writes into a directory.
        about: What it does, in a line.
        run: Does it; is given the net, or the empty directory.
    """

    fills: bool
    about: str
    run: Callable[[Any], None]


class Contest:
    """The operations, on one state and what was saved of it.

    Args:
        specs: The parameters.
        directory: Where the checkpoints lie that are loaded; `save_sources` writes them.
    """

    def __init__(self, specs: tuple[TensorSpec, ...], directory: str) -> None:
        self.specs = specs
        self.net = net_of(specs, random_bits)
        self._sources = directory

    def save_sources(self) -> None:
        """Write what the loads read."""
        self._save_theirs(self._sources)
        self._save(self._sources)

    def fresh_net(self) -> nn.Cell:
        """A net to load into: other values, in memory that has been touched."""
        return net_of(self.specs, ones)

    def first_difference(self, net: nn.Cell) -> str | None:
        """The name of a parameter of which not every bit is as in the state, or None."""
        for name, loaded in raw_parameters(net):
            if not np.array_equal(loaded, random_bits(self.specs_by_name()[name])):
                return name
        return None

    def specs_by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.specs}

    def operations(self) -> dict[str, Operation]:
        """By name, in the order of the table."""
        return {
            "mindspore": Operation(False, "save_checkpoint(net, path, format='safetensors')", self._save_theirs),
            "mindspore-fsync": Operation(False, "the same, and fsync of the file", self._save_theirs_durably),
            "ours": Operation(False, "dcp_mindspore.save({'net': net}, checkpoint_id=path)", self._save),
            "ours-no-fsync": Operation(False, "the same with durable=False", self._save_early),
            "load-mapped": Operation(True, "load_checkpoint(path, net): maps the file, reads nothing", self._map),
            "load-mindspore": Operation(True, "the same, then one write to each page", self._map_and_write),
            "load-copied": Operation(True, "load_checkpoint(path), copied into the parameters", self._load_copying),
            "load-ours": Operation(True, "dcp_mindspore.load, then one write to each page", self._load_and_write),
            "load-unverified": Operation(True, "the same with verify=False", self._load_unverified),
            "copy": Operation(True, "numpy.copyto of all parameters, by one thread", self._copy),
            "async": Operation(False, "the call of dcp_mindspore.async_save", self._save_behind),
        }  # fmt: skip

    def _save_theirs(self, directory: str) -> None:
        mindspore.save_checkpoint(self.net, _theirs(directory), format="safetensors")

    def _save_theirs_durably(self, directory: str) -> None:
        self._save_theirs(directory)
        sync(_theirs(directory))

    def _save(self, directory: str) -> None:
        dcp_mindspore.save({"net": self.net}, checkpoint_id=_ours(directory))

    def _save_early(self, directory: str) -> None:
        dcp_mindspore.save({"net": self.net}, checkpoint_id=_ours(directory), durable=False)

    def _save_behind(self, directory: str) -> None:
        dcp_mindspore.async_save({"net": self.net}, checkpoint_id=_ours(directory))

    def _map(self, net: nn.Cell) -> None:
        mindspore.load_checkpoint(_theirs(self._sources), net, format="safetensors")

    def _map_and_write(self, net: nn.Cell) -> None:
        self._map(net)
        write_every_page(net)

    def _load_copying(self, net: nn.Cell) -> None:
        found = mindspore.load_checkpoint(_theirs(self._sources), format="safetensors")
        for name, target in raw_parameters(net):
            np.copyto(target, raw(found[name]))

    def _load_and_write(self, net: nn.Cell) -> None:
        dcp_mindspore.load({"net": net}, checkpoint_id=_ours(self._sources))
        write_every_page(net)

    def _load_unverified(self, net: nn.Cell) -> None:
        dcp_mindspore.load({"net": net}, checkpoint_id=_ours(self._sources), verify=False)
        write_every_page(net)

    def _copy(self, net: nn.Cell) -> None:
        for (_, target), (_, source) in zip(raw_parameters(net), raw_parameters(self.net), strict=True):
            np.copyto(target, source)


def _theirs(directory: str) -> str:
    return os.path.join(directory, "net.safetensors")


def _ours(directory: str) -> str:
    return os.path.join(directory, "net")


def net_of(specs: tuple[TensorSpec, ...], values: Callable[[TensorSpec], Bytes]) -> nn.Cell:
    """A net with these parameters, and values in them."""
    net = nn.Cell()
    for spec in specs:
        dtype = dtype_named(spec.dtype)
        bits = values(spec).view(dtype.bits).reshape(spec.shape)
        parameter = mindspore.Parameter(tensor_of_bits(bits, dtype), name=spec.name)
        net.insert_param_to_cell(spec.name.replace(".", "_"), parameter)
    return net


def random_bits(spec: TensorSpec) -> Bytes:
    """Nothing in them can be compressed; the same for the same name."""
    generator = np.random.Generator(np.random.SFC64(zlib.crc32(spec.name.encode())))
    return generator.integers(0, 1 << 64, -(-spec.nbytes // 8), np.uint64).view(np.uint8)[: spec.nbytes]


def ones(spec: TensorSpec) -> Bytes:
    """Bytes that no state has."""
    return np.ones(spec.nbytes, np.uint8)


def raw(tensor: Any) -> Bytes:
    """The memory of a tensor as bytes."""
    array: Bytes = memory_of(tensor).view.reshape(-1).view(np.uint8)
    return array


def raw_parameters(net: nn.Cell) -> Iterator[tuple[str, Bytes]]:
    """The memory of all parameters, by name."""
    for parameter in net.get_parameters():
        yield parameter.name, raw(parameter)


def write_every_page(net: nn.Cell) -> None:
    """Write one byte of each page, with the value that it has: what is a promise of memory so far becomes memory."""
    for _, memory in raw_parameters(net):
        memory[::PAGE_NBYTES] |= 0
