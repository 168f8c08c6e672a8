"""Wrong process groups and broadcasts."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from dcp_core.adapter import ChannelSpec, ProcessGroup
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.testing.conformance.broadcasts import BroadcastConformance
from dcp_core.testing.conformance.groups import GroupConformance
from dcp_core.testing.numpy_broadcasts import NumpyBroadcastGroup, NumpyBroadcasts, NumpyBroadcastWork
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.ranks import RankContext, current_rank
from tests.core.planted_bugs import plant
from tests.core.test_conformance import NumpyTensors

# mypy: disable-error-code="override"
# wrong on purpose

_count = itertools.count()


class _Changed(NumpyRankAdapter):
    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        return self.change(super().process_group(group, with_channel=with_channel))

    def change(self, found: ProcessGroup) -> ProcessGroup:
        return found


class CountsFromOne(_Changed):
    def change(self, found: ProcessGroup) -> ProcessGroup:
        return replace(found, global_rank=found.rank + 1)


class TalksToItself(_Changed):
    def change(self, found: ProcessGroup) -> ProcessGroup:
        context = current_rank()
        return found if context is None else replace(found, channel=DirectoryChannel(context.channel_directory))


class IsNewEachTime(_Changed):
    def change(self, found: ProcessGroup) -> ProcessGroup:
        return replace(found, key=f"ranks-{next(_count)}")


class ConnectsNobody(_Changed):
    boards: dict[int, DirectoryChannel] = {}  # noqa: RUF012  # one a process

    def change(self, found: ProcessGroup) -> ProcessGroup:
        context = current_rank()
        assert context is not None
        own = self.boards.setdefault(found.rank, DirectoryChannel(context.channel_directory / str(found.rank)))
        return replace(found, channel=own)


class SendsBackgroundProcessesElsewhere(_Changed):
    def change(self, found: ProcessGroup) -> ProcessGroup:
        context = current_rank()
        assert context is not None
        place = str(context.channel_directory / f"remote-{found.rank}")
        spec = ChannelSpec("dcp_core.coordination.directory", "DirectoryChannel", {"path": place})
        return replace(found, remote=spec)


class ConnectsBackgroundProcesses(_Changed):
    """The right one."""

    def change(self, found: ProcessGroup) -> ProcessGroup:
        context = current_rank()
        assert context is not None
        place = str(context.channel_directory / "remote")
        return replace(
            found, remote=ChannelSpec("dcp_core.coordination.directory", "DirectoryChannel", {"path": place})
        )


FOUND_BY_AMONG_GROUPS: dict[type, str] = {
    CountsFromOne: "test_every_rank_knows_its_place",
    TalksToItself: "test_a_job_of_one_rank_has_a_group_of_one",
    IsNewEachTime: "test_the_group_is_made_once_in_a_process",
    ConnectsNobody: "test_the_channel_connects_all_ranks",
    SendsBackgroundProcessesElsewhere: "test_the_channel_for_background_processes_connects_them",
}


class GroupSuite(GroupConformance):
    """The kit on groups of numpy ranks."""

    wrong: type = ConnectsBackgroundProcesses

    @property
    def patience_seconds(self) -> float:  # what is wrong need not be waited for
        return GroupConformance.patience_seconds if self.wrong is ConnectsBackgroundProcesses else 1.0

    def in_rank(self, context: RankContext) -> AbstractContextManager[Any]:
        return nullcontext(self.wrong())


class TestRightGroup(GroupSuite):
    pass


plant(globals(), GroupSuite, FOUND_BY_AMONG_GROUPS)


# -- broadcasts -----------------------------------------------------------------------------------------------------


class CarriesEverything(NumpyBroadcasts):
    def kind(self, device: str) -> str | None:
        return "channel"


class CarriesWhatItGets(NumpyBroadcasts):
    def carries(self, view: Any) -> bool:
        return True


class IsDeclaredToLackWhatItHas(NumpyBroadcasts):
    """Right by itself: it is the suite that hides views from its tests."""


class TakesAnyGroup(NumpyBroadcasts):
    def given_groups(self, groups: Any) -> Any:
        return groups


class KeepsToItselfThatItStaysAway(NumpyBroadcasts):
    def give_up(self, ranks: tuple[int, ...], reason: str, *, token: str, device: str = "cpu") -> None:
        return


class _OfGroups(NumpyBroadcasts):
    """Opens groups of a class of its own."""

    of: type[NumpyBroadcastGroup] = NumpyBroadcastGroup

    def open(
        self, ranks: tuple[int, ...], given: Any, timeout_seconds: float, *, token: str, device: str = "cpu"
    ) -> NumpyBroadcastGroup:
        made = super().open(ranks, given, timeout_seconds, token=token, device=device)
        return self.of(made.channel, made.name, ranks, made.rank, timeout_seconds)


class WiresACopy(_OfGroups):
    class of(NumpyBroadcastGroup):  # noqa: N801  # the attribute's name
        def wire(self, view: Any) -> Any:
            return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


class PacksInMemoryOrder(_OfGroups):
    class of(NumpyBroadcastGroup):  # noqa: N801
        def pack(self, views: Any, wire: Any) -> None:
            super().pack([view.ravel(order="K") for view in views], wire)


class KeepsToItselfThatItFailed(_OfGroups):
    class of(NumpyBroadcastGroup):  # noqa: N801
        def post(self, name: str, payload: bytes) -> None:
            if "failed" not in name:
                super().post(name, payload)


class TakesNoArraysWithGaps(_OfGroups):
    class of(NumpyBroadcastGroup):  # noqa: N801
        def pack(self, views: Any, wire: Any) -> None:
            for view in views:
                view.data.cast("B")
            super().pack(views, wire)


class UnpacksTheFirst(_OfGroups):
    class of(NumpyBroadcastGroup):  # noqa: N801
        def unpack(self, wire: Any, views: Any) -> None:
            super().unpack(wire[: views[0].nbytes], views[:1])


class MakesWiresOfWords(_OfGroups):
    class of(NumpyBroadcastGroup):  # noqa: N801
        def temporary(self, nbytes: int, view: Any) -> Any:
            return np.empty(-(-nbytes // 8) * 8, np.uint8)


class _SlicedToCopies(np.ndarray[Any, Any]):
    def __getitem__(self, index: Any) -> Any:
        return np.array(super().__getitem__(index))


class CopiesPartsOfTemporaries(_OfGroups):
    class of(NumpyBroadcastGroup):  # noqa: N801
        def temporary(self, nbytes: int, view: Any) -> Any:
            return super().temporary(nbytes, view).view(_SlicedToCopies)

        def pack(self, views: Any, wire: Any) -> None:
            super().pack(views, wire.view(np.ndarray))

        def unpack(self, wire: Any, views: Any) -> None:
            super().unpack(wire.view(np.ndarray), views)


class CountsSourcesWithinTheGroup(_OfGroups):
    class of(NumpyBroadcastGroup):  # noqa: N801
        def broadcast(self, wire: Any, source: int) -> NumpyBroadcastWork:
            return super().broadcast(wire, self.ranks[source % len(self.ranks)])


class MixesUpLoads(_OfGroups):
    class of(NumpyBroadcastGroup):  # noqa: N801
        def unpost(self, names: Any) -> None:
            return

    def open(
        self, ranks: tuple[int, ...], given: Any, timeout_seconds: float, *, token: str, device: str = "cpu"
    ) -> NumpyBroadcastGroup:
        return super().open(ranks, given, timeout_seconds, token="always", device=device)


class WaitsForEver(_OfGroups):
    class of(NumpyBroadcastGroup):  # noqa: N801
        def fail(self, error: Any) -> None:
            self.moved_at += self.timeout_seconds


class NamesNobody(_OfGroups):
    class of(NumpyBroadcastGroup):  # noqa: N801
        def fail(self, error: Any) -> None:
            super().fail(type(error)("it did not work"))


FOUND_BY_AMONG_BROADCASTS: dict[type, str] = {
    CarriesEverything: "test_there_is_something_that_carries_tensors",
    IsDeclaredToLackWhatItHas: "test_what_is_declared_to_be_lacking_cannot_be_made",
    CarriesWhatItGets: "test_tensors_are_carried_and_nothing_else",
    WiresACopy: "test_every_dtype_and_layout_arrives",
    PacksInMemoryOrder: "test_a_batch_arrives_in_its_order",
    UnpacksTheFirst: "test_a_batch_arrives_in_its_order",
    MakesWiresOfWords: "test_a_batch_arrives_in_its_order",
    CopiesPartsOfTemporaries: "test_parts_of_a_temporary_travel_alone",
    CountsSourcesWithinTheGroup: "test_many_are_under_way_in_several_groups",
    MixesUpLoads: "test_loads_follow_each_other",
    WaitsForEver: "test_a_member_that_does_not_send_is_an_error_when_the_time_is_up",
    NamesNobody: "test_a_member_that_does_not_send_is_an_error_when_the_time_is_up",
    TakesAnyGroup: "test_groups_of_callers_are_checked",
    TakesNoArraysWithGaps: "test_arrays_in_host_memory_travel_as_well",
    KeepsToItselfThatItFailed: "test_a_member_that_gives_up_is_heard_before_the_time_is_up",
    KeepsToItselfThatItStaysAway: "test_a_member_that_will_not_come_is_heard_before_the_time_is_up",
}


class _Broadcasting(NumpyRankAdapter):
    """Numpy ranks with broadcasts of some class, made once a process."""

    made: dict[type, Any] = {}  # noqa: RUF012  # one a process

    def __init__(self, of: type) -> None:
        super().__init__()
        self.of = of

    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        found = super().process_group(group, with_channel=with_channel)
        if self.of not in self.made:
            self.made[self.of] = self.of(found.channel, found.global_rank)
        return replace(found, broadcasts=self.made[self.of])


class BroadcastSuite(NumpyTensors, BroadcastConformance):
    """The kit on broadcasts of numpy ranks."""

    wrong: type = NumpyBroadcasts

    @property
    def lacking_views(self) -> tuple[str, ...]:
        return ("transposed",) if self.wrong is IsDeclaredToLackWhatItHas else ()

    @property
    def rank_seconds(self) -> float:  # what is wrong need not be waited for
        return BroadcastConformance.rank_seconds if self.wrong is NumpyBroadcasts else 4.0

    def in_rank(self, context: RankContext) -> AbstractContextManager[Any]:
        return nullcontext(_Broadcasting(self.wrong))


class TestRightBroadcasts(BroadcastSuite):
    pass


plant(globals(), BroadcastSuite, FOUND_BY_AMONG_BROADCASTS)
