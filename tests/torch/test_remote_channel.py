"""The channel among background processes: bare interpreters that join the store of their trainers' job."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch lists no exports
    FileStore,
    PrefixStore,
    TCPStore,
)

import dcp_torch
from dcp_core.adapter import ProcessGroup
from dcp_core.coordination.exchange import Exchange
from dcp_core.coordination.store_channel import StoreChannel
from dcp_core.errors import CoordinationError, DcpError, InDoubtError
from dcp_torch.adapter import TorchAdapter
from dcp_torch.remote_channel import RemoteChannel, join_store, leave_word
from tests.core.async_writers import Gate, GatedWriter
from tests.torch.gloo_ranks import TorchRank, free_port, run_gloo
from tests.torch.remote_child import Child

ADAPTER = TorchAdapter()
HOST = "127.0.0.1"
LONG = 600.0
"""Seconds that no test waits for."""


def hosted() -> Any:
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def joined(store: Any, rank: int, world_size: int, timeout_seconds: float = 20.0) -> StoreChannel:
    """A rank's channel over a store that its trainer has left word in."""
    spec = leave_word(store, "job", rank, world_size)
    assert spec is not None
    return join_store(**{**spec.arguments, "timeout_seconds": timeout_seconds})  # type: ignore[arg-type]  # by name


