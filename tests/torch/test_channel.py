"""The channel over the job's store, with real processes and real stores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch lists no exports
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.device_mesh import init_device_mesh

from dcp_core.adapter import KeyValueChannel, ProcessGroup
from dcp_core.coordination.exchange import Exchange
from dcp_core.errors import ArgumentError, CoordinationTimeoutError
from dcp_torch.adapter import TorchAdapter
from dcp_torch.store_channel import StoreChannel
from tests.torch.gloo_ranks import TorchRank, free_port, run_gloo

ADAPTER = TorchAdapter()


def exchanged(group: ProcessGroup, payload: bytes, timeout_seconds: float = 20.0) -> list[bytes]:
    """What all ranks of the group handed in."""
    exchange = Exchange(group.rank, group.world_size, group.channel, key=group.key, timeout_seconds=timeout_seconds)
    answer = exchange.run("test", payload, compute=lambda payloads: b"|".join(payloads))
    return answer.split(b"|")


def joined(group: Any = None, rank: int = 0) -> list[bytes]:
    return exchanged(ADAPTER.process_group(group), str(rank).encode())


def channel_of(group: ProcessGroup) -> KeyValueChannel:
    assert group.channel is not None
    return group.channel


# -- the channel itself --------------------------------------------------------------------------------------------


def stores(tmp_path: Path) -> dict[str, Callable[[], Any]]:
    return {
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "file": lambda: FileStore(str(tmp_path / "store"), 1),
        "hash": HashStore,
    }


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
@pytest.mark.parametrize("nbytes", [0, 1, (4 << 20) - 1, 4 << 20, (9 << 20) + 5])
def test_messages_of_any_size_arrive_whole_and_are_gone_after_delete(kind: str, nbytes: int, tmp_path: Path) -> None:
    store = stores(tmp_path)[kind]()
    first, other = (StoreChannel(store, "p", rank=rank, world_size=2) for rank in (0, 1))
    payload = (b"0123456789abcdef" * (nbytes // 16 + 1))[:nbytes]
    assert other.wait("a.1", 0) is None
    first.put("a.1", payload)
    assert other.wait("a.1", 5) == payload
    first.delete("a.1")
    assert first.wait("a.1", 0.01) is None
    other.put("b", payload)
    other.delete("b")
    other.delete("b")
    assert other.wait("b", 0) is None
    if kind == "tcp":
        assert not [key for key in store.list_keys() if key.startswith("p/") and "part" in key]


def test_looking_for_a_message_in_vain_leaves_nothing_in_the_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, other = (StoreChannel(store, "p", rank=rank, world_size=2) for rank in (0, 1))
    before = sorted(store.list_keys())
    assert first.wait("a", 0.05) is None
    assert other.wait("a", 0) is None
    assert sorted(store.list_keys()) == before
    other.put("a", b"?")  # what is looked for stands in no message's way
    assert first.wait("a", 0) == b"?"
    assert first.wait("a", 0) == b"?"


def test_messages_that_were_read_before_others_are_removed_whole() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channels = [StoreChannel(store, "p", rank=rank, world_size=4) for rank in range(4)]
    large = bytes((4 << 20) + 1)
    for rank in range(1, 4):
        channels[rank].put(f"{rank}", large)
    assert all(channels[0].wait(f"{rank}", 5) == large for rank in range(1, 4))
    for rank in range(1, 4):
        channels[0].delete(f"{rank}")
    assert not [key for key in store.list_keys() if key.startswith("p/")]


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_a_wait_ends_when_the_message_comes_or_the_time_is_up(kind: str, tmp_path: Path) -> None:
    store = stores(tmp_path)[kind]()
    for world_size in (2, 4000):  # looking again and again; left to the store
        channels = [StoreChannel(store, f"p{world_size}", rank=rank, world_size=world_size) for rank in (0, 1)]
        started = time.monotonic()
        assert channels[1].wait("x", 0.3) is None
        assert 0.25 <= time.monotonic() - started < 10
        timer = threading.Timer(0.2, channels[0].put, ("x", b"late"))
        timer.start()
        assert channels[1].wait("x", 60) == b"late"
        timer.join()
        assert time.monotonic() - started < 40


def test_a_wait_in_one_thread_holds_up_no_other() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel = StoreChannel(store, "p", rank=1, world_size=4000)
    waiting = threading.Thread(target=channel.wait, args=("never", 60.0))
    waiting.start()
    time.sleep(0.1)
    started = time.monotonic()
    channel.put("b", b"x")
    store.set("trainer", "x")
    assert channel.wait("b", 20) == b"x"
    assert time.monotonic() - started < 20
    channel.put("never", b"")
    waiting.join()


def test_the_first_rank_drains_what_others_have_not_read() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, other = (StoreChannel(store, "p", rank=rank, world_size=2) for rank in (0, 1))
    first.put("answers", b"x")
    started = time.monotonic()
    first.drain(0.2)
    assert 0.15 < time.monotonic() - started < 20
    timer = threading.Timer(0.2, other.wait, ("answers", 20.0))
    timer.start()
    started = time.monotonic()
    first.drain(60)
    assert time.monotonic() - started < 30
    timer.join()
    other.drain(10)


class LateReader:
    """A channel whose messages are read half a second late."""

    def __init__(self, channel: KeyValueChannel) -> None:
        self.channel = channel
        self.put = channel.put
        self.delete = channel.delete

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        time.sleep(0.5)
        return self.channel.wait(name, timeout_seconds)


def check_leaving_host(rank: TorchRank, port: int, is_destroyed: bool) -> bytes:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    dist.barrier()
    group = ADAPTER.process_group()
    channel = channel_of(group) if rank.rank == 0 else LateReader(channel_of(group))
    exchange = Exchange(rank.rank, rank.world_size, channel, key=group.key, timeout_seconds=20)
    answer = exchange.run("test", compute=lambda payloads: b"answer")
    if is_destroyed:
        dist.destroy_process_group()
    return answer


@pytest.mark.parametrize("is_destroyed", [True, False])
def test_the_host_of_the_store_leaves_only_when_its_last_answer_is_read(is_destroyed: bool) -> None:
    answers = run_gloo(check_leaving_host, 3, free_port(), is_destroyed, init=False)
    assert answers == [b"answer"] * 3


# -- groups --------------------------------------------------------------------------------------------------------


def test_a_process_without_a_job_is_a_group_of_one() -> None:
    if dist.is_initialized():
        pytest.skip("under torchrun there is a job")
    assert ADAPTER.process_group() == ProcessGroup()
    with pytest.raises(ArgumentError, match="not initialized"):
        ADAPTER.process_group(object())


def check_world(rank: TorchRank) -> tuple[int, int, int, str]:
    found = ADAPTER.process_group()
    assert found is ADAPTER.process_group(dist.group.WORLD)
    assert found is ADAPTER.process_group(init_device_mesh("cpu", (rank.world_size,)))
    for _ in range(5):
        assert joined(rank=rank.rank) == [str(other).encode() for other in range(rank.world_size)]
    with pytest.raises(ArgumentError, match="must be a torch process group"):
        ADAPTER.process_group(5)
    return found.rank, found.world_size, found.global_rank, found.key


def test_the_ranks_of_a_job_agree_on_the_name_of_their_group() -> None:
    found = run_gloo(check_world, 4)
    assert [entry[:3] for entry in found] == [(rank, 4, rank) for rank in range(4)]
    assert len({key for *_, key in found}) == 1


def check_subgroups(rank: TorchRank) -> tuple[str, str]:
    low, high = dist.new_group([0, 1]), dist.new_group([3, 2])
    mine, theirs = (low, high) if rank.rank < 2 else (high, low)
    with pytest.raises(ArgumentError, match="no member"):
        ADAPTER.process_group(theirs)
    found = ADAPTER.process_group(mine)
    assert found.rank == rank.rank % 2
    assert found.global_rank == rank.rank
    assert joined(mine, rank.rank) == [str(other).encode() for other in sorted(dist.get_process_group_ranks(mine))]
    assert len(joined(rank=rank.rank)) == 4
    alone = [dist.new_group([other]) for other in range(4)][rank.rank]
    assert ADAPTER.process_group(alone) == ProcessGroup(global_rank=rank.rank)
    dist.destroy_process_group(mine)
    with pytest.raises(ArgumentError, match="destroyed"):
        ADAPTER.process_group(mine)
    again = dist.new_group([0, 1] if rank.rank < 2 else [2, 3], use_local_synchronization=True)
    assert len(joined(again, rank.rank)) == 2
    return found.key, ADAPTER.process_group().key


def test_subgroups_talk_among_themselves() -> None:
    keys = run_gloo(check_subgroups, 4)
    assert keys[0] == keys[1]
    assert keys[2] == keys[3]
    assert len({key for of_rank in keys for key in of_rank}) == 3


def check_reinit(rank: TorchRank, kind: str, addresses: list[str]) -> list[str]:
    keys = []
    for life, address in enumerate(addresses):
        arguments: dict[str, Any] = {"rank": rank.rank, "world_size": rank.world_size}
        if kind == "file":
            arguments["init_method"] = f"file://{address}"
        elif kind == "tcp":
            arguments["init_method"] = f"tcp://127.0.0.1:{address}"
        else:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=address)
        dist.init_process_group("gloo", timeout=timedelta(seconds=30), **arguments)
        keys.append(ADAPTER.process_group().key)
        for _ in range(1 + life):
            assert len(joined(rank=rank.rank)) == rank.world_size
        # The first rank hosts the store and leaves at once; the others still get their answers.
        dist.destroy_process_group()
        assert ADAPTER.process_group() == ProcessGroup()
    return keys


@pytest.mark.parametrize("kind", ["file", "tcp", "env"])
def test_a_job_that_is_made_again_has_a_channel_of_its_own(kind: str, tmp_path: Path) -> None:
    addresses = [str(tmp_path / f"life{life}") if kind == "file" else str(free_port()) for life in range(3)]
    keys = run_gloo(check_reinit, 3, kind, addresses, init=False)
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys[0])) == 3


def check_stale_store(rank: TorchRank, port: int) -> list[str]:
    store = TCPStore("127.0.0.1", port, is_master=False)
    keys = []
    for life in range(3):
        backend_store = PrefixStore(f"life{life}", store) if life == 2 else store
        dist.init_process_group("fake" if life < 2 else "gloo", store=backend_store, rank=rank.rank, world_size=2)
        keys.append(ADAPTER.process_group().key)
        assert len(joined(rank=rank.rank)) == 2
        assert len(joined(rank=rank.rank)) == 2
        dist.destroy_process_group()
    return keys


def test_a_store_that_outlives_the_job_never_mixes_up_its_messages() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keys = run_gloo(check_stale_store, 2, server.port, init=False)
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 3


def check_hccl(rank: TorchRank) -> str:
    assert dist.get_backend() == "hccl"
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2
    assert len(joined(rank=rank.rank)) == 2
    assert len(joined(dist.new_group([0, 1], backend="hccl"), rank.rank)) == 2
    return ADAPTER.process_group().key


def test_an_hccl_job_is_served_like_any_other() -> None:
    keys = run_gloo(check_hccl, 2, backend="hccl")
    assert keys[0] == keys[1]


class ThinStore(Store):
    """A store of the user's own that has just what gloo needs."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> Any:
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        return int(self.inner.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self.inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=30)) -> None:
        self.inner.wait(keys, timeout)


