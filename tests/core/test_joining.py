from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dcp_core.background import joining as joining_module
from dcp_core.background import mailbox as mailbox_module
from dcp_core.background.joining import Meeting, join_without_channel
from dcp_core.background.mailbox import Mailbox
from dcp_core.coordination import directory as directory_module
from dcp_core.coordination.exchange import Exchange, forget
from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError, ShapeMismatchError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.execution.interfaces import MailboxFolder
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.virtual_clock import VirtualClock

pytestmark = pytest.mark.timeout(60)

JOIN = ".mailbox-join"
NONCES = [f"{number:032x}" for number in range(1, 9)]


def never(save_id: str) -> bool:
    return False


def folder_in(path: str | os.PathLike[str], name: str = "join") -> MailboxFolder:
    folder = FileSystemWriter(path).open_mailbox(name)
    assert folder is not None
    return folder


def join(path: str | os.PathLike[str], meeting: Meeting, timeout_seconds: float = 30.0) -> Mailbox:
    def is_committed(save_id: str) -> bool:
        return os.path.exists(_marker(path, save_id))

    open_mailbox = FileSystemWriter(path).open_mailbox
    return join_without_channel(open_mailbox, meeting, is_committed=is_committed, timeout_seconds=timeout_seconds)


def _marker(path: str | os.PathLike[str], save_id: str) -> str:
    return os.path.join(path, f"committed-{save_id}")


def agree(box: Mailbox, text: bytes = b"", timeout_seconds: float = 30.0, **options: Any) -> bytes:
    """Exchange 1."""
    exchange = Exchange(box.rank, box.world_size, box, key=box.key, timeout_seconds=timeout_seconds)
    return exchange.run("agree", text, compute=b"|".join, **options)


def commit(path: str | os.PathLike[str], box: Mailbox) -> None:
    """The last exchange, and the end of the save."""

    def mark(payloads: Sequence[bytes]) -> bytes:
        with open(_marker(path, box.key), "wb"):
            return b""

    Exchange(box.rank, box.world_size, box, key=box.key, timeout_seconds=30).run("commit", commit=True, compute=mark)
    box.close(committed=True)
    forget(box.key, box.rank)


