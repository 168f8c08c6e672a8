"""What lies in a directory as its description right now: opened, looked at before a save, compared after a failed load.

Goes in: a storage. Comes out: open metadata, or an error that says what is there and what to do.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dcp_core.errors import (
    ArgumentError,
    CorruptError,
    DcpError,
    IncompleteError,
    NewerVersionError,
    NotFoundError,
    StorageError,
)
from dcp_core.file_names import METADATA_NAME, parse_data_file_name, rank_metadata_name
from dcp_core.formats.block_container import FIRST_READ_NBYTES, foreign_kind
from dcp_core.formats.metadata_file import MetadataFile, open_metadata
from dcp_core.metadata import SaveRecord
from dcp_core.storage.base import ReadHandle, Storage

_DIRECTORIES_LOOKED_INTO = 10
_REMEDY = "save into another directory, or remove the old checkpoint"


def metadata_name(rank: int | None) -> str:
    """Name the description of a whole job's checkpoint (None), or of what one rank saved alone."""
    return METADATA_NAME if rank is None else rank_metadata_name(rank)


def open_present(storage: Storage, name: str, header_digest: bytes | None = None) -> MetadataFile:
    """Open a description by ranges; it stays open as long as the result is in use.

    Raises:
        NotFoundError: There is none.
        CorruptError: It is not sound, or not the one that was asked for.
        NewerVersionError: A newer version of this library wrote it.
    """
    handle = storage.open_read(name)
    label = f"{name} in {storage.describe()}"
    return open_metadata(_RangedRead(handle, label), handle.nbytes, header_digest=header_digest, file_name=label)


def other_content(storage: Storage) -> str:
    """Say what else can be loaded where there is no description, in words of a remedy.

    Raises:
        StorageError: There is not even that in which directories are, such as the bucket.
    """
    try:
        if any(name.endswith(".safetensors") and parse_data_file_name(name) is None for name in storage.list()):
            return "it holds safetensors files of another program, which HuggingFaceReader reads"
    except DcpError as error:
        if isinstance(error, StorageError) and error.errno == errno.ENOENT:
            raise
    with suppress(DcpError):
        for name in reversed(storage.list_directories()[-_DIRECTORIES_LOOKED_INTO:]):
            if storage.folder(name).exists(METADATA_NAME):
                return f"its directory {name!r} holds a checkpoint, and latest_checkpoint finds the newest of all"
    return "check the path, or load another checkpoint"


def refuse_unknown(storage: Storage, name: str) -> None:
    """Refuse to save over what this version cannot read, and somebody else can.

    A description of ours that is merely broken is no obstacle.

    Raises:
        NewerVersionError: A newer version of this library wrote what is there.
        ArgumentError: Another program did.
    """
    first = b""
    try:
        if not storage.exists(name):
            return
        with storage.open_read(name) as handle:
            first = _RangedRead(handle, name)(0, min(handle.nbytes, FIRST_READ_NBYTES))
        open_present(storage, name)
    except NewerVersionError as error:
        where = storage.describe()
        raise NewerVersionError(f"{where} holds a checkpoint of a newer version; {_REMEDY}. ({error})") from error
    except CorruptError as error:
        kind = foreign_kind(first)
        if kind:
            raise ArgumentError(
                f"{storage.describe()} holds a checkpoint of another program (its {name} is {kind}); {_REMEDY}"
            ) from error
    except DcpError:
        return  # the save that follows meets it too, and says what it was about to do


@contextmanager
def replacement_explained(storage: Storage, save: SaveRecord) -> Iterator[None]:
    """Say so when reading a checkpoint's files fails because another save has replaced it meanwhile.

    Args:
        storage: The directory.
        save: The save whose files are read.

    Raises:
        IncompleteError: Instead of what was raised, if another save's description is there now.
    """
    try:
        yield
    except (IncompleteError, NotFoundError, CorruptError) as error:
        present = _present_save_id(storage, save.rank)
        if present in (None, save.save_id):
            raise
        raise IncompleteError(
            f"save {present} replaced this checkpoint (save {save.save_id}) in {storage.describe()} while it was being "
            f"loaded: load again. ({error})"
        ) from error


def _present_save_id(storage: Storage, rank: int | None) -> str | None:
    """The save of what a load would find now; None when that cannot be told."""
    try:
        name = METADATA_NAME if rank is None or storage.exists(METADATA_NAME) else rank_metadata_name(rank)
        return open_present(storage, name).save.save_id
    except DcpError:
        return None


class _RangedRead:
    """Reads ranges of one file that stays open, so that a save over the checkpoint does not mix two descriptions."""

    def __init__(self, handle: ReadHandle, label: str) -> None:
        self._handle = handle
        self._label = label

    def __call__(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self._handle.nbytes:
            raise CorruptError(f"{self._label}: bytes {offset} to {offset + nbytes} lie outside of the file")
        content = bytearray(nbytes)
        self._handle.read_into(offset, memoryview(content))
        return bytes(content)
