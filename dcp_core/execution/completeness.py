"""Whether a checkpoint is all there: its description, its files and their sizes.

Goes in: a directory. Comes out: the description, or an error that says what is missing or damaged.
"""

from __future__ import annotations

from dcp_core.execution.data_files import check_size, file_facts
from dcp_core.execution.present_metadata import open_present
from dcp_core.metadata import MetadataSource
from dcp_core.storage.base import Storage


def check_complete(storage: Storage, name: str) -> MetadataSource:
    """Check the checkpoint that a description describes.

    Args:
        storage: The directory.
        name: The description: `.metadata`, or that of a rank that saved alone.

    Returns:
        The description.

    Raises:
        NotFoundError: There is no such description.
        IncompleteError: A file is missing or of another size.
        CorruptError: The description contradicts its checksums.
        NewerVersionError: A newer version of this library wrote it.
    """
    source = open_present(storage, name)
    for row in range(len(source.files.rank)):
        check_size(storage, file_facts(source.files, source.save, row))
    return source