def on_ranks(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """Run a function for each rank, in threads of their own; what it returned or raised."""
    found: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            found[rank] = function(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# -- joining -------------------------------------------------------------------------------------------------------


def refusal(host: str, port: int, timeout_seconds: float, **options: Any) -> str:
    """What a rank is told that cannot join."""
    with pytest.raises(CoordinationError) as caught:
        join_store(host, port, "job", options.pop("rank", 1), 2, timeout_seconds, **options)
    assert "use_gloo=False" in str(caught.value)
    assert f"{host}:{port}" in str(caught.value)
    return str(caught.value)


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    started = time.monotonic()
    assert "nobody listens there" in refusal(HOST, free_port(), LONG)
    assert "cannot be joined" in refusal("no-such-host.invalid", 1234, LONG)
    assert "cannot be joined" in refusal(HOST, 1 << 20, LONG)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("is_mute", [True, False])
def test_what_listens_and_is_no_store_is_given_up(is_mute: bool) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        if not is_mute:
            threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
        started = time.monotonic()
        told = refusal(HOST, listener.getsockname()[1], 1.0)
        assert time.monotonic() - started < 60
        assert "has not answered" in told or "is gone" in told
        listener.shutdown(socket.SHUT_RDWR)


def hang_up(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            listener.accept()[0].close()


def test_the_store_of_another_job_is_refused_and_left_as_it_was() -> None:
    store = hosted()
    leave_word(store, "another", 0, 2)
    before = store.list_keys()
    started = time.monotonic()
    for rank in range(2):
        assert "its trainer has left no word: it is another job's" in refusal(HOST, store.port, LONG, rank=rank)
    assert time.monotonic() - started < 60
    assert store.list_keys() == before


def test_where_trainers_have_left_no_word_the_ranks_meet_by_that_of_the_first() -> None:
    store = hosted()
    assert "rank 0 has left no word" in refusal(HOST, store.port, 0.3, is_job_store=False)
    delays = {0: 0.3, 1: 0.0}

    def join(rank: int) -> StoreChannel:
        time.sleep(delays[rank])
        return join_store(HOST, store.port, "job", rank, 2, 60.0, is_job_store=False)

    first, other = on_ranks(2, join)
    first.put("a.0", b"x")
    assert other.wait("a.0", 20) == b"x"


def test_a_spec_names_the_store_of_the_job_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "stale")
    monkeypatch.setenv("MASTER_PORT", "1")
    store = hosted()
    spec = leave_word(PrefixStore("worker", PrefixStore("attempt", store)), "job", 1, 2)
    assert spec is not None
    assert (spec.arguments["host"], spec.arguments["port"], spec.arguments["rank"]) == (HOST, store.port, 1)
    channel = spec.open()
    assert isinstance(channel, RemoteChannel)
    assert (channel.rank, channel.world_size) == (1, 2)
    by_file = FileStore(str(tmp_path / "store"), 2)
    spec = leave_word(by_file, "job", 1, 2)
    assert spec is not None
    assert (spec.arguments["host"], spec.arguments["port"], spec.arguments["is_job_store"]) == ("stale", 1, False)
    monkeypatch.delenv("MASTER_PORT")
    assert leave_word(by_file, "job", 1, 2) is None


def check_lives(rank: TorchRank, port: int) -> list[Any]:
    store = TCPStore(HOST, port, is_master=False)
    prefixes = []
    for _ in range(2):
        dist.init_process_group("fake", store=store, rank=rank.rank, world_size=rank.world_size)
        remote = ADAPTER.process_group().remote
        assert remote is not None
        prefixes.append(remote.arguments["prefix"])
        dist.destroy_process_group()
    return prefixes


def test_a_process_group_that_is_made_again_on_the_same_store_has_a_prefix_of_its_own() -> None:
    server = hosted()
    found = run_gloo(check_lives, 2, server.port, init=False)
    assert found[0] == found[1]
    assert len(set(found[0])) == 2


# -- the board -----------------------------------------------------------------------------------------------------


def run_saves(channel: StoreChannel, first: int, last: int) -> list[str]:
    """Saves of three exchanges, with answers for all, of one's own, in parts, and errors in every fifth."""
    found = []
    for save in range(first, last):
        exchange = Exchange(channel.rank, channel.world_size, channel, key=f"save-{first}-{save}", timeout_seconds=30.0)
        fails = ValueError("full") if save % 5 == 4 and channel.rank == save % channel.world_size else None
        try:
            exchange.run("agree", b"a" * (9 << 20 if save == 3 else 10), error=fails)
            answer = exchange.run("plan", compute=lambda payloads: [b"%d" % rank for rank in range(len(payloads))])
            exchange.run("commit", answer, compute=lambda payloads: b",".join(payloads), commit=True, is_last=True)
            found.append(answer.decode())
        except DcpError as error:
            found.append(str(error))
    return found


def test_fifty_saves_leave_the_store_as_full_as_one() -> None:
    store = hosted()
    channels = on_ranks(3, lambda rank: joined(store, rank, 3))
    counts = []
    for first, last in ((0, 1), (0, 50), (50, 55)):
        found = on_ranks(3, lambda rank: run_saves(channels[rank], first, last))  # noqa: B023  # runs at once
        for rank in range(3):
            good = [text for save, text in enumerate(found[rank], first) if save % 5 != 4]
            assert good == [str(rank)] * len(good)
        failed = [save for save in range(first, last) if save % 5 == 4]
        assert all("ValueError: full" in found[rank][save - first] for rank in range(3) for save in failed)
        counts.append(store.num_keys())
    assert max(counts) <= 8, store.list_keys()
    assert len(channels[0]._posted) <= 4  # nor does the first rank remember all that it has posted


def test_what_a_rank_posted_for_one_save_is_there_until_it_posts_for_another() -> None:
    store = hosted()
    first, other = (joined(store, rank, 2) for rank in range(2))
    before = store.num_keys()
    other.put("save1.0.1", b"nobody reads it")
    other.put("save1.1.1", b"x" * (9 << 20))
    assert first.wait("save1.0.1", 0) == b"nobody reads it"
    first.put("save1.0.answers", b"late")
    assert other.wait("save1.0.answers", 0) == b"late"
    other.put("save2.0.1", b"")
    assert first.wait("save1.0.1", 0) is None
    assert other.wait("save1.0.answers", 0) == b"late"
    first.delete("save2.0.1")
    first.put("save2.0.answers", b"")
    first.delete("save2.0.answers")
    assert store.num_keys() == before


def test_every_rank_drains_until_all_have_read_the_last_answer() -> None:
    store = hosted()
    channels = [joined(store, rank, 3) for rank in range(3)]
    before = store.num_keys()
    channels[0].put("a.0.answers", b"x")
    assert channels[1].wait("a.0.answers", 20) == b"x"
    for rank in range(2):
        started = time.monotonic()
        channels[rank].drain(0.2)
        assert 0.15 < time.monotonic() - started < 20
    seconds = [0.0, 0.0]

    def late(rank: int) -> None:
        if rank == 2:
            time.sleep(0.3)
            assert channels[2].wait("a.0.answers", 20) == b"x"
        elif rank == 1:
            assert channels[1].wait("a.0.answers", 20) == b"x"  # in this thread
        started = time.monotonic()
        channels[rank].drain(60)
        if rank < 2:
            seconds[rank] = time.monotonic() - started

    channels[0].delete("a.0.answers")
    channels[0].put("a.0.answers", b"x")
    assert on_ranks(3, late) == [None] * 3
    assert all(0.2 < waited < 40 for waited in seconds), seconds
    assert store.num_keys() == before
    channels[2].drain(60)  # has read nothing in this thread


# -- a host that goes away -----------------------------------------------------------------------------------------

_HOST_PROGRAM = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("job/word", b"")
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def host_process() -> Iterator[tuple[int, int]]:
    """A process that hosts a store; its pid and the store's port."""
    host = subprocess.Popen(
        [sys.executable, "-c", _HOST_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with host:
        assert host.stdout is not None
        try:
            yield host.pid, int(host.stdout.readline())
        finally:
            host.kill()


def check_host_that_stops(channels: list[StoreChannel], pid: int, sent: signal.Signals, said: str) -> None:
    """The waits of both ranks fail in time, each in its own way, and so does whatever they try then."""
    exchanges = [Exchange(rank, 2, channels[rank], key=f"save-{sent}", timeout_seconds=LONG) for rank in range(2)]
    threading.Timer(0.3, os.kill, (pid, sent)).start()
    started = time.monotonic()

    def run(rank: int) -> None:
        if rank:
            exchanges[1].run("commit", commit=True)
        channels[0].wait("never", LONG)

    first, other = on_ranks(2, run)
    assert time.monotonic() - started < 60
    assert type(first) is CoordinationError and said in str(first) and "use_gloo=False" in str(first)
    assert type(other) is InDoubtError and said in str(other)
    started = time.monotonic()
    with suppress(CoordinationError):
        channels[0].put("a", b"")  # a store does not acknowledge it
    for _ in range(3):
        with pytest.raises(CoordinationError):
            channels[0].wait("a", LONG)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(("sent", "said"), [(signal.SIGKILL, "is gone"), (signal.SIGSTOP, "has not answered for 2 s")])
def test_waits_fail_within_seconds_when_the_host_dies_or_hangs(sent: signal.Signals, said: str) -> None:
    with host_process() as (pid, port):
        channels: list[StoreChannel] = [join_store(HOST, port, "job", rank, 2, 2.0) for rank in range(2)]
        check_host_that_stops(channels, pid, sent, said)


def test_long_waits_of_large_groups_fail_as_well() -> None:
    with host_process() as (pid, port):
        channel = join_store(HOST, port, "job", 1, 4000, 20.0)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(CoordinationError, match="is gone"):
            channel.wait("never", LONG)
        assert time.monotonic() - started < 60


def test_a_host_that_was_paused_serves_the_next_save() -> None:
    with host_process() as (pid, port):
        channels = [join_store(HOST, port, "job", rank, 2, 1.0) for rank in range(2)]
        os.kill(pid, signal.SIGSTOP)
        for channel in channels:
            with pytest.raises(CoordinationError, match="has not answered for 1 s"):
                channel.wait("save1.0.answers", LONG)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(CoordinationError, match="has not answered for 1 s"):
            channels[0].wait("save1.0.1", LONG)
        channels[0].put("save2.0.answers", b"x")
        assert channels[1].wait("save2.0.answers", 20) == b"x"


def test_a_channel_that_is_dropped_ends_its_threads() -> None:
    def stores() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "dcp-store"}

    store = hosted()
    before = stores()
    channel: list[StoreChannel] = [joined(store, 1, 2)]
    assert on_ranks(3, lambda _: channel[0].wait("a", 0)) == [None] * 3
    channel.clear()
    deadline = time.monotonic() + 30
    while stores() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stores() - before


# -- background processes of real jobs -------------------------------------------------------------------------------


def start_job(rank: TorchRank, port: int) -> ProcessGroup:
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return ADAPTER.process_group()


def trainers_go_on(group: ProcessGroup) -> None:
    """What the trainers do meanwhile: collectives and exchanges of their own."""
    for number in range(10):
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert tensor[0].item() == group.world_size
        exchange = Exchange(group.rank, group.world_size, group.channel, key=group.key, timeout_seconds=60)
        assert exchange.run("trainers", compute=lambda payloads: b"%d" % len(payloads)) == b"%d" % group.world_size
        dist.barrier()
        time.sleep(0.001 * number)


def check_children(rank: TorchRank, port: int, directory: str) -> list[Any]:
    group = start_job(rank, port)
    halves = [dist.new_group(list(range(side, rank.world_size, 2))) for side in range(2)]
    half = ADAPTER.process_group(halves[rank.rank % 2])
    child = Child(group.remote, Path(directory) / f"child{rank.rank}")
    opened = child.hear()
    assert opened["bare"] and not opened["group"], opened
    for number in range(20):
        child.tell(do="exchange", save=f"save{number}", payload=str(rank.rank), own=number % 2 == 1)
    trainers_go_on(group)
    everybody = "|".join(map(str, range(rank.world_size)))
    for number in range(20):
        assert child.hear()["answer"] == everybody + (f"for {rank.rank}" if number % 2 else "")
    failing = rank.world_size - 1
    told = child.ask(do="exchange", save="bad", fails="disk full" if rank.rank == failing else "")
    assert told["error"] == "RankFailedError"
    assert told["text"] == f"rank {failing}: ValueError: disk full"
    if half.remote is not None:  # beside the group of all, under names of its own
        child.tell(
            do="open", module=half.remote.module, function=half.remote.function, arguments=dict(half.remote.arguments)
        )
        child.tell(do="exchange", save="save of half", payload=str(rank.rank))
        trainers_go_on(group)
        assert "error" not in child.hear()
        assert child.hear()["answer"] == "|".join(map(str, range(rank.rank % 2, rank.world_size, 2)))
    spec = group.remote
    assert spec is not None
    child.tell(do="open", module=spec.module, function=spec.function, arguments=dict(spec.arguments))
    child.hear()
    prefixes = [None if found is None else found.arguments["prefix"] for found in (spec, half.remote)]
    del half
    halves.clear()
    # The trainer that hosts the store destroys its process group and ends while others have not read the answer yet.
    child.tell(do="exchange", save="last", late=0.0 if rank.rank == 0 else 0.5, commit=True, is_last=True)
    child.tell(do="drain", seconds=30)
    dist.barrier()
    dist.destroy_process_group()
    answer = child.hear()
    child.hear()
    del group
    child.end()
    return [answer.get("answer", answer), *prefixes]


@pytest.mark.parametrize("world_size", [2, 4])
def test_background_processes_talk_while_their_trainers_do(world_size: int, tmp_path: Path) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pytest.skip("starts a job of its own")
    found = run_gloo(check_children, world_size, free_port(), str(tmp_path), init=False, timeout_seconds=90)
    answers, of_all, of_halves = zip(*found, strict=True)
    assert answers == ("|" * (world_size - 1),) * world_size
    assert len(set(of_all)) == 1
    assert len({*of_all, *of_halves}) == 3 if world_size == 4 else set(of_halves) == {None}


def check_deaths(rank: TorchRank, port: int, directory: str) -> None:
    """Rank 2's trainer dies after its background process has its orders, later rank 0's, which hosts the store."""
    group = start_job(rank, port)
    child = Child(group.remote, Path(directory) / f"child{rank.rank}")
    child.hear()
    for save in ("one", "two"):
        child.tell(do="sleep", seconds=0.5)
        child.tell(do="exchange", save=save, payload=str(rank.rank))
    child.tell(do="exchange", save="three" if rank.rank else "of the first only", timeout_seconds=LONG)
    dist.barrier()
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(4):
        child.hear()
    if rank.rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    child.hear()
    child.end()
    os._exit(0)  # without the store there is nothing to leave in order


def records(file: Path, count: int) -> list[Mapping[str, Any]]:
    """What a background process has answered, once it is that much."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [json.loads(line) for line in file.read_text().splitlines()]
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{file.name} has answered {found}")


def test_only_the_death_of_the_host_disturbs_the_others(tmp_path: Path) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pytest.skip("starts a job of its own")
    run_gloo(check_deaths, 3, free_port(), str(tmp_path), init=False, return_exceptions=True, timeout_seconds=90)
    for rank in range(3):
        _, _, one, _, two, three = records(tmp_path / f"child{rank}", 6)
        assert one["answer"] == two["answer"] == "0|1|2"
        assert three["error"] == "CoordinationError"
        assert "is gone" in three["text"]
        assert three["seconds"] < 60


def check_destroyed(rank: TorchRank, port: int, directory: str) -> str:
    """All trainers, the host of the store first of all, have destroyed their process group when files are written."""
    start_job(rank, port)
    gate = Gate(directory)
    if rank.rank == 0:
        gate.close()
    dist.barrier()
    response = dcp_torch.async_save(
        {"t": torch.arange(5.0), "own": {rank.rank: torch.ones(3)}},
        checkpoint_id=directory,
        storage_writer=GatedWriter(),
        use_gloo=True,
        timeout_seconds=60,
    )
    if rank.rank == 0:
        gate.await_writing(*range(rank.world_size))
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # nothing holds the store by chance
    if rank.rank == 0:
        gate.open()
    return type(response.get_result(60)).__name__


def test_a_save_in_flight_outlives_the_process_group_that_began_it(tmp_path: Path) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pytest.skip("starts a job of its own")
    directory = tmp_path / "checkpoint"
    found = run_gloo(check_destroyed, 3, free_port(), str(directory), init=False, timeout_seconds=90)
    assert found == ["Metadata"] * 3
    target = {"t": torch.zeros(5), "own": {2: torch.zeros(3)}}
    dcp_torch.load(target, checkpoint_id=directory)
    assert torch.equal(target["t"], torch.arange(5.0))  # type: ignore[arg-type]  # a tensor


# -- torchrun --------------------------------------------------------------------------------------------------------

_PROGRAM = """
import sys, os
from pathlib import Path
import torch.distributed as dist
from dcp_torch.adapter import TorchAdapter
from tests.torch.remote_child import Child

dist.init_process_group("gloo")
group = TorchAdapter().process_group()
child = Child(group.remote, Path({directory!r}) / f"child{{group.rank}}")
child.hear()
for number in range(3):
    child.tell(do="exchange", save=f"save{{number}}", payload=str(group.rank))
dist.barrier()
assert [child.hear().get("answer") for _ in range(3)] == ["0|1"] * 3
child.end()
(Path({directory!r}) / f"done{{group.rank}}").touch()
"""


@pytest.mark.slow
@pytest.mark.torchrun
def test_background_processes_join_the_store_of_torchrun(tmp_path: Path) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pytest.skip("starts a job of its own")
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(_PROGRAM.format(directory=str(tmp_path))))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *(f"--master-port={free_port()}", str(script)),
        ],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}
