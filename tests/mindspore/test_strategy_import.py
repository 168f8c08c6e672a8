"""What MindSpore saved on each rank becomes a checkpoint of ours, as its own `unified_safetensors` makes it whole."""

from __future__ import annotations

import json
import math
import shutil
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap
from safetensors.numpy import load_file, save_file

import dcp_mindspore
from dcp_core.errors import (
    ArgumentError,
    CorruptError,
    CoverageError,
    DTypeMismatchError,
    NotFoundError,
    ShapeMismatchError,
    UnsupportedValueError,
)
from dcp_mindspore.strategy_files import read_strategy
from dcp_mindspore.strategy_import import import_checkpoint
from tests.mindspore.test_describers import mindspore_slice

WHOLE: dict[str, Any] = {
    "fc.weight": np.arange(32, dtype=np.float32).reshape(8, 4),
    "moment1.fc.weight": np.arange(32, dtype=np.float32).reshape(8, 4) + 100,
    "grid": np.arange(32, dtype=np.int32).reshape(8, 4),
    "global_step": np.array([7], dtype=np.int32),
}
CUTS: dict[str, list[int]] = {"fc.weight": [0, -1], "moment1.fc.weight": [0, -1], "grid": [1, 0], "global_step": [-1]}


def entry(name: str, matrix: list[int], **more: Any) -> dict[str, Any]:
    cut = CUTS[name]
    parts = [1 if axis == -1 else matrix[len(matrix) - 1 - axis] for axis in cut]
    shape = [size // part for size, part in zip(WHOLE[name].shape, parts, strict=True)]
    none = {"field": 0, "opt_weight_shard_step": 0, "opt_weight_shard_size": 0}
    return {"dev_matrix": matrix, "tensor_map": cut, "param_split_shape": shape, **none, **more}


def write_strategy(path: Path, **entries: Any) -> Path:
    """A strategy file as MindSpore writes it: JSON, or protobuf."""
    if path.suffix == ".json":
        items = {"parallel_strategy_item": {"op": {"stage": 0}}, "parallel_layout_item": entries}
        path.write_text(json.dumps({"current_stage": 0, **items}))
        return path
    strategy = ParallelStrategyMap(current_stage=0)
    for name, values in entries.items():
        item = strategy.parallel_layout_item.add()
        item.param_name = name
        layout = item.parallel_layouts
        for field in ("dev_matrix", "param_split_shape"):
            getattr(layout, field).add().dim.extend(values[field])
        rows = values["tensor_map"] if isinstance(values["tensor_map"][0], list) else [values["tensor_map"]]
        for row in rows:
            layout.tensor_map.add().dim.extend(row)
        for field in ("field", "opt_weight_shard_step", "opt_weight_shard_size"):
            setattr(layout, field, values[field])
    path.write_bytes(strategy.SerializeToString())
    return path


def write_ranks(source: Path, matrix: list[int], parts: int = 1, names: Any = tuple(WHOLE)) -> None:
    """What each rank of the job saved, cut by MindSpore's own slicer."""
    for rank in range(math.prod(matrix)):
        directory = source / f"rank_{rank}"
        directory.mkdir(parents=True)
        saved = []
        for name in names:
            local = mindspore_slice(WHOLE[name], matrix, CUTS[name], rank)
            if parts > 1 and local.ndim == 2:
                local = np.split(local, parts)[rank // 2 % parts]
            saved.append({"name": name, "data": Tensor(np.ascontiguousarray(local))})
        mindspore.save_checkpoint(saved, str(directory / f"checkpoint_{rank}.safetensors"), format="safetensors")


@pytest.mark.parametrize("kind", [".json", ".ckpt"])
def test_the_import_holds_what_unified_safetensors_gives(tmp_path: Path, kind: str) -> None:
    write_ranks(tmp_path / "source", [2, 2])
    strategy = write_strategy(tmp_path / f"strategy{kind}", **{name: entry(name, [2, 2]) for name in WHOLE})
    import_checkpoint(tmp_path / "source", strategy=strategy, checkpoint_id=tmp_path / "imported")
    mindspore.unified_safetensors(str(tmp_path / "source"), str(strategy), str(tmp_path / "unified"), max_process_num=1)
    unified: dict[str, Any] = {}
    for file in (tmp_path / "unified").glob("*.safetensors"):
        unified |= load_file(str(file))
    assert unified.keys() == WHOLE.keys()
    for name, expected in WHOLE.items():
        assert np.array_equal(unified[name].reshape(expected.shape), expected)
        assert np.array_equal(dcp_mindspore.read(tmp_path / "imported", name), expected), name


def test_the_import_is_loaded_into_a_network_and_its_layouts(tmp_path: Path) -> None:
    write_ranks(tmp_path / "source", [2, 2])
    layouts = {name: entry(name, [2, 2]) for name in WHOLE}
    import_checkpoint(
        tmp_path / "source", strategy=layouts, checkpoint_id=tmp_path / "imported", rename="model.{}".format
    )
    net = nn.SequentialCell(OrderedDict(fc=nn.Dense(4, 8, has_bias=False)))
    dcp_mindspore.load({"model": net}, checkpoint_id=tmp_path / "imported")
    assert np.array_equal(net.fc.weight.asnumpy(), WHOLE["fc.weight"])


def test_the_cut_of_a_parallel_optimizer_is_put_together(tmp_path: Path) -> None:
    names = ("fc.weight", "moment1.fc.weight")
    write_ranks(tmp_path / "source", [2, 2], parts=2, names=names)
    cut = {"opt_weight_shard_step": 2, "opt_weight_shard_size": 2}
    strategy = write_strategy(tmp_path / "s.json", **{name: entry(name, [2, 2], **cut) for name in names})
    import_checkpoint(tmp_path / "source", strategy=strategy, checkpoint_id=tmp_path / "imported")
    for name in names:
        assert np.array_equal(dcp_mindspore.read(tmp_path / "imported", name), WHOLE[name])


def test_each_stage_of_a_pipeline_has_layouts_of_its_own(tmp_path: Path) -> None:
    for rank in range(4):
        directory = tmp_path / "source" / f"rank_{rank}"
        directory.mkdir(parents=True)
        whole, name = (WHOLE["fc.weight"], "fc.weight") if rank < 2 else (WHOLE["grid"], "grid")
        local = np.ascontiguousarray(np.split(whole, 2, axis=rank // 2)[rank % 2])
        save_file({name: local, "shared": np.arange(3)}, str(directory / "net.safetensors"))
    layouts = {
        "0-fc.weight": {"dev_matrix": [2], "tensor_map": [0, -1]},
        "1-grid": {"dev_matrix": [2], "tensor_map": [-1, 0]},
    }
    import_checkpoint(tmp_path / "source", strategy=layouts, checkpoint_id=tmp_path / "imported")
    for name in ("fc.weight", "grid"):
        assert np.array_equal(dcp_mindspore.read(tmp_path / "imported", name), WHOLE[name])
    assert np.array_equal(dcp_mindspore.read(tmp_path / "imported", "shared"), np.arange(3))


def test_every_dtype_that_mindspore_saves_keeps_its_bits(tmp_path: Path) -> None:
    (tmp_path / "source" / "rank_0").mkdir(parents=True)
    bits = np.arange(256, dtype=np.uint16) * 257
    kinds = ("bool_", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64")
    tensors = {kind: Tensor(np.arange(6) % 2, getattr(mindspore, kind)) for kind in kinds}
    tensors |= {"bfloat16": Tensor.from_numpy(bits).view(mindspore.bfloat16), "scalar": Tensor(3, mindspore.int64)}
    saved = [{"name": name, "data": tensor} for name, tensor in tensors.items()]
    mindspore.save_checkpoint(saved, str(tmp_path / "source/rank_0/net.safetensors"), format="safetensors")
    import_checkpoint(tmp_path / "source", checkpoint_id=tmp_path / "imported")
    for name, tensor in tensors.items():
        found = dcp_mindspore.read(tmp_path / "imported", name)
        expected = bits if name == "bfloat16" else tensor.asnumpy()
        assert found.dtype == expected.dtype and np.array_equal(found, expected), name


def test_a_strategy_is_read_the_same_from_json_and_from_protobuf(tmp_path: Path) -> None:
    entries = {name: entry(name, [2, 2]) for name in WHOLE}
    found = [read_strategy(write_strategy(tmp_path / f"s{kind}", **entries)) for kind in (".json", ".ckpt")]
    for name, values in entries.items():
        assert all(strategy[name]["tensor_map"] == values["tensor_map"] for strategy in found)
        assert all(strategy[name]["dev_matrix"] == values["dev_matrix"] for strategy in found)
    nested = entry("fc.weight", [2, 2]) | {"tensor_map": [[1, 0], [-1]]}
    assert read_strategy(write_strategy(tmp_path / "n.ckpt", w=nested))["w"]["tensor_map"] == [[1, 0], [-1]]


def replace_file(source: Path, rank: int, **arrays: Any) -> None:
    save_file(arrays, str(source / f"rank_{rank}" / f"checkpoint_{rank}.safetensors"))


def drop_ranks(source: Path, ranks: Iterable[int]) -> None:
    for rank in ranks:
        shutil.rmtree(source / f"rank_{rank}")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            lambda source: replace_file(source, 3, grid=np.zeros((3, 2), np.int32)),
            ShapeMismatchError,
            "'grid' of rank 3",
        ),
        (lambda source: replace_file(source, 3, grid=np.zeros((4, 2))), DTypeMismatchError, "float64.*int32 on rank 0"),
        (lambda source: replace_file(source, 3, step=np.zeros(1)), CoverageError, "grid"),
        (lambda source: replace_file(source, 3, grid=np.zeros(4, np.int32)), UnsupportedValueError, "'grid' of rank 3"),
        (lambda source: drop_ranks(source, [2]), NotFoundError, r"no directory of the ranks \[2\]"),
        (lambda source: (source / "rank_1" / "checkpoint_1.safetensors").unlink(), NotFoundError, "rank_1.*no file"),
        (lambda source: (source / "rank_1" / "another.safetensors").touch(), ArgumentError, "file_suffix"),
        (
            lambda source: (source / "rank_1" / "checkpoint_1.safetensors").write_bytes(b"x" * 99),
            CorruptError,
            "header",
        ),
        (lambda source: drop_ranks(source, range(4)), NotFoundError, "holds no directory rank_0"),
    ],
)
def test_what_cannot_be_imported_says_why_and_writes_nothing(
    tmp_path: Path, damage: Any, error: type[Exception], message: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "imported"
    write_ranks(source, [2, 2])
    damage(source)
    with pytest.raises(error, match=message):
        import_checkpoint(source, strategy={name: entry(name, [2, 2]) for name in WHOLE}, checkpoint_id=target)
    assert not (target / ".metadata").exists()


def test_one_of_several_files_is_picked_by_the_end_of_its_name(tmp_path: Path) -> None:
    directory = tmp_path / "source" / "rank_0"
    directory.mkdir(parents=True)
    for step in (100, 200):
        save_file({"w": np.full(3, step)}, str(directory / f"net-1_{step}.safetensors"))
    import_checkpoint(tmp_path / "source", file_suffix="-1_200", checkpoint_id=tmp_path / "imported")
    assert (dcp_mindspore.read(tmp_path / "imported", "w") == 200).all()


def test_strategy_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no strategy file"):
        read_strategy(tmp_path / "missing.ckpt")
    for name in ("broken.json", "broken.ckpt"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(CorruptError, match="is no strategy file"):
            read_strategy(tmp_path / name)
