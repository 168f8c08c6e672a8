"""Broadcasts between MindSpore ranks: only bytes that cannot break a collective travel, and they arrive, or an error.

Host memory goes through the job's store; by MCCL only in groups that a caller gives. HCCL needs an Ascend device: what
it is given is tested with host tensors in the place of those on a device.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dcp_mindspore as dcp
from dcp_core.box import Box
from dcp_core.dtype import DTYPES
from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError
from dcp_mindspore import collectives, wires
from dcp_mindspore.channel import process_group
from dcp_mindspore.elements import DeviceView, memory_of, tensor_of_bits
from tests.core.rank_jobs import error_of
from tests.core.test_shared_reads_numpy import CountedOperations, reader_on
from tests.mindspore.ms_ranks import MindSporeRank, run_mindspore

pytestmark = pytest.mark.timeout(150)

SIZES = (1, 2, 3, 7, 255, 256, 1000, 4097, 100_001, (4 << 20) + 3)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


# -- what may reach a collective --------------------------------------------------------------------------------------


def is_harmless(tensor: Any) -> bool:
    """What FACTS of MindSpore allow: whole, contiguous, of bytes, at least one."""
    return (
        str(tensor.dtype) == "UInt8"
        and len(tensor.shape) == 1
        and tensor.shape[0] > 0
        and tensor.is_contiguous()
        and tensor.storage_offset() == 0
    )


@given(hnp.arrays(st.sampled_from([dtype.bits for dtype in DTYPES]), SHAPES), st.booleans(), st.booleans())
def test_whatever_is_given_nothing_that_breaks_a_collective_reaches_it(
    array: npt.NDArray[Any], is_cut: bool, is_frozen: bool
) -> None:
    wire = array[..., ::2] if is_cut and array.ndim else array
    if is_frozen:
        wire.flags.writeable = False
    is_bytes = wire.dtype == np.uint8 and wire.ndim == 1 and wire.size and wire.flags.c_contiguous and not is_frozen
    if not is_bytes:
        with pytest.raises(CoordinationError, match="only whole tensors of bytes"):
            collectives.byte_tensor(wire)
        return
    tensor = collectives.byte_tensor(wire)
    assert is_harmless(tensor) and tensor.asnumpy().tobytes() == wire.tobytes()
    tensor.asnumpy()[0] ^= 255
    assert wire[0] == tensor.asnumpy()[0], "what is received lands in the wire"


@given(st.sampled_from(DTYPES), SHAPES)
def test_the_wire_of_any_view_is_harmless_or_empty(dtype: Any, shape: tuple[int, ...]) -> None:
    view = np.zeros(shape, dtype.bits)
    wire = wires.wire_of(view)
    assert wire is not None and wire.nbytes == view.nbytes
    if wire.nbytes:
        assert is_harmless(collectives.byte_tensor(wire))
    spread = np.zeros((*shape, 2), dtype.bits)[..., 0]
    assert wires.wire_of(spread) is None or spread.flags.c_contiguous


@pytest.mark.parametrize("kind", ["bool", "int16", "float32", "complex64", "empty", "view"])
def test_a_tensor_on_a_device_that_would_break_a_collective_is_refused(kind: str) -> None:
    whole = mindspore.Tensor.from_numpy(np.zeros(8, np.uint8))
    tensors = {"empty": mindspore.Tensor.from_numpy(np.zeros(0, np.uint8)), "view": whole[2:5]}
    tensor = tensors[kind] if kind in tensors else mindspore.Tensor.from_numpy(np.zeros(8, kind))
    with pytest.raises(CoordinationError, match="only whole tensors of bytes"):
        collectives.byte_tensor(tensor)
    assert is_harmless(collectives.byte_tensor(whole))


@given(st.lists(st.tuples(st.sampled_from(["float32", "uint8", "int16", "float64", "bool"]), SHAPES), max_size=5))
def test_views_come_out_of_a_wire_as_they_went_in(parts: list[tuple[str, tuple[int, ...]]]) -> None:
    rng = np.random.default_rng(0)
    views = [np.asarray(rng.integers(0, 2, shape)).astype(name) for name, shape in parts]
    wire = wires.new_wire(sum(view.nbytes for view in views), np.empty(0))
    wires.pack(views, wire)
    assert isinstance(wire, np.ndarray) and wire.tobytes() == b"".join(view.tobytes() for view in views)
    found = [np.zeros_like(view) for view in views]
    wires.unpack(wire, found)
    assert all((one == other).all() for one, other in zip(found, views, strict=True))


def test_views_of_device_tensors_come_out_of_a_wire_as_they_went_in() -> None:
    """Host tensors stand in for those on a device."""
    from dcp_core.dtype import dtype_named

    views, bits = [], []
    for name in ("float32", "int64", "uint8", "float16"):
        tensor = tensor_of_bits(np.arange(24).reshape(4, 6).astype(name), dtype_named(name))
        views.append(DeviceView(tensor, Box((1, 2), (2, 3))))
        bits.append(tensor.asnumpy()[1:3, 2:5].tobytes())
    assert wires.wire_of(views[0]) is None
    wire: Any = wires.new_wire(sum(map(len, bits)), views[0])
    wires.pack(views, wire)
    assert wire.to_send().asnumpy().tobytes() == b"".join(bits)
    part = wire[3:7]
    received = part.to_fill()
    assert is_harmless(collectives.byte_tensor(received)) and is_harmless(collectives.byte_tensor(part.to_send()))
    part.take(part.to_send())
    for view in views:
        view.tensor[1:3, 2:5] = view.tensor[1:3, 2:5] * 0
    wires.unpack(wire, views)
    assert [memory_of(view.tensor).view[1:3, 2:5].tobytes() for view in views] == bits


# -- through the store ------------------------------------------------------------------------------------------------


def broadcast_all_sizes(rank: MindSporeRank, groups: dict[tuple[int, ...], str] | None = None) -> list[bool]:
    """Broadcast from every member of every group that this rank is in; returns for each whether all was right.

    The last size is that of several messages; one member of each group sends it.
    """
    carrier: Any = process_group().broadcasts
    given = carrier.given_groups(groups or {})
    found = []
    wanted = list(groups or {(0, 1): "", (0, 1, 2): "", (1, 2): ""})
    for ranks in sorted(ranks for ranks in wanted if rank.rank in ranks):
        group = carrier.open(ranks, given.get(ranks), 20.0, token="t1")
        for source in ranks:
            sizes = SIZES if source == ranks[0] else SIZES[:-1]
            sent = [np.random.default_rng([source, size]).integers(0, 256, size, np.uint8) for size in sizes]
            spaces = [np.zeros(size + 1, np.uint8) for size in sizes]
            memory = [space[1:] if size % 2 else space[:-1] for space, size in zip(spaces, sizes, strict=True)]
            if rank.rank == source:
                for own, bits in zip(memory, sent, strict=True):
                    own[:] = bits
            works = [group.broadcast(own, source) for own in memory]
            for work in works:
                work.wait()
                assert work.is_done()
            found.append(all((own == bits).all() for own, bits in zip(memory, sent, strict=True)))
        group.broadcast(np.zeros(0, np.uint8), ranks[0]).wait()
        group.close()
    return found


def test_the_store_carries_bytes_within_subgroups() -> None:
    found = run_mindspore(broadcast_all_sizes, 3)
    assert found == [[True] * 5, [True] * 7, [True] * 5]


def leave_nothing_in_the_store(rank: MindSporeRank) -> list[str]:
    carrier: Any = process_group().broadcasts
    store, set_key, kept = carrier._store, carrier._store.set, {}

    def note(key: str, value: Any) -> None:
        kept[key] = True
        set_key(key, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "set", note)
        group = carrier.open((0, 1), None, 20.0, token="t1")
        group.broadcast(np.zeros(5_000_000, np.uint8), 0).wait()
        if rank.rank == 0:  # once all have the bytes the source keeps none
            assert len(kept) > 3 and not [key for key in kept if "/bytes/" in key and store.check([key])]
        group.close()
    rank.store.add("over", 1)
    while rank.store.add("over", 0) < 2:
        time.sleep(0.001)
    carrier.open((0, 1), None, 20.0, token="t2").close()
    return [key for key in kept if store.check([key])]


def test_the_next_load_finds_the_store_as_the_one_before_did() -> None:
    assert run_mindspore(leave_nothing_in_the_store, 2) == [[], []]


def broadcast_with_one_missing(rank: MindSporeRank, how: str) -> CoordinationError | None:
    carrier: Any = process_group().broadcasts
    try:
        group = carrier.open((0, 1, 2), None, 1.5, token="t1") if how == "broadcast" or rank.rank != 1 else None
        if rank.rank == 1:
            time.sleep(2.5)
            return None
        assert group is not None
        with pytest.raises(CoordinationError, match="rank") as failure:
            group.broadcast(np.zeros(10, np.uint8), 1).wait()
        group.close()
        return failure.value
    except CoordinationError as error:
        return error


@pytest.mark.parametrize("how", ["open", "broadcast"])
def test_a_member_that_does_not_come_is_an_error_in_bounded_time(how: str) -> None:
    """Whoever waits longest times out; who began later may hear of that before its own time is up."""
    first, _, last = run_mindspore(broadcast_with_one_missing, 3, how)
    assert "1" in str(first) and "1" in str(last)
    assert isinstance(first, CoordinationTimeoutError) or isinstance(last, CoordinationTimeoutError)


def broadcast_different_sizes(rank: MindSporeRank) -> str:
    carrier: Any = process_group().broadcasts
    group = carrier.open((0, 1), None, 10.0, token="t1")
    try:
        group.broadcast(np.zeros(10 + rank.rank, np.uint8), 0).wait()
    except CoordinationError as error:
        return str(error)
    finally:
        group.close()
    return ""


def test_members_that_broadcast_different_sizes_are_told() -> None:
    first, second = run_mindspore(broadcast_different_sizes, 2)
    assert "same broadcasts" in second and "rank 1 had failed" in first


# -- by MCCL ----------------------------------------------------------------------------------------------------------


def save_and_load_by_mccl(rank: MindSporeRank, path: str) -> int:
    group = process_group()  # its store is found by one exchange of the communication library
    assert (group.rank, group.world_size) == (rank.rank, 3)
    pair = mindspore.mint.distributed.new_group([0, 1], backend="mccl") if rank.rank < 2 else ""
    whole = collectives.world_group()
    groups: dict[tuple[int, ...], str] = {(0, 1, 2): whole} | ({(0, 1): pair} if rank.rank < 2 else {})
    assert broadcast_all_sizes(rank, groups) == [True] * (5 if rank.rank < 2 else 3)
    with pytest.raises(ArgumentError, match="members"):
        process_group().broadcasts.given_groups({(0, rank.rank or 1): whole})  # type: ignore[union-attr]
    values = {
        "a": np.arange(300_000, dtype=np.float32),
        "b": np.arange(5, dtype=np.int16),
        "c": np.array([True, False]),
    }
    dcp.save({name: mindspore.Tensor(value) for name, value in values.items()}, checkpoint_id=path, timeout_seconds=30)
    operations = CountedOperations()
    target = {name: mindspore.Tensor(np.zeros_like(value)) for name, value in values.items()}
    dcp.load(
        target, storage_reader=reader_on(path, operations), broadcast_groups={(0, 1, 2): whole}, timeout_seconds=30
    )
    assert all((target[name].asnumpy() == value).all() for name, value in values.items())
    return operations.nbytes


def test_groups_of_the_communication_library_carry_bytes_when_they_are_given(tmp_path: Path) -> None:
    read = run_mindspore(save_and_load_by_mccl, 3, str(tmp_path / "c"), start="mccl", timeout_seconds=100)
    assert 1_200_000 <= sum(read) < 1_500_000


COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "scatter", "send", "recv")
SEEDS = range(10)


def load_anything_by_mccl(rank: MindSporeRank, path: str) -> int:
    """Load random states by MCCL, and look at every tensor that any of its collectives is given."""
    distributed: Any = mindspore.mint.distributed
    groups = {(0, 1): collectives.world_group()}
    process_group()  # the exchange of addresses is MindSpore's own, of objects
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in dir(distributed) if name.startswith(COLLECTIVES)]:
            patch.setattr(distributed, name, noted(getattr(distributed, name), seen))
        for seed in SEEDS:
            bits = random_bits(seed)
            saved = {key: tensor_of_bits(array, dtype) for key, (array, dtype) in bits.items()}
            dcp.save(saved, checkpoint_id=f"{path}/{seed}", timeout_seconds=30, durable=False)
            state = {key: tensor_of_bits(np.zeros_like(array), dtype) for key, (array, dtype) in bits.items()}
            options: dict[str, Any] = {
                "broadcast_groups": groups,
                "broadcast_batch_bytes": (1 << 10, 6 << 20)[seed % 2],
            }
            dcp.load(state, checkpoint_id=f"{path}/{seed}", timeout_seconds=30, **options)
            for key, (array, _) in bits.items():
                assert memory_of(state[key]).view.tobytes() == array.tobytes(), (seed, key)
    assert all(map(is_harmless, seen))
    return len(seen)


def noted(function: Any, seen: list[Any]) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        seen.extend(value for value in (*arguments, *options.values()) if isinstance(value, mindspore.Tensor))
        return function(*arguments, **options)

    return call


def random_bits(seed: int) -> dict[str, tuple[npt.NDArray[Any], Any]]:
    """Tensors of dtypes that MindSpore has, empty and 0-d ones among them; the same in every process."""
    rng = np.random.default_rng(seed)
    known = [dtype for dtype in DTYPES if hasattr(mindspore, "bool_" if dtype.name == "bool" else dtype.name)]
    found = {}
    for number in range(6):
        dtype = known[rng.integers(len(known))]
        shape = [(), (0,), (3, 0), (1,), (7,), (5, 3), (129, 65), (4, 1, 1025)][rng.integers(8)]
        raw = rng.integers(0, 2 if dtype.name == "bool" else 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        found[f"{number}.{dtype.name}"] = (raw.view(dtype.bits).reshape(shape), dtype)
    return found


def test_no_load_gives_a_collective_what_would_break_it(tmp_path: Path) -> None:
    found = run_mindspore(load_anything_by_mccl, 2, str(tmp_path), start="mccl", timeout_seconds=100)
    assert found[0] == found[1] >= len(SEEDS)


def load_after_a_collective_that_failed(rank: MindSporeRank, path: str) -> tuple[str, str]:
    distributed: Any = mindspore.mint.distributed
    group = process_group()
    assert group.channel is not None
    dcp.save({"a": mindspore.Tensor(np.arange(1000, dtype=np.float32))}, checkpoint_id=path, timeout_seconds=30)
    if rank.rank == 0:  # a rank that sends to a group what the others do not expect
        tensor = mindspore.Tensor.from_numpy(np.full(4000, 77, np.uint8))
        distributed.broadcast(tensor, src=0, group=collectives.world_group())
        tensor.asnumpy()
    groups = {(0, 1): collectives.world_group()}
    target = {"a": mindspore.Tensor(np.zeros(1000, np.float32))}
    kind, text = error_of(dcp.load, target, checkpoint_id=path, broadcast_groups=groups, timeout_seconds=10)
    again = {"a": mindspore.Tensor(np.zeros(1000, np.float32))}
    dcp.load(again, checkpoint_id=path, timeout_seconds=20)  # without the group: through the store
    assert (again["a"].asnumpy() == np.arange(1000)).all()
    return kind.__name__, text


def test_what_a_broken_link_delivers_is_an_error_and_not_an_element(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    found = run_mindspore(load_after_a_collective_that_failed, 2, path, start="mccl", timeout_seconds=100)
    assert [kind for kind, _ in found] == ["CoordinationError"] * 2 or "Rank" in found[0][0]
    assert any("garbage" in text for _, text in found)
