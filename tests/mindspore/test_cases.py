"""Layouts, memory and values that broke other checkpoint libraries, on MindSpore ranks: the rows of `test_twins`."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
import pytest
from mindspore import Parameter, Tensor, nn

import dcp_mindspore as dcp
from dcp_core.box import Box, slices
from dcp_core.dtype import BY_NAME
from dcp_core.metadata import TensorStorageMetadata
from dcp_mindspore.elements import memory_of, tensor_of_bits
from tests.background_processes import check_none_left, mark
from tests.core.rank_jobs import error_of
from tests.mindspore.laid_out import DTensor
from tests.mindspore.ms_ranks import MindSporeRank, run_mindspore

pytestmark = pytest.mark.timeout(120)

SECONDS = 30.0
Array = npt.NDArray[Any]


def values(shape: tuple[int, ...], seed: int = 0, name: str = "float32") -> Array:
    """Random bits, NaNs of all kinds among them; the same in every process."""
    dtype = BY_NAME[name]
    raw = np.random.default_rng([seed, math.prod(shape)]).integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return (raw % 2 if name == "bool" else raw).view(dtype.bits).reshape(shape)


def shard(whole: Array, box: Box, *, empty: bool = False, name: str = "float32") -> Any:
    """A rank's part of a tensor, annotated."""
    part = np.ascontiguousarray(whole[slices(box)])
    tensor = tensor_of_bits(np.zeros_like(part) if empty else part, BY_NAME[name])
    return dcp.annotate_shard(tensor, offsets=box.offsets, global_shape=whole.shape)


