"""Verifies a checkpoint of torch DCP as far as that goes: its data has no checksums that span it.

Checked are the description, whether the files that it names are there and long enough, and coverage. It takes torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_core.errors import DcpError, IncompleteError, NotFoundError, StorageError
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.file_names import METADATA_NAME
from dcp_core.inspection.census import names_of_files
from dcp_core.inspection.description import columns_of, coverage_problems
from dcp_core.inspection.report import RETRY, Problem, VerifyReport
from dcp_core.inspection.strays import find_strays
from dcp_core.recipes.torch_package import torch_dcp_reader

_NOTE = (
    "torch DCP: description, lengths of files and coverage were checked; its data has nothing to compare with. "
    "`dcp convert --to dcp` makes a checkpoint with checksums of it"
)


def verify_torch_dcp(checkpoint_id: CheckpointId, options: Mapping[str, Any] | None = None) -> VerifyReport:
    """Check a checkpoint of torch DCP. Where its description or a file is wrong, that is the only problem told.

    Raises:
        ArgumentError: torch is not installed.
        StorageError: The directory cannot be read.
    """
    reader = torch_dcp_reader(checkpoint_id, options)
    reader.initialize_reader()
    storage = reader.storage
    names = storage.list()
    try:
        source = reader.load_metadata().source
    except DcpError as error:
        return VerifyReport(storage.describe(), "torch-dcp", problems=(_refused(error),), notes=(_NOTE,), strays=None)
    columns, files = columns_of(source), names_of_files(source)
    problems, _ = coverage_problems(columns, files)
    return VerifyReport(
        storage.describe(),
        "torch-dcp",
        tensors=len(columns.tensors.names),
        chunks=len(columns.chunks),
        objects=len(columns.objects.names),
        files=len(files),
        nbytes=int(source.files.nbytes.sum()),
        problems=tuple(problems),
        strays=find_strays(storage, names, {METADATA_NAME, *files}),
        notes=(_NOTE,),
    )


def _refused(error: DcpError) -> Problem:
    if isinstance(error, (IncompleteError, NotFoundError)):
        return Problem("missing file" if "missing" in str(error) else "wrong size", str(error))
    if isinstance(error, StorageError):
        return Problem("unreadable", str(error), remedy=RETRY)
    return Problem("damaged description", str(error), METADATA_NAME)
