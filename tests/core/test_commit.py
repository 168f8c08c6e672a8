"""At every moment, whatever fails or dies, one checkpoint in the directory is whole."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from dcp_core.errors import ArgumentError, IncompleteError, NotFoundError, StorageError
from dcp_core.storage.commit import HEARTBEAT_EXPIRY_SECONDS, Opening, abort, begin, commit, heartbeat
from dcp_core.storage.intent import Owner, intent_name, parse_intent_name, post_intent
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.faults import FaultyOperations, OperationRecord
from tests.core.commit_jobs import content_of, files_of, named, names, save, whole, write_files

ID_A = "a" * 32
ID_B = "b" * 32
_NOTHING: Mapping[str, object] = {}
_REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory in memory where there is one: the sweeps below sync thousands of times."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="dcp commit ") as path:
        yield Path(path)


def _run(directory: Path, tag: str, *, rank: int | None = None, kill_at: int | None = None, torn: str = "") -> int:
    arguments = [str(directory), tag, "" if rank is None else str(rank), "" if kill_at is None else str(kill_at), torn]
    command = [sys.executable, "-W", "error", "-m", "tests.core.commit_jobs", *arguments]
    result = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=60)
    assert result.returncode in (0, -signal.SIGKILL), result.stderr
    return result.returncode


def _metadata_name(rank: int | None) -> str:
    return ".metadata" if rank is None else f"{rank}.metadata"


def _count(directory: Path, *, rank: int | None = None, max_io_bytes: int | None = None) -> list[OperationRecord]:
    """The operations of a save over the checkpoint in a directory, which is left as it was."""
    trial = directory.with_name("trial")
    shutil.copytree(directory, trial)
    operations = FaultyOperations(max_io_bytes=max_io_bytes)
    save(LocalStorage(trial, operations), "new", rank=rank)
    shutil.rmtree(trial)
    return operations.log


def _age(path: Path, seconds: float) -> None:
    past = time.time() - seconds
    os.utime(path, (past, past))


def _expire_unfinished_records(directory: Path) -> None:
    """A record that its process did not finish says nothing about it: only time tells."""
    for path in directory.glob(".intent-*.tmp"):
        _age(path, HEARTBEAT_EXPIRY_SECONDS + 1)


def _post_dead(directory: Path, save_id: str, rank: int | None = None) -> Path:
    """Put down the intent record of a process that has ended on this machine."""
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait(30)
    return _post(directory, save_id, rank, {"pid": ended.pid})


def _post(directory: Path, save_id: str, rank: int | None = None, changes: Mapping[str, object] = _NOTHING) -> Path:
    """Put down an intent record of this process, but for `changes`."""
    path = directory / intent_name(save_id, rank)
    path.write_text(json.dumps(asdict(Owner.current()) | {"since": 0.0, "rank": rank} | dict(changes)))
    return path


# --- a save alone ------------------------------------------------------------------------------------


def test_a_first_save_has_plain_names_and_leaves_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "step 1"
    assert save(LocalStorage(directory), "one") == ""
    assert whole(directory) == "one"
    assert names(directory) == {".metadata", "_rank0_.safetensors", "_rank0_.bytes", "_rank1_.safetensors"}


@pytest.mark.parametrize("durable", [True, False])
def test_a_save_over_a_checkpoint_of_a_larger_world_leaves_only_the_new_one(tmp_path: Path, durable: bool) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, "old", ranks=8)
    suffix = save(storage, "new", ranks=2, durable=durable)
    assert len(suffix) == 33
    assert whole(tmp_path) == "new"
    assert names(tmp_path) == named(tmp_path)


def test_nothing_is_synced_without_durable_and_the_order_stays(tmp_path: Path) -> None:
    save(LocalStorage(tmp_path), "old")
    orders = []
    for durable in (True, False):
        operations = FaultyOperations()
        storage = LocalStorage(tmp_path, operations)
        opening = begin(storage, os.urandom(16).hex(), rank=None, files_of=files_of)
        written: list[str] = []
        expected = write_files(LocalStorage(tmp_path), "new", range(2), opening.suffix, written)
        operations.log.clear()
        content = json.dumps({"tag": "new", "files": sorted(expected)}).encode()
        commit(storage, opening, content, expected, files_of=files_of, durable=durable)
        orders.append([record.operation for record in operations.log])
    durable_order, quick_order = orders
    assert "fsync" not in quick_order
    assert "fsync_directory" not in quick_order
    assert [operation for operation in durable_order if not operation.startswith("fsync")] == quick_order
    rename, first_unlink = durable_order.index("rename"), durable_order.index("unlink")
    assert "fsync" in durable_order[:rename]
    assert "fsync_directory" in durable_order[:rename]
    assert "fsync_directory" in durable_order[rename:first_unlink]


def test_a_save_through_a_link_goes_where_the_link_led_when_it_began(tmp_path: Path) -> None:
    for name in ("step_1", "step_2"):
        (tmp_path / name).mkdir()
    link = tmp_path / "latest"
    link.symlink_to("step_1")

    def turn() -> None:
        link.unlink()
        link.symlink_to("step_2")

    save(LocalStorage(link), "one", before_commit=turn)
    assert whole(tmp_path / "step_1") == "one"
    assert names(tmp_path / "step_2") == set()


def test_a_missing_or_short_file_stops_the_commit_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, "old")
    opening = begin(storage, ID_A, rank=None, files_of=files_of)
    written: list[str] = []
    expected = write_files(storage, "new", range(2), opening.suffix, written)
    (tmp_path / written[0]).unlink()
    os.truncate(tmp_path / written[2], 3)
    with pytest.raises(IncompleteError) as caught:
        commit(storage, opening, b"{}", expected, files_of=files_of)
    assert f"{written[0]!r} is missing" in str(caught.value)
    assert f"{written[2]!r} has 3 bytes, expected {expected[written[2]]}" in str(caught.value)
    abort(storage, opening, written, files_of=files_of)
    assert whole(tmp_path) == "old"
    assert names(tmp_path) == named(tmp_path)


@pytest.mark.parametrize("bad", ["", "A" * 32, "a" * 31, "../" + "a" * 29])
def test_a_save_id_is_32_hex_digits(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ArgumentError, match="32 lower-case hex digits"):
        begin(LocalStorage(tmp_path), bad, rank=None, files_of=files_of)
    assert names(tmp_path) == set()


def test_an_opening_has_the_suffix_of_its_own_save() -> None:
    with pytest.raises(ArgumentError, match="does not belong"):
        Opening(ID_A, f".{ID_B}")


# --- killed at every operation -----------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("rank", [None, 0], ids=["all ranks", "a rank alone"])
def test_killed_at_any_operation_the_old_or_the_new_checkpoint_is_whole(memory_path: Path, rank: int | None) -> None:
    start = memory_path / "start"
    save(LocalStorage(start), "old", rank=rank)
    steps = _count(start, rank=rank)
    seen = []
    for number in range(1, len(steps) + 1):
        directory = memory_path / f"killed at {number}"
        shutil.copytree(start, directory)
        assert _run(directory, "new", rank=rank, kill_at=number) == -signal.SIGKILL
        seen.append(whole(directory, _metadata_name(rank)))
        _expire_unfinished_records(directory)
        save(LocalStorage(directory), "next", rank=rank)
        assert whole(directory, _metadata_name(rank)) == "next"
        assert names(directory) == named(directory, _metadata_name(rank)), steps[number - 1]
    switch = next(i for i, step in enumerate(steps) if (step.operation, step.name) == ("rename", _metadata_name(rank)))
    assert seen == ["old"] * (switch + 1) + ["new"] * (len(steps) - switch - 1)


@pytest.mark.faults
def test_killed_within_a_write_the_old_checkpoint_is_whole(memory_path: Path) -> None:
    start = memory_path / "start"
    save(LocalStorage(start), "old")
    steps = _count(start, max_io_bytes=16)
    numbers = [step.number for step in steps if step.operation == "pwritev"]
    for number in numbers[::4]:
        directory = memory_path / f"killed at {number}"
        shutil.copytree(start, directory)
        assert _run(directory, "new", kill_at=number, torn="16") == -signal.SIGKILL
        assert whole(directory) == "old"
        _expire_unfinished_records(directory)
        save(LocalStorage(directory), "next")
        assert names(directory) == named(directory)


@pytest.mark.faults
def test_a_first_save_killed_at_any_operation_leaves_no_checkpoint_or_a_whole_one(memory_path: Path) -> None:
    operations = FaultyOperations()
    save(LocalStorage(memory_path / "trial" / "step", operations), "trial")
    for number in range(1, len(operations.log) + 1, 2):
        directory = memory_path / f"killed at {number}" / "step"
        assert _run(directory, "new", kill_at=number) == -signal.SIGKILL
        if (directory / ".metadata").exists():
            assert whole(directory) == "new"
        if directory.exists():
            _expire_unfinished_records(directory)
        save(LocalStorage(directory), "next")
        assert names(directory) == named(directory)


# --- an error at every operation ---------------------------------------------------------------------


def _check_message(error: StorageError, error_number: int, directory: Path) -> None:
    assert error.errno == error_number
    assert str(directory) in str(error)
    assert errno.errorcode[error_number] in str(error)


@pytest.mark.faults
@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EACCES, errno.EIO], ids=lambda n: errno.errorcode[n])
@pytest.mark.parametrize("rank", [None, 1], ids=["all ranks", "a rank alone"])
def test_whatever_operation_fails_the_old_checkpoint_stays_and_a_retry_succeeds(
    memory_path: Path, rank: int | None, error_number: int
) -> None:
    start = memory_path / "start"
    save(LocalStorage(start), "old", rank=rank)
    before = names(start)
    metadata_name = _metadata_name(rank)
    outcomes = []
    for step in _count(start, rank=rank):
        directory = memory_path / str(step.number)
        shutil.copytree(start, directory)
        operations = FaultyOperations(fail_at=step.number, error_number=error_number)
        try:
            save(LocalStorage(directory, operations), "new", rank=rank)
        except StorageError as error:
            _check_message(error, error_number, directory)
            assert whole(directory, metadata_name) == "old", step
            assert names(directory) == before, step
            outcomes.append("old")
        else:
            assert whole(directory, metadata_name) == ("new"), step
            outcomes.append("new")
        save(LocalStorage(directory, operations), "again", rank=rank)
        assert whole(directory, metadata_name) == "again", step
        assert names(directory) == named(directory, metadata_name), step
    assert outcomes.count("old") > 15
    assert outcomes[-1] == "new"


@pytest.mark.faults
def test_from_any_operation_on_all_fail_and_the_old_checkpoint_stays(memory_path: Path) -> None:
    start = memory_path / "start"
    save(LocalStorage(start), "old")
    for step in _count(start):
        directory = memory_path / str(step.number)
        shutil.copytree(start, directory)
        operations = FaultyOperations(fail_at=step.number, error_number=errno.EROFS, forever=True)
        try:
            save(LocalStorage(directory, operations), "new")
        except StorageError:
            assert whole(directory) == "old", step
        else:
            assert whole(directory) == "new", step
        save(LocalStorage(directory), "again")
        assert whole(directory) == "again", step
        for record in directory.glob(".intent-*"):  # unfinished ones too: this process lives: only the heartbeat tells
            _age(record, HEARTBEAT_EXPIRY_SECONDS + 1)
        save(LocalStorage(directory), "at last")
        assert whole(directory) == "at last", step
        assert names(directory) == named(directory), step


def test_an_interrupt_right_after_the_rename_loses_nothing(tmp_path: Path) -> None:
    class Interrupted(FileOperations):
        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            if target.endswith("/.metadata"):
                raise KeyboardInterrupt

    save(LocalStorage(tmp_path), "old")
    with pytest.raises(KeyboardInterrupt):
        save(LocalStorage(tmp_path, Interrupted()), "new")
    assert whole(tmp_path) == "new"


def test_a_failing_sync_after_the_rename_keeps_the_replaced_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(LocalStorage(tmp_path), "old")
    old = named(tmp_path)
    syncs = _count_names(tmp_path, "fsync_directory")
    operations = FaultyOperations(fail_at=len(syncs), operations=["fsync_directory"])
    with caplog.at_level(logging.ERROR, "dcp"):
        save(LocalStorage(tmp_path, operations), "new")
    assert "is committed, but what it replaced stays" in caplog.text
    assert whole(tmp_path) == "new"
    assert old <= names(tmp_path)


def _count_names(directory: Path, operation: str) -> list[OperationRecord]:
    trial = directory.with_name("trial of " + directory.name)
    shutil.copytree(directory, trial)
    operations = FaultyOperations(operations=[operation])
    save(LocalStorage(trial, operations), "trial")
    return operations.log


def test_a_directory_that_disappears_is_an_error_that_says_so(tmp_path: Path) -> None:
    directory = tmp_path / "step"
    storage = LocalStorage(directory)
    with pytest.raises(IncompleteError, match="the directory was removed"):
        save(storage, "one", before_commit=lambda: shutil.rmtree(directory))
    opening = begin(storage, ID_A, rank=None, files_of=files_of)
    shutil.rmtree(directory)
    with pytest.raises(StorageError, match="the directory is gone, or is not on a file system") as caught:
        write_files(storage, "one", [0], opening.suffix, [])
    assert caught.value.errno == errno.ENOENT
    abort(storage, opening, ["_rank0_.safetensors"], files_of=files_of)
    save(storage, "two")
    assert whole(directory) == "two"


def test_an_abort_with_the_opening_removes_the_files_of_dead_ranks_too(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, "old")
    before = names(tmp_path)
    opening = begin(storage, ID_A, rank=None, files_of=files_of)
    write_files(storage, "new", range(4), opening.suffix, [])
    abort(storage, opening, [], files_of=files_of)
    assert names(tmp_path) == before


def test_an_abort_without_the_opening_removes_own_files_only(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    opening = begin(storage, ID_A, rank=None, files_of=files_of)
    write_files(storage, "new", range(2), opening.suffix, [])
    abort(storage, None, ["_rank1_.safetensors"], files_of=files_of)
    assert names(tmp_path) == {opening.intent_name, "_rank0_.safetensors", "_rank0_.bytes"}


def test_an_abort_never_removes_what_the_metadata_names(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, "old")
    abort(storage, None, ["_rank1_.safetensors"], files_of=files_of)
    assert whole(tmp_path) == "old"


# --- two jobs in one directory -----------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("over_a_checkpoint", [False, True])
def test_a_whole_save_of_another_job_at_any_operation(memory_path: Path, over_a_checkpoint: bool) -> None:
    start = memory_path / "start"
    start.mkdir()
    if over_a_checkpoint:
        save(LocalStorage(start), "old")
    for step in _count(start):
        directory = memory_path / str(step.number)
        shutil.copytree(start, directory)

        def save_another(record: OperationRecord, number: int = step.number, path: Path = directory) -> None:
            if record.number == number:
                save(LocalStorage(path), "another", ranks=3)

        save(LocalStorage(directory, FaultyOperations(before=save_another)), "one")
        assert whole(directory) in ("one", "another"), step
        save(LocalStorage(directory), "next")
        assert names(directory) == named(directory), step


class _Stepper:
    """Runs jobs in threads, one operation at a time, in an order drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._arrived = threading.Semaphore(0)
        self._gates: dict[str, threading.Semaphore] = {}
        self._threads: list[threading.Thread] = []
        self.errors: dict[str, BaseException] = {}

    def add(self, job: str, directory: Path, rank: int | None = None) -> None:
        """Add a save of this tag."""
        gate = self._gates[job] = threading.Semaphore(0)

        def pause() -> None:
            self._arrived.release()
            gate.acquire()

        def work() -> None:
            try:
                pause()
                save(LocalStorage(directory, _SteppedOperations(pause)), job, rank=rank)
            except BaseException as error:
                self.errors[job] = error
            del self._gates[job]
            self._arrived.release()

        self._threads.append(threading.Thread(target=work, daemon=True))

    def run(self, check: Callable[[], None]) -> None:
        for thread in self._threads:
            thread.start()
            self._arrived.acquire()
        while self._gates:
            self._gates[self._random.choice(sorted(self._gates))].release()
            self._arrived.acquire()
            check()
        for thread in self._threads:
            thread.join(10)


