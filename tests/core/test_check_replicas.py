"""Replicas that differ are found before a save writes, and healthy ones are saved as ever."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from dcp_core import api
from dcp_core.adapter import AdapterSet
from dcp_core.arrays import NumpyAdapter
from dcp_core.box import Box
from dcp_core.errors import ArgumentError, ArgumentsDifferError, ReplicasDifferError
from dcp_core.execution.region_checksums import region_checksums
from dcp_core.planning.items import WriteItem
from dcp_core.planning.planners import PlannerContext
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.recipes.job import Descriptions, ObjectEncoding
from dcp_core.state_path import PerRank
from dcp_core.testing.device_ranks import DeviceRankAdapter, ShardedDeviceArray
from dcp_core.testing.devices import SimulatedDevice
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.async_jobs import MODES, async_outcome
from tests.core.fault_jobs import Outcome, Seat, checkpoint_names, loaded_tag, memory_directory, outcome_of, state_of

pytestmark = pytest.mark.timeout(120)

WORLD = 4
_SHAPE = (8, 6)


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "step_1"


def replicated(rank: int) -> dict[str, Any]:
    """A matrix cut in two, each half on two ranks (ranks 0 and 2, 1 and 3); a whole one; values of each rank's own.

    Rank 2 has one tensor more, before all others.
    """
    matrix = np.arange(48, dtype=np.float32).reshape(_SHAPE)
    return {
        **({"extra": ShardedArray.cut(np.ones(3), [Box.whole((3,))], "float64")} if rank == 2 else {}),
        "half": ShardedArray.cut(matrix, even_boxes(_SHAPE, 2, rank % 2), "float32"),
        "norm": ShardedArray.cut(np.ones(5), [Box.whole((5,))], "float64"),
        "plain": np.arange(6, dtype=np.int16),
        "seed": PerRank(np.array([rank])),
        "step": 3,
    }


def flip(array: np.ndarray[Any, Any], byte: int = 0, bit: int = 0) -> None:
    """Turn one bit around."""
    array.reshape(-1).view(np.uint8)[byte] ^= np.uint8(1 << bit)


def outcome(seat: Seat, state: dict[str, Any], directory: Path, mode: str = "save", **how: Any) -> Outcome:
    """Save with a comparison of replicas, in one of the ways, and report."""
    how = {"checkpoint_id": directory, "check_replicas": True} | how
    if mode == "save":
        return outcome_of(seat.save, state, **how)
    del how["checkpoint_id"]
    return async_outcome(seat, state, directory, **MODES[mode].save, **how)


# -- differences ------------------------------------------------------------------------------------------------------


def _flipped(context: RankContext, directory: Path, mode: str) -> list[Outcome]:
    """A good save; one with a flipped bit in a half of rank 3; the flip in a whole tensor of rank 2; and a good one."""
    seat = Seat.of(context)
    found = [outcome(seat, replicated(seat.rank), directory, mode)]
    state = replicated(seat.rank)
    if seat.rank == 3:
        flip(state["half"].arrays[0], 17, 5)
    found.append(outcome(seat, state, directory, mode))
    state = replicated(seat.rank)
    if seat.rank == 2:
        flip(state["norm"].arrays[0], 39)
        flip(state["plain"], 1)
    found.append(outcome(seat, state, directory, mode))
    target = replicated(seat.rank)
    target["half"].arrays[0][...] = 0
    seat.load(target, checkpoint_id=directory)
    assert np.array_equal(target["half"].arrays[0], replicated(seat.rank)["half"].arrays[0])
    found.append(outcome(seat, replicated(seat.rank), directory, mode))
    seat.share()
    return found


@pytest.mark.parametrize("mode", ["save", "mailbox", "no channel"])
def test_a_flipped_bit_is_named_with_key_and_ranks_and_nothing_is_overwritten(directory: Path, mode: str) -> None:
    results = run_ranks(_flipped, WORLD, directory, mode, timeout_seconds=60.0)
    for good, half, whole, again in results:
        assert (good.kind, again.kind) == ("", "")
        assert half.kind == whole.kind == ReplicasDifferError.__name__
        assert "'half' at offsets (4, 0), sizes (4, 6): rank 1 against rank 3: no majority" in half.message
        assert "'norm' at offsets (0,), sizes (5,): rank 2 differs from ranks 0, 1, 3, which agree" in whole.message
        assert "'plain' at offsets (0,), sizes (6,): rank 2 differs" in whole.message
        assert "Against the majority: rank 2 in 2 of 2." in whole.message
        assert "'half'" not in whole.message and "'norm'" not in half.message
        assert {half.message, whole.message} == {results[0][1].message, results[0][2].message}
    assert checkpoint_names(directory)  # and no left-overs of the saves that were refused


def _signs(context: RankContext, directory: Path) -> list[Outcome]:
    seat, found = Seat.of(context), []
    quiet = np.frombuffer(np.array([0x7FC00001], np.uint32).tobytes(), np.float32)
    other = np.frombuffer(np.array([0x7FC00002], np.uint32).tobytes(), np.float32)
    for own, rest in ((-0.0, 0.0), (quiet[0], other[0]), (quiet[0], quiet[0])):
        value = np.full((3,), own if seat.rank == 1 else rest, np.float32)
        found.append(outcome(seat, {"t": ShardedArray.cut(value, [Box.whole((3,))], "float32")}, directory))
    return found


def test_bits_count_not_values(directory: Path) -> None:
    for negative_zero, other_nan, same_nan in run_ranks(_signs, 2, directory):
        assert negative_zero.kind == other_nan.kind == ReplicasDifferError.__name__
        assert same_nan.kind == ""


def _own_values(context: RankContext, directory: Path) -> list[Outcome]:
    seat = Seat.of(context)
    objects = {"random": [seat.rank, "state"], "step": 3}  # kept for each rank, with a warning, as by any save
    wrapped = {"random": PerRank(np.array([seat.rank], np.uint8)), "own": {f"rank{seat.rank}": np.ones(3) * seat.rank}}
    bare = {"random": np.array([seat.rank], np.uint8)}
    return [outcome(seat, state, directory) for state in (objects, wrapped, bare)]


def test_values_of_each_rank_are_no_copies_where_they_are_objects_or_wrapped(directory: Path) -> None:
    for objects, wrapped, bare in run_ranks(_own_values, 2, directory):
        assert (objects.kind, wrapped.kind) == ("", "")
        assert bare.kind == ReplicasDifferError.__name__ and "PerRank" in bare.message


def _shared_layer(context: RankContext, directory: Path) -> list[Outcome]:
    """Stages of a pipeline: each rank has a layer of its own; the first and the last hold one more in common."""
    seat, found = Seat.of(context), []
    for delta in (0, 1):
        state: dict[str, Any] = {f"layer{seat.rank}": ShardedArray.cut(np.ones(4), [Box.whole((4,))], "float64")}
        if seat.rank in (0, WORLD - 1):
            tied = np.arange(4.0) + (delta if seat.rank else 0)
            state["embedding"] = ShardedArray.cut(tied, [Box.whole((4,))], "float64")
        found.append(outcome(seat, state, directory))
    return found


def test_a_tensor_that_two_stages_share_is_compared_though_nothing_else_is_equal(directory: Path) -> None:
    for same, differing in run_ranks(_shared_layer, WORLD, directory):
        assert same.kind == ""
        assert "'embedding' at offsets (0,), sizes (4,): rank 0 against rank 3" in differing.message
        assert "layer" not in differing.message


# -- what is compared -------------------------------------------------------------------------------------------------


class HalvingPlanner(StandardSavePlanner):
    """Writes what it was given without the low bits of each float32."""

    def get_data(self, item: WriteItem) -> Any:
        bits = super().get_data(item)
        assert isinstance(bits, np.ndarray)
        return (bits.view(np.uint32) & np.uint32(0xFFFF0000)).view(bits.dtype)


def _by_planner(context: RankContext, directory: Path) -> list[Outcome]:
    seat, found = Seat.of(context), []
    for planner in (StandardSavePlanner(), HalvingPlanner()):
        value = np.ones(4, np.float32)
        if seat.rank == 1:
            flip(value)
        state = {"t": ShardedArray.cut(value, [Box.whole((4,))], "float32")}
        found += [outcome(seat, state, directory, mode, planner=planner) for mode in ("save", "mailbox")]
    return found


def test_what_a_planner_would_write_is_compared(directory: Path) -> None:
    for plain, plain_async, halved, halved_async in run_ranks(_by_planner, 2, directory):
        assert plain.kind == plain_async.kind == ReplicasDifferError.__name__
        assert (halved.kind, halved_async.kind) == ("", "")


def _staged(context: RankContext, directory: Path) -> list[Outcome]:
    """The state changes on one rank right after the call, at a miss and at a hit of the plan cache."""
    seat, found = Seat.of(context), []
    for tag in (1, 2):
        state = replicated(seat.rank) | {"step": tag}
        response = api.async_save(
            state, checkpoint_id=directory, check_replicas=True, adapter=NumpyRankAdapter(), timeout_seconds=60.0
        )
        if seat.rank == 1:
            state["half"].arrays[0][...] = -1
            state["plain"][...] = -1
        found.append(outcome_of(response.get_result, 60.0))
    return found


def test_the_staged_bytes_are_compared_not_what_training_made_of_them(directory: Path) -> None:
    assert {each.message for found in run_ranks(_staged, WORLD, directory) for each in found} == {""}


def test_a_checksum_is_that_of_the_chunk_in_the_file_whatever_the_strides() -> None:
    array = np.random.default_rng(0).standard_normal((700, 901)).astype(np.float32)
    arrays = [array, np.asfortranarray(array), np.repeat(array, 2, axis=1)[:, ::2], np.empty((0, 3)), np.ones(())]
    found = []
    for each in arrays:
        planner = StandardSavePlanner()
        planner.configure_planner({"t": each}, _context())
        found.append(region_checksums(planner.build_local_plan(), planner, 0).tolist())
    assert found[0] == found[1] == found[2]
    assert (
        found[0] == [_brute_force(array.tobytes())]
        and found[3] == []
        and found[4] == [_brute_force(b"\0" * 6 + b"\xf0\x3f")]
    )


def _context() -> Any:
    return PlannerContext(Descriptions(AdapterSet((NumpyAdapter(),))).describe, ObjectEncoding())


def _brute_force(raw: bytes) -> int:
    blocks = [raw[at : at + (1 << 20)] for at in range(0, len(raw), 1 << 20)]
    words = [xxhash.xxh3_64_intdigest(block) for block in blocks]
    return xxhash.xxh3_64_intdigest(np.array(words, "<u8").tobytes())


# -- what it costs and when it is refused -----------------------------------------------------------------------------


class Records(logging.Handler):
    """Keeps what exchanges cost."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        cost: Any = record.args
        self.found.append((cost[0].stage, cost[0].bytes_in))


