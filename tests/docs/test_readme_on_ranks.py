"""The README's program for many ranks runs under torchrun, and resumes in another layout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import python_blocks

_ROOT = Path(__file__).parents[2]


def _torchrun(ranks: int, script: Path) -> str:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=120, cwd=script.parent, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_the_program_for_many_ranks_trains_and_resumes_in_another_layout(tmp_path: Path) -> None:
    (block,) = (block for block in python_blocks(_ROOT / "README.md") if "torchrun" in (block.reason or ""))
    script = tmp_path / "train.py"
    script.write_text(block.code)
    assert "trained from step 0 to 10" in _torchrun(4, script)
    assert "trained from step 10 to 20" in _torchrun(2, script)
