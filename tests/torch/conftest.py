"""What the torch tests need under `torchrun -m pytest`, where every rank runs the same tests."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from tests.torch import gloo_ranks

_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


@pytest.fixture(autouse=True, scope="session")
def job() -> None:
    """Under torchrun the job exists before the first test: a save in a test's own process is then one of all ranks."""
    if _UNDER_TORCHRUN:
        gloo_ranks._torchrun_rank()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory of the test's own; under torchrun the same one on all ranks of this host."""
    if not _UNDER_TORCHRUN:
        return tmp_path
    launcher = f"torchrun-{os.getppid()}-{os.environ['MASTER_PORT']}"
    directory = Path(tempfile.gettempdir()) / launcher / re.sub(r"\W+", "-", request.node.nodeid)
    directory.mkdir(parents=True, exist_ok=True)
    return directory
