"""The seam: what a framework hands to the core.

An `Adapter` serves one framework: it recognises its tensors, describes them, reaches their elements, and knows the
process group. A `Describer` serves one foreign tensor type on top of an adapter. Both are found through the plugins
of `dcp_core.hookspecs`.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from dcp_core.errors import AdapterError, ArgumentError, CoordinationError, DcpError, MissingRendezvousError
from dcp_core.planning.description_checks import description_problem
from dcp_core.planning.leaves import LocalTensor, TensorAccess

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


class BroadcastWork(Protocol):
    """One broadcast that was started. Until it is done, nobody touches the bytes that it sends or receives."""

    def is_done(self) -> bool:
        """Whether `wait` returns, or raises, at once. Never blocks."""
        ...

    def wait(self) -> None:
        """Wait for the bytes to be here or, on the source, with the others; may be called again.

        Raises:
            CoordinationError: They will not come: the source or another member failed, or did not come in time. Names
                the source, the members and the cause.
        """
        ...


class BroadcastGroup(Protocol):
    """Ranks that broadcast to each other: the same broadcasts, of the same sizes, in the same order on all of them.

    A *view* is a part of a tensor: a numpy array of its raw bits where it lies in host memory as it is, else what a
    planner acquires. A *wire* is contiguous bytes on the same device, in what the framework broadcasts. All views of
    one broadcast have one dtype.
    """

    def wire(self, view: Any) -> Any | None:
        """The view's own memory as bytes, for a broadcast out of or into it; None where it is not plain bytes."""
        ...

    def temporary(self, nbytes: int, view: Any) -> Any:
        """Bytes on the device of a view, of undefined content; slices of it are wires as well."""
        ...

    def pack(self, views: Sequence[Any], wire: Any) -> None:
        """Copy the raw bits of views, one after the other, row-major, to a wire of as many bytes."""
        ...

    def unpack(self, wire: Any, views: Sequence[Any]) -> None:
        """Undo `pack`, in one operation where the framework has one."""
        ...

    def broadcast(self, wire: Any, source: int) -> BroadcastWork:
        """Start to send a wire, or to receive into it. Several may be under way.

        Never raises for what goes wrong between ranks: the work does. After a failure nothing is started any more, and
        later works fail at once; but what was under way may still write to its wire, until its time is up.

        Args:
            wire: Bytes, as many on all members.
            source: Global rank of the member that sends.
        """
        ...

    def fail(self, error: CoordinationError) -> None:
        """Give the group up: this rank cannot take part any more. Nothing is started in it from then on.

        What is under way ends with the error; the other members' broadcasts end with an error that tells of it, soon.

        Args:
            error: Why.
        """
        ...

    def close(self) -> None:
        """Destroy what `Broadcasts.open` made, in bounded time whatever has happened; a group that was given stays.

        Works that are not done are done then, with an error.
        """
        ...


class Broadcasts(Protocol):
    """How buffers travel from one rank to others. Made with the process group; used on the thread that loads.

    Ranks are global ranks of the job throughout, also where the process group is not all of it.
    """

    def kind(self, device: str) -> str | None:
        """Name what carries broadcasts of memory on a type of device ("cpu": "gloo"); None: nothing does."""
        ...

    def carries(self, view: Any) -> bool:
        """Whether a view is one that groups take: one of this framework. A state may hold leaves of others as well."""
        ...

    def given_groups(self, groups: Mapping[tuple[int, ...], Any]) -> Mapping[tuple[int, ...], Any]:
        """Check the groups that a caller passed, before anybody relies on them.

        Args:
            groups: What the framework calls a group, by the ranks of its members in any order.

        Returns:
            What to pass to `open`, by ascending ranks; without those that this rank is no member of.

        Raises:
            ArgumentError: A key is no tuple of ranks, or its group is none, is gone, or has other members.
        """
        ...

    def existing_groups(self, values: Iterable[Any]) -> Mapping[tuple[int, ...], str]:
        """Groups that tensors brought along (of a mesh that they lie on), and that exist in this process.

        Args:
            values: Leaves of a state.

        Returns:
            By ascending ranks, a name: the same on all members, and what to pass to `open`.
        """
        ...

    def open(
        self, ranks: tuple[int, ...], given: Any | None, timeout_seconds: float, *, token: str, device: str = "cpu"
    ) -> BroadcastGroup:
        """Open a group; its members all do, in ascending order of `ranks` if they open several.

        Args:
            ranks: Its members, ascending; this one among them.
            given: From `given_groups`, or a name from `existing_groups`, on all members or on none. None, or a group
                that cannot carry memory of this device: one is made, by its members alone.
            timeout_seconds: How long to wait for members to come, and later for a broadcast.
            token: Names this load: the same on all its ranks, and never used before in the job. With a new one, every
                rank has ended the load before; what that left is removed.
            device: What type of device the buffers lie on.

        Raises:
            CoordinationError: Members did not come in time, or the group could not be made.
        """
        ...

    def give_up(self, ranks: tuple[int, ...], reason: str, *, token: str, device: str = "cpu") -> None:
        """Tell the members of a group that this rank will not open it, so that nobody waits for it. Waits for nobody.

        Args:
            ranks: The members, as for `open`.
            reason: Why, in a clause that names this rank.
            token: As for `open`.
            device: As for `open`.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The ranks that save or load together.

    Attributes:
        rank: This process in the group.
        world_size: Ranks of the group.
        global_rank: This process in the job.
        channel: How they talk; None for a group of one. Holding it keeps what it goes through: a store that this
            process hosts serves the others for as long.
        key: Names the group within the process: equal for calls on the same group.
        remote: How the background process of this rank talks to those of the other ranks; None where the adapter has
            no channel for them, and for a group of one.
        broadcasts: How buffers travel between the ranks; None where the adapter has no way, and for a group of one.
    """

    rank: int = 0
    world_size: int = 1
    global_rank: int = 0
    channel: KeyValueChannel | None = None
    key: str = "alone"
    remote: ChannelSpec | None = None
    broadcasts: Broadcasts | None = None


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


