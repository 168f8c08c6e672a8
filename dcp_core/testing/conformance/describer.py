"""The suite of a describer: the boxes of all ranks are the whole tensor, and each view is its box, in place.

The values are made in real ranks, one for each; what `describe` says of them is brought back and compared with the
whole tensor.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcp_core import api, plugins
from dcp_core.adapter import Adapter, Describer
from dcp_core.box import Box, contains, intersect, slices
from dcp_core.dtype import DType, dtype_named
from dcp_core.errors import UnsupportedValueError
from dcp_core.hookspecs import DescriberEntry, hookimpl
from dcp_core.planning.leaves import LocalTensor
from dcp_core.plugin_checks import protocol_problem
from dcp_core.testing.conformance.samples import FOREIGN_VALUES, Bits, random_bits, raw
from dcp_core.testing.conformance.suite import RankedSuite
from dcp_core.testing.ranks import RankContext

_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank's value was described as.

    Attributes:
        is_tensor: Whether `describe` gave a `LocalTensor`; nothing else is filled in where not.
        global_shape: Of the whole tensor.
        dtype: Name of the element type.
        boxes: What the rank holds.
        view_shapes: Of the views.
        bits: What the views hold, raw.
        landed: What a second description of the value holds after other bits were written to the views of the first.
        replica_ranks: Ranks said to hold the same.
        is_steady: Whether both descriptions tell the same boxes and the same storage.
        is_apart: Whether a second value has another storage, where that is told.
    """

    is_tensor: bool
    global_shape: tuple[int, ...] = ()
    dtype: str = ""
    boxes: tuple[Box, ...] = ()
    view_shapes: tuple[tuple[int, ...], ...] = ()
    bits: tuple[bytes, ...] = ()
    landed: tuple[bytes, ...] = ()
    replica_ranks: tuple[int, ...] | None = None
    is_steady: bool = True
    is_apart: bool = True


