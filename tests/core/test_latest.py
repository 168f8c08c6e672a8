"""The newest checkpoint of a directory is the newest that is whole, and says why others are not."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.errors import ArgumentError, ArgumentsDifferError, NewerVersionError, StorageError
from dcp_core.formats.block_container import Block, build_container
from dcp_core.manager.latest import latest_checkpoint, survey_checkpoints
from dcp_core.manager.survey import RootSurvey, step_of, survey
from dcp_core.storage.base import Storage
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import Outcome, outcome_of

NEWER = build_container({"format": "dcp", "version": "2"}, [Block.of("anything", b"new")])


def put(root: Path, name: str, *, seconds: float | None = None) -> Path:
    """Save a checkpoint; as if it had been committed at a time."""
    api.save({"w": np.arange(40_000.0), "seen": {name}}, checkpoint_id=root / name, durable=False)
    if seconds is not None:
        os.utime(root / name / ".metadata", (seconds, seconds))
    return root / name


def newest(root: Path, **how: Any) -> str | None:
    found = latest_checkpoint(root, **how)
    return None if found is None else os.path.relpath(found, root)


# -- which is the newest ----------------------------------------------------------------------------------------------


def test_steps_are_numbers_at_the_end_of_names() -> None:
    names = ["step_100", "step-7", "9", "global_step0012", "final", "step_1a", "v2_final", "step_٣", "a" + "9" * 30]
    steps = [step_of(name) for name in names]
    assert steps == [100, 7, 9, 12, None, None, None, None, int("9" * 18)]


def test_the_highest_step_is_the_newest_whatever_its_time(tmp_path: Path) -> None:
    for seconds, name in enumerate(["step_100", "step_20", "step_9"]):
        put(tmp_path, name, seconds=1000.0 + seconds)
    assert newest(tmp_path) == "step_100"


def test_equal_steps_and_other_names_come_by_the_time_of_their_commits(tmp_path: Path) -> None:
    put(tmp_path, "step_5", seconds=1000)
    put(tmp_path, "again_5", seconds=2000)
    assert newest(tmp_path) == "again_5"
    put(tmp_path, "best", seconds=1500)
    assert newest(tmp_path) == "again_5"
    put(tmp_path, "final", seconds=3000)
    assert newest(tmp_path) == "final"
    put(tmp_path, "step_6", seconds=2500)
    assert newest(tmp_path) == "final"


def test_a_path_is_given_that_load_takes(tmp_path: Path) -> None:
    put(tmp_path / "a b", "step 1")
    for root in (tmp_path / "a b", str(tmp_path / "a b"), f"file://{tmp_path}/a%20b"):
        path = latest_checkpoint(root)
        assert path == str(tmp_path / "a b" / "step 1")
        state = {"seen": None}
        api.load(state, checkpoint_id=path)
        assert state == {"seen": {"step 1"}}


@pytest.mark.parametrize("made", [False, True])
def test_where_there_is_no_checkpoint_there_is_none(tmp_path: Path, made: bool) -> None:
    root = tmp_path / "runs"
    if made:
        (root / "logs" / "events").mkdir(parents=True)
        (root / "notes_1").write_text("a file")
    assert survey_checkpoints(root) == RootSurvey(str(root), None, None)


# -- what is passed over -----------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    os.truncate(path / "_rank0_.safetensors", 100)


def _remove(path: Path) -> None:
    (path / "_rank0_.bytes").unlink()


def _forget(path: Path) -> None:
    (path / ".metadata").unlink()


def _scribble(path: Path) -> None:
    raw = bytearray((path / ".metadata").read_bytes())
    raw[60] ^= 1
    (path / ".metadata").write_bytes(raw)


def _pickle(path: Path) -> None:
    (path / ".metadata").write_bytes(b"\x80\x04\x95" + bytes(1000))


def _empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_cut, "_rank0_.safetensors has 100 bytes, expected"),
        (_remove, "_rank0_.bytes is missing"),
        (_forget, "there is no .metadata"),
        (_scribble, ".metadata"),
        (_pickle, ".metadata"),
        (_empty, "no save into it was completed"),
    ],
)
def test_what_is_not_whole_is_passed_over_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object, reason: str
) -> None:
    put(tmp_path, "step_1")
    damage(put(tmp_path, "step_2"))  # type: ignore[operator]  # a function of a path
    with caplog.at_level(logging.WARNING, "dcp.manager"):
        found = survey_checkpoints(tmp_path)
    assert found.newest is not None and found.newest.name == "step_1" and found.path == str(tmp_path / "step_1")
    assert [each.name for each in found.skipped] == ["step_2"]
    assert reason in found.skipped[0].reason and reason in caplog.text


@pytest.mark.parametrize("name", ["_rank0_.safetensors", "_rank0_.bytes"])
def test_a_flipped_byte_is_found_on_request(tmp_path: Path, name: str) -> None:
    put(tmp_path, "step_1")
    file = put(tmp_path, "step_2") / name
    raw = bytearray(file.read_bytes())
    for place in (len(raw) - 1, len(raw) // 2, 20):
        broken = bytearray(raw)
        broken[place] ^= 4
        file.write_bytes(broken)
        assert (newest(tmp_path), newest(tmp_path, verify=True)) == ("step_2", "step_1"), place
    file.write_bytes(raw)
    assert newest(tmp_path, verify=True) == "step_2"


def test_every_block_of_a_file_is_looked_at(tmp_path: Path) -> None:
    state = {"large": np.arange(400_000.0), "odd": np.ones(3, np.uint8), "empty": np.ones((0, 2)), "one": np.float32(1)}
    api.save(state, checkpoint_id=tmp_path / "step_1", durable=False)
    file = tmp_path / "step_1" / "_rank0_.safetensors"
    raw = file.read_bytes()
    assert newest(tmp_path, verify=True) == "step_1"
    for place in (len(raw) - 1, len(raw) - 5, len(raw) - 3_200_000, len(raw) - 3_200_000 + (1 << 20) + 1):
        file.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        assert newest(tmp_path, verify=True) is None, place


def test_a_newer_version_is_an_error_not_a_reason_to_go_back(tmp_path: Path) -> None:
    put(tmp_path, "step_1")
    (put(tmp_path, "step_2") / ".metadata").write_bytes(NEWER)
    with pytest.raises(NewerVersionError):
        latest_checkpoint(tmp_path)


def test_a_storage_that_refuses_is_an_error_not_a_reason_to_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "step_1")
    put(tmp_path, "step_2")

    def refuse(storage: LocalStorage, name: str) -> int | None:
        raise StorageError(f"no answer about {name}")

    monkeypatch.setattr(LocalStorage, "size", refuse)
    with pytest.raises(StorageError, match="no answer"):
        latest_checkpoint(tmp_path)


class _Moving(LocalStorage):
    """A directory in which another job commits a step and removes the one before, whenever it has been listed."""

    moves = 3

    def list_directories(self) -> list[str]:
        names = list(super().list_directories())
        if self.moves:
            self.moves -= 1
            root, last = Path(self.path), max(int(name.partition("_")[2]) for name in names)
            put(root, f"step_{last + 1}")
            shutil.rmtree(root / f"step_{last}")
        return names


def test_a_directory_that_always_holds_a_checkpoint_is_never_taken_for_one_without(tmp_path: Path) -> None:
    put(tmp_path, "step_1")
    found, _ = survey(_Moving(tmp_path))
    assert found is not None and found.step == 4
    shutil.rmtree(tmp_path / "step_4")
    assert survey(LocalStorage(tmp_path)) == (None, ())
    (tmp_path / "step_5").mkdir()
    assert survey(LocalStorage(tmp_path))[0] is None


def test_no_link_is_followed_out_of_the_directory(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere", "step_9")
    root = tmp_path / "root"
    put(root, "step_1")
    (root / "step_9").symlink_to(tmp_path / "elsewhere" / "step_9")
    (root / "latest").symlink_to("step_1")
    (root / "step_8").symlink_to("nowhere")
    assert survey_checkpoints(root).path == str(root / "step_1")
    with pytest.raises(StorageError, match="link"):
        LocalStorage(root).folder("step_9")


def test_what_ranks_saved_alone_counts_when_all_of_them_did(tmp_path: Path) -> None:
    put(tmp_path, "step_1")
    run_ranks(_save_alone, 2, tmp_path / "step_2")
    assert newest(tmp_path, verify=True) == "step_2"
    (tmp_path / "step_2" / "1.metadata").unlink()
    found = survey_checkpoints(tmp_path)
    assert (
        found.path == str(tmp_path / "step_1") and "no complete set: ranks 0, of a job of 2" in found.skipped[0].reason
    )


def _save_alone(context: RankContext, directory: Path) -> None:
    state = {"w": np.ones(3) * context.rank}
    api.save(state, checkpoint_id=directory, use_collectives=False, adapter=NumpyRankAdapter())


# -- on ranks ----------------------------------------------------------------------------------------------------------


def _look(context: RankContext, root: Path) -> tuple[RootSurvey, str | None, Outcome, Outcome]:
    adapter = NumpyRankAdapter()
    found = survey_checkpoints(root, adapter=adapter)
    alone = latest_checkpoint(root, no_dist=True, adapter=adapter)
    other = root if context.rank else root / "step_1"
    differs = outcome_of(latest_checkpoint, other, adapter=adapter)
    bad = outcome_of(latest_checkpoint, root if context.rank else 3, adapter=adapter)
    return found, alone, differs, bad


def test_all_ranks_get_the_same_answer_and_the_same_error(tmp_path: Path) -> None:
    put(tmp_path, "step_1")
    _cut(put(tmp_path, "step_2"))
    results = run_ranks(_look, 3, tmp_path)
    for found, alone, differs, bad in results:
        assert found == results[0][0] and found.skipped[0].name == "step_2"
        assert found.path == alone == str(tmp_path / "step_1")
        assert differs.kind == ArgumentsDifferError.__name__ and "root" in differs.message
        assert bad.kind == ArgumentError.__name__ and "rank 0" in bad.message


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    for root, how in ((3, {}), (None, {}), ("", {}), ("gopher://x/y", {}), (tmp_path, {"verify": "full"})):
        with pytest.raises(ArgumentError):
            latest_checkpoint(root, **how)  # type: ignore[arg-type]  # that is the point


# -- what the storage brings -------------------------------------------------------------------------------------------


def test_a_link_is_moved_in_one_step_and_anything_else_of_its_name_stays(tmp_path: Path) -> None:
    seen = FaultyOperations()
    storage = LocalStorage(tmp_path, seen)
    (tmp_path / "a").mkdir()
    (tmp_path / ".latest.tmp").symlink_to("left over")
    assert storage.target_of("latest") is None
    storage.point("latest", "a")
    storage.point("latest", "b")
    assert storage.target_of("latest") == os.readlink(tmp_path / "latest") == "b"
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]
    assert [record.operation for record in seen.log if record.name == "latest"] == ["rename", "rename"]
    for name in ("a", "notes"):
        (tmp_path / "notes").write_text("mine")
        with pytest.raises(StorageError, match="no link"):
            storage.point(name, "a")
    assert (tmp_path / "notes").read_text() == "mine" and (tmp_path / "a").is_dir()
    (tmp_path / "far").symlink_to("/etc")
    assert storage.target_of("far") is None and storage.target_of("notes") is None


class _Plain(LocalStorage):
    """A storage that has what every storage has: a link is a small file, and nothing is known of directories."""

    list_directories = Storage.list_directories
    folder = Storage.folder
    remove_empty_directory = Storage.remove_empty_directory
    point = Storage.point
    target_of = Storage.target_of


def test_a_storage_without_links_keeps_a_small_file(tmp_path: Path) -> None:
    storage = _Plain(tmp_path)
    assert storage.target_of("latest") is None
    for target in ("step_1", "step_22"):
        storage.point("latest", target)
        assert storage.target_of("latest") == target and storage.list() == ["latest"]
    (tmp_path / "odd").write_bytes(b"\xff")
    (tmp_path / "out").write_bytes(b"../x")
    (tmp_path / "long").write_bytes(b"x" * 5000)
    assert [storage.target_of(name) for name in ("odd", "out", "long")] == [None, None, None]
    with pytest.raises(StorageError, match="no directories"):
        storage.list_directories()
    with pytest.raises(StorageError, match="no directories"):
        storage.folder("step_1")


def test_only_an_empty_directory_is_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "bare").mkdir()
    assert [storage.remove_empty_directory(name) for name in ("full", "bare", "gone")] == [False, True, True]
    assert storage.list_directories() == ["full"]
