"""What is checked of reads: the plan and the files before the first byte, checksums after each.

Goes in: columns of regions, or bytes that were read. Comes out: nothing, or an error that names file, key and rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dcp_core.errors import CorruptError, DcpError, IncompleteError, PlanningError, StorageError
from dcp_core.execution.data_files import OpenFile, TensorFiles
from dcp_core.metadata import Int64
from dcp_core.planning.span_columns import PlannedRegion, SpanColumns

_LARGEST = float(1 << 62)


def check_before_reading(files: TensorFiles, spans: Sequence[PlannedRegion], columns: SpanColumns) -> None:
    """See that files have their sizes, regions lie in their chunks, and chunks in their files.

    Raises:
        IncompleteError: A file is missing or of another size, or too short for a chunk.
        PlanningError: A region that its chunk cannot hold.
    """
    rows, which = np.unique(columns.file, return_inverse=True)
    files.check_sizes(rows.tolist())
    sizes, offsets, chunk = columns.sizes, columns.offsets, columns.chunk_sizes
    is_outside = ((offsets < 0) | (sizes < 0) | (chunk < 0) | (sizes > chunk) | (offsets > chunk - sizes)).any(axis=1)
    if is_outside.any():
        span = spans[int(np.argmax(is_outside))]
        raise PlanningError(
            f"{span.item.storage_index.fqn}: the region of {span.item.lengths} from {span.item.storage_offsets} on "
            f"lies outside of its chunk of {span.chunk_sizes}"
        )
    room = np.array([files.facts(row).data_nbytes for row in rows.tolist()], np.int64)[which]
    about = np.prod(chunk, axis=1, dtype=np.float64) * columns.itemsize
    nbytes = np.prod(chunk, axis=1, dtype=np.int64) * columns.itemsize
    is_beyond = (columns.byte_offset < 0) | (about > _LARGEST) | (columns.byte_offset > room - nbytes)
    if is_beyond.any():
        row = int(np.argmax(is_beyond))
        facts = files.facts(int(columns.file[row]))
        raise IncompleteError(
            f"{spans[row].item.storage_index.fqn}: its chunk lies outside of {facts.name}, whose data has "
            f"{facts.data_nbytes} bytes"
        )


def first_blocks(file: OpenFile, columns: SpanColumns, nbytes: Int64, key_of: Callable[[int], str]) -> Int64:
    """Find the checksums of chunks in their file.

    Args:
        file: Where all of them lie.
        columns: Regions of them.
        nbytes: Bytes of each chunk. Shape (N,).
        key_of: Name of a region's chunk, for the error.

    Returns:
        For each region the position of its chunk's first block in the file's checksum table; -1 for an empty chunk,
        and where nothing is to be checked.

    Raises:
        CorruptError: The file has no such chunk.
    """
    if file.checksums is None:
        return np.full(len(columns), -1, np.int64)
    found = file.checksums.first_blocks_of(columns.byte_offset, nbytes)
    is_missing = (found < 0) & (columns.sizes > 0).all(axis=1)
    if is_missing.any():
        row = int(np.argmax(is_missing))
        raise CorruptError(
            f"{key_of(row)}: {file.facts.name} has no chunk of {int(nbytes[row])} bytes at byte "
            f"{int(columns.byte_offset[row])}; the metadata contradicts the file"
        )
    return found


def contradiction(key: str, file: OpenFile, start: int, nbytes: int, rank: int) -> CorruptError:
    """Say that a block is not what was written.

    Args:
        key: Name of the stored tensor.
        file: Where it was read.
        start: First byte of the block in the file.
        nbytes: Its length.
        rank: Who read it.
    """
    return CorruptError(
        f"{key}: bytes {start} to {start + nbytes} of {file.facts.name}, read on rank {rank}, contradict their "
        "checksum. Targets are undefined now: restore the file, or load another checkpoint"
    )


def refusal(error: DcpError, keys: Sequence[str], rank: int) -> DcpError:
    """Add to what a storage said what it was read for.

    Args:
        error: From the storage.
        keys: Names of the tensors that one call reads.
        rank: Who reads.
    """
    more = f" and {len(set(keys)) - 1} more" if len(set(keys)) > 1 else ""
    made = type(error)(f"{keys[0]}{more}: {error.message} (read on rank {rank})", error.causes)
    if isinstance(error, StorageError) and isinstance(made, StorageError):
        made.errno = error.errno
    return made
