"""Training goes on from a checkpoint as if it had never stopped; Cells keep their parameters and their memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn
from mindspore.nn.utils import no_init_parameters

import dcp_mindspore as dcp
from dcp_core.errors import MissingKeysError, ShapeMismatchError, UnsupportedValueError

pytestmark = pytest.mark.timeout(120)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda parameters: nn.Adam(parameters, learning_rate=1e-2),
    "Momentum": lambda parameters: nn.Momentum(parameters, 0.05, 0.9),
    "AdamWeightDecay": lambda parameters: nn.AdamWeightDecay(parameters, learning_rate=1e-2),
    "SGD": lambda parameters: nn.SGD(parameters, learning_rate=0.05, momentum=0.9),
    "Adam of mint": lambda parameters: mint.optim.Adam(parameters, lr=1e-2),
    "a schedule": lambda parameters: nn.Adam(parameters, learning_rate=nn.ExponentialDecayLR(1e-2, 0.5, 2)),
    "groups": lambda parameters: nn.Adam(
        [{"params": parameters[:2], "lr": 1e-2}, {"params": parameters[2:], "lr": 5e-3}], learning_rate=1e-3
    ),
}


class Net(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU()
        self.second = nn.Dense(16, 4)
        self.register_buffer("scale", Tensor(np.ones(4, np.float32)))

    def construct(self, rows: Any) -> Any:
        return self.second(self.act(self.norm(self.first(rows)))) * self.scale


class Run:
    """A network in training."""

    def __init__(self, seed: int, optimizer: str) -> None:
        mindspore.set_seed(seed)
        self.net = Net().set_train()
        self.optimizer = OPTIMIZERS[optimizer](self.net.trainable_params())
        loss = nn.MSELoss()
        self._gradients = mindspore.value_and_grad(
            lambda rows, wanted: loss(self.net(rows), wanted), None, self.optimizer.parameters
        )

    def step(self, number: int) -> float:
        random = np.random.default_rng(number)
        rows, wanted = (Tensor(random.standard_normal((32, width)).astype(np.float32)) for width in (8, 4))
        loss, gradients = self._gradients(rows, wanted)
        self.optimizer(gradients)
        return float(loss.asnumpy())

    def state(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_with_bit_identical_losses_in_the_same_memory(tmp_path: Path, name: str) -> None:
    run = Run(0, name)
    for number in range(4):
        run.step(number)
    run.net.scale.asnumpy()[...] = 0.5
    dcp.save({**run.state(), "step": 4}, checkpoint_id=tmp_path / "step_4")
    expected = [run.step(number) for number in range(4, 8)]

    again = Run(1, name)
    again.step(0)
    held = {**again.net.state_dict(), **again.optimizer.state_dict()}
    memory = {key: tensor.data_ptr() for key, tensor in held.items()}
    state = {**again.state(), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "step_4")
    assert [again.step(number) for number in range(state["step"], 8)] == expected
    now = {**again.net.state_dict(), **again.optimizer.state_dict()}
    assert all(now[key] is tensor for key, tensor in held.items())
    assert {key: tensor.data_ptr() for key, tensor in held.items()} == memory
    assert (again.net.scale.asnumpy() == 0.5).all()


def test_training_in_the_background_resumes_with_bit_identical_losses(tmp_path: Path) -> None:
    run = Run(0, "Adam")
    run.step(0)
    response = dcp.async_save(run.state(), checkpoint_id=tmp_path / "step_1")
    expected = [run.step(number) for number in range(1, 4)]
    response.get_result(60)
    again = Run(1, "Adam")
    dcp.load(again.state(), checkpoint_id=tmp_path / "step_1")
    assert [again.step(number) for number in range(1, 4)] == expected


@pytest.mark.parametrize("name", ["Adam", "Adam of mint", "SGD"])
def test_an_optimizer_that_has_made_no_step_is_saved_and_loaded(tmp_path: Path, name: str) -> None:
    """MindSpore's optimizers make their state at once, so nothing is there to be warmed up."""
    run = Run(0, name)
    dcp.save(run.state(), checkpoint_id=tmp_path / "fresh")
    expected = [run.step(number) for number in range(3)]
    dcp.save(run.state(), checkpoint_id=tmp_path / "trained")
    expected_more = [run.step(number) for number in range(3, 6)]
    trained, fresh = Run(1, name), Run(2, name)
    trained.step(0)
    dcp.load(trained.state(), checkpoint_id=tmp_path / "fresh")
    assert [trained.step(number) for number in range(3)] == expected
    dcp.load(fresh.state(), checkpoint_id=tmp_path / "trained")
    assert [fresh.step(number) for number in range(3, 6)] == expected_more


