"""A conversion from torch DCP is killed, or loses power, at any moment: the old checkpoint or the new one is whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import dcp_torch as dcp
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.errors import NotFoundError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.power_loss import RecordedOperations
from dcp_torch.torch_dcp import TorchDCPReader
from tests.core.fault_jobs import Seat, memory_directory
from tests.core.kill_jobs import NEW, OLD, check_order, mortal, sweep
from tests.core.power_jobs import outcomes, record
from tests.torch import gloo_ranks  # noqa: F401  # has the fork server load torch
from tests.torch.states import assert_same, poison, values

pytestmark = [pytest.mark.faults, pytest.mark.timeout(170)]


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path.resolve()


def _state(tag: int) -> dict[str, Any]:
    return {
        "model": {"w": values((40, 30), torch.bfloat16, seed=tag), "b": values((3000,), seed=10 * tag)},
        "step": tag,
    }


def _source(root: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        torch_dcp.save(_state(NEW), checkpoint_id=str(root / "source"))  # type: ignore[attr-defined]  # no exports
    return root / "source"


def _tag_in(directory: Path) -> int | None:
    """Which state a checkpoint holds, all of it; None where there is none."""
    found = _state(OLD)
    poison(found)
    try:
        dcp.load(found, checkpoint_id=directory)
    except NotFoundError:
        return None
    tag = int(found["step"])
    assert_same(found, _state(tag))
    return tag


def _convert(source: Path, storage: LocalStorage) -> None:
    convert_to_dcp(TorchDCPReader(source), storage.path, storage_writer=FileSystemWriter(storage=storage))


def _convert_and_die(seat: Seat, directory: Path, number: int, source: Path) -> bool:
    _convert(source, mortal(directory, number))
    return True


@pytest.mark.parametrize("over", [False, True], ids=["first", "over another"])
def test_a_conversion_from_torch_dcp_that_is_killed_leaves_the_old_or_the_new_checkpoint(
    root: Path, over: bool
) -> None:
    source, template = _source(root), root / "template"
    dcp.save(_state(OLD), checkpoint_id=template)
    found = sweep(root, _convert_and_die, template if over else None, source)
    check_order([_tag_in(directory) for directory, _ in found], [done for _, done in found], OLD if over else None)


@pytest.mark.parametrize("over", [False, True], ids=["first", "over another"])
def test_a_conversion_from_torch_dcp_that_loses_power_is_whole_or_not_there(root: Path, over: bool) -> None:
    source = _source(root)
    if over:
        dcp.save(_state(OLD), checkpoint_id=root / "work")

    def convert(place: Path, operations: RecordedOperations) -> None:
        _convert(source, LocalStorage(place, operations))

    before, log = record(root, convert)
    seen = set()
    for count, manner, found in outcomes(root, before, log, lambda place: str(_tag_in(place) or "")):
        assert found in (str(OLD) if over else "", str(NEW)), (count, manner, log[max(0, count - 1)])
        assert found == str(NEW) or count < len(log), manner
        seen.add(found)
    assert len(seen) == 2
