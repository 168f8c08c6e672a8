"""Logs of background processes: an empty one that nobody holds any more goes, all others stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_core.background.launch import ProcessLog, remove_left_logs
from dcp_core.background.process import BackgroundProcess
from dcp_core.errors import RankFailedError
from tests.background_processes import children_of

pytestmark = pytest.mark.timeout(60)

TRAINER = """
import sys, time
from dcp_core.background.process import BackgroundProcess
process = BackgroundProcess()
process.request({"do": "nothing that is known"}).exception(50)
print(process.pid, flush=True)
time.sleep(100)
"""


def age(path: Path) -> None:
    os.utime(path, (time.time() - 3600, time.time() - 3600))


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DCP_BACKGROUND_LOG_DIR", str(tmp_path / "logs"))
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


@pytest.fixture
def trainer(logs: Path) -> Iterator[tuple[int, int]]:
    """A trainer, and its background process."""
    started = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    try:
        yield started.pid, int(started.stdout.readline())
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


def wait_for_end(pid: int) -> None:
    """Wait until no thread of a process is left that could hold a file, be it that nobody has asked how it ended."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "ZX" and os.listdir(f"/proc/{pid}/task") == [str(pid)]:
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.01)


def test_the_log_of_a_process_that_was_killed_with_its_trainer_goes_at_the_next_start(
    logs: Path, trainer: tuple[int, int]
) -> None:
    (left,) = logs.iterdir()
    age(left)
    remove_left_logs(str(logs))
    assert list(logs.iterdir()) == [left], "whoever lives keeps its log"
    os.kill(trainer[0], signal.SIGSTOP)  # it must not see the death of the other, and remove the log itself
    for pid in (trainer[1], trainer[0]):
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
    assert list(logs.iterdir()) == [left]
    log = ProcessLog()
    assert list(logs.iterdir()) == [Path(log.path)]
    log.remove()
    log.close()


def test_the_log_of_a_process_that_outlives_its_trainer_stays(logs: Path, trainer: tuple[int, int]) -> None:
    (left,) = logs.iterdir()
    age(left)
    os.kill(trainer[1], signal.SIGSTOP)
    os.kill(trainer[0], signal.SIGKILL)
    wait_for_end(trainer[0])
    try:
        remove_left_logs(str(logs))
        assert list(logs.iterdir()) == [left]
    finally:
        os.kill(trainer[1], signal.SIGKILL)
    wait_for_end(trainer[1])
    remove_left_logs(str(logs))
    assert list(logs.iterdir()) == []


def test_what_is_no_empty_old_log_of_this_user_stays(logs: Path) -> None:
    words, young, other, directory = (
        logs / "dcp-background-1-words.log", logs / "dcp-background-1-young.log", logs / "dcp-1-.log",
        logs / "dcp-background-1-directory.log",
    )  # fmt: skip
    words.write_text("Traceback")
    young.touch()
    other.touch()
    directory.mkdir()
    aside = logs.parent / "aside"
    aside.touch()
    link = logs / "dcp-background-1-link.log"
    link.symlink_to(aside)
    pipe = logs / "dcp-background-1-pipe.log"
    os.mkfifo(pipe)
    there = set(logs.iterdir())
    for path in there - {young, link}:
        age(path)
    age(aside)
    remove_left_logs(str(logs))
    assert set(logs.iterdir()) == there
    assert aside.exists()
    age(young)
    remove_left_logs(str(logs))
    assert set(logs.iterdir()) == there - {young}
    remove_left_logs(str(logs / "nowhere"))


def test_last_words_are_in_the_error_and_their_log_stays(logs: Path) -> None:
    process = BackgroundProcess(handler="dcp_core.no_such_module:Handler")
    error = process.request({"do": "anything"}).exception(50)
    assert isinstance(error, RankFailedError)
    (log,) = logs.iterdir()
    assert "no_such_module" in str(error)
    assert f"(whole log: {log})" in str(error)
    age(log)
    remove_left_logs(str(logs))
    assert list(logs.iterdir()) == [log]


def test_a_process_that_ends_well_leaves_nothing(logs: Path) -> None:
    process = BackgroundProcess()
    assert process.close(50) == 0
    assert list(logs.iterdir()) == []
    assert process.pid not in children_of(os.getpid())
