"""The fault injection itself: it counts, fails, tears and kills where it is told to."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_core.errors import StorageError
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations, OperationRecord

_WRITE = """
import sys
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
operations = FaultyOperations(kill_at=int(sys.argv[2]), kill_moment=sys.argv[3], max_io_bytes=4)
LocalStorage(sys.argv[1], operations).write_file("a", b"0123456789")
"""


def test_every_operation_that_changes_the_disk_is_counted_in_order(tmp_path: Path) -> None:
    operations = FaultyOperations()
    storage = LocalStorage(tmp_path / "step", operations)
    storage.prepare()
    storage.write_file("a.tmp", b"content")
    storage.publish("a.tmp", "a")
    storage.touch("a")
    storage.sync()
    (tmp_path / "step" / "inner").mkdir()
    storage.remove_directory("inner")
    storage.remove("a")
    assert [(record.operation, record.name) for record in operations.log] == [
        ("mkdir", "step"),
        ("create", "a.tmp"),
        ("preallocate", "a.tmp"),
        ("pwritev", "a.tmp"),
        ("fsync", "a.tmp"),
        ("close_written", "a.tmp"),
        ("rename", "a"),
        ("touch", "a"),
        ("fsync_directory", "step"),
        ("fsync_directory", tmp_path.name),
        ("rmdir", "inner"),
        ("unlink", "a"),
    ]
    assert [record.number for record in operations.log] == list(range(1, 13))


def test_reading_is_not_counted(tmp_path: Path) -> None:
    operations = FaultyOperations(fail_at=1, forever=True)
    LocalStorage(tmp_path).write_file("a", b"content")
    storage = LocalStorage(tmp_path, operations)
    assert (storage.read("a"), storage.size("a"), storage.list()) == (b"content", 7, ["a"])
    assert operations.log == []


def test_only_the_chosen_operations_and_names_are_counted(tmp_path: Path) -> None:
    operations = FaultyOperations(operations=["create", "unlink"], name_pattern="b*")
    storage = LocalStorage(tmp_path, operations)
    for name in ("a", "b1", "b2"):
        storage.write_file(name, b"x")
    storage.remove("b1")
    assert operations.log == [
        OperationRecord(1, "create", "b1"),
        OperationRecord(2, "create", "b2"),
        OperationRecord(3, "unlink", "b1"),
    ]


@pytest.mark.parametrize("forever", [False, True])
def test_it_fails_once_or_from_then_on(tmp_path: Path, forever: bool) -> None:
    operations = FaultyOperations(fail_at=2, error_number=errno.EACCES, forever=forever, operations=["create"])
    storage = LocalStorage(tmp_path, operations)
    outcomes = []
    for name in "abcd":
        try:
            storage.write_file(name, b"x")
            outcomes.append(0)
        except StorageError as error:
            outcomes.append(error.errno or -1)
    assert outcomes == ([0, errno.EACCES, errno.EACCES, errno.EACCES] if forever else [0, errno.EACCES, 0, 0])


def test_a_close_that_fails_closes_all_the_same(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    storage = LocalStorage(tmp_path, FaultyOperations(fail_at=1, operations=["close_written"]))
    with pytest.raises(StorageError, match="could not close 'a'"):
        storage.write_file("a", b"x")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert storage.list() == []


@pytest.mark.parametrize(
    ("kill_at", "moment", "content"),
    [
        (1, "before", None),
        (1, "after", b""),
        (3, "before", b"\0" * 10),
        (3, "after", b"0123" + b"\0" * 6),
        (4, "after", b"01234567\0\0"),
    ],
)
def test_it_kills_the_process_before_or_after_an_operation(
    tmp_path: Path, kill_at: int, moment: str, content: bytes | None
) -> None:
    command = [sys.executable, "-c", _WRITE, str(tmp_path), str(kill_at), moment]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    path = tmp_path / "a"
    assert (path.read_bytes() if path.exists() else None) == content


def test_it_calls_back_before_each_operation(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []
    path = tmp_path / "a"
    operations = FaultyOperations(before=lambda record: seen.append((record.operation, path.exists())))
    LocalStorage(tmp_path, operations).write_file("a", b"x", durable=False)
    assert seen == [("create", False), ("preallocate", True), ("pwritev", True), ("close_written", True)]


def test_short_reads_and_writes_move_every_byte_in_the_end(tmp_path: Path) -> None:
    operations = FaultyOperations(max_io_bytes=3, operations=["pwritev"])
    storage = LocalStorage(tmp_path, operations)
    storage.write_file("a", b"0123456789")
    assert len(operations.log) == 4
    assert storage.read("a") == b"0123456789"
