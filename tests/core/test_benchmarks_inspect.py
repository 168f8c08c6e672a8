"""The benchmark of `dcp inspect` and `dcp verify --quick` runs; no time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import inspect_scale


def test_a_small_run_measures_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--directory", str(tmp_path), "--json", str(tmp_path / "out.json")]
    inspect_scale.main(["--ranks", "8", "--cuts", "tall", "--repeats", "1", *where])
    printed = capsys.readouterr().out
    assert all(name in printed for name in inspect_scale.MEASURES)
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [case["planner"] for case in cases] == list(inspect_scale.MEASURES)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
