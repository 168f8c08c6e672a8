from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dcp_core.adapter import KeyValueChannel
from dcp_core.background import mailbox as mailbox_module
from dcp_core.background.mailbox import ABSENCE_SECONDS, Mailbox
from dcp_core.coordination import directory as directory_module
from dcp_core.coordination import exchange as exchange_module
from dcp_core.coordination import star as star_module
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.coordination.exchange import Answers, Exchange, forget
from dcp_core.coordination.frames import Frame, FrameKind, decode_frame, encode_frame
from dcp_core.errors import (
    CoordinationError,
    CoordinationTimeoutError,
    DcpError,
    InDoubtError,
    RankFailedError,
    ShapeMismatchError,
    StorageError,
)
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.execution.interfaces import MailboxFolder
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.virtual_clock import VirtualClock

pytestmark = pytest.mark.timeout(60)

ID = "0123456789abcdef" * 2
_keys = itertools.count()

Body = Callable[[int, KeyValueChannel, str], Any]


def folder_in(path: str | os.PathLike[str], save_id: str = ID) -> MailboxFolder:
    folder = FileSystemWriter(path).open_mailbox(save_id)
    assert folder is not None
    return folder


def never() -> bool:
    return False


def always() -> bool:
    return True


def names_in(path: str | os.PathLike[str]) -> set[str]:
    return set(os.listdir(path)) if os.path.exists(path) else set()


class Job:
    """Ranks as threads, each with a mailbox in one directory. The save is committed when rank 0 says so."""

    def __init__(self, path: Path, world_size: int) -> None:
        self.path = path
        self.world_size = world_size
        self.is_committed = False
        self.boxes: dict[int, Mailbox] = {}

    def board(self, rank: int) -> KeyValueChannel:
        return folder_in(self.path)

    def run(self, body: Body) -> list[Any]:
        """What each rank returned or raised; the mailbox is closed after it."""

        def work(rank: int) -> Any:
            box = self.boxes[rank]
            committed = False
            try:
                result = body(rank, box, ID)
                committed = True
                return result
            finally:
                forget(ID, rank)
                self.is_committed |= committed and rank == 0
                box.close(committed=committed)

        for rank in range(self.world_size):
            self.boxes[rank] = Mailbox(
                self.board(rank), rank, self.world_size, key=ID, is_committed=lambda: self.is_committed
            )
        return in_threads(work, range(self.world_size))


