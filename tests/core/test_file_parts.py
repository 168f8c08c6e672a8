"""A rank that writes much writes several files: where regions go, and that everything else goes on as before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_core import api
from dcp_core.box import Box
from dcp_core.errors import IncompleteError, PlanningError
from dcp_core.execution.interfaces import FileRecord, WriteResult
from dcp_core.metadata import box_of
from dcp_core.planning import layout
from dcp_core.planning.global_plan import PlanOptions
from dcp_core.planning.layout import lay_out
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.recipes.write_results import check_results
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.format_data_reader import Checkpoint
from tests.core.format_jobs import MEBIBYTE, state_of
from tests.core.layouts import at
from tests.core.rank_jobs import counted_saves, error_of, load, save, together
from tests.core.simulated_saves import Simulation, World, make_world, simulate
from tests.core.test_save_load_properties import rounds

pytestmark = pytest.mark.timeout(120)


@contextmanager
def parts_of(nbytes: int, most: int = 4) -> Iterator[None]:
    """Parts of a few bytes instead of hundreds of megabytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PART_NBYTES", nbytes)
        patch.setattr(layout, "MOST_PARTS", most)
        yield


# -- the rule ---------------------------------------------------------------------------------------------------------


def places_by_the_rule(sizes: Sequence[int], part_nbytes: int, most: int) -> list[tuple[int, int]]:
    """Part and byte offset of each region of one rank, region by region."""
    total, before, runs = sum(sizes), 0, []
    wanted = min(max(total // part_nbytes, 1), most)
    for nbytes in sizes:
        middle = before + Fraction(nbytes, 2)
        runs.append(min(int(middle * wanted / total), wanted - 1) if total else 0)
        before += nbytes
    parts = {run: number for number, run in enumerate(sorted(set(runs)))}
    places = [(0, 0)] * len(sizes)
    ends = dict.fromkeys(parts, 0)
    for is_loose in (False, True):
        for region, (run, nbytes) in enumerate(zip(runs, sizes, strict=True)):
            if (nbytes % 8 != 0) is is_loose:
                places[region] = parts[run], ends[run]
                ends[run] += nbytes
    return places


SIZES = st.lists(st.one_of(st.integers(0, 40), st.sampled_from([0, 8, 64, 800])), max_size=30)


@given(st.lists(SIZES, min_size=1, max_size=5), st.integers(1, 200), st.integers(1, 5), st.integers(0, 2**32))
@example([[8, 8, 8, 8]], 8, 4, 0)
@example([[], [0], [1]], 1, 4, 0)
def test_regions_lie_where_the_rule_puts_them(sizes: list[list[int]], part_nbytes: int, most: int, seed: int) -> None:
    rank = np.repeat(np.arange(len(sizes)), [len(own) for own in sizes])
    np.random.default_rng(seed).shuffle(rank)
    nbytes = np.zeros(len(rank), dtype=np.int64)
    for number, own in enumerate(sizes):
        nbytes[rank == number] = own
    with parts_of(part_nbytes, most):
        found = lay_out(rank, nbytes, len(sizes))
    for number, own in enumerate(sizes):
        rows = rank == number
        expected = places_by_the_rule(own, part_nbytes, most)
        assert list(zip(found.part[rows].tolist(), found.byte_offset[rows].tolist(), strict=True)) == expected
        assert int(found.parts[number]) == len({part for part, _ in expected})
    in_order = list(zip(rank[found.order], found.part[found.order], found.byte_offset[found.order], strict=True))
    assert in_order == sorted(in_order, key=lambda place: place[:2])
    files = [(rank[row], found.part[row]) for row in found.order]
    new = [row for row, file in enumerate(files) if row == 0 or files[row - 1] != file]
    assert found.starts.tolist() == [*new, len(files)]
    assert found.bounds.tolist() == np.searchsorted(rank[found.order], np.arange(len(sizes) + 1)).tolist()


def test_parts_are_about_equal() -> None:
    nbytes = np.random.default_rng(0).integers(1, MEBIBYTE, 5000)
    found = lay_out(np.zeros(5000, dtype=np.int64), nbytes, 1)
    loads = np.bincount(found.part, weights=nbytes)
    assert len(loads) == layout.MOST_PARTS
    assert loads.max() - loads.min() <= 2 * MEBIBYTE


def test_one_tensor_that_outweighs_all_others_leaves_no_gap_in_the_numbers() -> None:
    for large in range(3):
        nbytes = np.full(3, 100)
        nbytes[large] = layout.PART_NBYTES * 40
        assert sorted(set(lay_out(np.zeros(3, dtype=np.int64), nbytes, 1).part.tolist())) in ([0], [0, 1], [0, 1, 2])
    assert lay_out(np.zeros(1, dtype=np.int64), np.array([layout.PART_NBYTES * 40]), 1).part.tolist() == [0]


def test_less_than_two_parts_worth_of_bytes_is_one_file() -> None:
    half = layout.PART_NBYTES // 2
    for rest, expected in ((half - 1, 1), (half, 2)):
        assert lay_out(np.zeros(4, dtype=np.int64), np.array([half, half, half, rest]), 1).parts.tolist() == [expected]


# -- coordinator and ranks --------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return make_world(Random(draw(st.integers(0, 2**32))), draw(st.integers(1, 5)), draw(st.integers(1, 14)))


THRESHOLDS = st.integers(1, 2000)


@given(worlds(), THRESHOLDS, st.booleans())
def test_ranks_write_what_the_coordinator_says_lies_there(world: World, part_nbytes: int, dedup: bool) -> None:
    with parts_of(part_nbytes):
        sim = simulate(world, options=PlanOptions(remove_redundancy=dedup))
        written = sim.written()
    named = set()
    for tensor in sim.stored_tensors():
        for row, place in enumerate(sim.places(tensor.chunks)):
            named.add(place)
            if tensor.rank < 0 and written[place].size and dedup:
                content = world.content.get(tuple(key.value for key in tensor.path))
                expected = written[place] if content is None else content[at(box_of(tensor.chunks, row))]
                np.testing.assert_array_equal(written[place], expected)
    assert named == set(written)
    check_numbers(sim)


def check_numbers(sim: Simulation) -> None:
    """Files are numbered without gaps, and hold their chunks back to back."""
    for spans in sim.spans():
        parts = [span.part for span in spans]
        assert parts == sorted(parts)
        assert sorted(set(parts)) == list(range(len(set(parts))))
        for part in set(parts):
            own = [span for span in spans if span.part == part]
            ends = np.cumsum([span.nbytes for span in own]).tolist()
            assert [span.byte_offset for span in own] == [0, *ends[:-1]]
            assert len({span.key for span in own}) == len(own)


@given(worlds(), THRESHOLDS)
def test_a_plan_made_anew_of_its_items_lies_where_the_coordinator_says(world: World, part_nbytes: int) -> None:
    """What planners that override finalize_plan rely on."""
    with parts_of(part_nbytes):
        sim = simulate(world)
        for plan in sim.plans:
            items = list(plan.items)
            Random(part_nbytes).shuffle(items)
            remade = plan.with_items(items)
            assert not len(remade.writes.part_rows)
            assert list(remade.spans()) == list(plan.spans())


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_state_comes_back_from_several_files_a_rank(tmp_path: Path) -> None:
    state = {f"layer{i}": np.random.default_rng(i).standard_normal(100 + 13 * i).astype("f4") for i in range(40)}
    with parts_of(4096):
        metadata = api.save(state, checkpoint_id=tmp_path, durable=False)
    assert metadata.source.files.part.tolist() == [0, 1, 2, 3]
    names = {path.name for path in tmp_path.glob("*.safetensors")}
    assert names == {f"_rank0_{part}.safetensors" for part in ("", "1_", "2_", "3_")}
    target = {key: np.zeros_like(array) for key, array in state.items()}
    api.load(target, checkpoint_id=tmp_path)
    for key, array in state.items():
        np.testing.assert_array_equal(target[key], array)


def save_in_parts(context: RankContext, directory: str, version: int, part_nbytes: int) -> None:
    with parts_of(part_nbytes):
        save(state_of(context.rank, version), directory)


@pytest.mark.parametrize("part_nbytes", [10_000, 1 << 20])
def test_a_second_reader_reads_checkpoints_of_many_parts(part_nbytes: int, tmp_path: Path) -> None:
    run_ranks(save_in_parts, 4, str(tmp_path), 1, part_nbytes)
    checkpoint = Checkpoint.read(tmp_path)
    assert max(file.part for file in checkpoint.description.files) > 0
    for name, array in (("replicated", np.float64), ("rows", np.float32)):
        (tensor,) = (tensor for tensor in checkpoint.description.tensors if tensor.name == name)
        expected = api.read(tmp_path, name)
        assert expected.dtype == array
        assert checkpoint.bits(tensor).tobytes() == expected.tobytes()


def random_rounds_in_parts(context: RankContext, directory: str, seed: int) -> int:
    with parts_of(300):
        return rounds(context, directory, seed, 12)


def test_random_tilings_in_many_parts_come_back_in_random_tilings(tmp_path: Path) -> None:
    """Each round saves over the round before; nothing of that may stay."""
    assert run_ranks(random_rounds_in_parts, 4, str(tmp_path / "checkpoint"), 7, timeout_seconds=100)[0] > 0


def save_again_and_load(context: RankContext, directory: str) -> list[bool]:
    """Three saves of one structure, the last one loaded on other boxes."""
    shape, hits = (64, 32), []
    with parts_of(2048), counted_saves() as counter:
        for version in range(3):
            boxes = even_boxes(shape, context.world_size, context.rank)
            state = {f"w{i}": ShardedArray.cut(np.full(shape, version + i, "f4"), boxes) for i in range(8)}
            save(state, f"{directory}/{version}")
            hits.append(counter.was_hit)
    target = {f"w{i}": ShardedArray.cut(np.zeros(shape, "f4"), even_boxes(shape, 3, context.rank, 1)) for i in range(8)}
    load(target, f"{directory}/2")
    for i, held in enumerate(target.values()):
        assert all((array == 2 + i).all() for array in held.arrays)
    return hits


def test_plans_with_several_files_a_rank_are_used_again(tmp_path: Path) -> None:
    assert run_ranks(save_again_and_load, 3, str(tmp_path)) == [[False, True, True]] * 3
    assert len(list((tmp_path / "2").glob("_rank2_*.safetensors"))) == 4


def save_alone_in_parts(context: RankContext, directory: str) -> None:
    state = {f"w{i}": np.full((20, 20), 10 * context.rank + i, "f4") for i in range(9)}
    with parts_of(1000), together(context):
        save(state, directory, use_collectives=False)
    target = {key: np.zeros_like(array) for key, array in state.items()}
    with together(context):
        load(target, directory, use_collectives=False)
    for key, array in state.items():
        np.testing.assert_array_equal(target[key], array)


def test_ranks_that_save_alone_write_several_files_too(tmp_path: Path) -> None:
    run_ranks(save_alone_in_parts, 2, str(tmp_path))
    for rank in range(2):
        assert len(list(tmp_path.glob(f"_rank{rank}_*.safetensors"))) == 4


def test_boxes_that_overlap_on_one_rank_that_saves_alone_keep_their_own_bytes(tmp_path: Path) -> None:
    """Same start, other size, other alignment: the one case in which (name, offsets) leaves an order open."""
    whole = np.arange(16, dtype=np.uint8)
    boxes = [Box((0,), (3,)), Box((0,), (16,))]
    state = {"w": ShardedArray.cut(whole, boxes), "x": whole[:11].copy()}
    with parts_of(15):
        metadata = save(state, str(tmp_path), use_collectives=False)
    (tensor,), files = metadata.source.tensors("w"), metadata.source.files
    assert files.part.tolist() == [0, 1]
    for row, file in enumerate(tensor.chunks.file.tolist()):
        raw = (tmp_path / ("_rank0_.safetensors", "_rank0_1_.safetensors")[files.part[file]]).read_bytes()
        start, size = int(files.data_start[file] + tensor.chunks.byte_offset[row]), int(tensor.chunks.sizes[row, 0])
        assert raw[start : start + size] == whole[:size].tobytes()


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    state = {f"w{i}": np.full(100, i, "f8") for i in range(10)}
    with parts_of(1000):
        api.save(state, checkpoint_id=tmp_path, durable=False)
    (tmp_path / "_rank0_2_.safetensors").unlink()
    kind, text = error_of(api.load, state, checkpoint_id=tmp_path)
    assert kind is IncompleteError
    assert "_rank0_2_.safetensors" in text


def test_a_save_in_one_file_over_one_in_four_leaves_none_of_those(tmp_path: Path) -> None:
    state = {f"w{i}": np.full(100, i, "f8") for i in range(10)}
    with parts_of(1000):
        api.save(state, checkpoint_id=tmp_path, durable=False)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    del state["w0"]  # or the plan, and with it the number of files, would be that of the first save
    api.save(state, checkpoint_id=tmp_path, durable=False)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


# -- what the coordinator checks --------------------------------------------------------------------------------------


def result_of(*nbytes: int, parts: Sequence[int] | None = None) -> WriteResult:
    parts = range(len(nbytes)) if parts is None else parts
    files = [FileRecord(3, part, 0, 64 + n, 64, 8, 8, 0) for part, n in zip(parts, nbytes, strict=True)]
    return WriteResult(3, (FileRecord(3, 0, 1, 500, 16, 16, 0, 0), *reversed(files)), 0.0, 0)


def test_files_as_planned_are_accepted_in_any_order() -> None:
    check_results([result_of(8, 16), result_of()], [(8, 16), ()])


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (result_of(8, 15), "rank 3 wrote 23 bytes of tensors, the plan has 24"),
        (result_of(16, 8), r"rank 3 wrote tensor files of \[16, 8\] bytes, the plan has files of \[8, 16\] bytes"),
        (result_of(24), r"rank 3 wrote tensor files of \[24\] bytes, .* write each chunk to the file of its part"),
        (result_of(8, 16, parts=[0, 2]), "write each chunk to the file of its part"),
    ],
)
def test_other_files_than_planned_are_refused(result: WriteResult, text: str) -> None:
    with pytest.raises(PlanningError, match=text):
        check_results([result], [(8, 16)])


class Reordering(StandardSavePlanner):
    """Gives the items of its plan back in another order: still the same plan."""

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        return plan.with_items(reversed(list(plan.items)))


def test_a_planner_that_makes_its_final_plan_anew_writes_the_same_files(tmp_path: Path) -> None:
    state: dict[str, Any] = {f"w{i}": np.full(37 + i, i, "f4") for i in range(30)}
    contents = []
    for number, planner in enumerate((StandardSavePlanner(), Reordering())):
        with parts_of(1000):
            api.save(state, checkpoint_id=tmp_path / str(number), durable=False, planner=planner)
        paths = sorted((tmp_path / str(number)).glob("*.safetensors"))
        contents.append([(path.name, path.stat().st_size) for path in paths])
        target = {key: np.zeros_like(array) for key, array in state.items()}
        api.load(target, checkpoint_id=tmp_path / str(number))
        assert all((target[key] == array).all() for key, array in state.items())
    assert contents[0] == contents[1]
    assert len(contents[0]) == 4
