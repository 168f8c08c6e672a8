"""Whole saves and loads by MindSpore ranks: other worlds, other cuts, the plan cache, the three modes of async_save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
import pytest

import dcp_mindspore as dcp
from dcp_core.box import Box, slices
from dcp_core.dtype import dtype_named
from dcp_mindspore.elements import memory_of, tensor_of_bits
from tests.background_processes import check_none_left, mark
from tests.core.rank_jobs import counted_saves, error_of
from tests.core.test_shared_reads_numpy import CountedOperations, reader_on
from tests.mindspore.ms_ranks import MindSporeRank, run_mindspore

pytestmark = pytest.mark.timeout(120)

SHAPE = (12, 8)
DTYPES = ("float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex64")
ASYNC_SECONDS = 60.0


def whole_bits(name: str, seed: int = 0) -> npt.NDArray[Any]:
    """The bits of a whole tensor, the same in every process."""
    dtype = dtype_named(name)
    raw = np.random.default_rng([seed, len(name)]).integers(0, 256, int(np.prod(SHAPE)) * dtype.itemsize, np.uint8)
    return (raw % 2 if name == "bool" else raw).view(dtype.bits).reshape(SHAPE)


def box_of(rank: int, world_size: int, cut: str) -> Box:
    """What a rank holds: rows, columns, a tile of a grid of two columns, or everything."""
    if cut == "rows":
        return Box((rank * SHAPE[0] // world_size, 0), (SHAPE[0] // world_size, SHAPE[1]))
    if cut == "columns":
        return Box((0, rank * SHAPE[1] // world_size), (SHAPE[0], SHAPE[1] // world_size))
    if cut == "columns twice":  # TP2 x DP2
        return Box((0, rank % 2 * SHAPE[1] // 2), (SHAPE[0], SHAPE[1] // 2))
    return Box.whole(SHAPE)


def shard(bits: npt.NDArray[Any], box: Box, name: str) -> Any:
    tensor = tensor_of_bits(np.ascontiguousarray(bits[slices(box)]), dtype_named(name))
    return dcp.annotate_shard(tensor, offsets=box.offsets, global_shape=SHAPE)


def state_of(rank: MindSporeRank, cut: str, seed: int | None) -> dict[str, Any]:
    """A state of shards of every dtype; zeros without a seed."""
    box = box_of(rank.rank, rank.world_size, cut)
    tensors = {}
    for name in DTYPES:
        bits = whole_bits(name, seed) if seed is not None else np.zeros_like(whole_bits(name))
        tensors[name] = shard(bits, box, name)
    return {"tensors": tensors, "step": -1 if seed is None else seed, "plain": mindspore.Tensor([seed or 0])}


def check(rank: MindSporeRank, state: dict[str, Any], cut: str, seed: int) -> None:
    box = box_of(rank.rank, rank.world_size, cut)
    for name, tensor in state["tensors"].items():
        expected = whole_bits(name, seed)[slices(box)]
        assert memory_of(tensor).view.tobytes() == expected.tobytes(), (name, cut, rank.rank)
    assert state["step"] == seed and state["plain"].asnumpy().tolist() == [seed]


def save_state(rank: MindSporeRank, path: str, cut: str, seed: int) -> int:
    return len(list(dcp.save(state_of(rank, cut, seed), checkpoint_id=path).state_dict_metadata))


def load_state(rank: MindSporeRank, path: str, cut: str, seed: int, **options: Any) -> None:
    state = state_of(rank, cut, None)
    addresses = {name: (id(tensor), tensor.data_ptr()) for name, tensor in state["tensors"].items()}
    dcp.load(state, checkpoint_id=path, **options)
    assert addresses == {name: (id(tensor), tensor.data_ptr()) for name, tensor in state["tensors"].items()}
    check(rank, state, cut, seed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by 4 ranks, TP2 x DP2."""
    path: Path = tmp_path_factory.mktemp("saved") / "step"
    assert run_mindspore(save_state, 4, str(path), "columns twice", 7) == [len(DTYPES) + 2] * 4
    return path


@pytest.mark.parametrize(("world_size", "cut"), [(4, "columns"), (1, "whole"), (2, "whole"), (3, "rows"), (2, "rows")])
def test_any_other_layout_loads_the_same_bits_in_place(saved: Path, world_size: int, cut: str) -> None:
    run_mindspore(load_state, world_size, str(saved), cut, 7)


# -- one plan, many saves ---------------------------------------------------------------------------------------------


def save_again_and_again(rank: MindSporeRank, path: str) -> list[bool]:
    found = []
    with counted_saves() as counter:
        for number in range(3):
            save_state(rank, f"{path}/{number}", "rows", number)
            found.append(counter.was_hit)
        changed = state_of(rank, "rows", 4) | {"more": mindspore.Tensor([1.0])}
        dcp.save(changed, checkpoint_id=f"{path}/changed")
        found.append(counter.was_hit)
    load_state(rank, f"{path}/2", "columns", 2)
    return found


def test_the_second_save_of_a_structure_makes_no_plan(tmp_path: Path) -> None:
    assert run_mindspore(save_again_and_again, 2, str(tmp_path)) == [[False, True, True, False]] * 2


# -- read once --------------------------------------------------------------------------------------------------------


