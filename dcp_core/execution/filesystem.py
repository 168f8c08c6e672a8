"""The writer and the reader over a directory of files.

Goes in: plans. Comes out: data files, and `.metadata` when every rank's are there. The byte work is in
`write_engine` and `read_engine`; the rules of commit and overwriting in `storage.commit`.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.errors import ArgumentError, DcpError, NotFoundError, StorageError
from dcp_core.execution.broadcast import BroadcastWalker
from dcp_core.execution.checkpoint_place import CheckpointPlace, OpenUrl
from dcp_core.execution.data_files import TensorFiles
from dcp_core.execution.interfaces import (
    CheckpointId,
    MailboxFolder,
    MetadataDraft,
    PlannedRead,
    PlannedWrite,
    ReadContext,
    ReadTarget,
    StorageReader,
    StorageWriter,
    WriteContext,
    WriteResult,
    WriteSource,
)
from dcp_core.execution.object_files import ObjectFiles
from dcp_core.execution.object_mailbox import ObjectMailbox
from dcp_core.execution.present_metadata import (
    metadata_name,
    open_present,
    other_content,
    refuse_unknown,
    replacement_explained,
)
from dcp_core.execution.read_engine import read_tensors
from dcp_core.execution.read_probe import probe_rate
from dcp_core.execution.write_engine import write_files
from dcp_core.file_names import MAILBOX_PREFIX, data_file_name
from dcp_core.formats.metadata_file import assemble, file_names, open_bytes
from dcp_core.metadata import FileColumns, Metadata, MetadataSource, SaveRecord, StoredObject
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.sharing import Sharing
from dcp_core.planning.span_columns import PlannedRegion, columns_of
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.storage.base import Storage, check_name
from dcp_core.storage.commit import Opening, abort, begin, commit, heartbeat
from dcp_core.storage.fsspec_storage import FsspecStorage
from dcp_core.storage.local import LocalStorage

_WORD = (1 << 64) - 1
_BEGIN_TRIES = 8
_LOG = logging.getLogger("dcp.storage")


def file_columns(results: Sequence[WriteResult]) -> FileColumns:
    """The files block of `.metadata`: all ranks' data files, sorted by (rank, kind, part)."""
    records = sorted((f for result in results for f in result.files), key=lambda f: (f.rank, f.kind, f.part))
    return FileColumns(
        rank=np.array([f.rank for f in records], np.int32),
        part=np.array([f.part for f in records], np.int32),
        kind=np.array([f.kind for f in records], np.uint8),
        nbytes=np.array([f.nbytes for f in records], np.int64),
        data_start=np.array([f.data_start for f in records], np.int64),
        field_start=np.array([f.field_start for f in records], np.int64),
        field_nbytes=np.array([f.field_nbytes for f in records], np.int64),
        digest=np.array([(f.digest & _WORD, f.digest >> 64) for f in records], np.uint64).reshape(-1, 2),
    )


def _begun(storage: Storage, save_id: str, rank: int | None) -> Opening:
    """Open a save; once more where another job has removed the directory, empty as it was, since it was made."""
    for tries_left in reversed(range(_BEGIN_TRIES)):
        try:
            return begin(storage, save_id, rank=rank, files_of=file_names)
        except (NotFoundError, StorageError) as error:
            if not tries_left or not (isinstance(error, NotFoundError) or error.errno == errno.ENOENT):
                raise
            _LOG.info("%s was removed while the save began; it is made again", storage.describe())
    raise AssertionError("the last try returns or raises")


class _MailboxDirectory(DirectoryChannel):
    """A mailbox in the checkpoint's directory, which it makes if need be."""

    def __init__(self, storage: LocalStorage, name: str) -> None:
        super().__init__(os.path.join(storage.path, name), make=False)
        self._storage = storage

    def prepare(self) -> None:
        """Make the checkpoint's directory, as a save makes it, and the mailbox in it."""
        self._storage.prepare()
        super().prepare()