class DescriberConformance(RankedSuite):
    """Tests of a `Describer`, or of the `describe` of an adapter.

    `in_rank` starts the framework's job, and gives the adapter whose process group it is.

    Attributes:
        layouts: Names of ways to cut a tensor, for `make_value`; at least one.
        worlds: How many ranks to try.
        shape: Of the whole tensor.
        dtypes: Names of the element types to try.
    """

    layouts: tuple[str, ...] = ()
    worlds: tuple[int, ...] = (1, 2, 4)
    shape: tuple[int, ...] = (7, 6)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def make_describer(self) -> Describer:
        """Make the describer; called in ranks, and in the test's process."""
        raise NotImplementedError

    def make_value(self, layout: str, whole: Bits, dtype: DType, rank: int, world_size: int) -> Any:
        """Make a rank's part of a tensor; called in ranks.

        Args:
            layout: One of `layouts`.
            whole: The elements of the whole tensor, the same on all ranks. dtype is `DType.bits`.
            dtype: What they are.
            rank: Whose part.
            world_size: How many ranks there are.
        """
        raise NotImplementedError

    def foreign_values(self) -> Iterable[Any]:
        """Values that the describer must leave to others, besides those of Python: plain tensors, say."""
        return ()

    def refused_values(self, rank: int, world_size: int) -> Iterable[Any]:
        """Values of the type that cannot be stored as they are, an unreduced sum, say; called in ranks."""
        return ()

    # -- the tests -------------------------------------------------------------------------------------------------

    def test_it_has_the_method_of_the_protocol(self) -> None:
        """`describe`, which takes a value."""
        assert protocol_problem(self.make_describer(), Describer) is None
        assert self.layouts, "name at least one layout"

    def test_every_value_is_described(self) -> None:
        """A rank that holds nothing has a description too: it knows shape and dtype."""
        for case, dtype, ranks in self._all():
            assert [held.is_tensor for held in ranks] == [True] * len(ranks), case
            assert {held.global_shape for held in ranks} == {self.shape}, case
            assert {held.dtype for held in ranks} == {dtype}, case

    def test_boxes_lie_in_the_tensor_and_have_elements(self) -> None:
        """Empty boxes are left out."""
        for case, _, ranks in self._all():
            for box in _boxes(ranks):
                assert not box.is_empty, case
                assert box.ndim == len(self.shape), case
                assert contains(Box.whole(self.shape), box), f"{case}: {box} leaves {self.shape}"

    def test_views_have_the_sizes_of_their_boxes(self) -> None:
        """One view a box."""
        for case, _, ranks in self._all():
            for held in ranks:
                assert list(held.view_shapes) == [box.sizes for box in held.boxes], case

    def test_boxes_of_a_rank_do_not_overlap(self) -> None:
        """An element that a rank holds twice would be stored twice."""
        for case, _, ranks in self._all():
            for held in ranks:
                for one, other in itertools.combinations(held.boxes, 2):
                    assert _apart(one, other), f"{case}: {one} and {other}"

    def test_the_boxes_of_all_ranks_are_the_whole_tensor(self) -> None:
        """Every element is held; boxes of two ranks are the same, or apart."""
        for case, _, ranks in self._all():
            count = np.zeros(self.shape, np.int64)
            for box in set(_boxes(ranks)):
                count[slices(box)] += 1
            assert (count == 1).all(), f"{case}: how often each element is held: {count.tolist()}"

    def test_views_hold_the_elements_of_their_boxes(self) -> None:
        """Brute force: the same part of the whole tensor, bit for bit."""
        for case, dtype, ranks in self._all():
            whole = random_bits(dtype_named(dtype), self.shape)
            for rank, held in enumerate(ranks):
                for box, bits in zip(held.boxes, held.bits, strict=False):
                    assert bits == raw(whole[slices(box)]), f"{case}: {box} on rank {rank}"

    def test_what_is_written_to_a_view_lands_in_the_value(self) -> None:
        """A load writes into views; a view that is a copy loses that."""
        for case, dtype, ranks in self._all():
            other = random_bits(dtype_named(dtype), self.shape, 1)
            for rank, held in enumerate(ranks):
                for box, bits in zip(held.boxes, held.landed, strict=False):
                    assert bits == raw(other[slices(box)]), f"{case}: {box} on rank {rank}"

    def test_a_value_is_described_alike_again(self) -> None:
        """Plans are kept from save to save for as long as nothing changes."""
        for case, _, ranks in self._all():
            assert all(held.is_steady for held in ranks), case

    def test_values_of_their_own_have_storages_of_their_own(self) -> None:
        """Values with one storage are stored once."""
        for case, _, ranks in self._all():
            assert all(held.is_apart for held in ranks), case

    def test_ranks_said_to_hold_the_same_do(self) -> None:
        """`replica_ranks` saves comparing; it must be true, and name the rank itself."""
        for case, _, ranks in self._all():
            for rank, held in enumerate(ranks):
                if held.replica_ranks is not None:
                    assert rank in held.replica_ranks, case
                    assert all(ranks[other].boxes == held.boxes for other in held.replica_ranks), case

    def test_values_of_others_are_left_to_others(self) -> None:
        """None for what is not of the type."""
        describer = self.make_describer()
        claimed = [
            value for value in (*FOREIGN_VALUES, *self.foreign_values()) if describer.describe(value) is not None
        ]
        assert claimed == []

    def test_what_cannot_be_stored_is_refused(self) -> None:
        """With `UnsupportedValueError`, on every rank."""
        assert self.run_in_ranks(self._describe_refused, 2) == [[], []]

    def _describe_refused(self, context: RankContext, adapter: Adapter) -> list[str]:
        """A job: values that are not refused."""
        describer, accepted = self.make_describer(), []
        for number, value in enumerate(self.refused_values(context.rank, context.world_size)):
            try:
                describer.describe(value)
            except UnsupportedValueError:
                continue
            accepted.append(f"{number}: {type(value).__qualname__}")
        return accepted

    def test_what_is_saved_in_a_layout_is_loaded_in_any_other(self, tmp_path: Path) -> None:
        """Through real saves and loads: each layout on each number of ranks loads what the one before it has saved."""
        cases = list(itertools.product(self.layouts, self.worlds))
        saved = None
        for layout, world in (*cases, cases[0]):
            place = str(tmp_path / f"{layout} on {world}")
            wrong = self.run_in_ranks(self._load_and_save, world, layout, saved, place)
            assert wrong == [[]] * world, f"loaded {saved!r} as {layout} on {world} ranks"
            saved = place

    def _load_and_save(
        self, context: RankContext, adapter: Adapter, layout: str, saved: str | None, place: str
    ) -> list[str]:
        """A job: load a value of each type where something was saved, then save it; gives those that are wrong."""
        state = self._state(context, layout, seed=0 if saved is None else 1)
        if saved is not None:
            api.load(state, checkpoint_id=saved, **_options(adapter))
        wrong = []
        for name, value in state.items():
            whole = random_bits(dtype_named(name), self.shape)
            found = self.make_describer().describe(value)
            assert found is not None
            if _bits_of(found) != tuple(raw(whole[slices(box)]) for box in found.boxes):
                wrong.append(name)
        api.save(state, checkpoint_id=place, **_options(adapter))
        return wrong

    # -- what ranks do -----------------------------------------------------------------------------------------------

    def _describe_values(self, context: RankContext, adapter: Adapter) -> dict[tuple[str, str], Held]:
        """A job: describe this rank's value of every layout and type."""
        return {
            (layout, name): self._held(context, layout, dtype_named(name))
            for layout in self.layouts
            for name in self.dtypes
        }

    def _held(self, context: RankContext, layout: str, dtype: DType) -> Held:
        whole, other = (random_bits(dtype, self.shape, seed) for seed in (0, 1))
        value, second = (
            self.make_value(layout, whole.copy(), dtype, context.rank, context.world_size) for _ in range(2)
        )
        describer = self.make_describer()
        found, of_second = describer.describe(value), describer.describe(second)
        if not isinstance(found, LocalTensor):
            return Held(is_tensor=False)
        bits = _bits_of(found)
        for box, view in zip(found.boxes, found.views, strict=False):
            if tuple(view.shape) == box.sizes and contains(Box.whole(self.shape), box):
                found.access.copy_into(view, other[slices(box)], dtype)
        again = describer.describe(value)
        if again is None or of_second is None:
            return Held(is_tensor=False)
        return Held(
            True,
            found.global_shape,
            found.dtype.name,
            found.boxes,
            tuple(tuple(view.shape) for view in found.views),
            bits,
            _bits_of(again),
            found.replica_ranks,
            is_steady=(found.boxes, found.storage) == (again.boxes, again.storage),
            is_apart=found.storage is None or not found.boxes or found.storage != of_second.storage,
        )

    def _state(self, context: RankContext, layout: str, seed: int) -> dict[str, Any]:
        state = {
            name: self.make_value(
                layout, random_bits(dtype_named(name), self.shape, seed), dtype_named(name), context.rank,
                context.world_size,
            )
            for name in self.dtypes
        }  # fmt: skip
        _make_known(self.make_describer(), next(iter(state.values())))
        return state

    def _all(self) -> Iterator[tuple[str, str, list[Held]]]:
        """Every case: in words, its type, and what each rank holds."""
        for world in self.worlds:
            key = (type(self), world)
            if key not in _seen:
                _seen[key] = self.run_in_ranks(self._describe_values, world)
            for layout, dtype in itertools.product(self.layouts, self.dtypes):
                yield f"{layout}, {dtype}, {world} ranks", dtype, [found[layout, dtype] for found in _seen[key]]