def _exchanges(context: RankContext, directory: Path) -> list[tuple[str, int]]:
    seat, records = Seat.of(context), Records()
    log = logging.getLogger("dcp.coordination")
    log.setLevel(logging.DEBUG)
    whole = {f"w{i}": ShardedArray.cut(np.ones(3), [Box.whole((3,))], "float64") for i in range(50)}
    log.addHandler(records)
    seat.save(whole, checkpoint_id=directory, check_replicas=True)
    return records.found


def test_equal_replicas_cost_32_bytes_a_rank(directory: Path) -> None:
    for seen in run_ranks(_exchanges, 2, directory):
        assert [stage for stage, _ in seen] == ["save/agree", "save/plan", "save/replicas", "save/commit"]
        assert 32 <= dict(seen)["save/replicas"] < 32 + 64  # framing


def _mixed(context: RankContext, directory: Path) -> Outcome:
    seat = Seat.of(context)
    return outcome(seat, {"t": np.ones(2)}, directory, check_replicas=seat.rank == 1)


def test_ranks_that_do_not_all_ask_for_it_get_an_error(directory: Path) -> None:
    for found in run_ranks(_mixed, 2, directory):
        assert found.kind == ArgumentsDifferError.__name__ and "check_replicas is False on rank 0" in found.message


