"""Calls public functions with each of their arguments wrong in turn, and tells what was raised that is none of ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dcp_core.errors import ArgumentError, DcpError, RankFailedError

NONSENSE: tuple[Any, ...] = (
    3, -1, 0, 1.5, float("nan"), 10**30, True, "", "no such thing", b"bytes", [], [None], ["a"], (), ((1,), 2), {},
    {1: 2}, {"a": None}, {None}, None, object(), len, int, NotImplemented,
)  # fmt: skip

Arguments = Callable[[], Mapping[str, Any]]


def foreign_errors(function: Callable[..., Any], good: Arguments, unchecked: tuple[str, ...] = ()) -> Iterator[str]:
    """Call a function with nonsense for each of its parameters, the others good.

    Args:
        function: What is called.
        good: Makes arguments by name that work.
        unchecked: Parameters that are left alone.

    Yields:
        A line for each call that raised what is no error of ours, or one of ours that stands for such.
    """
    for name, parameter in inspect.signature(function).parameters.items():
        if name in unchecked or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        for value in NONSENSE:
            error = outcome(function, good, name, value)
            if error is not None and (isinstance(error, RankFailedError) or not isinstance(error, DcpError)):
                yield f"{function.__qualname__}({name}={value!r}): {type(error).__name__}: {error}"


def outcome(function: Callable[..., Any], good: Arguments, name: str, value: Any) -> Exception | None:
    """What a call raises with one argument replaced; None where it goes well."""
    arguments, positional = {**good(), name: value}, []
    by_place = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
    for each, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in by_place and each in arguments:
            positional.append(arguments.pop(each))
    try:
        function(*positional, **arguments)
    except Exception as error:
        return error
    return None


def names_argument(function: Callable[..., Any], good: Arguments, name: str, value: Any) -> bool:
    """Whether the error for a wrong argument is an `ArgumentError` that names it, and what was found."""
    error = outcome(function, good, name, value)
    return isinstance(error, ArgumentError) and name in str(error) and repr(value) in str(error)
