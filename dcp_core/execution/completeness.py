"""Whether a checkpoint is all there: its description, its files and their sizes, and on request every byte.

Goes in: a directory. Comes out: the description, or an error that says what is missing or damaged.
"""

from __future__ import annotations

from dcp_core.errors import CorruptError
from dcp_core.execution.data_files import OpenFile, check_size, file_facts
from dcp_core.execution.object_files import ObjectFiles
from dcp_core.execution.present_metadata import open_present
from dcp_core.file_names import TENSOR_FILE
from dcp_core.formats.checksums import BLOCK_BYTES, block_checksum
from dcp_core.formats.safetensors_file import FileFacts, check_facts
from dcp_core.metadata import MetadataSource
from dcp_core.storage.base import Storage


def check_complete(storage: Storage, name: str, *, verify: bool = False) -> MetadataSource:
    """Check the checkpoint that a description describes.

    Args:
        storage: The directory.
        name: The description: `.metadata`, or that of a rank that saved alone.
        verify: Whether to read all files and compare them with their checksums, too.

    Returns:
        The description.

    Raises:
        NotFoundError: There is no such description.
        IncompleteError: A file is missing or of another size.
        CorruptError: The description or, with `verify`, a file contradicts its checksums.
        NewerVersionError: A newer version of this library wrote it.
    """
    source = open_present(storage, name)
    rows = range(len(source.files.rank))
    for row in rows:
        check_size(storage, file_facts(source.files, source.save, row))
    for row in rows if verify else ():
        if int(source.files.kind[row]) == TENSOR_FILE:
            facts = file_facts(source.files, source.save, row)
            check_facts(facts)
            _check_tensor_file(storage, facts)
        else:
            ObjectFiles(storage, source.files, source.save).check(row)
    return source


def _check_tensor_file(storage: Storage, facts: FileFacts) -> None:
    """Read a file's data block by block and compare checksums; its header is checked when it is opened."""
    file = OpenFile(storage, facts, verify=True)
    try:
        table = file.checksums
        if table is None:
            return  # another program's
        memory = memoryview(bytearray(BLOCK_BYTES))
        ends = table.byte_offset[1:].tolist()
        for start, end, block in zip(table.byte_offset.tolist(), ends, table.first_block.tolist(), strict=False):
            for number, at in enumerate(range(start, end, BLOCK_BYTES), start=block):
                part = memory[: min(BLOCK_BYTES, end - at)]
                file.read(facts.data_start + at, [part])
                if block_checksum(part) != int(table.block[number]):
                    raise CorruptError(
                        f"{facts.name} in {storage.describe()}: bytes {facts.data_start + at} to "
                        f"{facts.data_start + at + len(part)} do not match their checksum; the file is damaged"
                    )
    finally:
        file.close()
