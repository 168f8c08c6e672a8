"""Every operation that changes the disk fails in every way when a checkpoint of torch DCP becomes one of ours."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import dcp_torch as dcp
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from dcp_torch.torch_dcp import TorchDCPReader
from tests.core.fault_jobs import outcome_of
from tests.core.test_error_points import ERRORS, check_point, contents_of

pytestmark = pytest.mark.faults


def _convert(source: Path, place: Path, operations: FaultyOperations) -> None:
    convert_to_dcp(
        TorchDCPReader(source), place, storage_writer=FileSystemWriter(storage=LocalStorage(place, operations))
    )


def _is_new(place: Path) -> bool:
    target: dict[str, Any] = {"w": torch.zeros(4, 5), "step": 0}
    dcp.load(target, checkpoint_id=place)
    return bool(torch.equal(target["w"], torch.ones(4, 5))) and target["step"] == 2


@pytest.mark.parametrize("over", [False, True], ids=["first", "over another"])
def test_whatever_operation_fails_in_whatever_way_what_was_there_stays_and_the_same_again_succeeds(
    tmp_path: Path, over: bool
) -> None:
    """All ways of failing come one after another, over what is still there after the one before."""
    source, place, template = tmp_path / "torch", tmp_path / "place", tmp_path / "template"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about saving without a process group
        save({"w": torch.ones(4, 5), "step": 2}, checkpoint_id=source, no_dist=True)
    if over:
        dcp.save({"w": torch.zeros(4, 5), "step": 1}, checkpoint_id=template)

    def start_anew() -> dict[str, bytes] | None:
        shutil.rmtree(place, ignore_errors=True)
        if over:
            shutil.copytree(template, place)
        return contents_of(place)

    for number in range(1, 60):
        before = start_anew()
        for error_number in ERRORS:
            operations = FaultyOperations(fail_at=number, error_number=error_number)
            outcome = outcome_of(_convert, source, place, operations)
            if len(operations.log) < number:
                assert not outcome.kind and number > 8
                return
            check_point(operations.log[number - 1], error_number, outcome, place, before)
            if not outcome.kind:
                assert _is_new(place), operations.log[number - 1]
            if not (over and outcome.kind):  # an empty directory may be left
                before = start_anew()
        _convert(source, place, FaultyOperations())
        assert _is_new(place), number
    raise AssertionError("a conversion has no end")
