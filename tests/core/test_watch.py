"""Who waits for a background process waits as long as that does anything, and not much longer.

Time passes only while the watch waits, and the process, a real one, may take all it needs to answer meanwhile.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.background import carriers, steps
from dcp_core.background.process import BackgroundProcess
from dcp_core.background.service import service
from dcp_core.background.steps import Watch, within
from dcp_core.errors import CoordinationError, CoordinationTimeoutError, SaveCancelledError
from dcp_core.execution.write_stream import CALL_BYTES
from tests.background_processes import check_none_left, end_own, is_running, mark, wait_until
from tests.core.async_jobs import RESULT_SECONDS, checkpoint_directory
from tests.core.async_writers import Gate, GatedWriter
from tests.core.background_handler import PLODDING, REPOSITORY

pytestmark = pytest.mark.timeout(120)

_LIMIT_SECONDS = 40.0
_ANSWER_SECONDS = 60.0


class Clock:
    """What takes the place of the time and of waiting: each wait lasts until what was asked before is answered.

    Attributes:
        now: The time.
        answers: Whether the process answers.
    """

    def __init__(self, process: BackgroundProcess) -> None:
        self.now = 0.0
        self.answers = True
        self._asked: list[Future[Any]] = []
        self._request = process.request
        process.request = self.request  # type: ignore[method-assign]

    def request(self, message: Any, descriptors: Sequence[int] = ()) -> Future[Any]:
        answer = self._request(message, descriptors)
        if message["do"] == "progress":
            self._asked.append(answer)
        return answer

    def monotonic(self) -> float:
        return self.now

    def wait(self, futures: Sequence[Future[Any]], seconds: float) -> Any:
        if self.answers and self._asked:
            self._asked.pop().exception(_ANSWER_SECONDS)
        done = wait(futures, 0.0)
        if not done.done:
            self.now += seconds
        return done


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundProcess]:
    mark()
    monkeypatch.setenv("DCP_BACKGROUND_LOG_DIR", str(tmp_path_factory.mktemp("logs")))
    one = BackgroundProcess([REPOSITORY], handler=PLODDING)
    one.request({"do": "echo", "value": 1}).result(_ANSWER_SECONDS)
    yield one
    if one.is_alive:
        one.close(_ANSWER_SECONDS)
    check_none_left()


@pytest.fixture
def clock(process: BackgroundProcess, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(process)
    monkeypatch.setattr(steps, "time", made)
    monkeypatch.setattr(steps, "wait", made.wait)
    return made


def _watch(process: BackgroundProcess, work: int, *, hangs: bool) -> Any:
    answer = process.request({"do": "plod", "steps": work, "hangs": hangs})
    return Watch(process, 3, _LIMIT_SECONDS).wait(answer)


def test_a_process_that_goes_on_is_waited_for_however_long_it_takes(process: BackgroundProcess, clock: Clock) -> None:
    assert _watch(process, 50, hangs=False) == {"steps": 50}
    assert clock.now > 4 * _LIMIT_SECONDS
    assert process.is_alive


@pytest.mark.parametrize("work", [0, 30])
def test_a_process_that_hangs_is_ended_once_it_has_done_nothing_for_so_long(
    process: BackgroundProcess, clock: Clock, work: int
) -> None:
    with pytest.raises(CoordinationTimeoutError, match="of rank 3 has done nothing for 40 s while plodding"):
        _watch(process, work, hangs=True)
    worked = 5.0 * work
    assert worked + _LIMIT_SECONDS <= clock.now <= worked + 2.5 * _LIMIT_SECONDS
    wait_until(lambda: not is_running(process.pid), "the end of the process")


def test_a_process_that_does_not_answer_is_ended_after_as_long(process: BackgroundProcess, clock: Clock) -> None:
    clock.answers = False
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(CoordinationTimeoutError, match="of rank 3 has not answered for 40 s"):
        _watch(process, 30, hangs=False)
    assert _LIMIT_SECONDS <= clock.now <= 2.5 * _LIMIT_SECONDS
    wait_until(lambda: not is_running(process.pid), "the end of the process")


# -- saves ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path
        end_own()


def _steps() -> int:
    count: int = service().process("light").request({"do": "progress"}).result(_ANSWER_SECONDS)["count"]
    return count


def test_every_piece_of_a_large_array_that_is_written_is_a_step(directory: Path) -> None:
    counts, pieces = [], 20
    for nbytes in (8, pieces * CALL_BYTES):
        place = directory / f"{nbytes}"
        gate = Gate(place).close("after")
        state = {"a": np.zeros(nbytes, np.uint8)}
        response = api.async_save(state, checkpoint_id=place, storage_writer=GatedWriter(), durable=False)
        gate.await_writing(0)
        counts.append(_steps())
        gate.open()
        response.get_result(RESULT_SECONDS)
    assert counts[1] - counts[0] >= pieces


def test_to_cancel_takes_bounded_time_where_the_background_process_is_stopped(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carriers, "_CANCEL_SECONDS", 0.5)
    gate = Gate(directory).close()
    state = {"a": np.zeros(8)}
    response = api.async_save(state, checkpoint_id=directory, storage_writer=GatedWriter(), durable=False)
    [told] = gate.await_writing(0)
    os.kill(told["pid"], signal.SIGSTOP)
    try:
        with pytest.raises(CoordinationTimeoutError, match="was asked to cancel save .* no answer within 0.5 s"):
            response.cancel()
    finally:
        os.kill(told["pid"], signal.SIGCONT)
        gate.open()
    with suppress(SaveCancelledError):  # the process has heard of it now
        response.get_result(RESULT_SECONDS)


def test_who_looks_at_a_storage_that_hangs_looks_for_bounded_time() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(_ANSWER_SECONDS)

    with pytest.raises(CoordinationError, match="too late"):
        within(hang, 0.2, lambda: CoordinationError("too late"))
    release.set()
