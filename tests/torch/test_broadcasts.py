"""Broadcasts between real gloo ranks: what arrives, in which groups, and what happens when it does not."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch lists no exports
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dcp_torch
from dcp_core.adapter import BroadcastGroup, Broadcasts, BroadcastWork
from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError
from dcp_torch import broadcasts as broadcasts_module
from dcp_torch import communicators, wires
from dcp_torch.adapter import TorchAdapter
from dcp_torch.broadcast_group import TorchBroadcastGroup
from dcp_torch.broadcasts import TorchBroadcasts
from dcp_torch.communicators import Communicator
from dcp_torch.elements import _OF_TORCH
from dcp_torch.meeting import Meeting
from tests.torch.gloo_ranks import TorchRank, free_port, register_hccl_over_gloo, run_gloo

pytestmark = pytest.mark.timeout(90)
_HOST = torch.device("cpu")
SECONDS = 20.0
SOON = 10.0  # much less than what a wait may take where SOON is used
LONG = 60.0


def broadcasts_of(group: Any = None) -> Broadcasts:
    found = TorchAdapter().process_group(group).broadcasts
    assert found is not None
    return found


def error_of(action: Callable[[], Any]) -> CoordinationError:
    with pytest.raises(CoordinationError) as caught:
        action()
    return caught.value


# -- elements and bytes ----------------------------------------------------------------------------------------------


def random_bits(dtype: torch.dtype, shape: Sequence[int], seed: int, device: torch.device = _HOST) -> torch.Tensor:
    """Any bits, NaNs with payloads and what is no valid number among them; booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = dtype.itemsize * int(torch.Size(shape).numel())
    most = 2 if dtype is torch.bool else 256
    numbers = torch.randint(0, most, (nbytes,), dtype=torch.uint8, generator=generator)
    return numbers.to(device).view(dtype).view(tuple(shape))


def bits_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return plain.view(torch.uint8).cpu().numpy().tobytes()


