"""Wrong adapters."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from dcp_core.adapter import Adapter, ProcessGroup
from dcp_core.arrays import ArrayAccess, NumpyAdapter, convert
from dcp_core.box import Box, slices
from dcp_core.dtype import BY_NAME, DType, numpy_dtype
from dcp_core.planning.leaves import LocalTensor
from dcp_core.testing.conformance.adapter import AdapterConformance
from dcp_core.testing.conformance.samples import Bits, View
from dcp_core.testing.device_ranks import DeviceRankAdapter
from dcp_core.testing.devices import DeviceArray, SimulatedDevice
from tests.core.planted_bugs import plant
from tests.core.test_conformance import NumpyTensors
from tests.core.test_conformance import TestNumpyAdapter as _RightSuite

# mypy: disable-error-code="override,assignment"
# wrong on purpose


class LacksAMethod(NumpyAdapter):
    transfers = None


class SpellsDtypesAsItself(NumpyAdapter):
    def describe(self, value: Any) -> LocalTensor | None:
        found = super().describe(value)
        is_unsigned = found is not None and found.dtype.name == "uint16"
        return replace(found, dtype=BY_NAME["bfloat16"]) if found is not None and is_unsigned else found


class LeavesTheShape(NumpyAdapter):
    def describe(self, value: Any) -> LocalTensor | None:
        found = super().describe(value)
        if found is None or not found.global_shape or not found.boxes:
            return found
        rows, *others = found.global_shape
        return replace(found, boxes=(Box((0,) * len(found.global_shape), (rows + 1, *others)),))


class CallsPartsOfTheirBasePlain(NumpyAdapter):
    """Describes a slice of rows as a shard of the array that it was cut from, and calls it plain."""

    def describe(self, value: Any) -> LocalTensor | None:
        found = super().describe(value)
        if found is None or value.base is None or value.ndim != 2 or value.base.shape[1:] != value.shape[1:]:
            return found
        return replace(found, global_shape=value.base.shape, boxes=found.boxes and (Box((0, 0), value.shape),))


class KeepsEmptyBoxes(NumpyAdapter):
    def describe(self, value: Any) -> LocalTensor | None:
        found = super().describe(value)
        return None if found is None else replace(found, boxes=(Box.whole(value.shape),), views=(value,))


class ClaimsNumbers(NumpyAdapter):
    def describe(self, value: Any) -> LocalTensor | None:
        return super().describe(np.asarray(value) if isinstance(value, (bool, int, float)) else value)


class NamesStorageByTheFirstElement(NumpyAdapter):
    def describe(self, value: Any) -> LocalTensor | None:
        found = super().describe(value)
        return None if found is None else replace(found, storage=value.__array_interface__["data"][0])


class ReadsInMemoryOrder(NumpyAdapter):
    def read_out(self, view: Any) -> Any:
        return super().read_out(view).ravel(order="K").reshape(view.shape)


class ReadsFlat(NumpyAdapter):
    def read_out(self, view: Any) -> Any:
        return super().read_out(view).reshape(-1)


class GivesACopyAsHostArray(NumpyAdapter):
    def host_array(self, view: Any) -> Any:
        return self.read_out(view).copy()


class _OnADevice(NumpyAdapter):
    """As if the host did not share the memory."""

    def host_array(self, view: Any) -> Any:
        return None

    def read_out(self, view: Any) -> Any:
        return np.array(view.view(_dtype(view).bits))

    def copy_into(self, view: Any, bits: Any, source_dtype: DType) -> None:
        view[...] = convert(bits, source_dtype, _dtype(view))


class ReadsIntoOneBuffer(_OnADevice):
    buffer = np.zeros(1 << 12, np.uint8)

    def read_out(self, view: Any) -> Any:
        bits = self.buffer[: view.nbytes].view(view.dtype).reshape(view.shape)
        bits[...] = view
        return bits


class ReadsOutWhatIsAlive(_OnADevice):
    def read_out(self, view: Any) -> Any:
        return view


class IgnoresStrides(NumpyAdapter):
    def copy_into(self, view: Any, bits: Any, source_dtype: DType) -> None:
        view.reshape(-1)[:] = convert(bits, source_dtype, _dtype(view)).reshape(-1)


class IgnoresStridesOfTheSource(NumpyAdapter):
    def copy_into(self, view: Any, bits: Any, source_dtype: DType) -> None:
        strides = np.empty(bits.shape, bits.dtype).strides
        super().copy_into(view, np.lib.stride_tricks.as_strided(bits, bits.shape, strides), source_dtype)


class IgnoresTheSourceType(NumpyAdapter):
    def copy_into(self, view: Any, bits: Any, source_dtype: DType) -> None:
        np.copyto(view, bits, casting="unsafe")


class ConvertsWholeTensorsOnly(NumpyAdapter):
    def copy_into(self, view: Any, bits: Any, source_dtype: DType) -> None:
        if view.flags.c_contiguous or source_dtype == _dtype(view):
            super().copy_into(view, bits, source_dtype)
        else:
            view[...] = bits.view(f"u{bits.itemsize}")


class ConvertsInOneScratch(NumpyAdapter):
    def copy_into(self, view: Any, bits: Any, source_dtype: DType) -> None:
        self.scratch = convert(bits, source_dtype, _dtype(view))
        time.sleep(0.002)
        view[...] = self.scratch


class NarrowsToACopy(NumpyAdapter):
    def narrow(self, view: Any, box: Box) -> Any:
        return super().narrow(view, box).copy()


class NarrowsFromTheWholeTensor(NumpyAdapter):
    def narrow(self, view: Any, box: Box) -> Any:
        return (view if view.base is None else view.base)[slices(box)]


class FillsWhatIsReadOnly(NumpyAdapter):
    def writable_problem(self, view: Any) -> None:
        return None


class RefusesSlices(NumpyAdapter):
    def writable_problem(self, view: Any) -> str | None:
        return None if view.flags.c_contiguous else "not contiguous"


class FindsAJobThatIsNotThere(NumpyAdapter):
    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        return ProcessGroup(1, 2, 1)


class IsDeclaredToLackWhatItHas(NumpyAdapter):
    """Right by itself: it is the suite that hides a type from its tests."""


class HasNoTensors(NumpyAdapter):
    """Right by itself: it is the suite that makes nothing, and says nothing of that."""


class HasNoViews(NumpyAdapter):
    """Likewise with views."""


FOUND_BY: dict[type, str] = {
    IsDeclaredToLackWhatItHas: "test_what_is_declared_to_be_lacking_cannot_be_made",
    HasNoTensors: "test_every_dtype_is_described_by_its_name",
    HasNoViews: "test_bits_come_out_as_they_are",
    LacksAMethod: "test_it_has_the_methods_of_the_protocol_and_takes_what_the_core_passes",
    SpellsDtypesAsItself: "test_every_dtype_is_described_by_its_name",
    LeavesTheShape: "test_a_tensor_is_one_whole_box",
    CallsPartsOfTheirBasePlain: "test_plain_is_said_of_whole_tensors_only",
    KeepsEmptyBoxes: "test_a_tensor_without_elements_holds_no_box",
    ClaimsNumbers: "test_values_of_others_are_left_to_others",
    NamesStorageByTheFirstElement: "test_storage_names_the_elements",
    ReadsInMemoryOrder: "test_bits_come_out_as_they_are",
    ReadsFlat: "test_bits_come_out_as_they_are",
    GivesACopyAsHostArray: "test_a_host_array_shares_the_tensors_memory",
    ReadsIntoOneBuffer: "test_what_was_read_out_does_not_change_when_more_is_read",
    ReadsOutWhatIsAlive: "test_a_copy_on_the_host_does_not_follow_its_tensor",
    IgnoresStrides: "test_bits_go_in_as_they_are",
    IgnoresStridesOfTheSource: "test_bits_may_come_in_any_memory",
    IgnoresTheSourceType: "test_elements_are_converted",
    ConvertsWholeTensorsOnly: "test_a_view_of_some_elements_is_converted_too",
    ConvertsInOneScratch: "test_parts_are_filled_by_several_threads",
    NarrowsToACopy: "test_narrow_selects_a_box_and_shares_its_memory",
    NarrowsFromTheWholeTensor: "test_narrow_of_a_part_counts_from_the_part",
    FillsWhatIsReadOnly: "test_every_view_can_be_filled_unless_it_says_why_not",
    RefusesSlices: "test_every_view_can_be_filled_unless_it_says_why_not",
    FindsAJobThatIsNotThere: "test_a_process_that_is_no_part_of_a_job_is_a_group_of_one",
}


def _dtype(view: Any) -> DType:
    found = numpy_dtype(view.dtype)
    assert found is not None
    return found


class AdapterSuite(NumpyTensors, AdapterConformance):
    """The kit on an adapter of numpy arrays."""

    wrong: type = NumpyAdapter
    unwritable_views = _RightSuite.unwritable_views

    def make_adapter(self) -> Adapter:
        made: Adapter = self.wrong()
        return made

    @property
    def lacking_dtypes(self) -> tuple[str, ...]:
        if self.wrong is IgnoresTheSourceType:  # needs a type that numpy lacks
            return ()
        return (*NumpyTensors.lacking_dtypes, *(("int16",) if self.wrong is IsDeclaredToLackWhatItHas else ()))

    def make_tensor(self, bits: Bits, dtype: DType) -> Any | None:
        is_lacking = self.wrong is HasNoTensors or (dtype.name in NumpyTensors.lacking_dtypes and self.lacking_dtypes)
        return None if is_lacking else bits

    def view_of(self, tensor: Any, view: View) -> Any | None:
        return None if self.wrong is HasNoViews else view(tensor)


class TestRightAdapter(AdapterSuite):
    pass


plant(globals(), AdapterSuite, FOUND_BY)


# -- devices --------------------------------------------------------------------------------------------------------


class DoesNotWait(SimulatedDevice):
    def start_copy_out(self, view: Any, target: Any) -> Any:
        return lambda: None


class HasOneBuffer(SimulatedDevice):
    buffer = np.zeros(1 << 12, np.uint8)

    def host_memory(self, nbytes: int) -> Any:
        return self.buffer[:nbytes]

    def start_copy_out(self, view: Any, target: Any) -> Any:
        target[...] = np.frombuffer(self.get(view).tobytes(), np.uint8)
        return lambda: None


class CopiesInWithoutConverting(SimulatedDevice):
    def start_copy_in(self, view: Any, bits: Any, source_dtype: DType) -> Any:
        ArrayAccess(view.dtype).copy_into(
            view.memory, bits.view(f"u{bits.itemsize}").astype(view.dtype.bits), view.dtype
        )
        return lambda: None


FOUND_BY_ON_DEVICES: dict[type, str] = {
    DoesNotWait: "test_copies_to_page_locked_memory_carry_the_bits",
    HasOneBuffer: "test_several_copies_are_under_way_at_a_time",
    CopiesInWithoutConverting: "test_copies_from_page_locked_memory_convert",
}


class DeviceSuite(AdapterConformance):
    """The kit on an adapter of arrays on a device."""

    serves_arrays = True
    wrong: type = SimulatedDevice

    @cached_property
    def device(self) -> Any:
        return self.wrong(pace="at once")

    def make_adapter(self) -> Adapter:
        return DeviceRankAdapter()

    def make_tensor(self, bits: Bits, dtype: DType) -> Any | None:
        return self.device.put(bits, dtype.name)

    def bits_of(self, tensor: Any) -> Bits:
        bits: Bits = self.device.get(tensor)
        return bits

    def view_of(self, tensor: Any, view: View) -> Any | None:
        return DeviceArray(self.device, tensor.dtype, view(tensor.memory))


class TestRightDevice(DeviceSuite):
    pass


plant(globals(), DeviceSuite, FOUND_BY_ON_DEVICES)
