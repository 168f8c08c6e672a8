"""A warning of the library points at the line of the user's that called it, not into the library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PLUGIN = """
from importlib.metadata import EntryPoint
from dcp_core import plugins
plugins._REGISTRY._find = lambda: [EntryPoint("broken", "no_such_module", "dcp")]
"""
_SAVE = """
import numpy as np
import dcp_core.api as api
def mine():
    api.save({"w": np.zeros(2)}, checkpoint_id="a")  # here
mine()
api.save({"w": np.zeros(2)}, checkpoint_id="b")
"""
_LOG = """
from dcp_core.log import stage
@stage("mine")
def work():
    return 1
work()  # here
"""
_THREAD = """
import threading, warnings
from dcp_core.log import warn
thread = threading.Thread(target=warn, args=("from a thread",))
thread.start()
thread.join()
"""


def _stderr_of(code: str, directory: Path, **variables: str) -> list[str]:
    (directory / "user.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(_ROOT)} | variables
    command = [sys.executable, "-W", "always", "user.py"]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("code", "variables", "message"),
    [
        (_PLUGIN + _SAVE, {}, "DCP skips the plugin 'broken'"),
        (_LOG, {"DCP_LOG": "LOUD"}, "asks for the log level 'LOUD'"),
        (_LOG, {"DCP_TRACE": "/no/such/directory/trace"}, "cannot write"),
    ],
    ids=["plugin", "level", "trace"],
)
def test_it_is_the_line_that_called_the_library(
    code: str, variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    lines = _stderr_of(code, tmp_path, **variables)
    here = next(number for number, line in enumerate(code.splitlines(), 1) if line.endswith("# here"))
    (warning,) = (line for line in lines if message in line)
    assert f"user.py:{here}: RuntimeWarning" in warning, lines


def test_a_thread_that_no_line_of_the_user_has_started_warns_as_well(tmp_path: Path) -> None:
    assert any("from a thread" in line for line in _stderr_of(_THREAD, tmp_path))
