"""Where a rank can get into trouble in a call, besides the places of files that `firing` has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dcp_core.adapter import KeyValueChannel, ProcessGroup
from dcp_core.background.carriers import ProcessCarrier
from dcp_core.background.task import PersistResult, PersistTask
from dcp_core.coordination.exchange import Answers, Exchange
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
from tests.core.firing import Fuse


class FiringChannel:
    """The channel of the ranks; "put" and "wait" name the exchange."""

    def __init__(self, channel: KeyValueChannel, fuse: Fuse) -> None:
        self._channel, self._fuse = channel, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def put(self, name: str, payload: bytes) -> None:
        self._fuse.reach(f"put {self._fuse.stage}")
        self._channel.put(name, payload)

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        self._fuse.reach(f"wait {self._fuse.stage}")
        return self._channel.wait(name, timeout_seconds)

    def delete(self, name: str) -> None:
        self._channel.delete(name)


class FiringBroadcasts:
    """The broadcasts of the ranks: "open broadcast", "start broadcast", and "wait broadcast" while one is under way."""

    def __init__(self, broadcasts: Any, fuse: Fuse) -> None:
        self._broadcasts, self._fuse = broadcasts, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broadcasts, name)

    def open(self, *args: Any, **kwargs: Any) -> Any:
        self._fuse.reach("open broadcast")
        return _FiringGroup(self._broadcasts.open(*args, **kwargs), self._fuse)


class _FiringGroup:
    def __init__(self, group: Any, fuse: Fuse) -> None:
        self._group, self._fuse = group, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def broadcast(self, wire: Any, source: int) -> Any:
        self._fuse.reach("start broadcast")
        return _FiringWork(self._group.broadcast(wire, source), self._fuse)


class _FiringWork:
    def __init__(self, work: Any, fuse: Fuse) -> None:
        self._work, self._fuse = work, fuse

    def is_done(self) -> Any:
        self._fuse.reach("wait broadcast")
        return self._work.is_done()

    def wait(self) -> None:
        self._fuse.reach("wait broadcast")
        self._work.wait()


class FiringSavePlanner(StandardSavePlanner):
    """ "plan" and "get data"; the ranks exchange their plans every time."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__(enable_plan_caching=False)
        self._fuse = fuse

    def build_local_plan(self) -> Any:
        self._fuse.reach("plan")
        return super().build_local_plan()

    def get_batch(self, spans: Any) -> Any:
        self._fuse.reach("get data")
        return super().get_batch(spans)


class FiringLoadPlanner(StandardLoadPlanner):
    """ "plan"."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self._fuse = fuse

    def build_local_plan(self) -> Any:
        self._fuse.reach("plan")
        return super().build_local_plan()


class FiringState:
    """A Stateful object: "state_dict" and "load_state_dict"."""

    def __init__(self, fuse: Fuse) -> None:
        self._fuse = fuse
        self.array = np.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        self._fuse.reach("state_dict")
        return {"array": self.array}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._fuse.reach("load_state_dict")


@contextmanager
def watched_calls(adapter: type[Any], fuse: Fuse) -> Iterator[None]:
    """Tell a fuse of what the calls of this process do.

    These are the places of its channel and of its broadcasts, "decide save/agree", where the coordinator decides, and
    "hand over", where a save goes to the background process.

    Args:
        adapter: Class of the framework's adapter.
        fuse: It goes off in the thread that comes to its place.
    """
    process_group, exchange, hand_over = adapter.process_group, Exchange.run, ProcessCarrier.hand_over

    def watched_group(self: Any, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        found: ProcessGroup = process_group(self, group, with_channel=with_channel)
        if found.channel is None:
            return found
        broadcasts: Any = found.broadcasts and FiringBroadcasts(found.broadcasts, fuse)
        return replace(found, channel=FiringChannel(found.channel, fuse), broadcasts=broadcasts)

    def watched_exchange(
        self: Exchange,
        stage: str,
        payload: bytes = b"",
        *,
        compute: Callable[[Sequence[bytes]], Answers] | None = None,
        **more: Any,
    ) -> bytes:
        def decide(payloads: Sequence[bytes]) -> Answers:
            fuse.reach(f"decide {stage}")
            return b"" if compute is None else compute(payloads)

        fuse.stage = stage
        return exchange(self, stage, payload, compute=decide, **more)

    def watched_hand_over(carrier: ProcessCarrier, task: PersistTask) -> Callable[[], PersistResult]:
        fuse.reach("hand over")
        return hand_over(carrier, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "process_group", watched_group)
        patch.setattr(Exchange, "run", watched_exchange)
        patch.setattr(ProcessCarrier, "hand_over", watched_hand_over)
        yield
