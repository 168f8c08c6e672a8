"""Wrong describers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from dcp_core import plugins
from dcp_core.adapter import Describer
from dcp_core.arrays import ArrayAccess
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, DType
from dcp_core.errors import UnsupportedValueError
from dcp_core.hookspecs import DescriberEntry, hookimpl
from dcp_core.planning.leaves import LocalTensor
from dcp_core.testing.conformance.describer import DescriberConformance
from dcp_core.testing.conformance.samples import Bits
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext
from tests.core.planted_bugs import plant

# mypy: disable-error-code="override"
# wrong on purpose


class Rows:
    """A foreign type: a rank's rows of a matrix."""

    def __init__(self, sharded: ShardedArray, *, is_sum: bool = False) -> None:
        self.sharded = sharded
        self.is_sum = is_sum


class RowsDescriber:
    """The right one."""

    def describe(self, value: Any) -> LocalTensor | None:
        if not isinstance(value, Rows):
            return None
        if value.is_sum:
            raise UnsupportedValueError("a sum that is not reduced yet; reduce it first")
        return self.change(value.sharded.describe())

    def change(self, found: LocalTensor) -> LocalTensor | None:
        return found


class TakesANameToo(RowsDescriber):
    def describe(self, value: Any, name: str) -> LocalTensor | None:
        return super().describe(value)