class FileSystemWriter(StorageWriter):
    """Writes checkpoints into directories.

    Args:
        path: The checkpoint's directory, or a URL of it; `checkpoint_id` of a save replaces it.
        durable: Whether data reaches the disk before a save is complete.
        storage: A storage to use instead of `path`.
        open_url: Makes storages of URLs that name no file; fsspec makes those of which this knows nothing. `save`
            passes what the installed plugins know, `dcp_core.plugins.open_storage`.
        storage_options: What fsspec gets beside a URL, such as an endpoint. Credentials are better left to the
            environment; none of this is stored or logged.
        follows_link: Whether a link may have the name of the directory, which then is where it leads.
    """

    def __init__(
        self,
        path: CheckpointId | None = None,
        *,
        durable: bool = True,
        storage: Storage | None = None,
        open_url: OpenUrl | None = None,
        storage_options: Mapping[str, Any] | None = None,
        follows_link: bool = True,
    ) -> None:
        self.durable = durable
        self._follows_link = follows_link
        self._directory = CheckpointPlace(path, storage, open_url, storage_options)
        self._context: WriteContext | None = None
        self._opening: Opening | None = None
        self._written: list[str] = []
        self._beating = ExitStack()

    def initialize_writer(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Point the writer at a directory; None keeps the one that it was made with."""
        self._beating.close()
        self._directory.select(checkpoint_id)
        self._context, self._opening, self._written = None, None, []

    def begin_checkpoint(self, save_id: str, rank: int | None) -> str:
        """Create the directory and the save's intent record; gives the suffix of its files' names.

        Raises:
            NewerVersionError: The directory holds a checkpoint of a newer format version. Nothing is written then.
            ArgumentError: It holds a checkpoint of another program, or, for a rank alone, of a whole job.
            StorageError: The storage refuses, or there is a link where none is followed.
        """
        if not self._follows_link:
            self._directory.refuse_link()
        storage = self._directory.storage
        refuse_unknown(storage, metadata_name(rank))
        self._opening = _begun(storage, save_id, rank)
        self._beating.enter_context(heartbeat(storage, self._opening))
        return self._opening.suffix

    def configure_writer(self, context: WriteContext) -> None:
        """Learn which save comes next."""
        self._context = replace(context, durable=context.durable and self.durable)
        self._written = []

    def execute_write(self, plan: PlannedWrite, planner: WriteSource) -> WriteResult:
        """Write this rank's data files; a rank with nothing to write makes none."""
        started = time.perf_counter()
        context, storage = self._configured(), self._directory.storage
        files = write_files(storage, context, plan.spans(), plan.objects(), planner)
        self._written = [data_file_name(file.rank, file.part, file.kind, context.suffix) for file in files]
        if files and context.durable:
            storage.sync()
        data_nbytes = sum(file.nbytes - file.data_start for file in files)
        return WriteResult(context.rank, files, time.perf_counter() - started, data_nbytes)

    def finalize_checkpoint(self, metadata: MetadataDraft, results: Sequence[WriteResult]) -> Metadata:
        """Check that all data files are there, and commit."""
        context = self._configured()
        if self._opening is None:
            raise ArgumentError("finalize_checkpoint without begin_checkpoint: this rank did not open the save")
        files = file_columns(results)
        blob = assemble(metadata.body, files, metadata.save, metadata.writer)
        expected = {
            data_file_name(file.rank, file.part, file.kind, metadata.save.suffix): file.nbytes
            for result in results
            for file in result.files
        }
        name = metadata_name(metadata.save.rank)
        commit(
            self._directory.storage,
            self._opening,
            blob,
            expected,
            name=name,
            durable=context.durable,
            files_of=file_names,
        )
        self._beating.close()
        self._directory.storage.keep_directories()
        self._opening, self._written = None, []
        return Metadata(open_bytes(blob, file_name=name))

    def committed_metadata(self, save_id: str, rank: int | None = None) -> Metadata:
        """Open the `.metadata` that the coordinator has just put there."""
        reader = FileSystemReader(storage=self._directory.storage)
        metadata = reader.load_metadata(rank)
        if metadata.save_id != save_id:
            raise StorageError(
                f"another save, {metadata.save_id}, has replaced save {save_id} in {self._directory.storage.describe()}"
            )
        return metadata

    def open_mailbox(self, save_id: str) -> MailboxFolder | None:
        """The directory `.mailbox-<save_id>` of the checkpoint; None for a storage that is not one of ours."""
        storage, name = self._directory.storage, check_name(f"{MAILBOX_PREFIX}{save_id}")
        if isinstance(storage, FsspecStorage):
            return ObjectMailbox(storage, name)
        return _MailboxDirectory(storage, name) if isinstance(storage, LocalStorage) else None

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        """The path and the options; a subclass that needs no more, or gives its own, overrides this."""
        return self.path_arguments() if type(self) is FileSystemWriter else None

    def path_arguments(self) -> dict[str, Any] | None:
        """The arguments of this class that point another writer at the same directory; None where it has no path."""
        arguments = self._directory.arguments
        if arguments is None:
            return None
        return {**arguments, "durable": self.durable, **({} if self._follows_link else {"follows_link": False})}

    def abort_checkpoint(self) -> None:
        """Remove what this rank wrote, and where it began the save its intent record and directories that it made."""
        self._beating.close()
        opening, names = self._opening, self._written
        self._opening, self._written = None, []
        with suppress(DcpError):
            abort(self._directory.storage, opening, names, files_of=file_names)
            self.remove_new_directories()

    def remove_new_directories(self) -> None:
        """Remove the directories that this made for a save that was taken back, unless something is in them.

        Raises:
            StorageError: The storage refuses.
        """
        if self._opening is None:
            self._directory.storage.remove_new_directories()

    def _configured(self) -> WriteContext:
        if self._context is None:
            raise ArgumentError("configure_writer comes before writing")
        return self._context


class FileSystemReader(StorageReader):
    """Reads checkpoints from directories.

    Args:
        path: The checkpoint's directory, or a URL of it; `checkpoint_id` of a load replaces it.
        storage: A storage to use instead of `path`.
        open_url: Makes storages of URLs that name no file; fsspec makes those of which this knows nothing.
        storage_options: What fsspec gets beside a URL.
    """

    shares_reads = True

    def __init__(
        self,
        path: CheckpointId | None = None,
        *,
        storage: Storage | None = None,
        open_url: OpenUrl | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._directory = CheckpointPlace(path, storage, open_url, storage_options)
        self._metadata: Metadata | None = None
        self._context = ReadContext(0, 1)
        self._objects: ObjectFiles | None = None

    @property
    def storage(self) -> Storage:
        """Where it reads.

        Raises:
            ArgumentError: Nobody has said.
        """
        return self._directory.storage

    def initialize_reader(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Point the reader at a directory; None keeps the one that it was made with."""
        self._directory.select(checkpoint_id)
        self._metadata = None
        self._objects = None

    def load_metadata(self, rank: int | None = None, header_digest: bytes | None = None) -> Metadata:
        """Open `.metadata`, or `{rank}.metadata`; it stays open as long as the result is in use."""
        storage = self._directory.storage
        name = metadata_name(rank)
        if storage.size(name) is None:
            raise NotFoundError(
                f"there is no {name} in {storage.describe()}: no checkpoint has been completed there; "
                f"{other_content(storage)}"
            )
        return Metadata(open_present(storage, name, header_digest))

    def configure_reader(self, metadata: Metadata, context: ReadContext) -> None:
        """Learn which load comes next."""
        self._metadata = metadata
        self._context = context
        self._objects = None

    def check_files(self, plan: PlannedRead) -> None:
        """See that the files of a plan are there and have their sizes."""
        rows = np.unique(columns_of(plan.spans()).file).tolist()
        with self._reading() as source, self._tensor_files(source, verify=False) as files:
            files.check_sizes(rows)

    def probe_rate(self, plan: PlannedRead, fraction: float) -> float:
        """Read 2 MiB, and say how fast that was."""
        with self._reading() as source, self._tensor_files(source, verify=False) as files:
            return probe_rate(files, columns_of(plan.spans()), fraction)

    def read_object(self, stored: StoredObject) -> bytes:
        """Read one object's bytes; always checked."""
        with self._reading() as source:
            return self._object_files(source).read(stored)

    def object_nbytes(self, stored: StoredObject) -> int:
        """Length of one object's encoding; reads only the index of its file.

        Raises:
            IncompleteError: The file is missing or short.
            CorruptError: Its index contradicts its digest.
        """
        with self._reading() as source:
            return self._object_files(source).nbytes(stored)

    def _object_files(self, source: MetadataSource) -> ObjectFiles:
        if self._objects is None:
            self._objects = ObjectFiles(self._directory.storage, source.files, source.save)
        return self._objects

    def execute_read(
        self,
        plan: PlannedRead,
        planner: ReadTarget,
        broadcast_groups: Mapping[Any, Any] | None = None,
        broadcast_batch_bytes: int = 0,
    ) -> None:
        """Read what the plan says to where the planner says, and exchange what is shared with other ranks."""
        sharing: Sharing | None = getattr(plan, "sharing", None)
        if sharing is None:
            self._read(plan.spans(), planner)
            return
        assert isinstance(planner, StandardLoadPlanner), "reads are shared for the standard planner only"
        assert isinstance(plan, LoadPlan), "as sharing is"
        walker = BroadcastWalker(sharing, plan.wanted, broadcast_groups or {}, planner.target_of)
        try:
            walker.advance(0)
            self._read(sharing.own.spans, planner, walker.advance)
        except BaseException:
            sharing.is_spoiled = True
            with suppress(Exception):  # what stopped the reading comes first
                walker.finish()
            raise
        walker.finish()

    def _read(
        self, spans: Sequence[PlannedRegion], planner: ReadTarget, progress: Callable[[int], None] | None = None
    ) -> None:
        verify = self._context.verify is not False
        with self._reading() as source, self._tensor_files(source, verify=verify) as files:
            read_tensors(files, self._context, spans, planner, progress)

    @contextmanager
    def _reading(self) -> Iterator[MetadataSource]:
        """Give the description in use; a failure that comes from a save over it says so."""
        if self._metadata is None:
            raise ArgumentError("configure_reader comes before reading")
        source = self._metadata.source
        with self._explained(source.save):
            yield source

    def _explained(self, save: SaveRecord) -> AbstractContextManager[None]:
        """Add to what goes wrong while the files of a save are read what is known about it."""
        return replacement_explained(self._directory.storage, save)

    def _tensor_files(self, source: MetadataSource, *, verify: bool) -> TensorFiles:
        return TensorFiles(self._directory.storage, source.files, source.save, verify=verify)