_seen: dict[tuple[type, int], list[Any]] = {}
"""What the ranks of a suite said, by the suite and their number: several tests look at it."""

_known: list[Describer] = []


def known_describer() -> Describer:
    """The describer that this process has registered last."""
    return _known[-1]


def _make_known(describer: Describer, value: Any) -> None:
    """Register a describer in this process, unless a plugin or an adapter serves the value already."""
    if plugins.active_adapters().describe(value) is not None:
        return
    _known.append(describer)
    of = type(value)
    entry = DescriberEntry(
        f"{of.__module__}.{of.__qualname__}", of.__module__.partition(".")[0], f"{__name__}:known_describer"
    )
    plugins.register(types.SimpleNamespace(dcp_describers=hookimpl(lambda: [entry])), "conformance")


def _options(adapter: Adapter) -> dict[str, Any]:
    return {"adapter": adapter, "timeout_seconds": _SECONDS}


def _bits_of(found: LocalTensor) -> tuple[bytes, ...]:
    return tuple(raw(found.access.read_out(view)) for view in found.views)


def _boxes(ranks: list[Held]) -> list[Box]:
    return [box for held in ranks for box in held.boxes]


def _apart(one: Box, other: Box) -> bool:
    common = intersect(one, other)
    return common is None or common.is_empty
