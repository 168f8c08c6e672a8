from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_core.adapter import KeyValueChannel
from dcp_core.coordination import directory
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.errors import CoordinationError
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.virtual_clock import VirtualClock

pytestmark = pytest.mark.timeout(60)


def test_it_is_a_key_value_channel(tmp_path: Path) -> None:
    assert isinstance(DirectoryChannel(tmp_path), KeyValueChannel)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 5000])
def test_a_message_comes_back_and_stays_until_it_is_deleted(tmp_path: Path, payload: bytes) -> None:
    channel = DirectoryChannel(tmp_path / "made" / "for it")
    channel.put("job.0.1", payload)
    assert [channel.wait("job.0.1", 0), channel.wait("job.0.1", 5)] == [payload] * 2
    channel.delete("job.0.1")
    channel.delete("job.0.1")
    assert channel.wait("job.0.1", 0) is None
    assert os.listdir(channel.path) == []


def test_waiting_ends_at_its_deadline(tmp_path: Path) -> None:
    started = time.monotonic()
    assert DirectoryChannel(tmp_path).wait("never", 0.2) is None
    assert 0.2 <= time.monotonic() - started < 20


def test_waiting_ends_when_the_message_comes(tmp_path: Path) -> None:
    channel = DirectoryChannel(tmp_path)
    timer = threading.Timer(0.3, channel.put, ("a", b"there"))
    timer.start()
    started = time.monotonic()
    assert channel.wait("a", 60) == b"there"
    assert time.monotonic() - started < 40
    timer.join()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "a\0b", "ü", "a b", "x" * 201])
def test_names_that_could_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    channel = DirectoryChannel(tmp_path)
    with pytest.raises(CoordinationError, match="no name for a message"):
        channel.put(name, b"")
    with pytest.raises(CoordinationError, match="no name for a message"):
        channel.wait(name, 0)
    with pytest.raises(CoordinationError, match="no name for a message"):
        channel.delete(name)


def test_no_temporary_file_stays_when_a_message_cannot_be_written(tmp_path: Path, monkeypatch: Any) -> None:
    def full(descriptor: int, payload: bytes) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(directory, "_write_all", full)
    with pytest.raises(OSError, match="disk full"):
        DirectoryChannel(tmp_path).put("a", b"x")
    assert os.listdir(tmp_path) == []


def test_a_message_is_replaced_whole(tmp_path: Path) -> None:
    """A reader that looks all the time sees either message, never a part."""
    channel = DirectoryChannel(tmp_path)
    messages = {bytes([letter]) * 300_000 for letter in b"abc"}
    channel.put("a", b"a" * 300_000)
    stop = threading.Event()
    seen: set[bytes | None] = set()

    def read() -> None:
        while not stop.is_set():
            seen.add(channel.wait("a", 0))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        for message in messages:
            channel.put("a", message)
    stop.set()
    reader.join()
    assert seen <= messages


def test_a_stale_handle_is_taken_for_absent_and_tried_again(tmp_path: Path, monkeypatch: Any) -> None:
    channel = DirectoryChannel(tmp_path)
    channel.put("a", b"there")
    real_open, failures = os.open, [errno.ESTALE] * 3

    def stale(path: str, *rest: Any, **more: Any) -> int:
        if failures:
            raise OSError(failures.pop(), "stale file handle", path)
        return real_open(path, *rest, **more)

    monkeypatch.setattr(os, "open", stale)
    assert channel.wait("a", 5) == b"there"
    assert failures == []