def finish_closing() -> None:
    """Wait for the threads that wait for readers."""
    for thread in threading.enumerate():
        if thread.name.startswith("dcp-mailbox"):
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Readers that are late get a second."""
    monkeypatch.setattr(mailbox_module, "_PROMPT_READING_SECONDS", 0.5)
    monkeypatch.setattr(mailbox_module, "_READING_SECONDS", 1.0)
    yield
    finish_closing()


def in_threads(work: Callable[[int], Any], ranks: Sequence[int]) -> list[Any]:
    results: dict[int, Any] = {}

    def catch(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=catch, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive(), "a rank hangs"
    return [results[rank] for rank in ranks]


def shown(outcome: Any) -> Any:
    """What two ways to talk must have in common."""
    if isinstance(outcome, DcpError):
        causes = [(cause.rank, cause.kind, cause.message) for cause in outcome.causes]
        return type(outcome).__name__, outcome.message, causes
    return outcome


# -- the same as any channel ----------------------------------------------------------------------------------------


def joined(payloads: Sequence[bytes]) -> bytes:
    return b"|".join(payloads)


def each_its_own(payloads: Sequence[bytes]) -> list[bytes]:
    return [b"for " + payload for payload in payloads]


def no_space(payloads: Sequence[bytes]) -> Answers:
    raise StorageError("no space left")


def script(fault: str, rank: int, board: KeyValueChannel, key: str, timeout_seconds: float = 30.0) -> list[bytes]:
    """Three exchanges, of which one goes wrong in a way, on the last rank or the first."""
    world_size = int(fault.partition(" ")[0])
    kind = fault.partition(" ")[2]
    exchange = Exchange(rank, world_size, board, key=key, timeout_seconds=timeout_seconds)
    is_last_rank = rank == world_size - 1
    stage, error, compute = "plan", None, each_its_own
    if kind == "error" and is_last_rank:
        error = ShapeMismatchError("w has shapes (2,) and (3,)")
    if kind == "stranger's error" and is_last_rank:
        error = KeyError("momentum")  # type: ignore[assignment]
    if kind == "errors on all":
        error = ValueError(f"bad number {rank % 2}")  # type: ignore[assignment]
    if kind == "another stage" and is_last_rank:
        stage = "load"
    if kind == "computation":
        compute = no_space  # type: ignore[assignment]
    answers = [exchange.run("agree", b"rank %d" % rank, compute=joined)]
    answers.append(exchange.run(stage, b"plan %d" % rank, error=error, compute=compute))
    answers.append(exchange.run("commit", b"", commit=True))
    return answers


FAULTS = ["nothing", "error", "stranger's error", "errors on all", "another stage", "computation"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_exchanges_end_as_over_any_channel(tmp_path: Path, world_size: int, fault: str) -> None:
    case = f"{world_size} {fault}"
    key = f"reference-{next(_keys)}"
    plain = in_threads(
        lambda rank: script(case, rank, DirectoryChannel(tmp_path / "plain"), key), range(world_size)
    )  # fmt: skip
    job = Job(tmp_path / "checkpoint", world_size)
    found = job.run(lambda rank, board, key: script(case, rank, board, key))
    assert [shown(outcome) for outcome in found] == [shown(outcome) for outcome in plain]
    if fault == "nothing":
        assert found[-1][1] == b"for plan %d" % (world_size - 1)
    elif fault != "another stage" or world_size > 1:
        assert all(isinstance(outcome, DcpError) for outcome in found)
    assert names_in(tmp_path / "checkpoint") == set()


def test_a_rank_that_does_not_come_is_named_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "_READING_SECONDS", 50.0)

    def body(rank: int, board: KeyValueChannel, key: str) -> bytes:
        if rank == 1:
            return b""
        return Exchange(rank, 3, board, key=key, timeout_seconds=1).run("agree")

    outcomes = Job(tmp_path, 3).run(body)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, CoordinationTimeoutError)
        assert "rank 1 did not come to exchange agree" in outcome.message
    assert names_in(tmp_path) == {f".mailbox-{ID}"}  # rank 1 may still come to read of it
    for rank in (1, 2):
        folder_in(tmp_path).put(f"{ID}.read.{rank}", b"")
    finish_closing()
    assert names_in(tmp_path) == set()


# -- who dies is heard of -------------------------------------------------------------------------------------------


def test_what_somebody_else_posts_for_a_dead_rank_reaches_all(tmp_path: Path) -> None:
    def body(rank: int, board: KeyValueChannel, key: str) -> bytes:
        exchange = Exchange(rank, 4, board, key=key, timeout_seconds=50)
        exchange.run("agree")
        if rank == 2:
            trainer = Mailbox(folder_in(tmp_path), 2, 4, key=ID, is_committed=never)
            assert trainer.post_abort(2, RankFailedError("the background process 77 was killed by SIGKILL"))
            return b"dead"
        return exchange.run("commit", commit=True)

    started = time.monotonic()
    outcomes = Job(tmp_path, 4).run(body)
    assert time.monotonic() - started < 30
    assert outcomes[2] == b"dead"
    for rank in (0, 1, 3):
        assert type(outcomes[rank]) is RankFailedError
        assert outcomes[rank].message == "rank 2: the background process 77 was killed by SIGKILL"
        assert [cause.rank for cause in outcomes[rank].causes] == [2]
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("commit", [False, True])
def test_the_death_of_the_coordinator_reaches_all_the_others(tmp_path: Path, commit: bool) -> None:
    def body(rank: int, board: KeyValueChannel, key: str) -> bytes:
        if rank == 0:
            time.sleep(0.3)
            trainer = Mailbox(folder_in(tmp_path), 0, 3, key=ID, is_committed=never)
            assert trainer.post_abort(0, StorageError("no space left"))
            trainer.close(committed=False)
            raise ChildProcessError("this is the process that died")
        return Exchange(rank, 3, board, key=key, timeout_seconds=50).run("commit", commit=commit)

    job = Job(tmp_path, 3)
    folder_in(tmp_path).prepare()
    outcomes = job.run(body)
    for rank in (1, 2):
        assert type(outcomes[rank]) is StorageError
        assert outcomes[rank].message == "rank 0: no space left"
    assert names_in(tmp_path) == set()


def test_a_message_that_a_rank_posted_before_it_died_counts(tmp_path: Path) -> None:
    box = Mailbox(folder_in(tmp_path), 0, 2, key=ID, is_committed=never)
    box.open()
    box.post_abort(1, ValueError("dead"))
    box.put("job.0.1", b"alive then")
    assert box.wait("job.0.1", 5) == b"alive then"
    assert decode_frame(box.wait("job.1.1", 5) or b"").kind is FrameKind.ERROR


class _Eventful(DirectoryChannel):
    """A folder in which a rank posts its message and then dies just before it is listed."""

    def names(self, max_age_seconds: float = 0.0) -> frozenset[str] | None:
        self.put("job.0.1", b"alive then")
        Mailbox(DirectoryChannel(self.path), 1, 2, key=ID, is_committed=never).post_abort(1, ValueError("dead"))
        return super().names()  # not one from before


def test_a_message_that_came_after_the_look_for_it_and_before_the_death_counts(tmp_path: Path) -> None:
    box = Mailbox(_Eventful(tmp_path), 0, 2, key=ID, is_committed=never)
    assert box.wait("job.0.1", 5) == b"alive then"


def test_a_coordinator_whose_save_is_committed_is_not_aborted(tmp_path: Path) -> None:
    folder_in(tmp_path).prepare()
    trainer = Mailbox(folder_in(tmp_path), 0, 2, key=ID, is_committed=always)
    assert not trainer.post_abort(0, ValueError("dead"))
    assert names_in(tmp_path / f".mailbox-{ID}") == set()
    other = Mailbox(folder_in(tmp_path), 1, 2, key=ID, is_committed=always)
    Mailbox(folder_in(tmp_path), 0, 2, key=ID, is_committed=never).post_abort(0, ValueError("it could not see it"))
    assert other.wait("job.1.answers", 5) == encode_frame(Frame(FrameKind.SHARED, ""))


def test_an_abort_is_heard_also_where_somebody_has_swept_the_mailbox(tmp_path: Path) -> None:
    trainer = Mailbox(folder_in(tmp_path), 0, 2, key=ID, is_committed=never)
    assert trainer.post_abort(0, ValueError("dead"))
    message = Mailbox(folder_in(tmp_path), 1, 2, key=ID, is_committed=never).wait("job.1.answers", 5)
    assert decode_frame(message or b"").kind is FrameKind.ERROR
    late = Mailbox(folder_in(tmp_path / "other"), 1, 2, key=ID, is_committed=always)
    assert not late.post_abort(1, ValueError("dead, but the save was done"))
    assert not (tmp_path / "other").exists()


class PlainBoard:
    """A channel that is no folder."""

    def __init__(self) -> None:
        self.messages: dict[str, bytes] = {}

    def put(self, name: str, payload: bytes) -> None:
        self.messages[name] = payload

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        deadline = time.monotonic() + timeout_seconds
        while name not in self.messages and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.messages.get(name)

    def delete(self, name: str) -> None:
        self.messages.pop(name, None)


class PlainJob(Job):
    """Ranks that share a channel that is no folder."""

    def __init__(self, path: Path, world_size: int) -> None:
        super().__init__(path, world_size)
        self.plain = PlainBoard()

    def board(self, rank: int) -> KeyValueChannel:
        return self.plain


def test_any_other_channel_carries_a_mailbox_too(tmp_path: Path) -> None:
    job = PlainJob(tmp_path, 3)
    outcomes = job.run(lambda rank, board, key: script("3 nothing", rank, board, key))
    assert outcomes[1][:2] == [b"rank 0|rank 1|rank 2", b"for plan 1"]

    def body(rank: int, board: KeyValueChannel, key: str) -> bytes:
        if rank == 1:
            job.boxes[rank].post_abort(1, ValueError("dead"))
            return b""
        return Exchange(rank, 3, board, key=f"{key}-again", timeout_seconds=40).run("agree")

    outcomes = job.run(body)
    assert [type(outcome) for outcome in outcomes] == [RankFailedError, bytes, RankFailedError]


# -- late names, lost answers: with a clock of our own --------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return VirtualClock().rule(monkeypatch, mailbox_module, directory_module, exchange_module, star_module)


class LateFolder(DirectoryChannel):
    """A folder on a network file system at its worst: a name that was once absent stays so for a while."""

    def __init__(self, path: Path, clock: Any, delay_seconds: float) -> None:
        super().__init__(path, make=False)
        self.clock = clock
        self.delay_seconds = delay_seconds
        self.first_asked: dict[str, float] = {}
        self.stale: set[str] = set()

    def is_hidden(self, name: str) -> bool:
        asked = self.first_asked.setdefault(name, self.clock.monotonic())
        return bool(self.clock.monotonic() - asked < self.delay_seconds)

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        deadline = self.clock.monotonic() + timeout_seconds
        while True:
            if not self.is_hidden(name):
                message = super().wait(name, 0.0)
                if message is not None:
                    if name in self.stale:
                        return message
                    self.stale.add(name)  # once for each name: the handle is stale, so it counts as absent
            left = deadline - self.clock.monotonic()
            if left <= 0:
                return None
            self.clock.sleep(min(0.05, left))

    def names(self, max_age_seconds: float = 0.0) -> frozenset[str] | None:
        if self.is_hidden(""):
            return None
        names = super().names(max_age_seconds)
        return None if names is None else frozenset(name for name in names if not self.is_hidden(name))


def opened(
    path: Path,
    rank: int = 1,
    world_size: int = 2,
    folder: MailboxFolder | None = None,
    is_committed: Callable[[], bool] = never,
    check: Callable[[], None] | None = None,
) -> Mailbox:
    """A rank's mailbox, in a folder that rank 0 has made."""
    folder_in(path).prepare()
    board = folder_in(path) if folder is None else folder
    return Mailbox(board, rank, world_size, key=ID, is_committed=is_committed, check=check)


