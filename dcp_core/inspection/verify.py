"""Verifies a checkpoint: marker, description, files, checksums, coverage, and what else lies there. Only reads.

The stages, in order: find the description; read all of it; check that boxes cover their tensors; check every file,
several at a time; say what the other names in the directory are. What is wrong is collected, not raised.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dcp_core.arguments import check_callable, check_flags
from dcp_core.errors import ArgumentError, DcpError, NotFoundError, StorageError
from dcp_core.execution.checkpoint_place import is_other_url
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.execution.present_metadata import open_present
from dcp_core.execution.read_threads import usable_threads
from dcp_core.file_names import METADATA_NAME, parse_rank_metadata_name
from dcp_core.formats.chunk_checks import chunk_nbytes
from dcp_core.inspection.data_checks import DataChecker, DataRange, FileFinding
from dcp_core.inspection.description import ChunkNames, Description, coverage_problems, read_description
from dcp_core.inspection.detection import checkpoint_format, has_traces
from dcp_core.inspection.huggingface import verify_huggingface
from dcp_core.inspection.links import outside_links
from dcp_core.inspection.report import Problem, Stray, VerifyReport, keys_text, merged
from dcp_core.inspection.strays import find_strays
from dcp_core.inspection.torch_dcp import verify_torch_dcp
from dcp_core.plugins import open_storage
from dcp_core.recipes.places import storage_at
from dcp_core.state_path import decode_path
from dcp_core.storage.base import Storage
from dcp_core.storage.urls import redacted

MAX_PROBLEMS = 10_000
"""Problems that are kept at most; the rest is counted."""

_ATTEMPTS = 3
_CLASSES_NAMED = 8

Progress = Callable[[int, int], None]
"""Told how many bytes have been checked, and how many there are."""


def verify(
    checkpoint_id: CheckpointId,
    *,
    quick: bool = False,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Tell whether a checkpoint is whole, and everything that is wrong with it.

    Reads all of it, in bounded memory and with a thread for every core, and compares each block with its checksum.
    Changes nothing, and runs no code that lies in the checkpoint. Safetensors as Hugging Face lays them out, and what
    torch DCP writes, have no checksums: there, headers, sizes, the index or description, and coverage are checked.

    Args:
        checkpoint_id: The checkpoint's directory, as a path or URL; or a safetensors file, or an index of such.
        quick: Leave the checksums of data out: description, coverage, sizes, and whose files these are.
        progress: Told now and then, on the calling thread, how far this is.
        storage_options: What fsspec gets beside a URL.

    Returns:
        What was found; `is_whole` sums it up, and `raise_problems` makes an error of it.

    Raises:
        ArgumentError: Arguments that make no sense, or what this cannot verify: a file of `torch.save`; torch DCP's,
            and torch is not installed.
        NotFoundError: There is nothing that a save has left.
        StorageError: The directory cannot be read.
    """
    check_flags(quick=quick)
    check_callable(progress, "progress", "how many bytes have been checked and how many there are")
    began = time.perf_counter()
    place = redacted(str(checkpoint_id))
    other = _OTHER_FORMATS.get(_kind_of(checkpoint_id, storage_options))
    if other is not None:
        report = other(checkpoint_id, storage_options)
        return replace(report, place=place, is_quick=quick, seconds=time.perf_counter() - began)
    reader = FileSystemReader(open_url=open_storage, storage_options=storage_options)
    for _ in range(_ATTEMPTS):
        reader.initialize_reader(checkpoint_id)
        verification = _Verification(reader.storage, quick, progress)
        report = verification.run()
        if not (report.problems and verification.is_replaced()):
            break
    else:
        report = replace(report, notes=(*report.notes, "saves replaced the checkpoint meanwhile: verify again"))
    return replace(report, place=place, seconds=time.perf_counter() - began)


def verify_storage(storage: Storage, *, quick: bool = False) -> VerifyReport:
    """Tell whether a checkpoint of this library is whole, as `verify` does, in a storage that is open."""
    return replace(_Verification(storage, quick, None).run(), place=storage.describe())


def _kind_of(path: CheckpointId, options: Mapping[str, Any] | None) -> str:
    storage_at(path, options)  # says so where this is no path, nor a URL that anybody knows
    try:
        kind = checkpoint_format(path, options)
    except ArgumentError as error:
        raise NotFoundError(str(error)) from error
    except StorageError:
        if not is_other_url(path):
            raise
        return "dcp"  # a store that cannot list: whether it has a description is found out by its name
    if kind == "torch":
        raise ArgumentError(
            f"what lies at {redacted(str(path))!r} was written by torch.save, with nothing that could be verified; "
            "`dcp convert --to dcp` makes a checkpoint with checksums of it"
        )
    return kind