def chunked(size: int, parts: int, part: int) -> tuple[int, int]:
    """Where a part starts and how long it is, as `torch.chunk` cuts."""
    step = -(-size // parts)
    start = min(part * step, size)
    return start, min(step, size - start)


def cut(shape: tuple[int, ...], dim: int, rank: MindSporeRank) -> Box:
    start, length = chunked(shape[dim], rank.world_size, rank.rank)
    offsets = [0] * len(shape)
    sizes = [*shape]
    offsets[dim], sizes[dim] = start, length
    return Box(tuple(offsets), tuple(sizes))


def bits_of(tensor: Any) -> bytes:
    found: bytes = memory_of(tensor).view.tobytes()
    return found


def check_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        assert bits_of(state[key]) == bits_of(tensor), key


def save(state: Any, path: str, **options: Any) -> dcp.Metadata:
    return dcp.save(state, checkpoint_id=path, timeout_seconds=SECONDS, durable=False, **options)


def load(state: Any, path: str, **options: Any) -> None:
    dcp.load(state, checkpoint_id=path, timeout_seconds=SECONDS, **options)


# -- uneven and empty shards ------------------------------------------------------------------------------------------

UNEVEN = {"five": ((5, 3), 0), "inner": ((3, 5), 1), "one": ((1, 4), 0), "thin": ((4, 1), 1), "none": ((0, 4), 0),
          "flat": ((11,), 0), "hollow": ((2, 0, 3), 0)}  # fmt: skip


def uneven(rank: MindSporeRank, *, empty: bool = False) -> dict[str, Any]:
    return {
        name: shard(values(shape, at), cut(shape, dim, rank), empty=empty)
        for at, (name, (shape, dim)) in enumerate(UNEVEN.items())
    }


def save_uneven(rank: MindSporeRank, path: str) -> dict[str, int]:
    metadata = save(uneven(rank), path).state_dict_metadata
    found = {}
    for name in UNEVEN:
        entry = metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        found[name] = len(entry.chunks)
    return found


def load_uneven(rank: MindSporeRank, path: str) -> None:
    state = uneven(rank, empty=True)
    load(state, path)
    check_same(state, uneven(rank))


def test_dimensions_shorter_than_the_number_of_ranks_save_and_load_anywhere(tmp_path: Path) -> None:
    counts = run_mindspore(save_uneven, 8, str(tmp_path))
    assert counts == [{"five": 5, "inner": 5, "one": 1, "thin": 1, "none": 0, "flat": 6, "hollow": 0}] * 8
    for world_size in (1, 3, 8):
        run_mindspore(load_uneven, world_size, str(tmp_path))


def zero_d(value: float) -> dict[str, Any]:
    return {
        "plain": Tensor(value, mindspore.float32),
        "parameter": Parameter(Tensor(value, mindspore.bfloat16), name="p"),
        "annotated": dcp.annotate_shard(Tensor(value, mindspore.float64), offsets=(), global_shape=()),
        "count": Tensor(int(value), mindspore.int64),
        "flag": Tensor(value > 0),
    }


def keep_zero_d(rank: MindSporeRank, path: str) -> None:
    save(zero_d(5.0), path)
    state = zero_d(0.0)
    load(state, path)
    check_same(state, zero_d(5.0))
    swapped = {"plain": Tensor(0.0, mindspore.float64), "annotated": Tensor(0.0, mindspore.float32)}
    load(swapped, path)
    assert [float(tensor.asnumpy()) for tensor in swapped.values()] == [5.0, 5.0]


def test_tensors_without_dimensions_keep_their_value(tmp_path: Path) -> None:
    run_mindspore(keep_zero_d, 2, str(tmp_path))
    assert dcp.read(tmp_path, "annotated") == 5.0


# -- flat and several boxes -------------------------------------------------------------------------------------------

FLAT = (7, 6)


def save_flat(rank: MindSporeRank, path: str) -> None:
    start, stop = [(0, 11), (11, 11), (11, 30), (30, 42)][rank.rank]
    part = Tensor.from_numpy(values(FLAT).reshape(-1)[start:stop].view(np.float32).copy())
    save({"t": dcp.annotate_shard(part, offsets=[start], global_shape=FLAT)}, path)


def load_cut(rank: MindSporeRank, path: str, dim: int) -> None:
    state = {"t": shard(values(FLAT), cut(FLAT, dim, rank), empty=True)}
    load(state, path)
    check_same(state, {"t": shard(values(FLAT), cut(FLAT, dim, rank))})


def test_ranges_of_a_flat_tensor_load_into_rows_and_into_columns(tmp_path: Path) -> None:
    run_mindspore(save_flat, 4, str(tmp_path))
    for dim in (0, 1):
        run_mindspore(load_cut, 3, str(tmp_path), dim)


# -- ranks that contradict each other ---------------------------------------------------------------------------------


def differing_shape(rank: MindSporeRank) -> dict[str, Any]:
    return {"t": Tensor(np.zeros((4 + (rank.rank == 2), 2), np.float32)), "u": Tensor([0.0])}


def differing_dtype(rank: MindSporeRank) -> dict[str, Any]:
    return {"t": Tensor([0.0, 1.0], mindspore.float32 if rank.rank < 2 else mindspore.bfloat16)}


def with_a_hole(rank: MindSporeRank) -> dict[str, Any]:
    return {"t": shard(values((8, 3)), Box(((0, 2, 6)[rank.rank], 0), (2, 3)))}


def with_an_overlap(rank: MindSporeRank) -> dict[str, Any]:
    return {"t": shard(values((8, 3)), Box(((0, 2, 5)[rank.rank], 0), (3, 3)))}


def tensor_or_value(rank: MindSporeRank) -> dict[str, Any]:
    return {"t": 5 if rank.rank == 1 else Tensor([0.0, 0.0])}


def partial_on_one(rank: MindSporeRank) -> dict[str, Any]:
    layout = SimpleNamespace(mesh_shape=(3,), tensor_map=(-1,), rank_list=(0, 1, 2), partial=["sum"])
    return {"w": Tensor([0.0])} | ({"t": DTensor(Tensor([1.0]), layout, (1,))} if rank.rank == 1 else {})


def save_fails(rank: MindSporeRank, state: Callable[[MindSporeRank], Any], path: str) -> tuple[str, str]:
    kind, text = error_of(dcp.save, state(rank), checkpoint_id=path, timeout_seconds=SECONDS)
    return kind.__name__, text


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        (differing_shape, "ShapeMismatchError", ("'t'", "(4, 2)", "(5, 2)", "rank 2")),
        (differing_dtype, "DTypeMismatchError", ("'t'", "float32", "bfloat16", "rank 2")),
        (with_a_hole, "CoverageError", ("'t'", "(4, 0)")),
        (with_an_overlap, "OverlapError", ("'t'", "overlap", "rank 0", "rank 1")),
        (tensor_or_value, "PlanningError", ("'t'", "rank 1")),
        (partial_on_one, "UnsupportedValueError", ("'t'", "rank 1", "artial")),
    ],
)
def test_ranks_that_disagree_are_one_error_on_all_before_anything_is_written(
    tmp_path: Path, state: Any, kind: str, words: tuple[str, ...]
) -> None:
    found = run_mindspore(save_fails, 3, state, str(tmp_path))
    assert found == [found[0]] * 3 and found[0][0] == kind, found
    assert all(word in found[0][1] for word in words), found[0][1]
    assert not list(tmp_path.iterdir())


