"""What suites have in common: they run parts of themselves in real processes.

A *job* is a method of the suite that takes a `RankContext` and what `in_rank` gives. It runs in every rank on an object
of its own: nothing of the test's process is there, so suites have no state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from dcp_core.dtype import DType
from dcp_core.testing.conformance.samples import Bits, View
from dcp_core.testing.ranks import RankContext, load_module, run_ranks


@dataclass(frozen=True, slots=True)
class _SuiteName:
    """How a rank finds the class of a suite."""

    module: str
    file: str | None
    qualname: str

    @classmethod
    def of(cls, suite: type) -> _SuiteName:
        if "<locals>" in suite.__qualname__:
            raise TypeError(f"{suite.__qualname__} is a class of a function; ranks need one of a module")
        return cls(suite.__module__, inspect.getsourcefile(suite), suite.__qualname__)

    def make(self) -> Any:
        found: Any = load_module(self.module, self.file)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return found()


class TensorSuite:
    """A suite that makes tensors of a framework.

    The tests do not trust the adapter with that: these methods are how they know better.
    """

    def make_tensor(self, bits: Bits, dtype: DType) -> Any | None:
        """Make a tensor, without the adapter's help.

        Args:
            bits: Its elements, contiguous; dtype is `DType.bits`. The suite does not use their memory any more.
            dtype: What they are.

        Returns:
            A tensor of that shape; None where the framework lacks the type.
        """
        raise NotImplementedError

    def bits_of(self, tensor: Any) -> Bits:
        """Copy a tensor's raw bits, or those of a view of one, without the adapter's help."""
        raise NotImplementedError

    def view_of(self, tensor: Any, view: View) -> Any | None:
        """A part of a tensor, sharing its memory, as indexing with slices or `.T` gives it.

        Args:
            tensor: From `make_tensor`.
            view: Takes the part of whatever can be indexed.

        Returns:
            The part; None where the framework has no such.
        """
        return view(tensor)


class RankedSuite:
    """A suite whose jobs run in ranks.

    Attributes:
        rank_seconds: When ranks that still run are ended, and their test fails.
    """

    rank_seconds = 60.0

    def in_rank(self, context: RankContext) -> AbstractContextManager[Any]:
        """Make a rank's process a part of the framework's job, until the context ends.

        Args:
            context: Which rank it is. `channel_directory` is shared by all: a place to meet.

        Returns:
            A context manager that gives the jobs what their suite says; the default gives None.
        """
        return nullcontext()

    def run_in_ranks(self, job: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """Run a job in real processes.

        Args:
            job: A method of this suite.
            world_size: How many.
            arguments: What the job gets after the `RankContext` and what `in_rank` gives; pickled.

        Returns:
            What each rank returned, by rank.
        """
        name = _SuiteName.of(type(self))
        return run_ranks(_run_job, world_size, name, job.__name__, arguments, timeout_seconds=self.rank_seconds)


def _run_job(context: RankContext, name: _SuiteName, job: str, arguments: tuple[Any, ...]) -> Any:
    suite = name.make()
    with suite.in_rank(context) as given:
        return getattr(suite, job)(context, given, *arguments)
