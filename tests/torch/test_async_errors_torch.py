"""Background saves of torch jobs that meet trouble: missing ranks, dead processes, bad arguments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp_torch
from dcp_core.testing.ranks import RankProcessError
from tests.background_processes import background_processes, is_running, wait_until
from tests.core.async_writers import DISK_FULL, Gate
from tests.core.fault_jobs import checkpoint_names, names_in
from tests.torch.async_torch import (
    IS_LAUNCHED,
    MODES,
    RESULT_SECONDS,
    SOON_SECONDS,
    async_raised,
    async_save,
    begin_at_gate,
    no_process_left,
    run_job,
)
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.states import assert_same, raised, same_on_all, values

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def directory(shared_path: Path) -> Iterator[Path]:
    with no_process_left():
        yield shared_path / "step 1"


def small(rank: TorchRank, tag: int) -> dict[str, Any]:
    return {"t": values((5,), seed=tag), "own": {rank.rank: values((6,), seed=tag + rank.rank)}, "n": tag}


def check_loaded(rank: TorchRank, directory: Path, tag: int, mode_name: str = "mailbox") -> None:
    target = small(rank, 99)
    dcp_torch.load(target, checkpoint_id=directory, **MODES[mode_name].load)
    assert_same(target, small(rank, tag))


# -- trouble in a job -------------------------------------------------------------------------------------------------


class Unwilling:
    """A Stateful object that raises."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("unwilling")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


def go_wrong(rank: TorchRank, directory: Path, mode_name: str) -> list[tuple[str, str]]:
    """A state_dict that raises, an unsupported value, a disk that is full, a killed process, a cancelled save."""
    how, found = MODES[mode_name].save, []
    assert async_raised(small(rank, 1), directory, **how)[0] == ""
    for more in ({"object": Unwilling()}, {"object": [lambda: None]}):
        started = time.monotonic()
        found.append(async_raised(small(rank, 2) | (more if rank.rank == 1 else {}), directory, **how))
        assert time.monotonic() - started < SOON_SECONDS
    for order in ("fail-1", "kill", "cancel"):
        gate, response = begin_at_gate(small(rank, 2), directory, order, **how)
        told = gate.await_writing(*range(rank.world_size))[1]
        dist.barrier()
        if order == "kill" and rank.rank == 0:
            os.kill(told["pid"], signal.SIGKILL)
        if order == "cancel" and rank.rank == 1:
            assert response.cancel()
        dist.barrier()
        gate.open()
        started = time.monotonic()
        found.append(raised(lambda response=response: response.get_result(RESULT_SECONDS)))  # type: ignore[misc]
        assert time.monotonic() - started < SOON_SECONDS
        dist.barrier()
        for file in gate.directory.iterdir() if rank.rank == 0 else ():
            file.unlink()
        dist.barrier()
        check_loaded(rank, directory, 1)
        assert async_raised(small(rank, 1), directory, **how) == ("", "nothing was raised")
    dist.barrier()
    assert names_in(directory) == checkpoint_names(directory)
    return found


@pytest.mark.parametrize("mode", ["mailbox", "gloo"])
def test_trouble_on_one_rank_is_one_error_on_all_and_the_next_save_works(directory: Path, mode: str) -> None:
    told = list(zip(*run_job(go_wrong, 3, directory, mode, timeout_seconds=100), strict=True))
    for found, (kind, *texts) in zip(
        told,
        [
            ("RankFailedError", "rank 1", "unwilling"),
            ("UnsupportedValueError", "rank 1", "object"),
            ("StorageError", "rank 1", DISK_FULL),
            ("RankFailedError", "SIGKILL"),
        ],
        strict=False,
    ):
        assert {of_rank[0] for of_rank in found} == {kind}, found
        assert all(text in of_rank[1] for text in texts for of_rank in found), found
    for number in (0, 1, 2):
        same_on_all(told[number])
    assert all(kind and "cancel" in (kind + text).lower() for kind, text in told[4]), told[4]


