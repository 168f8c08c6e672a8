"""Element types, keys, values, optimizers and targets that broke other checkpoint libraries, on real ranks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_torch
from dcp_core.dtype import DTYPES
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.states import (
    LogLines,
    assert_same,
    bits_of,
    local_of,
    poison,
    raised,
    same_on_all,
    shard,
    values,
    whole,
)


def world_mesh(rank: TorchRank) -> DeviceMesh:
    return init_device_mesh(rank.device.type, (rank.world_size,))


# -- autograd -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_backward_over_values_that_a_load_has_replaced_is_an_error(
    tmp_path: Path, dtype: torch.dtype, contiguous: bool
) -> None:
    memory = torch.ones(4, 6, dtype=dtype)
    weight = nn.Parameter(memory if contiguous else memory[:, ::2])
    untouched = nn.Parameter(torch.ones(3, dtype=dtype))
    dcp_torch.save({"weight": weight}, checkpoint_id=tmp_path)
    loss = (weight * weight).sum()
    other = (untouched * untouched).sum()
    dcp_torch.load({"weight": weight}, checkpoint_id=tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]  # torch's has none
    other.backward()  # type: ignore[no-untyped-call]
    (weight * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and weight.is_leaf and weight.requires_grad


def test_a_load_into_tensors_of_inference_mode_works(tmp_path: Path) -> None:
    with torch.inference_mode():
        target = torch.zeros(3)
    dcp_torch.save({"a": torch.arange(3.0)}, checkpoint_id=tmp_path)
    dcp_torch.load({"a": target}, checkpoint_id=tmp_path)
    assert target.tolist() == [0, 1, 2]


# -- element types -------------------------------------------------------------------------------------------------

_STORED = tuple(getattr(torch, dtype.name) for dtype in DTYPES if hasattr(torch, dtype.name))
_PROMISED = (
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


def typed(rank: TorchRank, cut: int) -> dict[str, Tensor]:
    """A tensor of every type; every value of 8 bits, many of more, NaN payloads among them."""
    mesh = world_mesh(rank)
    state: dict[str, Tensor] = {}
    for dtype in _STORED:
        tensor = values((33, 8), dtype, seed=5)
        if dtype.itemsize == 1 and dtype is not torch.bool:
            tensor = torch.arange(264).to(torch.uint8).view(dtype).reshape(33, 8)
        state[str(dtype)] = shard(tensor, mesh, [Shard(cut)]) if str(dtype) != "torch.float4_e2m1fn_x2" else tensor
    return state


def check_typed(rank: TorchRank, directory: Path) -> None:
    dcp_torch.save(typed(rank, 0), checkpoint_id=directory)
    for cut in (0, 1):
        state = typed(rank, cut)
        poison(state)
        dcp_torch.load(state, checkpoint_id=directory, planner=dcp_torch.StandardLoadPlanner(cast="exact"))
        assert_same(state, typed(rank, cut))


def test_every_element_type_comes_back_bit_by_bit(shared_path: Path) -> None:
    assert set(_PROMISED) <= set(_STORED)
    run_gloo(check_typed, 3, shared_path)


def test_nan_payloads_survive_where_no_type_changes(shared_path: Path) -> None:
    payloads = torch.tensor([0x7F800001, 0x7FC12345, -1, 0x7F812345], dtype=torch.int32).view(torch.float32)
    dcp_torch.save({"t": payloads, "column": payloads.reshape(2, 2).t()}, checkpoint_id=shared_path)
    state = {"t": torch.zeros(4), "column": torch.zeros(2, 2)}
    dcp_torch.load(state, checkpoint_id=shared_path)
    assert bits_of(state["t"]) == bits_of(payloads)
    assert bits_of(state["column"].t()) == bits_of(payloads)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_element_types_that_the_format_lacks_are_refused_by_name(shared_path: Path) -> None:
    others = sorted({str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)} - {str(d) for d in _STORED})
    refused = []
    for name in others:
        try:
            tensor = torch.empty(4, dtype=getattr(torch, name.removeprefix("torch.")))
        except RuntimeError:  # torch cannot make one either
            continue
        kind, text = raised(lambda tensor=tensor: dcp_torch.save({"odd": tensor}, checkpoint_id=shared_path))  # type: ignore[misc]  # mypy cannot type it
        assert kind == "UnsupportedValueError", name
        assert "'odd'" in text and (name.removeprefix("torch.") in text or "quantized" in text)
        refused.append(name)
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for tensor in (quantized, torch.eye(3).to_sparse(), torch.ones(2, device="meta")):
        kind, text = raised(lambda tensor=tensor: dcp_torch.save({"odd": tensor}, checkpoint_id=shared_path))  # type: ignore[misc]  # mypy cannot type it
        assert kind == "UnsupportedValueError"
        assert "'odd'" in text
    assert "torch.bits8" in refused
    assert not list(shared_path.iterdir())


# -- keys and values -----------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    WARM_UP = "warm-up"
    DECAY = "decay"


@dataclass
class Progress:
    step: int
    note: str


class Pair(NamedTuple):
    left: Any
    right: Any


def odd_keys(rank: TorchRank, seed: int) -> dict[Any, Any]:
    def tensor(number: int) -> DTensor:
        return shard(values((3, 2), seed=seed + number), world_mesh(rank), [Shard(0)])

    return {
        "dots.in.key": tensor(0),
        "dots": {"in": {"key": tensor(1)}, "in.key": tensor(2)},
        "sl/ash": tensor(3),
        "ünï ço∂é \u2028": tensor(4),
        "": tensor(5),
        "k" * 3000: tensor(6),
        "__metadata__": tensor(7),
        0: tensor(8),
        "0": tensor(9),
        True: {None: tensor(10), 1.5: tensor(11), b"b": tensor(12), (1, "x"): tensor(13)},
        "@0,0": tensor(14),
        "dots.in.key@0,0": tensor(15),
        "../../etc/passwd": tensor(16),
        "$[0]": tensor(17),
        "list": [tensor(18), [tensor(19)], {"0": tensor(20)}],
        "tuple": (tensor(21), (tensor(22), seed)),
        "pair": Pair(tensor(23), {"x": seed}),
    }


def odd_values(seed: int) -> dict[str, Any]:
    """Values that none of the built-in codecs has to be told about."""
    return {
        "none": None,
        "bytes": bytes([seed]) * 3,
        "set": {seed, "a", (1, 2)},
        "frozen": frozenset({seed}),
        "size": torch.Size([seed, 2]),
        "dtype": (torch.bfloat16, torch.int8)[seed % 2],
        "device": torch.device("cpu", seed),
        "big": 1 << (100 + seed),
        "complex": complex(seed, 1),
        "text": "\ud800" * seed,
        "mixed": [1, (seed, {"a"}), "x"],
        "nested": {"empty": {}, "gone": [], "none": ()},
    }


def save_odd(rank: TorchRank, directory: Path) -> None:
    dcp_torch.save({"keys": odd_keys(rank, 50), "values": odd_values(3)}, checkpoint_id=directory)


def load_odd(rank: TorchRank, directory: Path) -> None:
    state = {"keys": odd_keys(rank, 50), "values": {**odd_values(4), "none": 5}}
    poison(state)
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(state["keys"], odd_keys(rank, 50))
    assert state["values"] == odd_values(3)
    assert [type(v) for v in state["values"].values()] == [type(v) for v in odd_values(3).values()]
    assert type(state["keys"]["pair"]) is Pair


def test_keys_and_values_of_all_kinds_come_back_exactly(shared_path: Path) -> None:
    run_gloo(save_odd, 3, shared_path)
    for world_size in (3, 2):
        run_gloo(load_odd, world_size, shared_path)


def own_classes(rank: TorchRank) -> dict[str, Any]:
    return {"t": torch.ones(2), "phase": Phase.DECAY, "progress": Progress(7, "x"), "in": [1, {"deep": Phase.DECAY}]}


def check_own_classes(rank: TorchRank, directory: Path) -> tuple[str, str]:
    dcp_torch.save(own_classes(rank), checkpoint_id=directory)
    state: dict[str, Any] = {"t": torch.zeros(2), "phase": Phase.WARM_UP, "progress": None, "in": [1, {"deep": 0}]}
    found = raised(lambda: dcp_torch.load(state, checkpoint_id=directory))
    assert (state["t"] == 0).all()
    dcp_torch.allow_pickled(Phase, Progress)
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(state, own_classes(rank))
    return found


def test_enums_and_dataclasses_need_their_class_allowed_and_the_error_says_how(shared_path: Path) -> None:
    kind, text = same_on_all(run_gloo(check_own_classes, 2, shared_path))
    assert kind == "UntrustedObjectError"
    assert "allow_pickled(" in text
    assert f"{Phase.__module__}.Phase" in text or f"{Progress.__module__}.Progress" in text


# -- values that differ between ranks ------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    """The generator's state after some draws, and what it would draw next."""
    torch.manual_seed(seed)
    torch.rand(3)
    state = torch.get_rng_state()
    return state, torch.rand(4)


