"""A clock for tests of waiting: sleeping takes no time, and what shall happen meanwhile happens."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from types import ModuleType

import pytest


class VirtualClock:
    """Stands in for the module `time`, for one thread."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            due, _, action = heapq.heappop(self._events)
            self.now = max(self.now, due)
            action()
        self.now = max(self.now, end)

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Have something happen so much later, while somebody sleeps."""
        heapq.heappush(self._events, (self.now + seconds, next(self._number), action))

    def rule(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> VirtualClock:
        """Be the time in these modules."""
        for module in modules:
            monkeypatch.setattr(module, "time", self)
        return self
