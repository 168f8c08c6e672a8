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
from dcp_core.manager.latest import latest_checkpoint
from dcp_core.manager.manager import CheckpointManager
from dcp_core.storage import fsspec_uploads
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

# What takes a second in every process otherwise.
ranks.preload("s3fs", "aiobotocore.session", "tests.core.async_jobs", "tests.core.object_store")
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


def _load_across(context: RankContext, url: str, *tags: int) -> int:
    """Load in another layout, and say which save it was; then save some more."""
    found = tag_at(Seat.of(context), url, 1)
    _save(context, url, *tags)
    return found


def save_here(url: str, tag: int) -> None:
    """Save as a job of this process alone."""
    api.save(state_of(0, 1, tag), checkpoint_id=url, adapter=NumpyRankAdapter())


def test_ranks_save_through_faults_over_a_checkpoint_and_others_load_it_in_another_layout(
    object_store: ObjectStore, url: str
) -> None:
    for fault, pattern in (("500", "^PUT"), ("reset", "^GET"), ("503", "^HEAD"), ("lost", "^PUT"), ("reset", "^PUT")):
        object_store.traffic.fail(fault, pattern, times=3)
    run_ranks(_save, 3, url, 1, 2)
    assert not any(rule.times for rule in object_store.traffic.rules)
    names = FsspecStorage(url).list()
    assert [name.partition(".")[0] for name in names] == ["", *(f"_rank{rank}_" for rank in (0, 0, 1, 1, 2, 2))]
    assert len({name.split(".")[1] for name in names[1:]}) == 1
    assert {request.method for request in object_store.traffic.requests} <= {"PUT", "GET", "HEAD", "DELETE"}
    assert run_ranks(_load_across, 2, url) == [2, 2]


_BIG = np.random.default_rng(5).integers(0, 1 << 60, (256, 256))


def _read_big(context: RankContext, url: str) -> list[bool]:
    """Save what is cut into rows, and load all of it on all ranks: read by one of them, then by each."""
    given: dict[str, Any] = {"adapter": NumpyRankAdapter(), "timeout_seconds": 30}
    right = []
    for place, broadcast in (("once", True), ("by each", False)):
        own = ShardedArray.cut(_BIG, even_boxes(_BIG.shape, context.world_size, context.rank))
        api.save({"big": own}, checkpoint_id=f"{url}/{place}", **given)
        target = {"big": np.zeros_like(_BIG)}
        api.load(target, checkpoint_id=f"{url}/{place}", broadcast_replicated_tensors=broadcast, **given)
        right.append(bool((target["big"] == _BIG).all()))
    return right


def test_what_all_ranks_want_is_read_once_and_broadcast(object_store: ObjectStore, url: str) -> None:
    assert run_ranks(_read_big, 2, url) == [[True, True]] * 2
    read = {}
    for place in ("once", "by each"):
        requests = object_store.traffic.of(rf"^GET .*/{place}/.*\.safetensors")
        ranges = [request.range[6:].split("-") for request in requests]
        read[place] = sum(int(last) + 1 - int(first) for first, last in ranges)
    assert _BIG.nbytes < read["once"] < 1.05 * _BIG.nbytes
    assert 2 * _BIG.nbytes < read["by each"] < 2.05 * _BIG.nbytes


# -- faults -----------------------------------------------------------------------------------------------------------


def _save_outcome(context: RankContext, url: str, tag: int) -> tuple[Outcome, int]:
    """How a save ended, and which save is there then."""
    seat = Seat.of(context)
    outcome = outcome_of(seat.save, state_of(seat.rank, seat.world, tag), checkpoint_id=url)
    return outcome, tag_at(seat, url, 1)


def test_a_refusal_on_one_rank_is_the_same_error_on_all(object_store: ObjectStore, url: str) -> None:
    save_here(url, 1)
    before = FsspecStorage(url).list()
    object_store.traffic.fail("403", r"^PUT .*_rank1_.*safetensors")
    ends, tags = zip(*run_ranks(_save_outcome, 2, url, 2), strict=True)
    assert {(end.kind, end.blamed) for end in ends} == {("StorageError", (1,))}
    assert ends[0].message == ends[1].message and "PermissionError" in ends[0].message
    assert max(end.seconds for end in ends) < SOON_SECONDS
    assert FsspecStorage(url).list() == before
    assert tags == (1, 1)


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
            seat.save, state_of(seat.rank, seat.world, 2), checkpoint_id=url, timeout_seconds=15.0
        )  # fmt: skip


def test_a_rank_that_is_killed_in_the_middle_leaves_the_old_checkpoint(url: str) -> None:
    save_here(url, 1)
    ends = run_ranks(_die_while_saving, 2, url, return_exceptions=True)
    assert ends[0].kind == "CoordinationTimeoutError" and ends[0].blamed == (1,)
    assert "SIGKILL" in str(ends[1])
    assert run_ranks(_load_across, 2, url, 3) == [1, 1]
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
        patch.setattr(fsspec_uploads, "PART_BYTES", 1 << 20)
        patch.setattr(fsspec_uploads, "WHOLE_BYTES", 1 << 20)
        own = {f"own{context.rank}": np.zeros(3 * context.rank << 17)}
        api.save(own, checkpoint_id=url, adapter=NumpyRankAdapter(), timeout_seconds=4.0)