def test_dicts_of_parameters_do_as_well_as_cells(tmp_path: Path) -> None:
    run = Run(0, "Momentum")
    run.step(0)
    dcp.save(run.state(), checkpoint_id=tmp_path / "cells")
    dcp.save(
        {"model": run.net.state_dict(), "optimizer": run.optimizer.parameters_dict()}, checkpoint_id=tmp_path / "dicts"
    )
    expected = [run.step(number) for number in range(1, 4)]
    for saved in ("cells", "dicts"):
        for loaded in ("cells", "dicts"):
            again = Run(1, "Momentum")
            state = again.state()
            if loaded == "dicts":
                state = {"model": again.net.state_dict(), "optimizer": again.optimizer.parameters_dict()}
            dcp.load(state, checkpoint_id=tmp_path / saved)
            assert [again.step(number) for number in range(1, 4)] == expected, (saved, loaded)


def test_hyper_parameters_of_groups_come_back(tmp_path: Path) -> None:
    run, again = Run(0, "Adam of mint"), Run(1, "Adam of mint")
    run.optimizer.param_groups[0].update(weight_decay=0.25, betas=(0.5, 0.75))
    run.optimizer.param_groups[0]["lr"].set_data(Tensor(0.125))
    dcp.save(run.state(), checkpoint_id=tmp_path / "saved")
    rate = again.optimizer.param_groups[0]["lr"]
    dcp.load(again.state(), checkpoint_id=tmp_path / "saved")
    group = again.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"], float(group["lr"].asnumpy())) == (0.25, (0.5, 0.75), 0.125)
    assert group["lr"] is rate and list(again.optimizer.parameters) == again.net.trainable_params()


def test_what_is_kept_in_groups_alone_is_saved(tmp_path: Path) -> None:
    parameters = Run(0, "Adam").net.trainable_params()
    optimizer = mint.optim.Adam(parameters, amsgrad=True)
    kept = [entry for group in optimizer.param_groups for entry in group["max_exp_avg_sq"]]
    assert len(kept) == len(parameters)
    for number, parameter in enumerate(kept):
        parameter.asnumpy()[...] = number + 1
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "saved")
    for parameter in kept:
        parameter.asnumpy()[...] = 0
    dcp.load({"optimizer": optimizer}, checkpoint_id=tmp_path / "saved")
    assert [float(parameter.asnumpy().max()) for parameter in kept] == [1.0 + number for number in range(len(kept))]


# -- Cells ---------------------------------------------------------------------------------------------------------