def layouts(dtype: torch.dtype, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Views of many layouts; whether each is plain bytes in memory."""
    whole = random_bits(dtype, (6, 5), seed, device)
    yield "whole", whole.clone(), True
    yield "0-d", random_bits(dtype, (), seed, device), True
    yield "empty", random_bits(dtype, (0, 3), seed, device), True
    yield "middle of a flat tensor", whole.clone().view(-1)[7:22], True
    yield "rows", whole.clone()[2:5], True
    yield "columns", whole.clone()[:, 1:4], False
    yield "transposed", whole.clone().t(), False
    yield "every other", whole.clone()[::2, ::3], False
    with torch.inference_mode():
        yield "inference", whole.clone(), True
        yield "columns in inference mode", whole.clone()[:, 1:4], False
    if dtype.is_floating_point or dtype.is_complex:
        yield "leaf", torch.nn.Parameter(whole.clone()), True
    if dtype.is_complex and dtype is not torch.complex32:
        yield "conjugated", whole.clone().conj(), False
        yield "negated", whole.clone().conj().imag, False


def every_layout(seed: int, device: torch.device) -> list[tuple[str, torch.Tensor, bool]]:
    of_types = [(dtype, layouts(dtype, seed, device)) for dtype in _OF_TORCH]
    return [(f"{dtype} {name}", view, plain) for dtype, views in of_types for name, view, plain in views]


def send_every_layout(rank: TorchRank) -> list[str]:
    """Each view alone, out of and into its own memory where that can be; then all of a dtype as one."""
    group = broadcasts_of().open((0, 1), None, SECONDS, token="layouts", device=rank.device.type)
    wrong = []
    views, expected = every_layout(rank.rank, rank.device), every_layout(1, _HOST)
    for (name, view, is_plain), (_, sent, _) in zip(views, expected, strict=True):
        wire = group.wire(view)
        if (wire is not None) != is_plain:
            wrong.append(f"{name}: wire")
        if wire is None:
            wire = group.temporary(view.numel() * view.element_size(), view)
            if rank.rank == 1:
                group.pack([view], wire)
        group.broadcast(wire, 1).wait()
        if not is_plain and rank.rank == 0:
            group.unpack(wire, [view])
        if bits_of(view) != bits_of(sent):
            wrong.append(name)
    group.close()
    return wrong


def send_batches(rank: TorchRank) -> list[str]:
    group = broadcasts_of().open((0, 1), None, SECONDS, token="batches", device=rank.device.type)
    wrong = []
    for dtype in _OF_TORCH:
        views = [view for _, view, _ in layouts(dtype, rank.rank, rank.device)]
        expected = [view for _, view, _ in layouts(dtype, 0, _HOST)]
        wire = group.temporary(sum(view.numel() * view.element_size() for view in views), views[0])
        if rank.rank == 0:
            group.pack(views, wire)
        group.broadcast(wire, 0).wait()
        if rank.rank == 1:
            group.unpack(wire, views)
        if [bits_of(view) for view in views] != [bits_of(view) for view in expected]:
            wrong.append(f"{dtype}")
    group.close()
    return wrong


@pytest.mark.parametrize("job", [send_every_layout, send_batches])
def test_every_dtype_and_layout_arrives_bit_for_bit(job: Callable[..., Any]) -> None:
    assert run_gloo(job, 2) == [[], []]


def test_every_dtype_arrives_in_inference_mode_too() -> None:
    with torch.inference_mode():
        source, target = (torch.arange(seed, seed + 6).view(2, 3) for seed in (0, 9))
    normal, leaf = torch.zeros(3, 2, dtype=torch.int64), torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    with torch.inference_mode():
        wire = wires.new_wire(144, normal)
        wires.pack([source, torch.full((12,), 7)], wire)
        wires.unpack(wire, [target, normal, leaf])
    assert not wire.is_inference()
    assert target.tolist() == source.tolist()
    assert normal.tolist() == [[7, 7]] * 3
    assert leaf.detach().view(torch.int64).tolist() == [[7, 7]] * 3
    wires.unpack(wire, [target, leaf, normal])
    assert leaf._version == 0 and leaf.requires_grad and leaf.grad_fn is None


def test_a_wire_is_the_memory_of_its_view() -> None:
    view = torch.zeros(4, 3, dtype=torch.float32)
    wire = wires.wire_of(view[1:3])
    assert wire is not None and wire.dtype == torch.uint8 and wire.shape == (24,)
    wire.fill_(1)
    assert [row.view(torch.int32).tolist() for row in view] == [[0] * 3, [0x01010101] * 3, [0x01010101] * 3, [0] * 3]


@pytest.mark.parametrize("reason", ["missing", "not on this device"])
def test_without_a_fused_copy_views_are_copied_one_by_one(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError

    if reason == "missing":
        monkeypatch.delattr(torch, "_foreach_copy_")
    else:
        monkeypatch.setattr(torch, "_foreach_copy_", refuse)
    sources = [random_bits(torch.bfloat16, shape, 1) for shape in [(3, 2), (), (7,)]]
    targets = [torch.zeros_like(source) for source in sources]
    wire = wires.new_wire(28, sources[0])
    wires.pack(sources, wire)
    wires.unpack(wire, targets)
    assert [bits_of(target) for target in targets] == [bits_of(source) for source in sources]


def test_views_of_a_batch_are_copied_in_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    fused = torch._foreach_copy_

    def count(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        calls.append(len(targets))
        fused(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", count)
    views = [torch.ones(3) for _ in range(50)]
    wire = wires.new_wire(600, views[0])
    wires.pack(views, wire)
    wires.unpack(wire, views)
    assert calls == [50, 50]


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<f4", ">f4", "<c16", "<u8", "?", ">i2"])
def test_arrays_go_through_a_wire_as_they_are(dtype: str) -> None:
    whole = np.random.default_rng(0).integers(0, 200, (4, 6)).astype(dtype)
    frozen = whole.copy()
    frozen.flags.writeable = False
    views = [whole, whole[::2, ::-1], whole.T, frozen]
    wire = wires.new_wire(sum(view.nbytes for view in views), views[0])
    wires.pack(views, wire)
    assert wire.numpy().tobytes() == b"".join(view.astype(view.dtype.newbyteorder("<")).tobytes() for view in views)
    targets = [np.zeros_like(whole), np.zeros((4, 6), dtype)[::2, ::-1], np.zeros((6, 4), dtype), np.zeros_like(whole)]
    wires.unpack(wire, targets)
    assert all((target == view).all() for target, view in zip(targets, views, strict=True))
    own = wires.wire_of(whole)
    assert (
        (own is None) == (dtype in (">f4", ">i2")) and wires.wire_of(frozen) is None and wires.wire_of(whole.T) is None
    )
    assert own is None or own.data_ptr() == whole.ctypes.data


def load_arrays(rank: TorchRank, path: str) -> None:
    state: dict[str, Any] = {"small": np.arange(5), "odd": np.arange(6, dtype=">f4"), "large": np.arange(1 << 18)}
    state["tensor"] = torch.arange(5)
    dcp_torch.save(state, checkpoint_id=path)
    found = {name: value * 0 for name, value in state.items()}
    dcp_torch.load(found, checkpoint_id=path, timeout_seconds=SECONDS)
    assert all((found[name] == value).all() for name, value in state.items())


def test_arrays_in_a_state_are_read_once_and_broadcast_too(tmp_path: Path) -> None:
    run_gloo(load_arrays, 2, str(tmp_path / "c"))


def test_views_that_do_not_fill_the_wire_are_refused() -> None:
    with pytest.raises(CoordinationError, match="12 bytes of views do not fit a wire of 16 bytes"):
        wires.pack([torch.zeros(3)], wires.new_wire(16, torch.zeros(1)))


def test_memory_in_a_format_of_the_device_is_never_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    view: Any = SimpleNamespace(device=SimpleNamespace(type="npu"), tiles=29)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(get_npu_format=lambda view: view.tiles))
    assert not wires._has_plain_format(view)
    view.tiles = 2
    assert wires._has_plain_format(view)
    assert wires._has_plain_format(torch.zeros(1))


# -- groups that are made --------------------------------------------------------------------------------------------


def open_own(rank: int, groups: Sequence[tuple[int, ...]], token: str) -> dict[tuple[int, ...], BroadcastGroup]:
    found = broadcasts_of()
    return {ranks: found.open(ranks, None, SECONDS, token=token) for ranks in sorted(groups) if rank in ranks}


def exchange(rank: int, opened: dict[tuple[int, ...], BroadcastGroup], rounds: int = 2) -> int:
    """Every member sends to every group, all of it in flight at once; returns how many broadcasts that were."""
    started: list[tuple[int, torch.Tensor, BroadcastWork]] = []
    for turn in range(rounds):
        for ranks, group in opened.items():
            for source in ranks:
                tensor = torch.full((50_000,), 100 * turn + source if source == rank else -1)
                wire = group.wire(tensor)
                started.append((100 * turn + source, tensor, group.broadcast(wire, source)))
    for _, _, work in started:
        work.wait()
        assert work.is_done()
    assert all(bool((tensor == expected).all()) for expected, tensor, _ in started)
    return len(started)


def exchange_in_many_groups(rank: TorchRank) -> int:
    opened = open_own(rank.rank, [(0, 1), (0, 1, 2), (1, 2, 3), (0, 3), (0, 1, 2, 3)], "many")
    count = exchange(rank.rank, opened)
    for group in opened.values():
        group.close()
    return count


def test_many_broadcasts_are_in_flight_in_several_groups_at_once() -> None:
    assert run_gloo(exchange_in_many_groups, 4) == [22, 24, 20, 18]


def exchange_tied(rank: TorchRank) -> tuple[int, int]:
    """Stages of a pipeline have groups of their own, so that ranks differ in how many they have had."""
    for _ in range(rank.rank):
        dist.new_group([rank.rank], backend="gloo", use_local_synchronization=True)
    before = len(dist.distributed_c10d._world.pg_map)
    opened = open_own(rank.rank, [(0, 1), (6, 7), (0, 1, 6, 7), (2, 3), (3, 4)], "tied")
    count = exchange(rank.rank, opened)
    for group in opened.values():
        group.close()
    return count, len(dist.distributed_c10d._world.pg_map) - before


def test_ranks_that_share_a_tied_parameter_need_no_others() -> None:
    counts = run_gloo(exchange_tied, 8)
    assert counts == [(12, 0), (12, 0), (4, 0), (8, 0), (4, 0), (0, 0), (12, 0), (12, 0)]


def footprint() -> tuple[int, int, int]:
    groups = len(dist.distributed_c10d._world.pg_map)
    return groups, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def exchange_again_and_again(rank: TorchRank, port: int | None) -> list[tuple[tuple[int, int, int], int]]:
    if port is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
        dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    seen = []
    for turn in range(20):
        opened = open_own(rank.rank, [(0, 1), (0, 1, 2), (1, 2)], f"turn {turn}")
        exchange(rank.rank, opened)
        during = footprint()
        for group in opened.values():
            group.close()
        assert during[1] > footprint()[1] and during[2] > footprint()[2]
        del opened, group
        dist.barrier()
        seen.append((footprint(), store.num_keys()))
        dist.barrier()
    return seen


@pytest.mark.parametrize("is_tcp", [False, True])
def test_made_groups_leave_nothing_behind(is_tcp: bool) -> None:
    for seen in run_gloo(exchange_again_and_again, 3, free_port() if is_tcp else None, init=not is_tcp):
        assert seen[1:] == [seen[1]] * 19


def close_first(rank: TorchRank) -> bool:
    """Rank 1 closes the group at once, and rank 0 is slow to make it; returns whether that was done then."""
    store, make = dist.distributed_c10d._get_default_store(), communicators.make_communicator

    def make_slowly(*args: Any) -> Communicator:
        made = make(*args)
        time.sleep(0.5)
        store.set("made", "")
        return made

    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 0:
            patch.setattr(broadcasts_module, "make_communicator", make_slowly)
        group = broadcasts_of().open((0, 1), None, SECONDS, token="first")
    group.close()
    return bool(store.check(["made"]))


def test_a_group_is_not_left_while_another_member_still_makes_it() -> None:
    assert run_gloo(close_first, 2) == [True, True]


def send_late(rank: TorchRank) -> int:
    """What is sent later than members may take to connect comes all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators, "_CONNECT_SECONDS", 0.5)
        group = broadcasts_of().open((0, 1), None, SECONDS, token="late")
    if rank.rank == 0:
        time.sleep(1)
    tensor = torch.tensor([rank.rank])
    group.broadcast(group.wire(tensor), 0).wait()
    group.close()
    return int(tensor)


