"""The arguments that callers give, checked: what is wrong with one, which one, and what was expected."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from dcp_core.errors import ArgumentError

_LONGEST_SECONDS = 1e9  # what every channel can count with


def is_flag(flag: object, value: bool) -> bool:
    """Whether a flag, numpy's included, has a value."""
    return isinstance(flag, (bool, np.bool_)) and bool(flag) is value


def checked_kind(value: Any, kind: type[Any], name: str) -> Any:
    """The value, if it is None or of a kind.

    Raises:
        ArgumentError: It is neither.
    """
    if value is not None and not isinstance(value, kind):
        raise ArgumentError(f"{name} must be a {kind.__name__}, found {type(value).__name__}")
    return value


def check_adapter(adapter: object) -> None:
    """See that something is an adapter, or None.

    Raises:
        ArgumentError: It is not.
    """
    if adapter is not None and (isinstance(adapter, type) or not callable(getattr(adapter, "process_group", None))):
        raise ArgumentError(
            f"adapter must be an Adapter, as dcp_core.plugins.adapter_named('torch') gives one, found {adapter!r}"
        )


def check_path(path: object, name: str) -> None:
    """See that something is a path.

    Args:
        path: What was given.
        name: What the argument is called.

    Raises:
        ArgumentError: It is not.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str) or "\0" in os.fspath(path):
        raise ArgumentError(f"{name} must be a path, found {path!r}")


def check_callable(function: object, name: str, arguments: str) -> None:
    """See that something is a function, or None.

    Args:
        function: What was given.
        name: What the argument is called.
        arguments: What it is called with, in words.

    Raises:
        ArgumentError: It is not.
    """
    if function is not None and not callable(function):
        raise ArgumentError(f"{name} must be a function of {arguments}, found {function!r}")


def check_wait(timeout: object, name: str = "timeout") -> None:
    """See that a time to wait is a number of seconds, 0 or more, or None: as long as it takes.

    Raises:
        ArgumentError: It is neither.
    """
    is_number = isinstance(timeout, (int, float, np.integer, np.floating)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 <= timeout <= _LONGEST_SECONDS):  # type: ignore[operator]
        raise ArgumentError(
            f"{name} must be a number of seconds from 0 to {_LONGEST_SECONDS:g}, or None to wait as long as it takes, "
            f"found {timeout!r}"
        )


def check_place(checkpoint_id: object, storage: object) -> None:
    """See that something says where the checkpoint is.

    Raises:
        ArgumentError: Nothing does, or `checkpoint_id` is neither a path nor a URL.
    """
    if checkpoint_id is None and storage is None:
        raise ArgumentError("where is the checkpoint? Pass checkpoint_id, or a storage object that was given a path")
    if checkpoint_id is not None and not isinstance(checkpoint_id, (str, os.PathLike)):
        raise ArgumentError(f"checkpoint_id must be a path or a URL, found {type(checkpoint_id).__name__}")


def check_timeout(timeout_seconds: object) -> None:
    """See that a deadline is a number of seconds that every channel can count with.

    Raises:
        ArgumentError: It is none.
    """
    number = timeout_seconds if isinstance(timeout_seconds, (int, float)) and timeout_seconds is not True else 0
    if not 0 < number <= _LONGEST_SECONDS:
        raise ArgumentError(
            f"timeout_seconds must be a positive number of seconds, at most {_LONGEST_SECONDS:g}, found "
            f"{timeout_seconds!r}"
        )


def usable_timeout(timeout_seconds: Any, otherwise: float) -> float:
    """A deadline for telling the others about a bad argument: the one that was given, if it is none of the bad ones."""
    try:
        check_timeout(timeout_seconds)
    except ArgumentError:
        return otherwise
    return float(timeout_seconds)


def check_flags(**flags: object) -> None:
    """See that flags are True or False.

    Raises:
        ArgumentError: One is not; it is named.
    """
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ArgumentError(f"{name} must be True or False, found {value!r}")


def check_comparable(check_replicas: bool, *, alone: bool) -> None:
    """See that there are ranks to compare.

    Raises:
        ArgumentError: Each saves alone.
    """
    if check_replicas and alone:
        raise ArgumentError(
            "check_replicas=True compares ranks, which no_dist=True and use_collectives=False keep apart; leave one out"
        )


def check_async(use_gloo: object, callback: object, on_pending: object) -> None:
    """Check what only a save in the background takes.

    Raises:
        ArgumentError: One of them is not what it should be.
    """
    check_flags(use_gloo=use_gloo)
    if callback is not None and not callable(callback):
        raise ArgumentError(f"callback must be a function without arguments, found {callback!r}")
    if not isinstance(on_pending, str) or on_pending not in ("wait", "raise"):
        raise ArgumentError(f'on_pending must be "wait" or "raise", found {on_pending!r}')


def check_broadcast(broadcast: object, groups: object, batch_bytes: object) -> None:
    """Check what says how reads are shared.

    Raises:
        ArgumentError: One of them is not what it should be, or they contradict each other.
    """
    if not isinstance(broadcast, (bool, str)) or broadcast not in (True, False, "auto"):
        raise ArgumentError(f'broadcast_replicated_tensors must be True, False or "auto", found {broadcast!r}')
    if groups is not None and broadcast is False:
        raise ArgumentError("broadcast_groups was given with broadcast_replicated_tensors=False; leave one of them out")
    if groups is not None and not isinstance(groups, Mapping):
        raise ArgumentError(f"broadcast_groups must map tuples of ranks to groups, found {type(groups).__name__}")
    if isinstance(batch_bytes, bool) or not isinstance(batch_bytes, (int, np.integer)) or batch_bytes < 0:
        raise ArgumentError(f"broadcast_batch_bytes must be a number of bytes, 0 or more, found {batch_bytes!r}")


def check_verify(verify: object) -> None:
    """See that `verify` is one of its three values.

    Raises:
        ArgumentError: It is not.
    """
    if not isinstance(verify, (bool, str)) or verify not in (True, False, "full"):
        raise ArgumentError(f'verify must be True, False or "full", found {verify!r}')