def save_rng(rank: TorchRank, directory: Path, differing_from: int) -> list[str]:
    """Save three times; from the given save on, the generators of the ranks differ."""
    lines = LogLines()
    for number in range(3):
        state, _ = drawn(rank.rank if number >= differing_from else 77)
        dcp_torch.save({"rng": state, "w": torch.ones(3)}, checkpoint_id=directory / f"{number}")
    return lines.with_words("'rng'", "differ")


def load_rng(rank: TorchRank, directory: Path, drawn_by: str) -> list[str]:
    lines = LogLines()
    target = {"rng": torch.zeros_like(torch.get_rng_state())}
    dcp_torch.load(target, checkpoint_id=directory)
    torch.set_rng_state(target["rng"])
    seed = {"own": rank.rank, "lowest": 0, "common": 77}[drawn_by]
    assert torch.equal(torch.rand(4), drawn(seed)[1])
    return lines.lines


@pytest.mark.parametrize("differing_from", [0, 1], ids=["at the first save", "from the second save on"])
def test_random_states_that_differ_are_kept_per_rank_and_warned_about_once(
    differing_from: int, shared_path: Path
) -> None:
    first, *others = run_gloo(save_rng, 3, shared_path, differing_from)
    assert len(first) == 1
    assert all(word in first[0] for word in ("0, 1, 2", "PerRank"))
    assert others == [[], []]
    for number in range(3):
        drawn_by = "own" if number >= differing_from else "common"
        assert run_gloo(load_rng, 3, shared_path / f"{number}", drawn_by) == [[]] * 3
    for lines in run_gloo(load_rng, 2, shared_path / "2", "lowest"):
        assert any("rng" in line and "lowest" in line for line in lines), lines


