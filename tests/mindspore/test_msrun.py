"""A job as users start it: by msrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.background_processes import check_none_left, mark
from tests.mindspore.msrun_job import run_msrun


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_job_that_msrun_starts_saves_and_loads(tmp_path: Path) -> None:
    mark()
    ended = run_msrun(Path(__file__).with_name("msrun_script.py"), 2, tmp_path, str(tmp_path))
    assert ended.code == 0, "\n".join(log[-2000:] for log in ended.logs)
    for rank, log in enumerate(ended.logs):
        assert f"rank {rank} of 2 is done" in log
    assert ended.left == ()
    check_none_left()
