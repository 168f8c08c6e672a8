"""The suite of an adapter's broadcasts: what one rank sends, the others have, bit for bit, or an error in time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest

from dcp_core.adapter import Adapter, BroadcastGroup, Broadcasts, BroadcastWork, ProcessGroup, drain
from dcp_core.coordination.exchange import Exchange
from dcp_core.dtype import BY_NAME
from dcp_core.errors import ArgumentError, CoordinationError
from dcp_core.testing.conformance.comparing import told_difference
from dcp_core.testing.conformance.samples import FOREIGN_VALUES, SHAPE, VIEWS, random_bits, raw
from dcp_core.testing.conformance.suite import RankedSuite, TensorSuite
from dcp_core.testing.ranks import RankContext

_INT32 = BY_NAME["int32"]
_SECONDS = 20.0
_SHORT_SECONDS = 1.5
_HEARD_SECONDS = 6.0
_DRAIN_SECONDS = 2.0
_REASON = "rank 1 is out of paper"
_VIEWS = [view for view in VIEWS if view != "nothing"]


class BroadcastConformance(TensorSuite, RankedSuite):
    """Tests of `Broadcasts` and `BroadcastGroup`. `in_rank` starts the framework's job, and gives the adapter.

    Attributes:
        device: The type of device that the tensors lie on, as `LocalTensor.device` says it.
        patience_seconds: How long after its deadline a wait may end.
    """

    device = "cpu"
    patience_seconds = 20.0

    def foreign_values(self) -> Iterable[Any]:
        """Values that are no tensors of this framework, besides those of Python: arrays of others."""
        return ()

    def test_there_is_something_that_carries_tensors(self) -> None:
        """`kind` names it; an unknown device has none."""
        found = self.run_in_ranks(self._tell_kinds, 2)
        assert all(isinstance(kind, str) and kind for kind, _ in found)
        assert {kind for kind, _ in found} == {found[0][0]}
        assert [other for _, other in found] == [None, None]

    def _tell_kinds(self, context: RankContext, adapter: Adapter) -> tuple[str | None, str | None]:
        """A job: what carries broadcasts here, and on a device that does not exist."""
        found = self._broadcasts(adapter)
        kinds = found.kind(self.device), found.kind("no such device")
        self._meet(adapter)
        return kinds

    def test_what_is_declared_to_be_lacking_cannot_be_made(self) -> None:
        """`lacking_dtypes` and `lacking_views` hide nothing: what they name is tried."""
        assert self.run_in_ranks(self._tell_wrong_declarations, 1) == [[]]

    def _tell_wrong_declarations(self, context: RankContext, adapter: Adapter) -> list[str]:
        """A job: what is declared to be lacking, and is not."""
        return self._wrong_declarations()

    def test_tensors_are_carried_and_nothing_else(self) -> None:
        """One state may hold leaves of several frameworks; each rank reads those of others by itself."""
        assert self.run_in_ranks(self._tell_what_is_carried, 2) == [(True, [])] * 2

    def _tell_what_is_carried(self, context: RankContext, adapter: Adapter) -> tuple[bool, list[str]]:
        """A job: whether a tensor is carried, and which foreign values are."""
        found = self._broadcasts(adapter)
        carried = [repr(value) for value in (*FOREIGN_VALUES, *self.foreign_values()) if found.carries(value)]
        tensor = self._made(random_bits(_INT32, SHAPE), _INT32)
        is_carried = found.carries(tensor) or found.carries(_handed(adapter, tensor))
        self._meet(adapter)
        return is_carried, carried

    def test_every_dtype_and_layout_arrives(self) -> None:
        """Out of a view's own memory and into it where it is plain bytes, else packed; nothing beside it changes."""
        assert self.run_in_ranks(self._send_every_view, 2) == [[], []]

    def _send_every_view(self, context: RankContext, adapter: Adapter) -> list[str]:
        """A job: rank 1 sends views of all types and layouts; gives those that are wrong."""
        group = self._open(adapter, (0, 1), "views")
        wrong = []
        for dtype in self._dtypes():
            own, sent = (random_bits(dtype, SHAPE, rank) for rank in (context.rank, 1))
            for name in self._view_names():
                tensor = self._made(own, dtype)
                view = _handed(adapter, self._view_named(name, VIEWS[name], tensor))
                self._travel(group, [view], VIEWS[name](sent).nbytes, 1, context.rank)
                expected = own.copy()
                VIEWS[name](expected)[...] = VIEWS[name](sent)
                where = f"the tensor of {dtype.name} whose view {name!r} was sent by rank 1"
                wrong.append(told_difference(self.bits_of(tensor), expected, where))
        self._close(adapter, group)
        return [problem for problem in wrong if problem is not None]

    def test_a_batch_arrives_in_its_order(self) -> None:
        """Several views travel as one wire, and come apart again."""
        assert self.run_in_ranks(self._send_batches, 2) == [[], []]

    def _send_batches(self, context: RankContext, adapter: Adapter) -> list[str]:
        """A job: rank 0 sends all views of a type at once; gives what is wrong."""
        group = self._open(adapter, (0, 1), "batches")
        wrong = []
        for dtype in self._dtypes():
            taken, sent = [], []
            for number, name in enumerate(self._view_names()):
                tensor = self._made(random_bits(dtype, SHAPE, 10 * context.rank + number), dtype)
                taken.append(self._view_named(name, VIEWS[name], tensor))
                sent.append(VIEWS[name](random_bits(dtype, SHAPE, number)))
            views = [_handed(adapter, part) for part in taken]
            self._travel(group, views, sum(bits.nbytes for bits in sent), 0, context.rank)
            for name, part, expected in zip(self._view_names(), taken, sent, strict=True):
                where = f"the view {name!r} of {dtype.name}, sent by rank 0 among others"
                wrong.append(told_difference(self.bits_of(part), expected, where))
        self._close(adapter, group)
        return [problem for problem in wrong if problem is not None]

    def test_parts_of_a_temporary_travel_alone(self) -> None:
        """Slices of a temporary wire are wires as well."""
        assert self.run_in_ranks(self._send_slices, 2) == [True, True]

    def _send_slices(self, context: RankContext, adapter: Adapter) -> bool:
        """A job: send the halves of a packed tensor, the second one first."""
        group = self._open(adapter, (0, 1), "slices")
        tensor = self._made(random_bits(_INT32, SHAPE, context.rank), _INT32)
        view = _handed(adapter, tensor)
        wire = group.temporary(120, view)
        if context.rank == 0:
            group.pack([view], wire)
        for part in (wire[60:120], wire[:60]):
            group.broadcast(part, 0).wait()
        if context.rank == 1:
            group.unpack(wire, [view])
        self._close(adapter, group)
        return raw(self.bits_of(tensor)) == raw(random_bits(_INT32, SHAPE, 0))

    def test_many_are_under_way_in_several_groups(self) -> None:
        """From every member, awaited in another order than they were started in."""
        assert self.run_in_ranks(self._send_in_many_groups, 4) == [[], [], [], []]

    def _send_in_many_groups(self, context: RankContext, adapter: Adapter) -> list[str]:
        """A job: overlapping groups, two turns of broadcasts from each member; gives what is wrong."""
        found = self._broadcasts(adapter)
        all_ranks = [(0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 3), (1, 2, 3)]
        mine = [ranks for ranks in all_ranks if context.rank in ranks]
        opened = [(ranks, found.open(ranks, None, _SECONDS, token="many", device=self.device)) for ranks in mine]
        started: list[tuple[Any, bytes, BroadcastWork]] = []
        for turn in range(2):
            for ranks, group in opened:
                for source in ranks:
                    tensor = self._made(random_bits(_INT32, (50, 40), 100 * turn + context.rank), _INT32)
                    expected = raw(random_bits(_INT32, (50, 40), 100 * turn + source))
                    wire = group.wire(_handed(adapter, tensor))
                    assert wire is not None, "a contiguous tensor is its own wire"
                    started.append((tensor, expected, group.broadcast(wire, source)))
        wrong = []
        for number, (tensor, expected, work) in reversed(list(enumerate(started))):
            work.wait()
            work.wait()
            if not work.is_done() or raw(self.bits_of(tensor)) != expected:
                wrong.append(str(number))
        self._meet(adapter)
        for _, group in opened:
            group.close()
        return wrong

    def test_loads_follow_each_other(self) -> None:
        """The same groups, opened again under another token, carry what belongs to that load."""
        assert self.run_in_ranks(self._load_three_times, 2) == [[], []]

    def _load_three_times(self, context: RankContext, adapter: Adapter) -> list[int]:
        """A job: open, send, close, three times; gives the turns that went wrong."""
        wrong = []
        for turn in range(3):
            group = self._open(adapter, (0, 1), f"load-{turn}")
            tensor = self._made(random_bits(_INT32, SHAPE, 10 * turn + context.rank), _INT32)
            group.broadcast(group.wire(_handed(adapter, tensor)), turn % 2).wait()
            if raw(self.bits_of(tensor)) != raw(random_bits(_INT32, SHAPE, 10 * turn + turn % 2)):
                wrong.append(turn)
            self._close(adapter, group)
        return wrong

    def test_a_member_that_does_not_send_is_an_error_when_the_time_is_up(self) -> None:
        """Not a hang: it names the member. What is started afterwards fails at once, and closing takes no long time."""
        waited = self.run_in_ranks(self._wait_for_nobody, 2)[0]
        assert waited is not None
        message, seconds, later = waited
        assert "rank 1" in message or "ranks 1" in message
        assert seconds < _SHORT_SECONDS + self.patience_seconds
        assert later < self.patience_seconds

    def _wait_for_nobody(self, context: RankContext, adapter: Adapter) -> tuple[str, float, float] | None:
        """A job: rank 1 opens the group and sends nothing; gives rank 0's error, and how long it and the rest took."""
        group = self._open(adapter, (0, 1), "silence", _SHORT_SECONDS)
        found = None
        if context.rank == 0:
            view = _handed(adapter, self._made(random_bits(_INT32, SHAPE), _INT32))
            work = group.broadcast(group.wire(view), 1)
            began = time.monotonic()
            work.is_done()
            with pytest.raises(CoordinationError) as caught:
                work.wait()
            ended = time.monotonic()
            with pytest.raises(CoordinationError):
                group.broadcast(group.temporary(4, view), 1).wait()
            group.close()
            found = str(caught.value), ended - began, time.monotonic() - ended
        self._meet(adapter)
        if context.rank == 1:
            group.close()
        return found

    def test_arrays_in_host_memory_travel_as_well(self) -> None:
        """A state may hold arrays, and groups get what lies in host memory as arrays of its bits."""
        assert self.run_in_ranks(self._send_arrays, 2) == [[], []]

    def _send_arrays(self, context: RankContext, adapter: Adapter) -> list[str]:
        """A job: rank 0 sends arrays, one and several; gives what is wrong. Where nothing carries them: nothing."""
        found = self._broadcasts(adapter)
        if found.kind("cpu") is None:
            self._meet(adapter)
            return []
        group = found.open((0, 1), None, _SECONDS, token="arrays", device="cpu")
        wrong = []
        for names in ([name] for name in _VIEWS):
            own = [VIEWS[name](random_bits(_INT32, SHAPE, context.rank)) for name in (*names, *_VIEWS)]
            sent = [VIEWS[name](random_bits(_INT32, SHAPE, 0)) for name in (*names, *_VIEWS)]
            self._travel(group, own[:1], own[0].nbytes, 0, context.rank)
            self._travel(group, own[1:], sum(view.nbytes for view in own[1:]), 0, context.rank)
            for name, array, expected in zip((*names, *_VIEWS), own, sent, strict=True):
                wrong.append(told_difference(array, expected, f"the view {name!r} of an array"))
        self._close(adapter, group)
        return [problem for problem in wrong if problem is not None]

    def test_a_member_that_gives_up_is_heard_before_the_time_is_up(self) -> None:
        """`fail` ends what is under way everywhere, and tells why."""
        waited, own = self.run_in_ranks(self._wait_for_one_that_gives_up, 2)
        assert _REASON in waited and _REASON in own

    def _wait_for_one_that_gives_up(self, context: RankContext, adapter: Adapter) -> str:
        """A job: rank 1 gives the group up; gives the errors."""
        group = self._open(adapter, (0, 1), "fails", _HEARD_SECONDS)
        view = _handed(adapter, self._made(random_bits(_INT32, SHAPE), _INT32))
        if context.rank == 1:
            group.fail(CoordinationError(_REASON))
        with pytest.raises(CoordinationError) as caught:
            group.broadcast(group.wire(view), 1).wait()
        self._close(adapter, group)
        return str(caught.value)

    def test_a_member_that_will_not_come_is_heard_before_the_time_is_up(self) -> None:
        """`give_up` is told in the place of opening a group."""
        assert _REASON in self.run_in_ranks(self._wait_for_one_that_stays_away, 2)[0]

    def _wait_for_one_that_stays_away(self, context: RankContext, adapter: Adapter) -> str:
        """A job: rank 1 does not open the group, and says so; gives rank 0's error."""
        found, text = self._broadcasts(adapter), ""
        if context.rank == 1:
            found.give_up((0, 1), _REASON, token="away", device=self.device)
        else:
            view = _handed(adapter, self._made(random_bits(_INT32, SHAPE), _INT32))
            try:  # some wait for all members when a group is opened, others when something is sent
                group = self._open(adapter, (0, 1), "away", _HEARD_SECONDS)
                group.broadcast(group.wire(view), 1).wait()
            except CoordinationError as error:
                text = str(error)
        self._meet(adapter)
        return text

    def test_groups_of_callers_are_checked(self) -> None:
        """What is no tuple of ranks, or no group, is a bad argument; no groups are none."""
        assert self.run_in_ranks(self._give_wrong_groups, 2) == [[], []]

    def _give_wrong_groups(self, context: RankContext, adapter: Adapter) -> list[str]:
        """A job: groups that must be refused; gives those that were not."""
        found = self._broadcasts(adapter)
        accepted = [] if dict(found.given_groups({})) == {} else ["nothing"]
        pairs: list[Any] = [("0,1", None), ((0, 1), None), ((0, 1), "no group"), ((0, 0), None), ((0, "a"), None)]
        for groups in [{key: group} for key, group in pairs]:
            try:
                found.given_groups(groups)
            except ArgumentError:
                continue
            accepted.append(str(groups))
        self._meet(adapter)
        return accepted

    def _view_names(self) -> list[str]:
        return [name for name in _VIEWS if name not in self.lacking_views]

    def _broadcasts(self, adapter: Adapter) -> Broadcasts:
        found = adapter.process_group().broadcasts
        assert found is not None, "the adapter has no broadcasts"
        return found

    def _open(self, adapter: Adapter, ranks: tuple[int, ...], token: str, seconds: float = _SECONDS) -> BroadcastGroup:
        return self._broadcasts(adapter).open(ranks, None, seconds, token=token, device=self.device)

    def _travel(self, group: BroadcastGroup, views: list[Any], nbytes: int, source: int, rank: int) -> None:
        """Broadcast views as the core does: as they are where one is plain bytes, else packed."""
        wire = group.wire(views[0]) if len(views) == 1 else None
        packed = wire is None
        if packed:
            wire = group.temporary(nbytes, views[0])
            if rank == source:
                group.pack(views, wire)
        group.broadcast(wire, source).wait()
        if packed and rank != source:
            group.unpack(wire, views)

    def _close(self, adapter: Adapter, group: BroadcastGroup) -> None:
        self._meet(adapter)
        group.close()

    def _meet(self, adapter: Adapter) -> None:
        """Wait for the other ranks, which may still be receiving."""
        group: ProcessGroup = adapter.process_group()
        Exchange(group.rank, group.world_size, group.channel, key="meet", timeout_seconds=_SECONDS).run("meet")
        drain(group.channel, _DRAIN_SECONDS)


def _handed(adapter: Adapter, tensor: Any) -> Any:
    """What the core hands to groups: an array where a view lies in host memory as it is, else the view."""
    found = adapter.describe(tensor)
    assert found is not None and len(found.views) == 1, "the adapter does not describe the tensor as one box"
    array = found.access.host_array(found.views[0])
    return found.views[0] if array is None else array