def test_a_broadcast_may_take_longer_than_making_the_group() -> None:
    assert run_gloo(send_late, 2) == [0, 0]


def exchange_in_a_part(rank: TorchRank) -> tuple[int, ...]:
    """The process group is ranks 1, 2, 4; groups within it and sources are named by global ranks."""
    part = dist.new_group([1, 2, 4], backend="gloo")
    if rank.rank not in (1, 2, 4):
        return ()
    found = broadcasts_of(part)
    got = []
    for ranks in ((1, 2, 4), (1, 4), (2, 4)):
        if rank.rank in ranks:
            group = found.open(ranks, None, SECONDS, token="part")
            tensor = torch.tensor([rank.rank])
            group.broadcast(group.wire(tensor), 4).wait()
            got.append(int(tensor))
            group.close()
    return tuple(got)


def test_groups_and_sources_within_a_part_of_the_job_are_global_ranks() -> None:
    assert run_gloo(exchange_in_a_part, 5) == [(), (4, 4), (4, 4), (), (4, 4, 4)]


def test_a_lone_rank_has_no_broadcasts() -> None:
    if dist.is_initialized():
        pytest.skip("under torchrun there is a job")
    assert TorchAdapter().process_group().broadcasts is None


def open_wrongly(rank: TorchRank) -> list[str]:
    found = broadcasts_of()
    texts = []
    for ranks in ((1 - rank.rank,), (1, 0), (0, 0, 1)):
        with pytest.raises(ArgumentError) as caught:
            found.open(ranks, None, SECONDS, token="wrong")
        texts.append(str(caught.value))
    group = found.open((0, 1), None, SECONDS, token="wrong")
    with pytest.raises(ArgumentError, match="rank 2 is not in the group"):
        group.broadcast(group.temporary(1, torch.zeros(1)), 2)
    with pytest.raises(CoordinationError, match="no backend of this job broadcasts tensors on 'meta'"):
        found.open((0, 1), None, SECONDS, token="wrong", device="meta")
    group.close()
    group.close()
    with pytest.raises(CoordinationError, match="closed"):
        group.broadcast(group.temporary(1, torch.zeros(1)), 0).wait()
    return texts


