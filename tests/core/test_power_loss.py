"""The power fails at any moment: what was not synced may be lost, and the old checkpoint or the new one is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.convert.to_huggingface import HuggingFaceConversion
from dcp_core.errors import DcpError, NotFoundError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.power_loss import RecordedOperations
from tests.core import commit_jobs
from tests.core.fault_jobs import memory_directory
from tests.core.power_jobs import outcomes, places, record

pytestmark = pytest.mark.faults


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path.resolve()


# --- the order of a commit -------------------------------------------------------------------------------------------


def _whole_or_none(directory: Path) -> str:
    return commit_jobs.whole(directory) if (directory / ".metadata").exists() else ""


def test_a_commit_over_a_checkpoint_survives(root: Path) -> None:
    commit_jobs.save(LocalStorage(root / "work"), "old", ranks=3)
    before, log = record(root, lambda place, operations: commit_jobs.save(LocalStorage(place, operations), "new"))
    renamed = places(log, "rename", ".metadata")[0]
    synced = next(n for n in places(log, "fsync_directory", "work") if n > renamed)
    for count, manner, found in outcomes(root, before, log, _whole_or_none):
        allowed = {"old"} if count < renamed else {"new"} if count >= synced else {"old", "new"}
        assert found in allowed, (manner, log[max(0, count - 1)])


def test_a_first_commit_in_new_directories_survives(root: Path) -> None:
    def save(place: Path, operations: RecordedOperations) -> None:
        commit_jobs.save(LocalStorage(place / "runs" / "step 1", operations), "new")

    before, log = record(root, save)
    for count, manner, found in outcomes(root, before, log, lambda place: _whole_or_none(place / "runs" / "step 1")):
        assert found in ("", "new"), (manner, log[max(0, count - 1)])
        assert found == "new" or count < len(log), manner


# --- whole saves and conversions -------------------------------------------------------------------------------------


def _state(tag: int) -> dict[str, Any]:
    generator = np.random.default_rng(tag)
    return {
        "w": generator.standard_normal((40, 70)).astype(np.float32),
        "big": generator.integers(0, 255, 3 * 4096 + 5, dtype=np.uint8),
        "few": generator.integers(0, 255, 2000, dtype=np.uint8),
        "step": tag,
        "notes": {"run": [tag, "x" * tag]},
    }


def _save(place: Path, operations: RecordedOperations | None, tag: int) -> None:
    writer = FileSystemWriter(storage=LocalStorage(place, operations))
    api.save(_state(tag), storage_writer=writer)


def _targets() -> dict[str, Any]:
    return {name: np.zeros_like(_state(0)[name]) for name in ("w", "big", "few")}


def _tag_of(tensors: dict[str, Any]) -> str:
    """Which save all elements are of."""
    found = [tag for tag in (1, 2) if all(tensors[key].tobytes() == _state(tag)[key].tobytes() for key in tensors)]
    assert len(found) == 1, "a mixture, or what nobody saved"
    return str(found[0])


def _loaded(place: Path) -> str:
    """Load: the number of a save; empty where there is no checkpoint."""
    target = _targets()
    state = target | {"step": 0, "notes": {"run": []}}
    try:
        api.load(state, checkpoint_id=place)
    except NotFoundError:
        return ""
    tag = _tag_of(target)
    assert (state["step"], state["notes"]) == (int(tag), _state(int(tag))["notes"])
    return tag


def _loaded_tensors(place: Path) -> str:
    target = _targets()
    try:
        api.load(target, checkpoint_id=place)
    except NotFoundError:
        return ""
    return _tag_of(target)


@pytest.mark.parametrize("first", [True, False], ids=["a first save", "a save over another"])
def test_a_save_survives_whole_and_once_it_returned_for_good(root: Path, first: bool) -> None:
    if not first:
        _save(root / "work", None, 1)
    before, log = record(root, lambda place, operations: _save(place, operations, 2))
    seen = set()
    for count, manner, found in outcomes(root, before, log, _loaded):
        assert found in ("" if first else "1", "2"), (manner, log[max(0, count - 1)])
        assert found == "2" or count < len(log), manner
        seen.add(found)
    assert seen == {"" if first else "1", "2"}


def _export(place: Path, operations: RecordedOperations | None, source: Path, nbytes: int) -> None:
    conversion = HuggingFaceConversion(FileSystemReader(source), max_shard_size=nbytes)
    conversion.run(LocalStorage(place, operations), overwrite=True)


def _imported(place: Path) -> str:
    """Read a Hugging Face directory: "" where it says itself that it is not whole."""
    target = _targets()
    try:
        api.load(target, storage_reader=HuggingFaceReader(place))
    except DcpError:
        return ""
    return _tag_of(target)


@pytest.mark.parametrize("old_nbytes", [0, 9000, 14_000, 1 << 20], ids=["none", "shards", "other shards", "one file"])
@pytest.mark.parametrize("nbytes", [9000, 1 << 20], ids=["shards", "one file"])
def test_an_export_to_hugging_face_is_whole_or_says_that_it_is_not(root: Path, nbytes: int, old_nbytes: int) -> None:
    for tag in (1, 2):
        _save(root / f"step_{tag}", None, tag)
    if old_nbytes:
        _export(root / "work", None, root / "step_1", old_nbytes)
    old_names = set(os.listdir(root / "work")) if old_nbytes else set()
    before, log = record(root, lambda place, operations: _export(place, operations, root / "step_2", nbytes))
    new_names = set(os.listdir(root / "work"))
    old = "1" if old_nbytes else ""
    # No moment without a model where the last file to come, of one name, decides which other files are meant.
    is_seamless = (nbytes, old_nbytes) in ((9000, 14_000), (1 << 20, 1 << 20))
    assert (len(old_names & new_names) == 1) == is_seamless
    allowed = {old, "2"} | (set() if is_seamless else {""})
    seen = set()
    for count, manner, found in outcomes(root, before, log, _imported):
        assert found in allowed, (count, manner, log[max(0, count - 1)])
        assert found == "2" or count < len(log), manner
        seen.add(found)
    assert {old, "2"} <= seen


@pytest.mark.parametrize("over", [False, True], ids=["first", "over another"])
def test_an_import_from_hugging_face_is_whole_or_not_there(root: Path, over: bool) -> None:
    _save(root / "step_2", None, 2)
    _export(root / "hf", None, root / "step_2", 9000)
    if over:
        _save(root / "work", None, 1)

    def convert(place: Path, operations: RecordedOperations) -> None:
        writer = FileSystemWriter(storage=LocalStorage(place, operations))
        convert_to_dcp(HuggingFaceReader(root / "hf"), place, storage_writer=writer)

    before, log = record(root, convert)
    seen = set()
    for count, manner, found in outcomes(root, before, log, _loaded_tensors):
        assert found in ("1" if over else "", "2"), (manner, log[max(0, count - 1)])
        assert found == "2" or count < len(log), manner
        seen.add(found)
    assert len(seen) == 2