def test_the_parts_that_a_killed_rank_sent_are_removed_by_the_next_save(object_store: ObjectStore, url: str) -> None:
    ends = run_ranks(_die_between_parts, 2, url, return_exceptions=True)
    assert "SIGKILL" in str(ends[1]) and isinstance(ends[0], CoordinationTimeoutError)
    client = FsspecClient(url, {}, Retries())
    assert [name[:7] for name, _ in client.unfinished()] == ["_rank1_"]
    save_here(url, 1)
    assert client.unfinished() == []
    assert len(FsspecStorage(url).list()) == 3


# -- in the background ------------------------------------------------------------------------------------------------


def _save_in_the_background(seat: Seat, url: str, mode_name: str) -> None:
    for tag in (4, 5):
        outcome = async_outcome(seat, state_of(seat.rank, seat.world, tag), url, **MODES[mode_name].save)
        assert outcome.kind == "", outcome
        seat.share()
        assert tag_at(seat, url) == tag
        seat.share()


def _lose_a_background_process(seat: Seat, url: str) -> list[Any]:
    """The background process of rank 1 is killed before it writes; then a save that goes well."""
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


def _use_background_processes(context: RankContext, url: str) -> tuple[list[str], list[Any]]:
    """All that needs background processes, which take long to start: what may hold secrets, and how one was lost."""
    seat = Seat.of(context)
    _save_in_the_background(seat, f"{url}/unlisted", "mailbox")
    _save_in_the_background(seat, f"{url}/no channel", "no channel")
    (child,) = children_of(os.getpid())
    shown = [Path(f"/proc/{child}/cmdline").read_text()]
    lost = _lose_a_background_process(seat, f"{url}/killed")
    logs = Path(os.environ["DCP_BACKGROUND_LOG_DIR"]).iterdir()
    return shown + [path.read_text() for path in logs], lost


def test_background_processes_agree_by_single_puts_and_know_of_one_that_is_killed(
    object_store: ObjectStore, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DCP_BACKGROUND_LOG_DIR", str(tmp_path))
    object_store.traffic.fail("403", "list-type.*unlisted", times=100_000)
    object_store.traffic.fail("slow", r"^PUT .*/killed/_rank1_.*safetensors", times=2)
    ends = run_ranks(_use_background_processes, 2, url, timeout_seconds=100)
    assert object_store.traffic.rules[0].times < 100_000
    object_store.traffic.rules.clear()

    assert not any(SECRET in text for texts, _ in ends for text in texts)
    for place, may_list in (("unlisted", False), ("no channel", True)):
        storage = FsspecStorage(f"{url}/{place}")
        names = [name for name in storage.list() if may_list or not name.startswith(".mailbox-")]
        assert [name.partition(".")[0] for name in names] == ["", "_rank0_", "_rank0_", "_rank1_", "_rank1_"]
        assert all(SECRET.encode() not in storage.read(name) for name in names)
        messages = [r for r in object_store.traffic.of(rf"^PUT .*/{place}/\.mailbox-") if r.name != ".open"]
        assert len({request.key for request in messages}) == len(messages) > 0

    lost = [found for _, found in ends]
    assert {found[0] for found in lost} == {"RankFailedError"}
    assert max(found[1] for found in lost) < SOON_SECONDS
    assert [found[2:] for found in lost] == [[6, 8]] * 2


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


def test_a_manager_takes_options_too(
    object_store: ObjectStore, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    options = {
        "key": "loopback-key", "secret": SECRET, "endpoint_url": object_store.endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
    }  # fmt: skip
    caplog.set_level("DEBUG", "dcp")
    target = {"weight": np.zeros(6)}
    with CheckpointManager(url, keep=1, storage_options=options) as manager:
        manager.save(1, {"weight": np.ones(6)})
        manager.async_save(2, {"weight": np.full(6, 2.0)})
        assert manager.resume(target) == 2
    assert (target["weight"] == 2.0).all()
    assert latest_checkpoint(url, storage_options=options) == f"{url}/step_2"
    assert FsspecStorage(url, options).list() == ["latest", "step_2"]
    object_store.traffic.fail("403", "^PUT", times=10)
    with pytest.raises(StorageError, match="answered 403 AccessDenied"):
        manager.save(3, {"weight": np.ones(6)})
    assert SECRET not in caplog.text


def test_a_bucket_that_is_not_there_is_an_error_not_an_empty_directory(object_store: ObjectStore) -> None:
    with pytest.raises(StorageError, match="NoSuchBucket"):
        latest_checkpoint("s3://nobody-made-this/run")
    with pytest.raises(StorageError, match="NoSuchBucket"):
        CheckpointManager("s3://nobody-made-this/run").resume({"a": 1})
    with pytest.raises(StorageError, match="NoSuchBucket"):
        api.load({"a": 1}, checkpoint_id="s3://nobody-made-this/run/step_1")
    with pytest.raises(StorageError, match="NoSuchBucket"):
        api.read("s3://nobody-made-this/run/step_1", "a")


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
