"""What is seen of a call from within: this library's own stages, and how many bytes it staged."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from dcp_core.background import async_save
from dcp_core.background.staged import Staged

AGREE = "all_gather_object"
STAGE = "build_staged_state_dict"

_LOGGER = logging.getLogger("dcp.stage")


class StageClock(logging.Handler):
    """Collects the seconds of stages that end on this thread while the context lasts.

    Attributes:
        seconds: By stage.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seconds: dict[str, float] = {}
        self._thread = threading.get_ident()
        self._level = logging.NOTSET

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread and isinstance(record.args, tuple) and len(record.args) == 2:
            name, seconds = record.args
            self.seconds[str(name)] = self.seconds.get(str(name), 0.0) + float(str(seconds))

    def __enter__(self) -> StageClock:
        self._level = _LOGGER.level
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        _LOGGER.removeHandler(self)
        _LOGGER.setLevel(self._level)


@contextlib.contextmanager
def staged_bytes() -> Iterator[list[int]]:
    """Collect how many bytes are staged, save by save."""
    found: list[int] = []
    stage = async_save.stage  # type: ignore[attr-defined]  # where the recipe calls it

    def counted(*args: Any, **options: Any) -> Staged:
        staged: Staged = stage(*args, **options)
        found.append(int(staged.nbytes.sum()) + int(staged.object_nbytes.sum()))
        return staged

    with mock.patch.object(async_save, "stage", counted):
        yield found
