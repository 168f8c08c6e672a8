"""Whatever lies under the names that a save, a conversion or a manager will use, nothing outside is touched.

The names are all that an ordinary run uses, foreseen; under each a link or a hard link waits. A backup made of hard
links stays what it is.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dcp_core
from dcp_core.api import load, save
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.convert.to_huggingface import HuggingFaceConversion
from dcp_core.errors import DcpError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.manager.manager import CheckpointManager
from dcp_core.recipes.places import dcp_reader, huggingface_reader
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.async_jobs import MODES, async_outcome, checkpoint_directory, tag_in
from tests.core.fault_jobs import (
    Outcome,
    Seat,
    checkpoint_names,
    loaded_tag,
    memory_directory,
    names_in,
    outcome_of,
    state_of,
)
from tests.core.outside import KINDS, Outside, foreseen_ids

pytestmark = pytest.mark.faults

WORLD = 2
_OLD, _NEW, _AFTER = 1, 2, 3
_ID = 0xAB


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


# --- saves -------------------------------------------------------------------------------------------


def _names_used(seat: Seat, directory: Path, *, over: bool) -> list[str]:
    """The names that a save makes, changes or removes, on all ranks."""
    operations = FaultyOperations()
    _begin_anew(seat, directory, over=over)
    with foreseen_ids(_ID):
        writer = FileSystemWriter(storage=LocalStorage(directory, operations))
        seat.save(state_of(seat.rank, seat.world, _NEW), storage_writer=writer)
    own = {record.name for record in operations.log} - {directory.name}
    everybody = [set(json.loads(part)) for part in seat.share(json.dumps(sorted(own)).encode())]
    return sorted(set.union(*everybody))


def _begin_anew(seat: Seat, directory: Path, *, over: bool) -> None:
    seat.share()
    if seat.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    seat.share()
    if over:
        seat.save(state_of(seat.rank, seat.world, _OLD), checkpoint_id=directory)
    seat.share()


def _save_among_traps(context: RankContext, root: Path, over: bool) -> list[tuple[str, str, Outcome, int | None]]:
    """Save once with a trap under each name that a save uses; then take the trap away, and save again."""
    seat, directory = Seat.of(context), root / "step"
    outside = Outside(root / f"outside of rank {seat.rank}")
    found = []
    names = _names_used(seat, directory, over=over)
    assert {f".intent-{f'{_ID:02x}' * 16}", ".metadata"} <= set(names), names
    for name in names:
        for kind in KINDS:
            if over and name in checkpoint_names_of_old(directory, seat, over=over):
                continue  # what the old checkpoint needs is there; a trap in its place is damage
            _begin_anew(seat, directory, over=over)
            if seat.rank == 0:
                outside.plant(kind, directory / name)
            seat.share()
            with foreseen_ids(_ID):
                outcome = outcome_of(seat.save, state_of(seat.rank, seat.world, _NEW), checkpoint_id=directory)
            seat.share()
            outside.check((name, kind, outcome))
            tag = _tag_of(seat, directory)
            found.append((name, kind, outcome, tag))
            if seat.rank == 0 and (directory / name).is_symlink():
                (directory / name).unlink()
            seat.share()
            seat.save(state_of(seat.rank, seat.world, _AFTER), checkpoint_id=directory)
            assert loaded_tag(seat, directory) == _AFTER
            outside.check((name, kind, "afterwards"))
    return found


def checkpoint_names_of_old(directory: Path, seat: Seat, *, over: bool) -> frozenset[str]:
    """The files of a first save: their names are the same each time."""
    plain = {f"_rank{rank}_.{ending}" for rank in range(seat.world) for ending in ("safetensors", "bytes")}
    return frozenset({".metadata", *plain}) if over else frozenset()


def _tag_of(seat: Seat, directory: Path) -> int | None:
    """Which save lies there; None where there is none."""
    try:
        return loaded_tag(seat, directory)
    except DcpError:
        return None


@pytest.mark.parametrize("over", [False, True], ids=["first save", "over another"])
def test_no_save_touches_what_lies_behind_any_name_that_it_uses(root: Path, over: bool) -> None:
    found = run_ranks(_save_among_traps, WORLD, root, over, timeout_seconds=120)
    assert len(found[0]) > 12
    for ranks in zip(*found, strict=True):
        name, kind, outcome, tag = ranks[0]
        assert {(seen[2].kind, seen[2].message) for seen in ranks} == {(outcome.kind, outcome.message)}, ranks
        assert {seen[3] for seen in ranks} == {tag}, ranks
        if outcome.kind == "":
            assert tag == _NEW, (name, kind)
        else:
            assert (outcome.kind in ("StorageError", "CorruptError"), tag) == (True, _OLD if over else None), ranks


def _save_over_backed_up(context: RankContext, root: Path, background: bool) -> None:
    """A copy whose files are the same files: what a save does to the one must not show in the other."""
    seat, directory, backup = Seat.of(context), root / "step", root / "backup"
    seat.save(state_of(seat.rank, seat.world, _OLD), checkpoint_id=directory)
    seat.share()
    if seat.rank == 0:
        shutil.copytree(directory, backup, copy_function=os.link)
    seat.share()
    before = {name: (backup / name).read_bytes() for name in names_in(backup)}
    for tag in (_NEW, _AFTER):
        state = state_of(seat.rank, seat.world, tag)
        if background:
            assert async_outcome(seat, state, directory).kind == ""
        else:
            seat.save(state, checkpoint_id=directory)
        seat.share()
    assert {name: (backup / name).read_bytes() for name in names_in(backup)} == before
    assert (loaded_tag(seat, directory), loaded_tag(seat, backup)) == (_AFTER, _OLD)
    assert all((backup / name).stat().st_nlink == 1 for name in names_in(backup))


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
def test_a_backup_of_hard_links_stays_as_it_is_when_the_checkpoint_is_saved_over(background: bool) -> None:
    with checkpoint_directory() as place:
        run_ranks(_save_over_backed_up, WORLD, place, background)


# --- in the background -------------------------------------------------------------------------------


_ENDS = "StorageError", "CorruptError", "RankFailedError", "CoordinationError", "CoordinationTimeoutError"


def _async_among_traps(context: RankContext, root: Path, mode: str) -> list[tuple[str, str, Outcome]]:
    seat, directory = Seat.of(context), root / "step"
    outside = Outside(root / f"outside of rank {seat.rank}")
    found = []
    for name in _ASYNC_NAMES[mode]:
        for kind in KINDS:
            seat.share()
            if seat.rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                outside.plant(kind, directory / name)
            seat.share()
            with foreseen_ids(_ID):
                outcome = async_outcome(
                    seat, state_of(seat.rank, seat.world, _NEW), directory, **{**MODES[mode].save, "timeout_seconds": 6}
                )
            seat.share()
            outside.check((name, kind, outcome))
            everybody = seat.share(outcome.kind.encode())
            if not any(everybody):
                assert tag_in(seat, directory, MODES[mode]) == _NEW
            found.append((name, kind, outcome))
            seat.share()
            if seat.rank == 0 and any(everybody):
                (directory / name).unlink(missing_ok=True)
            seat.share()
            again = async_outcome(seat, state_of(seat.rank, seat.world, _AFTER), directory, **MODES[mode].save)
            assert (again.kind, tag_in(seat, directory, MODES[mode])) == ("", _AFTER), (name, kind, again)
    return found


_SAVE_ID = f"{_ID:02x}" * 16
_ASYNC_NAMES = {
    "mailbox": (f".mailbox-{_SAVE_ID}", f".intent-{_SAVE_ID}", f".metadata.{_SAVE_ID}.tmp", "_rank1_.safetensors"),
    "no channel": (".mailbox-join",),
    "alone": (f".intent-{_SAVE_ID}-1", "1.metadata", f"1.metadata.{_SAVE_ID}.tmp", "_rank1_.bytes"),
}


@pytest.mark.parametrize("mode", sorted(_ASYNC_NAMES))
def test_no_save_in_the_background_touches_what_lies_behind_any_name_that_it_uses(mode: str) -> None:
    with checkpoint_directory() as place:
        place.mkdir()
        found = run_ranks(_async_among_traps, WORLD, place, mode, timeout_seconds=150)
    for ranks in zip(*found, strict=True):
        for name, kind, outcome in ranks:
            assert outcome.kind in ("", *_ENDS), (
                name, kind, outcome,
            )  # fmt: skip


# --- managers ----------------------------------------------------------------------------------------


def _manager_calls(manager: CheckpointManager, step: int) -> None:
    manager.save(step, {"w": np.full(4, float(step)), "step": step})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["step_3", "latest", ".latest.tmp"])
def test_no_manager_touches_what_lies_behind_any_name_that_it_uses(root: Path, name: str, kind: str) -> None:
    outside = Outside(root / "outside")
    runs = root / "runs"
    manager = CheckpointManager(runs, keep=1)
    for step in (1, 2):
        _manager_calls(manager, step)
    (runs / name).unlink(missing_ok=True)
    outside.plant(kind, runs / name)
    outcome = outcome_of(_manager_calls, manager, 3)
    outside.check((name, kind, outcome))
    expected = "" if name != "step_3" else "StorageError"
    assert outcome.kind == expected, outcome
    assert not expected or "step_3" in outcome.message
    assert manager.latest() == str(runs / ("step_2" if expected else "step_3"))
    (runs / name).unlink(missing_ok=True)
    _manager_calls(manager, 4)
    outside.check((name, kind, "afterwards"))
    assert names_in(runs) == (["latest", "step_4"])
    assert os.readlink(runs / "latest") == "step_4"


@pytest.mark.parametrize("kind", ["link to nothing", "link to a directory"])
def test_a_manager_in_the_background_makes_no_checkpoint_behind_a_link(root: Path, kind: str) -> None:
    outside, runs = Outside(root / "outside"), root / "runs"
    manager = CheckpointManager(runs, keep=1)
    manager.async_save(1, {"w": np.zeros(4)}).get_result(60)
    outside.plant(kind, runs / "step_2")
    outcome = outcome_of(lambda: manager.async_save(2, {"w": np.ones(4)}).get_result(60))
    outside.check(outcome)
    assert (outcome.kind, "step_2" in outcome.message) == ("StorageError", True), outcome
    assert names_in(runs / "step_1") == checkpoint_names(runs / "step_1")


# --- conversions -------------------------------------------------------------------------------------

_WEIGHTS = {"a": np.arange(6.0, dtype=np.float32), "b": np.ones((3, 2), np.float32)}


def _export(source: Path, target: Path) -> None:
    HuggingFaceConversion(dcp_reader(source), max_shard_size=24).run(target, overwrite=True)


def _import(source: Path, target: Path) -> None:
    convert_to_dcp(huggingface_reader(source), target)


def _run_convert(convert: Callable[[Path, Path], None], source: Path, target: Path) -> list[str]:
    """What a conversion leaves, and all that it uses on the way, with ids that are foreseen."""
    used: set[str] = set()
    perform = LocalStorage.__init__

    def watched(self: LocalStorage, path: Any, operations: Any = None) -> None:
        perform(self, path, FaultyOperations(before=lambda record: used.add(record.name)))

    with pytest.MonkeyPatch.context() as patch, foreseen_ids(_ID):
        patch.setattr(LocalStorage, "__init__", watched)
        convert(source, target)
    return sorted(used - {target.name})


@pytest.mark.parametrize("convert", [_export, _import], ids=["export", "import"])
def test_no_conversion_touches_what_lies_behind_any_name_that_it_uses(
    root: Path, convert: Callable[[Path, Path], None]
) -> None:
    outside, target = Outside(root / "outside"), root / "target"
    save(_WEIGHTS, checkpoint_id=root / "ours")
    _export(root / "ours", root / "theirs")
    source = root / ("ours" if convert is _export else "theirs")
    (root / "probe").mkdir()
    names = _run_convert(convert, source, root / "probe")
    whole = names_in(root / "probe")
    assert len(names) > 4 and set(whole) <= set(names)
    for name in names:
        for kind in KINDS:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            outside.plant(kind, target / name)
            with foreseen_ids(_ID):
                outcome = outcome_of(convert, source, target)
            outside.check((name, kind, outcome))
            assert outcome.kind in ("", "StorageError", "CorruptError"), (name, kind, outcome)
            if outcome.kind:
                (target / name).unlink(missing_ok=True)
                convert(source, target)
            _check_converted(target, is_export=convert is _export)
            outside.check((name, kind, "afterwards"))


def _check_converted(target: Path, *, is_export: bool) -> None:
    if is_export:
        convert_to_dcp(huggingface_reader(target), target.parent / "back")
    found = {name: np.zeros_like(array) for name, array in _WEIGHTS.items()}
    load(found, checkpoint_id=target.parent / "back" if is_export else target)
    assert all(np.array_equal(found[name], _WEIGHTS[name]) for name in _WEIGHTS)


def test_weights_over_links_replace_the_links(root: Path) -> None:
    """As in a cache, where every file is a link to where its content lies."""
    outside, target = Outside(root / "cache"), root / "model"
    target.mkdir()
    (target / "model.safetensors").symlink_to(outside.path / "file")
    save(_WEIGHTS, checkpoint_id=root / "ours")
    HuggingFaceConversion(dcp_reader(root / "ours")).run(target, overwrite=True)
    outside.check("weights")
    assert not (target / "model.safetensors").is_symlink()
    _check_converted(target, is_export=True)


# --- where files are made at all ---------------------------------------------------------------------

_MAKERS = {"open", "mkdir", "makedirs", "mkstemp", "symlink", "link", "rename", "replace", "touch", "chmod", "chown"}
_PLACES = {
    "storage/operations.py",  # every file of a checkpoint
    "coordination/directory.py",  # messages
    "background/launch.py",  # the log of a background process, among temporary files
    "log.py",  # a trace, where the user wants one
    "cli/inspect.py",  # a picture, where the user wants one
    "cli/main.py",  # /dev/null, in the place of a reader who has left
    "cli/tables.py",  # the same, for the tools
}


def _made_in(source: str) -> Iterator[str]:
    """Calls of the operating system that make or change files, and files that are opened for more than reading."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in _MODULES:
            if called.attr in _MAKERS and not (called.attr == "open" and _only_reads(node.args[1:2])):
                yield f"{called.value.id}.{called.attr}"
        elif isinstance(called, ast.Name) and called.id == "open" and not _only_reads(node.args[1:2]):
            yield "open"
        elif isinstance(called, ast.Attribute) and called.attr in ("write_text", "write_bytes"):
            yield called.attr


_MODULES = {"os", "shutil", "tempfile"}


def _only_reads(mode: Sequence[ast.expr]) -> bool:
    text = "".join(map(ast.unparse, mode))
    return not any(word in text for word in ("w", "a'", "x", "+", "WRONLY", "RDWR", "FLAGS"))


def test_files_are_made_in_few_places() -> None:
    """All others go through these, where exclusive creation, links and rights are seen to."""
    core = Path(dcp_core.__file__).parent
    packages = [core, core.parent / "dcp_torch", core.parent / "dcp_mindspore"]
    found = {
        path.relative_to(core).as_posix() if path.is_relative_to(core) else path.name: sorted(set(made))
        for package in packages
        for path in package.rglob("*.py")
        if "testing" not in path.parts and (made := list(_made_in(path.read_text(encoding="utf-8"))))
    }
    assert set(found) == _PLACES, found