class Adapter(TensorAccess, Protocol):
    """One framework: `TensorAccess` (host_array, read_out, copy_into, narrow, writable_problem), and more."""

    name: str
    version: str

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a tensor of this framework; None for a value that is none.

        Raises:
            UnsupportedValueError: A tensor that cannot be stored (a Partial, an unknown subclass).
        """
        ...

    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        """The group of this process: `group`, or the job's default one, or a group of one.

        Makes the CPU channel, once per process and group. Never a collective on the accelerator.

        Args:
            group: What the framework calls a group; None for the job's default one.
            with_channel: False for a caller that only asks which rank this is: nothing is made.
        """
        ...


class StateRules:
    """What one call knows of its state that the values alone do not tell. By default, nothing.

    A package of a framework hands an object of a class of its own to `dcp_core.api`. Its methods are called where
    errors of one rank become errors of all.
    """

    def place(
        self, names: Sequence[str], values: Sequence[Any], tensors: Sequence[LocalTensor | None]
    ) -> Sequence[LocalTensor | None]:
        """Say what the tensors of a state are, given their names: as described, or shards of larger tensors.

        Args:
            names: Of all leaves, unique on this rank.
            values: What the user has there.
            tensors: How adapters and describers describe them; None for a leaf that is no tensor.

        Returns:
            The descriptions that count.

        Raises:
            DcpError: A value cannot be what it is said to be. Names its key.
        """
        return tensors

    def state_of(self, value: Any) -> object:
        """The state of a Stateful object: what its `state_dict` returns."""
        return value.state_dict()

    def hand_state(self, value: Any, state: Any) -> None:
        """Give a Stateful object the state that was loaded: call its `load_state_dict`.

        Args:
            value: The object.
            state: What `state_of` returned, with containers copied, its tensors filled in place and its plain values
                replaced.
        """
        value.load_state_dict(state)


class Describer(Protocol):
    """One foreign tensor type."""

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a value of the type; None to leave it to others."""
        ...


class AdapterSet:
    """The adapters that are active in this process, asked in turn.

    Args:
        adapters: The adapters.
        describers: Those of `dcp_core.plugin_claims`, asked before: they check themselves what they say.
        declined: Tells why a value that nobody describes must not pass for a plain value, or gives None.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        describers: Sequence[Describer] = (),
        declined: Callable[[Any], str | None] | None = None,
    ) -> None:
        self.adapters = tuple(adapters)
        self.describers = tuple(describers)
        self.declined = declined

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a tensor leaf by the first describer or adapter that claims it; None for any other value.

        Raises:
            AdapterError: What a describer or an adapter said is wrong, or it raised what is no error of DCP. Names it.
            UnsupportedValueError: The value cannot be stored as it is.
        """
        for describer in self.describers:
            found = describer.describe(value)
            if found is not None:
                return found
        for adapter in self.adapters:
            try:
                found = adapter.describe(value)
            except DcpError:
                raise
            except Exception as error:
                raise _described_wrongly(adapter, value, f"raised {type(error).__name__}: {error}") from error
            if found is not None:
                problem = description_problem(found)
                if problem is not None:
                    raise _described_wrongly(adapter, value, problem)
                return found
        problem = None if self.declined is None else self.declined(value)
        if problem is not None:
            raise AdapterError(problem)
        return None


def _described_wrongly(adapter: Adapter, value: Any, problem: str) -> AdapterError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return AdapterError(
        f"{type(adapter).__qualname__}.describe {problem}; this is the adapter {adapter.name!r}, asked about a value "
        f"of type {kind}: repair the adapter, or take such values out of the state"
    )