class Counting(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """A Cell with state that is no tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.inner = nn.Dense(2, 2)

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_extra_state_of_cells_and_of_cells_in_them_comes_back(tmp_path: Path) -> None:
    outer = nn.CellList([Counting(3), Counting(4)])
    dcp.save({"model": outer, "alone": Counting(5)}, checkpoint_id=tmp_path / "saved")
    again, alone = nn.CellList([Counting(0), Counting(0)]), Counting(0)
    weight, place = again[0].inner.weight, again[0].inner.weight.data_ptr()
    dcp.load({"model": again, "alone": alone}, checkpoint_id=tmp_path / "saved")
    assert [cell.count for cell in (*again, alone)] == [3, 4, 5]
    assert again[0].inner.weight is weight and weight.data_ptr() == place
    assert np.array_equal(weight.asnumpy(), outer[0].inner.weight.asnumpy())


def test_cells_that_take_part_in_loading_are_asked(tmp_path: Path) -> None:
    dcp.save({"model": nn.Dense(2, 2)}, checkpoint_id=tmp_path / "saved")
    calls: list[str] = []
    hooked = nn.Dense(2, 2)
    hooked.register_load_state_dict_post_hook(lambda cell, keys: calls.append("hook"))
    dcp.load({"model": hooked}, checkpoint_id=tmp_path / "saved")

    class Own(nn.Dense):  # type: ignore[misc]  # MindSpore has no types
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
            calls.append("own")
            return super().load_state_dict(state_dict, strict)

    dcp.load({"model": Own(2, 2)}, checkpoint_id=tmp_path / "saved")
    assert calls == ["hook", "own"]


def test_parameters_whose_initialisation_was_put_off_are_saved_and_loaded(tmp_path: Path) -> None:
    with no_init_parameters():
        net = nn.Dense(4, 3)
    dcp.save({"model": net}, checkpoint_id=tmp_path / "saved")
    assert np.array_equal(dcp.read(tmp_path / "saved", "model.weight"), net.weight.asnumpy())
    with no_init_parameters():
        again = nn.Dense(4, 3)
    weight = again.weight
    dcp.load({"model": again}, checkpoint_id=tmp_path / "saved")
    again.init_parameters_data()  # what training does first; it must not undo the load
    assert again.weight is weight
    assert np.array_equal(again.weight.asnumpy(), net.weight.asnumpy())


def test_the_random_state_comes_back(tmp_path: Path) -> None:
    mindspore.manual_seed(11)
    saved = mindspore.get_rng_state().asnumpy().copy()
    dcp.save({"rng": mindspore.get_rng_state(), "numpy": np.random.get_state()}, checkpoint_id=tmp_path / "saved")
    drawn = np.random.rand(3)
    mindspore.manual_seed(12)
    np.random.seed(5)
    state = {"rng": mindspore.get_rng_state(), "numpy": np.random.get_state()}
    assert not np.array_equal(state["rng"].asnumpy(), saved)
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    mindspore.set_rng_state(state["rng"])
    np.random.set_state(state["numpy"])
    assert np.array_equal(mindspore.get_rng_state().asnumpy(), saved)
    assert np.array_equal(np.random.rand(3), drawn)


def test_a_loss_scaler_is_saved_by_its_parameters(tmp_path: Path) -> None:
    scaler, again = (mindspore.amp.DynamicLossScaler(scale, 2, 1000) for scale in (4096, 1))
    scaler.counter.set_data(Tensor(5, mindspore.int32))
    dcp.save({"scale": scaler.scale_value, "counter": scaler.counter}, checkpoint_id=tmp_path / "saved")
    dcp.load({"scale": again.scale_value, "counter": again.counter}, checkpoint_id=tmp_path / "saved")
    assert (float(again.scale_value.asnumpy()), int(again.counter.asnumpy())) == (4096.0, 5)


def test_load_train_save_load_gives_the_new_values(tmp_path: Path) -> None:
    run = Run(0, "Momentum")
    dcp.save(run.state(), checkpoint_id=tmp_path / "first")
    dcp.load(run.state(), checkpoint_id=tmp_path / "first")
    run.step(0)
    trained = run.net.first.weight.asnumpy().copy()
    dcp.save(run.state(), checkpoint_id=tmp_path / "second")
    for directory, is_new in (("first", False), ("second", True)):
        dcp.load(run.state(), checkpoint_id=tmp_path / directory)
        assert np.array_equal(run.net.first.weight.asnumpy(), trained) is is_new


# -- what does not fit ---------------------------------------------------------------------------------------------


def test_shapes_are_checked_before_anything_is_overwritten(tmp_path: Path) -> None:
    """MindSpore itself takes another shape, and puts new memory in the place of the old."""
    dcp.save({"model": nn.Dense(4, 3)}, checkpoint_id=tmp_path / "saved")
    for wrong in (nn.Dense(3, 4), nn.Dense(4, 5)):
        before = wrong.weight.asnumpy().copy()
        with pytest.raises(ShapeMismatchError, match=r"model\.weight|model\.bias"):
            dcp.load({"model": wrong}, checkpoint_id=tmp_path / "saved")
        assert np.array_equal(wrong.weight.asnumpy(), before)


def test_missing_keys_are_all_named_and_keys_of_the_checkpoint_alone_are_ignored(tmp_path: Path) -> None:
    dcp.save({"model": nn.Dense(4, 3, has_bias=False), "more": 3}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(MissingKeysError, match=r"model\.bias"):
        dcp.load({"model": nn.Dense(4, 3)}, checkpoint_id=tmp_path / "saved")
    dcp.load({"model": nn.Dense(4, 3, has_bias=False)}, checkpoint_id=tmp_path / "saved")


def test_groups_in_another_number_are_refused(tmp_path: Path) -> None:
    parameters = Run(0, "Adam").net.trainable_params()
    one = mint.optim.Adam(parameters)
    two = mint.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:]}])
    dcp.save({"optimizer": one}, checkpoint_id=tmp_path / "one")
    with pytest.raises(MissingKeysError, match=r"param_groups\.1"):
        dcp.load({"optimizer": two}, checkpoint_id=tmp_path / "one")


def test_a_tensor_of_an_unknown_kind_inside_a_state_is_named_by_its_key(tmp_path: Path) -> None:
    class Strange(Tensor):  # type: ignore[misc]  # MindSpore has no types
        pass

    with pytest.raises(UnsupportedValueError, match=r"'deep\.0\.odd'"):
        dcp.save({"deep": [{"odd": Strange(np.zeros(3))}]}, checkpoint_id=tmp_path / "saved")
    parameter = Parameter(Tensor(np.zeros(3, np.float32)), name="p")
    dcp.save({"deep": [{"fine": parameter}], "same": parameter}, checkpoint_id=tmp_path / "saved")
    assert dcp.read(tmp_path / "saved", "same").shape == (3,)