def differing_arguments(rank: MindSporeRank, path: str) -> list[tuple[str, str]]:
    odd, state = rank.rank == 1, {"t": Tensor([0.0])}
    save(state, f"{path}/good")
    options: list[tuple[Any, dict[str, Any]]] = [
        (dcp.save, {"checkpoint_id": f"{path}/{int(odd)}"}),
        (dcp.save, {"checkpoint_id": path, "durable": odd}),
        (dcp.save, {"checkpoint_id": None if odd else path}),
        (dcp.load, {"checkpoint_id": f"{path}/good", "verify": "full" if odd else True}),
        (dcp.load, {"checkpoint_id": f"{path}/good", "broadcast_batch_bytes": 100 + odd}),
    ]
    found = [error_of(call, state, timeout_seconds=SECONDS, **given) for call, given in options]
    return [(kind.__name__, text) for kind, text in found]


def test_arguments_that_differ_between_ranks_are_an_error_on_all(tmp_path: Path) -> None:
    for of_ranks in zip(*run_mindspore(differing_arguments, 3, str(tmp_path)), strict=True):
        assert of_ranks[0] == of_ranks[1] == of_ranks[2]
        assert of_ranks[0][0] in ("ArgumentsDifferError", "ArgumentError") and "rank 1" in of_ranks[0][1]


# -- ranks that hold different things ---------------------------------------------------------------------------------


def pipeline(rank: MindSporeRank, *, empty: bool = False) -> dict[str, Any]:
    """Four stages of two ranks; the first and the last share a tensor; the second has nothing replicated."""
    stage, place = divmod(rank.rank, 2)
    state = {f"layer.{stage}.w": shard(values((4, 6), stage), Box((place * 2, 0), (2, 6)), empty=empty)}
    whole = {} if stage == 1 else {f"layer.{stage}.norm": values((5,), 20 + stage)}
    if stage in (0, 3):
        whole["tied"] = values((64, 512), 9)
    if stage == 1:
        whole[f"own.{place}"] = values((3,), 30 + place)
    return state | {key: shard(array, Box.whole(array.shape), empty=empty) for key, array in whole.items()}


def save_pipeline(rank: MindSporeRank, path: str) -> None:
    save(pipeline(rank), path)


def load_pipeline(rank: MindSporeRank, path: str) -> None:
    state = pipeline(rank, empty=True)
    load(state, path)
    check_same(state, pipeline(rank))


def test_a_parameter_tied_between_pipeline_stages_is_written_once(tmp_path: Path) -> None:
    run_mindspore(save_pipeline, 8, str(tmp_path))
    stored = 0
    for file in tmp_path.glob("_rank*.safetensors"):
        content = file.read_bytes()
        stored += len(content) - 8 - int.from_bytes(content[:8], "little")
    assert stored == 64 * 512 * 4 + 4 * (4 * 6 * 4) + 3 * (5 * 4) + 2 * (3 * 4)
    run_mindspore(load_pipeline, 8, str(tmp_path))


def on_some(rank: MindSporeRank, *, empty: bool = False) -> dict[str, Any]:
    """DTensors over ranks 1 and 3; rank 0 has nothing at all."""
    if rank.rank == 0:
        return {}
    layout = SimpleNamespace(mesh_shape=(2,), tensor_map=(0, -1), rank_list=(3, 1))
    rows = values((4, 2))[[2, 3] if rank.rank == 1 else [0, 1]]
    return {"rows": DTensor(Tensor.from_numpy((rows * 0 if empty else rows).view(np.float32)), layout, (4, 2))}


