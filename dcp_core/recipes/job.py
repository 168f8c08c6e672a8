"""What a recipe is given: the adapters, the group, and the codec of objects."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dcp_core.adapter import AdapterSet, ProcessGroup, StateRules
from dcp_core.coordination.exchange import Exchange
from dcp_core.errors import DcpError, RankFailedError
from dcp_core.formats.objects import decode_value, encode_value, needs_pickle, value_digest
from dcp_core.planning.leaves import LocalTensor
from dcp_core.planning.planners import PlannerContext, ValueCodec
from dcp_core.state_path import StatePath, plain_name
from dcp_core.type_names import type_name

logger = logging.getLogger("dcp.recipes")

Result = TypeVar("Result")

_NEVER_TENSORS = frozenset({type(None), bool, int, float, complex, str, bytes, dict, list, tuple, set})


class ObjectEncoding:
    """The objects codec of `dcp_core.formats`, as planners see it."""

    def encode(self, value: Any, path: str) -> bytes:
        """Encode a value exactly."""
        return encode_value(value, path=path)

    def decode(self, blob: bytes, name: str) -> Any:
        """Undo `encode`."""
        return decode_value(blob, name=name)

    def digest(self, value: Any) -> int:
        """Equal for equal values."""
        return value_digest(value)

    def needs_pickle(self, value: Any) -> bool:
        """Whether the value has no exact encoding."""
        return needs_pickle(value)


class Descriptions:
    """What the adapters say of the values of one call, each asked once."""

    def __init__(self, adapters: AdapterSet) -> None:
        self._adapters = adapters
        self._known: dict[int, tuple[Any, LocalTensor | None]] = {}

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a tensor leaf; None for any other value."""
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if type(value) in _NEVER_TENSORS:
            return None
        found = self._adapters.describe(value)
        self._known[id(value)] = value, found
        return found

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor leaf; so is one that cannot be described: planning says why, with its key."""
        try:
            return self.describe(value) is not None
        except Exception:
            return True


def _named_failure(path: StatePath, value: Any, method: str, error: Exception) -> DcpError:
    kind = type(error) if isinstance(error, DcpError) else RankFailedError
    owner = type_name(value)
    text = str(error) if isinstance(error, DcpError) else f"{type(error).__name__}: {error}"
    return kind(f"{method}() of {plain_name(path)!r} ({owner}) raised {text}")


@dataclass(frozen=True, slots=True)
class Job:
    """Who saves or loads.

    Attributes:
        adapters: How tensors are described.
        group: The ranks that call together.
        framework: Name and version of the framework, for the record.
        use_collectives: False: this rank alone.
        rules: What is known of the state beyond its values.
    """

    adapters: AdapterSet
    group: ProcessGroup
    framework: tuple[str, str]
    use_collectives: bool = True
    rules: StateRules = field(default_factory=StateRules)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides."""
        return self.group.rank == 0 or not self.use_collectives

    @property
    def world_size(self) -> int:
        """Ranks that call together; 1 where each is alone."""
        return self.group.world_size if self.use_collectives else 1

    def exchange(self, timeout_seconds: float) -> Exchange:
        """The exchanges of this call."""
        if not self.use_collectives or self.group.world_size == 1:
            return Exchange(0, 1, None, key=f"alone-{self.group.rank}", timeout_seconds=timeout_seconds)
        group = self.group
        return Exchange(group.rank, group.world_size, group.channel, key=group.key, timeout_seconds=timeout_seconds)

    def planner_context(self, descriptions: Descriptions, codec: ValueCodec | None = None) -> PlannerContext:
        """What a planner is told."""
        return PlannerContext(
            describe=descriptions.describe,
            codec=ObjectEncoding() if codec is None else codec,
            rank=self.group.rank,
            world_size=self.group.world_size,
            is_coordinator=self.is_coordinator,
            use_collectives=self.use_collectives,
            place=None if type(self.rules).place is StateRules.place else self.rules.place,
        )

    def state_of(self, path: StatePath, value: Any) -> object:
        """Ask a Stateful for its state; what it raises is named by its key and class."""
        try:
            return self.rules.state_of(value)
        except Exception as error:
            raise _named_failure(path, value, "state_dict", error) from error

    def hand_state(self, path: StatePath, value: Any, state: Any) -> None:
        """Give a Stateful its state; what it raises is named by its key and class."""
        try:
            self.rules.hand_state(value, state)
        except Exception as error:
            raise _named_failure(path, value, "load_state_dict", error) from error


@contextmanager
def paused_collection() -> Iterator[None]:
    """Keep Python from looking for garbage on its own while a block, or a function so decorated, runs.

    A save or load makes a few objects a tensor, which live to its end. Python takes every thousand of them as a reason
    to walk through objects, sometimes through all of the process, a training job's with them: that alone doubles the
    time of planning. What has no references left is freed as ever; only cycles wait until the end of the block. So this
    goes around a whole call: at its end little is left to walk through.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


def attempt(stage: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    """Run a stage of one rank; what it raises goes into the next exchange instead of up."""
    try:
        return stage(), None
    except BaseException as error:  # Ctrl-C on one rank is an error on all
        return None, error