def test_wrong_groups_and_sources_are_refused() -> None:
    for texts in run_gloo(open_wrongly, 2):
        assert all("must ascend" in text for text in texts)


# -- groups that are given or found ----------------------------------------------------------------------------------


def exchange_in_given(rank: TorchRank) -> tuple[list[tuple[int, ...]], list[int], int]:
    torch_group = dist.new_group([2, 0, 3], backend="gloo", sort_ranks=False)
    other = dist.new_group([1, 2], backend="gloo")
    mesh = DeviceMesh("cpu", [1, 3])
    found = broadcasts_of()
    given = found.given_groups({(3, 2, 0): torch_group, (2, 1): other, (3, 1): mesh, (0, 1, 2, 3): dist.group.WORLD})
    before = len(dist.distributed_c10d._world.pg_map)
    got = []
    for ranks, handle in sorted(given.items()):
        group = found.open(ranks, handle, SECONDS, token="given")
        for source in ranks:
            tensor = torch.tensor([rank.rank])
            group.broadcast(group.wire(tensor), source).wait()
            assert int(tensor) == source
        group.close()
        got.append(int(tensor))
        dist.all_reduce(torch.zeros(1), group=handle)
    assert len(dist.distributed_c10d._world.pg_map) == before
    return sorted(given), got, before


