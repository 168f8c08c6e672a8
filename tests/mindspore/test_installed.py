"""Whether the tests of this directory can run at all: never silently not."""

from __future__ import annotations

import importlib.util
import os

import pytest


def test_mindspore_is_installed() -> None:
    if importlib.util.find_spec("mindspore") is None:
        assert "DCP_NEEDS_MINDSPORE" not in os.environ, "this session is for MindSpore, and it is not installed"
        pytest.skip("mindspore is not installed: no test of tests/mindspore runs; `nox -s tests_mindspore` installs it")
    assert importlib.util.find_spec("dcp_mindspore") is not None