def test_waiting_lists_the_directory_so_that_a_remembered_absence_is_forgotten(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Like a network file system that says 'absent' until the directory is read again."""
    channel = DirectoryChannel(tmp_path)
    channel.put("a", b"there")
    real_open, real_listdir = os.open, os.listdir
    listed: list[int] = []

    def open_or_remember(path: str, *rest: Any, **more: Any) -> int:
        if path == "a" and not listed:
            raise FileNotFoundError(errno.ENOENT, "remembered as absent", path)
        return real_open(path, *rest, **more)

    def listdir(path: int) -> list[str]:
        listed.append(path)
        return real_listdir(path)

    monkeypatch.setattr(os, "open", open_or_remember)
    monkeypatch.setattr(os, "listdir", listdir)
    assert channel.wait("a", 5) == b"there"
    listed.clear()
    assert channel.wait("a", 0) == b"there"  # also just before it gives up


def test_a_vanished_directory_is_absence_to_readers_and_an_error_to_writers(tmp_path: Path) -> None:
    channel = DirectoryChannel(tmp_path / "mailbox")
    os.rmdir(channel.path)
    assert channel.wait("a", 0.01) is None
    channel.delete("a")
    with pytest.raises(FileNotFoundError):
        channel.put("a", b"x")


def test_other_errors_of_the_file_system_are_raised(tmp_path: Path) -> None:
    channel = DirectoryChannel(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(IsADirectoryError):
        channel.wait("a", 1)
    with pytest.raises(OSError, match="symbolic"):
        channel.wait("link", 1)


def pass_on(context: RankContext) -> bytes:
    """Each rank waits for the one before it, and adds itself."""
    channel = DirectoryChannel(context.channel_directory)
    message: bytes | None = b""
    if context.rank:
        message = channel.wait(f"to.{context.rank}", 20)
        channel.delete(f"to.{context.rank}")
    assert message is not None
    message += b"%d" % context.rank
    channel.put(f"to.{context.rank + 1}", message)
    return message


def test_messages_cross_processes() -> None:
    assert run_ranks(pass_on, 4, timeout_seconds=30) == [b"0", b"01", b"012", b"0123"]


def test_a_stale_handle_does_not_lose_a_message(tmp_path: Path, monkeypatch: Any) -> None:
    channel = DirectoryChannel(tmp_path)
    real_replace, failures = os.replace, [errno.ESTALE] * 3

    def stale(source: str, target: str, **places: int) -> None:
        if failures:
            raise OSError(failures.pop(), "stale file handle", target)
        real_replace(source, target, **places)

    monkeypatch.setattr(os, "replace", stale)
    channel.put("a", b"there")
    assert failures == []
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == {"a": b"there"}
    failures.extend([errno.ESTALE] * 100)
    with pytest.raises(OSError, match="stale"):
        channel.put("b", b"x")
    assert len(failures) > 50
    assert os.listdir(tmp_path) == ["a"]


def test_the_directory_is_made_when_it_is_asked_for(tmp_path: Path) -> None:
    channel = DirectoryChannel(tmp_path / "mailbox", make=False)
    assert os.listdir(tmp_path) == []
    assert channel.names() is None
    with pytest.raises(FileNotFoundError):
        channel.put("a", b"x")
    channel.prepare()
    channel.prepare()
    channel.put("a", b"x")
    assert channel.names() == frozenset({"a"})
    with pytest.raises(FileNotFoundError):
        DirectoryChannel(tmp_path / "absent" / "mailbox", make=False).prepare()


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_something_else_in_the_place_of_the_directory_is_refused(tmp_path: Path, kind: str) -> None:
    place, kept = tmp_path / "mailbox", tmp_path / "kept"
    kept.mkdir()
    (kept / "a").write_bytes(b"of somebody else")
    if kind == "file":
        place.write_bytes(b"x")
    else:
        place.symlink_to(kept if kind == "link" else tmp_path / "absent")
    channel = DirectoryChannel(place, make=False)
    with pytest.raises(FileExistsError):
        channel.prepare()
    with pytest.raises(NotADirectoryError):
        channel.remove()
    assert os.path.lexists(place)
    assert os.listdir(kept) == ["a"]
    assert sorted(os.listdir(tmp_path)) == ["kept", "mailbox"]


def test_no_message_goes_through_a_link_in_the_place_of_the_directory(tmp_path: Path, monkeypatch: Any) -> None:
    clock = VirtualClock().rule(monkeypatch, directory)
    kept, place = tmp_path / "kept", tmp_path / "mailbox"
    kept.mkdir()
    (kept / "a").write_bytes(b"of somebody else")
    os.utime(kept, (0, 0))
    place.symlink_to(kept)
    channel = DirectoryChannel(place, make=False)
    calls: list[Callable[[], object]] = [
        lambda: channel.put("b", b"x"),
        lambda: channel.delete("a"),
        lambda: channel.wait("a", 1),
    ]
    for call in calls:
        with pytest.raises(NotADirectoryError):
            call()
    clock.now += 100
    assert channel.names() == frozenset()
    assert (os.listdir(kept), os.stat(kept).st_mtime) == (["a"], 0)


def test_a_pipe_is_no_message_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no regular file"):
        DirectoryChannel(tmp_path).wait("a", 1)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_messages_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        DirectoryChannel(tmp_path).put("a", b"x")
    finally:
        os.umask(before)
    assert os.stat(tmp_path / "a").st_mode & 0o777 == 0o600


def test_names_are_the_messages_listed_as_recently_as_is_asked(tmp_path: Path) -> None:
    channel, other = DirectoryChannel(tmp_path), DirectoryChannel(tmp_path)
    (tmp_path / f".{'0' * 16}.tmp").write_bytes(b"not finished")
    other.put("a", b"")
    assert channel.names() == frozenset({"a"})
    other.put("b", b"")
    assert channel.names(3600) == frozenset({"a"})
    assert channel.names() == frozenset({"a", "b"})
    other.remove()
    assert channel.names(3600) == frozenset({"a", "b"})
    assert channel.names() is None


def test_removing_takes_messages_and_unfinished_ones_and_nothing_else(tmp_path: Path) -> None:
    channel = DirectoryChannel(tmp_path / "mailbox")
    channel.remove()
    channel.remove()
    assert os.listdir(tmp_path) == []
    channel.prepare()
    channel.put("a", b"x")
    (tmp_path / "mailbox" / f".{'0' * 16}.tmp").write_bytes(b"not finished")
    (tmp_path / "kept").write_bytes(b"x")
    (tmp_path / "mailbox" / "link").symlink_to(tmp_path / "kept")
    channel.remove()
    assert os.listdir(tmp_path) == ["kept"]
    channel.prepare()
    channel.put("a", b"x")
    (tmp_path / "mailbox" / "a_strangers_file").write_bytes(b"x")
    with pytest.raises(OSError, match="not empty"):
        channel.remove()
    assert os.listdir(channel.path) == ["a_strangers_file"]


def test_removing_only_what_is_empty_leaves_messages(tmp_path: Path) -> None:
    channel = DirectoryChannel(tmp_path / "mailbox")
    channel.put("a", b"x")
    channel.remove(only_if_empty=True)
    assert channel.wait("a", 0) == b"x"
    channel.delete("a")
    channel.remove(only_if_empty=True)
    channel.remove(only_if_empty=True)
    assert os.listdir(tmp_path) == []


def test_removing_goes_on_where_somebody_posts_at_the_same_moment(tmp_path: Path, monkeypatch: Any) -> None:
    channel, busy = DirectoryChannel(tmp_path / "mailbox"), DirectoryChannel(tmp_path / "mailbox")
    real_rmdir, posts = os.rmdir, ["a", "b", "c"]

    def post_before(path: str) -> None:
        if posts:
            busy.put(posts.pop(), b"x")
        real_rmdir(path)

    monkeypatch.setattr(os, "rmdir", post_before)
    channel.remove()
    assert posts == []
    assert os.listdir(tmp_path) == []


def test_a_long_wait_touches_the_directory_now_and_then(tmp_path: Path, monkeypatch: Any) -> None:
    clock = VirtualClock().rule(monkeypatch, directory)
    channel = DirectoryChannel(tmp_path / "mailbox")
    os.utime(channel.path, (0, 0))
    assert channel.wait("a", 10) is None
    assert os.stat(channel.path).st_mtime == 0
    assert channel.wait("a", 10) is None
    assert os.stat(channel.path).st_mtime > 0
    os.rmdir(channel.path)
    assert channel.wait("a", 60) is None
    assert clock.now == pytest.approx(1080, abs=1)