def answer(number: int = 0, text: bytes = b"the answer") -> tuple[str, bytes]:
    return f"{ID}.{number}.answers", encode_frame(Frame(FrameKind.SHARED, "x", text))


def exchange_of(box: Mailbox, timeout_seconds: float = 1800.0) -> Exchange:
    forget(ID, box.rank)
    return Exchange(box.rank, box.world_size, box, key=ID, timeout_seconds=timeout_seconds)


@pytest.mark.parametrize("delay_seconds", [0.0, 7.0, 40.0])
def test_names_that_are_seen_late_arrive(tmp_path: Path, clock: VirtualClock, delay_seconds: float) -> None:
    folder = LateFolder(tmp_path / f".mailbox-{ID}", clock, delay_seconds)
    box = opened(tmp_path, folder=folder)
    clock.after(3, lambda: folder_in(tmp_path).put(*answer()))
    assert exchange_of(box).run("agree") == b"the answer"
    assert clock.now - 1000 <= max(3, delay_seconds) + 2


def test_a_coordinator_takes_what_comes_late(tmp_path: Path, clock: VirtualClock) -> None:
    folder = LateFolder(tmp_path / f".mailbox-{ID}", clock, 40.0)
    box = opened(tmp_path, 0, 4, folder=folder)
    for rank in (1, 2, 3):
        request = encode_frame(Frame(FrameKind.PAYLOAD, "agree", b"%d" % rank))
        clock.after(rank, partial(folder_in(tmp_path).put, f"{ID}.0.{rank}", request))
    assert exchange_of(box).run("agree", b"0", compute=joined) == b"0|1|2|3"
    assert clock.now - 1000 <= 60