def check_thin_store(rank: TorchRank, path: str) -> str:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    store = ThinStore(FileStore(path, 3))
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=3)
    assert len(joined(rank=rank.rank)) == 3
    return ADAPTER.process_group().key


def test_a_job_whose_store_lacks_what_is_needed_gets_one_of_its_own(tmp_path: Path) -> None:
    keys = run_gloo(check_thin_store, 3, str(tmp_path / "store"), init=False)
    assert len(set(keys)) == 1


def check_missing(rank: TorchRank) -> str:
    if rank.rank == 1:
        return ""
    with pytest.raises(CoordinationTimeoutError) as caught:
        exchanged(ADAPTER.process_group(), b"", timeout_seconds=0.5)
    return str(caught.value)


def test_a_rank_that_never_comes_is_named() -> None:
    found = run_gloo(check_missing, 3)
    assert "rank 1" in found[0]
    assert "rank 1" in found[2]


def check_threads(rank: TorchRank) -> bool:
    """A wait on the channel leaves the trainer's collectives alone."""
    channel = channel_of(ADAPTER.process_group())
    found: list[bytes | None] = []
    waiting = threading.Thread(target=lambda: found.append(channel.wait("signal", 20)))
    waiting.start()
    for _ in range(20):
        dist.barrier()
        dist.new_group(list(range(rank.world_size)))
    if rank.rank == 0:
        channel.put("signal", b"x")
    waiting.join()
    return found == [b"x"]


