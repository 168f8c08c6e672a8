"""The suite of a describer: the boxes of all ranks are the whole tensor, and each view is its box, in place.

The values are made in real ranks, one for each; what `describe` says of them is brought back and compared with the
whole tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dcp_core import api
from dcp_core.adapter import Adapter, Describer
from dcp_core.box import Box, contains, slices
from dcp_core.dtype import BY_NAME, DType, dtype_named
from dcp_core.errors import UnsupportedValueError
from dcp_core.plugin_checks import protocol_problem
from dcp_core.testing.conformance.comparing import check_same, told_difference
from dcp_core.testing.conformance.described import (
    Case,
    Held,
    Shape,
    bits_of,
    boxes_of,
    count_of_ranks,
    is_apart,
    tiling_problem,
)
from dcp_core.testing.conformance.describing import describe_in_rank, problem_of_group
from dcp_core.testing.conformance.registered import make_known, problem_of_registration, registrations
from dcp_core.testing.conformance.samples import FOREIGN_VALUES, Bits, random_bits
from dcp_core.testing.conformance.suite import RankedSuite
from dcp_core.testing.ranks import RankContext, RankProcessError

_SECONDS = 30.0
_SHOWN = 4
_COPIED = "the view is a copy of the value's memory, not the memory itself, so that a load is lost"
_WRONG_PLACE = "the view is another part of the tensor than its box"


class DescriberConformance(RankedSuite):
    """Tests of a `Describer`, or of the `describe` of an adapter.

    `in_rank` starts the framework's job, and gives the adapter whose process group it is.

    Attributes:
        layouts: Names of ways to cut a tensor, for `make_value`; at least one.
        worlds: How many ranks to try.
        shape: Of the whole tensor.
        small_shape: Of a second tensor, too small for all ranks: some hold nothing of it. None where in no layout a
            rank can hold nothing.
        small_layouts: The layouts that cut the second tensor, too; None: all of them.
        dtypes: Names of the element types to try.
        plugin: Name of the entry point whose plugin registers the describer; the tests then fail unless that is
            installed and DCP asks the describer by it. None: a plugin that registers it is found and checked as well,
            and where there is none, the tests register the describer themselves.
    """

    layouts: tuple[str, ...] = ()
    worlds: tuple[int, ...] = (1, 2, 4)
    shape: tuple[int, ...] = (7, 6)
    small_shape: tuple[int, ...] | None = (3, 6)
    small_layouts: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    plugin: str | None = None

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

    def test_the_plugin_that_registers_it_is_asked(self) -> None:
        """Saves and loads find a describer by the name in its entry, which nothing else checks."""
        self._names("dtypes")
        (told,) = self.run_in_ranks(self._tell_registration, 1)
        if told is None:
            pytest.skip("no plugin registers the describer; once one does, let `plugin` be its entry point's name")
        if told:
            pytest.fail(told)

    def _tell_registration(self, context: RankContext, adapter: Adapter) -> str | None:
        """A job: what is wrong with the registration; None where there is none, and none is expected."""
        describer, dtype = self.make_describer(), dtype_named(self.dtypes[0])
        if self.plugin is None and not registrations(describer, None):
            return None
        found = {
            problem_of_registration(
                describer, self.make_value(layout, random_bits(dtype, self.shape), dtype, 0, 1), self.plugin
            )
            for layout in self._names("layouts")
        }
        return "; ".join(sorted(problem for problem in found if problem is not None))

    def test_every_value_is_described(self) -> None:
        """A rank that holds nothing has a description too: it knows shape and dtype."""
        for case in self._all():
            for rank, held in enumerate(case.ranks):
                where = f"{case.words}: rank {rank}"
                assert held.is_tensor, f"{where}: describe {held.problem or 'gives no LocalTensor'}"
                assert held.global_shape == case.shape, f"{where} tells the shape {held.global_shape}"
                hint = " and holds nothing: a description without views needs the dtype told" if not held.boxes else ""
                assert held.dtype == case.dtype, f"{where} tells the dtype {held.dtype}{hint}"

    def test_plain_is_said_of_whole_tensors_only(self) -> None:
        """`plain` promises that every rank holds the same; of shards that were called so, most would be lost."""
        for case, rank, held in self._each():
            count = sum(box.numel for box in held.boxes)
            if held.is_plain and count != math.prod(case.shape):
                pytest.fail(
                    f"{case.words}: rank {rank} says plain=True of {count} of {math.prod(case.shape)} elements; plain "
                    "is for a value that every rank has whole: leave it out for a shard"
                )

    def test_some_rank_holds_nothing(self) -> None:
        """There are small tensors in every model, and jobs with more ranks than these have rows."""
        cases = list(self._all())
        if any(all(box.is_empty for box in held.boxes) for case in cases for held in case.ranks):
            return
        if self.small_shape is None:
            pytest.skip("small_shape is None: in no layout can a rank hold nothing")
        worlds = ", ".join(str(world) for world in self.worlds)
        pytest.fail(
            f"on {worlds} ranks, every rank holds something of a tensor of shape {self.small_shape}; let small_shape "
            "be smaller, or None if in no layout a rank can hold nothing"
        )

    def test_boxes_lie_in_the_tensor_and_have_elements(self) -> None:
        """Empty boxes are left out."""
        for case in self._all():
            for box in boxes_of(case.ranks):
                assert not box.is_empty, f"{case.words}: {box} has no elements; leave it out"
                assert box.ndim == len(case.shape), f"{case.words}: {box}"
                assert contains(Box.whole(case.shape), box), f"{case.words}: {box} leaves {case.shape}"

    def test_views_have_the_sizes_of_their_boxes(self) -> None:
        """One view a box."""
        for case in self._all():
            for rank, held in enumerate(case.ranks):
                assert list(held.view_shapes) == [box.sizes for box in held.boxes], f"{case.words}: rank {rank}"

    def test_boxes_of_a_rank_do_not_overlap(self) -> None:
        """An element that a rank holds twice would be stored twice."""
        for case in self._all():
            for rank, held in enumerate(case.ranks):
                for one, other in itertools.combinations(held.boxes, 2):
                    assert is_apart(one, other), f"{case.words}: rank {rank} holds {one} and {other}"

    def test_the_boxes_of_all_ranks_are_the_whole_tensor(self) -> None:
        """Every element is held; boxes of two ranks are the same, or apart. A save would refuse anything else."""
        for case in self._all():
            problem = tiling_problem(case)
            if problem is not None:
                pytest.fail(f"{case.words}: {problem}")

    def test_views_hold_the_elements_of_their_boxes(self) -> None:
        """Brute force: the same part of the whole tensor, bit for bit."""
        for case, rank, held in self._each():
            whole = random_bits(dtype_named(case.dtype), case.shape)
            for box, bits in zip(held.boxes, held.bits, strict=False):
                check_same(bits, whole[slices(box)], f"{case.words}: {box} on rank {rank}", _WRONG_PLACE)

    def test_what_is_written_to_a_view_lands_in_the_value(self) -> None:
        """A load writes into views; a view that is a copy loses that."""
        for case, rank, held in self._each():
            other = random_bits(dtype_named(case.dtype), case.shape, 1)
            for box, bits in zip(held.boxes, held.landed, strict=False):
                where = f"{case.words}: {box} on rank {rank}, after other elements were written to its view"
                check_same(bits, other[slices(box)], where, _COPIED)

    def test_a_value_is_described_alike_again(self) -> None:
        """Plans are kept from save to save for as long as nothing changes."""
        for case, rank, held in self._each():
            assert held.is_steady, f"{case.words}: rank {rank} tells other boxes, or another storage, the second time"

    def test_values_of_their_own_have_storages_of_their_own(self) -> None:
        """Values with one storage are stored once."""
        for case, rank, held in self._each():
            assert held.is_apart, f"{case.words}: rank {rank} tells the same storage of two values"

    def test_ranks_said_to_hold_the_same_do(self) -> None:
        """`replica_ranks` saves comparing; it must be true, and name the rank itself."""
        for case, rank, held in self._each():
            if held.replica_ranks is not None:
                told = f"{case.words}: rank {rank} tells replica_ranks {held.replica_ranks}"
                assert rank in held.replica_ranks, f"{told}, without itself"
                unknown = [other for other in held.replica_ranks if other not in range(len(case.ranks))]
                assert unknown == [], f"{told}; there are {count_of_ranks(len(case.ranks))}, counted from 0"
                others = [other for other in held.replica_ranks if case.ranks[other].boxes != held.boxes]
                assert others == [], f"{told}; these hold other boxes"

    def test_values_of_others_are_left_to_others(self) -> None:
        """None for what is not of the type."""
        describer = self.make_describer()
        claimed = [
            value for value in (*FOREIGN_VALUES, *self.foreign_values()) if describer.describe(value) is not None
        ]
        if claimed:
            pytest.fail(f"describe must return None for what is not of the type, and describes {claimed}")

    def test_what_cannot_be_stored_is_refused(self) -> None:
        """With `UnsupportedValueError`, on every rank."""
        for rank, accepted in enumerate(self.run_in_ranks(self._describe_refused, 2)):
            if accepted:
                pytest.fail(
                    f"rank {rank}: refused_values, by number: {', '.join(accepted)}; describe must raise "
                    "dcp_core.errors.UnsupportedValueError for each"
                )

    def _describe_refused(self, context: RankContext, adapter: Adapter) -> list[str]:
        """A job: values that are not refused, and what became of them."""
        describer, accepted = self.make_describer(), []
        for number, value in enumerate(self.refused_values(context.rank, context.world_size)):
            try:
                found = describer.describe(value)
            except UnsupportedValueError:
                continue
            except Exception as error:
                became = f"raised {type(error).__name__}"
            else:
                became = "was left to others" if found is None else "was described"
            accepted.append(f"{number} of type {type(value).__qualname__} {became}")
        return accepted

    def test_what_is_saved_in_a_layout_is_loaded_in_any_other(self, tmp_path: Path) -> None:
        """Through real saves and loads: each layout on each number of ranks loads what the one before it has saved."""
        cases = list(itertools.product(self._names("layouts"), self._names("worlds")))
        before: tuple[str, int] | None = None
        for layout, world in (*cases, cases[0]):
            wrong = self.run_in_ranks(self._load_and_save, world, layout, before, tmp_path)
            told = [f"rank {rank}: {problem}" for rank, problems in enumerate(wrong) for problem in problems]
            if told:
                saved = "" if before is None else f", saved as {before[0]} on {count_of_ranks(before[1])}"
                more = [f"and {len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
                pytest.fail("\n".join([f"{layout} on {count_of_ranks(world)}{saved}:", *told[:_SHOWN], *more]))
            before = layout, world

    def _load_and_save(
        self, context: RankContext, adapter: Adapter, layout: str, before: tuple[str, int] | None, place: Path
    ) -> list[str]:
        """A job: load values of each type and shape where the last job saved, and save them; gives what is wrong."""
        loaded = () if before is None else self._shapes(before[0])
        problem = problem_of_group(context, adapter)
        if problem is not None:
            return [problem]
        state = self._state(context, layout, loaded)
        describer, first = self.make_describer(), next(iter(state.values()))
        problem = problem_of_registration(describer, first, self.plugin)
        if problem is not None:
            return [problem]
        make_known(describer, first)
        if before is not None:
            found = {_key(*kind): value for kind, value in state.items() if kind[1] in loaded}
            api.load(found, checkpoint_id=place / _name(*before), **_options(adapter))
        wrong = []
        cause = _WRONG_PLACE if before is None else _COPIED
        for (name, shape), value in state.items():
            whole, described = random_bits(dtype_named(name), shape), describer.describe(value)
            assert described is not None
            for box, bits in zip(described.boxes, bits_of(described), strict=True):
                wrong.append(told_difference(bits, whole[slices(box)], f"the key {_key(name, shape)!r}, {box}", cause))
        saved = {_key(*kind): value for kind, value in state.items()}
        api.save(saved, checkpoint_id=place / _name(layout, context.world_size), **_options(adapter))
        return [problem for problem in wrong if problem is not None]

    # -- what ranks do -----------------------------------------------------------------------------------------------

    def _describe_values(self, context: RankContext, adapter: Adapter) -> list[Held]:
        """A job: describe this rank's value of every layout, shape and type."""
        problem = problem_of_group(context, adapter)
        if problem is not None:
            raise AssertionError(problem)
        return [self._held(context, layout, dtype_named(name), shape) for layout, shape, name in self._kinds()]

    def _kinds(self) -> Iterator[tuple[str, Shape, str]]:
        """Layout, shape and type of every kind of value."""
        for layout in self._names("layouts"):
            yield from itertools.product((layout,), self._shapes(layout), self._names("dtypes"))

    def _shapes(self, layout: str) -> tuple[Shape, ...]:
        """Shapes that are cut by a layout."""
        small_layouts = self.layouts if self.small_layouts is None else self.small_layouts
        if self.small_shape is None or layout not in small_layouts:
            return (self.shape,)
        if len(self.small_shape) != len(self.shape):
            pytest.fail(f"small_shape {self.small_shape} must have as many dimensions as shape {self.shape}; say both")
        return self.shape, self.small_shape

    def _names(self, attribute: str) -> tuple[Any, ...]:
        """What the suite declares to try, if that is anything."""
        declared = getattr(self, attribute)
        if isinstance(declared, str) or not declared:
            pytest.fail(f"{type(self).__name__}.{attribute} is {declared!r}; it must be a tuple of at least one")
        unknown = [name for name in declared if name not in BY_NAME] if attribute == "dtypes" else []
        if unknown:
            pytest.fail(
                f"{type(self).__name__}.{attribute} names {unknown}, which are no element types; there are: "
                f"{', '.join(BY_NAME)}"
            )
        return tuple(declared)

    def _held(self, context: RankContext, layout: str, dtype: DType, shape: Shape) -> Held:
        whole, other = (random_bits(dtype, shape, seed) for seed in (0, 1))
        value, second = (
            self.make_value(layout, whole.copy(), dtype, context.rank, context.world_size) for _ in range(2)
        )
        return describe_in_rank(self.make_describer(), value, second, other, dtype)

    def _state(self, context: RankContext, layout: str, to_load: Sequence[Shape]) -> dict[tuple[str, Shape], Any]:
        """A value of each type and shape; those of some shapes hold something else, to be loaded over."""
        state = {}
        for name, shape in itertools.product(self._names("dtypes"), self._shapes(layout)):
            dtype = dtype_named(name)
            whole = random_bits(dtype, shape, 1 if shape in to_load else 0)
            state[name, shape] = self.make_value(layout, whole, dtype, context.rank, context.world_size)
        return state

    def _all(self) -> Iterator[Case]:
        """Every case."""
        kinds = list(self._kinds())
        for world in self._names("worlds"):
            by_rank = self._seen_on(world)
            for number, (layout, shape, dtype) in enumerate(kinds):
                words = f"{layout}, {dtype} {shape}, {count_of_ranks(world)}"
                yield Case(words, shape, dtype, tuple(held[number] for held in by_rank))

    def _each(self) -> Iterator[tuple[Case, int, Held]]:
        """Every rank of every case."""
        for case in self._all():
            for rank, held in enumerate(case.ranks):
                yield case, rank, held

    def _seen_on(self, world: int) -> list[list[Held]]:
        """What the values of each rank were described as. Ranks that failed once are not run again for every test."""
        key = (type(self), world)
        if key not in _seen:
            try:
                _seen[key] = self.run_in_ranks(self._describe_values, world)
            except RankProcessError as error:
                _seen[key] = error
                raise
        found = _seen[key]
        if isinstance(found, RankProcessError):
            last = str(found).rstrip().splitlines()[-1]
            told = f"describing values on {count_of_ranks(world)} failed, as the first test has told: {last}"
            pytest.fail(told, pytrace=False)
        return found


_seen: dict[tuple[type, int], list[list[Held]] | RankProcessError] = {}
"""What the ranks of a suite said, by the suite and their number: several tests look at it."""


def _key(dtype: str, shape: Shape) -> str:
    """The key of a value in a state."""
    return f"{dtype} {shape}"


def _name(layout: str, world: int) -> str:
    """The directory of a checkpoint."""
    return f"{layout} on {world}"


def _options(adapter: Adapter) -> dict[str, Any]:
    return {"adapter": adapter, "timeout_seconds": _SECONDS}
