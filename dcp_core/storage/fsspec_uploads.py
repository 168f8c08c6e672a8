"""New files in a store that takes objects whole: what is written in any order is sent by parts, or in one piece.

In: pieces of a file of known size. Out: an object that appears at once, when all of its bytes were given; before that,
and if any are missing when the file is closed, there is none.
"""

from __future__ import annotations

import os
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from dcp_core.errors import ArgumentError, DcpError, StorageError
from dcp_core.storage.fsspec_client import FsspecClient
from dcp_core.storage.handles import WriteHandle
from dcp_core.storage.operations import BytesLike

PART_BYTES = 8 << 20
"""What one request carries; larger for files that would have more parts than S3 allows."""

WHOLE_BYTES = 16 << 20
"""Smaller files are sent by one request."""

PARTS_IN_FLIGHT = 6
"""How many parts are being sent at once, of all files of a storage together. The client holds each of them twice."""

_MOST_PARTS = 9_000


def open_upload(client: FsspecClient, name: str, nbytes: int, room: threading.BoundedSemaphore) -> WriteHandle:
    """Begin a new file.

    Args:
        client: Where.
        name: Its name.
        nbytes: Its size.
        room: What every part takes while it is being sent.
    """
    if nbytes <= WHOLE_BYTES:
        return _InMemory(client, name, nbytes)
    return _Parts(client, name, nbytes, room) if client.has_parts else _Spooled(client, name, nbytes)