@pytest.mark.parametrize("how", [{"no_dist": True}, {"use_collectives": False}, {"check_replicas": 1}])
def test_it_is_refused_where_there_is_nobody_to_compare_with(tmp_path: Path, how: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="check_replicas"):
        api.save({"t": np.ones(2)}, checkpoint_id=tmp_path, **{"check_replicas": True} | how)
    assert not list(tmp_path.iterdir())


def test_one_rank_alone_saves_as_ever(tmp_path: Path) -> None:
    api.save({"t": np.ones(2)}, checkpoint_id=tmp_path, check_replicas=True)
    api.async_save({"t": np.ones(2)}, checkpoint_id=tmp_path, check_replicas=True).get_result()
    assert api.read(tmp_path, "t").tolist() == [1.0, 1.0]


def _rank_fails(context: RankContext, directory: Path, mode: str) -> list[Outcome]:
    class Failing(StandardSavePlanner):
        def get_data(self, item: WriteItem) -> Any:
            if seat.rank == 1:
                raise RuntimeError("no bits today")
            return super().get_data(item)

    seat = Seat.of(context)
    seat.save(state_of(seat.rank, seat.world, 1), checkpoint_id=directory)
    found = [outcome(seat, state_of(seat.rank, seat.world, tag), directory, mode, planner=Failing()) for tag in (2, 3)]
    assert loaded_tag(seat, directory) == 1
    return found


@pytest.mark.parametrize("mode", ["save", "mailbox"])
def test_a_rank_that_cannot_give_its_bits_fails_the_save_on_all(directory: Path, mode: str) -> None:
    for found in run_ranks(_rank_fails, 2, directory, mode):
        assert all("rank 1" in each.message and "no bits today" in each.message for each in found)
    assert checkpoint_names(directory)


# -- devices ----------------------------------------------------------------------------------------------------------


def _on_devices(context: RankContext, directory: Path, has_streams: bool) -> list[Outcome]:
    """A tensor of many copies' length on a device of each rank; then with the last bit flipped on rank 1."""
    seat, found = Seat.of(context), []
    with SimulatedDevice(has_streams=has_streams) as device:
        for flipped in (None, 1):
            whole = np.arange(3_000_000, dtype=np.float32)
            if seat.rank == flipped:
                flip(whole, -1)
            tensor = ShardedDeviceArray.cut(device, whole, [Box.whole(whole.shape)])
            for mode in ("save", "mailbox"):
                found.append(outcome(seat, {"t": tensor}, directory, mode, adapter=DeviceRankAdapter()))
    return found


@pytest.mark.parametrize("has_streams", [True, False])
def test_tensors_on_devices_are_compared_to_the_last_bit(directory: Path, has_streams: bool) -> None:
    for good, good_async, bad, bad_async in run_ranks(_on_devices, 2, directory, has_streams):
        assert (good.kind, good_async.kind) == ("", "")
        assert bad.kind == bad_async.kind == ReplicasDifferError.__name__
