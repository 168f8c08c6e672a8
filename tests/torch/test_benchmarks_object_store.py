"""The benchmark of object stores runs; no time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import object_store

pytestmark = pytest.mark.timeout(120)


def test_a_quick_run_names_every_contestant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    object_store.main(["--quick", "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert all(f"| `{name}` | {kind} |" in printed for name in object_store.CONTESTANTS for kind in ("save", "load"))
    outcomes = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert all(outcome["seconds"][0] > 0 for outcome in outcomes)
