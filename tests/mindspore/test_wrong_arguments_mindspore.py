"""Wrong arguments of the functions of `dcp_mindspore` are errors of ours, whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor
from safetensors.numpy import save_file

import dcp_mindspore
from dcp_core.errors import ArgumentError
from dcp_mindspore.channel import host_store
from dcp_mindspore.strategy_files import read_strategy
from dcp_mindspore.strategy_import import import_checkpoint
from tests.core.wrong_arguments import Arguments, foreign_errors, names_argument

pytestmark = [pytest.mark.timeout(90), pytest.mark.filterwarnings("ignore")]


def zeros(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape, np.float32), mindspore.float32)


def state() -> dict[str, Any]:
    return {"w": zeros(4, 2), "n": 3}


CALLS: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "save": (dcp_mindspore.save, lambda: {"state_dict": state(), "checkpoint_id": "saved", "durable": False}),
    "load": (dcp_mindspore.load, lambda: {"state_dict": state(), "checkpoint_id": "good"}),
    "latest_checkpoint": (dcp_mindspore.latest_checkpoint, lambda: {"root": "."}),
    "survey_checkpoints": (dcp_mindspore.survey_checkpoints, lambda: {"root": "."}),
    "CheckpointManager": (dcp_mindspore.CheckpointManager, lambda: {"root": "runs"}),
    "annotate_shard": (
        dcp_mindspore.annotate_shard,
        lambda: {"tensor": zeros(2), "offsets": (0,), "global_shape": (4,)},
    ),
    "import_checkpoint": (
        import_checkpoint,
        lambda: {"source": "whole", "strategy": None, "checkpoint_id": "imported", "durable": False},
    ),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    dcp_mindspore.save(state(), checkpoint_id="good", durable=False)
    (tmp_path / "whole" / "rank_0").mkdir(parents=True)
    save_file({"w": np.zeros((4, 2), np.float32)}, tmp_path / "whole" / "rank_0" / "net.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", CALLS)
def test_nonsense_in_any_argument_is_an_error_of_ours_or_none(here: Path, name: str) -> None:
    function, good = CALLS[name]
    function(**good())
    assert list(foreign_errors(function, good)) == []


def test_nonsense_in_the_place_of_a_strategy_file_is_an_error_of_ours(here: Path) -> None:
    assert list(foreign_errors(read_strategy, lambda: {"path": "no.json"})) == []


@pytest.mark.parametrize(("argument", "value"), [("rank", "x"), ("world_size", None), ("ranks", 3)])
def test_a_group_of_nonsense_names_it(argument: str, value: object) -> None:
    store = host_store("127.0.0.1", 1)
    assert names_argument(
        dcp_mindspore.StoreGroup, lambda: {"store": store, "rank": 0, "world_size": 2}, argument, value
    )
    with pytest.raises(ArgumentError, match="TCPStore, found 3"):
        dcp_mindspore.StoreGroup(3, 0, 2)


@pytest.mark.parametrize(("argument", "value"), [("strategy", 3), ("file_suffix", 3), ("source", 3)])
def test_the_error_of_an_import_names_the_argument_and_what_was_found(here: Path, argument: str, value: object) -> None:
    assert names_argument(*CALLS["import_checkpoint"], argument, value)
