"""The benchmark of conversions runs; no time is looked at."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from benchmarks import conversions


def test_a_quick_run_names_every_contestant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conversions.main(["--quick", "--directory", str(tmp_path), "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert all(f"`{name}`" in printed for name in conversions.CONTESTANTS)
    outcomes = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert all(outcome["seconds"][0] > 0 for outcome in outcomes)
