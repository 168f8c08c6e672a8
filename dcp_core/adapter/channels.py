"""How ranks exchange bytes: the channel, how another process makes one, and where the ranks of a job meet."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from dcp_core.errors import ArgumentError, CoordinationError, MissingRendezvousError

PlainArgument: TypeAlias = bool | int | float | str | bytes | None

_log = logging.getLogger("dcp.coordination")

_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
_WITHOUT_GLOO = "save with use_gloo=False, which talks through files in the checkpoint's directory"


@runtime_checkable
class KeyValueChannel(Protocol):
    """How ranks exchange bytes: a shared board of named messages, each written once.

    Names are ASCII without separators other than "." and "-". A message is seen whole or not at all.
    """

    def put(self, name: str, payload: bytes) -> None:
        """Post a message."""
        ...

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        """Wait for a message and return it; None when it did not come in time."""
        ...

    def delete(self, name: str) -> None:
        """Remove a message; one that is not there is no error."""
        ...


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """How another process of the same rank makes a channel: a function to call there, and what with.

    Attributes:
        module: The module to import there.
        function: The name of a function in it; returns a `KeyValueChannel`, or raises within a time of its own.
        arguments: What the function is called with, by name; None, bool, int, float, str or bytes each.

    Raises:
        ArgumentError: An argument that is none of these.
    """

    module: str
    function: str
    arguments: Mapping[str, PlainArgument] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", dict(self.arguments))
        for name, value in self.arguments.items():
            if type(value) not in (type(None), bool, int, float, str, bytes):
                raise ArgumentError(
                    f"argument {name!r} of {self._shown} is a {type(value).__qualname__}; another process gets None, "
                    "bool, int, float, str or bytes"
                )

    def open(self) -> KeyValueChannel:
        """Make the channel, in the process that shall use it.

        Raises:
            CoordinationError: The module or the function is missing there, the call failed, or returned no channel.
        """
        try:
            function = getattr(importlib.import_module(self.module), self.function)
        except Exception as error:
            raise self._failure(error, "make the package importable there") from error
        try:
            channel = function(**self.arguments)
        except CoordinationError:
            raise
        except Exception as error:
            raise self._failure(error, "see its cause") from error
        if not isinstance(channel, KeyValueChannel):
            raise CoordinationError(
                f"{self._shown} returned a {type(channel).__qualname__}, which lacks put, wait or delete: the adapter "
                f"that named it must return a channel; or {_WITHOUT_GLOO}"
            )
        return channel

    def to_plain(self) -> dict[str, Any]:
        """What makes an equal one, as plain values."""
        return {"module": self.module, "function": self.function, "arguments": dict(self.arguments)}

    @property
    def _shown(self) -> str:
        return f"{self.module}:{self.function}"

    def _failure(self, error: Exception, remedy: str) -> CoordinationError:
        return CoordinationError(
            f"{self._shown} made no channel in process {os.getpid()}: {type(error).__name__}: {error}; {remedy}, or "
            f"{_WITHOUT_GLOO}"
        )


def rendezvous_address(environment: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Where the environment says that the ranks of the job meet.

    Args:
        environment: The variables; None for those of this process.

    Returns:
        Host and port: MASTER_ADDR and MASTER_PORT.

    Raises:
        MissingRendezvousError: One of them is missing, or the port is none.

    >>> rendezvous_address({"MASTER_ADDR": "node7", "MASTER_PORT": "29500"})
    ('node7', 29500)
    """
    variables = os.environ if environment is None else environment
    host, port = (variables.get(name, "").strip() for name in _RENDEZVOUS)
    if host and port.isdecimal() and 0 < int(port) < 65536:
        return host, int(port)
    found = ", ".join(f"{name}={variables[name]!r}" for name in _RENDEZVOUS if name in variables)
    raise MissingRendezvousError(
        f"use_gloo=True needs MASTER_ADDR and MASTER_PORT in the environment, found {found or 'neither'}: start the "
        f"job with its launcher (torchrun), or set both; or {_WITHOUT_GLOO}"
    )


def drain(channel: KeyValueChannel | None, timeout_seconds: float) -> None:
    """Wait until every rank has read the last answer, where the channel can tell, or the time is up.

    For the end of a save, when the process that carries the channel may end right after. Never fails: the save has its
    outcome by then. A channel that cannot tell has no `drain` method, and is not waited for.
    """
    wait = getattr(channel, "drain", None)
    if wait is None:
        return
    try:
        wait(timeout_seconds)
    except Exception as error:
        _log.debug("whether all ranks have read the last answer cannot be seen: %s", error)
