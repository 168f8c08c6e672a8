"""One flipped byte in a data file: an error that names file and tensor, or a load that does not need the byte.

For every flip the tests know, by docs/reference/format.md and numpy, which checksum block it lies in, and whether a
load wants this byte, some of the block, or all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core.api import read
from dcp_core.box import Box, intersect
from dcp_core.dtype import BY_CODE, BY_NAME
from dcp_core.errors import CorruptError
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import memory_directory, outcome_of
from tests.core.format_data_reader import Checkpoint
from tests.core.format_reader import Description, Tensor
from tests.core.io_samples import LAYOUTS, MEBIBYTE, Bits, Memory, Sample, Shards, same_bits
from tests.core.layouts import at
from tests.core.rank_jobs import load, save, together

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

SAVERS = 3
SHAPES: dict[str, tuple[str, tuple[int, ...], int]] = {
    "large": ("float32", (1000, 1100), 0),
    "columns": ("int32", (600, 1501), 1),
    "wide": ("uint8", (4, 2 * MEBIBYTE), 0),
    "exact": ("uint8", (3, MEBIBYTE), 0),
    "short": ("bfloat16", (3, MEBIBYTE // 2 + 1), 0),
    "scalar": ("float64", (), 0),
    **{f"layer.{number:03}": ("int64", (3 + number % 5, 40 + number % 7), 0) for number in range(200)},
    **{f"odd.{number:03}": ("uint8", (1 + number * 37 % 4000,), 0) for number in range(100)},
}
"""Type, shape, and the dimension that is cut when they are saved."""

Wanted = dict[str, Box]
"""What a load wants of each tensor."""


def sample_of(name: str) -> Sample:
    return Sample(name, BY_NAME[SHAPES[name][0]], SHAPES[name][1], list(SHAPES).index(name))


def even(shape: Sequence[int], ranks: int, rank: int, dim: int) -> list[Box]:
    return even_boxes(shape, ranks, rank, min(dim, len(shape) - 1)) if shape else [Box((), ())]


def save_all(context: RankContext, directory: str) -> None:
    rng, state = Random(context.rank), {}
    for name, (_, shape, dim) in SHAPES.items():
        boxes = even(shape, context.world_size, context.rank, dim)
        state[name] = Shards.cut(sample_of(name), boxes, rng).value
    save(state, directory)


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """A checkpoint by three ranks. Tests flip its bytes and flip them back."""
    with memory_directory() as path:
        run_ranks(save_all, SAVERS, str(path))
        yield path


# --- where bytes lie ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredChunk:
    """A chunk and its bytes."""

    tensor: Tensor
    box: Box
    file: str
    data_start: int
    start: int
    stop: int

    def blocks(self) -> Iterator[tuple[int, int]]:
        """First and last byte, and one behind, of each checksum block, counted from the chunk's start."""
        for first in range(0, self.stop - self.start, MEBIBYTE):
            yield first, min(first + MEBIBYTE, self.stop - self.start)

    def block_of(self, byte: int) -> slice:
        first = byte // MEBIBYTE * MEBIBYTE
        return slice(first, min(first + MEBIBYTE, self.stop - self.start))

    def wanted(self, wanted: Wanted) -> npt.NDArray[np.bool_]:
        """For each byte of the chunk, whether a load wants it."""
        mask = np.zeros((*self.box.sizes, BY_CODE[self.tensor.dtype].itemsize), np.bool_)
        box = wanted.get(self.tensor.name)
        common = None if box is None else intersect(self.box, box)
        if common is not None:
            start = tuple(a - b for a, b in zip(common.offsets, self.box.offsets, strict=True))
            mask[at(Box(start, common.sizes))] = True
        return mask.reshape(-1)


@dataclass(frozen=True)
class Flip:
    """A byte of a chunk that is not what it was; `byte` counts from the chunk's start."""

    chunk: StoredChunk
    byte: int

    @property
    def position(self) -> int:
        return self.chunk.start + self.byte

    def apply_to(self, bits: Bits) -> Bits:
        """The tensor as somebody reads it who checks nothing."""
        flipped = bits.copy()
        part = flipped[at(self.chunk.box)]
        raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8).copy()
        raw[self.byte] ^= 1
        part[...] = raw.view(part.dtype).reshape(part.shape)
        return flipped


def chunks_of(directory: Path) -> list[StoredChunk]:
    description = Description((directory / ".metadata").read_bytes())
    suffix = description.strings["suffix"]
    chunks = []
    for tensor in description.tensors:
        for number, (row, byte_offset) in enumerate(zip(tensor.files, tensor.byte_offsets, strict=True)):
            file = description.files[row]
            start = file.data_start + byte_offset
            box, stop = Box(*tensor.boxes[number]), start + tensor.nbytes(number)
            chunks.append(StoredChunk(tensor, box, file.name(suffix), file.data_start, start, stop))
    return chunks