_OTHER_FORMATS: dict[str, Callable[[CheckpointId, Mapping[str, Any] | None], VerifyReport]] = {
    "huggingface": verify_huggingface,
    "torch-dcp": verify_torch_dcp,
}


@dataclass(slots=True, eq=False)
class _Totals:
    """What is counted on the way."""

    problems: list[Problem] = field(default_factory=list)
    more_problems: int = 0
    checked_nbytes: int = 0
    classes: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, problems: Sequence[Problem]) -> None:
        room = max(MAX_PROBLEMS - len(self.problems), 0)
        self.problems += problems[:room]
        self.more_problems += len(problems[room:])


class _Verification:
    """One look at one directory."""

    def __init__(self, storage: Storage, is_quick: bool, progress: Progress | None) -> None:
        self._storage = storage
        self._is_quick = is_quick
        self._progress = progress
        self._totals = _Totals()
        self._descriptions: list[Description] = []

    def run(self) -> VerifyReport:
        names = self._listed()
        chosen = self._chosen(names)
        if not chosen:
            return self._nothing_complete(names or [])
        self._descriptions = [read_description(self._storage, name) for name in chosen]
        all_nbytes = sum(int(found.files.nbytes.sum()) for found in self._descriptions if found.files is not None)
        for found in self._descriptions:
            self._check(found, all_nbytes)
        own = {*chosen, *(name for found in self._descriptions for name in found.file_names)}
        is_known = all(found.files is not None for found in self._descriptions)
        strays = None if names is None else find_strays(self._storage, names, own, is_known=is_known)
        self._note(names, own)
        return self._report(strays, all_nbytes)

    def is_replaced(self) -> bool:
        """Whether a save has put another description in the place of one that was read."""
        for found in self._descriptions:
            try:
                present = open_present(self._storage, found.name).save.save_id
            except DcpError:
                continue
            if found.source is not None and found.source.save.save_id != present:
                return True
        return False

    def _listed(self) -> list[str] | None:
        """All names; None where the storage cannot list."""
        try:
            return self._storage.list()
        except NotFoundError:
            raise
        except DcpError as error:
            if not self._storage.exists(METADATA_NAME):
                raise
            self._totals.notes.append(f"what else lies there cannot be told: {error}")
            return None

    def _chosen(self, names: list[str] | None) -> list[str]:
        """The descriptions: `.metadata`, else those of ranks that saved alone."""
        if names is None or METADATA_NAME in names:
            return [METADATA_NAME]
        ranks = [(parse_rank_metadata_name(name), name) for name in names]
        return [name for _, name in sorted((rank, name) for rank, name in ranks if rank is not None)]

    def _nothing_complete(self, names: list[str]) -> VerifyReport:
        where = self._storage.describe()
        if not has_traces(names):
            raise NotFoundError(f"there is no checkpoint in {where}: expected {METADATA_NAME}, or *.safetensors")
        problem = Problem(
            "no checkpoint", f"no save has been completed in {where}", expected=METADATA_NAME,
            found="what a save left that died, or is still running",
            remedy="load another checkpoint; the next save here removes what a dead one left",
        )  # fmt: skip
        strays = find_strays(self._storage, names, ())
        return VerifyReport(where, "none", problems=(problem,), strays=strays, is_quick=self._is_quick)

    def _check(self, found: Description, all_nbytes: int) -> None:
        totals = self._totals
        totals.add(found.problems)
        names = None
        if found.columns is not None:
            tensors, chunks = found.columns.tensors, found.columns.chunks
            names = ChunkNames(found.columns, chunk_nbytes(chunks.sizes, tensors.dtype, np.diff(tensors.row)))
            totals.add(self._description_problems(found))
        if found.source is None or found.files is None:
            return
        checker = DataChecker(self._storage, found.files, found.source.save, names, is_quick=self._is_quick)
        by_file: dict[str, list[Problem]] = {}
        for problem in _check_files(checker, len(found.files), totals, self._told(all_nbytes)):
            by_file.setdefault(problem.file, []).append(problem)
        for name in found.file_names:
            problems = sorted(by_file.get(name, ()), key=lambda problem: problem.byte_offset or 0)
            totals.add(list(merged(problems)))

    def _description_problems(self, found: Description) -> list[Problem]:
        """What only a look at the whole description shows."""
        assert found.source is not None and found.columns is not None
        problems: list[Problem] = []
        if found.source.save.rank is None:
            problems, is_cut = coverage_problems(found.columns, found.file_names)
            if is_cut:
                self._totals.notes.append(f"after {len(problems)} holes and overlaps no more were looked for")
        if not self._is_quick:
            problems += _path_problems(found)
        return problems

    def _told(self, all_nbytes: int) -> Callable[[], None]:
        progress = self._progress
        if progress is None:
            return lambda: None
        return lambda: progress(self._totals.checked_nbytes, all_nbytes)

    def _note(self, names: list[str] | None, own: set[str]) -> None:
        notes = self._totals.notes
        if self._totals.classes:
            classes = list(self._totals.classes)
            shown = keys_text(classes[:_CLASSES_NAMED], max(len(classes) - _CLASSES_NAMED, 0))
            notes.append(f"pickled objects, which a load makes only if their classes are allowed: {shown}")
        notes += outside_links(self._storage, sorted(own))
        alone = [found.source for found in self._descriptions if found.source and found.source.save.rank is not None]
        if alone:
            world = max(source.writer.world_size for source in alone)
            notes.append(
                f"{len(alone)} of {world} ranks saved alone; whether these saves belong together, and cover all of "
                "every tensor, cannot be told"
            )

    def _report(self, strays: tuple[Stray, ...] | None, all_nbytes: int) -> VerifyReport:
        known = [found for found in self._descriptions if found.columns is not None]
        sources = [found.source for found in self._descriptions if found.source is not None]
        totals = self._totals
        return VerifyReport(
            self._storage.describe(),
            "dcp",
            tuple(source.save.save_id for source in sources),
            sum(len(found.columns.tensors.names) for found in known if found.columns),
            sum(len(found.columns.chunks) for found in known if found.columns),
            sum(len(found.columns.objects.names) for found in known if found.columns),
            sum(len(found.files) for found in self._descriptions if found.files is not None),
            all_nbytes,
            totals.checked_nbytes,
            self._is_quick,
            tuple(totals.problems),
            totals.more_problems,
            strays,
            tuple(totals.notes),
        )


