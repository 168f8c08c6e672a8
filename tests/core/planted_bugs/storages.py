"""Wrong storages."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dcp_core.errors import NotFoundError
from dcp_core.storage.base import ReadHandle, Storage, WriteHandle
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.conformance.storage import StorageConformance
from tests.core.planted_bugs import plant

_MIB = 1 << 20


class _Reader(ReadHandle):
    """A right one, to be overridden."""

    def __init__(self, inner: ReadHandle) -> None:
        self.name, self.nbytes, self.inner = inner.name, inner.nbytes, inner

    def read_into(self, offset: int, target: memoryview) -> None:
        self.inner.read_into(offset, target)

    def close(self) -> None:
        self.inner.close()


class _Writer(WriteHandle):
    """A right one, to be overridden."""

    def __init__(self, inner: WriteHandle) -> None:
        self.name, self.nbytes, self.inner = inner.name, inner.nbytes, inner

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        self.inner.write(offset, buffers)

    def sync(self) -> None:
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()


class _Wrapped(LocalStorage):
    reader: type[_Reader] = _Reader
    writer: type[_Writer] = _Writer

    def open_read(self, name: str) -> ReadHandle:
        return self.reader(super().open_read(name))

    def create(self, name: str, nbytes: int) -> WriteHandle:
        return self.writer(super().create(name, nbytes))


class ReadsShort(_Wrapped):
    class reader(_Reader):  # noqa: N801  # the attribute's name
        def read_into(self, offset: int, target: memoryview) -> None:
            self.inner.read_into(offset, target.cast("B")[:_MIB])


class FillsOneTarget(_Wrapped):
    class reader(_Reader):  # noqa: N801
        def read_scattered(self, offset: int, targets: Sequence[memoryview]) -> None:
            for target in targets:
                self.read_into(offset, target)


class PadsWithZeros(_Wrapped):
    class reader(_Reader):  # noqa: N801
        def read_into(self, offset: int, target: memoryview) -> None:
            there = max(min(len(target), self.nbytes - offset), 0)
            if there:
                self.inner.read_into(offset, target[:there])


class CannotBeClosedTwice(_Wrapped):
    class writer(_Writer):  # noqa: N801
        is_closed = False

        def close(self) -> None:
            if self.is_closed:
                raise ValueError("closed")
            self.is_closed = True
            super().close()


class CountsItemsOfBuffers(_Wrapped):
    class writer(_Writer):  # noqa: N801
        def write(self, offset: int, buffers: Sequence[Any]) -> None:
            for buffer in buffers:
                if len(buffer):
                    self.inner.write(offset, [memoryview(buffer).cast("B")[: len(buffer)]])
                offset += len(buffer)


class Appends(_Wrapped):
    class writer(_Writer):  # noqa: N801
        at = 0

        def write(self, offset: int, buffers: Sequence[Any]) -> None:
            self.inner.write(self.at, buffers)
            self.at += sum(memoryview(buffer).nbytes for buffer in buffers)


class HasOnePosition(_Wrapped):
    class writer(_Writer):  # noqa: N801
        at = 0

        def write(self, offset: int, buffers: Sequence[Any]) -> None:
            self.at = offset
            time.sleep(0.001)
            self.inner.write(self.at, buffers)


class WritesBeyondItsSize(_Wrapped):
    class writer(_Writer):  # noqa: N801
        def write(self, offset: int, buffers: Sequence[Any]) -> None:
            nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)
            if offset + nbytes <= self.nbytes:
                self.inner.write(offset, buffers)


class LosesTheLastByte(_Wrapped):
    class writer(_Writer):  # noqa: N801
        def write(self, offset: int, buffers: Sequence[Any]) -> None:
            joined = b"".join(memoryview(buffer).cast("B").tobytes() for buffer in buffers if memoryview(buffer).nbytes)
            self.inner.write(offset, [joined[:-1] if len(joined) > 4096 else joined])


class Overwrites(LocalStorage):
    def create(self, name: str, nbytes: int) -> WriteHandle:
        self.remove(name)
        return super().create(name, nbytes)


class LooksBeforeItCreates(LocalStorage):
    def create(self, name: str, nbytes: int) -> WriteHandle:
        if self.size(name) is None:
            time.sleep(0.05)
            self.remove(name)
        return super().create(name, nbytes)


class ListsWhatItListedBefore(LocalStorage):
    listed: list[str] | None = None

    def list(self) -> Any:
        if self.listed is None:
            self.listed = super().list()
        return self.listed


class ListsInAnyOrder(LocalStorage):
    def list(self) -> Any:
        return super().list()[::-1]


class ListsWhatIsNotThere(LocalStorage):
    def list(self) -> Any:
        return super().list() if os.path.isdir(self.path) else []


class RemembersSizes(LocalStorage):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.remembered: dict[str, int | None] = {}

    def size(self, name: str) -> int | None:
        if self.remembered.get(name) is None:
            self.remembered[name] = super().size(name)
        return self.remembered[name]

    def write_file(self, name: str, content: Any, *, durable: bool = True) -> None:
        super().write_file(name, content, durable=durable)
        self.size(name)


class QuotesNames(LocalStorage):
    def list(self) -> Any:
        return [quote(name) for name in super().list()]


class LeavesTheDirectory(LocalStorage):
    def size(self, name: str) -> int | None:
        path = os.path.join(self.path, name.replace("\0", ""))
        return os.path.getsize(path) if os.path.exists(path) else None


class RaisesWhatItLikes(LocalStorage):
    def open_read(self, name: str) -> ReadHandle:
        try:
            return super().open_read(name)
        except NotFoundError as error:
            raise LookupError(name) from error


class TouchesNothing(LocalStorage):
    def touch(self, name: str) -> None:
        if self.size(name) is None:
            super().touch(name)


class PublishesACopy(LocalStorage):
    def publish(self, temporary: str, name: str) -> None:
        shutil.copy(self._path_of(temporary), self._path_of(name))


class PublishesInTwoSteps(LocalStorage):
    def publish(self, temporary: str, name: str) -> None:
        self.remove(name)
        time.sleep(0.002)
        super().publish(temporary, name)


class PublishesInPieces(LocalStorage):
    def publish(self, temporary: str, name: str) -> None:
        content = self.read(temporary)
        with open(self._path_of(name), "wb", buffering=0) as file:
            for start in range(0, len(content), 10_000):
                file.write(content[start : start + 10_000])
                time.sleep(0.0005)
        self.remove(temporary)


class ClearsTheWayFirst(LocalStorage):
    def publish(self, temporary: str, name: str) -> None:
        self.remove(name)
        super().publish(temporary, name)


class RemovesNothing(LocalStorage):
    def remove(self, name: str) -> None:
        self.size(name)


class LivesInItsProcess(LocalStorage):
    def __init__(self, path: Path) -> None:
        super().__init__(path / str(os.getpid()))


class PutsBeforeItIsReady(LocalStorage):
    def put(
        self,
        name: str,
        content: Any,
        *,
        temporary: str,
        durable: bool = True,
        ready: Callable[[], None] | None = None,
    ) -> None:
        super().put(name, content, temporary=temporary, durable=durable)
        if ready is not None:
            ready()


class TellsSizesOfWhatIsThere(LocalStorage):
    def sizes(self, names: Sequence[str]) -> Sequence[int | None]:
        return [found for found in super().sizes(names) if found is not None]


class SaysNothing(LocalStorage):
    def describe(self) -> str:
        return ""


FOUND_BY: dict[type, str] = {
    LosesTheLastByte: "test_what_is_written_is_read",
    CountsItemsOfBuffers: "test_buffers_of_any_kind_land_one_after_another",
    Appends: "test_pieces_are_written_in_any_order",
    HasOnePosition: "test_a_file_is_written_and_read_by_several_threads",
    ReadsShort: "test_a_read_fills_its_whole_target",
    FillsOneTarget: "test_a_read_fills_several_targets_in_order",
    PadsWithZeros: "test_a_read_past_the_end_is_incomplete",
    WritesBeyondItsSize: "test_writing_beyond_the_announced_size_is_refused",
    CannotBeClosedTwice: "test_handles_may_be_closed_twice",
    Overwrites: "test_a_name_is_created_exclusively",
    LooksBeforeItCreates: "test_of_many_that_create_a_name_at_once_one_succeeds",
    ListsWhatItListedBefore: "test_names_are_listed_sorted_and_as_they_are_now",
    ListsInAnyOrder: "test_names_are_listed_sorted_and_as_they_are_now",
    QuotesNames: "test_names_come_back_as_they_are",
    LeavesTheDirectory: "test_a_name_that_leaves_the_directory_is_refused",
    RaisesWhatItLikes: "test_what_is_not_there_is_told_so",
    RemembersSizes: "test_a_removed_name_may_be_used_again",
    ListsWhatIsNotThere: "test_a_directory_is_made_once_and_missing_before",
    SaysNothing: "test_it_says_where_it_is",
    TouchesNothing: "test_touching_a_file_makes_it_younger",
    PublishesACopy: "test_a_publish_replaces_what_has_the_name",
    ClearsTheWayFirst: "test_a_publish_of_nothing_leaves_what_is_there",
    PutsBeforeItIsReady: "test_a_put_replaces_what_has_the_name",
    TellsSizesOfWhatIsThere: "test_sizes_are_told_in_order",
    PublishesInTwoSteps: "test_a_publish_is_one_step",
    PublishesInPieces: "test_a_publish_is_one_step",
    RemovesNothing: "test_checkpoints_are_saved_loaded_and_replaced",
    LivesInItsProcess: "test_what_a_process_wrote_others_read",
}


class StorageSuite(StorageConformance):
    """The kit on a directory."""

    wrong: type = LocalStorage

    def make_storage(self, place: Path) -> Storage:
        made: Storage = self.wrong(place)
        return made

    @property
    def patience_seconds(self) -> float:  # type: ignore[override]  # what is wrong need not be waited for
        return StorageConformance.patience_seconds if self.wrong is LocalStorage else 1.0


class TestRightStorage(StorageSuite):
    pass


plant(globals(), StorageSuite, FOUND_BY)