def test_a_failure_that_is_seen_late_is_waited_for(tmp_path: Path, clock: VirtualClock, monkeypatch: Any) -> None:
    """The coordinator keeps a failed save's mailbox until the others, who see names 40 s late, have read of it."""
    monkeypatch.setattr(mailbox_module, "_READING_SECONDS", 75.0)
    box = opened(tmp_path, 0, 2)
    removed: list[float] = []
    monkeypatch.setattr(box, "_remove", lambda folder: removed.append(clock.now - 1000))
    clock.after(42, lambda: folder_in(tmp_path).put(f"{ID}.read.1", b""))
    box._remove_late(folder_in(tmp_path))
    assert 42 <= removed[0] < 43
    del removed[:]
    folder_in(tmp_path).delete(f"{ID}.read.1")
    start = clock.now
    box._remove_late(folder_in(tmp_path))
    assert 75 <= removed[0] - (start - 1000) < 76


def commit_by(box: Mailbox, timeout_seconds: float = 1800.0) -> bytes:
    return exchange_of(box, timeout_seconds).run("commit", b"result", commit=True, in_doubt="may be committed, id 1")


def test_a_commit_answer_may_be_lost_with_the_mailbox(tmp_path: Path, clock: VirtualClock) -> None:
    committed: list[bool] = []
    box = opened(tmp_path, is_committed=lambda: bool(committed))
    clock.after(5, lambda: committed.append(True))
    clock.after(5, folder_in(tmp_path).remove)
    assert commit_by(box) == b""
    assert clock.now - 1000 < 7


