"""What somebody meets who does not know the library yet: each error says where, what, and what to do."""

from __future__ import annotations

import logging
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.coordination.exchange import Exchange
from dcp_core.coordination.frames import Frame, FrameKind
from dcp_core.coordination.verdict import judge, was_missed
from dcp_core.errors import (
    ArgumentError,
    CoordinationTimeoutError,
    CorruptError,
    DcpError,
    IncompleteError,
    NewerVersionError,
    StorageError,
)
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.formats.block_container import Block, build_container
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.rank_jobs import ADAPTER
from tests.core.rank_jobs import save as save_on_ranks

PICKLE = pickle.dumps({"state_dict_metadata": {}, "filler": bytes(1000)})
ZIP = b"PK\x03\x04" + bytes(1000)
NEWER = build_container({"format": "dcp", "version": "2"}, [Block.of("anything", b"new")])


def state(value: float = 1.0) -> dict[str, Any]:
    return {"weight": np.full((64, 64), value, np.float32), "step": int(value), "seen": {int(value)}}


def save(directory: Path, value: float = 1.0) -> str:
    return api.save(state(value), checkpoint_id=directory, durable=False).save_id


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- ranks at different calls ---------------------------------------------------------------------------------------


def come_late(context: RankContext) -> list[str]:
    """Rank 1 comes to every exchange after its deadline."""
    found = []
    for stage in ("save/agree", "load/metadata"):
        channel = ADAPTER.process_group().channel
        exchange = Exchange(context.rank, context.world_size, channel, key="late", timeout_seconds=0.2)
        if context.rank:
            time.sleep(1)
        try:
            exchange.run(stage)
        except CoordinationTimeoutError as error:
            found.append(error.message)
    return found


def test_a_rank_that_was_given_up_hears_that_it_is_late_or_left_out_a_call() -> None:
    early, late = run_ranks(come_late, 2, timeout_seconds=30)
    assert all("only now" not in message for message in early)
    for stage, message in zip(("save/agree", "load/metadata"), late, strict=True):
        assert message.startswith(f"rank 1 did not come to exchange {stage} within 0.2 s")
        assert f"rank 1 comes to exchange {stage} only now, after the deadline; or it left out an earlier" in message
        assert message.endswith("make every rank call, and restart the job")


def test_every_missing_rank_of_a_large_group_is_recognised() -> None:
    frames = {rank: Frame(FrameKind.PAYLOAD, "a") for rank in (0, 5, 7, 90)}
    failure = judge("a", frames, 100, 1.0)
    assert failure is not None
    assert [rank for rank in range(100) if not was_missed(failure, rank)] == [0, 5, 7, 90]
    assert not was_missed(CoordinationTimeoutError("rank 0, the coordinator, gave no answer"), 0)


# -- what lies in the directory -------------------------------------------------------------------------------------


