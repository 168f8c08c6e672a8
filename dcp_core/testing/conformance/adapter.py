"""The suite of an adapter: what its tensors are, and that their bits come out and go in unchanged.

Process groups and broadcasts have suites of their own, in `groups` and `broadcasts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dcp_core.adapter import Adapter
from dcp_core.arrays import convert
from dcp_core.box import Box, slices
from dcp_core.dtype import BY_NAME, DTYPES, DType
from dcp_core.planning.description_checks import description_problem
from dcp_core.planning.leaves import DeviceTransfers, LocalTensor
from dcp_core.plugin_checks import protocol_problem
from dcp_core.testing.conformance.comparing import check_same
from dcp_core.testing.conformance.samples import (
    BOXES,
    CASTS,
    FOREIGN_VALUES,
    SHAPE,
    VIEWS,
    Bits,
    random_bits,
    raw,
    small_numbers,
)
from dcp_core.testing.conformance.suite import TensorSuite

_EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=[dtype.name for dtype in DTYPES])
_INT32 = BY_NAME["int32"]
_FLOAT32 = BY_NAME["float32"]
_COPIED = "the view is a copy of the tensor's memory, not the memory itself"
_NOT_CONVERTED = "copy_into does not convert from source_dtype, or rounds in another way than to nearest"


class AdapterConformance(TensorSuite):
    """Tests of an `Adapter`. Derive from it and say how adapters and tensors are made.

    Types and views that the framework lacks are declared, in `lacking_dtypes` and `lacking_views`; the tests of such a
    type are skipped, and what is declared is checked.

    Attributes:
        serves_arrays: Whether the adapter describes numpy's arrays, too; need not be said where these are its tensors.
    """

    serves_arrays: bool = False

    def make_adapter(self) -> Adapter:
        """Make the adapter, or return the one there is."""
        raise NotImplementedError

    def foreign_values(self) -> Iterable[Any]:
        """Values that are no tensors of this framework, besides those of Python."""
        return ()

    def unwritable_views(self) -> Iterable[Any]:
        """Tensors that no load can fill: read-only ones, or ones whose elements share memory."""
        return ()

    @pytest.fixture
    def adapter(self) -> Adapter:
        """The adapter."""
        return self.make_adapter()

    # -- descriptions ----------------------------------------------------------------------------------------------

    def test_it_has_the_methods_of_the_protocol_and_takes_what_the_core_passes(self, adapter: Adapter) -> None:
        """A method that is missing, or called differently, would fail in the middle of a save."""
        assert protocol_problem(adapter, Adapter) is None
        assert isinstance(adapter.name, str) and adapter.name
        assert isinstance(adapter.version, str) and adapter.version

    def test_what_is_declared_to_be_lacking_cannot_be_made(self) -> None:
        """`lacking_dtypes` and `lacking_views` hide nothing: what they name is tried."""
        assert self._wrong_declarations() == []

    @_EVERY_DTYPE
    def test_every_dtype_is_described_by_its_name(self, adapter: Adapter, dtype: DType) -> None:
        """`DType.name` is what other frameworks load by."""
        found = self._described(adapter, self._tensor(random_bits(dtype, SHAPE), dtype))
        assert found.dtype.name == dtype.name

    @pytest.mark.parametrize("shape", [(6, 5), (7,), (2, 3, 4), (1, 1), ()])
    def test_a_tensor_is_one_whole_box(self, adapter: Adapter, shape: tuple[int, ...]) -> None:
        """A plain tensor is one box, from the origin to its shape, and its view has that shape."""
        found = self._described(adapter, self._tensor(random_bits(_INT32, shape), _INT32))
        assert found.global_shape == shape
        assert found.boxes == (Box.whole(shape),)
        assert [tuple(view.shape) for view in found.views] == [shape]
        assert isinstance(found.device, str) and found.device

    def test_plain_is_said_of_whole_tensors_only(self, adapter: Adapter) -> None:
        """A shard that is called plain would be refused; and so would what has fields of wrong types."""
        for name, _, found in self._views(adapter, lambda: self._tensor(random_bits(_INT32, SHAPE), _INT32)):
            problem = description_problem(found)
            if problem is not None:
                pytest.fail(f"of the view {name!r}, describe {problem}")

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
    def test_a_tensor_without_elements_holds_no_box(self, adapter: Adapter, shape: tuple[int, ...]) -> None:
        """Empty boxes are left out."""
        found = self._described(adapter, self._tensor(random_bits(_INT32, shape), _INT32))
        assert (found.global_shape, found.boxes, found.views) == (shape, (), ())

    def test_values_of_others_are_left_to_others(self, adapter: Adapter) -> None:
        """What is no tensor of this framework gets None: another adapter, or an object codec, serves it."""
        is_ours = self.serves_arrays or isinstance(self._tensor(random_bits(_INT32, SHAPE), _INT32), np.ndarray)
        arrays = () if is_ours else (np.zeros(3, np.float32),)
        values = (*FOREIGN_VALUES, *arrays, *self.foreign_values())
        claimed = [value for value in values if adapter.describe(value) is not None]
        if claimed:
            pytest.fail(f"describe must return None for what is no tensor of this framework, and describes {claimed}")

    def test_storage_names_the_elements(self, adapter: Adapter) -> None:
        """Two names of the same elements are stored once; different elements must differ."""
        tensor = self._tensor(random_bits(_INT32, SHAPE), _INT32)
        other = self._tensor(random_bits(_INT32, SHAPE), _INT32)
        found = self._described(adapter, tensor).storage
        assert self._described(adapter, tensor).storage == found
        if found is None:
            return
        assert self._described(adapter, other).storage != found
        for name, part in self._taken(tensor):
            if name not in ("whole", "nothing"):
                assert self._described(adapter, part).storage != found, name

    # -- bits out --------------------------------------------------------------------------------------------------

    @_EVERY_DTYPE
    def test_bits_come_out_as_they_are(self, adapter: Adapter, dtype: DType) -> None:
        """`read_out` gives the bits of any view, in `DType.bits`."""
        bits = random_bits(dtype, SHAPE)
        for name, _, found in self._views(adapter, lambda: self._tensor(bits, dtype)):
            for view in found.views:
                read = found.access.read_out(view)
                assert read.dtype == dtype.bits, name
                assert read.shape == VIEWS[name](bits).shape, name
                check_same(read, VIEWS[name](bits), f"what read_out gives of the view {name!r} of {dtype.name}")

    @_EVERY_DTYPE
    def test_a_host_array_shares_the_tensors_memory(self, adapter: Adapter, dtype: DType) -> None:
        """Where `host_array` gives an array, what is written there is in the tensor."""
        for name, taken, found in self._views(adapter, lambda: self._tensor(random_bits(dtype, SHAPE), dtype)):
            for view in found.views:
                array = found.access.host_array(view)
                if array is not None:
                    assert array.dtype == dtype.bits, name
                    assert array.shape == tuple(view.shape), name
                    array[...] = np.zeros((), dtype.bits)
                    where = f"the view {name!r} of {dtype.name} after zeros were written to its host_array"
                    check_same(self.bits_of(taken), np.zeros(array.shape, dtype.bits), where, _COPIED)

    def test_what_was_read_out_does_not_change_when_more_is_read(self, adapter: Adapter) -> None:
        """A save holds several copies at a time: each needs memory of its own."""
        bits = [random_bits(_INT32, SHAPE, seed) for seed in range(3)]
        tensors = [self._tensor(each, _INT32) for each in bits]
        found = [self._described(adapter, tensor) for tensor in tensors]
        read = [each.access.read_out(each.views[0]) for each in found]
        for number, (one, expected) in enumerate(zip(read, bits, strict=True)):
            where = f"tensor {number} of {len(bits)} that read_out had given"
            check_same(one, expected, where, "read_out gives the same memory each time")

    def test_a_copy_on_the_host_does_not_follow_its_tensor(self, adapter: Adapter) -> None:
        """Where the host does not share a tensor's memory, what was read out stays as it was."""
        before, after = random_bits(_INT32, SHAPE, 1), random_bits(_INT32, SHAPE, 2)
        for name, taken, found in self._views(adapter, lambda: self._tensor(before, _INT32)):
            take = VIEWS[name]
            for view in found.views:
                if found.access.host_array(view) is None:
                    read = found.access.read_out(view)
                    found.access.copy_into(view, take(after), _INT32)
                    check_same(self.bits_of(taken), take(after), f"the view {name!r} after copy_into", _COPIED)
                    where = f"what read_out had given of the view {name!r}, after copy_into"
                    check_same(read, take(before), where, "read_out gives memory that the tensor shares")

    # -- bits in ---------------------------------------------------------------------------------------------------

    @_EVERY_DTYPE
    def test_bits_go_in_as_they_are(self, adapter: Adapter, dtype: DType) -> None:
        """`copy_into` fills a view of any strides, bit for bit, and nothing beside it."""
        expected, after = random_bits(dtype, SHAPE, 1), random_bits(dtype, SHAPE, 2)
        tensor = self._tensor(expected, dtype)
        for name, _, found in reversed(list(self._views(adapter, lambda: tensor))):
            for view in found.views:
                found.access.copy_into(view, VIEWS[name](after), dtype)
            VIEWS[name](expected)[...] = VIEWS[name](after)
            where = f"the tensor of {dtype.name} after copy_into its view {name!r}"
            check_same(self.bits_of(tensor), expected, where, _COPIED)
            after = random_bits(dtype, SHAPE, len(name))

    def test_bits_may_come_in_any_memory(self, adapter: Adapter) -> None:
        """Blocks of a file are slices of buffers: strided, read-only, not aligned."""
        wide = random_bits(_INT32, (12, 10))
        frozen = wide[:6, :5].copy()
        frozen.flags.writeable = False
        shifted = np.empty(6 * 5 * 4 + 1, np.uint8)[1:].view(np.dtype("<i4")).reshape(SHAPE)
        shifted[...] = wide[6:, 5:]
        for bits in (wide[::2, ::2], wide[:5, :6].T, wide[:6, :5][::-1], frozen, shifted):
            tensor = self._tensor(np.zeros(SHAPE, _INT32.bits), _INT32)
            found = self._described(adapter, tensor)
            found.access.copy_into(found.views[0], bits, _INT32)
            where = f"the tensor after copy_into from an array with the strides {bits.strides}"
            check_same(self.bits_of(tensor), bits, where)

    @_EVERY_DTYPE
    def test_elements_are_converted(self, adapter: Adapter, dtype: DType) -> None:
        """`copy_into` converts from the type that is stored to the tensor's own."""
        for source in [source for source, target in CASTS if target == dtype]:
            if source.name in self.lacking_dtypes:
                continue
            tensor = self._tensor(random_bits(dtype, SHAPE), dtype)
            bits = small_numbers(source, SHAPE)
            found = self._described(adapter, tensor)
            found.access.copy_into(found.views[0], bits, source)
            where = f"the tensor of {dtype.name} after copy_into from {source.name}"
            check_same(self.bits_of(tensor), convert(bits, source, dtype), where, _NOT_CONVERTED)

    def test_a_view_of_some_elements_is_converted_too(self, adapter: Adapter) -> None:
        """Strides and a conversion together."""
        before = small_numbers(_FLOAT32, SHAPE)
        tensor = self._tensor(before, _FLOAT32)
        if "every other" in self.lacking_views:
            pytest.skip("lacking_views names 'every other'")
        taken = self._view_named("every other", VIEWS["every other"], tensor)
        found = self._described(adapter, taken)
        numbers = np.array([[3, 5], [7, 9], [11, 13]], np.float16)
        for view in found.views:
            found.access.copy_into(view, numbers, BY_NAME["float16"])
        expected = before.copy()
        VIEWS["every other"](expected)[...] = numbers
        where = "the tensor of float32 after copy_into its view 'every other' from float16"
        check_same(self.bits_of(tensor), expected, where, _NOT_CONVERTED)

    def test_parts_are_filled_by_several_threads(self, adapter: Adapter) -> None:
        """Parts of a tensor in host memory are written at the same time."""
        bits = random_bits(_INT32, (64, 50))
        tensor = self._tensor(np.zeros((64, 50), _INT32.bits), _INT32)
        found = self._described(adapter, tensor)
        view, access = found.views[0], found.access
        if access.host_array(view) is None:
            pytest.skip("the tensor does not lie in host memory")

        def fill(row: int) -> None:
            access.copy_into(access.narrow(view, Box((row, 0), (1, 50))), bits[row : row + 1], _INT32)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(fill, range(64)))
        where = "the tensor after eight threads filled its rows"
        check_same(self.bits_of(tensor), bits, where, "copy_into uses memory that calls at the same time share")

    # -- parts -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("box", BOXES, ids=str)
    def test_narrow_selects_a_box_and_shares_its_memory(self, adapter: Adapter, box: Box) -> None:
        """What is written to a part is in the tensor."""
        before, after = random_bits(_INT32, SHAPE, 1), random_bits(_INT32, box.sizes, 2)
        tensor = self._tensor(before, _INT32)
        found = self._described(adapter, tensor)
        part = found.access.narrow(found.views[0], box)
        assert tuple(part.shape) == box.sizes
        check_same(found.access.read_out(part), before[slices(box)], f"the part {box}")
        found.access.copy_into(part, after, _INT32)
        expected = before.copy()
        expected[slices(box)] = after
        where = f"the tensor after copy_into its part {box}"
        check_same(self.bits_of(tensor), expected, where, "narrow gives a copy of the part, not the part itself")

    def test_narrow_of_a_part_counts_from_the_part(self, adapter: Adapter) -> None:
        """Boxes are relative to the view that they narrow."""
        bits = random_bits(_INT32, SHAPE)
        found = self._described(adapter, self._tensor(bits, _INT32))
        part = found.access.narrow(found.views[0], Box((1, 1), (4, 3)))
        inner = found.access.narrow(part, Box((1, 2), (2, 1)))
        check_same(found.access.read_out(inner), bits[1:5, 1:4][1:3, 2:3], "a part of a part")

    def test_every_view_can_be_filled_unless_it_says_why_not(self, adapter: Adapter) -> None:
        """Slices can; what is read-only, or has elements that share memory, says so."""
        for name, _, found in self._views(adapter, lambda: self._tensor(random_bits(_INT32, SHAPE), _INT32)):
            for view in found.views:
                problem = found.access.writable_problem(view)
                if problem is not None:
                    pytest.fail(
                        f"writable_problem says {problem!r} of the view {name!r}: it must return None, and nothing "
                        "else, where a view can be filled"
                    )
        for value in self.unwritable_views():
            found = self._described(adapter, value)
            problems = [found.access.writable_problem(view) for view in found.views]
            if not any(isinstance(problem, str) and problem for problem in problems):
                pytest.fail(
                    f"unwritable_views gives {value!r}, of which writable_problem says {problems}: it must say in "
                    "words why the view cannot be filled"
                )

    # -- memory of a device ----------------------------------------------------------------------------------------

    @_EVERY_DTYPE
    def test_copies_to_page_locked_memory_carry_the_bits(self, adapter: Adapter, dtype: DType) -> None:
        """`start_copy_out` fills host memory by the time that it was awaited."""
        bits = random_bits(dtype, SHAPE)
        found, transfers = self._on_device(adapter, self._tensor(bits, dtype))
        memory = transfers.host_memory(bits.nbytes)
        assert memory.dtype == np.dtype(np.uint8)
        assert memory.shape == (bits.nbytes,)
        assert memory.flags.c_contiguous
        transfers.start_copy_out(found.views[0], memory)()
        check_same(memory.tobytes(), bits, f"what start_copy_out brought of {dtype.name}")

    def test_several_copies_are_under_way_at_a_time(self, adapter: Adapter) -> None:
        """They are awaited later, in any order."""
        all_bits = [random_bits(_INT32, SHAPE, seed) for seed in range(4)]
        waits = []
        for bits in all_bits:
            found, transfers = self._on_device(adapter, self._tensor(bits, _INT32))
            memory = transfers.host_memory(bits.nbytes)
            waits.append((memory, bits, transfers.start_copy_out(found.views[0], memory)))
        for memory, bits, wait in reversed(waits):
            wait()
            check_same(memory.tobytes(), bits, "one of four copies that were under way", "host_memory is shared")

    def test_copies_from_page_locked_memory_convert(self, adapter: Adapter) -> None:
        """`start_copy_in` does what `copy_into` does."""
        for source in (_FLOAT32, BY_NAME["float16"]):
            tensor = self._tensor(random_bits(_FLOAT32, SHAPE), _FLOAT32)
            found, transfers = self._on_device(adapter, tensor)
            bits = small_numbers(source, SHAPE)
            memory = transfers.host_memory(bits.nbytes)
            memory[:] = np.frombuffer(raw(bits), np.uint8)
            transfers.start_copy_in(found.views[0], memory.view(source.bits).reshape(SHAPE), source)()
            where = f"the tensor of float32 after start_copy_in from {source.name}"
            check_same(self.bits_of(tensor), convert(bits, source, _FLOAT32), where, _NOT_CONVERTED)

    # -- the process -----------------------------------------------------------------------------------------------

    def test_a_process_that_is_no_part_of_a_job_is_a_group_of_one(self, adapter: Adapter) -> None:
        """Without a job everything is saved by one process."""
        for group in (adapter.process_group(), adapter.process_group(None, with_channel=False)):
            assert (group.rank, group.world_size, group.global_rank, group.channel) == (0, 1, 0, None)

    def _tensor(self, bits: Bits, dtype: DType) -> Any:
        if dtype.name in self.lacking_dtypes:
            pytest.skip(f"lacking_dtypes names {dtype.name}")
        return self._made(bits, dtype)

    def _described(self, adapter: Adapter, value: Any) -> LocalTensor:
        found = adapter.describe(value)
        if not isinstance(found, LocalTensor):
            pytest.fail(f"describe gives {found!r} for a tensor of type {type(value).__qualname__}, and no LocalTensor")
        assert len(found.boxes) == len(found.views), f"{len(found.boxes)} boxes and {len(found.views)} views: one a box"
        return found

    def _views(self, adapter: Adapter, make: Callable[[], Any]) -> Iterator[tuple[str, Any, LocalTensor]]:
        """Each view that the framework has, of a tensor of its own: its name, the view and its description."""
        for name, view in VIEWS.items():
            if name not in self.lacking_views:
                taken = self._view_named(name, view, make())
                yield name, taken, self._described(adapter, taken)

    def _on_device(self, adapter: Adapter, tensor: Any) -> tuple[LocalTensor, DeviceTransfers]:
        found = self._described(adapter, tensor)
        transfers = found.access.transfers(found.views[0])
        if transfers is None:
            pytest.skip("elements lie in host memory, or only blocking copies exist")
        assert found.access.host_array(found.views[0]) is None
        return found, transfers