def test_a_commit_that_is_seen_later_than_the_mailbox_vanishes_counts(tmp_path: Path, clock: VirtualClock) -> None:
    committed: list[bool] = []
    box = opened(tmp_path, is_committed=lambda: bool(committed))
    clock.after(5, folder_in(tmp_path).remove)
    clock.after(70, lambda: committed.append(True))
    assert commit_by(box) == b""
    assert 70 <= clock.now - 1000 < 73


def test_a_coordinator_that_died_right_after_the_commit_is_not_waited_for(tmp_path: Path, clock: VirtualClock) -> None:
    committed: list[bool] = []
    box = opened(tmp_path, is_committed=lambda: bool(committed))
    clock.after(200, lambda: committed.append(True))
    assert commit_by(box) == b""
    assert 200 <= clock.now - 1000 < 235


def test_the_last_look_at_the_deadline_counts(tmp_path: Path, clock: VirtualClock) -> None:
    committed: list[bool] = []
    box = opened(tmp_path, is_committed=lambda: bool(committed))
    clock.after(9.9, lambda: committed.append(True))
    assert box.wait(f"{ID}.0.answers", 10) == encode_frame(Frame(FrameKind.SHARED, ""))
    assert clock.now - 1000 >= 10


def test_a_vanished_mailbox_without_a_commit_leaves_doubt_at_the_deadline(tmp_path: Path, clock: VirtualClock) -> None:
    box = opened(tmp_path)
    clock.after(5, folder_in(tmp_path).remove)
    with pytest.raises(InDoubtError, match="may be committed, id 1"):
        commit_by(box, timeout_seconds=60)
    assert 70 <= clock.now - 1000 < 72
    assert names_in(tmp_path) == set()