def stay_away(rank: TorchRank, directory: Path, mode_name: str) -> tuple[str, str] | None:
    how = MODES[mode_name].save
    assert not async_raised(small(rank, 1), directory, **how)[0]  # from here on every background process is ready
    dist.barrier()
    if rank.rank == 1:
        time.sleep(12)
        return None
    return async_raised(small(rank, 1), directory, timeout_seconds=6.0, **how)


@pytest.mark.skipif(IS_LAUNCHED, reason="leaves ranks out of step")
@pytest.mark.parametrize("mode", ["mailbox", "gloo"])
def test_a_rank_that_never_calls_is_named(directory: Path, mode: str) -> None:
    first, _, last = run_job(stay_away, 3, directory, mode)
    for kind, text in (first, last):
        assert kind == "CoordinationTimeoutError"
        assert "rank 1" in text or "ranks 1" in text


def lose_trainers(rank: TorchRank, directory: Path, mode_name: str, dying: tuple[int, ...]) -> str:
    _, response = begin_at_gate(small(rank, 3), directory, **MODES[mode_name].save)
    Gate(directory).await_writing(*range(rank.world_size))
    pids: list[Any] = [None] * rank.world_size
    dist.all_gather_object(pids, os.getpid())
    if rank.rank in dying:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: not any(is_running(pids[number]) for number in dying), "the end of the trainers")
    Gate(directory).open()
    return raised(lambda: response.get_result(RESULT_SECONDS))[0]


def load_three(rank: TorchRank, directory: Path, mode_name: str) -> None:
    check_loaded(rank, directory, 3, mode_name)


@pytest.mark.skipif(IS_LAUNCHED, reason="kills ranks")
@pytest.mark.parametrize(("mode", "dying"), [("mailbox", (0, 1)), ("gloo", (1,)), ("alone", (0, 1))])
def test_background_processes_whose_trainers_are_killed_commit_and_end(
    directory: Path, mode: str, dying: tuple[int, ...]
) -> None:
    gate = Gate(directory).close()
    found = run_job(lose_trainers, 2, directory, mode, dying, return_exceptions=True)
    gate.open()
    for rank, seen in enumerate(found):
        assert isinstance(seen, RankProcessError) if rank in dying else seen == "", found
    wait_until(lambda: not background_processes(), "the end of the background processes")
    run_gloo(load_three, 2, directory, mode)


# -- arguments --------------------------------------------------------------------------------------------------------


def without_an_address(rank: TorchRank, directory: Path) -> list[tuple[str, str]]:
    found = []
    for missing, other in (("MASTER_ADDR", "MASTER_PORT"), ("MASTER_PORT", "MASTER_ADDR")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(other, "29999" if other == "MASTER_PORT" else "127.0.0.1")
            patch.delenv(missing, raising=False)
            with pytest.raises(AssertionError):
                async_save(small(rank, 1), directory, use_gloo=True)
            with pytest.raises(dcp_torch.ArgumentError):
                async_save(small(rank, 1), directory, use_gloo=True)
            found.append(async_raised(small(rank, 1), directory, use_gloo=True))
            assert async_raised(small(rank, 1), directory / "alone", use_gloo=True, use_collectives=False)[0] == ""
            dist.barrier()
    assert async_raised(small(rank, 1), directory)[0] == ""
    return found


def test_gloo_needs_an_address_to_meet_at(directory: Path) -> None:
    for found in run_gloo(without_an_address, 2, directory):
        assert [kind for kind, _ in found] == ["MissingRendezvousError"] * 2
        assert "MASTER_ADDR" in found[0][1] and "MASTER_PORT" in found[1][1]


def differ(rank: TorchRank, directory: Path) -> list[tuple[str, str]]:
    found = []
    for who in (0, 1, 2):
        found.append(async_raised(small(rank, 1), directory, use_gloo=rank.rank == who))
        dist.barrier()
        assert names_in(directory) == []
        dist.barrier()
    assert async_raised(small(rank, 2), directory)[0] == ""
    check_loaded(rank, directory, 2)
    return found


def test_ranks_that_want_to_agree_in_different_ways_are_told_so(directory: Path) -> None:
    for found in zip(*run_job(differ, 3, directory), strict=True):
        kind, text = same_on_all(found)
        assert kind == "ArgumentsDifferError" and "use_gloo" in text