def flips_in(chunks: Sequence[StoredChunk], rng: Random) -> list[Flip]:
    """First and last byte of every block of large chunks, bytes in the middle, and bytes of some small chunks."""
    flips = []
    for chunk in chunks:
        if chunk.stop - chunk.start >= MEBIBYTE or chunk.tensor.name == "scalar":
            for first, stop in chunk.blocks():
                flips += [Flip(chunk, byte) for byte in {first, stop - 1, rng.randrange(first, stop)}]
        elif rng.random() < 0.05:
            flips.append(Flip(chunk, rng.choice([0, chunk.stop - chunk.start - 1])))
    return flips


@contextmanager
def flipped(directory: Path, file: str, position: int) -> Iterator[None]:
    """Flip a bit of a byte, and flip it back."""
    descriptor = os.open(directory / file, os.O_RDWR)
    (before,) = os.pread(descriptor, 1, position)
    os.pwrite(descriptor, bytes([before ^ 1]), position)
    try:
        yield
    finally:
        os.pwrite(descriptor, bytes([before]), position)
        os.close(descriptor)


# --- loads -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Target:
    """Memory for what is wanted of each tensor."""

    wanted: Wanted
    memories: dict[str, Memory]

    @classmethod
    def of(cls, wanted: Wanted, rng: Random) -> Target:
        memories = {
            name: Memory.of(np.zeros(box.sizes, sample_of(name).dtype.bits), rng.choice(LAYOUTS))
            for name, box in wanted.items()
        }
        return cls(wanted, memories)

    @property
    def state(self) -> dict[str, Any]:
        return {
            name: ShardedArray(SHAPES[name][1], [self.wanted[name]], [memory.view], SHAPES[name][0])
            for name, memory in self.memories.items()
        }

    def clear(self) -> None:
        for memory in self.memories.values():
            memory.view[...] = 0

    def wrong(self) -> list[str]:
        """Tensors with an element that nobody saved."""
        return [
            name
            for name, memory in self.memories.items()
            if memory.view.tobytes() != sample_of(name).bits[at(self.wanted[name])].tobytes()
        ]

    def holds(self, flip: Flip) -> bool:
        """Whether the flipped tensor was taken as it lies on the disk."""
        name = flip.chunk.tensor.name
        expected = flip.apply_to(sample_of(name).bits)[at(self.wanted[name])]
        return same_bits(self.memories[name].view, expected)


def wanted_by(ranks: int, rank: int, dim: int) -> Wanted:
    found = {name: even(shape, ranks, rank, dim) for name, (_, shape, _) in SHAPES.items()}
    return {name: boxes[0] for name, boxes in found.items() if boxes}


def every_third() -> Wanted:
    """Some of many neighbours: what lies between them is nobody's concern."""
    names = [name for number, name in enumerate(SHAPES) if number % 3 == 1]
    return {name: Box.whole(SHAPES[name][1]) for name in names}


def as_saved_by_one() -> Wanted:
    """The chunks of one rank."""
    found = {name: even(shape, SAVERS, 1, dim) for name, (_, shape, dim) in SHAPES.items()}
    return {name: boxes[0] for name, boxes in found.items() if boxes}


WANTED = {
    "all of it": wanted_by(1, 0, 0),
    "rows": wanted_by(4, 1, 0),
    "columns": wanted_by(2, 1, 1),
    "as it was saved": as_saved_by_one(),
    "every third tensor": every_third(),
}


def near(name: str, wanted: Wanted) -> Wanted:
    """What is wanted of a tensor and of those around it in the file; all would take long."""
    names = sorted(SHAPES)
    place = names.index(name)
    return {name: wanted[name] for name in names[max(place - 8, 0) : place + 8] if name in wanted}


def check_flip(directory: Path, flip: Flip, target: Target, verify: Any) -> str:
    """Load, and judge the outcome; says what became of it."""
    block, wants = flip.chunk.block_of(flip.byte), flip.chunk.wanted(target.wanted)
    is_wanted, is_touched, is_whole = bool(wants[flip.byte]), bool(wants[block].any()), bool(wants[block].all())
    target.clear()
    outcome = outcome_of(load, target.state, str(directory), verify=verify)
    case = (flip, verify, outcome)
    if outcome.kind:
        assert outcome.kind == "CorruptError", case
        assert is_touched and verify, case
        assert flip.chunk.file in outcome.message and flip.chunk.tensor.name in outcome.message, case
        return "refused"
    assert not (is_whole and verify), case
    assert not (is_touched and verify == "full"), case
    if not is_wanted:
        assert target.wrong() == [], case
        return "not wanted"
    assert target.wrong() == [flip.chunk.tensor.name] and target.holds(flip), case
    return "not checked"


@pytest.mark.parametrize("wanted", list(WANTED))
def test_a_flipped_byte_is_found_in_every_block_that_is_read_whole(wanted: str, saved: Path) -> None:
    rng, seen = Random(wanted), []
    for number, flip in enumerate(flips_in(chunks_of(saved), rng)):
        modes: list[Any] = [True, "full", False]
        target = Target.of(near(flip.chunk.tensor.name, WANTED[wanted]), rng)
        for verify in modes if number % 3 == 0 else modes[:1]:
            with flipped(saved, flip.chunk.file, flip.position):
                seen.append((verify, check_flip(saved, flip, target, verify)))
    assert (True, "refused") in seen and ("full", "refused") in seen and (False, "not checked") in seen
    assert ((True, "not wanted") in seen) == (wanted != "all of it")
    target = Target.of(WANTED[wanted], rng)
    load(target.state, str(saved), verify="full")
    assert target.wrong() == []


