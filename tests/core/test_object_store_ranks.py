"""Jobs of numpy ranks with checkpoints in a real S3 server: other layouts, background saves, ranks that die."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.errors import CoordinationTimeoutError, StorageError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.storage.fsspec_client import FsspecClient
from dcp_core.storage.fsspec_storage import FsspecStorage
from dcp_core.storage.retries import Retries
from dcp_core.testing import ranks
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.background_processes import children_of, wait_until
from tests.core.async_jobs import MODES, async_outcome, async_save
from tests.core.fault_jobs import SOON_SECONDS, Outcome, Seat, loaded_tag, outcome_of, state_of
from tests.core.object_store import BUCKET, SECRET, ObjectStore

ranks.preload("s3fs", "aiobotocore.session")  # takes a second in every process otherwise
pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]


@pytest.fixture
def url(object_store: ObjectStore, request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/ranks/{request.node.name}/step 1"


def tag_at(seat: Seat, url: str, dim: int = 0) -> int:
    """Load on all ranks of the job, and say which save it was."""
    return loaded_tag(seat, url, dim, own=dim == 0)


def _save(context: RankContext, url: str, *tags: int) -> None:
    seat = Seat.of(context)
    for tag in tags:
        seat.save(state_of(seat.rank, seat.world, tag), checkpoint_id=url)
        assert tag_at(seat, url) == tag
        seat.share()


def _load_across(context: RankContext, url: str) -> int:
    return tag_at(Seat.of(context), url, 1)


def test_ranks_save_over_a_checkpoint_and_others_load_it_in_another_layout(object_store: ObjectStore, url: str) -> None:
    run_ranks(_save, 3, url, 1, 2)
    names = FsspecStorage(url).list()
    assert [name.partition(".")[0] for name in names] == ["", *(f"_rank{rank}_" for rank in (0, 0, 1, 1, 2, 2))]
    assert len({name.split(".")[1] for name in names[1:]}) == 1
    assert {request.method for request in object_store.traffic.requests} <= {"PUT", "GET", "HEAD", "DELETE"}
    assert run_ranks(_load_across, 2, url) == [2, 2]


_BIG = np.random.default_rng(5).integers(0, 1 << 60, (256, 1024))


def _save_big(context: RankContext, url: str) -> None:
    own = ShardedArray.cut(_BIG, even_boxes(_BIG.shape, context.world_size, context.rank))
    api.save({"big": own}, checkpoint_id=url, adapter=NumpyRankAdapter(), timeout_seconds=30)


def _load_big(context: RankContext, url: str, broadcast: bool) -> bool:
    target = {"big": np.zeros_like(_BIG)}
    api.load(
        target, checkpoint_id=url, adapter=NumpyRankAdapter(), timeout_seconds=30,
        broadcast_replicated_tensors=broadcast,
    )  # fmt: skip
    return bool((target["big"] == _BIG).all())


def test_what_all_ranks_want_is_read_once_and_broadcast(object_store: ObjectStore, url: str) -> None:
    run_ranks(_save_big, 2, url)
    read = {}
    for broadcast in (True, False):
        object_store.traffic.clear()
        assert run_ranks(_load_big, 2, url, broadcast) == [True, True]
        ranges = [request.range[6:].split("-") for request in object_store.traffic.of(r"^GET .*\.safetensors")]
        read[broadcast] = sum(int(last) + 1 - int(first) for first, last in ranges)
    assert _BIG.nbytes < read[True] < 1.05 * _BIG.nbytes
    assert 2 * _BIG.nbytes < read[False] < 2.05 * _BIG.nbytes


# -- faults -----------------------------------------------------------------------------------------------------------


def test_ranks_go_on_through_faults(object_store: ObjectStore, url: str) -> None:
    for fault, pattern in (("500", "^PUT"), ("reset", "^GET"), ("503", "^HEAD"), ("lost", "^PUT"), ("reset", "^PUT")):
        object_store.traffic.fail(fault, pattern, times=3)
    run_ranks(_save, 2, url, 1)


def _save_outcome(context: RankContext, url: str, tag: int) -> Outcome:
    seat = Seat.of(context)
    return outcome_of(seat.save, state_of(seat.rank, seat.world, tag), checkpoint_id=url)


def test_a_refusal_on_one_rank_is_the_same_error_on_all(object_store: ObjectStore, url: str) -> None:
    run_ranks(_save, 2, url, 1)
    before = FsspecStorage(url).list()
    object_store.traffic.fail("403", r"^PUT .*_rank1_.*safetensors")
    ends = run_ranks(_save_outcome, 2, url, 2)
    assert {(end.kind, end.blamed) for end in ends} == {("StorageError", (1,))}
    assert ends[0].message == ends[1].message and "PermissionError" in ends[0].message
    assert max(end.seconds for end in ends) < SOON_SECONDS
    assert FsspecStorage(url).list() == before
    assert run_ranks(_load_across, 2, url) == [1, 1]


def _die_while_saving(context: RankContext, url: str) -> Outcome:
    """Rank 1 is killed when its data is about to be put."""
    seat = Seat.of(context)
    put = FsspecClient.put

    def deadly(self: FsspecClient, name: str, content: bytes) -> None:
        if seat.rank == 1 and name.endswith(".safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, name, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FsspecClient, "put", deadly)
        return outcome_of(
            seat.save, state_of(seat.rank, seat.world, 2), checkpoint_id=url, timeout_seconds=2.0
        )  # fmt: skip


def test_a_rank_that_is_killed_in_the_middle_leaves_the_old_checkpoint(url: str) -> None:
    run_ranks(_save, 2, url, 1)
    ends = run_ranks(_die_while_saving, 2, url, return_exceptions=True)
    assert ends[0].kind == "CoordinationTimeoutError" and ends[0].blamed == (1,)
    assert "SIGKILL" in str(ends[1])
    assert run_ranks(_load_across, 2, url) == [1, 1]
    run_ranks(_save, 2, url, 3)
    assert len(FsspecStorage(url).list()) == 5


def _die_between_parts(context: RankContext, url: str) -> None:
    """Rank 1 is killed when a part of its large file has been sent."""
    call_s3 = FsspecClient.call_s3

    def deadly(self: FsspecClient, method: str, *arguments: Any, **options: Any) -> Any:
        answer = call_s3(self, method, *arguments, **options)
        if context.rank == 1 and method == "upload_part":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FsspecClient, "call_s3", deadly)
        own = {f"own{context.rank}": np.zeros(20 << 17)}
        api.save(own, checkpoint_id=url, adapter=NumpyRankAdapter(), timeout_seconds=4.0)


def test_the_parts_that_a_killed_rank_sent_are_removed_by_the_next_save(object_store: ObjectStore, url: str) -> None:
    ends = run_ranks(_die_between_parts, 2, url, return_exceptions=True)
    assert "SIGKILL" in str(ends[1]) and isinstance(ends[0], CoordinationTimeoutError)
    client = FsspecClient(url, {}, Retries())
    assert [name[:7] for name, _ in client.unfinished()] == ["_rank1_"]
    run_ranks(_save, 1, url, 1)
    assert client.unfinished() == []
    assert len(FsspecStorage(url).list()) == 3


# -- in the background ------------------------------------------------------------------------------------------------


def _save_in_the_background(context: RankContext, url: str, mode_name: str) -> list[str]:
    """Save twice; what the background process's command line and log held."""
    seat, mode = Seat.of(context), MODES[mode_name]
    for tag in (4, 5):
        outcome = async_outcome(seat, state_of(seat.rank, seat.world, tag), url, **mode.save)
        assert outcome.kind == "", outcome
        seat.share()
        assert tag_at(seat, url) == tag
        seat.share()
    (child,) = children_of(os.getpid())
    return [Path(f"/proc/{child}/cmdline").read_text(), *(path.read_text() for path in context_logs())]


