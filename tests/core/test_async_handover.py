"""A trainer dies between the agreement on a save and handing it over: its background process tells the others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.background.async_save import AsyncSaveRecipe
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

_DEADLINE_SECONDS = 300.0
_SOON_SECONDS = 20.0


def _save(directory: Path) -> None:
    state = {"w": np.arange(10.0)}
    how: dict[str, Any] = {"adapter": NumpyRankAdapter(), "timeout_seconds": _DEADLINE_SECONDS}
    api.async_save(state, checkpoint_id=directory, **how).get_result(60)


def _die(recipe: AsyncSaveRecipe, known: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _save_beside_a_dying_rank(context: RankContext, directory: Path, victim: int) -> tuple[str, str, float]:
    _save(directory / "before")
    if context.rank == victim:
        AsyncSaveRecipe._staged = _die  # type: ignore[assignment,method-assign]  # in a process of the test
    started = time.monotonic()
    try:
        _save(directory / "step")
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    raise AssertionError("the save went well")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_trainer_that_dies_before_it_hands_over_is_named_to_the_others_soon(tmp_path: Path, victim: int) -> None:
    told = run_ranks(
        _save_beside_a_dying_rank, 3, tmp_path, victim, timeout_seconds=100, return_exceptions=True
    )  # fmt: skip
    assert isinstance(told.pop(victim), RankProcessError)
    for kind, text, seconds in told:
        assert kind == "RankFailedError"
        assert f"the process of rank {victim} ended before it had handed over" in text
        assert seconds < _SOON_SECONDS
    assert not (tmp_path / "step" / ".metadata").exists()