def per_rank(rank: TorchRank, directory: Path) -> None:
    value = dcp_torch.PerRank({"seed": rank.rank, "rng": drawn(rank.rank)[0]})
    lines = LogLines()
    for number in range(2):
        dcp_torch.save({"own": value, "w": torch.ones(3)}, checkpoint_id=directory / f"{number}")
    assert not lines.lines
    target = {"own": dcp_torch.PerRank(None)}
    dcp_torch.load(target, checkpoint_id=directory / "1")
    assert target["own"].value["seed"] == rank.rank
    assert torch.equal(target["own"].value["rng"], drawn(rank.rank)[0])


def load_per_rank(rank: TorchRank, directory: Path) -> tuple[str, str]:
    return raised(lambda: dcp_torch.load({"own": dcp_torch.PerRank(None)}, checkpoint_id=directory))


def test_a_per_rank_value_comes_back_to_its_rank_and_to_no_other_world_size(shared_path: Path) -> None:
    run_gloo(per_rank, 3, shared_path)
    kind, text = same_on_all(run_gloo(load_per_rank, 2, shared_path / "1"))
    assert kind == "PlanningError"
    assert all(word in text for word in ("'own'", "3 ranks", "2"))


# -- optimizers ----------------------------------------------------------------------------------------------------


def optimizer_of(name: str, module: nn.Module, rate: float) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(module.parameters(), lr=rate, betas=(rate / 2, 0.5), weight_decay=rate / 8)
    return torch.optim.SGD(module.parameters(), lr=rate, momentum=rate, nesterov=True)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
    for number in range(times):
        for parameter in module.parameters():
            parameter.grad = parameter.detach() * 0.5 + number
        optimizer.step()