def names_in(path: Path) -> set[str]:
    """What lies there; that saves were committed goes without saying."""
    return {name for name in os.listdir(path) if not name.startswith("committed-")} if path.exists() else set()


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    results: dict[int, Any] = {}

    def catch(position: int) -> None:
        try:
            results[position] = works[position]()
        except BaseException as error:
            results[position] = error

    threads = [threading.Thread(target=catch, args=(position,), daemon=True) for position in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive(), "a rank hangs"
    return [results[position] for position in range(len(works))]


def saves(
    context: RankContext, directory: str, calls: Sequence[int], failing: int | None, delays: Sequence[float]
) -> list[tuple[str, bytes]]:
    """Join and agree, call after call; what each brought."""
    found = []
    for call in calls:
        time.sleep(delays[context.rank])
        meeting = Meeting(context.rank, context.world_size, "job", call)
        box = join(directory, meeting)
        error = ShapeMismatchError("w is odd") if call == failing and context.rank == context.world_size - 1 else None
        try:
            found.append((box.key, agree(box, b"%d/%d" % (call, context.rank), error=error)))
            commit(directory, box)
        except ShapeMismatchError as raised:
            found.append((box.key, raised.message.encode()))
            box.close(committed=False)
    return found


def joined(call: int, world_size: int) -> bytes:
    return b"|".join(b"%d/%d" % (call, rank) for rank in range(world_size))


@pytest.mark.parametrize("delays", [(0.0,) * 8, (0.3, 0.0, 0.0, 0.2) * 2], ids=["at once", "rank 0 is late"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_find_each_other_call_after_call(tmp_path: Path, world_size: int, delays: tuple[float, ...]) -> None:
    results = run_ranks(saves, world_size, str(tmp_path / "new" / "step"), [0, 1, 2], None, delays, timeout_seconds=50)
    for call in range(3):
        save_ids = {result[call][0] for result in results}
        assert len(save_ids) == 1 and re.fullmatch("[0-9a-f]{32}", save_ids.pop())
        assert {result[call][1] for result in results} == {joined(call, world_size)}
    assert len({result[call][0] for result in results for call in range(3)}) == 3
    assert JOIN not in names_in(tmp_path / "new" / "step")


def test_a_rank_that_failed_joins_and_all_hear_of_it_and_the_next_call_works(tmp_path: Path) -> None:
    results = run_ranks(saves, 3, str(tmp_path), [0, 1], 0, (0.0,) * 3, timeout_seconds=50)
    for result in results:
        assert [text for _, text in result] == [b"rank 2: w is odd", joined(1, 3)]
    assert names_in(tmp_path) == set()


def _litter(path: Path, group: str, world_size: int, calls: Sequence[int]) -> None:
    """What attempts left that crashed while they joined."""
    folder = folder_in(path)
    folder.prepare()
    for call in calls:
        for rank in range(1, world_size):
            folder.put(f"hello.{group}.{call}.{rank}.{NONCES[rank]}", b"")
            folder.put(f"welcome.{group}.{call}.{rank}.{NONCES[rank]}", b"f" * 32)


def test_what_crashed_attempts_left_is_never_taken_and_goes(tmp_path: Path) -> None:
    meeting = Meeting(0, 3, "job", 5)
    _litter(tmp_path, meeting.group, 8, [0, 4, 5])
    results = run_ranks(saves, 3, str(tmp_path), [5, 6], None, (0.3, 0.0, 0.0), timeout_seconds=50)
    for result in results:
        assert [text for _, text in result] == [joined(5, 3), joined(6, 3)]
        assert "f" * 32 not in {save_id for save_id, _ in result}
    assert names_in(tmp_path) == set()


def test_what_belongs_to_others_or_to_a_later_call_stays(tmp_path: Path) -> None:
    stranger = Meeting(0, 3, "another job", 0).group
    _litter(tmp_path, stranger, 3, [0])
    meeting = Meeting(0, 3, "job", 0)
    folder_in(tmp_path).put("README", b"")
    kept = names_in(tmp_path / JOIN)
    ahead = {f"hello.{meeting.group}.1.2.{NONCES[7]}", f"hello.{meeting.group}.1.7.{NONCES[7]}"}
    for name in ahead:
        folder_in(tmp_path).put(name, b"")
    results = run_ranks(saves, 3, str(tmp_path), [0], None, (0.0,) * 3, timeout_seconds=50)
    assert {result[0][1] for result in results} == {joined(0, 3)}
    assert names_in(tmp_path / JOIN) == kept | {f"hello.{meeting.group}.1.2.{NONCES[7]}"}


def test_a_rank_that_is_ahead_waits_for_its_own_call(tmp_path: Path) -> None:
    """Rank 1 left call 0, for it failed there; the coordinator is in it still."""
    ahead = threading.Event()

    def first() -> bytes:
        zero = join(tmp_path, Meeting(0, 2, "job", 0))
        with pytest.raises(CoordinationTimeoutError, match="rank 1 did not come"):
            agree(zero, b"old 0", timeout_seconds=1.0)
        assert ahead.is_set()
        return agree(join(tmp_path, Meeting(0, 2, "job", 1)), b"new 0")

    def second() -> bytes:
        ahead.set()
        return agree(join(tmp_path, Meeting(1, 2, "job", 1)), b"new 1")

    assert in_threads(first, second) == [b"new 0|new 1"] * 2


def test_two_jobs_may_meet_in_one_directory(tmp_path: Path) -> None:
    def rank_of(job: str, rank: int) -> bytes:
        return agree(join(tmp_path, Meeting(rank, 2, job, 0)), f"{job} {rank}".encode())

    outcomes = in_threads(*(partial(rank_of, job, rank) for job in ("a", "b", "c") for rank in (0, 1)))
    assert outcomes == [f"{job} 0|{job} 1".encode() for job in ("a", "b", "c") for _ in (0, 1)]
    assert JOIN not in names_in(tmp_path)


def test_a_coordinator_without_a_trainer_welcomes_nobody(tmp_path: Path) -> None:
    """It belongs to an attempt that is over; who says hello now is of a later one."""
    old = join(tmp_path, Meeting(0, 2, "job", 0, is_wanted=lambda: False))

    def abandoned() -> bytes:
        return agree(old, b"old 0", timeout_seconds=3.0)

    def later() -> bytes:
        time.sleep(0.7)
        return agree(join(tmp_path, Meeting(0, 2, "job", 0)), b"new 0")

    def other() -> bytes:
        return agree(join(tmp_path, Meeting(1, 2, "job", 0)), b"new 1")

    outcomes = in_threads(abandoned, later, other)
    assert isinstance(outcomes[0], CoordinationError) and "trainer of rank 0 ended" in outcomes[0].message
    assert outcomes[1:] == [b"new 0|new 1"] * 2


# -- with a clock of our own ----------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return VirtualClock().rule(monkeypatch, joining_module, mailbox_module, directory_module)


def welcome_all(path: Path, save_id: bytes = b"a" * 32) -> None:
    """What rank 0 does."""
    folder = folder_in(path)
    for name in folder.names() or ():
        if name.startswith("hello"):
            folder.put(name.replace("hello", "welcome"), save_id)


def test_a_rank_without_a_trainer_joins_nothing(tmp_path: Path, clock: VirtualClock) -> None:
    folder_in(tmp_path).prepare()
    clock.after(3, lambda: welcome_all(tmp_path))
    meeting = Meeting(1, 2, "job", 0, is_wanted=lambda: clock.now < 1002)
    with pytest.raises(CoordinationError, match="its trainer is gone"):
        join(tmp_path, meeting)
    assert names_in(tmp_path / JOIN) == set()
    meeting = Meeting(1, 2, "job", 0, is_wanted=lambda: False)
    clock.after(1, lambda: welcome_all(tmp_path))
    with pytest.raises(CoordinationError, match="its trainer is gone"):
        join(tmp_path, meeting)


def test_a_rank_waits_for_a_coordinator_that_comes_late(tmp_path: Path, clock: VirtualClock) -> None:
    clock.after(40, folder_in(tmp_path).prepare)
    clock.after(50, lambda: welcome_all(tmp_path))
    assert join(tmp_path, Meeting(1, 2, "job", 0), 60).key == "a" * 32
    assert 50 <= clock.now - 1000 < 51
    assert names_in(tmp_path / JOIN) == set()


def test_a_hello_that_somebody_removed_is_put_up_again(tmp_path: Path, clock: VirtualClock) -> None:
    folder_in(tmp_path).prepare()
    clock.after(5, folder_in(tmp_path).remove)
    clock.after(10, folder_in(tmp_path).prepare)
    clock.after(15, lambda: welcome_all(tmp_path))
    assert join(tmp_path, Meeting(1, 2, "job", 0), 60).key == "a" * 32


def test_a_coordinator_that_never_comes_is_named(tmp_path: Path, clock: VirtualClock) -> None:
    for _ in range(2):
        start = clock.now
        with pytest.raises(CoordinationTimeoutError, match="rank 0 did not come to call 7 of async_save") as raised:
            join(tmp_path, Meeting(1, 2, "job", 7), 20)
        assert 25 <= clock.now - start < 26
        assert [cause.rank for cause in raised.value.causes] == [0]
        folder_in(tmp_path).prepare()
    assert names_in(tmp_path / JOIN) == set()


def test_an_answer_that_is_no_id_is_refused(tmp_path: Path, clock: VirtualClock) -> None:
    folder_in(tmp_path).prepare()
    clock.after(1, lambda: welcome_all(tmp_path, b"../../etc/passwd"))
    with pytest.raises(CoordinationError, match="16 bytes that are no save's id"):
        join(tmp_path, Meeting(1, 2, "job", 0))


def test_what_the_check_raises_ends_the_wait(tmp_path: Path, clock: VirtualClock) -> None:
    def check() -> None:
        if clock.now > 1003:
            raise InterruptedError("cancelled")

    with pytest.raises(InterruptedError, match="cancelled"):
        join_without_channel(
            FileSystemWriter(tmp_path).open_mailbox, Meeting(1, 2, "job", 0),
            is_committed=never, timeout_seconds=60, check=check,
        )  # fmt: skip
    assert clock.now < 1005


def test_hellos_are_answered_once_each_and_no_other(tmp_path: Path, clock: VirtualClock) -> None:
    meeting = Meeting(0, 3, "job", 2)
    box = join(tmp_path, meeting)
    group = meeting.group
    good = [f"hello.{group}.2.1.{NONCES[0]}", f"hello.{group}.2.1.{NONCES[1]}", f"hello.{group}.2.2.{NONCES[2]}"]
    bad = [
        f"hello.{group}.2.0.{NONCES[3]}", f"hello.{group}.2.3.{NONCES[3]}", f"hello.{group}.1.1.{NONCES[3]}",
        f"hello.{group}.02.1.{NONCES[3]}", f"hello.{'0' * 16}.2.1.{NONCES[3]}", f"hello.{group}.2.1.short",
    ]  # fmt: skip
    folder = folder_in(tmp_path)
    for name in good + bad:
        folder.put(name, b"")
    assert box.wait("job.0.1", 2) is None
    welcomes = {name for name in folder.names() or () if name.startswith("welcome")}
    assert welcomes == {name.replace("hello", "welcome") for name in good}
    assert {folder.wait(name, 0) for name in welcomes} == {box.key.encode()}
    folder.delete(good[0].replace("hello", "welcome"))
    assert box.wait("job.0.1", 2) is None
    assert folder.wait(good[0].replace("hello", "welcome"), 0) is None


def test_a_folder_that_somebody_removed_is_made_again_by_the_coordinator(tmp_path: Path, clock: VirtualClock) -> None:
    box = join(tmp_path, Meeting(0, 2, "job", 0))
    clock.after(1, folder_in(tmp_path).remove)
    assert box.wait("job.0.1", 3) is None
    assert (tmp_path / JOIN).is_dir()
    box.close(committed=True)
    assert names_in(tmp_path) == set()
    assert box.wait("job.0.1", 3) is None
    assert JOIN not in names_in(tmp_path)


def test_a_storage_without_mailboxes_is_refused() -> None:
    for rank in (0, 1):
        with pytest.raises(ArgumentError, match="this storage has no mailboxes"):
            join_without_channel(
                lambda name: None, Meeting(rank, 2, "job", 0), is_committed=never, timeout_seconds=5
            )  # fmt: skip
