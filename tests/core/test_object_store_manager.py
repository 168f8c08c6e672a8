"""Checkpoints of an object store are kept, found and removed as those of a file system are."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest

from dcp_core.manager.latest import latest_checkpoint
from dcp_core.manager.manager import CheckpointManager
from dcp_core.testing.numpy_ranks import NumpyRankAdapter


@pytest.fixture
def root() -> Iterator[str]:
    path = f"/runs-{uuid.uuid4().hex}"
    yield f"memory:/{path}"
    fsspec.filesystem("memory").rm(path, recursive=True)


def _inside(url: str, name: str = "") -> str:
    return url.removeprefix("memory:/") + name


def _names(url: str) -> list[str]:
    return sorted(name.rpartition("/")[2] for name in fsspec.filesystem("memory").ls(_inside(url), detail=False))


def _state(step: int) -> dict[str, Any]:
    return {"w": np.full(5, float(step)), "step": step}


def test_the_last_ones_are_kept_and_the_newest_whole_one_is_gone_on_from(root: str) -> None:
    manager = CheckpointManager(root, keep=2, adapter=NumpyRankAdapter())
    for step in (5, 10, 20, 100):
        manager.save(step, _state(step))
    assert _names(root) == ["latest", "step_100", "step_20"]
    assert fsspec.filesystem("memory").cat_file(_inside(root, "/latest")) == b"step_100"
    fsspec.filesystem("memory").rm_file(_inside(root, "/step_100/.metadata"))
    assert latest_checkpoint(root) == f"{root}/step_20"
    target: dict[str, Any] = {"w": np.zeros(5), "step": 0}
    assert manager.resume(target) == 20
    assert target["w"].tolist() == [20.0] * 5


def test_what_is_no_checkpoint_stays(root: str) -> None:
    fsspec.filesystem("memory").pipe_file(_inside(root, "/step_1/notes.txt"), b"mine")
    manager = CheckpointManager(root, keep=1, adapter=NumpyRankAdapter())
    for step in (1, 2):
        manager.save(step, _state(step))
    assert _names(root) == ["latest", "step_1", "step_2"]
    assert _names(f"{root}/step_1") == ["notes.txt"]