class _SteppedOperations(FileOperations):
    """Waits for its turn before each operation that other jobs can see or that sees them."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause

    def perform(self, operation: str, path: str, action: Callable[[], object]) -> object:  # type: ignore[override]  # passes on
        if operation not in ("preallocate", "fsync", "fsync_directory", "close_written"):
            self._pause()
        return action()

    def listdir(self, path: str) -> list[str]:
        self._pause()
        return super().listdir(path)

    def open_read(self, path: str) -> int:
        self._pause()
        return super().open_read(path)

    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        self._pause()
        return super().stat(path, follow_symlinks=follow_symlinks)


@pytest.mark.faults
@pytest.mark.parametrize("first_seed", range(0, 120, 20))
def test_jobs_interleaved_in_any_order_leave_one_of_them_whole_at_every_step(
    memory_path: Path, first_seed: int
) -> None:
    for seed in range(first_seed, first_seed + 20):
        directory = memory_path / str(seed)
        directory.mkdir()
        has_checkpoint = seed % 3 != 0
        if has_checkpoint:
            save(LocalStorage(directory), "old")
        if seed % 5 == 0:  # what a dead save left behind tempts the jobs to clean up at the same time
            _post_dead(directory, ID_A)
            for name in (f"_rank0_.{ID_A}.safetensors", f"_rank5_.{ID_B}.safetensors", "_rank7_.safetensors"):
                (directory / name).write_bytes(b"dead")
        stepper = _Stepper(seed)
        for job in ("one", "two", "three")[: 2 + seed % 2]:
            stepper.add(job, directory)

        def check(directory: Path = directory, is_there: bool = has_checkpoint) -> None:
            if is_there or (directory / ".metadata").exists():
                whole(directory)

        stepper.run(check)
        assert stepper.errors == {}, seed
        assert whole(directory) in ("one", "two", "three"), seed
        save(LocalStorage(directory), "next")
        assert names(directory) == named(directory), seed


@pytest.mark.faults
@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_ranks_alone_interleaved_keep_each_others_files(memory_path: Path, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        directory = memory_path / str(seed)
        directory.mkdir()
        if seed % 2:
            for rank in range(3):
                save(LocalStorage(directory), "old", rank=rank)
        stepper = _Stepper(seed)
        for rank in range(3):
            stepper.add(f"rank {rank}", directory, rank)

        def check(directory: Path = directory, is_there: bool = seed % 2 == 1) -> None:
            for rank in range(3):
                if is_there or (directory / f"{rank}.metadata").exists():
                    whole(directory, f"{rank}.metadata")

        stepper.run(check)
        assert stepper.errors == {}, seed
        assert names(directory) == set().union(*(named(directory, f"{rank}.metadata") for rank in range(3))), seed
        assert [whole(directory, f"{rank}.metadata") for rank in range(3)] == ["rank 0", "rank 1", "rank 2"]
        if seed % 2 == 0:
            assert "_rank2_.safetensors" in names(directory)


@pytest.mark.faults
def test_two_real_processes_saving_at_once_leave_one_of_them_whole(memory_path: Path) -> None:
    for number in range(6):
        directory = memory_path / str(number)
        if number % 2:
            save(LocalStorage(directory), "old")
        command = [sys.executable, "-m", "tests.core.commit_jobs", str(directory)]
        jobs = [subprocess.Popen([*command, tag, "", "", "3"], cwd=_REPOSITORY) for tag in ("one", "two")]
        assert [job.wait(60) for job in jobs] == [0, 0]
        assert whole(directory) in ("one", "two")
        save(LocalStorage(directory), "next")
        assert names(directory) == named(directory)


def test_a_save_that_sees_another_one_does_not_take_plain_names(tmp_path: Path) -> None:
    first = begin(LocalStorage(tmp_path), ID_A, rank=None, files_of=files_of)
    second = begin(LocalStorage(tmp_path), ID_B, rank=None, files_of=files_of)
    assert (first.suffix, second.suffix) == ("", f".{ID_B}")


# --- left-overs --------------------------------------------------------------------------------------


def _leave(directory: Path, save_id: str) -> set[str]:
    made = {f"_rank0_.{save_id}.safetensors", f"_rank3_1_.{save_id}.bytes", f".metadata.{save_id}.tmp"}
    for name in made:
        (directory / name).write_bytes(b"unfinished")
    return made


@pytest.mark.parametrize("when", ["at the beginning", "after the commit"])
def test_what_a_dead_save_left_goes(tmp_path: Path, when: str) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, "old")

    def die() -> None:
        record = _post_dead(tmp_path, ID_A)
        left = _leave(tmp_path, ID_A)
        mailbox = tmp_path / f".mailbox-{ID_A}"
        (mailbox / "inner").mkdir(parents=True)
        (mailbox / "inner" / "message").write_bytes(b"x")
        _age(mailbox, HEARTBEAT_EXPIRY_SECONDS + 1)
        assert left | {record.name, mailbox.name} <= names(tmp_path)

    if when == "at the beginning":
        die()
    save(storage, "new", before_commit=die if when == "after the commit" else lambda: None)
    assert whole(tmp_path) == "new"
    assert names(tmp_path) == named(tmp_path)


def test_what_a_save_without_a_record_left_goes(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, "old")
    left = _leave(tmp_path, ID_A) | {"_rank9_.safetensors"}
    (tmp_path / "_rank9_.safetensors").write_bytes(b"plain, and named by nobody")
    opening = begin(storage, ID_B, rank=None, files_of=files_of)
    assert not left & names(tmp_path)
    assert opening.suffix == f".{ID_B}"
    assert whole(tmp_path) == "old"


def test_files_of_live_saves_stay(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, "old")
    record = _post(tmp_path, ID_A)
    left = _leave(tmp_path, ID_A) | {"_rank9_.safetensors", f".mailbox-{ID_A}"}
    (tmp_path / "_rank9_.safetensors").write_bytes(b"plain: it may be the live save's")
    (tmp_path / f".mailbox-{ID_A}").mkdir()
    _age(tmp_path / f".mailbox-{ID_A}", HEARTBEAT_EXPIRY_SECONDS + 1)
    save(storage, "new")
    assert names(tmp_path) == named(tmp_path) | left | {record.name}
    record.unlink()
    save(storage, "newer")
    assert names(tmp_path) == named(tmp_path)


_HERE = Owner.current()


@pytest.mark.parametrize(
    ("age_seconds", "changes", "is_dead"),
    [
        (0, {}, False),
        (HEARTBEAT_EXPIRY_SECONDS - 60, {}, False),
        (HEARTBEAT_EXPIRY_SECONDS + 1, {}, True),
        (0, {"started": _HERE.started + 1}, True),
        (0, {"pid": 2**22 + 5}, True),
        (0, {"host": "elsewhere", "pid": 2**22 + 5}, False),
        (0, {"boot": "another run of this machine", "pid": 2**22 + 5}, False),
        (0, {"namespace": "pid:[1]", "pid": 2**22 + 5}, False),
        (HEARTBEAT_EXPIRY_SECONDS + 1, {"host": "elsewhere"}, True),
        (0, {"pid": -1}, False),
        (0, {"pid": "many"}, False),
        (0, {"pid": 10**40}, False),
    ],
)
def test_a_save_is_dead_when_its_process_is_gone_here_or_its_heartbeat_expired(
    tmp_path: Path, age_seconds: float, changes: dict[str, object], is_dead: bool
) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, "old")
    record = _post(tmp_path, ID_A, changes=changes)
    _age(record, age_seconds)
    left = _leave(tmp_path, ID_A)
    begin(storage, ID_B, rank=None, files_of=files_of)
    assert (not left & names(tmp_path), not record.exists()) == (is_dead, is_dead)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b"x" * 70_000, b'{"host": 1}'])
def test_a_broken_record_counts_as_alive_until_it_expires(tmp_path: Path, content: bytes) -> None:
    storage = LocalStorage(tmp_path)
    record = tmp_path / intent_name(ID_A, None)
    record.write_bytes(content)
    left = _leave(tmp_path, ID_A)
    opening = begin(storage, ID_B, rank=None, files_of=files_of)
    assert left <= names(tmp_path)
    abort(storage, opening, [], files_of=files_of)
    _age(record, HEARTBEAT_EXPIRY_SECONDS + 1)
    begin(storage, ID_B, rank=None, files_of=files_of)
    assert names(tmp_path) == {intent_name(ID_B, None)}


def test_a_process_that_was_not_waited_for_counts_as_gone(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = int(Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19])
        record = _post(tmp_path, ID_A, changes={"pid": sleeper.pid, "started": started})
        first = begin(storage, ID_B, rank=None, files_of=files_of)
        assert record.exists()
        abort(storage, first, [], files_of=files_of)
        sleeper.kill()
        while Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        begin(storage, ID_B, rank=None, files_of=files_of)
        assert not record.exists()
    finally:
        sleeper.kill()
        sleeper.wait(30)


def test_a_save_that_was_taken_for_dead_does_not_commit(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, "old")

    def sleep_and_lose() -> None:
        (record,) = tmp_path.glob(".intent-*")
        _age(record, HEARTBEAT_EXPIRY_SECONDS + 1)
        save(LocalStorage(tmp_path), "another")

    with pytest.raises(IncompleteError, match="another one cleaned up after it"):
        save(storage, "slow", before_commit=sleep_and_lose)
    assert whole(tmp_path) == "another"
    assert names(tmp_path) == named(tmp_path)


@pytest.mark.parametrize("operation", ["create", "fsync"])
def test_a_save_that_stalls_at_its_description_and_is_taken_for_dead_does_not_commit(
    tmp_path: Path, operation: str
) -> None:
    save(LocalStorage(tmp_path), "old")

    def stall(record: OperationRecord) -> None:
        if record.operation == operation and record.name.startswith(".metadata."):
            (own,) = tmp_path.glob(".intent-*")
            _age(own, HEARTBEAT_EXPIRY_SECONDS + 1)
            save(LocalStorage(tmp_path), "another")

    with pytest.raises(IncompleteError, match=r"another one cleaned up after it|is missing"):
        save(LocalStorage(tmp_path, FaultyOperations(before=stall)), "slow")
    assert whole(tmp_path) == "another"
    assert names(tmp_path) == named(tmp_path)


def test_files_of_strangers_stay(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    strangers = {"README.md", "_rank0_.txt", "_rank01_.safetensors", "model.safetensors", ".intent-x", ".mailbox-x"}
    for name in strangers:
        (tmp_path / name).write_bytes(b"mine")
        _age(tmp_path / name, 10 * HEARTBEAT_EXPIRY_SECONDS)
    save(storage, "old")
    save(storage, "new")
    assert names(tmp_path) == named(tmp_path) | strangers


@pytest.mark.parametrize("content", [b"\x80\x04pickle", b'{"files": 3}', b"{}", b""])
def test_files_of_an_unreadable_old_checkpoint_stay_for_the_save_that_replaces_it(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    left = {f"_rank0_.{ID_A}.safetensors", "_rank0_.safetensors"}
    for name in left:
        (tmp_path / name).write_bytes(b"whose?")
    save(storage, "new")
    assert whole(tmp_path) == "new"
    assert names(tmp_path) == named(tmp_path) | left
    assert "cannot be read, so what it names stays" in caplog.text


def test_a_failed_save_over_an_unreadable_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04pickle")
    operations = FaultyOperations(fail_at=1, operations=["rename"], name_pattern=".metadata")
    with pytest.raises(StorageError):
        save(LocalStorage(tmp_path, operations), "new")
    assert names(tmp_path) == {".metadata"}


def test_a_metadata_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / ".metadata", "wb") as file:
        file.truncate(2**40)
    (tmp_path / "_rank0_.safetensors").write_bytes(b"whose?")
    save(LocalStorage(tmp_path), "new")
    assert whole(tmp_path) == "new"


def test_a_hostile_old_checkpoint_cannot_name_what_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / "step"
    directory.mkdir()
    (tmp_path / "outside").write_bytes(b"mine")
    (directory / "README.md").write_bytes(b"mine")
    live = _post(directory, ID_A)
    left = _leave(directory, ID_A)
    hostile = ["../outside", "README.md", "/etc/passwd", live.name, ".metadata", *sorted(left), "", ".."]
    (directory / ".metadata").write_text(json.dumps({"tag": "old", "files": hostile}))
    save(LocalStorage(directory), "new")
    assert whole(directory) == "new"
    assert names(directory) == named(directory) | left | {live.name, "README.md"}
    assert (tmp_path / "outside").exists()


def test_left_overs_that_cannot_be_removed_do_not_stop_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, "old")
    (tmp_path / f"_rank0_.{ID_A}.safetensors").mkdir()
    _post_dead(tmp_path, ID_A)
    save(storage, "new")
    assert whole(tmp_path) == "new"
    assert f"could not remove '_rank0_.{ID_A}.safetensors'" in caplog.text


# --- ranks that save alone ---------------------------------------------------------------------------


def test_ranks_alone_have_plain_names_whatever_other_ranks_did(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for rank in (0, 10, 1):
        assert save(storage, f"rank {rank}", rank=rank) == ""
    assert [whole(tmp_path, f"{rank}.metadata") for rank in (0, 1, 10)] == ["rank 0", "rank 1", "rank 10"]
    suffix = save(storage, "again", rank=1)
    assert suffix != ""
    assert whole(tmp_path, "1.metadata") == "again"
    assert whole(tmp_path, "10.metadata") == "rank 10"
    assert "_rank1_.safetensors" not in names(tmp_path)
    assert f"_rank1_{suffix}.safetensors" in names(tmp_path)


def test_a_rank_alone_may_not_save_where_a_whole_job_did(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, "all")
    before = names(tmp_path)
    with pytest.raises(ArgumentError, match="rank 1: use_collectives=False cannot save into"):
        save(storage, "alone", rank=1)
    assert names(tmp_path) == before


def test_a_rank_alone_notices_at_its_commit_that_a_whole_job_committed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with pytest.raises(ArgumentError, match="use_collectives=False"):
        save(storage, "alone", rank=1, before_commit=lambda: save(storage, "all"))
    assert whole(tmp_path) == "all"
    assert names(tmp_path) == named(tmp_path)


def test_a_save_of_all_ranks_removes_what_ranks_saved_alone(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for rank in range(3):
        save(storage, "alone", rank=rank)
    (tmp_path / "7.metadata").write_bytes(b"unreadable")
    assert save(storage, "all") != ""
    assert whole(tmp_path) == "all"
    assert names(tmp_path) == named(tmp_path)


def test_a_save_of_all_ranks_that_fails_keeps_what_ranks_saved_alone(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for rank in range(3):
        save(storage, "alone", rank=rank)
    before = names(tmp_path)
    operations = FaultyOperations(fail_at=1, operations=["rename"], name_pattern=".metadata")
    with pytest.raises(StorageError):
        save(LocalStorage(tmp_path, operations), "all")
    assert names(tmp_path) == before
    assert [whole(tmp_path, f"{rank}.metadata") for rank in range(3)] == ["alone"] * 3


def test_a_rank_alone_looks_at_its_own_left_overs_only(tmp_path: Path) -> None:
    mine, others = f"_rank1_.{ID_A}.safetensors", f"_rank2_.{ID_A}.safetensors"
    for name in (mine, others):
        (tmp_path / name).write_bytes(b"dead")
    save(LocalStorage(tmp_path), "alone", rank=1)
    assert mine not in names(tmp_path)
    assert others in names(tmp_path)


def test_a_rank_alone_beside_a_save_of_all_ranks_does_not_take_plain_names(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    begin(storage, ID_A, rank=None, files_of=files_of)
    assert begin(storage, ID_B, rank=4, files_of=files_of).suffix == f".{ID_B}"
    assert begin(storage, "c" * 32, rank=5, files_of=files_of).suffix == f".{'c' * 32}"


# --- the record and its heartbeat --------------------------------------------------------------------


def test_the_record_says_who_is_saving(tmp_path: Path) -> None:
    post_intent(LocalStorage(tmp_path), ID_A, 3)
    fields = json.loads((tmp_path / f".intent-{ID_A}-3").read_text())
    assert (fields["host"], fields["pid"], fields["rank"]) == (socket.gethostname(), os.getpid(), 3)
    assert abs(fields["since"] - time.time()) < 60
    assert parse_intent_name(f".intent-{ID_A}-3") == (ID_A, 3)
    assert parse_intent_name(f".intent-{ID_A}.tmp") is None


def test_the_heartbeat_keeps_the_record_fresh_and_stops_at_once(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    opening = begin(storage, ID_A, rank=None, files_of=files_of)
    record = tmp_path / opening.intent_name
    _age(record, 600)
    with heartbeat(storage, opening, interval_seconds=0.01):
        deadline = time.monotonic() + 10
        while time.time() - record.stat().st_mtime > 300:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    before = time.monotonic()
    with heartbeat(storage, opening):
        threads = set(threading.enumerate())
    assert time.monotonic() - before < 5
    assert len(threads - set(threading.enumerate())) == 1


def test_a_heartbeat_without_its_record_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = LocalStorage(tmp_path)
    with heartbeat(storage, Opening(ID_A, ""), interval_seconds=0.01):
        deadline = time.monotonic() + 10
        while "no heartbeat" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    with pytest.raises(NotFoundError):
        storage.touch(intent_name(ID_A, None))


def test_the_known_content_of_the_tests_differs_between_saves_and_ranks() -> None:
    made = {content_of(tag, f"_rank{rank}_.bytes") for tag in ("old", "new", "next") for rank in range(3)}
    assert len(made) == 9
