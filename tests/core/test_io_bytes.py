"""What is saved comes back bit for bit: sizes around every border, all dtypes, all memory layouts, other cuts.

The engines are black boxes here: states go in, files are read with plain safetensors and by the reader that knows
docs/reference/format.md alone, and loads under other layouts are compared with numpy.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from dcp_core.api import read
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, DTYPES
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import memory_directory
from tests.core.format_data_reader import Checkpoint
from tests.core.io_samples import LAYOUTS, MEBIBYTE, Layout, Memory, Sample, Shards, border_samples, dealt, same_bits
from tests.core.layouts import at, random_cut
from tests.core.rank_jobs import load, save, together

pytestmark = pytest.mark.timeout(120)

GIBIBYTE = 1 << 30
UINT8, FLOAT32 = BY_NAME["uint8"], BY_NAME["float32"]
SMALL_ONLY = [dtype for number, dtype in enumerate(DTYPES) if number % 3]


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "checkpoint"


def check_files(directory: Path, samples: list[Sample]) -> None:
    """Plain safetensors opens every data file, and an independent reader finds every element in its place."""
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "np") as opened:
            assert opened.metadata()["dcp.format"] == "1"
            assert all(opened.get_slice(key).get_shape() is not None for key in opened.keys())  # noqa: SIM118
    stored = Checkpoint.read(directory)
    tensors = {tensor.name: tensor for tensor in stored.description.tensors}
    assert sorted(tensors) == sorted(sample.name for sample in samples)
    for sample in samples:
        tensor = tensors[sample.name]
        assert (tensor.dtype, tensor.shape) == (sample.dtype.code, sample.shape)
        assert stored.bits(tensor).tobytes() == sample.bits.tobytes(), sample


# --- one process -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_dtype_and_size_comes_back_from_any_memory_into_any_memory(layout: Layout, directory: Path) -> None:
    rng = Random(layout.name)
    samples = border_samples(rng, DTYPES, SMALL_ONLY)
    sources = {sample.name: Memory.of(sample.bits, layout) for sample in samples}
    whole = {sample.name: [Box.whole(sample.shape)] for sample in samples}
    state = {
        sample.name: ShardedArray(sample.shape, whole[sample.name], [sources[sample.name].view], sample.dtype.name)
        for sample in samples
    }
    save(state, str(directory))
    assert all(source.is_clean_beside() for source in sources.values())
    check_files(directory, samples)
    checks: tuple[Any, ...] = (True, "full", False)
    for verify in checks:
        targets = [Shards.cut(sample, whole[sample.name], rng, poisoned=True) for sample in samples]
        target = {shards.sample.name: shards.value for shards in targets}
        load(target, str(directory), verify=verify)
        for shards in targets:
            shards.check()


def test_plain_arrays_of_any_strides_come_back(directory: Path) -> None:
    rng = Random(1)
    base = np.arange(700 * 900, dtype=np.int32).reshape(700, 900)
    state: dict[str, Any] = {
        "transposed": base.T,
        "steps": base[::3, 1::2],
        "backwards": base[::-1, ::-2],
        "column": base[:, 5],
        "row": base[5],
        "expanded rows": np.broadcast_to(base[7], (600, 900)),
        "expanded columns": np.broadcast_to(base[:, 7:8], (700, 500)),
        "expanded element": np.broadcast_to(base[3, 4], (3, 1 << 17)),
        "windows": np.lib.stride_tricks.sliding_window_view(base[0], 100),
        "fortran": np.asfortranarray(base),
        "cube": base.reshape(10, 70, 900).transpose(2, 0, 1),
        "big-endian": base.astype(">i4")[::2],
        "read-only": base[1:2],
        "number": np.array(3.5),
        "nothing": base[:0],
    }
    state["read-only"].setflags(write=False)
    expected = {key: np.array(value, order="C") for key, value in state.items()}
    save(state, str(directory))
    target = {key: Memory.of(np.zeros(value.shape, value.dtype), rng.choice(LAYOUTS)) for key, value in state.items()}
    load({key: memory.view for key, memory in target.items()}, str(directory))
    for key, memory in target.items():
        np.testing.assert_array_equal(memory.view, state[key], err_msg=key)
        assert memory.is_clean_beside(), key
        assert same_bits(read(directory, key), expected[key].astype(state[key].dtype.newbyteorder("<"))), key


def test_targets_of_all_kinds_side_by_side_are_filled(directory: Path) -> None:
    """Plain and strided ones, other byte orders and types, in turn, whole and in columns: each takes another way."""
    whole = np.random.default_rng(6).standard_normal((256, 240), np.float32)
    state: dict[str, Any] = {f"layer.{number:03}": whole + number for number in range(200)}
    save(state, str(directory))
    kinds: list[Callable[[tuple[int, ...]], Any]] = [
        lambda sizes: np.zeros(sizes, np.float32),
        lambda sizes: np.zeros(sizes, ">f4"),
        lambda sizes: np.zeros(sizes[::-1], np.float32).T,
        lambda sizes: np.zeros(sizes, np.float64),
        lambda sizes: np.zeros((*sizes, 2), np.float32)[..., 0],
        lambda sizes: np.zeros(sizes, ">f8")[::-1],
    ]
    rng, targets, boxes = Random(8), {}, {}
    for key in state:
        box = Box((0, 0), whole.shape) if rng.random() < 0.5 else Box((3, 100), (200, rng.randint(1, 140)))
        targets[key], boxes[key] = rng.choice(kinds)(box.sizes), box
    shards = {key: ShardedArray(whole.shape, [boxes[key]], [array]) for key, array in targets.items()}
    load(shards, str(directory))
    for key, array in targets.items():
        np.testing.assert_array_equal(array, state[key][at(boxes[key])], err_msg=key)


def test_any_region_can_be_read_alone(directory: Path) -> None:
    rng = Random(2)
    samples = border_samples(rng, DTYPES, SMALL_ONLY)
    held = [Shards.cut(sample, random_cut(rng, sample.shape), rng) for sample in samples]
    save({shards.sample.name: shards.value for shards in held}, str(directory))
    for sample in samples:
        bits = sample.bits
        assert same_bits(read(directory, sample.name), bits), sample
        for _ in range(3 if bits.size else 0):
            offsets = tuple(rng.randrange(size) for size in bits.shape)
            sizes = tuple(rng.randint(1, size - start) for size, start in zip(bits.shape, offsets, strict=True))
            box = Box(offsets, sizes)
            assert same_bits(read(directory, sample.name, box), bits[at(box)]), (sample, box)


# --- several ranks -----------------------------------------------------------------------------------


def samples_of_round(rng: Random) -> list[Sample]:
    """A dozen tensors, a few of them of several MiB."""
    some = rng.sample(border_samples(rng, DTYPES, SMALL_ONLY), 12)
    large = [
        Sample("large.rows", FLOAT32, (rng.randint(500, 800), 1024), 1),
        Sample("large.bytes", UINT8, (3, MEBIBYTE + rng.randint(-1, 1)), 2),
        Sample("large.halves", BY_NAME["bfloat16"], (32, 40, rng.randint(700, 900)), 3),
    ]
    return [*some, *large]


def save_and_load(context: RankContext, directory: str, seed: int) -> int:
    """Save on k ranks, load on m, for all k and m; all tensors are cut at random both times."""
    total = 0
    for savers in range(1, context.world_size + 1):
        rng = Random(f"{seed} {savers}")
        samples = samples_of_round(rng)
        total += sum(sample.nbytes for sample in samples)
        with together(context):
            if context.rank < savers:
                held = dealt(samples, rng, savers, context.rank)
                save({shards.sample.name: shards.value for shards in held}, directory, process_group=range(savers))
                if context.rank == 0:
                    check_files(Path(directory), samples)
        for loaders in range(1, context.world_size + 1):
            with together(context):
                if context.rank < loaders:
                    load_cut_anew(directory, samples, loaders, context.rank, Random(f"{seed} {savers} {loaders}"))
    return total


def load_cut_anew(directory: str, samples: list[Sample], loaders: int, rank: int, rng: Random) -> None:
    """Load evenly cut rows or columns, or random boxes, of each tensor."""
    verify = rng.choice([True, "full", False])
    own = Random(f"{rng.random()} {rank}")
    targets = []
    for sample in samples:
        if sample.shape and rng.random() < 0.6:
            boxes = even_boxes(sample.shape, loaders, rank, rng.randrange(len(sample.shape)))
        else:
            boxes = [box for box in random_cut(own, sample.shape) if own.random() < 0.5]
        targets.append(Shards.cut(sample, [box for box in boxes if not box.is_empty], own, poisoned=True))
    state = {target.sample.name: target.value for target in targets}
    load(state, directory, verify=verify, process_group=range(loaders))
    for target in targets:
        target.check()


def test_what_any_number_of_ranks_saved_comes_back_on_any_number_of_ranks(directory: Path) -> None:
    totals = run_ranks(save_and_load, 4, str(directory), 7, timeout_seconds=100)
    assert totals == [totals[0]] * 4 and totals[0] > 16 * MEBIBYTE


MANY = 3000


def small_samples() -> list[Sample]:
    """Thousands of tensors of all dtypes that are of no size to speak of."""
    rng = Random(3)
    names = rng.sample(range(10 * MANY), MANY)
    return [
        Sample(f"layer.{name}.{number}", rng.choice(DTYPES), (rng.randrange(40), rng.randint(1, 8)), number)
        for number, name in enumerate(names)
    ]


def save_many(context: RankContext, directory: str) -> None:
    rng = Random(4)
    state: dict[str, Any] = {}
    for number, sample in enumerate(small_samples()):
        kind = rng.randrange(3)
        if kind == 0 and sample.dtype.numpy is not None:
            state[sample.name] = sample.bits  # replicated
        else:
            boxes = even_boxes(sample.shape, context.world_size, context.rank, kind % 2)
            state[sample.name] = Shards.cut(sample, boxes, Random(number)).value
    save(state, directory)


def load_many(context: RankContext, directory: str, verify: Any) -> None:
    rng = Random(5)
    targets = []
    for sample in small_samples():
        boxes = even_boxes(sample.shape, context.world_size, context.rank, rng.randrange(2))
        targets.append(Shards.cut(sample, boxes, rng, poisoned=True))
    load({target.sample.name: target.value for target in targets}, directory, verify=verify)
    for target in targets:
        target.check()


def test_thousands_of_small_tensors_come_back(directory: Path) -> None:
    run_ranks(save_many, 2, str(directory))
    check_files(directory, small_samples())
    run_ranks(load_many, 1, str(directory), "full")
    run_ranks(load_many, 3, str(directory), True)


# --- beyond 2 and 4 GiB ------------------------------------------------------------------------------

_NEEDED_BYTES = 12 * GIBIBYTE


@pytest.fixture
def roomy_directory() -> Iterator[Path]:
    """A directory in memory where five gibibytes are no burden."""
    if not os.access("/dev/shm", os.W_OK) or shutil.disk_usage("/dev/shm").free < _NEEDED_BYTES:
        pytest.skip("needs 12 GiB free in /dev/shm for files of more than 4 GiB")
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    if int(meminfo["MemAvailable"].split()[0]) * 1024 < _NEEDED_BYTES:
        pytest.skip("needs 12 GiB of free memory for files of more than 4 GiB")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="dcp large ") as path:
        yield Path(path)


def test_an_array_of_more_than_2_gib_is_right_on_both_sides_of_every_border(roomy_directory: Path) -> None:
    nbytes = 2 * GIBIBYTE + 3 * MEBIBYTE + 5
    values = np.zeros(nbytes, np.uint8)  # pages that nobody writes cost nothing
    borders = [0, MEBIBYTE, 2 * GIBIBYTE - MEBIBYTE, 2 * GIBIBYTE - 4096, 2 * GIBIBYTE, nbytes]
    for number, border in enumerate(borders):
        values[max(border - 3, 0) : border + 3] = number + 1
    save({"large": values, "late": np.arange(5)}, str(roomy_directory / "step"))
    for border in borders:
        start, stop = max(border - 70_000, 0), min(border + 70_000, nbytes)
        found = read(roomy_directory / "step", "large", Box((start,), (stop - start,)))
        assert same_bits(found, values[start:stop]), border
    assert read(roomy_directory / "step", "late").tolist() == [0, 1, 2, 3, 4]


_PRIME_ROW = 1_000_003
_ROWS = 4400


def test_parts_of_more_than_2_gib_are_loaded_across_the_border_of_4_gib(roomy_directory: Path) -> None:
    row = np.random.default_rng(1).integers(0, 256, _PRIME_ROW, np.uint8)
    values = np.broadcast_to(row, (_ROWS, _PRIME_ROW))  # a byte that is 2 or 4 GiB off is another one
    save({"large": values}, str(roomy_directory))
    assert max(path.stat().st_size for path in roomy_directory.glob("*.safetensors")) > 4 * GIBIBYTE
    for border in (2 * GIBIBYTE, 4 * GIBIBYTE):
        around = Box((border // _PRIME_ROW - 1, 0), (3, _PRIME_ROW))
        assert np.array_equal(read(roomy_directory, "large", around), values[:3]), border
    rows = 2 * GIBIBYTE // _PRIME_ROW + 2
    box = Box((_ROWS - rows, 0), (rows, _PRIME_ROW))
    target = np.empty(box.sizes, np.uint8)
    load({"large": ShardedArray(values.shape, [box], [target])}, str(roomy_directory))
    assert all(np.array_equal(found, row) for found in target)
    del target
    for offset in (2 * GIBIBYTE, 4 * GIBIBYTE):
        at_row = offset // _PRIME_ROW - 1
        column = Box((at_row, 17), (3, 200))
        part = ShardedArray(values.shape, [column], [np.empty(column.sizes, np.uint8)])
        load({"large": part}, str(roomy_directory), verify="full")
        assert np.array_equal(part.arrays[0], values[at(column)])
