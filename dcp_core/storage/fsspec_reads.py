"""Files of a store that are open to read: small ones as they were when they were opened, data files by ranges.

In: a place in a file, and memory. Out: memory that is filled by as few requests as help, several at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dcp_core.errors import IncompleteError
from dcp_core.storage.fsspec_client import FsspecClient
from dcp_core.storage.handles import ReadHandle

RANGE_BYTES = 8 << 20
"""A larger read is made by several requests at once."""

READS_AT_ONCE = 8
"""How many requests one read, or one look at many names, makes at a time."""

SHORT_READS = 3
"""So often a request is made whose answer has another length than what is there."""


class HeldHandle(ReadHandle):
    """A small file, as it was when it was opened."""

    def __init__(self, where: str, name: str, content: bytes) -> None:
        self.name = name
        self.nbytes = len(content)
        self._where = where
        self._content = content

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the byte at `offset`."""
        _check_range(self._where, self, offset, target.nbytes)
        target.cast("B")[:] = self._content[offset : offset + target.nbytes]

    def close(self) -> None:
        """Nothing is open."""


class RangedHandle(ReadHandle):
    """A file that is read by ranges."""

    def __init__(self, client: FsspecClient, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._client = client

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the byte at `offset`, by several requests at once where it is large."""
        if target.nbytes:
            self.read_scattered(offset, [target.cast("B")])

    def read_scattered(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill targets one after another from the byte at `offset`."""
        wanted = sum(map(len, targets))
        _check_range(self._client.shown, self, offset, wanted)
        calls = _calls(offset, targets)
        if len(calls) <= 1:
            for call in calls:
                self._fill(*call)
            return
        with ThreadPoolExecutor(min(READS_AT_ONCE, len(calls)), thread_name_prefix="dcp-download") as pool:
            for future in [pool.submit(self._fill, *call) for call in calls]:
                future.result()

    def _fill(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill targets by one request; it is made again when fewer bytes come than there are."""
        wanted = sum(map(len, targets))
        content: bytes | None = b""
        for _ in range(SHORT_READS):
            content = self._client.get(self.name, offset, offset + wanted)
            if content is None or len(content) == wanted:
                break
        if content is None or len(content) != wanted:
            found = "is gone" if content is None else f"gives {len(content)} bytes from byte {offset} on"
            raise IncompleteError(
                f"{self.name!r} in {self._client.shown} {found}: expected bytes up to {offset + wanted}; the "
                "file was removed, or cut short"
            )
        view, position = memoryview(content), 0
        for target in targets:
            target[:] = view[position : position + len(target)]
            position += len(target)

    def close(self) -> None:
        """Nothing is open."""


def _check_range(where: str, handle: ReadHandle, offset: int, nbytes: int) -> None:
    if nbytes and (offset < 0 or offset + nbytes > handle.nbytes):
        raise IncompleteError(
            f"{handle.name!r} in {where} ends at byte {handle.nbytes}: expected bytes up to "
            f"{offset + nbytes}; the file was cut short"
        )


def _calls(offset: int, targets: Sequence[memoryview]) -> list[tuple[int, list[memoryview]]]:
    """Which targets one request fills each: as many as fit, and large ones by pieces."""
    calls: list[tuple[int, list[memoryview]]] = []
    room = 0
    for target in targets:
        view = target
        while view:
            if not room:
                calls.append((offset, []))
                room = RANGE_BYTES
            piece = view[:room]
            calls[-1][1].append(piece)
            offset, room, view = offset + len(piece), room - len(piece), view[len(piece) :]
    return calls