def test_given_groups_are_used_whatever_their_order_and_stay() -> None:
    results = run_gloo(exchange_in_given, 4)
    assert [keys for keys, _, _ in results] == [
        [(0, 1, 2, 3), (0, 2, 3)],
        [(0, 1, 2, 3), (1, 2), (1, 3)],
        [(0, 1, 2, 3), (0, 2, 3), (1, 2)],
        [(0, 1, 2, 3), (0, 2, 3), (1, 3)],
    ]


def pass_wrong_groups(rank: TorchRank) -> list[str]:
    gone = dist.new_group([0, 1], backend="gloo")
    dist.destroy_process_group(gone)
    mesh = init_device_mesh("cpu", (1, 2))
    wrong: list[dict[Any, Any]] = [
        {(0, 1): gone},
        {(0, 1): "a group"},
        {(0, 1): None},
        {(0, 1): mesh},
        {(0, 1, 2): dist.group.WORLD},
        {(0,): dist.group.WORLD},
        {(0, 0, 1): dist.group.WORLD},
        {"ranks": dist.group.WORLD},
        {(): dist.group.WORLD},
        {(True, False): dist.group.WORLD},
        {(0, 1): dist.group.WORLD, (1, 0): dist.group.WORLD},
    ]
    texts = []
    for groups in wrong:
        if groups == {(0,): dist.group.WORLD} and rank.rank == 1:
            continue
        with pytest.raises(ArgumentError, match="broadcast_groups has") as caught:
            broadcasts_of().given_groups(groups)
        texts.append(str(caught.value))
    return texts


def test_wrong_given_groups_are_refused() -> None:
    first, second = run_gloo(pass_wrong_groups, 2)
    assert "was destroyed" in first[0]
    assert "a group of the ranks 0, 1; let the key be" in first[4]
    assert (len(first), len(second)) == (11, 10)


def exchange_in_meshes(rank: TorchRank) -> list[tuple[int, ...]]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    mesh["replica", "shard"]._flatten("all")
    state = [
        distribute_tensor(torch.arange(8), mesh, [Replicate(), Shard(0)]),
        distribute_tensor(torch.arange(8), mesh["shard"], [Shard(0)]),
        torch.zeros(3),
        "text",
    ]
    found = broadcasts_of()
    groups = found.existing_groups(state)
    assert groups == found.existing_groups(state[:1])
    before = len(dist.distributed_c10d._world.pg_map)
    internals: Any = dist.distributed_c10d
    for ranks, name in sorted(groups.items()):
        names: list[Any] = [None] * len(ranks)
        group = found.open(ranks, name, SECONDS, token="mesh")
        tensor = torch.tensor([rank.rank])
        group.broadcast(group.wire(tensor), ranks[-1]).wait()
        assert int(tensor) == ranks[-1]
        group.close()
        dist.all_gather_object(names, name, group=internals._resolve_process_group(name))
        assert set(names) == {name}
    assert len(dist.distributed_c10d._world.pg_map) == before
    assert found.existing_groups(state[2:]) == {}
    return sorted(groups)


def test_groups_of_meshes_are_found_and_stay() -> None:
    results = run_gloo(exchange_in_meshes, 4)
    assert results == [
        [(0, 1), (0, 1, 2, 3), (0, 2)],
        [(0, 1), (0, 1, 2, 3), (1, 3)],
        [(0, 1, 2, 3), (0, 2), (2, 3)],
        [(0, 1, 2, 3), (1, 3), (2, 3)],
    ]