def keep_on_some(rank: MindSporeRank, path: str) -> None:
    save(on_some(rank), path)
    state = on_some(rank, empty=True)
    load(state, path)
    if rank.rank in (1, 3):
        assert bits_of(state["rows"].to_local()) == bits_of(on_some(rank)["rows"].to_local())
    save({}, f"{path}/nothing")
    load({}, f"{path}/nothing")


def test_layouts_over_some_ranks_and_ranks_with_nothing(tmp_path: Path) -> None:
    run_mindspore(keep_on_some, 4, str(tmp_path))
    assert dcp.read(tmp_path, "rows").tobytes() == values((4, 2)).tobytes()


# -- memory that is not laid out row by row ---------------------------------------------------------------------------


def test_memory_of_any_strides_is_saved_and_filled_by_its_logical_values(tmp_path: Path) -> None:
    for name in ("float32", "bfloat16", "int16", "float8_e5m2", "bool", "complex64"):
        base, dtype = values((6, 8), 1, name), BY_NAME[name]
        parts: list[Callable[[Any], Any]] = [
            lambda whole: whole.T,
            lambda whole: whole[:, 3:7],
            lambda whole: whole[1:5],
            lambda whole: whole.reshape((2, 3, 8)).transpose((2, 0, 1)),
        ]
        state = {str(at): part(tensor_of_bits(base, dtype)) for at, part in enumerate(parts)}
        plain = {str(at): tensor_of_bits(part(base), dtype) for at, part in enumerate(parts)}
        save(state, str(tmp_path / "odd"))
        found = {key: tensor_of_bits(np.zeros_like(memory_of(tensor).view), dtype) for key, tensor in plain.items()}
        load(found, str(tmp_path / "odd"))
        check_same(found, plain)
        save(plain, str(tmp_path / "plain"))
        around = tensor_of_bits(np.zeros_like(base), dtype)
        target = {"1": around[:, 3:7]}
        load(target, str(tmp_path / "plain"))
        expected = np.zeros_like(base)
        expected[:, 3:7] = base[:, 3:7]
        assert bits_of(around) == expected.tobytes(), name


def test_an_expanded_tensor_is_saved_whole_and_refused_as_a_target(tmp_path: Path) -> None:
    row = Tensor([[1.0], [2.0]])
    save({"t": row.expand((2, 3))}, str(tmp_path))
    assert dcp.read(tmp_path, "t").tolist() == [[1.0] * 3, [2.0] * 3]
    target = Tensor([[7.0], [7.0]])
    with pytest.raises(dcp.UnsupportedValueError, match=r"'t'.*share memory"):
        load({"t": target.expand((2, 3))}, str(tmp_path))
    assert (target.asnumpy() == 7).all()


# -- state ------------------------------------------------------------------------------------------------------------

KEYS: dict[Any, Any] = {
    "dots.and/slashes": {"a b": 1, "ü": 2, "": 3},
    "__metadata__": 4,
    7: 5,
    "7": 6,
    "a": {"b": 7},
    "a.b": 8,
    "long" * 100: 9,
}


def numbered(node: Any, factor: float) -> Any:
    if isinstance(node, dict):
        return {key: numbered(value, factor) for key, value in node.items()}
    return Parameter(Tensor([node * factor]), name="same")


def test_keys_of_any_kind_and_names_that_collide_are_told_apart(tmp_path: Path) -> None:
    """All the parameters have one name, as those of networks that know nothing of each other."""
    save(numbered(KEYS, 1.0), str(tmp_path))
    state = numbered(KEYS, 0.0)
    load(state, str(tmp_path))

    def check(found: Any, node: Any) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                check(found[key], value)
            else:
                assert found[key].asnumpy().tolist() == [value], key

    check(state, KEYS)


def keep_random_state(rank: MindSporeRank, path: str) -> bool:
    mindspore.manual_seed(100 + rank.rank)
    mine = mindspore.get_rng_state().asnumpy().copy()
    save({"rng": mindspore.get_rng_state(), "explicit": dcp.PerRank(mindspore.get_rng_state())}, path)
    mindspore.manual_seed(5)
    state: dict[str, Any] = {"rng": mindspore.get_rng_state(), "explicit": dcp.PerRank(mindspore.get_rng_state())}
    load(state, path)
    mindspore.set_rng_state(state["rng"])
    assert (mindspore.get_rng_state().asnumpy() == mine).all()
    return bool((state["explicit"].value.asnumpy() == mine).all())