def test_a_mailbox_that_stays_away_for_two_minutes_is_gone(tmp_path: Path, clock: VirtualClock) -> None:
    box = opened(tmp_path)
    clock.after(5, folder_in(tmp_path).remove)
    with pytest.raises(InDoubtError, match=f"may be committed, id 1: rank 1: .*the mailbox of save {ID} is gone"):
        commit_by(box)
    assert ABSENCE_SECONDS + 5 <= clock.now - 1000 < ABSENCE_SECONDS + 10
    folder_in(tmp_path).prepare()
    box = opened(tmp_path)
    clock.after(5, folder_in(tmp_path).remove)
    with pytest.raises(CoordinationError, match="rank 0 gave the save up") as raised:
        exchange_of(box).run("plan")
    assert not isinstance(raised.value, InDoubtError)


def test_a_mailbox_that_is_away_for_a_minute_is_not_gone(tmp_path: Path, clock: VirtualClock) -> None:
    box = opened(tmp_path)
    clock.after(5, folder_in(tmp_path).remove)
    for start in (65, 165, 265):
        clock.after(start, folder_in(tmp_path).prepare)
        clock.after(start + 20, folder_in(tmp_path).remove)
    clock.after(350, folder_in(tmp_path).prepare)
    clock.after(351, lambda: folder_in(tmp_path).put(*answer()))
    assert exchange_of(box).run("plan") == b"the answer"


def test_nobody_but_the_coordinator_makes_the_mailbox_and_the_others_wait_for_it(
    tmp_path: Path, clock: VirtualClock
) -> None:
    box = Mailbox(folder_in(tmp_path), 1, 2, key=ID, is_committed=never)
    clock.after(40, folder_in(tmp_path).prepare)
    clock.after(41, lambda: folder_in(tmp_path).put(*answer()))
    assert exchange_of(box).run("plan") == b"the answer"
    late = Mailbox(folder_in(tmp_path, "f" * 32), 1, 2, key=ID, is_committed=never)
    start = clock.now
    with pytest.raises(CoordinationError, match="is gone, or never came"):
        exchange_of(late).run("plan")
    assert ABSENCE_SECONDS <= clock.now - start < ABSENCE_SECONDS + 2
    assert names_in(tmp_path) == {f".mailbox-{ID}"}


def test_a_removed_mailbox_is_not_made_again_by_a_message(tmp_path: Path, clock: VirtualClock) -> None:
    for rank in (0, 1):
        box = opened(tmp_path, rank)
        box.put("first.0.1", b"")
        folder_in(tmp_path).remove()
        with pytest.raises(CoordinationError, match="is gone"):
            box.put("first.1.1", b"")
        assert names_in(tmp_path) == set()


def test_what_the_coordinator_cannot_post_after_the_commit_is_no_error(tmp_path: Path, clock: VirtualClock) -> None:
    committed: list[bool] = []
    box = opened(tmp_path, 0, 1, is_committed=lambda: bool(committed))
    box.wait("job.0.1", 0.1)
    folder_in(tmp_path).remove()
    committed.append(True)
    box.put("job.0.answers", b"")
    committed.clear()
    with pytest.raises(CoordinationError):
        box.put("job.0.answers", b"")


def test_a_long_wait_looks_seldom(tmp_path: Path, clock: VirtualClock, monkeypatch: Any) -> None:
    counts = dict.fromkeys(["open", "listdir", "stat", "lstat", "utime"], 0)

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return real(*arguments, **options)

        return call

    asked: list[float] = []

    def is_committed() -> bool:
        asked.append(clock.now)
        return False

    box = opened(tmp_path, is_committed=is_committed)
    for name in counts:
        monkeypatch.setattr(os, name, counted(name))
    assert box.wait(f"{ID}.0.answers", 600) is None
    assert counts["open"] / 600 < 200  # the directory, and the message in it
    assert counts["listdir"] / 600 < 20
    assert counts["stat"] + counts["lstat"] < 10
    assert 35 <= counts["utime"] <= 40  # this shows who sweeps that somebody waits here
    assert 20 < len(asked) < 40


