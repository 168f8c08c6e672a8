"""The terms in which tests say what goes wrong on one rank: a `Fault` is a call, and the error that all must raise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WORLD = 3
RANKS = range(WORLD)


class UnspeakableError(Exception):
    """An error that cannot be pickled, and whose text cannot be had."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no text")


def failing(base: type[Any], method: str, error: BaseException | None, *, late: bool = False) -> type[Any]:
    """Make a subclass, the same on all ranks, in which one method raises where `error` is given.

    Args:
        base: What it derives from.
        method: Which method.
        error: None: it works as in `base`.
        late: Raise after doing all the work.
    """

    def instead(self: Any, *args: Any, **kwargs: Any) -> Any:
        if error is not None and not late:
            raise error
        result = getattr(super(made, self), method)(*args, **kwargs)
        if error is not None:
            raise error
        return result

    made = type(f"Failing{base.__name__}", (base,), {method: instead})
    return made


class FailingState:
    """A Stateful object that raises where it is told to."""

    def __init__(self, tag: int, saves: BaseException | None = None, loads: BaseException | None = None) -> None:
        self.array = np.full(3, float(tag))
        self._saves, self._loads = saves, loads

    def state_dict(self) -> dict[str, Any]:
        if self._saves is not None:
            raise self._saves
        return {"array": self.array}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._loads is not None:
            raise self._loads


Arguments = dict[str, Any]
Call = Callable[[bool], Arguments]
"""Makes the arguments of a call from whether it goes wrong on this rank."""


@dataclass(frozen=True)
class Fault:
    """One call of which one rank's part goes wrong.

    Attributes:
        name: Tells it from others.
        rank: Where it goes wrong.
        kind: Class of the error that all ranks raise.
        text: Stands in its message.
        arguments: Makes the arguments of the call from whether it goes wrong here; `state_dict` replaces the state, a
            mapping under `more` is added to it.
        interrupt: What the rank itself raises instead.
        warm: Let the call succeed once before, so that the plan is known.
    """

    name: str
    rank: int
    kind: str
    text: str
    arguments: Call
    interrupt: str = ""
    warm: bool = False


def raising(method: str, base: type[Any], role: str, error: BaseException, **more: Any) -> Call:
    return lambda here: {role: failing(base, method, error if here else None, **more)()}


def answering(method: str, base: type[Any], role: str, answer: Any = None) -> Call:
    """A method that returns nonsense on one rank."""

    def arguments(here: bool) -> Arguments:
        made = failing(base, method, None)
        if here:
            setattr(made, method, lambda self, *args, **kwargs: answer)
        return {role: made()}

    return arguments


def each(ranks: Sequence[int], name: str, call: Call, **more: Any) -> list[Fault]:
    """The same fault on each of some ranks, raised by code that is not ours."""
    given: Arguments = {"kind": "RankFailedError", "text": "RuntimeError: out of luck"} | more
    return [Fault(f"{name} on rank {rank}", rank, arguments=call, **given) for rank in ranks]


def methods(base: type[Any], role: str, everywhere: Sequence[str], coordinator: Sequence[str]) -> list[Fault]:
    """A user's error in each method of a planner or storage."""
    faults = []
    for method in (*everywhere, *coordinator):
        ranks = RANKS if method in everywhere else [0]
        call = raising(method, base, role, RuntimeError("out of luck"))
        faults += each(ranks, f"{base.__name__}.{method}", call)
    return faults


def bad(**wrong: Any) -> Call:
    return lambda here: dict(wrong) if here else {}


def other(**values: tuple[Any, Any]) -> Call:
    return lambda here: {name: pair[here] for name, pair in values.items()}


def bad_arguments(calls: Mapping[str, Call]) -> list[Fault]:
    return [
        Fault(f"{name} on rank {rank}", rank, "ArgumentError", f"rank {rank}: ", arguments)
        for number, (name, arguments) in enumerate(calls.items())
        for rank in [number % WORLD]
    ]


def differing(calls: Mapping[str, Call]) -> list[Fault]:
    """One rank passes something else; told from rank 0 as the one who is right."""
    faults = []
    for number, (name, arguments) in enumerate(calls.items()):
        rank = number % WORLD
        others = "1, 2" if rank == 0 else str(rank)
        text = f"on rank 0 and something else on rank {others}"
        faults.append(Fault(f"{name} on rank {rank}", rank, "ArgumentsDifferError", text, arguments))
    return faults


def stateful(error: BaseException) -> Call:
    return lambda here: {"more": {"stateful": FailingState(1, saves=error if here else None)}}


BAD_PLACES: dict[str, Any] = {
    "no place": None,
    "a number for a place": 5,
    "an empty path": "",
    "a path with a NUL": "a\0b",
    "a foreign scheme": "nosuch://bucket/key",
    "a file URL with a host": "file://elsewhere/tmp",
    "bytes for a path": b"/tmp",
}
BAD_TIMES: dict[str, Any] = {
    "no time": 0,
    "negative time": -1.0,
    "time in words": "long",
    "not a number": float("nan"),
    "True for time": True,
    "None for time": None,
}