def _path_problems(found: Description) -> list[Problem]:
    """Typed paths that cannot be read."""
    assert found.columns is not None
    problems = []
    for names, paths in (
        (found.columns.tensors.names, found.columns.tensors.paths),
        (found.columns.objects.names, found.columns.objects.paths),
    ):
        for name, path in zip(names, paths, strict=True):
            try:
                decode_path(path)
            except DcpError as error:
                problems.append(Problem("damaged description", f"the path of {name!r}: {error}", found.name, (name,)))
    return problems


def _check_files(checker: DataChecker, count: int, totals: _Totals, told: Callable[[], None]) -> Iterator[Problem]:
    """Check files and their data on a few threads, a little ahead of what is taken; in no order within a file."""
    threads = usable_threads()
    ahead = 2 * threads
    with ThreadPoolExecutor(threads, "dcp-verify") as pool:
        opening: deque[Future[FileFinding]] = deque()
        reading: deque[tuple[DataRange, Future[list[Problem]]]] = deque()
        try:
            for row in range(count + ahead):
                if row < count:
                    opening.append(pool.submit(checker.open, row))
                if row < ahead or not opening:
                    continue
                finding = opening.popleft().result()
                totals.checked_nbytes += finding.checked_nbytes
                totals.classes.update(finding.classes)
                yield from finding.problems
                if finding.opened is not None:
                    for part in checker.ranges(finding.opened):
                        finding.opened.hold()
                        reading.append((part, pool.submit(_checked, checker, part)))
                        if len(reading) > ahead:
                            yield from _taken(reading, totals)
                            told()
                    finding.opened.release()
                told()
            while reading:
                yield from _taken(reading, totals)
                told()
        finally:
            for left in opening:
                left.cancel()
            for _, future in reading:
                future.cancel()


def _checked(checker: DataChecker, part: DataRange) -> list[Problem]:
    try:
        return checker.check_range(part)
    finally:
        part.file.release()


def _taken(reading: deque[tuple[DataRange, Future[list[Problem]]]], totals: _Totals) -> list[Problem]:
    part, future = reading.popleft()
    problems = future.result()
    totals.checked_nbytes += part.edges[-1] - part.edges[0]
    return problems
