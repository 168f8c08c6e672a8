"""What jobs of numpy ranks do in many tests: wait for each other, save, load, count exchanges, listen to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from dcp_core import api
from dcp_core.coordination.exchange import Exchange, ExchangeRecord
from dcp_core.metadata import Metadata
from dcp_core.recipes.save import SaveRecipe
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.ranks import RankContext

ADAPTER = NumpyRankAdapter()
SECONDS = 15.0
OPTIONS: dict[str, Any] = {"adapter": ADAPTER, "timeout_seconds": SECONDS}


def save(state: Any, directory: str, **options: Any) -> Metadata:
    """Save on all ranks of the job, or on those of `process_group`."""
    return api.save(state, checkpoint_id=directory, durable=False, **OPTIONS, **options)


def load(state: Any, directory: str, **options: Any) -> None:
    api.load(state, checkpoint_id=directory, **OPTIONS, **options)


@contextmanager
def together(context: RankContext) -> Iterator[None]:
    """Wait for all ranks after this; what went wrong on one of them is raised on all."""
    group, failed = ADAPTER.process_group(), None
    try:
        yield
    except BaseException as error:
        failed = error
    meeting = Exchange(context.rank, context.world_size, group.channel, key="together", timeout_seconds=SECONDS)
    meeting.run("wait", error=failed)


@dataclass
class Counter:
    """The exchanges of each save."""

    saves: list[list[ExchangeRecord]] = field(default_factory=list)

    @property
    def last(self) -> list[ExchangeRecord]:
        return self.saves[-1]

    @property
    def was_hit(self) -> bool:
        """Whether the last save made no plan."""
        stages = [record.stage for record in self.last]
        assert stages in (["save/agree", "save/commit"], ["save/agree", "save/plan", "save/commit"])
        return len(stages) == 2


@contextmanager
def counted_saves() -> Iterator[Counter]:
    """Count the exchanges of saves from here on."""
    counter = Counter()

    class CountedRecipe(SaveRecipe):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            counter.saves.append(self.exchange.log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "SaveRecipe", CountedRecipe)
        yield counter


@contextmanager
def heard_warnings() -> Iterator[list[str]]:
    """Collect the warnings that the library logs."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    ear, logger = Ear(logging.WARNING), logging.getLogger("dcp")
    logger.addHandler(ear)
    try:
        yield lines
    finally:
        logger.removeHandler(ear)


def error_of(action: Callable[..., Any], *args: Any, **options: Any) -> tuple[type[BaseException], str]:
    """Class and text of what an action raises."""
    try:
        action(*args, **options)
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")