def check_raw_optimizer(rank: TorchRank, directory: Path, name: str) -> list[tuple[str, str]]:
    """An optimizer's own state dict, with its numbered parameters, as it is."""
    torch.manual_seed(1)
    module = nn.Linear(5, 3)
    fully_shard(module, mesh=world_mesh(rank))
    optimizer = optimizer_of(name, module, 0.25)
    dcp_torch.save({"optim": optimizer.state_dict()}, checkpoint_id=directory / "fresh")
    fresh = optimizer_of(name, module, 1.0).state_dict()
    dcp_torch.load({"optim": fresh}, checkpoint_id=directory / "fresh")
    assert_same(fresh, optimizer.state_dict())

    step(module, optimizer, 2)
    dcp_torch.save({"optim": optimizer.state_dict()}, checkpoint_id=directory / "warm")
    cold = optimizer_of(name, module, 1.0)
    found = raised(lambda: dcp_torch.load({"optim": cold.state_dict()}, checkpoint_id=directory / "warm"))
    step(module, cold, 1)
    target = cold.state_dict()
    poison(target)
    dcp_torch.load({"optim": target}, checkpoint_id=directory / "warm")
    assert_same(target, optimizer.state_dict())
    cold.load_state_dict(target)
    assert cold.param_groups[0]["lr"] == 0.25
    return [found]


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_optimizer_states_fresh_and_warm_come_back_and_an_empty_target_is_told_to_warm_up(
    name: str, shared_path: Path
) -> None:
    kind, text = same_on_all([of_rank[0] for of_rank in run_gloo(check_raw_optimizer, 2, shared_path, name)])
    assert kind == "MissingKeysError"
    assert all(word in text for word in ("'optim.state'", "warm"))


