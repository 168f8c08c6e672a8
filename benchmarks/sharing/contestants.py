"""What takes part: loads of ours that share reads or do not, and torch's, all of one state that every rank holds."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.cases import Settings
from benchmarks.contestant import Contestant
from benchmarks.ours import Ours
from benchmarks.ranks import Rank
from benchmarks.sharing.metered import MeteredFile, MeteredStorage, ReadMeter
from benchmarks.torch_peers import TorchDcp

if TYPE_CHECKING:
    from benchmarks.states import State


class MeteredContestant(Contestant):
    """One way to load, whose reads are counted.

    Attributes:
        saved_by: Whose checkpoint it loads.
    """

    saved_by: ClassVar[str]

    def __init__(self, settings: Settings, rank: Rank, meter: ReadMeter) -> None:
        super().__init__(settings, rank)
        self.meter = meter


class OursShared(MeteredContestant, Ours):
    """`dcp_torch.load` with its defaults: every tensor is read once and broadcast."""

    name = "ours"
    about = "dcp_torch.load: read once and broadcast"
    saved_by = "ours"
    options: ClassVar[Mapping[str, Any]] = {"broadcast_replicated_tensors": True}

    def load(self, state: State, directory: str) -> None:
        import dcp_torch

        reader = dcp_torch.FileSystemReader(storage=MeteredStorage(directory, self.meter))
        dcp_torch.load(state.tensors, storage_reader=reader, verify=self.verify, **self.options)


class OursUnbatched(OursShared):
    """Every tensor is sent by itself."""

    name = "ours-unbatched"
    about = "the same with broadcast_batch_bytes=0: every tensor is sent by itself"
    options: ClassVar[Mapping[str, Any]] = {"broadcast_replicated_tensors": True, "broadcast_batch_bytes": 0}


class OursApart(OursShared):
    """Every rank reads everything."""

    name = "ours-apart"
    about = "the same with broadcast_replicated_tensors=False: every rank reads everything"
    options: ClassVar[Mapping[str, Any]] = {"broadcast_replicated_tensors": False}


class OursAuto(OursShared):
    """The load chooses."""

    name = "ours-auto"
    about = 'the same with broadcast_replicated_tensors="auto"'
    options: ClassVar[Mapping[str, Any]] = {"broadcast_replicated_tensors": "auto"}


class TorchDcpMetered(MeteredContestant, TorchDcp):
    """`torch.distributed.checkpoint`'s load: every rank reads everything."""

    saved_by = "torch-dcp"

    def load(self, state: State, directory: str) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        meter = self.meter

        class Metered(FileSystem):
            @contextlib.contextmanager
            def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
                del mode  # a reader only reads
                with MeteredFile(os.fspath(path), meter) as file:
                    yield io.BufferedReader(file, os.fstat(file.fileno()).st_blksize)  # as `open` does

        reader = FileSystemReader(directory)
        reader.fs = Metered()
        load(state.tensors, storage_reader=reader)


SHARED_CONTESTANTS: dict[str, type[MeteredContestant]] = {
    contestant.name: contestant
    for contestant in (OursShared, OursUnbatched, OursApart, OursAuto, TorchDcpMetered)
}  # fmt: skip


def make(names: Sequence[str], settings: Settings, rank: Rank, meter: ReadMeter) -> dict[str, MeteredContestant]:
    """Contestants for one job."""
    return {name: SHARED_CONTESTANTS[name](settings, rank, meter) for name in names}
