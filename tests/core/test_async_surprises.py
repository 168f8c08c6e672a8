"""What a newcomer tried on saves in the background: odd moments, odd paths, a process that does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dcp_core import api
from dcp_core.background.service import service
from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError

pytestmark = pytest.mark.timeout(120)

_AT_EXIT = """
import atexit, sys
import numpy as np
from dcp_core import api
state = {"w": np.ones(20_000_000, np.float32)}
atexit.register(lambda: api.async_save(state, checkpoint_id=sys.argv[1]).get_result(60))
"""

_SHADOWED = """
import sys
from dcp_core import api
import numpy as np
sys.path.insert(0, sys.argv[2])
api.async_save({"w": np.arange(3.0)}, checkpoint_id=sys.argv[1]).get_result(60)
"""


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="newer Pythons start no thread at that point")
def test_a_save_at_the_end_of_the_interpreter_lands(tmp_path: Path) -> None:
    done = _run(_AT_EXIT, str(tmp_path / "step"))
    assert done.returncode == 0, done.stderr
    assert float(api.read(tmp_path / "step", "w")[-1]) == 1.0, done.stderr


@pytest.mark.parametrize("module", ["types", "queue", "socket", "random"])
def test_modules_that_hide_the_standard_library_do_not_reach_the_background_process(
    tmp_path: Path, module: str
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / f"{module}.py").write_text("raise SystemExit('hidden')")
    done = _run(_SHADOWED, str(tmp_path / "step"), str(tmp_path / "src"))
    assert done.returncode == 0, done.stderr


def test_a_callback_cannot_wait_for_its_own_save(tmp_path: Path) -> None:
    heard: list[BaseException] = []

    def wait() -> None:
        while not responses:
            time.sleep(0.001)
        for call in (responses[0].get_result, responses[0].persist_completion.exception, api.wait_all):
            try:
                call()
            except CoordinationError as error:
                heard.append(error)

    responses: list[api.AsyncSaveResponse] = []
    responses.append(api.async_save({"w": np.ones(3)}, checkpoint_id=tmp_path / "step", callback=wait))
    assert responses[0].get_result(60).world_size == 1
    assert ["callback" in str(error) for error in heard] == [True] * 3


def test_a_background_process_that_does_not_answer_is_waited_for_as_long_as_was_asked(tmp_path: Path) -> None:
    api.async_save({"w": np.ones(3)}, checkpoint_id=tmp_path / "before").get_result(60)
    process = service().process("light")
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(CoordinationTimeoutError, match="no answer within 1 s"):
        api.async_save({"w": np.ones(3)}, checkpoint_id=tmp_path / "step", timeout_seconds=1)
    assert process.has_ended_within(60)
    api.async_save({"w": np.ones(3)}, checkpoint_id=tmp_path / "after").get_result(60)
    assert not (tmp_path / "step" / ".metadata").exists()


def test_a_relative_path_without_a_working_directory_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in (api.save, api.async_save):
        with pytest.raises(ArgumentError, match="working directory of this process is gone"):
            call({"w": np.ones(3)}, checkpoint_id="step")
