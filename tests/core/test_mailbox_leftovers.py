"""What crashed saves left of their mailboxes: ignored, and removed when nobody may need it any more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dcp_core.background.joining import Meeting, join_without_channel
from dcp_core.background.mailbox import Mailbox
from dcp_core.coordination import directory as directory_module
from dcp_core.coordination.exchange import Exchange
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.storage.base import storage_error
from dcp_core.storage.commit import begin, heartbeat
from dcp_core.storage.intent import HEARTBEAT_EXPIRY_SECONDS, Opening, intent_name, post_intent
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.core.virtual_clock import VirtualClock

pytestmark = pytest.mark.timeout(60)

OLD, NEW, LIVE = "a" * 32, "b" * 32, "c" * 32
JOIN = ".mailbox-join"


def no_files(content: bytes) -> Sequence[str]:
    return ()


def names_in(path: Path) -> set[str]:
    return set(os.listdir(path))


def make_mailbox(path: Path, save_id: str, *, age_seconds: float = 0.0) -> Path:
    folder = FileSystemWriter(path).open_mailbox(save_id)
    assert folder is not None
    folder.prepare()
    folder.put(f"{save_id}.0.7", b"of rank 7")
    place = path / f".mailbox-{save_id}"
    then = time.time() - age_seconds
    os.utime(place, (then, then))
    return place


def sweep_by(path: Path, save_id: str = NEW, rank: int | None = None) -> Opening:
    """What a save does at its beginning."""
    return begin(LocalStorage(path), save_id, rank=rank, files_of=no_files)


def kill_job(context: RankContext, directory: str) -> None:
    """A job that is killed while it agrees: the coordinator waits, the others have posted, one has not come."""
    writer = FileSystemWriter(directory)
    if context.rank == 0:
        writer.begin_checkpoint(OLD, None)
    folder = writer.open_mailbox(OLD)
    assert folder is not None
    box = Mailbox(folder, context.rank, context.world_size, key=OLD, is_committed=lambda: False)
    if context.rank == 0:
        box.open()
    if context.rank < context.world_size - 1:
        box.put(f"{OLD}.0.{context.rank}", b"a message of the crashed attempt")
    while len(folder.names() or ()) < context.world_size - 1:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def whole_save(context: RankContext, directory: str, save_id: str) -> bytes:
    """A later attempt, of another size."""
    writer = FileSystemWriter(directory)
    folder = writer.open_mailbox(save_id)
    assert folder is not None
    committed = os.path.join(directory, "committed")
    box = Mailbox(
        folder, context.rank, context.world_size, key=save_id, is_committed=lambda: os.path.exists(committed)
    )  # fmt: skip
    if context.rank == 0:
        writer.begin_checkpoint(save_id, None)
        box.open()

    def commit(payloads: Sequence[bytes]) -> bytes:
        with open(committed, "wb"):
            return b""

    exchange = Exchange(context.rank, context.world_size, box, key=save_id, timeout_seconds=30)
    answer = exchange.run("plan", b"%d" % context.rank, compute=b"|".join)
    exchange.run("commit", commit=True, compute=commit)
    box.close(committed=True)
    if context.rank == 0:
        writer.abort_checkpoint()  # only the intent record goes: it has no files
    return answer


@pytest.mark.parametrize("world_size", [1, 2, 6])
def test_a_job_of_another_size_saves_where_one_was_killed(tmp_path: Path, world_size: int) -> None:
    outcomes = run_ranks(kill_job, 4, str(tmp_path), timeout_seconds=30, return_exceptions=True)
    assert all(isinstance(outcome, RankProcessError) and "SIGKILL" in str(outcome) for outcome in outcomes)
    assert names_in(tmp_path) == {intent_name(OLD, None), f".mailbox-{OLD}"}
    assert len(names_in(tmp_path / f".mailbox-{OLD}")) == 3
    answers = run_ranks(whole_save, world_size, str(tmp_path), NEW, timeout_seconds=40)
    assert answers == [b"|".join(b"%d" % rank for rank in range(world_size))] * world_size
    assert names_in(tmp_path) == {"committed"}


def test_the_mailbox_of_a_dead_save_goes_at_once(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    post_intent(storage, OLD, None)
    make_mailbox(tmp_path, OLD)
    record = tmp_path / intent_name(OLD, None)
    then = time.time() - HEARTBEAT_EXPIRY_SECONDS - 5
    os.utime(record, (then, then))
    opening = sweep_by(tmp_path)
    assert names_in(tmp_path) == {opening.intent_name}


def test_the_mailbox_of_a_live_save_stays_however_old_it_is(tmp_path: Path) -> None:
    post_intent(LocalStorage(tmp_path), LIVE, None)
    place = make_mailbox(tmp_path, LIVE, age_seconds=10 * HEARTBEAT_EXPIRY_SECONDS)
    sweep_by(tmp_path)
    assert names_in(place) == {f"{LIVE}.0.7"}


def test_a_mailbox_without_a_record_goes_by_its_age(tmp_path: Path) -> None:
    """It may be that of a save whose ranks had to meet before it could begin."""
    fresh = make_mailbox(tmp_path, LIVE, age_seconds=HEARTBEAT_EXPIRY_SECONDS - 60)
    make_mailbox(tmp_path, OLD, age_seconds=HEARTBEAT_EXPIRY_SECONDS + 60)
    opening = sweep_by(tmp_path)
    assert names_in(tmp_path) == {opening.intent_name, fresh.name}


def test_a_rank_that_waits_keeps_its_mailbox_young(tmp_path: Path, monkeypatch: Any) -> None:
    place = make_mailbox(tmp_path, LIVE, age_seconds=HEARTBEAT_EXPIRY_SECONDS + 60)
    VirtualClock().rule(monkeypatch, directory_module)
    folder = FileSystemWriter(tmp_path).open_mailbox(LIVE)
    assert folder is not None
    assert folder.wait("never", 20) is None
    sweep_by(tmp_path)
    assert place.is_dir()


def test_our_own_mailbox_stays(tmp_path: Path) -> None:
    place = make_mailbox(tmp_path, NEW, age_seconds=HEARTBEAT_EXPIRY_SECONDS + 60)
    sweep_by(tmp_path)
    assert place.is_dir()


@pytest.mark.parametrize("age_seconds", [0.0, HEARTBEAT_EXPIRY_SECONDS - 60, HEARTBEAT_EXPIRY_SECONDS + 60])
def test_the_place_where_ranks_meet_goes_by_its_age(tmp_path: Path, age_seconds: float) -> None:
    place = make_mailbox(tmp_path, "join", age_seconds=age_seconds)
    sweep_by(tmp_path)
    assert place.exists() == (age_seconds < HEARTBEAT_EXPIRY_SECONDS)


def test_a_save_of_one_rank_removes_old_mailboxes_but_takes_no_proof_from_records_of_ranks(tmp_path: Path) -> None:
    make_mailbox(tmp_path, OLD, age_seconds=HEARTBEAT_EXPIRY_SECONDS + 60)
    fresh = make_mailbox(tmp_path, LIVE)
    post_intent(LocalStorage(tmp_path), LIVE, 3)  # of one rank alone, so the mailbox of this id is not its own
    then = time.time() - HEARTBEAT_EXPIRY_SECONDS - 5
    os.utime(tmp_path / intent_name(LIVE, 3), (then, then))
    opening = sweep_by(tmp_path, rank=3)
    assert names_in(tmp_path) == {opening.intent_name, fresh.name}


def test_links_are_not_followed_and_other_names_are_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "a").write_bytes(b"x")
    directory = tmp_path / "checkpoint"
    place = make_mailbox(directory, OLD, age_seconds=0)
    (place / "inner").symlink_to(kept)
    (directory / JOIN).symlink_to(kept)
    then = time.time() - HEARTBEAT_EXPIRY_SECONDS - 60
    os.utime(place, (then, then))
    os.utime(directory / JOIN, (then, then), follow_symlinks=False)
    strangers = [".mailbox-joined", ".mailbox-", ".mailbox-" + "g" * 32, ".mailbox-" + "0" * 31, "x.mailbox-join"]
    for name in strangers:
        (directory / name).mkdir()
        os.utime(directory / name, (then, then))
    opening = sweep_by(directory)
    assert names_in(directory) == {opening.intent_name, *strangers}
    assert names_in(kept) == {"a"}


class _Refusing(LocalStorage):
    """A storage that does not remove one directory."""

    def remove_directory(self, name: str) -> None:
        if name == f".mailbox-{OLD}":
            raise storage_error("remove", name, self.describe(), PermissionError(13, "no"))
        super().remove_directory(name)


def test_a_mailbox_that_cannot_be_removed_does_not_keep_the_others(tmp_path: Path, caplog: Any) -> None:
    stays = make_mailbox(tmp_path, OLD, age_seconds=HEARTBEAT_EXPIRY_SECONDS + 60)
    make_mailbox(tmp_path, LIVE, age_seconds=HEARTBEAT_EXPIRY_SECONDS + 60)
    with caplog.at_level("WARNING", logger="dcp"):
        opening = begin(_Refusing(tmp_path), NEW, rank=None, files_of=no_files)
    assert names_in(tmp_path) == {opening.intent_name, stays.name}
    assert f".mailbox-{OLD}" in caplog.text


def kill_joining(context: RankContext, directory: str) -> None:
    """A job that is killed while its ranks look for each other."""
    writer = FileSystemWriter(directory)
    meeting = Meeting(context.rank, context.world_size, "job", 0)
    folder = writer.open_mailbox("join")
    assert folder is not None

    def check() -> None:
        names = folder.names() or ()
        if sum(name.startswith("hello") for name in names) == context.world_size - 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    arguments: Any = {"is_committed": lambda save_id: False, "timeout_seconds": 20, "check": check}
    if context.rank == 0:
        folder.prepare()
        while True:
            check()
            time.sleep(0.01)
    join_without_channel(writer.open_mailbox, meeting, **arguments)


def join_and_agree(context: RankContext, directory: str) -> bytes:
    """A later attempt, of another size."""
    writer = FileSystemWriter(directory)
    meeting = Meeting(context.rank, context.world_size, "job", 0)
    committed = os.path.join(directory, "committed")
    box = join_without_channel(
        writer.open_mailbox, meeting, is_committed=lambda save_id: os.path.exists(committed), timeout_seconds=30
    )  # fmt: skip

    def commit(payloads: Sequence[bytes]) -> bytes:
        with open(committed, "wb"):
            return b"|".join(payloads)

    exchange = Exchange(context.rank, context.world_size, box, key=box.key, timeout_seconds=30)
    answer = exchange.run("agree", b"%d" % context.rank, compute=b"|".join)
    exchange.run("commit", commit=True, compute=commit)
    box.close(committed=True)
    return answer


@pytest.mark.parametrize("world_size", [2, 5])
def test_ranks_find_each_other_where_others_were_killed_looking(tmp_path: Path, world_size: int) -> None:
    outcomes = run_ranks(kill_joining, 4, str(tmp_path), timeout_seconds=30, return_exceptions=True)
    assert all(isinstance(outcome, RankProcessError) and "SIGKILL" in str(outcome) for outcome in outcomes)
    assert len(names_in(tmp_path / JOIN)) == 3
    answers = run_ranks(join_and_agree, world_size, str(tmp_path), timeout_seconds=40)
    assert answers == [b"|".join(b"%d" % rank for rank in range(world_size))] * world_size
    assert names_in(tmp_path) == {"committed"}


def test_a_live_save_that_beats_keeps_its_mailbox(tmp_path: Path) -> None:
    """Also where the sweeper comes at a bad moment: the record was last touched long ago, by our clock only."""
    storage = LocalStorage(tmp_path)
    opening = sweep_by(tmp_path, LIVE)
    place = make_mailbox(tmp_path, LIVE, age_seconds=HEARTBEAT_EXPIRY_SECONDS + 60)
    then = time.time() - HEARTBEAT_EXPIRY_SECONDS - 5
    os.utime(tmp_path / opening.intent_name, (then, then))
    with heartbeat(storage, opening, interval_seconds=0.02):
        deadline = time.monotonic() + 20
        while os.stat(tmp_path / opening.intent_name).st_mtime <= then + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        sweep_by(tmp_path)
    assert place.is_dir()