def context_logs() -> list[Path]:
    return list(Path(os.environ["DCP_BACKGROUND_LOG_DIR"]).iterdir())


@pytest.mark.parametrize("mode", ["mailbox", "no channel"])
def test_background_processes_agree_by_single_puts(
    object_store: ObjectStore, url: str, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DCP_BACKGROUND_LOG_DIR", str(tmp_path))
    may_list = mode == "no channel"
    if not may_list:
        object_store.traffic.fail("403", "list-type", times=100_000)
    shown = run_ranks(_save_in_the_background, 2, url, mode)
    object_store.traffic.rules.clear()
    assert not any(SECRET in text for texts in shown for text in texts)
    names = [name for name in FsspecStorage(url).list() if may_list or not name.startswith(".mailbox-")]
    assert [name.partition(".")[0] for name in names] == ["", "_rank0_", "_rank0_", "_rank1_", "_rank1_"]
    messages = [request for request in object_store.traffic.of(r"^PUT .*\.mailbox-") if request.name != ".open"]
    assert len({request.key for request in messages}) == len(messages) > 0
    assert all(SECRET.encode() not in FsspecStorage(url).read(name) for name in names)


def _lose_a_background_process(context: RankContext, url: str) -> list[Any]:
    """The background process of rank 1 is killed before it writes; then a save that goes well."""
    seat = Seat.of(context)
    async_outcome(seat, state_of(seat.rank, seat.world, 6), url)
    seat.share()
    response = async_save(seat, state_of(seat.rank, seat.world, 7), url)
    if seat.rank == 1:
        (child,) = children_of(os.getpid())
        os.kill(child, signal.SIGKILL)
    ended = outcome_of(response.get_result, 60)
    seat.share()
    tag = tag_at(seat, url)
    seat.share()
    async_outcome(seat, state_of(seat.rank, seat.world, 8), url)
    seat.share()
    return [ended.kind, ended.seconds, tag, tag_at(seat, url)]


def test_a_background_process_that_is_killed_is_known_on_all_ranks(object_store: ObjectStore, url: str) -> None:
    object_store.traffic.fail("slow", r"^PUT .*_rank1_.*safetensors", times=2)
    ends = run_ranks(_lose_a_background_process, 2, url, timeout_seconds=100)
    assert {end[0] for end in ends} == {"RankFailedError"}
    assert max(end[1] for end in ends) < SOON_SECONDS
    assert [end[2:] for end in ends] == [[6, 8]] * 2


# -- options ----------------------------------------------------------------------------------------------------------


def test_options_reach_the_background_process_and_nobody_else(
    object_store: ObjectStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    options = {
        "key": "loopback-key", "secret": SECRET, "endpoint_url": object_store.endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
    }  # fmt: skip
    state: dict[str, Any] = {"weight": np.arange(6.0), "step": 3}
    writer = FileSystemWriter(storage_options=options)
    response = api.async_save(state, checkpoint_id=url, storage_writer=writer)
    (child,) = children_of(os.getpid())
    assert SECRET not in Path(f"/proc/{child}/cmdline").read_text()
    response.get_result(60)
    target: dict[str, Any] = {"weight": np.zeros(6), "step": 0}
    api.load(target, checkpoint_id=url, storage_reader=FileSystemReader(storage_options=options))
    assert target["step"] == 3 and (target["weight"] == state["weight"]).all()
    storage = FsspecStorage(url, options)
    assert all(SECRET.encode() not in storage.read(name) for name in storage.list())


def test_an_error_shows_no_secret(object_store: ObjectStore, url: str) -> None:
    object_store.traffic.fail("403", "^PUT", times=10)
    options = {"key": "loopback-key", "secret": SECRET, "token": "a-token-value"}
    storage = FsspecStorage(url, options)
    with pytest.raises(StorageError) as caught:
        storage.put("a", b"x", temporary="t")
    seen: BaseException | None = caught.value
    while seen is not None:
        assert SECRET not in str(seen) and "a-token-value" not in str(seen)
        seen = seen.__cause__


# -- threads of one process -------------------------------------------------------------------------------------------


def test_threads_share_memory_urls() -> None:
    url = "memory://threads/step"
    failed: list[BaseException] = []

    def save(number: int) -> None:
        try:
            own = {"weight": np.full(1000, float(number)), "step": number}
            api.save(own, checkpoint_id=f"{url}{number}")
            target: dict[str, Any] = {"weight": np.zeros(1000), "step": -1}
            api.load(target, checkpoint_id=f"{url}{number}")
            assert target["step"] == number and (target["weight"] == number).all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    wait_until(lambda: not any(thread.is_alive() for thread in threads), "the end of the threads")
