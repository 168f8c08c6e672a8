"""A network and its optimizer under one set of layouts, loaded under another: MindSpore's own slicer is the oracle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.parallel import Layout
from mindspore.parallel._tensor import _load_tensor

import dcp_mindspore as dcp
from dcp_core.errors import ArgumentError, UnsupportedValueError
from tests.mindspore.laid_out import DTensor
from tests.mindspore.ms_ranks import MindSporeRank, run_mindspore

pytestmark = pytest.mark.timeout(120)

Array = npt.NDArray[Any]
Cut = tuple[tuple[int, ...], dict[str, tuple[int, ...]]]

SHAPES = {"up.weight": (16, 8), "up.bias": (16,), "down.weight": (8, 16), "down.bias": (8,)}
TP2_DP2: Cut = ((2, 2), {"up.weight": (0, -1), "up.bias": (0,), "down.weight": (-1, 0), "down.bias": (-1,)})
TP4: Cut = ((4,), {"up.weight": (0, -1), "up.bias": (0,), "down.weight": (-1, 0), "down.bias": (-1,)})
DP2: Cut = ((2,), {"up.weight": (-1, -1), "up.bias": (-1,), "down.weight": (-1, -1), "down.bias": (-1,)})
ZERO4: Cut = ((2, 2), {"up.weight": (1, 0), "up.bias": (1,), "down.weight": (0, 1), "down.bias": (0,)})
ALONE: Cut = ((1,), {name: (-1,) * len(shape) for name, shape in SHAPES.items()})

FORMS = ("layouts", "dicts", "tuples", "triples", "by rank")


def whole(name: str, kind: str = "") -> Array:
    """The values of a whole parameter, or of what an optimizer keeps for it; the same in every process."""
    shape, seed = SHAPES[name], [*SHAPES].index(name) + 10 * len(kind)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sliced(array: Array, cut: Cut, name: str, rank: int) -> Array:
    """MindSpore's own slicer."""
    found: Array = _load_tensor(Tensor(array), list(cut[0]), list(cut[1][name]), None, rank)
    return np.ascontiguousarray(found)


def layouts_in(form: str, cut: Cut, rank: int) -> Any:
    """The layouts of a cut, in one of the forms that MindSpore hands around."""
    matrix, maps = cut
    axes = ("dp", "tp")[-len(matrix) :]
    called = {
        name: Layout(matrix, axes)(*("None" if axis < 0 else axes[len(axes) - 1 - axis] for axis in tensor_map))
        for name, tensor_map in maps.items()
    }
    if form == "layouts":
        return called
    if form == "dicts":
        return {name: layout.to_dict() for name, layout in called.items()}
    if form == "tuples":
        return {
            name: (list(matrix), list(tensor_map), [], 0, True, "", list(SHAPES[name]))
            for name, tensor_map in maps.items()
        }
    triples = {name: [layout, "Float32", list(SHAPES[name])] for name, layout in called.items()}
    return triples if form == "triples" else dict.fromkeys(range(math.prod(matrix)), triples)


