"""Errors of newcomers say what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dcp_core import api
from dcp_core.errors import MissingKeysError, NotFoundError, StorageError, UnsupportedValueError
from dcp_core.public import PerRank

RUN: dict[str, Any] = {
    "model": {"weight": np.ones((2, 2)), "bias": np.zeros(2)},
    "rng": ("MT19937", {"pos": 3}),
    "loader": {"file": 1, "weight": 2},
}


class Loader:
    def state_dict(self) -> dict[str, int]:
        return {"line": 3}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        raise AssertionError(f"nothing was loaded that gives {state_dict}")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    api.save(RUN, checkpoint_id=tmp_path / "run" / "step_1")
    return tmp_path / "run"


@pytest.mark.parametrize("function", [api.save, api.async_save, api.load])
def test_an_object_with_a_state_of_its_own_inside_per_rank_is_refused(function: Callable[..., Any], run: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"'?own.loader'?.*Loader.*PerRank\(value\.state_dict\(\)\)"):
        function({"own": {"loader": PerRank(Loader())}}, checkpoint_id=run / "step_1")
    assert sorted(path.name for path in run.iterdir()) == ["step_1"]


def test_names_that_were_saved_under_another_are_told_with_it(run: Path) -> None:
    target = {"weight": np.zeros((2, 2)), "bias": np.ones(2)}
    with pytest.raises(MissingKeysError, match=r"it has 'model\.(weight|bias)'.*nest them.*under 'model'"):
        api.load(target, checkpoint_id=run / "step_1")
    assert not target["weight"].any()
    api.load({"model": target}, checkpoint_id=run / "step_1")
    assert target["weight"].all()


def test_names_that_were_saved_apart_are_not(run: Path) -> None:
    with pytest.raises(MissingKeysError, match="leave them out"):
        api.load({"bias": np.zeros(2), "pos": 0}, checkpoint_id=run / "step_1")


@pytest.mark.parametrize("key", ["loader", "rng"])
def test_a_plain_target_where_a_container_was_saved_is_told_what_to_put_there(run: Path, key: str) -> None:
    with pytest.raises(MissingKeysError, match=f"put there what was saved as '{key}'"):
        api.load({key: None}, checkpoint_id=run / "step_1")


def test_a_directory_of_checkpoints_is_told_from_a_checkpoint(run: Path) -> None:
    with pytest.raises(NotFoundError, match="its directory 'step_1' holds a checkpoint, and latest_checkpoint finds"):
        api.load({}, checkpoint_id=run)


def test_files_of_another_program_are_told_with_their_reader(tmp_path: Path) -> None:
    save_file({"a": np.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(NotFoundError, match="HuggingFaceReader reads"):
        api.load({}, checkpoint_id=tmp_path)


def test_an_empty_directory_is_just_wrong(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="check the path, or load another checkpoint"):
        api.load({}, checkpoint_id=tmp_path)


def test_a_place_where_nothing_can_be_made_is_not_said_to_have_been_there() -> None:
    with pytest.raises(StorageError, match="or nothing can be made there"):
        api.save({"a": 1}, checkpoint_id="/proc/nowhere")
