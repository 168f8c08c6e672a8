"""Verifies safetensors as Hugging Face lays them out: index, headers, sizes, coverage. They have no checksums.

In: a path. Out: a report that lists every file that is not sound, not just the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_core.errors import DcpError, IncompleteError, NotFoundError
from dcp_core.execution.huggingface import read_header, read_index, split_path
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.file_names import METADATA_NAME, parse_data_file_name
from dcp_core.formats.huggingface_directory import INDEX_SUFFIX, SUFFIX, check_choice, choose_files, parse_index
from dcp_core.formats.huggingface_source import HuggingFaceSource
from dcp_core.inspection.links import outside_links
from dcp_core.inspection.report import Problem, ProblemKind, Stray, VerifyReport
from dcp_core.inspection.strays import size_of
from dcp_core.recipes.places import huggingface_reader
from dcp_core.storage.base import Storage, check_name


def verify_huggingface(checkpoint_id: CheckpointId, options: Mapping[str, Any] | None = None) -> VerifyReport:
    """Check a directory of safetensors, one safetensors file, or what an index names.

    Raises:
        NotFoundError: There are none.
        ArgumentError: It cannot be told which of several models is meant.
        StorageError: The directory cannot be read.
    """
    reader = huggingface_reader(checkpoint_id, options)
    reader.initialize_reader()
    storage = reader.storage
    names = storage.list()
    chosen = split_path(checkpoint_id)[1]
    problems, wanted, index = _wanted(storage, chosen, names)
    nbytes = 0
    for name, keys in wanted.items():
        try:
            nbytes += read_header(storage, name, keys).nbytes
        except DcpError as error:
            kind: ProblemKind = "missing file" if _is_missing(storage, name) else "damaged header"
            if kind != "missing file" and isinstance(error, IncompleteError):
                kind = "wrong size"
            named = tuple(sorted(keys or ()))
            problems.append(Problem(kind, str(error), name, named[:8], max(len(named) - 8, 0)))
    tensors = chunks = 0
    if not problems:
        try:
            source = reader.load_metadata().source
            assert isinstance(source, HuggingFaceSource), "that reader makes no other"
            tensors, chunks = len(source.columns.tensors.names), len(source.columns.chunks)
        except DcpError as error:
            kind = "hole" if isinstance(error, IncompleteError) else "contradiction"
            problems.append(Problem(kind, str(error)))
    own = {*wanted, *index}
    notes: tuple[str, ...] = ("these files have no checksums: whether their data is what was written cannot be told",)
    if chosen is not None and parse_data_file_name(chosen) is not None and METADATA_NAME in names:
        notes += ("this is a file of a checkpoint, which has checksums: verify the directory that it lies in",)
    return VerifyReport(
        storage.describe(), "huggingface", (), tensors, chunks, 0, len(wanted), nbytes, 0, False, tuple(problems), 0,
        () if chosen is not None else _strays(storage, names, own), (*notes, *outside_links(storage, sorted(own))),
    )  # fmt: skip


def _is_missing(storage: Storage, name: str) -> bool:
    try:
        return storage.size(name) is None
    except DcpError:
        return False


def _wanted(
    storage: Storage, chosen: str | None, names: list[str]
) -> tuple[list[Problem], dict[str, set[str] | None], list[str]]:  # fmt: skip
    """What is wrong with the index, the files that are meant, each with the tensors in it, and the index."""
    choice = chosen if chosen is not None else choose_files(names, storage.describe())
    if isinstance(choice, str) and not choice.endswith(INDEX_SUFFIX):
        choice = (choice,)
    if not isinstance(choice, str):
        return [], dict.fromkeys(choice), []
    try:
        weight_map = parse_index(read_index(storage, choice), f"{choice} in {storage.describe()}")
        wanted: dict[str, set[str]] = {}
        for key, name in weight_map.items():
            wanted.setdefault(check_name(name), set()).add(key)
    except NotFoundError:
        raise
    except DcpError as error:
        return [Problem("damaged description", str(error), choice)], {}, [choice]
    check_choice(weight_map, choice, names, storage.describe())
    return [], dict(sorted(wanted.items())), [choice]


def _strays(storage: Storage, names: list[str], own: set[str]) -> tuple[Stray, ...]:
    """Safetensors that are no part of the model; tokenizers and the like belong there."""
    left = [name for name in names if name.endswith(SUFFIX) and name not in own]
    return tuple(
        Stray(name, "other", "safetensors that the index does not name", size_of(storage, name)) for name in left
    )