def open_what_is_gone(rank: TorchRank) -> str:
    found = broadcasts_of()
    group = dist.new_group([0, 1], backend="gloo")
    name = group.group_name
    dist.destroy_process_group(group)
    first = error_of(lambda: found.open((0, 1), name, SECONDS, token="gone"))
    second = error_of(lambda: found.open((0, 1), group, SECONDS, token="gone"))
    assert "does not have the group of ranks 0, 1 any more" in str(second)
    return str(first)


def test_a_group_that_was_destroyed_meanwhile_is_named() -> None:
    assert all("does not have the group of ranks 0, 1 any more" in text for text in run_gloo(open_what_is_gone, 2))


# -- backends --------------------------------------------------------------------------------------------------------


def start_without_gloo(rank: TorchRank, path: str, backend: str) -> list[str | None]:
    """A job whose default group has no communicator for host memory, or one of its own, or of a plugin."""

    def create(store: Any, own: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, own, size, timeout)

    def create_by_options(options: Any, _: Any) -> Any:
        assert options.global_ranks_in_group in ([], [0, 1]) and options.group_id
        return create(options.store, options.group_rank, options.group_size, options.timeout)

    register_hccl_over_gloo()
    dist.Backend.register_backend("toy", create, devices=["privateuseone"])
    dist.Backend.register_backend("extended", create_by_options, extended_api=True, devices=["cpu"])
    seconds = timedelta(seconds=SECONDS)
    dist.init_process_group(
        backend, store=FileStore(path, rank.world_size), rank=rank.rank, world_size=rank.world_size, timeout=seconds
    )
    found = broadcasts_of()
    kinds = [found.kind(device) for device in ("cpu", "privateuseone", "cuda")]
    given = found.given_groups({(0, 1): dist.group.WORLD})
    for turn, group in enumerate((None, given[0, 1])):
        opened = found.open((0, 1), group, SECONDS, token=f"turn {turn}")
        assert isinstance(opened, TorchBroadcastGroup)
        assert opened._communicator.is_made == (group is None or backend.startswith("private"))
        tensor = torch.tensor([rank.rank + 3])
        wire = opened.wire(tensor)
        assert wire is not None
        opened.broadcast(wire, 1).wait()
        assert int(tensor) == 4
        opened.close()
    dist.destroy_process_group()
    return kinds


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        ("gloo", ["gloo", None, "gloo"]),
        ("hccl", ["hccl", None, None]),
        ("extended", ["extended", None, None]),
        ("privateuseone:toy", ["gloo", "toy", None]),
        ("cpu:gloo,privateuseone:toy", ["gloo", "toy", None]),
        ("cpu:gloo,privateuseone:gloo", ["gloo", None, None]),
    ],
)
def test_host_memory_has_a_communicator_whatever_the_job_was_started_with(
    backend: str, kinds: list[str | None], tmp_path: Any
) -> None:
    results = run_gloo(start_without_gloo, 2, str(tmp_path / "store"), backend, init=False)
    assert results == [kinds, kinds]


