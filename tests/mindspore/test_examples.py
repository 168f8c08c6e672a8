"""What people run: the demonstration of `nox -s demo_mindspore`, and the comparison with torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.both_frameworks import FRAMEWORKS, measure
from dcp_core.testing import ranks
from tests.background_processes import check_none_left, mark

ranks.preload("torch", "torch.distributed", "mindspore", "mindspore.mint.distributed")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "examples" / "demo_mindspore.py"
RESUMED = 5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_goes_on_under_other_layouts_with_the_same_losses(tmp_path: Path) -> None:
    mark()
    environment = os.environ | {"GLOG_v": "3", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, timeout=280, env=environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("the same bits") == RESUMED and ran.stderr == ""
    assert (tmp_path / "step_5" / ".metadata").exists()
    check_none_left()


def test_both_frameworks_are_measured_by_the_same_operations(tmp_path: Path) -> None:
    found = measure(2, mib=1, rounds=1, directory=str(tmp_path))
    assert [*found][:3] == ["save", "load", "async_save, the call"] and len(found) == 4
    assert all(wall > 0 for row in found.values() for wall, _ in (row[name] for name in FRAMEWORKS))
    assert not list(tmp_path.iterdir())
    check_none_left()
