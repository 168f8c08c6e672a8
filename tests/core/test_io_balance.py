"""Who writes how much, and how much a load under another layout reads: counted on real files, by real ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core.box import Box, slices
from dcp_core.dtype import BY_NAME
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import memory_directory
from tests.core.format_reader import Description
from tests.core.io_probes import Extent, MeteredOperations, reader_over
from tests.core.io_samples import KIBIBYTE, MEBIBYTE, Bits, random_bits
from tests.core.layouts import at
from tests.core.rank_jobs import load, save

pytestmark = pytest.mark.timeout(120)

SAVERS = 4


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "checkpoint"


def values_of(shape: Sequence[int], seed: int, dtype: str = "uint8") -> Bits:
    return random_bits(seed, shape, BY_NAME[dtype])


def data_bytes(directory: Path) -> dict[int, int]:
    """Bytes of tensors that each rank wrote."""
    description = Description((directory / ".metadata").read_bytes())
    written: dict[int, int] = {}
    for file in description.files:
        if file.kind == 0:
            written[file.rank] = written.get(file.rank, 0) + file.nbytes - file.data_start
    return written


# --- who writes --------------------------------------------------------------------------------------

STATES: dict[str, dict[str, tuple[str, tuple[int, ...], bool]]] = {
    "one embedding": {
        "embedding": ("float32", (5001, 700), False),
        "norm": ("float32", (700,), False),
        "layer": ("float32", (400, 700), True),
    },
    "an embedding and its moments": {
        "embedding": ("float32", (2099, 512), False),
        "first": ("float64", (2099, 512), False),
        "second": ("float32", (2099, 512), False),
        **{f"layer.{number}": ("float32", (64, 33 + number), True) for number in range(20)},
        **{f"bias.{number}": ("float32", (65,), False) for number in range(20)},
    },
    "bytes of odd lengths": {"table": ("uint8", (3003, 4001), False), "mask": ("bool", (1003, 77), True)},
}
"""By name: type, shape, and whether it is cut by rows when it is saved; else every rank holds it."""


def state_of(case: str, ranks: int, rank: int, dim: int = 0, *, empty: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, (name, (dtype, shape, is_cut)) in enumerate(STATES[case].items()):
        array = np.zeros(shape, dtype) if empty else values_of(shape, number, dtype)
        if is_cut or dim:
            boxes = even_boxes(shape, ranks, rank, min(dim, len(shape) - 1))
            state[name] = ShardedArray.cut(array, boxes, dtype)
        else:
            state[name] = array
    return state


def save_case(context: RankContext, directory: str, case: str) -> None:
    save(state_of(case, context.world_size, context.rank), directory)


def load_case(context: RankContext, directory: str, case: str, dim: int, verify: Any) -> None:
    target = state_of(case, context.world_size, context.rank, dim, empty=True)
    load(target, directory, verify=verify)
    expected = state_of(case, context.world_size, context.rank, dim)
    for name, value in target.items():
        found = value.arrays if isinstance(value, ShardedArray) else [value]
        right = expected[name].arrays if isinstance(value, ShardedArray) else [expected[name]]
        assert [array.tobytes() for array in found] == [array.tobytes() for array in right], name


@pytest.mark.parametrize("case", list(STATES))
def test_a_dominating_replica_is_shared_out_by_rows_and_comes_back_everywhere(case: str, directory: Path) -> None:
    run_ranks(save_case, SAVERS, str(directory), case)
    written = data_bytes(directory)
    total = sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape, _ in STATES[case].values())
    assert sum(written.values()) == total
    assert max(written.values()) <= 1.05 * total / SAVERS
    tensors = {tensor.name: tensor for tensor in Description((directory / ".metadata").read_bytes()).tensors}
    dominating = tensors[next(iter(STATES[case]))]
    assert len(dominating.boxes) > 1
    assert all(sizes[1:] == dominating.shape[1:] for _, sizes in dominating.boxes)
    for loaders, dim, verify in [(1, 0, "full"), (2, 1, True), (3, 1, "full"), (4, 0, True), (4, 1, "full")]:
        run_ranks(load_case, loaders, str(directory), case, dim, verify)


# --- how much is read --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What one rank read of data sections, and what it wanted."""

    read: int
    wanted: int
    twice: int


def measured(extents: Sequence[Extent], directory: Path, wanted: int) -> Reading:
    """Count bytes of data sections, and those among them that were read more than once."""
    description = Description((directory / ".metadata").read_bytes())
    starts = {file.name(description.strings["suffix"]): file.data_start for file in description.files}
    total, twice, last = 0, 0, ("", 0)
    for extent in sorted(extents, key=lambda extent: (extent.name, extent.start)):
        start, stop = max(extent.start, starts[extent.name]), extent.stop
        if stop <= start:
            continue
        total += stop - start
        if last[0] == extent.name:
            twice += max(min(last[1], stop) - start, 0)
            last = (extent.name, max(last[1], stop))
        else:
            last = (extent.name, stop)
    return Reading(total, wanted, twice)