def test_thousands_of_ranks_are_looked_after_by_few_listings(
    tmp_path: Path, clock: VirtualClock, monkeypatch: Any
) -> None:
    """A pass over all who have not come yet opens no file and sleeps no time for each."""
    box = opened(tmp_path, 0, 4096)
    box.wait("job.0.1", 0.001)
    listings: list[str] = []
    real = os.listdir

    def listdir(path: str) -> list[str]:
        listings.append(path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(os, "open", lambda *rest: pytest.fail("looked for a name that no listing has"))
    for rank in range(1, 4096):
        assert box.wait(f"job.0.{rank}", 0.001) is None
    assert len(listings) <= 2


def test_what_the_check_raises_ends_a_wait(tmp_path: Path, clock: VirtualClock) -> None:
    start = clock.now

    def check() -> None:
        if clock.now > start + 3:
            raise InterruptedError("cancelled")

    with pytest.raises(InterruptedError, match="cancelled"):
        opened(tmp_path, check=check).wait("job.0.answers", 600)
    assert start + 3 < clock.now < start + 5
    start = clock.now
    with pytest.raises(InterruptedError, match="cancelled"):
        Mailbox(folder_in(tmp_path, "f" * 32), 1, 2, key=ID, is_committed=never, check=check).put("job.0.1", b"")
    assert start + 3 < clock.now < start + 5


# -- the end --------------------------------------------------------------------------------------------------------


def test_the_mailbox_goes_with_a_commit_and_what_a_torn_writer_left_goes_too(tmp_path: Path) -> None:
    box = opened(tmp_path, 0, 8)
    box.put("job.0.answers", b"x")
    (tmp_path / f".mailbox-{ID}" / f".{'0' * 16}.tmp").write_bytes(b"cut off")
    box.close(committed=True)
    assert names_in(tmp_path) == set()
    box.close(committed=True)


def test_a_mailbox_that_cannot_be_removed_is_no_error(tmp_path: Path, caplog: Any) -> None:
    box = opened(tmp_path, 0, 2)
    (tmp_path / f".mailbox-{ID}" / "not ours").mkdir()
    with caplog.at_level("WARNING", logger="dcp"):
        box.close(committed=True)
    assert f"the mailbox of save {ID} stays until a later save removes it" in caplog.text
    assert names_in(tmp_path) == {f".mailbox-{ID}"}


def test_a_failed_save_leaves_its_mailbox_until_the_others_have_read(tmp_path: Path) -> None:
    forget(ID, 1)
    box = opened(tmp_path, 0, 3)
    forget(ID, 0)
    failing = Exchange(0, 3, box, key=ID, timeout_seconds=0.1)
    with pytest.raises(CoordinationTimeoutError):
        failing.run("agree")
    box.close(committed=False)
    for rank in (1, 2):
        reader = opened(tmp_path, rank, 3)
        with pytest.raises(CoordinationTimeoutError, match="did not come to exchange agree"):
            exchange_of(reader).run("agree")
        reader.close(committed=False)
    finish_closing()
    assert names_in(tmp_path) == set()


def test_two_hundred_saves_leave_nothing(tmp_path: Path) -> None:
    ledgers, descriptors, threads = [], [], []
    for _ in range(200):
        save_id = secrets.token_hex(16)
        boxes = [
            Mailbox(folder_in(tmp_path, save_id), rank, 2, key=save_id, is_committed=always) for rank in range(2)
        ]  # fmt: skip
        boxes[0].open()

        def body(rank: int, boxes: list[Mailbox] = boxes, save_id: str = save_id) -> bytes:
            exchange = Exchange(rank, 2, boxes[rank], key=save_id, timeout_seconds=30)
            exchange.run("plan")
            result = exchange.run("commit", commit=True)
            boxes[rank].close(committed=True)
            forget(save_id, rank)
            return result

        assert in_threads(body, range(2)) == [b"", b""]
        ledgers.append(len(exchange_module._ledgers))
        descriptors.append(len(os.listdir("/proc/self/fd")))
        threads.append(threading.active_count())
        assert names_in(tmp_path) == set()
    for series in (ledgers, descriptors, threads):
        assert max(series) == series[0]


# -- real processes -------------------------------------------------------------------------------------------------


def full_save(context: RankContext, directory: str, save_id: str) -> tuple[list[bytes], float]:
    """Agree, plan, commit, over the mailbox of a writer."""
    marker = os.path.join(directory, "committed")
    box = Mailbox(
        folder_in(directory, save_id), context.rank, context.world_size,
        key=save_id, is_committed=lambda: os.path.exists(marker),
    )  # fmt: skip
    if context.rank == 0:
        box.open()

    def commit(payloads: Sequence[bytes]) -> bytes:
        with open(marker, "wb"):
            return b""

    exchange = Exchange(context.rank, context.world_size, box, key=save_id, timeout_seconds=30)
    answers = [exchange.run("agree", b"%d" % context.rank, compute=joined)]
    answers.append(exchange.run("plan", b"%d" % context.rank, compute=each_its_own))
    answers.append(exchange.run("commit", compute=commit, commit=True))
    box.close(committed=True)
    return answers, sum(record.seconds for record in exchange.log[1:])


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_processes_agree_through_files(tmp_path: Path, world_size: int) -> None:
    results = run_ranks(full_save, world_size, str(tmp_path), ID, timeout_seconds=50)
    everybody = b"|".join(b"%d" % rank for rank in range(world_size))
    assert [answers for answers, _ in results] == [[everybody, b"for %d" % rank, b""] for rank in range(world_size)]
    assert names_in(tmp_path) == {"committed"}


def failing_save(context: RankContext, directory: str, mode: str) -> float:
    """One rank fails, or dies and its trainer says so; the seconds until this rank hears of it."""
    box = Mailbox(folder_in(directory), context.rank, context.world_size, key=ID, is_committed=never)
    if context.rank == 0:
        box.open()
    exchange = Exchange(context.rank, context.world_size, box, key=ID, timeout_seconds=45)
    exchange.run("agree")
    started = time.monotonic()
    dying = 0 if mode == "the coordinator dies" else context.world_size - 1
    if context.rank == dying and mode != "fails":
        trainer = Mailbox(folder_in(directory), context.rank, context.world_size, key=ID, is_committed=never)
        trainer.post_abort(context.rank, ValueError("out of luck"))
        trainer.close(committed=False)
        return 0.0
    error = ValueError("out of luck") if context.rank == dying else None
    with pytest.raises(RankFailedError, match=f"^rank {dying}: ValueError: out of luck$"):
        exchange.run("commit", error=error, commit=True)
    seconds = time.monotonic() - started
    box.close(committed=False)
    return seconds


@pytest.mark.parametrize("mode", ["fails", "dies", "the coordinator dies"])
def test_processes_hear_of_an_error_long_before_the_deadline(tmp_path: Path, mode: str) -> None:
    seconds = run_ranks(failing_save, 4, str(tmp_path), mode, timeout_seconds=50)
    assert max(seconds) < 20
    assert names_in(tmp_path) == set()


def late_save(context: RankContext, directory: str) -> tuple[bytes, ...]:
    """Each process sees each name two seconds late, and each handle is stale once."""
    folder = LateFolder(Path(directory) / f".mailbox-{ID}", time, 2.0 if context.rank else 1.5)
    marker = os.path.join(directory, "committed")
    box = Mailbox(folder, context.rank, context.world_size, key=ID, is_committed=lambda: os.path.exists(marker))
    if context.rank == 0:
        box.open()

    def commit(payloads: Sequence[bytes]) -> bytes:
        with open(marker, "wb"):
            return b""

    exchange = Exchange(context.rank, context.world_size, box, key=ID, timeout_seconds=40)
    answers = exchange.run("plan", b"%d" % context.rank, compute=each_its_own)
    answers += exchange.run("commit", compute=commit, commit=True)
    box.close(committed=True)
    return (answers,)


def test_processes_agree_where_names_are_seen_late(tmp_path: Path) -> None:
    assert run_ranks(late_save, 3, str(tmp_path), timeout_seconds=55) == [(b"for %d" % rank,) for rank in range(3)]
    assert names_in(tmp_path) == {"committed"}
