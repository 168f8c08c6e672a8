"""What tests of whole saves and loads need under `torchrun -m pytest`, where every rank runs the same tests."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from tests.torch import gloo_ranks


@pytest.fixture
def shared_path(request: pytest.FixtureRequest) -> Path:
    """A directory of the test's own, the same one on all ranks of this host.

    Under torchrun the job exists from here on: a save in the test's own process is one of all ranks.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        own: Path = request.getfixturevalue("tmp_path")
        return own
    gloo_ranks._torchrun_rank()
    launcher = f"torchrun-{os.getppid()}-{os.environ['MASTER_PORT']}"
    directory = Path(tempfile.gettempdir()) / launcher / re.sub(r"\W+", "-", request.node.nodeid)
    directory.mkdir(parents=True, exist_ok=True)
    return directory