def test_a_background_thread_waits_beside_the_collectives_of_the_trainer() -> None:
    assert run_gloo(check_threads, 2) == [True, True]


# -- whole programs ------------------------------------------------------------------------------------------------

_PROGRAM = """
import os
import torch.distributed as dist
from dcp_core.coordination.exchange import Exchange
from dcp_torch.adapter import TorchAdapter

dist.init_process_group("gloo")
for number in range(3):
    group = TorchAdapter().process_group()
    exchange = Exchange(group.rank, group.world_size, group.channel, key=group.key, timeout_seconds=30)
    answer = exchange.run("test", str(group.rank).encode(), compute=b",".join)
    assert answer == b"0,1,2", answer
open(os.path.join({directory!r}, f"done{{group.rank}}"), "w").close()
"""


def run_program(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(processes: list[subprocess.Popen[str]]) -> list[str]:
    texts = []
    for process in processes:
        try:
            texts.append(process.communicate(timeout=90)[0])
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            texts.append(process.communicate()[0])
    return texts


@pytest.mark.slow
def test_programs_that_end_right_after_an_exchange_all_get_their_answers(tmp_path: Path) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pytest.skip("starts a job of its own")
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(_PROGRAM.format(directory=str(tmp_path))))
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3", "PYTHONPATH": os.getcwd()}
    processes = [run_program([sys.executable, str(script)], {**common, "RANK": str(rank)}) for rank in range(3)]
    texts = end(processes)
    assert [process.returncode for process in processes] == [0, 0, 0], texts
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1", "done2"}


@pytest.mark.slow
@pytest.mark.torchrun
def test_it_works_under_torchrun(tmp_path: Path) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pytest.skip("starts a job of its own")
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(_PROGRAM.format(directory=str(tmp_path))))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=3", f"--master_port={free_port()}"]
    process = run_program([*launcher, str(script)], {"PYTHONPATH": os.getcwd()})
    (text,) = end([process])
    assert process.returncode == 0, text
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1", "done2"}
