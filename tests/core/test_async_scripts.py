"""Scripts that end right after `async_save`, however they were started: the checkpoint lands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dcp_core import api
from tests.background_processes import background_processes, wait_until
from tests.core.async_jobs import checkpoint_directory
from tests.core.async_writers import Gate
from tests.core.fault_jobs import checkpoint_names, names_in

pytestmark = pytest.mark.timeout(120)

_ROOT = Path(__file__).parents[2]
_SCRIPT = """
import sys
import numpy as np
from dcp_core import api

state = {"w": np.arange(1000.0), "step": 3}
response = api.async_save(state, checkpoint_id=sys.argv[1])
state["w"][:] = -1
"""
_GATED = (
    _SCRIPT.replace("import sys", f"import sys\nsys.path.append({str(_ROOT)!r})")
    .replace("api.async_save(state,", "api.async_save(state, storage_writer=GatedWriter(),")
    .replace("from dcp_core import api", "from dcp_core import api\nfrom tests.core.async_writers import GatedWriter")
)


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path.parent / "a run of größe 1" / "step ✓ 1"


def _check(directory: Path) -> None:
    assert (api.read(directory, "w") == np.arange(1000.0)).all()
    assert names_in(directory) == checkpoint_names(directory)


def _run(command: list[str], *, script: str | None = None, cwd: Path | None = None, code: int = 0) -> str:
    """Run a script with its output captured, as launchers do; what it printed."""
    done = subprocess.run(
        [sys.executable, *command], input=script, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def _file(directory: Path, text: str) -> Path:
    script = directory.parent.parent / "träin it.py"
    script.write_text(textwrap.dedent(text))
    return script


def test_a_plain_script_without_a_main_guard(directory: Path) -> None:
    assert _run([str(_file(directory, _SCRIPT)), str(directory)]) == ""
    _check(directory)


def test_a_program_on_the_command_line(directory: Path) -> None:
    assert _run(["-c", _SCRIPT, str(directory)]) == ""
    _check(directory)


def test_a_script_from_standard_input(directory: Path) -> None:
    assert _run(["-", str(directory)], script=_SCRIPT) == ""
    _check(directory)


def test_a_module_in_a_package_named_by_m(directory: Path) -> None:
    script = _file(directory, _SCRIPT)
    script.rename(script.with_name("trainit.py"))
    assert _run(["-m", "trainit", str(directory)], cwd=script.parent) == ""
    _check(directory)


def test_a_relative_path_is_of_the_moment_of_the_call(directory: Path) -> None:
    directory.parent.mkdir()
    relative = _SCRIPT + "import os; os.chdir('/')"
    assert _run(["-c", relative, directory.name], cwd=directory.parent) == ""
    _check(directory)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("raise KeyError('the end of the test')", 1, "the end of the test"),
        ("import atexit; atexit.register(lambda: print('at exit'))", 0, "at exit"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(0.3,), daemon=True).start()", 0, ""),
        ("del response; import gc; gc.collect()", 0, ""),
    ],
)
def test_however_a_script_ends_its_checkpoint_lands_and_its_exit_code_stays(
    directory: Path, ending: str, code: int, said: str
) -> None:
    assert said in _run(["-c", _SCRIPT + ending, str(directory)], code=code)
    _check(directory)


_AT_EXIT = """
import atexit, os, threading
from tests.core.async_writers import Gate
gate = Gate(sys.argv[1])
gate.await_writing(0)
atexit.register(lambda: print(os.path.exists(sys.argv[1] + "/.metadata")))
threading.Timer(0.3, gate.open).start()
"""


def test_what_runs_at_the_exit_of_a_script_finds_the_checkpoint(directory: Path) -> None:
    Gate(directory).close()
    assert _run(["-c", _GATED + _AT_EXIT, str(directory)]) == "True\n"
    _check(directory)


def test_a_script_that_ends_without_waiting_leaves_its_output_to_others_and_its_checkpoint_lands(
    directory: Path,
) -> None:
    gate = Gate(directory).close()
    _run(["-c", _GATED + "import os; os._exit(0)", str(directory)])  # returns: nobody else holds the pipes
    gate.await_writing(0)
    assert ".metadata" not in names_in(directory)
    gate.open()
    wait_until(lambda: not background_processes(), "the end of the background process")
    _check(directory)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_signals_to_the_process_group_of_the_script_do_not_reach_the_save(directory: Path, number: int) -> None:
    gate = Gate(directory).close()
    waiting = _GATED + "import time; time.sleep(50)"
    with subprocess.Popen(
        [sys.executable, "-c", waiting, str(directory)], stderr=subprocess.DEVNULL, start_new_session=True
    ) as script:
        gate.await_writing(0)
        os.killpg(script.pid, number)
        gate.open()
        assert script.wait(30) != 0
    wait_until(lambda: not background_processes(), "the end of the background process")
    _check(directory)


def test_a_failure_that_the_script_never_asked_for_is_said_at_its_end(directory: Path) -> None:
    gate = Gate(directory).close("fail-0")
    gate.open()
    said = _run(["-c", _GATED, str(directory)])
    assert "the disk of the test is full" in said
    assert ".metadata" not in names_in(directory)


def test_a_callback_that_fails_is_said_and_its_checkpoint_stays(directory: Path) -> None:
    failing = _SCRIPT.replace("checkpoint_id=sys.argv[1]", "checkpoint_id=sys.argv[1], callback=lambda: 1 // 0")
    said = _run(["-c", failing, str(directory)])
    assert "the callback of save" in said and "ZeroDivisionError" in said
    _check(directory)


def test_nothing_is_started_before_the_first_save(directory: Path) -> None:
    program = "from dcp_core import api; import threading; print(threading.active_count()); api.wait_all()"
    assert _run(["-c", program]) == "1\n"
