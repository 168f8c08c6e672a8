"""Values without an exact encoding in background saves: how a type is copied to the host, and when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dcp_torch
from dcp_torch import DataCopier
from tests.torch.async_torch import IS_LAUNCHED, MODES, RESULT_SECONDS, begin_at_gate, no_process_left, run_job
from tests.torch.gloo_ranks import TorchRank
from tests.torch.states import LogLines

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def directory(shared_path: Path) -> Iterator[Path]:
    with no_process_left():
        yield shared_path / "step 1"


class Sampler:
    """What a user's copier serves."""

    def __init__(self, seen: Tensor) -> None:
        self.seen = seen


class Shuffler(Sampler):
    """Served by its own copier."""


class Sorter(Shuffler):
    """Served by the copier of its nearest base."""


class Stranger:
    """Served by nobody."""

    def __init__(self, words: list[str]) -> None:
        self.words = words


def copy_with(rank: TorchRank, root: Path, mode_name: str) -> None:
    calls: list[str] = []

    @DataCopier.register(Sampler)
    def copy_sampler(value: Sampler) -> dict[str, Any]:
        calls.append("sampler")
        return {"sampler": value.seen.clone()}

    @DataCopier.register(Shuffler)
    def copy_shuffler(value: Shuffler) -> dict[str, Any]:
        calls.append("shuffler")
        return {"shuffler": value.seen.clone(), "deep": [Sampler(value.seen + 1)]}

    assert list(copy_sampler(Sampler(torch.zeros(1)))) == ["sampler"]  # the decorator gives it back
    dcp_torch.allow_pickled(Stranger)
    log = LogLines()
    for tag in (1, 2):
        live = [torch.full((3,), float(tag)) for _ in range(3)]
        stranger = Stranger([str(tag)])
        state = {"a": Sampler(live[0]), "b": Shuffler(live[1]), "c": Sorter(live[2]), "d": stranger, "n": tag}
        calls.clear()
        gate, response = begin_at_gate(state, root / f"{tag}", **MODES[mode_name].save)
        assert sorted(calls) == ["sampler"] * 3 + ["shuffler"] * 2  # each once, to compare ranks and to save
        for tensor in live:
            tensor.zero_()
        stranger.words[:] = ["spoilt"]
        dist.barrier()
        gate.open()
        response.get_result(RESULT_SECONDS)
        found: dict[str, Any] = {"a": None, "b": None, "c": None, "d": None, "n": 0}
        dcp_torch.load(found, checkpoint_id=root / f"{tag}", **MODES[mode_name].load)
        value = torch.full((3,), float(tag))
        assert torch.equal(found["a"]["sampler"], value)
        for name in ("b", "c"):
            assert torch.equal(found[name]["shuffler"], value)
            assert torch.equal(found[name]["deep"][0]["sampler"], value + 1)
        assert isinstance(found["d"], Stranger) and found["d"].words == [str(tag)]
    about_it = [line for line in log.with_words("Stranger") if "DataCopier" in line]
    assert len(about_it) == 1 or (IS_LAUNCHED and not about_it), log.lines  # once a process


@pytest.mark.parametrize("mode", MODES)
def test_a_type_is_copied_by_its_own_function_or_its_nearest_base_s_or_pickled_with_a_warning(
    directory: Path, mode: str
) -> None:
    run_job(copy_with, 2, directory, mode)


def fail_to_copy(rank: TorchRank, directory: Path) -> str:
    @DataCopier.register(Sampler)
    def copy_sampler(value: Sampler) -> Any:
        raise RuntimeError("no copy today")

    state = {"a": Sampler(torch.zeros(2)) if rank.rank == 1 else 3, "n": 1}
    try:
        dcp_torch.async_save(state, checkpoint_id=directory, timeout_seconds=60).get_result(RESULT_SECONDS)
    except dcp_torch.DcpError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_copier_that_raises_is_an_error_on_all_ranks(directory: Path) -> None:
    found = run_job(fail_to_copy, 2, directory)
    assert len(set(found)) == 1
    assert all(word in found[0] for word in ("RankFailedError", "rank 1", "no copy today", "'a'"))
