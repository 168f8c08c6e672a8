"""Random tilings saved, random tilings wanted, by real ranks: every element is right.

Many rounds run in one job, each on other numbers of ranks (groups of the job's ranks), in a directory that the rounds
share: so each save is one over a checkpoint of another world.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import safetensors

from dcp_core.api import read
from dcp_core.box import Box
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.file_names import METADATA_NAME, data_file_name
from dcp_core.metadata import Metadata, StoredTensor, box_of
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.layouts import at
from tests.core.random_states import Tensor, leaves, random_tree, saved_state, tensor_bytes, wanted_state
from tests.core.rank_jobs import load, save, together

pytestmark = pytest.mark.timeout(120)


def rounds(context: RankContext, directory: str, seed: int, count: int) -> int:
    """Save on some ranks, load on others, twice; returns how many bytes of tensors went through."""
    total = 0
    for number in range(count):
        rng = Random(f"{seed} {number}")
        tree = random_tree(rng)
        savers, loaders = rng.randint(1, context.world_size), rng.randint(1, context.world_size)
        dedup = rng.random() < 0.7
        planner = StandardSavePlanner(rng.random() < 0.5, dedup, rng.random() < 0.3)
        layout = rng.randrange(1 << 30)
        verify = rng.choice([True, "full", False])
        with together(context):
            if context.rank < savers:
                state = saved_state(tree, Random(layout), savers, context.rank)
                metadata = save(state, directory, planner=planner, process_group=range(savers))
                if context.rank == 0:
                    check_files(Path(directory), metadata, tree, exact=dedup)
        with together(context):
            for attempt in range(2 if context.rank < loaders else 0):
                target = wanted_state(tree, Random(f"{layout} {attempt} {context.rank}"))
                load(target.state, directory, verify=verify, process_group=range(loaders))
                target.check()
        total += tensor_bytes(tree)
    return total


_deserialize: Any = safetensors.deserialize


def check_files(directory: Path, metadata: Metadata, tree: Any, *, exact: bool) -> None:
    """Nothing of an older save is left; the files open with plain safetensors and hold what the metadata says."""
    source = metadata.source
    columns = zip(source.files.rank.tolist(), source.files.part.tolist(), source.files.kind.tolist(), strict=True)
    names = [data_file_name(*key, source.save.suffix) for key in columns]
    assert sorted(path.name for path in directory.iterdir()) == sorted([*names, METADATA_NAME])
    is_tensor = source.files.kind == 0
    nbytes = int((source.files.nbytes - source.files.data_start)[is_tensor].sum())
    assert nbytes == tensor_bytes(tree) if exact else nbytes >= tensor_bytes(tree)
    contents = {}
    for name, size, kind in zip(names, source.files.nbytes.tolist(), source.files.kind.tolist(), strict=True):
        assert (directory / name).stat().st_size == size
        if kind == 0:
            contents[name] = dict(_deserialize((directory / name).read_bytes()))
    for place, leaf, _ in leaves(tree):
        if isinstance(leaf, Tensor):
            stored = find(source, place)
            for row in range(len(stored.chunks)):
                box = box_of(stored.chunks, row)
                own = contents[names[int(stored.chunks.file[row])]]
                assert bytes(_entry(own, stored, box)["data"]) == leaf.bits[at(box)].tobytes()


def find(source: Any, place: Any) -> StoredTensor:
    """The tensor of a place, whatever it is called."""
    keys = [step[1] if isinstance(step, tuple) else step for step in place]
    found: list[StoredTensor] = [
        tensor
        for name in source.names()
        for tensor in source.tensors(name)
        if [key.value for key in tensor.path] == keys
        and [type(key.value) for key in tensor.path] == [type(key) for key in keys]
    ]
    assert len(found) == 1
    return found[0]


def _entry(contents: dict[str, Any], stored: StoredTensor, box: Box) -> Any:
    """The chunk in its file: under the tensor's name, or with the offsets behind it."""
    key = f"{stored.name}@{','.join(map(str, box.offsets))}"
    entry = contents.get(key, contents.get(stored.name))
    assert entry is not None, (stored.name, list(contents))
    assert list(entry["shape"]) == [*box.sizes, *stored.dtype.file_tail]
    assert entry["dtype"] == stored.dtype.file_dtype
    return entry


@pytest.mark.parametrize("seed", range(3))
def test_random_tilings_saved_come_back_in_random_tilings(seed: int, tmp_path: Path) -> None:
    totals = run_ranks(rounds, 5, str(tmp_path / "checkpoint"), seed, 30, timeout_seconds=100)
    assert totals == [totals[0]] * 5
    assert totals[0] > 0


def save_once(context: RankContext, directory: str, seed: int) -> None:
    state = saved_state(random_tree(Random(seed)), Random(seed), context.world_size, context.rank)
    save(state, directory)


def load_once(context: RankContext, directory: str, seed: int) -> None:
    target = wanted_state(random_tree(Random(seed)), Random(f"{seed} {context.rank}"))
    load(target.state, directory)
    target.check()


