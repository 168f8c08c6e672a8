"""The attack files for checkpoints of torch DCP against every way in; see `tests/core/test_attacks.py`."""

from __future__ import annotations

import contextlib
import pickle

import pytest

from dcp_core.dtype import BY_NAME
from dcp_core.errors import CorruptError, DcpError
from dcp_torch.torch_dcp_metadata import describe
from tests.attacks.bases import torch_base
from tests.attacks.manifest import read_folder
from tests.core.fault_jobs import memory_directory
from tests.core.test_attacks import check, run

pytestmark = pytest.mark.timeout(600)


def test_every_attack_on_a_checkpoint_of_torch_dcp_is_refused_by_every_way_in_and_does_no_harm() -> None:
    expected = sum(attack.base == "torch" for attack in read_folder())
    with memory_directory() as place:
        check(run("torch", place), expected)


def test_a_description_cannot_change_what_types_and_functions_mean() -> None:
    types = {name: repr(dtype) for name, dtype in BY_NAME.items()}
    for attack in read_folder():
        if attack.base == "torch" and ".metadata" in attack.files:
            with contextlib.suppress(DcpError):
                describe(attack.files[".metadata"], ".metadata")
    assert types == {name: repr(dtype) for name, dtype in BY_NAME.items()}
    assert describe(torch_base()[".metadata"], ".metadata").tensors[0].dtype is BY_NAME["float32"]


def test_a_pickle_whose_memo_has_holes_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(CorruptError, match="memo 67108864 comes after 0 others"):
        describe(b"\x80\x02Nr\x00\x00\x00\x04.", ".metadata")


def test_large_descriptions_that_the_standard_pickler_writes_pass() -> None:
    blob = pickle.dumps({"a": [(row, str(row), {"x": (row,) * 3}) for row in range(10_000)]}, 4)
    with pytest.raises(CorruptError, match="not the description"):
        describe(blob, ".metadata")
