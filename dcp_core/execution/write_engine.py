"""Writes one rank's data files.

Goes in: chunks with their byte spans, and whoever gives their bytes. Comes out: files, and their records. The layout is
known before the first byte: the files are created with their full sizes, blocks are hashed right before they are
written, and each header, with the checksums and the save's id in it, comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from dcp_core.errors import DcpError, PlanningError
from dcp_core.execution.interfaces import FileRecord, WriteContext, WriteSource
from dcp_core.execution.planner_answers import object_bytes
from dcp_core.execution.write_runs import Run, RunSource
from dcp_core.execution.write_stream import FileStream
from dcp_core.execution.write_threads import FirstFailure, write_all
from dcp_core.file_names import OBJECT_FILE, TENSOR_FILE, data_file_name
from dcp_core.formats.bytes_file import BytesFile, build_bytes_file
from dcp_core.formats.safetensors_file import HeaderColumns, HeaderLayout, build_header, fill_header
from dcp_core.planning.items import WriteItem
from dcp_core.planning.write_columns import PlannedChunk, WriteColumns, columns_of
from dcp_core.storage.base import Storage, WriteHandle


def write_files(
    storage: Storage,
    context: WriteContext,
    spans: Sequence[PlannedChunk],
    objects: Sequence[WriteItem],
    source: WriteSource,
) -> tuple[FileRecord, ...]:
    """Write the files of one rank: none, some, or if anything fails none again.

    Contiguous host arrays are written from their own memory; others and what lies on a device pass through a few
    buffers. Several parts are written side by side.

    Args:
        storage: Where.
        context: Which save.
        spans: Chunks, part after part, each in file order and back to back.
        objects: Values of the `.bytes` file, in the order of its index.
        source: Gives each item's bytes. Called on this thread only, in the order of each file; calls for several files
            alternate. An array must stay as it is until this function returns.

    Returns:
        Records of the tensor files by part, then that of the `.bytes` file.

    Raises:
        PlanningError: The chunks cannot be files, or the source gives something else than was planned.
        StorageError: The storage refused.
    """
    columns: WriteColumns = getattr(spans, "columns", None) or columns_of(spans)
    plans = [
        _lay_out(context, number, spans[start:stop], columns.some(start, stop))
        for number, start, stop in columns.part_bounds()
    ]
    values = [object_bytes(source, item, context.rank) for item in objects]
    bytes_file = build_bytes_file(values)
    sizes = {plan.name: plan.layout.nbytes for plan in plans}
    if len(sizes) < len(plans):
        raise PlanningError(f"the chunks of rank {context.rank} do not lie part after part; keep the order of the plan")
    if objects:
        sizes[data_file_name(context.rank, 0, OBJECT_FILE, context.suffix)] = bytes_file.nbytes
    storage.check_space(sum(sizes.values()))
    with _new_files(storage, sizes) as handles, ExitStack() as stack:
        failure = FirstFailure()
        files = [
            stack.enter_context(_PartFile(context, plan, handle, source, failure))
            for plan, handle in zip(plans, handles, strict=False)
        ]
        if objects:
            _write_objects(handles[-1], bytes_file, values, durable=context.durable)
            values.clear()
        write_all(files, failure)
    records = [file.record for file in files]
    return (*records, _object_record(context.rank, bytes_file)) if objects else tuple(records)


@dataclass(frozen=True, slots=True, eq=False)
class _PartPlan:
    """What will be in one tensor file."""

    number: int
    name: str
    spans: Sequence[PlannedChunk]
    columns: WriteColumns
    layout: HeaderLayout


def _lay_out(context: WriteContext, number: int, spans: Sequence[PlannedChunk], columns: WriteColumns) -> _PartPlan:
    header = HeaderColumns(
        columns.keys, columns.dtype, columns.ndim, columns.sizes, columns.byte_offset, columns.nbytes
    )
    name = data_file_name(context.rank, number, TENSOR_FILE, context.suffix)
    return _PartPlan(number, name, spans, columns, build_header(header))


@contextmanager
def _new_files(storage: Storage, sizes: Mapping[str, int]) -> Iterator[list[WriteHandle]]:
    """Create files, and remove them all again when filling one fails."""
    handles: list[WriteHandle] = []
    try:
        for name, nbytes in sizes.items():
            handles.append(storage.create(name, nbytes))
        yield handles
    except BaseException:
        for handle in handles:
            with suppress(DcpError):  # the first error says more than a late one
                handle.close()
        for handle in handles:
            with suppress(DcpError):
                storage.remove(handle.name)
        raise


def _proceeding(context: WriteContext, failure: FirstFailure) -> Callable[[], None]:
    """What a file's stream calls as it goes on; it holds no file, which would hold its stream and itself."""

    def proceed() -> None:
        failure.check()
        context.step()

    return proceed


class _PartFile:
    """The work of writing one tensor file."""

    def __init__(
        self, context: WriteContext, plan: _PartPlan, handle: WriteHandle, source: WriteSource, failure: FirstFailure
    ) -> None:
        self.record = FileRecord(context.rank, plan.number, TENSOR_FILE, 0, 0, 0, 0, 0)
        self._context = context
        self._plan = plan
        self._handle = handle
        self._runs = RunSource(plan.spans, plan.columns, source, context.rank)
        self._stream = FileStream(
            handle, plan.layout.data_start, _proceeding(context, failure), durable=context.durable
        )

    @property
    def next_nbytes(self) -> int:
        """What the next run has at most, in bytes."""
        return self._runs.next_nbytes

    def prepare(self) -> Run | None:
        """Ask the planner for the next run."""
        return self._runs.take()

    def write(self, run: Run) -> None:
        """Hash and write a run."""
        self._stream.send(run)

    def finish(self) -> None:
        """Write what is left, and the header."""
        self._stream.finish()
        layout = self._plan.layout
        header, digest = fill_header(layout, self._context.save_id, self._stream.checksums)
        self._handle.write(0, [header])
        if self._context.durable:
            self._handle.sync()
        self._handle.close()
        self.record = replace(
            self.record, nbytes=layout.nbytes, data_start=layout.data_start, field_start=layout.field_start,
            field_nbytes=layout.field_nbytes, digest=digest,
        )  # fmt: skip

    def __enter__(self) -> _PartFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()


def _write_objects(handle: WriteHandle, layout: BytesFile, values: Sequence[bytes], *, durable: bool) -> None:
    handle.write(0, [layout.header, *values])
    if durable:
        handle.sync()
    handle.close()


def _object_record(rank: int, layout: BytesFile) -> FileRecord:
    fields = (layout.nbytes, layout.data_start, layout.field_start, layout.field_nbytes, layout.digest)
    return FileRecord(rank, 0, OBJECT_FILE, *fields)