class _CompletedWithError:
    """What a backend may say of a broadcast that failed: completed, and no error from `wait`."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def exception(self) -> Exception | None:
        return RuntimeError("the link is down")


def test_a_broadcast_that_a_backend_calls_completed_but_failed_is_an_error() -> None:
    group: Any = SimpleNamespace(broadcast=lambda wires, options: _CompletedWithError())
    communicator = Communicator(group, (0, 1), is_gloo=False, is_made=False)
    meeting = Meeting(dist.HashStore(), "load", "cpu", (0, 1), 1)  # type: ignore[attr-defined]  # no list of exports
    opened = TorchBroadcastGroup(communicator, meeting, SECONDS)
    error = error_of(opened.broadcast(torch.zeros(5, dtype=torch.uint8), 0).wait)
    assert "rank 1 could not get from rank 0 5 bytes" in str(error) and "the link is down" in str(error)


@pytest.mark.parametrize("is_made", [False, True])
def test_only_a_group_that_was_made_is_destroyed(is_made: bool) -> None:
    calls: list[str] = []
    group: Any = SimpleNamespace(abort=lambda: calls.append("abort"), shutdown=lambda: calls.append("shutdown"))
    communicator = Communicator(group, (0, 1), is_gloo=False, is_made=is_made)
    communicator.abort()
    communicator.end()
    communicator.end()
    assert calls == (["abort", "shutdown"] if is_made else [])


# -- failures --------------------------------------------------------------------------------------------------------


def never_send(rank: TorchRank, is_given: bool) -> tuple[str, float, bool]:
    """Rank 1 opens the group and sends nothing; then all go on in a new one."""
    found = broadcasts_of()
    given = dist.new_group([0, 1, 2], backend="gloo") if is_given else None
    found.open((0, 1, 2), given, SECONDS, token="first").close()
    dist.barrier()
    before = footprint()
    group = found.open((0, 1, 2), given, 1.5, token="never")
    text, took, is_timeout = "", 0.0, False
    if rank.rank != 1:
        started = time.monotonic()
        works = [group.broadcast(group.temporary(1000, torch.zeros(1)), 1) for _ in range(3)]
        error = error_of(works[0].wait)
        took = time.monotonic() - started
        text = str(error)
        is_timeout = isinstance(error, CoordinationTimeoutError)
        assert all(work.is_done() for work in works)
        assert error_of(works[2].wait) and error_of(works[0].wait)
        started = time.monotonic()
        assert "from rank 1" in str(error_of(group.broadcast(group.temporary(9, torch.zeros(1)), 0).wait))
        assert time.monotonic() - started < 1
    dist.barrier()
    started = time.monotonic()
    group.close()
    assert time.monotonic() - started < SOON
    again = found.open((0, 1, 2), None, SECONDS, token="again")
    assert exchange(rank.rank, {(0, 1, 2): again}) == 6
    again.close()
    if not is_given:
        await_footprint(before)
    return text, took, is_timeout


@pytest.mark.parametrize("is_given", [False, True])
def test_a_source_that_never_sends_is_named_within_the_timeout(is_given: bool) -> None:
    first, _, third = run_gloo(never_send, 3, is_given)
    assert first[2] or third[2]  # whoever is first cuts the connection of the other
    for rank, (text, took, _) in ((0, first), (2, third)):
        assert (
            f"rank {rank} could not get from rank 1 1000 bytes by a broadcast within the group of ranks 0, 1, 2" in text
        )
        assert "broadcast_replicated_tensors=False" in text
        assert took < 1.5 + SOON


def close_early(rank: TorchRank) -> str:
    """Rank 0 waits for what rank 1 will not send, and closes the group instead of waiting for ever."""
    found = broadcasts_of()
    found.open((0, 1), None, SECONDS, token="first").close()
    dist.barrier()
    before = footprint()
    group = found.open((0, 1), None, 3.0, token="early")
    text = ""
    if rank.rank == 0:
        work = group.broadcast(group.temporary(1000, torch.zeros(1)), 1)
        assert not work.is_done()
        started = time.monotonic()
        group.close()
        assert time.monotonic() - started < SOON
        text = str(error_of(work.wait))
    dist.barrier()
    group.close()
    await_footprint(before)
    return text


def await_footprint(before: tuple[int, int, int]) -> None:
    started = time.monotonic()
    while footprint() != before:
        assert time.monotonic() - started < SOON, (before, footprint())
        time.sleep(0.01)


def test_a_group_with_broadcasts_under_way_can_be_closed() -> None:
    first, _ = run_gloo(close_early, 2)
    assert "could not get from rank 1" in first and "closed before" in first


def give_up_alone(rank: TorchRank) -> tuple[str, float]:
    """Ranks 0 and 1 wait for rank 2, which is there; rank 1 gives up, with its connections still open."""
    group = broadcasts_of().open((0, 1, 2), None, LONG, token="alone")
    store = dist.distributed_c10d._get_default_store()
    text, started = "", time.monotonic()
    if rank.rank == 2:
        store.wait(["told"])
    else:
        work = group.broadcast(group.temporary(8, torch.zeros(1)), 2)
        if rank.rank == 1:
            group.close()
        text = str(error_of(work.wait))
    if rank.rank == 0:
        store.set("told", "")
    group.close()
    return text, time.monotonic() - started


def test_a_member_that_gives_up_tells_those_that_wait_for_others() -> None:
    (first, took), (second, _), _ = run_gloo(give_up_alone, 3)
    assert second.startswith("rank 1 could not get from rank 2 8 bytes") and "closed before" in second
    assert first.startswith("rank 0 could not get from rank 2 8 bytes") and "rank 1 had failed before: rank 1" in first
    assert took < LONG / 2


def lose_a_peer(rank: TorchRank, victim: int) -> tuple[str, float]:
    """A rank is killed while all others wait for it, or for each other."""
    found = broadcasts_of()
    group = found.open((0, 1, 2, 3), None, LONG, token="lost")
    wire = group.temporary(8, torch.zeros(1))
    group.broadcast(wire, victim).wait()
    if rank.rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    sources = [victim, (rank.rank + 1) % 4, (rank.rank + 2) % 4, (rank.rank + 3) % 4]
    if rank.rank == 2:
        sources.remove(victim)  # waits for those which are there, and which do not send
    works = [group.broadcast(group.temporary(8, torch.zeros(1)), source) for source in sources if source != rank.rank]
    text = str(error_of(works[0].wait))
    assert all(work.is_done() for work in works)
    group.close()
    took = time.monotonic() - started
    sys.stdout.flush()
    return text, took


def test_a_killed_peer_is_noticed_soon_by_all() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pytest.skip("kills a rank")
    victim = 0
    results = run_gloo(lose_a_peer, 4, victim, return_exceptions=True)
    for rank, result in enumerate(results):
        if rank == victim:
            assert "SIGKILL" in str(result)
            continue
        assert isinstance(result, tuple), result
        text, took = result
        assert "within the group of ranks 0, 1, 2, 3" in text and "could not get from rank" in text
        assert took < LONG / 2


def come_late(rank: TorchRank) -> tuple[str, float]:
    """Rank 2 comes to a group when the others have given it up; rank 1 is the first to do so, and tells rank 0."""
    if rank.rank == 2:
        dist.distributed_c10d._get_default_store().wait(["gave up"])
    started = time.monotonic()
    seconds = 1.0 if rank.rank == 1 else LONG
    error = error_of(lambda: broadcasts_of().open((0, 1, 2), None, seconds, token="late"))
    took = time.monotonic() - started
    if rank.rank == 0:
        dist.distributed_c10d._get_default_store().set("gave up", "")
    assert isinstance(error, CoordinationTimeoutError) == (rank.rank == 1)
    return str(error), took


def test_a_member_that_does_not_come_is_named_and_fails_when_it_does() -> None:
    results = run_gloo(come_late, 3)
    missing = "rank 1 could not make a gloo group of ranks 0, 1, 2: ranks 2 did not come within 1 s"
    texts = [text for text, _ in results]
    assert texts[1].startswith(missing)
    assert texts[0].startswith(f"rank 0 could not make a gloo group of ranks 0, 1, 2: {missing}; ")
    assert texts[2].startswith(f"rank 2 could not make a gloo group of ranks 0, 1, 2: {missing}; ")
    assert all(took < LONG / 2 for _, took in results)


def fail_elsewhere(rank: TorchRank) -> tuple[str, float]:
    """Rank 0 cannot open its first group, and so does not come to its second."""
    found = broadcasts_of()
    started = time.monotonic()
    ranks, given = ((0, 1), "no such group") if rank.rank == 0 else ((0, 2), None)
    if rank.rank == 1:
        return "", 0.0
    text = str(error_of(lambda: found.open(ranks, given, LONG, token="elsewhere")))
    return text, time.monotonic() - started


def test_a_rank_that_gave_up_earlier_is_not_waited_for() -> None:
    (first, _), _, (third, took) = run_gloo(fail_elsewhere, 3)
    assert first.startswith("rank 0 does not have the group of ranks 0, 1 any more")
    assert third.startswith("rank 2 could not make a gloo group of ranks 0, 2: rank 0 does not have the group of ranks")
    assert took < LONG / 2


def fail_to_make(rank: TorchRank) -> str:
    if rank.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dcp_torch.broadcasts.make_communicator", _refuse)
            return str(error_of(lambda: broadcasts_of().open((0, 1, 2), None, LONG, token="refused")))
    if rank.rank == 2:
        time.sleep(0.5)
    started = time.monotonic()
    text = str(error_of(lambda: broadcasts_of().open((0, 1, 2), None, 2.0, token="refused")))
    assert time.monotonic() - started < 2.0 + SOON
    return text


def _refuse(*_: Any) -> Any:
    raise RuntimeError("no sockets left")


def test_a_member_that_cannot_make_the_group_says_why() -> None:
    _, second, _ = run_gloo(fail_to_make, 3)
    assert "rank 1 could not make a gloo group of ranks 0, 1, 2: no sockets left" in second


def conforms(found: TorchBroadcasts) -> Broadcasts:
    return found
