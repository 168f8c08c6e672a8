"""Every operation that changes the disk fails once, in every way: of saves, and of conversions by one process.

The error names the file and the reason, what was there stays, byte for byte, and the same again succeeds.
"""

from __future__ import annotations

import errno
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dcp_core import api
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.convert.to_huggingface import HuggingFaceConversion
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.recipes.stored_source import StoredSource
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations, OperationRecord
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import Outcome, Seat, memory_directory, outcome_of, state_of

pytestmark = pytest.mark.faults

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ESTALE, errno.EDQUOT, errno.EROFS)
OLD, NEW = 1, 2
_SHARD_NBYTES = 300
MAY_FAIL = {"unlink", "touch", "fsync_directory", "rmdir"}
"""Operations of which some come after the commit, or only clean up."""


@pytest.fixture(scope="module")
def sources() -> Iterator[Path]:
    with memory_directory() as path:
        _prepare_sources(path.resolve())
        yield path.resolve()


@pytest.fixture
def root(sources: Path) -> Iterator[Path]:
    """Where a test works: beside the checkpoints and weights that it works from."""
    with memory_directory() as path:
        for source in sources.iterdir():
            (path / source.name).symlink_to(source)
        yield path.resolve()


def contents_of(directory: Path) -> dict[str, bytes] | None:
    """Every file, byte for byte; None where there is no directory."""
    if not directory.is_dir():
        return None
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _arrays(tag: int) -> dict[str, Any]:
    return {"w": np.arange(60.0).reshape(6, 10) * tag, "b": np.arange(7, dtype=np.int16) + tag, "s": np.float32(tag)}


# -- one process ------------------------------------------------------------------------------------------------------


def save(root: Path, tag: int, place: Path, operations: FaultyOperations) -> None:
    state = _arrays(tag) | {"step": tag}
    api.save(state, storage_writer=FileSystemWriter(storage=LocalStorage(place, operations)))


def import_hugging_face(root: Path, tag: int, place: Path, operations: FaultyOperations) -> None:
    convert_to_dcp(
        HuggingFaceReader(root / f"hf_{tag}"), place,
        storage_writer=FileSystemWriter(storage=LocalStorage(place, operations)),
    )  # fmt: skip


def reshard(root: Path, tag: int, place: Path, operations: FaultyOperations) -> None:
    """A checkpoint of three ranks becomes one of a single one, offline."""
    convert_to_dcp(
        FileSystemReader(root / f"cut_{tag}"), place,
        storage_writer=FileSystemWriter(storage=LocalStorage(place, operations)),
    )  # fmt: skip


def export_hugging_face(
    root: Path, tag: int, place: Path, operations: FaultyOperations, shard_nbytes: int = _SHARD_NBYTES
) -> None:
    conversion = HuggingFaceConversion(FileSystemReader(root / f"step_{tag}"), max_shard_size=shard_nbytes)
    conversion.run(LocalStorage(place, operations), overwrite=True)


WORK: dict[str, Callable[[Path, int, Path, FaultyOperations], None]] = {
    "save": save,
    "import": import_hugging_face,
    "reshard": reshard,
    "export": export_hugging_face,
    "export of one file": partial(export_hugging_face, shard_nbytes=1 << 20),
}


def _prepare_sources(root: Path) -> None:
    for tag in (OLD, NEW):
        save(root, tag, root / f"step_{tag}", FaultyOperations())
        export_hugging_face(root, tag, root / f"hf_{tag}", FaultyOperations())
    run_ranks(_save_in_parts, 3, root)


def _save_in_parts(context: RankContext, root: Path) -> None:
    seat = Seat.of(context)
    for tag in (OLD, NEW):
        seat.save(state_of(seat.rank, 3, tag), checkpoint_id=root / f"cut_{tag}")


def _values(work: str, place: Path) -> dict[str, bytes]:
    """Every tensor that is there, by an independent reader where there is one."""
    if work == "export of one file":
        assert not (place / "model.safetensors.index.json").exists()
        return {name: array.tobytes() for name, array in load_file(place / "model.safetensors").items()}
    if work == "export":
        assert not (place / "model.safetensors").exists()
        weight_map = json.loads((place / "model.safetensors.index.json").read_text())["weight_map"]
        return {name: load_file(place / file)[name].tobytes() for name, file in weight_map.items()}
    names = [tensor.name for tensor in StoredSource(FileSystemReader(place)).tensors()]
    return {name: api.read(place, name).tobytes() for name in names}


def check_point(
    record: OperationRecord, error_number: int, outcome: Outcome, place: Path, before: dict[str, bytes] | None
) -> None:
    """What fails says so, and leaves what was there, byte for byte; what ends well although something failed, may."""
    if not outcome.kind:
        assert record.operation in MAY_FAIL, record
        return
    assert outcome.kind == "StorageError", (record, outcome)
    assert f"[{errno.errorcode[error_number]}]" in outcome.message, (record, outcome)
    assert str(place) in outcome.message, (record, outcome)
    assert (contents_of(place) or {}) == (before or {}), (record, outcome)


@pytest.mark.parametrize(
    ("work", "over"),
    [
        *[(work, over) for work in ("save", "import", "reshard") for over in (None, "save")],
        *itertools.product(["export", "export of one file"], [None, "export", "export of one file"]),
    ],
)
def test_whatever_operation_fails_in_whatever_way_what_was_there_stays_and_the_same_again_succeeds(
    root: Path, work: str, over: str | None
) -> None:
    """All ways of failing come one after another, over what is still there after the one before."""
    run, place, template = WORK[work], root / "place", root / "template"
    if over:
        WORK[over](root, OLD, template, FaultyOperations())
    run(root, NEW, root / "expected", FaultyOperations())
    expected = _values(work, root / "expected")

    def start_anew() -> dict[str, bytes] | None:
        shutil.rmtree(place, ignore_errors=True)
        if over:
            shutil.copytree(template, place)
        return contents_of(place)

    fatal: set[str] = set()
    for number in itertools.count(1):
        before = start_anew()
        for error_number in ERRORS:
            operations = FaultyOperations(fail_at=number, error_number=error_number)
            outcome = outcome_of(run, root, NEW, place, operations)
            if len(operations.log) < number:
                assert not outcome.kind, outcome
                assert {"create", "preallocate", "pwritev", "fsync", "close_written", "rename"} <= fatal
                return
            check_point(operations.log[number - 1], error_number, outcome, place, before)
            if outcome.kind:
                fatal.add(operations.log[number - 1].operation)
            else:
                assert _values(work, place) == expected, operations.log[number - 1]
            if not (over and outcome.kind):  # an empty directory may be left
                before = start_anew()
        run(root, NEW, place, FaultyOperations())
        assert _values(work, place) == expected, number