def test_every_rank_gets_its_own_random_state_back(tmp_path: Path) -> None:
    assert run_mindspore(keep_random_state, 2, str(tmp_path)) == [True, True]


def stage_state(rank: MindSporeRank, factor: float) -> dict[str, Any]:
    """Each stage has other layers, and parameter groups in another number."""
    layers = [nn.Dense(3, 2 + rank.rank) for _ in range(1 + rank.rank)]
    net = nn.CellList(layers)
    net.update_parameters_name(f"stage{rank.rank}.")
    groups = [{"params": layer.trainable_params(), "lr": 0.1 * factor * (at + 1)} for at, layer in enumerate(layers)]
    optimizer = mindspore.mint.optim.Adam(groups)
    for parameter in (*net.get_parameters(), *optimizer.get_parameters()):
        if parameter.dtype == mindspore.float32 and parameter.shape:
            parameter.asnumpy()[...] = factor
    return {f"stage{rank.rank}": {"model": net, "optimizer": optimizer}}


def keep_stages(rank: MindSporeRank, path: str) -> list[float]:
    save(stage_state(rank, 3.0), path)
    state = stage_state(rank, 1.0)
    load(state, path)
    own = state[f"stage{rank.rank}"]
    assert all((parameter.asnumpy() == 3).all() for parameter in own["model"].get_parameters())
    return [round(float(group["lr"].asnumpy()), 4) for group in own["optimizer"].param_groups]


def test_parameter_groups_may_differ_between_pipeline_stages(tmp_path: Path) -> None:
    assert run_mindspore(keep_stages, 2, str(tmp_path)) == [[0.3], [0.3, 0.6]]


def test_dtypes_are_converted_where_nothing_surprises_and_refused_elsewhere(tmp_path: Path) -> None:
    numbers = Tensor([1.5, -2.25, 1e30])
    save({"t": numbers, "half": numbers.bfloat16(), "n": Tensor([1, 2, 3], mindspore.int32)}, str(tmp_path))
    target = {"t": Tensor(np.zeros(3), mindspore.bfloat16), "half": Tensor(np.zeros(3), mindspore.float32)}
    load(target, str(tmp_path))
    assert bits_of(target["t"]) == bits_of(numbers.bfloat16())
    assert bits_of(target["half"]) == bits_of(numbers.bfloat16().float())
    wrong = {"t": Tensor([7, 7, 7], mindspore.int32)}
    with pytest.raises(dcp.DTypeMismatchError, match=r"'t'.*int32"):
        load(wrong, str(tmp_path))
    assert wrong["t"].asnumpy().tolist() == [7, 7, 7]
    exact = {"t": Tensor(np.zeros(3), mindspore.bfloat16)}
    with pytest.raises(dcp.DTypeMismatchError, match="bfloat16"):
        load(exact, str(tmp_path), planner=dcp.StandardLoadPlanner(cast="exact"))


def test_a_tensor_where_the_checkpoint_has_a_value_and_the_other_way_round(tmp_path: Path) -> None:
    save({"t": Tensor([1.0]), "n": 3}, str(tmp_path))
    for state in ({"t": 5, "n": 3}, {"t": Tensor([0.0]), "n": Tensor([0.0])}):
        kind, text = error_of(load, state, str(tmp_path))
        assert issubclass(kind, dcp.PlanningError) and ("'t'" in text or "'n'" in text)


# -- the script ends ---------------------------------------------------------------------------------------------------

SCRIPT = """
import mindspore, dcp_mindspore
net = mindspore.nn.Dense(300, 500)
net.weight.asnumpy()[...] = 7
dcp_mindspore.async_save({"model": net}, checkpoint_id=PATH)
net.weight.asnumpy()[...] = 8
"""


@pytest.mark.slow
def test_a_script_that_ends_right_after_async_save_leaves_a_checkpoint(tmp_path: Path) -> None:
    """It has no main guard, and the path has spaces and umlauts."""
    mark()
    target = tmp_path / "mit Umlaut ü"
    (tmp_path / "script.py").write_text(SCRIPT.replace("PATH", repr(str(target))))
    ran = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    check_none_left()
    assert (dcp.read(target, "model.weight") == 7).all()
