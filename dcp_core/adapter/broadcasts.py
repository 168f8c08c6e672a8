"""How buffers travel from one rank to others: groups of ranks, and broadcasts of bytes in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from dcp_core.errors import CoordinationError


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