class ForgetsRanksWithoutRows(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return found if found.boxes else None


class ForgetsTheTypeOfNothing(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return found if found.boxes else replace(found, dtype=BY_NAME["float32"])


class IsNeverEmpty(RowsDescriber):
    """Right by itself: it is the suite whose tensors have rows for all ranks."""


class IsRegisteredUnderAnImport(RowsDescriber):
    """Registered for the name that a module has imported the type under, not for that of its own module."""


class IsRegisteredByNobody(RowsDescriber):
    """The plugin that should register it is not installed."""


class TellsTheLocalShape(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return replace(found, global_shape=found.boxes[0].sizes) if found.boxes else found


class CallsShardsPlain(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return replace(found, plain=True)


class CountsFromOne(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return replace(found, boxes=tuple(Box((box.offsets[0] + 1, 0), box.sizes) for box in found.boxes))


class KeepsEmptyBoxes(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        if found.boxes:
            return found
        return replace(found, boxes=(Box((7, 0), (0, 6)),), views=(np.zeros((0, 6), found.dtype.bits),))


class GivesTransposedViews(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return replace(found, views=tuple(view.T for view in found.views))


class HoldsRowsTwice(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return replace(found, boxes=found.boxes * 2, views=found.views * 2)


class LosesTheLastRow(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        boxes = tuple(Box(box.offsets, (box.sizes[0] - 1, 6)) for box in found.boxes if box.sizes[0] > 1)
        return replace(found, boxes=boxes, views=tuple(view[:-1] for view in found.views if len(view) > 1))


class SharesARowWithTheNextRank(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        boxes = tuple(Box((max(box.offsets[0] - 1, 0), 0), box.sizes) for box in found.boxes)
        return replace(found, boxes=boxes)


class TurnsRowsAround(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return replace(found, views=tuple(view[::-1] for view in found.views))


class GivesCopies(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return replace(found, views=tuple(view.copy() for view in found.views))


class NamesStorageAnew(RowsDescriber):
    count = 0

    def change(self, found: LocalTensor) -> LocalTensor | None:
        type(self).count += 1
        return replace(found, storage=self.count)


class NamesAllStoragesAlike(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return replace(found, storage="rows")


class CallsShardsReplicas(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        is_cut = bool(found.boxes) and found.boxes[0].sizes != found.global_shape
        return replace(found, replica_ranks=(0, 1)) if is_cut else found


class NamesReplicasThatAreNotThere(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return replace(found, replica_ranks=tuple(range(8)))


class ClaimsForeignValues(RowsDescriber):
    def describe(self, value: Any) -> LocalTensor | None:
        return super().describe(value) or NumpyRankAdapter().describe(value)


class TakesSumsForValues(RowsDescriber):
    def describe(self, value: Any) -> LocalTensor | None:
        return self.change(value.sharded.describe()) if isinstance(value, Rows) else None


class _NarrowsFromTheTop(ArrayAccess):
    def narrow(self, view: Any, box: Box) -> Any:
        return super().narrow(view, Box((0,) * box.ndim, box.sizes))


class ReachesTheFirstRows(RowsDescriber):
    def change(self, found: LocalTensor) -> LocalTensor | None:
        return replace(found, access=_NarrowsFromTheTop(found.dtype))


FOUND_BY: dict[type, str] = {
    IsRegisteredUnderAnImport: "test_the_plugin_that_registers_it_is_asked",
    IsRegisteredByNobody: "test_the_plugin_that_registers_it_is_asked",
    ForgetsTheTypeOfNothing: "test_every_value_is_described",
    IsNeverEmpty: "test_some_rank_holds_nothing",
    TakesANameToo: "test_it_has_the_method_of_the_protocol",
    ForgetsRanksWithoutRows: "test_every_value_is_described",
    TellsTheLocalShape: "test_every_value_is_described",
    CallsShardsPlain: "test_plain_is_said_of_whole_tensors_only",
    CountsFromOne: "test_boxes_lie_in_the_tensor_and_have_elements",
    KeepsEmptyBoxes: "test_boxes_lie_in_the_tensor_and_have_elements",
    GivesTransposedViews: "test_views_have_the_sizes_of_their_boxes",
    HoldsRowsTwice: "test_boxes_of_a_rank_do_not_overlap",
    LosesTheLastRow: "test_the_boxes_of_all_ranks_are_the_whole_tensor",
    SharesARowWithTheNextRank: "test_the_boxes_of_all_ranks_are_the_whole_tensor",
    TurnsRowsAround: "test_views_hold_the_elements_of_their_boxes",
    GivesCopies: "test_what_is_written_to_a_view_lands_in_the_value",
    NamesStorageAnew: "test_a_value_is_described_alike_again",
    NamesAllStoragesAlike: "test_values_of_their_own_have_storages_of_their_own",
    CallsShardsReplicas: "test_ranks_said_to_hold_the_same_do",
    NamesReplicasThatAreNotThere: "test_ranks_said_to_hold_the_same_do",
    ClaimsForeignValues: "test_values_of_others_are_left_to_others",
    TakesSumsForValues: "test_what_cannot_be_stored_is_refused",
    ReachesTheFirstRows: "test_what_is_saved_in_a_layout_is_loaded_in_any_other",
}


class DescriberSuite(DescriberConformance):
    """The kit on a foreign type."""

    wrong: type = RowsDescriber
    worlds = (1, 4)

    @property
    def layouts(self) -> tuple[str, ...]:
        alone = self.wrong in (IsNeverEmpty, ForgetsTheTypeOfNothing)
        return ("rows",) if alone else ("rows", "last rank")

    @property
    def small_shape(self) -> tuple[int, ...]:
        return (4, 6) if self.wrong is IsNeverEmpty else (3, 6)

    @property
    def plugin(self) -> str | None:
        return None if self.wrong is IsRegisteredUnderAnImport else "planted rows"

    def in_rank(self, context: RankContext) -> AbstractContextManager[Any]:
        if self.wrong is not IsRegisteredByNobody:
            module = "tests.core.planted_bugs" + ("" if self.wrong is IsRegisteredUnderAnImport else ".describers")
            factory = f"{__name__}:{self.wrong.__name__}"
            entry = DescriberEntry(f"{module}.Rows", framework="numpy", factory=factory)
            plugins.register(SimpleNamespace(dcp_describers=hookimpl(lambda: [entry])), "planted rows")
        return nullcontext(NumpyRankAdapter())

    def make_describer(self) -> Describer:
        made: Describer = self.wrong()
        return made

    def make_value(self, layout: str, whole: Bits, dtype: DType, rank: int, world_size: int) -> Any:
        boxes = even_boxes(whole.shape, world_size, rank)
        if layout == "last rank":
            boxes = [Box.whole(whole.shape)] if rank == world_size - 1 else []
        return Rows(ShardedArray.cut(whole, boxes, dtype.name))

    def foreign_values(self) -> Iterable[Any]:
        return (np.zeros(3), Rows)

    def refused_values(self, rank: int, world_size: int) -> Iterable[Any]:
        whole = np.zeros((2, 2), np.float32)
        return (Rows(ShardedArray.cut(whole, [Box.whole((2, 2))]), is_sum=True),)


class TestRightDescriber(DescriberSuite):
    pass


plant(globals(), DescriberSuite, FOUND_BY)