class _Upload(WriteHandle):
    """A file that becomes an object once all its bytes were given."""

    def __init__(self, client: FsspecClient, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._client = client
        self._missing = nbytes
        self._lock = threading.Lock()
        self._is_over = False

    def write(self, offset: int, buffers: Sequence[BytesLike]) -> None:
        """Take buffers one after another; each byte of the file is written once."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        total = sum(map(len, views))
        if offset < 0 or offset + total > self.nbytes:
            raise ArgumentError(
                f"bytes {offset} to {offset + total} lie outside of {self.name!r}, made for {self.nbytes} bytes"
            )
        if self._is_over:
            raise StorageError(f"{self.name!r} in {self._client.shown} is complete or was given up: nothing can follow")
        for view in views:
            self._take(offset, view)
            offset += len(view)
        with self._lock:
            self._missing -= total

    def sync(self) -> None:
        """Make the object, if all of it was written."""
        if not self._is_over and self._missing <= 0:
            self._is_over = True
            try:
                self._finish()
            except BaseException:
                self._discard()
                raise

    def close(self) -> None:
        """Make the object, if all of it was written; else nothing stays. Twice is fine."""
        self.sync()
        if not self._is_over:
            self._is_over = True
            self._discard()

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            self._is_over = True
            with suppress(Exception):
                self._discard()

    @abstractmethod
    def _take(self, offset: int, view: memoryview) -> None:
        """Keep or send bytes."""

    @abstractmethod
    def _finish(self) -> None:
        """Make the object."""

    @abstractmethod
    def _discard(self) -> None:
        """Let go of everything."""


class _InMemory(_Upload):
    """A small file: one request."""

    def __init__(self, client: FsspecClient, name: str, nbytes: int) -> None:
        super().__init__(client, name, nbytes)
        self._content = bytearray(nbytes)

    def _take(self, offset: int, view: memoryview) -> None:
        self._content[offset : offset + len(view)] = view

    def _finish(self) -> None:
        self._client.put(self.name, bytes(self._content))
        self._content = bytearray()

    def _discard(self) -> None:
        self._content = bytearray()


class _Spooled(_Upload):
    """A large file for a store that takes a stream: it waits on the local disk until its first bytes are known."""

    def __init__(self, client: FsspecClient, name: str, nbytes: int) -> None:
        super().__init__(client, name, nbytes)
        self._file = tempfile.TemporaryFile(prefix="dcp-")  # noqa: SIM115  # closed by _finish or _discard

    def _take(self, offset: int, view: memoryview) -> None:
        try:
            while view:
                count = os.pwrite(self._file.fileno(), view, offset)
                offset, view = offset + count, view[count:]
        except OSError as error:
            raise StorageError(
                f"{self.name!r} for {self._client.shown} cannot wait in {tempfile.gettempdir()!r} until it is "
                f"complete: {error}; set TMPDIR to a directory with room for {self.nbytes} bytes"
            ) from error

    def _finish(self) -> None:
        self._client.put_local(self.name, f"/proc/self/fd/{self._file.fileno()}")
        self._file.close()

    def _discard(self) -> None:
        self._file.close()


class _Parts(_Upload):
    """A large file in S3: parts are sent as soon as they are complete, side by side, in any order.

    The first part, which begins with the header, is complete last; it waits in memory.
    """

    def __init__(self, client: FsspecClient, name: str, nbytes: int, room: threading.BoundedSemaphore) -> None:
        super().__init__(client, name, nbytes)
        self._part_nbytes = max(PART_BYTES, -(-nbytes // _MOST_PARTS))
        self._room = room
        self._open: dict[int, _Part] = {}
        self._spare: list[bytearray] = []
        self._failure: BaseException | None = None
        self._sent: dict[int, str] = {}
        self._futures: list[Future[None]] = []
        self._upload_id: str = client.call_s3("create_multipart_upload", name)["UploadId"]
        count = -(-nbytes // self._part_nbytes)
        self._pool = ThreadPoolExecutor(min(PARTS_IN_FLIGHT, count), thread_name_prefix="dcp-upload")

    def _take(self, offset: int, view: memoryview) -> None:
        for number, start, piece in self._cut(offset, view):
            with self._lock:
                part = self._open.get(number)
                if part is None:
                    part = self._open[number] = self._begin(number)
                part.memory[start : start + len(piece)] = piece
                part.missing -= len(piece)
                is_complete = part.missing == 0
                if is_complete:
                    del self._open[number]
            if is_complete:
                self._send(number, part.memory)

    def _cut(self, offset: int, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        """Cut bytes at the edges of parts: number of the part, place in it, bytes."""
        while view:
            number, start = divmod(offset, self._part_nbytes)
            piece = view[: self._part_nbytes - start]
            yield number, start, piece
            offset, view = offset + len(piece), view[len(piece) :]

    def _begin(self, number: int) -> _Part:
        nbytes = min(self._part_nbytes, self.nbytes - number * self._part_nbytes)
        if nbytes == self._part_nbytes and self._spare:
            return _Part(self._spare.pop(), nbytes)
        return _Part(bytearray(nbytes), nbytes)

    def _send(self, number: int, memory: bytearray) -> None:
        self._room.acquire()
        try:
            if self._failure is not None:
                raise self._failure
            content = bytes(memory)
            with self._lock:
                if len(memory) == self._part_nbytes:
                    self._spare.append(memory)
            self._futures.append(self._pool.submit(self._carry, number, content))
        except BaseException:
            self._room.release()
            raise

    def _carry(self, number: int, content: bytes) -> None:
        """Send one part; on a thread of the pool."""
        try:
            if self._failure is None:
                answer: Any = self._client.call_s3(
                    "upload_part", self.name, content, PartNumber=number + 1, UploadId=self._upload_id
                )
                with self._lock:
                    self._sent[number + 1] = answer["ETag"]
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._room.release()

    def _finish(self) -> None:
        self._pool.shutdown(wait=True)
        if self._failure is not None:
            raise self._failure
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._sent.items())]
        try:
            self._client.call_s3(
                "complete_multipart_upload", self.name, UploadId=self._upload_id, MultipartUpload={"Parts": parts}
            )
        except StorageError:
            found = self._client.look_up(self.name)  # the answer of an earlier attempt may have been lost
            if found is None or int(found["size"]) != self.nbytes:
                raise
        self._release()

    def _discard(self) -> None:
        self._failure = self._failure or StorageError(f"{self.name!r} was given up")
        self._pool.shutdown(wait=True, cancel_futures=True)
        for future in self._futures:
            if future.cancelled():
                self._room.release()
        self._client.hurry()
        with suppress(DcpError):
            self._client.call_s3("abort_multipart_upload", self.name, UploadId=self._upload_id)
        self._release()

    def _release(self) -> None:
        self._open.clear()
        self._spare.clear()
        self._futures.clear()


class _Part:
    """One part that is being filled."""

    __slots__ = ("memory", "missing")

    def __init__(self, memory: bytearray, missing: int) -> None:
        self.memory = memory
        self.missing = missing