def test_every_byte_of_a_run_of_small_neighbours_is_checked(saved: Path) -> None:
    """Merged reads: a flip anywhere in a stretch of small chunks is found and blamed on the right one."""
    chunks = sorted((chunk for chunk in chunks_of(saved) if chunk.tensor.name.startswith("odd.")), key=_place)
    names = {chunk.tensor.name for chunk in chunks[3:60]}
    target = Target.of({name: Box.whole(SHAPES[name][1]) for name in names}, Random(1))
    refused = 0
    for chunk in chunks[:64]:
        for byte in sorted({0, (chunk.stop - chunk.start) // 2, chunk.stop - chunk.start - 1}):
            with flipped(saved, chunk.file, chunk.start + byte):
                refused += check_flip(saved, Flip(chunk, byte), target, True) == "refused"
    assert refused > 100


def _place(chunk: StoredChunk) -> tuple[str, int]:
    return chunk.file, chunk.start


def test_a_tensor_that_is_read_alone_is_checked_too(saved: Path) -> None:
    rng = Random(3)
    for flip in rng.sample(flips_in(chunks_of(saved), rng), 20):
        name = flip.chunk.tensor.name
        with flipped(saved, flip.chunk.file, flip.position):
            with pytest.raises(CorruptError) as caught:
                read(saved, name)
            assert flip.chunk.file in str(caught.value) and name in str(caught.value)
            other = read(saved, "columns" if name != "columns" else "large")
        assert other.tobytes() == sample_of("columns" if name != "columns" else "large").bits.tobytes()
        assert read(saved, name).tobytes() == sample_of(name).bits.tobytes()


def test_a_flipped_byte_anywhere_in_a_header_or_its_checksums_is_found(saved: Path) -> None:
    target = Target.of({name: Box.whole(SHAPES[name][1]) for name in ("large", "layer.003", "odd.099")}, Random(4))
    for file, data_start in sorted({(chunk.file, chunk.data_start) for chunk in chunks_of(saved)}):
        rng = Random(file)
        edges = [0, 7, 8, 57, 88, 89, 108, 109, 120, data_start - 1]
        for position in [*edges, *rng.sample(range(data_start), 20)]:
            with flipped(saved, file, position):
                outcome = outcome_of(load, target.state, str(saved))
            assert outcome.kind == "CorruptError" and file in outcome.message, (file, position, outcome)
    load(target.state, str(saved))
    assert target.wrong() == []


# --- several ranks -----------------------------------------------------------------------------------


def load_flipped(context: RankContext, directory: str, dim: int) -> list[tuple[str, str, str]]:
    """Rank 0 flips, all load, and each judges what it got; returns the errors and whether one was due."""
    path, rng, seen = Path(directory), Random(f"flips {dim}"), []
    chunks = chunks_of(path)
    wanted = [wanted_by(context.world_size, rank, dim) for rank in range(context.world_size)]
    for flip in rng.sample(flips_in(chunks, rng), 25):
        target = Target.of(near(flip.chunk.tensor.name, wanted[context.rank]), Random(context.rank))
        block = flip.chunk.block_of(flip.byte)
        wants = [flip.chunk.wanted(boxes)[block] for boxes in wanted]
        due = "due" if any(mask.all() for mask in wants) else "possible" if any(mask.any() for mask in wants) else ""
        with flipped(path, flip.chunk.file, flip.position) if context.rank == 0 else _nothing():
            with together(context):
                pass
            outcome = outcome_of(load, target.state, directory)
            with together(context):
                pass
        if outcome.kind == "":
            is_wanted = flip.chunk.wanted(target.wanted)[flip.byte]
            assert target.wrong() == ([flip.chunk.tensor.name] if is_wanted else []), flip
        else:
            assert flip.chunk.file in outcome.message and flip.chunk.tensor.name in outcome.message, outcome
        seen.append((due, outcome.kind, outcome.message))
    return seen


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("dim", [0, 1])
def test_a_block_that_any_rank_reads_whole_is_one_error_on_all_ranks(dim: int, saved: Path) -> None:
    seen = run_ranks(load_flipped, 2, str(saved), dim)
    assert seen[0] == seen[1]
    for due, kind, message in seen[0]:
        assert kind in {"due": ("CorruptError",), "possible": ("CorruptError", ""), "": ("",)}[due], message
    assert sum(kind == "CorruptError" for _, kind, _ in seen[0]) > 5


def test_the_files_are_sound_when_all_is_flipped_back(saved: Path) -> None:
    stored = Checkpoint.read(saved)
    assert len(stored.description.tensors) == len(SHAPES)