def test_the_pickle_of_torch_is_refused_with_the_way_to_read_it(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(PICKLE)
    with pytest.raises(
        CorruptError, match=r"written by torch\.distributed\.checkpoint, or is another pickle"
    ) as caught:
        api.load(state(), checkpoint_id=tmp_path)
    assert "torch.distributed.checkpoint.load, and save it anew with dcp" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "kind"), [(PICKLE, ArgumentError), (ZIP, ArgumentError), (NEWER, NewerVersionError)]
)
def test_a_save_over_what_this_version_cannot_read_is_refused_before_it_writes(
    content: bytes, kind: type[DcpError], tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    (tmp_path / "__0_0.distcp").write_bytes(b"data")
    with pytest.raises(kind, match="save into another directory, or remove the old checkpoint") as caught:
        save(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert names(tmp_path) == [".metadata", "__0_0.distcp"]
    assert (tmp_path / ".metadata").read_bytes() == content


def save_and_note(context: RankContext, directory: str) -> tuple[str, str]:
    try:
        save_on_ranks({"weight": np.zeros(4)}, directory)
    except DcpError as error:
        return type(error).__name__, error.message
    return "", ""


def test_the_refusal_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(NEWER)
    outcomes = run_ranks(save_and_note, 3, str(tmp_path))
    assert outcomes[0][0] == "NewerVersionError"
    assert len(set(outcomes)) == 1


def test_a_rank_alone_does_not_save_over_a_newer_version_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "0.metadata").write_bytes(NEWER)
    with pytest.raises(NewerVersionError, match="another directory"):
        api.save(state(), checkpoint_id=tmp_path, use_collectives=False, durable=False)


@pytest.mark.parametrize("damage", ["cut", "digest", "empty", "first bytes"])
def test_a_broken_metadata_of_ours_is_no_obstacle(damage: str, tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / ".metadata"
    content = bytearray(path.read_bytes())
    if damage == "first bytes":
        content[0] = 0x80
        content[8:12] = b"junk"
    elif damage == "digest":
        content[60] ^= 1
    path.write_bytes({"cut": bytes(content[:20]), "empty": b""}.get(damage, bytes(content)))
    save(tmp_path, 2.0)
    assert "_rank0_.safetensors" in names(tmp_path)


# -- a load beside a save -------------------------------------------------------------------------------------------


class InterruptedReader(FileSystemReader):
    """Lets another save happen, right before one step of a load."""

    def __init__(self, directory: Path, step: str) -> None:
        super().__init__(directory)
        self.directory = directory
        self.step = step
        self.replaced_by = ""

    def check_files(self, plan: Any) -> None:
        self._before("check_files")
        super().check_files(plan)

    def read_object(self, stored: Any) -> bytes:
        self._before("read_object")
        return super().read_object(stored)

    def execute_read(self, *args: Any, **options: Any) -> None:
        self._before("execute_read")
        super().execute_read(*args, **options)

    def _before(self, step: str) -> None:
        if step == self.step and not self.replaced_by:
            self.replaced_by = save(self.directory, 2.0)


@pytest.mark.parametrize("step", ["check_files", "read_object", "execute_read"])
def test_a_load_whose_checkpoint_is_replaced_meanwhile_says_so_and_the_next_one_works(
    step: str, tmp_path: Path
) -> None:
    old = save(tmp_path)
    reader = InterruptedReader(tmp_path, step)
    with pytest.raises(IncompleteError, match="while it was being loaded: load again") as caught:
        api.load(state(0.0), storage_reader=reader)
    assert f"save {reader.replaced_by} replaced this checkpoint (save {old}) in " in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    target = state(0.0)
    api.load(target, storage_reader=reader)
    assert target["step"] == 2


def test_a_file_that_is_just_missing_is_not_blamed_on_another_save(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "_rank0_.safetensors").unlink()
    with pytest.raises(IncompleteError, match="is missing in .*: restore the file") as caught:
        api.load(state(), checkpoint_id=tmp_path)
    assert "replaced" not in str(caught.value)


# -- texts ----------------------------------------------------------------------------------------------------------


def test_a_directory_that_is_gone_may_be_one_that_is_not_shared(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is gone, or is not on a file system that all ranks share"):
        LocalStorage(tmp_path / "elsewhere").create("a", 1)


@pytest.mark.parametrize("place", [40, -1])
def test_a_corrupt_metadata_is_named_with_its_directory_hex_digests_and_a_remedy(place: int, tmp_path: Path) -> None:
    save(tmp_path)
    content = bytearray((tmp_path / ".metadata").read_bytes())
    content[place] = ord("0") if content[place] != ord("0") else ord("1")
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CorruptError, match=r"expected digest [0-9a-f]{32}, found [0-9a-f]{32}; restore") as caught:
        api.load(state(), checkpoint_id=tmp_path)
    assert f".metadata in {str(tmp_path)!r}" in str(caught.value)
    assert "restore the file, or load another checkpoint" in str(caught.value)


@pytest.mark.parametrize("kind", [FileSystemWriter, FileSystemReader])
def test_what_is_no_path_is_a_bad_argument(kind: Any) -> None:
    with pytest.raises(ArgumentError, match="a path or a URL, got 5, a int"):
        kind(5)


def test_a_save_that_wrote_nothing_does_not_warn_of_files_that_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError, match="ENAMETOOLONG"):
        save(tmp_path / ("n" * 300))
    assert caplog.messages == []
