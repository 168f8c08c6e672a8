"""What suites have in common: they run parts of themselves in real processes.

A *job* is a method of the suite that takes a `RankContext` and what `in_rank` gives. It runs in every rank on an object
of its own: nothing of the test's process is there, so suites have no state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from dcp_core.dtype import BY_NAME, DTYPES, DType
from dcp_core.testing.conformance.samples import SHAPE, VIEWS, Bits, View, random_bits
from dcp_core.testing.ranks import RankContext, load_module, run_ranks

_NEEDED = frozenset({"int32", "float32"})


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

    Attributes:
        lacking_dtypes: Names of the element types that the framework lacks; tests of these are skipped. Everything
            else must be made, and these must not be: what is declared here is checked.
        lacking_views: Names of the views of `samples.VIEWS` that the framework lacks, likewise.
    """

    lacking_dtypes: tuple[str, ...] = ()
    lacking_views: tuple[str, ...] = ()

    def make_tensor(self, bits: Bits, dtype: DType) -> Any | None:
        """Make a tensor, without the adapter's help.

        Args:
            bits: Its elements, contiguous; dtype is `DType.bits`. The suite does not use their memory any more.
            dtype: What they are.

        Returns:
            A tensor of that shape; None where the framework lacks the type, which `lacking_dtypes` then names.
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
            The part; None where the framework has no such, which `lacking_views` then names.
        """
        return view(tensor)

    def _made(self, bits: Bits, dtype: DType) -> Any:
        """A tensor of a type that is not declared to be lacking."""
        tensor = self.make_tensor(bits.copy(), dtype)
        if tensor is None:
            pytest.fail(
                f"make_tensor gives None for {dtype.name}; make a tensor of it, or, if the framework has no such type, "
                f"let lacking_dtypes of {type(self).__name__} name it"
            )
        return tensor

    def _taken(self, tensor: Any) -> Iterator[tuple[str, Any]]:
        """The views of a tensor that are not declared to be lacking, by name."""
        for name, view in VIEWS.items():
            if name not in self.lacking_views:
                yield name, self._view_named(name, view, tensor)

    def _view_named(self, name: str, view: View, tensor: Any) -> Any:
        taken = self.view_of(tensor, view)
        if taken is None:
            pytest.fail(
                f"view_of gives None for the view {name!r}; take it, or, if the framework has no such views, let "
                f"lacking_views of {type(self).__name__} name it"
            )
        return taken

    def _dtypes(self) -> list[DType]:
        """The element types that are not declared to be lacking."""
        return [dtype for dtype in DTYPES if dtype.name not in self.lacking_dtypes]

    def _wrong_declarations(self) -> list[str]:
        """What is wrong with `lacking_dtypes` and `lacking_views`: each of it is tried."""
        wrong = [f"lacking_dtypes names {name!r}, which is no dtype" for name in set(self.lacking_dtypes) - {*BY_NAME}]
        wrong += [f"lacking_views names {name!r}, which is no view" for name in set(self.lacking_views) - {*VIEWS}]
        wrong += [f"lacking_dtypes names {name!r}; the suite needs it" for name in _NEEDED & {*self.lacking_dtypes}]
        for dtype in DTYPES:
            if dtype.name in self.lacking_dtypes and _is_given(self.make_tensor, _of(dtype), dtype):
                wrong.append(f"lacking_dtypes names {dtype.name!r}, and yet make_tensor makes one; take it out")
        tensor = self._made(_of(BY_NAME["int32"]), BY_NAME["int32"])
        for name, view in VIEWS.items():
            if name in self.lacking_views and _is_given(self.view_of, tensor, view):
                wrong.append(f"lacking_views names {name!r}, and yet view_of takes it; take it out")
        return sorted(wrong)


def _of(dtype: DType) -> Bits:
    return random_bits(dtype, SHAPE)


def _is_given(make: Callable[..., Any], *arguments: Any) -> bool:
    """Whether something can be made: what a framework lacks it may refuse in any way."""
    try:
        return make(*arguments) is not None
    except Exception:
        return False


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