def count_read_bytes(rank: MindSporeRank, path: str, broadcast: bool) -> int:
    operations = CountedOperations()
    state: dict[str, Any] = {"big": mindspore.Parameter(mindspore.mint.zeros((1 << 19,)), name="big")}
    state |= {f"small{number}": mindspore.Parameter(mindspore.mint.zeros((100,)), name="s") for number in range(20)}
    dcp.load(
        state,
        storage_reader=reader_on(path, operations),
        timeout_seconds=20,
        broadcast_replicated_tensors=broadcast,
    )
    assert (state["big"].asnumpy() == np.arange(1 << 19, dtype=np.float32)).all()
    assert all((state[f"small{number}"].asnumpy() == number).all() for number in range(20))
    return operations.nbytes


def save_big(rank: MindSporeRank, path: str) -> None:
    state = {"big": mindspore.Tensor(np.arange(1 << 19, dtype=np.float32))}
    dcp.save(
        state | {f"small{number}": mindspore.Tensor([float(number)] * 100) for number in range(20)}, checkpoint_id=path
    )


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("big") / "step"
    run_mindspore(save_big, 1, str(path), start="alone")
    return path


def test_what_all_ranks_want_is_read_once_and_broadcast(big: Path) -> None:
    nbytes = 4 * (1 << 19) + 20 * 400
    once = sum(run_mindspore(count_read_bytes, 3, str(big), True))
    each = sum(run_mindspore(count_read_bytes, 3, str(big), False))
    assert nbytes <= once < 1.2 * nbytes and each >= 3 * nbytes


# -- in the background ------------------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "mailbox": {},
    "store": {"use_gloo": True},
    "alone": {"use_collectives": False},
}


def save_in_background(rank: MindSporeRank, path: str, mode: str) -> list[str]:
    called: list[str] = []
    for number in range(2):
        state = state_of(rank, "rows", number)
        response = dcp.async_save(
            state, checkpoint_id=f"{path}/{number}", callback=lambda: called.append("done"), **MODES[mode]
        )
        for tensor in state["tensors"].values():  # what changes after the call is not saved
            memory_of(tensor).view[...] = 0
        response.get_result(ASYNC_SECONDS)
    options = {"use_collectives": False} if mode == "alone" else {}
    for number in range(2):
        load_state(rank, f"{path}/{number}", "rows", number, **options)
    return called


@pytest.mark.parametrize("mode", MODES)
def test_a_background_save_holds_what_the_state_was_at_the_call(tmp_path: Path, mode: str) -> None:
    mark()
    assert run_mindspore(save_in_background, 2, str(tmp_path), mode, timeout_seconds=90) == [["done"] * 2] * 2
    check_none_left()


def use_gloo_without_an_address(rank: MindSporeRank, path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MASTER_ADDR")
        with pytest.raises(AssertionError, match="MASTER_ADDR"):
            dcp.async_save({"a": 1}, checkpoint_id=path, use_gloo=True, timeout_seconds=20)


def test_use_gloo_needs_to_know_where_the_job_meets(tmp_path: Path) -> None:
    run_mindspore(use_gloo_without_an_address, 2, str(tmp_path))


# -- what goes wrong --------------------------------------------------------------------------------------------------


def load_into_another_shape(rank: MindSporeRank, path: str) -> tuple[str, str]:
    shape = (3,) if rank.rank else (100,)
    target = {"small1": mindspore.Parameter(mindspore.mint.zeros(shape), name="a")}
    kind, text = error_of(dcp.load, target, checkpoint_id=path, timeout_seconds=20)
    assert not target["small1"].asnumpy().any()
    return kind.__name__, text


def test_a_wrong_shape_on_one_rank_is_one_error_on_all_and_changes_nothing(big: Path) -> None:
    first, second = run_mindspore(load_into_another_shape, 2, str(big))
    assert first == second and first[0] == "ShapeMismatchError" and "small1" in first[1]


def save_with_a_rank_missing(rank: MindSporeRank, path: str) -> tuple[str, str] | None:
    if rank.rank == 1:
        return None
    kind, text = error_of(dcp.save, {"a": 1}, checkpoint_id=path, timeout_seconds=1.5)
    return kind.__name__, text


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    found = run_mindspore(save_with_a_rank_missing, 3, str(tmp_path))
    assert found[1] is None and found[0][0] == found[2][0] == "CoordinationTimeoutError"
    assert "1" in found[0][1]


def save_in_a_part(rank: MindSporeRank, path: str) -> None:
    if rank.rank == 1:
        return
    group = dcp.StoreGroup(rank.store, rank.rank // 2, 2, ranks=(0, 2))
    dcp.save({"a": mindspore.Tensor([1.0, 2.0]), "b": 5}, checkpoint_id=path, process_group=group)
    target: dict[str, Any] = {"a": mindspore.Tensor([0.0, 0.0]), "b": 0}
    dcp.load(target, checkpoint_id=path, process_group=group)
    assert target["a"].asnumpy().tolist() == [1.0, 2.0] and target["b"] == 5


def test_some_ranks_of_a_job_save_and_load_among_themselves(tmp_path: Path) -> None:
    run_mindspore(save_in_a_part, 3, str(tmp_path))


def save_alone_of_many(rank: MindSporeRank, path: str) -> list[str]:
    dcp.save({"a": mindspore.Tensor([float(rank.rank)])}, checkpoint_id=path, no_dist=True)
    target = {"a": mindspore.Tensor([-1.0])}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    assert target["a"].asnumpy().tolist() == [rank.rank]
    return sorted(file.name for file in Path(path).glob(f"{rank.rank}.metadata"))


def test_no_dist_saves_each_rank_under_its_own_number(tmp_path: Path) -> None:
    assert run_mindspore(save_alone_of_many, 2, str(tmp_path)) == [["0.metadata"], ["1.metadata"]]
