"""Tensors for tests of the byte work: any bits, of sizes around every border, in memory of any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod
from random import Random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box
from dcp_core.dtype import DType
from dcp_core.testing.numpy_ranks import ShardedArray
from tests.core.layouts import at, deal, random_cut

Bits: TypeAlias = npt.NDArray[Any]
KIBIBYTE, MEBIBYTE = 1 << 10, 1 << 20
GUARD = 0xA5


def random_bits(seed: int, shape: Sequence[int], dtype: DType) -> Bits:
    """Any bit pattern, the same for the same seed."""
    raw = np.random.default_rng(seed).integers(0, 256, prod(shape) * dtype.itemsize, np.uint8)
    if dtype.name == "bool":
        raw &= 1
    return raw.view(dtype.bits).reshape(tuple(shape))


def same_bits(one: Bits, other: Bits) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How elements lie in memory.

    Attributes:
        name: Tells it from others.
        fortran: The first dimension runs fastest.
        step: Every how many elements one of the array lies, in each dimension; negative: backwards.
        pad: Elements of other use at the end of each dimension.
        lead: Bytes before the first element; odd ones make an array that is not aligned.
    """

    name: str
    fortran: bool = False
    step: int = 1
    pad: int = 0
    lead: int = 64

    def strides(self, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
        strides, reach = [0] * len(shape), itemsize
        for dim in range(len(shape)) if self.fortran else reversed(range(len(shape))):
            strides[dim] = self.step * reach
            reach *= max(shape[dim], 1) * abs(self.step) + self.pad
        return tuple(strides)

    def nbytes(self, shape: Sequence[int], itemsize: int) -> int:
        return 2 * self.lead + itemsize * prod(max(size, 1) * abs(self.step) + self.pad for size in shape)

    def view(self, raw: npt.NDArray[np.uint8], shape: Sequence[int], dtype: np.dtype[Any]) -> Bits:
        """The array in its memory."""
        strides = self.strides(shape, dtype.itemsize)
        first = sum(-stride * (size - 1) for stride, size in zip(strides, shape, strict=True) if stride < 0 < size)
        return np.ndarray(tuple(shape), dtype, raw.data, self.lead + first, strides)


LAYOUTS = (
    Layout("plain"),
    Layout("fortran", fortran=True),
    Layout("steps", step=2),
    Layout("backwards", step=-1),
    Layout("odd address", lead=61),
    Layout("window", pad=5),
    Layout("fortran, backwards, with steps", fortran=True, step=-3, pad=1),
)


@dataclass(frozen=True, eq=False)
class Memory:
    """An array and all the memory around it."""

    raw: npt.NDArray[np.uint8]
    view: Bits
    layout: Layout

    @classmethod
    def of(cls, bits: Bits, layout: Layout) -> Memory:
        """A copy of an array, laid out; the memory around it is filled with guard bytes."""
        raw = np.full(layout.nbytes(bits.shape, bits.itemsize), GUARD, np.uint8)
        view = layout.view(raw, bits.shape, bits.dtype)
        view[...] = bits
        return cls(raw, view, layout)

    def is_clean_beside(self) -> bool:
        """Whether the guard bytes are all there."""
        copy = self.raw.copy()
        bare = np.dtype(f"V{self.view.itemsize}")
        self.layout.view(copy, self.view.shape, bare)[...] = np.frombuffer(bytes([GUARD]) * bare.itemsize, bare)[0]
        return bool((copy == GUARD).all())


def poison_of(bits: Bits) -> Bits:
    """Other bits in every element."""
    if bits.dtype == np.bool_:
        return np.logical_not(bits)
    flipped = np.invert(np.ascontiguousarray(bits).reshape(-1).view(np.uint8))
    return flipped.view(bits.dtype).reshape(bits.shape)


# -- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A global tensor, made of a seed."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    seed: int

    @property
    def bits(self) -> Bits:
        """All elements, read-only."""
        return _remembered(self)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@lru_cache(maxsize=512)
def _remembered(sample: Sample) -> Bits:
    bits = random_bits(sample.seed, sample.shape, sample.dtype)
    bits.setflags(write=False)
    return bits


def border_counts(itemsize: int) -> list[int]:
    """Numbers of elements around 0, 64 KiB, and 1 MiB, and several MiB."""
    small, block = 64 * KIBIBYTE // itemsize, MEBIBYTE // itemsize
    return [0, 1, 7, small - 1, small, small + 1, block - 1, block, block + 1, 2 * block, 3 * block + 5]


def shapes_of(number: int, rng: Random) -> list[tuple[int, ...]]:
    """Ways to shape so many elements: flat, with dimensions of 1, and as a box of two factors where there are any."""
    factors = [factor for factor in (7, 8, 64, 3, 5) if number and number % factor == 0]
    shapes: list[tuple[int, ...]] = [(number,), (1, number), (number, 1)]
    if factors:
        factor = rng.choice(factors)
        shapes.append((factor, number // factor))
        shapes.append((number // factor, 1, factor))
    return shapes


def border_samples(rng: Random, dtypes: Sequence[DType], small_only: Sequence[DType] = ()) -> list[Sample]:
    """Tensors of every size at a border, for every dtype; 0-d ones too; no large ones for some dtypes."""
    samples, number = [], count()
    for dtype in dtypes:
        counts = border_counts(dtype.itemsize)
        for elements in counts[:6] if dtype in small_only else counts:
            shape = rng.choice(shapes_of(elements, rng))
            samples.append(Sample(f"{dtype.name}.{elements}", dtype, shape, next(number)))
        samples.append(Sample(f"{dtype.name}.scalar", dtype, (), next(number)))
    rng.shuffle(samples)
    return samples


# -- shards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Shards:
    """Boxes of one tensor in memory of this rank."""

    sample: Sample
    boxes: tuple[Box, ...]
    memories: tuple[Memory, ...]

    @classmethod
    def cut(cls, sample: Sample, boxes: Sequence[Box], rng: Random, *, poisoned: bool = False) -> Shards:
        bits = sample.bits
        parts = [bits[at(box)] for box in boxes]
        memories = [Memory.of(poison_of(part) if poisoned else part, rng.choice(LAYOUTS)) for part in parts]
        return cls(sample, tuple(boxes), tuple(memories))

    @property
    def value(self) -> ShardedArray:
        views = [memory.view for memory in self.memories]
        return ShardedArray(self.sample.shape, self.boxes, views, self.sample.dtype.name)

    def check(self) -> None:
        """Every element is the tensor's, and nothing beside it was written."""
        bits = self.sample.bits
        for box, memory in zip(self.boxes, self.memories, strict=True):
            assert same_bits(memory.view, bits[at(box)]), (self.sample, box, memory.layout)
            assert memory.is_clean_beside(), (self.sample, box, memory.layout)


def dealt(samples: Sequence[Sample], rng: Random, ranks: int, rank: int) -> list[Shards]:
    """What one rank holds of tensors that are cut at random; `rng` must be at the same place on all ranks."""
    held = []
    for sample in samples:
        hand = deal(rng, random_cut(rng, sample.shape), ranks)[rank]
        held.append(Shards.cut(sample, hand, Random(f"{sample.seed} {rank}")))
    return held