class Block(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """What a rank holds of a network of two layers, under a cut."""

    def __init__(self, cut: Cut, rank: int, *, filled: bool) -> None:
        super().__init__()
        rows, columns = sliced(whole("up.weight"), cut, "up.weight", rank).shape
        self.up = nn.Dense(columns, rows)
        rows, columns = sliced(whole("down.weight"), cut, "down.weight", rank).shape
        self.down = nn.Dense(columns, rows)
        if filled:
            fill(self.parameters_dict(), cut, rank)


def fill(parameters: Mapping[str, Any], cut: Cut, rank: int) -> None:
    for key, parameter in parameters.items():
        kind, name = kind_and_name(key)
        if name in SHAPES:
            parameter.asnumpy()[...] = sliced(whole(name, kind), cut, name, rank)


def kind_and_name(key: str) -> tuple[str, str]:
    kind, _, name = key.partition(".")
    return (kind, name) if name in SHAPES else ("", key)


def state_of(cut: Cut, rank: int, *, filled: bool) -> dict[str, Any]:
    net = Block(cut, rank, filled=filled)
    optimizer = nn.Adam(net.trainable_params(), learning_rate=0.5 if filled else 0.1)
    if filled:
        fill(optimizer.parameters_dict(), cut, rank)
        optimizer.global_step.asnumpy()[...] = 7
    return {"model": net, "optimizer": optimizer, "step": 7 if filled else 0}


def save_under(rank: MindSporeRank, path: str, cut: Cut, form: str) -> None:
    dcp.save(state_of(cut, rank.rank, filled=True), checkpoint_id=path, layouts=layouts_in(form, cut, rank.rank))


def load_under(rank: MindSporeRank, path: str, cut: Cut, form: str) -> None:
    state = state_of(cut, rank.rank, filled=False)
    parameters = state["optimizer"].parameters_dict()
    objects = {name: (id(parameter), parameter.data_ptr()) for name, parameter in parameters.items()}
    dcp.load(state, checkpoint_id=path, layouts=layouts_in(form, cut, rank.rank))
    compared = 0
    for key, parameter in state["optimizer"].parameters_dict().items():
        assert objects[key] == (id(parameter), parameter.data_ptr()), f"{key} lies elsewhere now"
        kind, name = kind_and_name(key)
        if name in SHAPES:
            assert np.array_equal(parameter.asnumpy(), sliced(whole(name, kind), cut, name, rank.rank)), key
            compared += 1
    assert compared == 3 * len(SHAPES)  # the parameters, moment1, moment2
    assert state["step"] == 7 and state["optimizer"].global_step.asnumpy().tolist() == [7]
    assert state["optimizer"].learning_rate.asnumpy() == np.float32(0.5)
    assert state["model"].up.weight is state["optimizer"].parameters[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step_7"
    run_mindspore(save_under, 4, str(path), TP2_DP2, "layouts")
    return path


@pytest.mark.parametrize(
    ("world_size", "cut"),
    [(4, TP4), (1, ALONE), (2, DP2), (4, ZERO4), (4, TP2_DP2)],
    ids=["TP4", "alone", "DP2", "both dimensions", "the same"],
)
def test_tp2_x_dp2_is_loaded_under_any_other_layout_in_place(saved: Path, world_size: int, cut: Cut) -> None:
    run_mindspore(load_under, world_size, str(saved), cut, "layouts", start="store" if world_size > 1 else "alone")


def test_the_checkpoint_holds_whole_tensors_once(saved: Path) -> None:
    for name in SHAPES:
        assert np.array_equal(dcp.read(saved, f"model.{name}"), whole(name))
        assert np.array_equal(dcp.read(saved, f"optimizer.{name}"), whole(name))
        for kind in ("moment1", "moment2"):
            assert np.array_equal(dcp.read(saved, f"optimizer.{kind}.{name}"), whole(name, kind))
    elements = 3 * sum(math.prod(shape) for shape in SHAPES.values()) * 4
    stored = sum(file.stat().st_size for file in saved.glob("*.safetensors"))
    assert elements < stored < elements + 40_000, "the optimizer's copies of the parameters are stored as well"


@pytest.mark.parametrize("form", FORMS)
def test_layouts_of_every_form_save_and_load_the_same(tmp_path: Path, form: str) -> None:
    run_mindspore(save_under, 4, str(tmp_path / "saved"), TP2_DP2, form)
    for name in SHAPES:
        assert np.array_equal(dcp.read(tmp_path / "saved", f"optimizer.moment1.{name}"), whole(name, "moment1"))
    run_mindspore(load_under, 4, str(tmp_path / "saved"), TP4, form)


# -- DTensor, annotate_shard, dicts of parameters -------------------------------------------------------------------


def dtensors(cut: Cut, rank: int, *, filled: bool, interleaved: bool = False) -> dict[str, Any]:
    """Parameters of DTensors, with layouts as HyperParallel has them."""
    found = {}
    for name, tensor_map in cut[1].items():
        ranks = tuple(range(math.prod(cut[0])))
        layout = {"mesh_shape": cut[0], "tensor_map": tensor_map, "rank_list": ranks}
        local = sliced(whole(name), cut, name, rank)
        value = DTensor(Tensor(local if filled else np.zeros_like(local)), layout, SHAPES[name])
        found[name] = Parameter(value, name=name)
    return found


def save_dtensors(rank: MindSporeRank, path: str, cut: Cut) -> None:
    dcp.save({"model": dtensors(cut, rank.rank, filled=True)}, checkpoint_id=path)


def load_dtensors(rank: MindSporeRank, path: str, cut: Cut) -> None:
    state = {"model": dtensors(cut, rank.rank, filled=False)}
    dcp.load(state, checkpoint_id=path)
    for name, parameter in state["model"].items():
        assert np.array_equal(parameter.to_local().asnumpy(), sliced(whole(name), cut, name, rank.rank)), name


def test_dtensors_are_resharded_without_being_told_layouts(tmp_path: Path) -> None:
    run_mindspore(save_dtensors, 4, str(tmp_path / "saved"), TP2_DP2)
    run_mindspore(load_dtensors, 2, str(tmp_path / "saved"), DP2)
    run_mindspore(load_dtensors, 4, str(tmp_path / "saved"), TP4)


def save_annotated(rank: MindSporeRank, path: str) -> None:
    """Rows of a parameter by hand; what the optimizer keeps for it is not annotated."""
    rows = whole("up.weight")[rank.rank * 4 : rank.rank * 4 + 4]
    parameter = dcp.annotate_shard(
        Parameter(Tensor(rows), name="up.weight"), offsets=(rank.rank * 4, 0), global_shape=(16, 8)
    )
    optimizer = nn.Momentum([parameter], 0.1, 0.9)
    optimizer.moments[0].asnumpy()[...] = rows * 2
    dcp.save({"weight": parameter, "optimizer": optimizer}, checkpoint_id=path)


def test_what_an_optimizer_keeps_for_an_annotated_shard_is_cut_like_it(tmp_path: Path) -> None:
    run_mindspore(save_annotated, 4, str(tmp_path / "saved"))
    assert np.array_equal(dcp.read(tmp_path / "saved", "weight"), whole("up.weight"))
    assert np.array_equal(dcp.read(tmp_path / "saved", "optimizer.moments.up.weight"), whole("up.weight") * 2)


def save_dicts(rank: MindSporeRank, path: str) -> None:
    """No Cell in the state: dicts of plain tensors under the parameters' names."""
    plain = {name: Tensor(sliced(whole(name), TP4, name, rank.rank)) for name in SHAPES}
    kept = {f"moment1.{name}": Tensor(sliced(whole(name, "moment1"), TP4, name, rank.rank)) for name in SHAPES}
    state = {"model": plain, "optimizer": kept | {"beta1_power": Tensor(0.5)}}
    dcp.save(state, checkpoint_id=path, layouts=layouts_in("layouts", TP4, rank.rank))


def test_layouts_reach_tensors_in_plain_dicts_by_the_ends_of_their_keys(tmp_path: Path) -> None:
    run_mindspore(save_dicts, 4, str(tmp_path / "saved"))
    for name in SHAPES:
        assert np.array_equal(dcp.read(tmp_path / "saved", f"model.{name}"), whole(name))
        assert np.array_equal(dcp.read(tmp_path / "saved", f"optimizer.moment1.{name}"), whole(name, "moment1"))
    assert dcp.read(tmp_path / "saved", "optimizer.beta1_power").shape == ()


def save_optimizer_parallel(rank: MindSporeRank, path: str) -> None:
    """The rows of each shard are cut once more between the two ranks that would hold the same."""
    source = ([2, 2], [0, -1], [4, 8], 0, True, "2-5004544844489628105", [16, 8])
    local = np.split(sliced(whole("up.weight"), TP2_DP2, "up.weight", rank.rank), 2)[rank.rank // 2]
    state = {"w": Parameter(Tensor(np.ascontiguousarray(local)), name="up.weight")}
    dcp.save(state, checkpoint_id=path, layouts={"up.weight": source})


def test_the_cut_of_a_parallel_optimizer_is_saved_as_one_tensor(tmp_path: Path) -> None:
    run_mindspore(save_optimizer_parallel, 4, str(tmp_path / "saved"))
    assert np.array_equal(dcp.read(tmp_path / "saved", "w"), whole("up.weight"))


def save_interleaved(rank: MindSporeRank, path: str) -> None:
    layout = Layout((2, 2), ("tp", "interleaved_parallel"))(("interleaved_parallel", "tp"), "None")
    pieces = [whole("up.weight")[start : start + 4] for start in (rank.rank * 4, 8 + rank.rank * 4)]
    state = {"w": Tensor(np.concatenate(pieces))}
    dcp.save(state, checkpoint_id=path, layouts={"w": layout})
    target = {"w": Tensor(np.zeros((8, 8), np.float32))}
    dcp.load(target, checkpoint_id=path, layouts={"w": layout})
    assert np.array_equal(target["w"].asnumpy(), state["w"].asnumpy())


def test_interleaved_layouts_are_several_boxes(tmp_path: Path) -> None:
    run_mindspore(save_interleaved, 2, str(tmp_path / "saved"))
    assert np.array_equal(dcp.read(tmp_path / "saved", "w"), whole("up.weight"))


# -- what cannot be ------------------------------------------------------------------------------------------------


def fail_to_save(rank: MindSporeRank, path: str, layouts: Any) -> tuple[str, str]:
    state = {"w": Parameter(Tensor(np.zeros((4, 8), np.float32)), name="weight"), "n": 3}
    own = layouts if rank.rank == 1 else {"w": ([2], [0, -1], [], 0, True, "", [8, 8])}
    try:
        dcp.save(state, checkpoint_id=path, layouts=own)
    except (ArgumentError, UnsupportedValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("layouts", "kind", "message"),
    [
        ({"w": ([2], [0, -1], [], 0, True, "", [16, 8])}, "UnsupportedValueError", "found one of shape (4, 8)"),
        ({"w": {"device_matrix": (2,)}}, "UnsupportedValueError", "layouts['w']: the layout"),
        ({"w": ([2], [0])}, "ArgumentError", "2 values are no layout"),
        ({"weights": ([2], [0, -1], [], 0, True, "", [8, 8])}, "ArgumentError", "names 'weights', and no tensor"),
        (["w"], "ArgumentError", "must map names"),
        ({0: {"w": 1}, 2: {}}, "ArgumentError", "not for rank 1"),
    ],
)
def test_layouts_that_do_not_fit_on_one_rank_are_the_same_error_on_all(
    tmp_path: Path, layouts: Any, kind: str, message: str
) -> None:
    found = run_mindspore(fail_to_save, 2, str(tmp_path / "saved"), layouts)
    assert found[0][0] == found[1][0] == kind
    assert message in found[0][1] and message in found[1][1]
    assert not (tmp_path / "saved" / ".metadata").exists()


def keep_another_shape(rank: MindSporeRank, path: str) -> str:
    parameter = dcp.annotate_shard(
        Parameter(Tensor(np.zeros((4, 8), np.float32)), name="w"), offsets=(rank.rank * 4, 0), global_shape=(8, 8)
    )
    optimizer = nn.Momentum([parameter], 0.1, 0.9)
    optimizer.rows = Parameter(Tensor(np.zeros(4, np.float32)), name="rows.w")
    try:
        dcp.save({"w": parameter, "optimizer": optimizer}, checkpoint_id=path)
    except UnsupportedValueError as error:
        return str(error)
    return ""


def test_what_an_optimizer_keeps_in_another_shape_needs_a_layout_of_its_own(tmp_path: Path) -> None:
    found = run_mindspore(keep_another_shape, 2, str(tmp_path / "saved"))
    assert all("'optimizer.rows'" in text and "give it a layout of its own" in text for text in found), found
