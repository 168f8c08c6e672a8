"""Wrong arguments of the functions of `dcp_torch` are errors of ours, whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

import dcp_torch
from dcp_core.errors import ArgumentError, MissingKeysError
from dcp_torch import offline_transform
from tests.core.wrong_arguments import Arguments, foreign_errors, names_argument

pytestmark = [pytest.mark.timeout(90), pytest.mark.filterwarnings("ignore")]


def state() -> dict[str, Any]:
    return {"w": torch.zeros(4, 2), "n": 3}


def own(**more: Any) -> Arguments:
    return lambda: {"durable": False, "progress": False, **more}


CALLS: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "save": (dcp_torch.save, lambda: {"state_dict": state(), "checkpoint_id": "saved", "durable": False}),
    "load": (dcp_torch.load, lambda: {"state_dict": state(), "checkpoint_id": "good"}),
    "latest_checkpoint": (dcp_torch.latest_checkpoint, lambda: {"root": "."}),
    "survey_checkpoints": (dcp_torch.survey_checkpoints, lambda: {"root": "."}),
    "CheckpointManager": (dcp_torch.CheckpointManager, lambda: {"root": "runs"}),
    "annotate_shard": (
        dcp_torch.annotate_shard,
        lambda: {"tensor": torch.zeros(2), "offsets": (0,), "global_shape": (4,)},
    ),
    "describe_parts": (dcp_torch.describe_parts, lambda: {"parts": [(torch.zeros(2), (0,))], "global_shape": (4,)}),
    "split_flat": (
        dcp_torch.split_flat,
        lambda: {"buffer": torch.zeros(4), "start": 0, "shapes": {"a": (2,)}, "begins": {"a": 0}},
    ),
    "TorchDCPReader": (dcp_torch.TorchDCPReader, lambda: {"path": "foreign"}),
    "from huggingface": (offline_transform.convert_full_checkpoint_to_dcp, own(src="hf", dst="from_hf")),
    "from torch": (
        offline_transform.convert_full_checkpoint_to_dcp,
        own(src="full.pt", dst="from_torch", src_platform="torch"),
    ),
    "from torch DCP": (offline_transform.convert_torch_dcp_to_dcp, own(src="foreign", dst="from_foreign")),
    "from a state": (offline_transform.full_state_dict_to_dcp_format, lambda: own(state_dict=state(), dst="full")()),
    "to a state": (offline_transform.dcp_to_full_state_dict, lambda: {"src": "good", "progress": False}),
    "hf to a state": (offline_transform.parse_checkpoint_from_huggingface, lambda: {"path": "hf", "progress": False}),
    "state to hf": (
        offline_transform.save_state_dict_as_huggingface_format,
        lambda: own(dir="to_hf", state_dict={"w": torch.zeros(2)})(),
    ),
    "to hf": (offline_transform.convert_dcp_to_huggingface, own(src="good", dst="hf_too")),
    "load_full_checkpoint": (offline_transform.load_full_checkpoint, lambda: {"path": "full.pt"}),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    dcp_torch.save(state(), checkpoint_id="good", durable=False)
    torch.save(state(), "full.pt")
    offline_transform.save_state_dict_as_huggingface_format("hf", {"w": torch.zeros(2)}, progress=False)
    state_dict_saver.save({"w": torch.zeros(2)}, checkpoint_id="foreign", no_dist=True)
    return tmp_path


@pytest.mark.parametrize("name", CALLS)
def test_nonsense_in_any_argument_is_an_error_of_ours_or_none(here: Path, name: str) -> None:
    function, good = CALLS[name]
    function(**good())
    assert list(foreign_errors(function, good, ("progress",))) == []


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("split_flat", "shapes", 3),
        ("split_flat", "shapes", [(2,)]),
        ("split_flat", "shapes", {1: (2,)}),
        ("split_flat", "begins", [0]),
        ("split_flat", "start", "x"),
        ("describe_parts", "parts", 3),
        ("describe_parts", "dtype", "float32"),
        ("describe_parts", "global_shape", 3),
        ("describe_parts", "replica_ranks", 3),
        ("to hf", "prefix", 3),
        ("to hf", "cuts", 3),
        ("to hf", "dtype", ["float32"]),
    ],
)
def test_the_error_names_the_argument_and_what_was_found(here: Path, name: str, argument: str, value: object) -> None:
    function, good = CALLS[name]
    assert names_argument(function, good, argument, value)


@pytest.mark.parametrize(("shape", "found"), [(3, "3"), ("ab", "'ab'"), ([1.5], "1.5"), (None, "None"), ((-1,), "-1")])
def test_a_shape_of_a_flat_buffer_that_is_none_is_named_with_its_tensor(shape: Any, found: str) -> None:
    with pytest.raises(ArgumentError, match="the shape of w must") as raised:
        dcp_torch.split_flat(torch.zeros(4), start=0, shapes={"w": shape})
    assert found in str(raised.value)


def test_a_number_is_no_file_to_read_a_state_from(here: Path) -> None:
    with open("full.pt", "rb") as file, pytest.raises(ArgumentError, match="path or a URL"):
        offline_transform.load_full_checkpoint(file.fileno())  # type: ignore[arg-type]  # Python would read it


def test_a_prefix_that_lacks_its_dot_is_named_with_the_remedy(tmp_path: Path) -> None:
    weights = {"layers.0.weight": torch.ones(2), "norm": torch.ones(3)}
    offline_transform.save_state_dict_as_huggingface_format(tmp_path / "hf", weights, progress=False)
    norm = torch.zeros(3)
    target = {"model": {"layers": [{"weight": torch.zeros(2)}], "norm": norm}}
    reader = dcp_torch.HuggingFaceReader(tmp_path / "hf", key_map="model")
    with pytest.raises(MissingKeysError, match=r"lack the dot after 'model'.*pass key_map='model\.'"):
        dcp_torch.load(target, storage_reader=reader)
    offline_transform.convert_full_checkpoint_to_dcp(
        tmp_path / "hf", tmp_path / "converted", key_map="model", progress=False
    )
    with pytest.raises(MissingKeysError, match=r"pass key_map='model\.'"):
        dcp_torch.load(target, checkpoint_id=tmp_path / "converted")
    dcp_torch.load(target, storage_reader=dcp_torch.HuggingFaceReader(tmp_path / "hf", key_map="model."))
    assert norm.tolist() == [1, 1, 1]


def test_another_missing_key_is_no_matter_of_dots(tmp_path: Path) -> None:
    dcp_torch.save({"ab": torch.ones(2), "c": {"d": torch.ones(2)}}, checkpoint_id=tmp_path / "c")
    for missing in ({"a": {"b": torch.ones(2), "x": torch.ones(2)}}, {"cd": torch.ones(2)}):
        with pytest.raises(MissingKeysError) as raised:
            dcp_torch.load(missing, checkpoint_id=tmp_path / "c")
        assert "the dot" not in str(raised.value)