class Stages(nn.Module):
    """Those layers of a model that one pipeline stage has."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(4, 3 + number) for number in numbers})
        for number, layer in zip(numbers, self.layers.values(), strict=True):
            for at, parameter in enumerate(layer.parameters()):
                parameter.data = values(parameter.shape, seed=10 * number + at).nan_to_num(0.5, 1.0, 1.0).clamp(-2, 2)


def stage_optimizer(module: Stages, rates: Mapping[str, float]) -> torch.optim.Optimizer:
    """Each stage has groups of its own: one a layer, with a rate of its own."""
    groups = [{"params": list(layer.parameters()), "lr": rates[name]} for name, layer in module.layers.items()]
    return torch.optim.Adam(groups)


_RATES = {"0": 0.5, "1": 0.25, "2": 0.125}
_OTHER_RATES = dict.fromkeys(_RATES, 9.0)


def optimizer_state(module: Stages, optimizer: torch.optim.Optimizer, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_optimizer_state_dict(module, optimizer, options=options)


def of_stage(rank: TorchRank) -> tuple[int, ...]:
    return ((0, 1), (2,))[rank.rank] if rank.world_size == 2 else (0, 1, 2)


def save_stages(rank: TorchRank, directory: Path) -> None:
    module = Stages(of_stage(rank))
    optimizer = stage_optimizer(module, _RATES)
    step(module, optimizer, 2)
    for flat in (False, True):
        dcp_torch.save({"o": optimizer_state(module, optimizer, flat=flat)}, checkpoint_id=directory / f"flat{flat}")


def load_stages(rank: TorchRank, directory: Path, flat: bool) -> None:
    module, reference = Stages(of_stage(rank)), Stages(of_stage(rank))
    optimizer, expected = stage_optimizer(module, _OTHER_RATES), stage_optimizer(reference, _RATES)
    step(reference, expected, 2)
    state = {"o": optimizer_state(module, optimizer, flat=flat)}
    poison(state)
    dcp_torch.load(state, checkpoint_id=directory / f"flat{flat}")
    assert_same(state["o"], optimizer_state(reference, expected, flat=flat))
    set_optimizer_state_dict(module, optimizer, state["o"], options=StateDictOptions(flatten_optimizer_state_dict=flat))
    assert_same(optimizer.state_dict(), expected.state_dict())


def test_parameter_groups_that_differ_between_pipeline_stages_come_back(shared_path: Path) -> None:
    run_gloo(save_stages, 2, shared_path)
    run_gloo(load_stages, 2, shared_path, False)
    run_gloo(load_stages, 2, shared_path, True)
    run_gloo(load_stages, 1, shared_path, True)


# -- loading in place ----------------------------------------------------------------------------------------------


def train_on(rank: TorchRank, directory: Path) -> None:
    torch.manual_seed(rank.rank)
    module = nn.Linear(5, 3)
    fully_shard(module, mesh=world_mesh(rank))
    state = {"m": module.state_dict(), "step": 1}
    dcp_torch.save(state, checkpoint_id=directory / "1")
    saved = whole(state)
    poison(state)
    before = [(tensor, local_of(tensor).data_ptr()) for tensor in state["m"].values()]  # type: ignore[attr-defined]  # a dict
    dcp_torch.load(state, checkpoint_id=directory / "1")
    after = [(tensor, local_of(tensor).data_ptr()) for tensor in state["m"].values()]  # type: ignore[attr-defined]  # a dict
    assert all(a is b and p == q for (a, p), (b, q) in zip(before, after, strict=True))
    assert_same(whole(state), saved)

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    state["step"] = 2
    changed = whole(state)
    assert not torch.equal(changed["m.weight"], saved["m.weight"])
    dcp_torch.save(state, checkpoint_id=directory / "2")
    for number, expected in ((1, saved), (2, changed)):
        poison(state)
        dcp_torch.load(state, checkpoint_id=directory / f"{number}")
        assert_same(whole(state), expected)


def test_tensors_stay_the_same_objects_and_the_second_checkpoint_has_the_new_values(shared_path: Path) -> None:
    run_gloo(train_on, 2, shared_path)


class WithExtraState(nn.Linear):
    """Its state dict holds an object beside its tensors, as quantized and fp8 layers do."""

    def __init__(self, seed: int) -> None:
        super().__init__(2, 2)
        self.extra: dict[str, Any] = {"scale": torch.full((3,), float(seed)), "seen": seed, "names": ["a", seed]}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def test_extra_state_of_modules_comes_back(shared_path: Path) -> None:
    saved, target = WithExtraState(1), WithExtraState(2)
    dcp_torch.save({"m": saved}, checkpoint_id=shared_path)
    dcp_torch.load({"m": target}, checkpoint_id=shared_path)
    assert_same(target.state_dict(), saved.state_dict())


def test_saves_and_loads_inside_grad_modes_take_parameters_that_require_grad(shared_path: Path) -> None:
    saved = nn.Linear(3, 2)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        target, place = nn.Linear(3, 2), shared_path / mode.__name__
        with mode():
            dcp_torch.save({"w": saved.weight, "b": saved.bias}, checkpoint_id=place)
            dcp_torch.load({"w": target.weight, "b": target.bias}, checkpoint_id=place)
        assert_same(target.state_dict(), saved.state_dict())
        target(torch.ones(1, 3)).sum().backward()
        assert target.weight.grad is not None


# -- targets that do not fit ---------------------------------------------------------------------------------------


def stored(rank: TorchRank) -> dict[str, Any]:
    mesh = world_mesh(rank)
    return {"t": shard(values((4, 8)), mesh, [Shard(0)]), "int": 5, "whole": torch.ones(3), "extra": torch.ones(2)}


def targets(rank: TorchRank) -> dict[str, tuple[dict[str, Any], str, tuple[str, ...]]]:
    """State, kind of the error, words in it; the fault is on one rank only."""
    mesh, odd = world_mesh(rank), rank.rank == 1
    turned = shard(torch.zeros(8, 4), mesh, [Shard(1)])
    fitting = shard(torch.zeros(4, 8), mesh, [Shard(1)])
    ten = {f"missing{number}": torch.zeros(1) for number in range(10)} if odd else {}
    return {
        "one key": ({"t": fitting, "gone": torch.zeros(1)} if odd else {"t": fitting}, "MissingKeysError", ("'gone'",)),
        "ten keys": ({"t": fitting, **ten}, "MissingKeysError", tuple(ten) or ("missing9",)),
        "shape": ({"t": turned}, "ShapeMismatchError", ("'t'", "(4, 8)", "(8, 4)")),
        "tensor for int": ({"t": fitting, "int": torch.zeros(()) if odd else 0}, "PlanningError", ("'int'", "value")),
        "int for tensor": ({"t": fitting, "whole": 3 if odd else torch.zeros(3)}, "PlanningError", ("'whole'", "(3,)")),
        "no tensor": ({"t": fitting, "int": {"a": 1} if odd else 0}, "MissingKeysError", ("'int.a'",)),
    }


def check_targets(rank: TorchRank, directory: Path) -> dict[str, tuple[str, str]]:
    dcp_torch.save(stored(rank), checkpoint_id=directory)
    found = {}
    for name, (state, _, _) in targets(rank).items():
        found[name] = raised(lambda state=state: dcp_torch.load(state, checkpoint_id=directory))  # type: ignore[misc]  # mypy cannot type it
        assert (local_of(state["t"]) == 0).all(), name
    partial = {"gone": torch.full((2,), 3.0), "t": shard(torch.zeros(4, 8), world_mesh(rank), [Shard(1)])}
    planner = dcp_torch.StandardLoadPlanner(allow_partial_load=True)
    dcp_torch.load(partial, checkpoint_id=directory, planner=planner)
    assert_same(partial, {"gone": torch.full((2,), 3.0), "t": shard(values((4, 8)), world_mesh(rank), [Shard(1)])})
    return found


def test_targets_that_do_not_fit_on_one_rank_are_one_error_on_all_and_nothing_is_touched(shared_path: Path) -> None:
    found = run_gloo(check_targets, 2, shared_path)
    for name, (_, kind, words) in run_gloo(targets, 2)[1].items():
        raised_kind, text = same_on_all([of_rank[name] for of_rank in found])
        assert raised_kind == kind, text
        assert all(word in text for word in words), text


# -- other element types in the target -----------------------------------------------------------------------------


def check_casts(rank: TorchRank, directory: Path) -> list[str]:
    mesh = world_mesh(rank)
    numbers = torch.linspace(-3, 70000, 30).reshape(6, 5)
    half = numbers.to(torch.bfloat16)
    dcp_torch.save(
        {
            "a": shard(numbers, mesh, [Shard(0)]),
            "b": shard(numbers, mesh, [Shard(0)]),
            "half": shard(half, mesh, [Shard(0)]),
            "count": torch.arange(5),
        },
        checkpoint_id=directory,
    )
    lines = LogLines()
    lossy = {name: shard(torch.zeros(6, 5, dtype=torch.bfloat16), mesh, [Shard(1)]) for name in ("a", "b")}
    dcp_torch.load(lossy, checkpoint_id=directory)
    for tensor in lossy.values():
        assert_same({"t": tensor}, {"t": shard(half, mesh, [Shard(1)])})
    reported = lines.with_words("loss of precision")
    exact = {"half": shard(torch.zeros(6, 5), mesh, [Replicate()])}
    dcp_torch.load(exact, checkpoint_id=directory)
    assert_same(exact, {"half": shard(half.float(), mesh, [Replicate()])})
    assert lines.with_words("loss of precision") == reported
    return reported


def test_floats_convert_and_lost_precision_is_reported_once(shared_path: Path) -> None:
    of_ranks = run_gloo(check_casts, 2, shared_path)
    assert len(of_ranks[0]) == 1
    for reported in (lines for lines in of_ranks if lines):
        assert all(word in reported[0] for word in ("a: float32 to bfloat16", "b: float32 to bfloat16"))


def check_refused_casts(rank: TorchRank, directory: Path) -> list[tuple[str, str]]:
    mesh = world_mesh(rank)
    dcp_torch.save(
        {"f": shard(torch.arange(6.0), mesh, [Shard(0)]), "i": torch.arange(5), "c": torch.ones(2) * 1j},
        checkpoint_id=directory,
    )
    found: list[tuple[str, str]] = []

    def attempt(name: str, tensor: Tensor, cast: str = "auto") -> None:
        planner = dcp_torch.StandardLoadPlanner(cast=cast)
        found.append(raised(lambda: dcp_torch.load({name: tensor}, checkpoint_id=directory, planner=planner)))

    attempt("f", shard(torch.zeros(6, dtype=torch.int32), mesh, [Shard(0)]))
    attempt("i", torch.zeros(5, dtype=torch.int32))
    attempt("i", torch.zeros(5, dtype=torch.float32))
    attempt("c", torch.zeros(2))
    attempt("f", shard(torch.zeros(6, dtype=torch.float64), mesh, [Shard(0)]), "exact")
    target = shard(torch.zeros(6, dtype=torch.int32), mesh, [Shard(0)])
    dcp_torch.load({"f": target}, checkpoint_id=directory, planner=dcp_torch.StandardLoadPlanner(cast="any"))
    assert_same({"f": target}, {"f": shard(torch.arange(6, dtype=torch.int32), mesh, [Shard(0)])})
    return found


def test_conversions_that_change_more_than_precision_are_refused_unless_asked_for(shared_path: Path) -> None:
    found = list(zip(*run_gloo(check_refused_casts, 2, shared_path), strict=True))
    types = (("float32", "int32"), ("int64", "int32"), ("int64", "float32"), ("complex64", "float32"),
             ("float32", "float64"))  # fmt: skip
    for of_ranks, words in zip(found, types, strict=True):
        kind, text = same_on_all(of_ranks)
        assert kind == "DTypeMismatchError", text
        assert all(word in text for word in words), text