@pytest.mark.parametrize(("savers", "loaders"), [(4, 2), (2, 4), (4, 3), (1, 4), (4, 1), (3, 3)])
def test_fresh_jobs_of_another_size_load_what_a_job_saved(savers: int, loaders: int, tmp_path: Path) -> None:
    for seed in (savers * 100 + loaders, savers * 1000 + loaders):
        run_ranks(save_once, savers, str(tmp_path), seed)
        run_ranks(load_once, loaders, str(tmp_path), seed)


def test_one_tensor_or_a_region_of_it_can_be_read_by_anybody(tmp_path: Path) -> None:
    seed = 5
    run_ranks(save_once, 3, str(tmp_path), seed)
    tree, rng, count = random_tree(Random(seed)), Random(1), 0
    reader = FileSystemReader(tmp_path)
    reader.initialize_reader()
    source = reader.load_metadata().source
    for place, leaf, _ in leaves(tree):
        if isinstance(leaf, Tensor):
            name = find(source, place).name
            whole = read(tmp_path, name)
            assert whole.dtype == leaf.bits.dtype
            assert whole.tobytes() == leaf.bits.tobytes()
            if 0 not in leaf.bits.shape:
                offsets = tuple(rng.randrange(size) for size in leaf.bits.shape)
                sizes = tuple(rng.randint(1, n - a) for n, a in zip(leaf.bits.shape, offsets, strict=True))
                box = Box(offsets, sizes)
                assert read(tmp_path, name, box).tobytes() == leaf.bits[at(box)].tobytes()
            count += 1
    assert count > 3


def save_alone(context: RankContext, directory: str, seed: int) -> int:
    """Without collectives every rank saves what it holds, and gets just that back."""
    rng = Random(seed)
    tree = random_tree(rng)
    state = saved_state(tree, Random(seed), context.world_size, context.rank)
    with together(context):
        save(state, directory, use_collectives=False)
    target = saved_state(tree, Random(seed), context.world_size, context.rank)
    with together(context):
        held = _poison(target)
        load(target, directory, use_collectives=False)
        _check_same(target, state)
    held += _poison(target)
    load(target, directory)
    _check_same(target, state)
    return held


def _poison(node: Any) -> int:
    """Flip every array of a state; returns how many."""
    count = 0
    for array in _arrays(node):
        raw = np.invert(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        array[...] = np.logical_not(array) if array.dtype == np.bool_ else raw.view(array.dtype).reshape(array.shape)
        count += 1
    return count


def _arrays(node: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(node, dict):
        return [array for child in node.values() for array in _arrays(child)]
    if isinstance(node, (list, tuple)):
        return [array for child in node for array in _arrays(child)]
    if isinstance(node, np.ndarray):
        return [node] if node.dtype.kind in "biufc" else []
    return list(getattr(node, "arrays", ()))


def _check_same(one: Any, other: Any) -> None:
    arrays = [_arrays(one), _arrays(other)]
    assert len(arrays[0]) == len(arrays[1])
    for left, right in zip(*arrays, strict=True):
        assert np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()


@pytest.mark.parametrize("seed", [2, 3, 11])
def test_without_collectives_each_rank_gets_back_what_it_saved(seed: int, tmp_path: Path) -> None:
    assert sum(run_ranks(save_alone, 3, str(tmp_path), seed)) > 0
    assert {path.name for path in tmp_path.glob("*.metadata")} == {"0.metadata", "1.metadata", "2.metadata"}
    assert not (tmp_path / METADATA_NAME).exists()


LARGE = (900, 700)


def save_large_replicas(context: RankContext, directory: str) -> int:
    """DP2 x TP2: every half of each tensor is held twice; returns the bytes that this rank wrote."""
    array = np.arange(LARGE[0] * LARGE[1], dtype=np.float32).reshape(LARGE)
    halves = [even_boxes(LARGE, 2, context.rank % 2, dim) for dim in (0, 1)]
    state = {f"cut{dim}": ShardedArray.cut(array + dim, halves[dim]) for dim in (0, 1)} | {"whole": array - 1}
    save(state, directory)
    with together(context):
        target = {key: ShardedArray.cut(array * 0 - 5, even_boxes(LARGE, 4, context.rank, 0)) for key in state}
        load(target, directory)
        for key, change in {"cut0": 0, "cut1": 1, "whole": -1}.items():
            (box,) = target[key].boxes
            np.testing.assert_array_equal(target[key].arrays[0], array[at(box)] + change)
    return sum(path.stat().st_size for path in Path(directory).glob(f"_rank{context.rank}_*.safetensors"))


def test_large_replicas_are_cut_between_their_holders_and_come_back(tmp_path: Path) -> None:
    written = run_ranks(save_large_replicas, 4, str(tmp_path))
    assert sum(written) < 1.01 * 3 * 4 * LARGE[0] * LARGE[1]
    assert max(written) <= 1.05 * sum(written) / 4