def save_rows(context: RankContext, directory: str, shapes: dict[str, tuple[int, ...]]) -> None:
    state = {}
    for number, (name, shape) in enumerate(shapes.items()):
        boxes = even_boxes(shape, context.world_size, context.rank, 0)
        state[name] = ShardedArray.cut(values_of(shape, number), boxes, "uint8")
    save(state, directory)


def load_metered(
    context: RankContext,
    directory: str,
    shapes: dict[str, tuple[int, ...]],
    loads: list[list[dict[str, Box]]],
    verify: Any,
) -> list[Reading]:
    """Load this rank's boxes, load after load, and count what was read for them."""
    readings = []
    for boxes in loads:
        target: dict[str, Any] = {
            name: ShardedArray(shapes[name], [box], [np.zeros(box.sizes, np.uint8)])
            for name, box in boxes[context.rank].items()
        }
        meter = MeteredOperations()
        load(target, directory, storage_reader=reader_over(meter), verify=verify, broadcast_replicated_tensors=False)
        wanted = 0
        for number, (name, shape) in enumerate(shapes.items()):
            if name in target:
                found = target[name].arrays[0]
                assert np.array_equal(found, values_of(shape, number)[at(boxes[context.rank][name])]), name
                wanted += found.nbytes
        readings.append(measured(meter.extents, Path(directory), wanted))
    return readings


GAPS = [
    0,
    1,
    512,
    4 * KIBIBYTE,
    6 * KIBIBYTE,
    7 * KIBIBYTE,
    16 * KIBIBYTE,
    40 * KIBIBYTE,
    64 * KIBIBYTE,
    300 * KIBIBYTE,
]


@pytest.mark.parametrize("run", [64 * KIBIBYTE, 100 * KIBIBYTE + 13, MEBIBYTE + 5])
def test_inner_slices_of_64_kib_and_more_read_little_beside_what_is_wanted(run: int, directory: Path) -> None:
    rows = 9
    shapes = {f"gap.{gap}": (rows, run + gap) for gap in GAPS}
    run_ranks(save_rows, 2, str(directory), shapes)
    loads = [[{f"gap.{gap}": Box((0, start), (rows, run))} for start in (0, gap)] for gap in GAPS]
    for verify in (True, False):
        for readings in run_ranks(load_metered, 2, str(directory), shapes, loads, verify):
            for gap, reading in zip(GAPS, readings, strict=True):
                assert reading.wanted <= reading.read <= 1.1 * reading.wanted, (gap, verify, reading)


RESHARDS: dict[str, tuple[int, int]] = {"rows to fewer ranks": (3, 0), "rows to more ranks": (4, 0), "columns": (2, 1)}


@pytest.mark.parametrize("case", list(RESHARDS))
def test_a_load_under_another_layout_reads_what_it_wants_and_hardly_more(case: str, directory: Path) -> None:
    loaders, dim = RESHARDS[case]
    shapes = {f"layer.{n}": (101 + n, 131_072 + 8 * n) for n in range(3)} | {
        f"small.{n}": (31, 70 + n) for n in range(50)
    }
    run_ranks(save_rows, 3, str(directory), shapes)
    wanted = [
        {name: box for name, shape in shapes.items() for box in even_boxes(shape, loaders, rank, dim)}
        for rank in range(loaders)
    ]
    for verify in (True, False):
        for (reading,) in run_ranks(load_metered, loaders, str(directory), shapes, [wanted], verify):
            assert reading.wanted <= reading.read <= 1.1 * reading.wanted, (verify, reading)
            assert reading.twice <= 0.1 * reading.wanted, (verify, reading)


def test_some_of_many_neighbours_are_read_without_reading_the_rest(directory: Path) -> None:
    """Tensors of 64 KiB and more, every fourth of them wanted: gaps are not worth reading."""
    shapes = {f"layer.{number:03}": (4, 16 * KIBIBYTE + number) for number in range(100)}
    run_ranks(save_rows, 1, str(directory), shapes)
    some = {name: Box.whole(shape) for name, shape in list(shapes.items())[::4]}
    ((reading,),) = run_ranks(load_metered, 1, str(directory), shapes, [[some]], True)
    assert reading.wanted <= reading.read <= 1.1 * reading.wanted, reading


def test_neighbours_are_read_together(directory: Path) -> None:
    """Many small tensors that lie one after the other take few calls."""
    shapes = {f"layer.{number:04}": (8, 64) for number in range(2000)}
    run_ranks(save_rows, 1, str(directory), shapes)
    everything = {name: Box.whole(shape) for name, shape in shapes.items()}
    (calls,) = run_ranks(count_calls, 1, str(directory), shapes, everything)
    assert calls <= 2000 / 8


def count_calls(context: RankContext, directory: str, shapes: dict[str, Any], wanted: dict[str, Box]) -> int:
    target = {name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}
    meter = MeteredOperations()
    load(target, directory, storage_reader=reader_over(meter))
    for number, (name, shape) in enumerate(shapes.items()):
        assert np.array_equal(target[name], values_of(shape, number)[slices(wanted[name])]), name
    return len(meter.extents)
