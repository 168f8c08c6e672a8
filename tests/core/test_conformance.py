"""The conformance kit, run on what the core brings along: numpy, ranks, devices, directories, boards."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from dcp_core.adapter import Adapter, Describer, KeyValueChannel
from dcp_core.arrays import NumpyAdapter
from dcp_core.background.mailbox import Mailbox
from dcp_core.box import Box
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.dtype import DTYPES, DType
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.storage.base import Storage
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.conformance.adapter import AdapterConformance
from dcp_core.testing.conformance.broadcasts import BroadcastConformance
from dcp_core.testing.conformance.carrier import CarrierConformance
from dcp_core.testing.conformance.describer import DescriberConformance
from dcp_core.testing.conformance.groups import GroupConformance
from dcp_core.testing.conformance.samples import Bits, View
from dcp_core.testing.conformance.storage import StorageConformance
from dcp_core.testing.device_ranks import DeviceRankAdapter
from dcp_core.testing.devices import DeviceArray, SimulatedDevice
from dcp_core.testing.faults import FaultyOperations
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext


class NumpyTensors:
    """Arrays as tensors."""

    lacking_dtypes = tuple(dtype.name for dtype in DTYPES if dtype.numpy is None)

    def make_tensor(self, bits: Bits, dtype: DType) -> Any | None:
        return bits if dtype.numpy is not None else None

    def bits_of(self, tensor: Any) -> Bits:
        return np.array(tensor)


class TestNumpyAdapter(NumpyTensors, AdapterConformance):
    def make_adapter(self) -> Adapter:
        return NumpyAdapter()

    def unwritable_views(self) -> Iterable[Any]:
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        return (frozen, np.broadcast_to(np.zeros(3), (2, 3)), np.lib.stride_tricks.sliding_window_view(np.zeros(5), 2))


class TestNumpyRankAdapter(TestNumpyAdapter):
    def make_adapter(self) -> Adapter:
        return NumpyRankAdapter()


class TestArraysOfRawBits(AdapterConformance):
    """A sharded array of one box: it carries every type, those that numpy lacks as raw bits."""

    serves_arrays = True

    def make_adapter(self) -> Adapter:
        return NumpyRankAdapter()

    def make_tensor(self, bits: Bits, dtype: DType) -> Any | None:
        return ShardedArray(bits.shape, [Box.whole(bits.shape)], [bits], dtype.name)

    def bits_of(self, tensor: Any) -> Bits:
        return np.array(tensor.arrays[0])

    def view_of(self, tensor: Any, view: View) -> Any | None:
        part = view(tensor.arrays[0])
        return ShardedArray(part.shape, [Box.whole(part.shape)], [part], tensor.dtype_name)


class DeviceTensors:
    """Arrays on a simulated device."""

    serves_arrays = True
    device = SimulatedDevice(pace="at once")

    def make_adapter(self) -> Adapter:
        return DeviceRankAdapter()

    def make_tensor(self, bits: Bits, dtype: DType) -> Any | None:
        return self.device.put(bits, dtype.name)

    def bits_of(self, tensor: Any) -> Bits:
        return self.device.get(tensor)

    def view_of(self, tensor: Any, view: View) -> Any | None:
        return DeviceArray(self.device, tensor.dtype, view(tensor.memory))


class TestDeviceAdapter(DeviceTensors, AdapterConformance):
    pass


class RankAdapter:
    """What jobs of numpy ranks get."""

    def in_rank(self, context: RankContext) -> AbstractContextManager[Any]:
        return nullcontext(NumpyRankAdapter())


class TestNumpyGroup(RankAdapter, GroupConformance):
    pass


class TestNumpyBroadcasts(NumpyTensors, RankAdapter, BroadcastConformance):
    pass


class TestLocalStorage(StorageConformance):
    def make_storage(self, place: Path) -> Storage:
        return LocalStorage(place)


class TestLocalStorageThatMovesFewBytesAtATime(StorageConformance):
    def make_storage(self, place: Path) -> Storage:
        return LocalStorage(place, FaultyOperations(max_io_bytes=100_000))


class TestDirectoryChannel(CarrierConformance):
    def open_channel(self, place: Path, rank: int, world_size: int) -> KeyValueChannel:
        return DirectoryChannel(place)


class TestMailboxFolder(CarrierConformance):
    """The mailbox that a file system's writer opens beside a checkpoint."""

    def open_channel(self, place: Path, rank: int, world_size: int) -> KeyValueChannel:
        folder = FileSystemWriter(place / "step").open_mailbox("0f3a")
        assert folder is not None
        folder.prepare()
        return folder


class TestMailbox(CarrierConformance):
    """What the background processes of a save talk through, on such a folder."""

    def open_channel(self, place: Path, rank: int, world_size: int) -> KeyValueChannel:
        folder = FileSystemWriter(place / "step").open_mailbox("0f3a")
        assert folder is not None
        mailbox = Mailbox(folder, rank, world_size, key="0f3a", is_committed=lambda: False)
        if rank == 0:
            mailbox.open()
        return mailbox


class TestShardedArray(RankAdapter, DescriberConformance):
    layouts = ("rows", "columns", "whole", "last rank")

    def make_describer(self) -> Describer:
        return NumpyRankAdapter()

    def make_value(self, layout: str, whole: Bits, dtype: DType, rank: int, world_size: int) -> Any:
        boxes = {
            "rows": even_boxes(whole.shape, world_size, rank),
            "columns": even_boxes(whole.shape, world_size, rank, dim=1),
            "whole": [Box.whole(whole.shape)],
            "last rank": [Box.whole(whole.shape)] if rank == world_size - 1 else [],
        }
        return ShardedArray.cut(whole, boxes[layout], dtype.name)
