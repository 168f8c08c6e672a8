"""Wrong arguments of public functions are errors of ours, whatever they are; and name the argument where it is one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api, public
from dcp_core.errors import ArgumentError, DcpError
from dcp_core.manager.latest import latest_checkpoint, survey_checkpoints
from dcp_core.manager.manager import CheckpointManager
from tests.core.wrong_arguments import Arguments, foreign_errors, names_argument

pytestmark = pytest.mark.timeout(60)

UNCALLED = {
    "AsyncSaveResponse", "BytesStorageMetadata", "ChunkStorageMetadata", "FoundCheckpoint", "LoadPlan", "LoadPlanner",
    "Metadata", "ReadItem", "RootSurvey", "SavePlan", "SavePlanner", "SkippedCheckpoint", "StorageReader",
    "StorageWriter", "TensorStorageMetadata", "VerifyReport", "WriteItem",
}  # fmt: skip
"""What users get, or derive from; they do not make it."""


def state() -> dict[str, Any]:
    return {"w": np.zeros((4, 2)), "n": 3}


CALLS: dict[str, tuple[Callable[..., Any], Arguments, tuple[str, ...]]] = {
    "save": (api.save, lambda: {"state_dict": state(), "checkpoint_id": "saved", "durable": False}, ()),
    "async_save": (
        api.async_save,
        lambda: {"state_dict": state(), "checkpoint_id": "async", "durable": False},
        ("callback",),  # what it raises is somebody else's; see below
    ),
    "load": (api.load, lambda: {"state_dict": state(), "checkpoint_id": "good"}, ()),
    "read": (api.read, lambda: {"checkpoint_id": "good", "key": "w"}, ()),
    "verify": (api.verify, lambda: {"checkpoint_id": "good"}, ("progress",)),
    "wait_all": (api.wait_all, dict, ()),
    "allow_pickled": (api.allow_pickled, dict, ()),
    "latest_checkpoint": (latest_checkpoint, lambda: {"root": "."}, ()),
    "survey_checkpoints": (survey_checkpoints, lambda: {"root": "."}, ()),
    "CheckpointManager": (CheckpointManager, lambda: {"root": "runs"}, ()),
    "Box": (public.Box, lambda: {"offsets": (0,), "sizes": (1,)}, ()),
    "Box.whole": (public.Box.whole, lambda: {"shape": (1,)}, ()),
    "ChunkInfo": (public.ChunkInfo, lambda: {"offsets": (0,), "sizes": (1,), "global_shape": (2,)}, ()),
    "MetadataIndex": (public.MetadataIndex, lambda: {"fqn": "a"}, ()),
    "PerRank": (public.PerRank, lambda: {"value": 1}, ()),
    "StandardLoadPlanner": (public.StandardLoadPlanner, dict, ()),
    "StandardSavePlanner": (public.StandardSavePlanner, dict, ()),
    "FileSystemReader": (public.FileSystemReader, dict, ()),
    "FileSystemWriter": (public.FileSystemWriter, dict, ()),
    "HuggingFaceReader": (public.HuggingFaceReader, dict, ()),
    "Joined": (public.Joined, lambda: {"parts": ["a"]}, ()),
    "Stacked": (public.Stacked, lambda: {"parts": ["a"]}, ()),
    "Narrowed": (public.Narrowed, lambda: {"of": "a", "dim": 0, "start": 0, "length": 1}, ()),
    "Selected": (public.Selected, lambda: {"of": "a", "index": 0}, ()),
    "DataCopier": (public.DataCopier.register, lambda: {"kind": Path}, ()),
    "clear_plan_cache": (public.clear_plan_cache, dict, ()),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    api.save(state(), checkpoint_id="good", durable=False)
    return tmp_path


def test_every_public_function_is_called() -> None:
    functions = {
        name
        for name in public.__all__
        if inspect.isroutine(getattr(public, name)) or inspect.isclass(getattr(public, name))
    }
    errors = {
        name for name in functions if isinstance(found := getattr(public, name), type) and issubclass(found, DcpError)
    }
    assert functions - errors - UNCALLED <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_nonsense_in_any_argument_is_an_error_of_ours_or_none(here: Path, name: str) -> None:
    function, good, unchecked = CALLS[name]
    function(**good())
    assert list(foreign_errors(function, good, unchecked)) == []
    api.wait_all()


@pytest.mark.parametrize("method", ["save", "async_save", "resume", "should_save"])
def test_nonsense_for_a_manager_is_an_error_of_ours_or_none(here: Path, method: str) -> None:
    manager = CheckpointManager("runs", durable=False)
    good: dict[str, Any] = {"step": 1, "state_dict": state()}
    if method in ("resume", "should_save"):
        del good["step" if method == "resume" else "state_dict"]
    assert list(foreign_errors(getattr(manager, method), lambda: good, ("callback",))) == []
    manager.wait()


@pytest.mark.parametrize("value", [3, "x", [1], object()], ids=["number", "text", "list", "object"])
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("save", "adapter"), ("load", "adapter"), ("async_save", "adapter"), ("latest_checkpoint", "adapter"),
        ("CheckpointManager", "adapter"), ("save", "rules"), ("async_save", "callback"), ("verify", "progress"),
        ("verify", "quick"),
    ],
)  # fmt: skip
def test_the_error_names_the_argument_and_what_was_found(here: Path, name: str, argument: str, value: object) -> None:
    function, good, _ = CALLS[name]
    assert names_argument(function, good, argument, value)


@pytest.mark.parametrize("timeout", ["x", -1, float("nan"), True, [], 10**30])
def test_a_wait_takes_seconds_whether_or_not_there_is_something_to_wait_for(here: Path, timeout: Any) -> None:
    api.wait_all()
    response = api.async_save(state(), checkpoint_id="async", durable=False)
    for wait in (response.get_result, api.wait_all):
        with pytest.raises(ArgumentError, match="timeout must be a number of seconds"):
            wait(timeout)
    response.get_result(50)
    for wait in (response.get_result, api.wait_all):
        with pytest.raises(ArgumentError, match="timeout must be a number of seconds"):
            wait(timeout)


def test_an_adapter_that_is_a_class_is_told_from_one_that_is_made(here: Path) -> None:
    from dcp_core.arrays import NumpyAdapter

    with pytest.raises(ArgumentError, match="adapter must be an Adapter"):
        api.save(state(), checkpoint_id="saved", adapter=NumpyAdapter)  # type: ignore[arg-type]  # the point
