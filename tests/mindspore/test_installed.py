"""Whether the tests of this directory can run at all: never silently not."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from benchmarks import mindspore_files


def test_mindspore_is_installed() -> None:
    if importlib.util.find_spec("mindspore") is None:
        assert "DCP_NEEDS_MINDSPORE" not in os.environ, "this session is for MindSpore, and it is not installed"
        pytest.skip("mindspore is not installed: no test of tests/mindspore runs; `nox -s tests_mindspore` installs it")
    assert importlib.util.find_spec("dcp_mindspore") is not None


def test_the_benchmark_says_so_where_mindspore_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("mindspore") is not None:
        pytest.skip("mindspore is installed: test_benchmark_files.py runs the benchmark")
    assert mindspore_files.main(["--quick", "--memory-dir", str(tmp_path), "--disk-dir", str(tmp_path)]) == 0
    assert "mindspore is not installed here" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
