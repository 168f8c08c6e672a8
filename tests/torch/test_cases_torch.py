"""Layouts and memory that broke other checkpoint libraries, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

import dcp_torch
from dcp_core.metadata import TensorStorageMetadata
from dcp_torch import Metadata
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.states import assert_same, bits_of, poison, raised, same_on_all, shard, tensors, values


def world_mesh(rank: TorchRank) -> DeviceMesh:
    return init_device_mesh(rank.device.type, (rank.world_size,))


def chunk_count(metadata: Metadata, name: str) -> int:
    found = metadata.state_dict_metadata[name]
    assert isinstance(found, TensorStorageMetadata)
    return len(found.chunks)


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("_rank*.safetensors"))


# -- uneven and empty shards ---------------------------------------------------------------------------------------

_UNEVEN = {"five": ((5, 3), 0), "inner": ((3, 5), 1), "one": ((1, 4), 0), "thin": ((4, 1), 1), "none": ((0, 4), 0),
           "flat": ((11,), 0), "hollow": ((2, 0, 3), 0)}  # fmt: skip


def uneven(rank: TorchRank) -> dict[str, Tensor]:
    mesh = world_mesh(rank)
    return {
        name: shard(values(shape, seed=at), mesh, [Shard(dim)])
        for at, (name, (shape, dim)) in enumerate(_UNEVEN.items())
    }


def save_uneven(rank: TorchRank, directory: Path) -> dict[str, int]:
    metadata = dcp_torch.save(uneven(rank), checkpoint_id=directory)
    return {name: chunk_count(metadata, name) for name in _UNEVEN}


def load_uneven(rank: TorchRank, directory: Path) -> None:
    state = uneven(rank)
    poison(state)
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(state, uneven(rank))


def test_dimensions_shorter_than_the_number_of_ranks_save_and_load_anywhere(shared_path: Path) -> None:
    counts = run_gloo(save_uneven, 8, shared_path)
    assert counts == [{"five": 5, "inner": 5, "one": 1, "thin": 1, "none": 0, "flat": 6, "hollow": 0}] * 8
    for world_size in (1, 2, 3, 8):
        run_gloo(load_uneven, world_size, shared_path)


def zero_d(rank: TorchRank, value: float) -> dict[str, Tensor]:
    mesh = world_mesh(rank)
    square = init_device_mesh(rank.device.type, (2, rank.world_size // 2)) if rank.world_size > 1 else mesh
    return {
        "plain": torch.tensor(value),
        "on a mesh": shard(torch.tensor(value), mesh, [Replicate()]),
        "on a square": shard(torch.tensor(value, dtype=torch.bfloat16), square, [Replicate()] * square.ndim),
        "count": torch.tensor(int(value)),
        "flag": torch.tensor(value > 0),
    }


def save_zero_d(rank: TorchRank, directory: Path) -> None:
    dcp_torch.save(zero_d(rank, 5.0), checkpoint_id=directory)


def load_zero_d(rank: TorchRank, directory: Path) -> None:
    state = zero_d(rank, 0.0)
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(state, zero_d(rank, 5.0))
    swapped = {"plain": state["on a mesh"], "on a mesh": state["plain"]}
    poison(swapped)
    dcp_torch.load(swapped, checkpoint_id=directory)
    assert_same(state, zero_d(rank, 5.0))


def test_tensors_without_dimensions_keep_their_value_with_and_without_a_mesh(shared_path: Path) -> None:
    run_gloo(save_zero_d, 4, shared_path)
    for world_size in (4, 1):
        run_gloo(load_zero_d, world_size, shared_path)
    assert dcp_torch.read(shared_path, "on a mesh") == 5.0


# -- several boxes in one rank -------------------------------------------------------------------------------------


def strided(rank: TorchRank) -> dict[str, Tensor]:
    """Two tensor-parallel ranks by two FSDP ranks on the same dimension: what FSDP2 over TP makes."""
    mesh = init_device_mesh(rank.device.type, (2, 2))
    return {
        "w": shard(values((10, 3)), mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        "b": shard(values((7,), seed=1), mesh, [_StridedShard(0, split_factor=2), Replicate()]),
    }


def save_strided(rank: TorchRank, directory: Path) -> int:
    state = strided(rank)
    return chunk_count(dcp_torch.save(state, checkpoint_id=directory), "b")


def load_unstrided(rank: TorchRank, directory: Path, dim: int) -> None:
    def target() -> dict[str, Tensor]:
        mesh = world_mesh(rank)
        return {"w": shard(values((10, 3)), mesh, [Shard(dim)]), "b": shard(values((7,), seed=1), mesh, [Shard(0)])}

    state = target()
    poison(state)
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(state, target())


def load_strided(rank: TorchRank, directory: Path) -> None:
    state = strided(rank)
    poison(state)
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(state, strided(rank))


def test_strided_shards_are_several_boxes_and_load_into_any_layout(shared_path: Path) -> None:
    chunks = run_gloo(save_strided, 4, shared_path)
    assert chunks == [4] * 4
    run_gloo(load_unstrided, 4, shared_path, 0)
    run_gloo(load_unstrided, 4, shared_path, 1)
    run_gloo(load_unstrided, 1, shared_path, 0)
    run_gloo(load_strided, 4, shared_path)


def two_shards(rank: TorchRank, whole: Tensor) -> ShardedTensor:
    """A rank holds a block of rows in the upper half and one in the lower."""
    starts = (rank.rank * 2, 4 + (1 - rank.rank) * 2)
    shards = [LocalShard.from_tensor_and_offsets(whole[s : s + 2].clone(), [s, 0], rank.rank) for s in starts]
    return init_from_local_shards(shards, *whole.shape)


def save_two_shards(rank: TorchRank, directory: Path) -> None:
    dcp_torch.save({"t": two_shards(rank, values((8, 3)))}, checkpoint_id=directory)


def load_two_shards(rank: TorchRank, directory: Path) -> None:
    target = two_shards(rank, torch.zeros(8, 3))
    dcp_torch.load({"t": target}, checkpoint_id=directory)
    for found, expected in zip(target.local_shards(), two_shards(rank, values((8, 3))).local_shards(), strict=True):
        assert bits_of(found.tensor) == bits_of(expected.tensor)


def load_whole(rank: TorchRank, directory: Path) -> None:
    target = torch.zeros(8, 3)
    dcp_torch.load({"t": target}, checkpoint_id=directory)
    assert bits_of(target) == bits_of(values((8, 3)))


def test_two_separate_chunks_of_one_rank_are_both_in_its_file_and_both_come_back(shared_path: Path) -> None:
    from safetensors import safe_open

    run_gloo(save_two_shards, 2, shared_path)
    keys = []
    for file in data_files(shared_path):
        with safe_open(file, framework="pt") as opened:
            keys.append(set(opened.keys()))
    assert keys == [{"t@0,0", "t@6,0"}, {"t@2,0", "t@4,0"}]
    run_gloo(load_two_shards, 2, shared_path)
    run_gloo(load_whole, 1, shared_path)


# -- ranks that contradict each other ------------------------------------------------------------------------------


def differing_shape(rank: TorchRank) -> dict[str, Tensor]:
    return {"t": torch.zeros(4 + (rank.rank == 2), 2), "u": torch.zeros(3)}


def differing_dtype(rank: TorchRank) -> dict[str, Tensor]:
    return {"t": torch.zeros(4, dtype=torch.float32 if rank.rank < 2 else torch.float64)}


def with_a_hole(rank: TorchRank) -> dict[str, Tensor]:
    start = (0, 2, 6)[rank.rank]
    return {"t": dcp_torch.annotate_shard(torch.zeros(2, 3), offsets=(start, 0), global_shape=(8, 3))}


def with_an_overlap(rank: TorchRank) -> dict[str, Tensor]:
    start = (0, 2, 5)[rank.rank]
    return {"t": dcp_torch.annotate_shard(torch.zeros(3, 3), offsets=(start, 0), global_shape=(8, 3))}


def tensor_or_value(rank: TorchRank) -> dict[str, Any]:
    return {"t": 5 if rank.rank == 1 else torch.zeros(2)}


def save_raises(rank: TorchRank, state: Callable[[TorchRank], Any], directory: Path) -> tuple[str, str]:
    return raised(lambda: dcp_torch.save(state(rank), checkpoint_id=directory))


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        (differing_shape, "ShapeMismatchError", ("'t'", "(4, 2)", "(5, 2)", "rank 2")),
        (differing_dtype, "DTypeMismatchError", ("'t'", "float32", "float64", "rank 2")),
        (with_a_hole, "CoverageError", ("'t'", "(4, 0)")),
        (with_an_overlap, "OverlapError", ("'t'", "overlap", "rank 0", "rank 1")),
        (tensor_or_value, "PlanningError", ("'t'", "rank 1")),
    ],
)
def test_ranks_that_disagree_are_one_error_on_all_before_anything_is_written(
    state: Callable[[TorchRank], Any], kind: str, words: tuple[str, ...], shared_path: Path
) -> None:
    found, text = same_on_all(run_gloo(save_raises, 3, state, shared_path))
    assert found == kind, text
    assert all(word in text for word in words), text
    assert not list(shared_path.iterdir())


def with_a_hole_alone(rank: TorchRank) -> dict[str, Tensor]:
    return {"t": dcp_torch.annotate_shard(torch.zeros(2, 3), offsets=(2, 0), global_shape=(8, 3))}


def holes_without_collectives(rank: TorchRank, directory: Path) -> tuple[str, str]:
    state = with_a_hole(rank)
    dcp_torch.save(state, checkpoint_id=directory, use_collectives=False)
    poison(state)
    dcp_torch.load(state, checkpoint_id=directory, use_collectives=False)
    assert bits_of(state["t"]) == bits_of(torch.zeros(2, 3))
    target = {"t": torch.full((8, 3), 3.0)}
    found = raised(lambda: dcp_torch.load(target, checkpoint_id=directory, use_collectives=False))
    assert (target["t"] == 3).all()
    return found


def test_a_hole_is_seen_with_one_rank_and_without_collectives_only_by_the_load(shared_path: Path) -> None:
    kind, text = same_on_all(run_gloo(save_raises, 1, with_a_hole_alone, shared_path / "one"))
    assert kind == "CoverageError", text
    for kind, text in run_gloo(holes_without_collectives, 3, shared_path / "alone"):
        assert kind == "CoverageError", text
        assert "'t'" in text


def differing_arguments(rank: TorchRank, directory: Path) -> list[tuple[str, str]]:
    odd = rank.rank == 1
    state = {"t": torch.zeros(3)}
    found = [
        raised(lambda: dcp_torch.save(state, checkpoint_id=directory / f"{int(odd)}")),
        raised(lambda: dcp_torch.save(state, checkpoint_id=directory, durable=odd)),
        raised(
            lambda: dcp_torch.save(
                state, checkpoint_id=directory, planner=dcp_torch.StandardSavePlanner(remove_redundancy=odd)
            )
        ),
    ]
    dcp_torch.save(state, checkpoint_id=directory / "good")
    load = directory / "good"
    return [
        *found,
        raised(lambda: dcp_torch.load(state, checkpoint_id=load, broadcast_batch_bytes=100 + odd)),
        raised(lambda: dcp_torch.load(state, checkpoint_id=load, verify="full" if odd else True)),
    ]


def test_arguments_that_differ_between_ranks_are_an_error_on_all(shared_path: Path) -> None:
    found = run_gloo(differing_arguments, 3, shared_path)
    expected = ("checkpoint_id", "durable", "planner", "broadcast_batch_bytes", "verify")
    for argument, of_ranks in zip(expected, zip(*found, strict=True), strict=True):
        kind, text = same_on_all(of_ranks)
        assert kind == "ArgumentsDifferError", text
        assert argument in text
        assert "rank 1" in text


def bad_argument_on_one_rank(rank: TorchRank, directory: Path) -> list[tuple[str, str]]:
    state: Any = {"t": torch.zeros(3)}
    odd = rank.rank == 1
    return [
        raised(lambda: dcp_torch.save(7 if odd else state, checkpoint_id=directory)),  # type: ignore[arg-type]  # wrong on purpose
        raised(lambda: dcp_torch.save(state, checkpoint_id=None if odd else directory)),
        raised(lambda: dcp_torch.load(state, checkpoint_id=directory, timeout_seconds=-1 if odd else 20)),
    ]


def test_a_bad_argument_on_one_rank_is_an_error_on_all(shared_path: Path) -> None:
    for of_ranks in zip(*run_gloo(bad_argument_on_one_rank, 3, shared_path, timeout_seconds=20), strict=True):
        kind, text = same_on_all(of_ranks)
        assert kind == "ArgumentError", text
        assert "rank 1" in text


def partial(rank: TorchRank) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {"whole": torch.zeros(2)}
    tensor = DTensor.from_local(torch.ones(2, device=rank.device), world_mesh(rank), [Partial()])
    if rank.rank == 1:
        state["sum"] = tensor
    return state


def test_a_partial_sum_on_one_rank_is_refused_on_all_with_an_explanation(shared_path: Path) -> None:
    kind, text = same_on_all(run_gloo(save_raises, 3, partial, shared_path))
    assert kind == "UnsupportedValueError"
    assert all(word in text for word in ("'sum'", "rank 1", "partial sum", "redistribute()"))
    assert not list(shared_path.iterdir())


# -- ranks that hold different things ------------------------------------------------------------------------------

_TIED_BY = (0, 1, 6, 7)


def pipeline(rank: TorchRank, *, cut: bool) -> dict[str, Tensor]:
    """Four stages of two ranks; the first and the last share a tensor; the second has nothing replicated."""
    meshes = [DeviceMesh(rank.device.type, [stage * 2, stage * 2 + 1]) for stage in range(4)]
    stage, place = rank.rank // 2, rank.rank % 2
    state: dict[str, Tensor] = {f"layer.{stage}.w": shard(values((4, 6), seed=stage), meshes[stage], [Shard(0)])}
    if rank.rank in _TIED_BY:
        tied = values((64, 512), seed=9)
        state["tied"] = shard(tied, meshes[stage], [Shard(1)]) if cut else tied.to(rank.device)
    if stage != 1:
        state[f"layer.{stage}.norm"] = values((5,), seed=20 + stage)
    else:
        state[f"own.{place}"] = values((3,), seed=30 + place)
    return state


def save_pipeline(rank: TorchRank, directory: Path, cut: bool) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    metadata = dcp_torch.save(pipeline(rank, cut=cut), checkpoint_id=directory)
    found = metadata.state_dict_metadata["tied"]
    assert isinstance(found, TensorStorageMetadata)
    return [(chunk.offsets, chunk.sizes) for chunk in found.chunks]


def load_pipeline(rank: TorchRank, directory: Path, cut: bool) -> None:
    state = pipeline(rank, cut=cut)
    poison(state)
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(state, pipeline(rank, cut=cut))


def load_stages_on_one(rank: TorchRank, directory: Path) -> None:
    def target() -> dict[str, Tensor]:
        layers = {f"layer.{stage}.w": values((4, 6), seed=stage) for stage in range(4)}
        return {**layers, "tied": values((64, 512), seed=9), "own.1": values((3,), seed=31)}

    state = target()
    poison(state)
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(state, target())


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "sharded"])
def test_a_parameter_tied_between_pipeline_stages_is_one_replica_set_and_written_once(
    cut: bool, shared_path: Path
) -> None:
    run_gloo(save_pipeline, 8, shared_path, cut)
    total = 64 * 512 * 4 + 4 * (4 * 6 * 4) + 3 * (5 * 4) + 2 * (3 * 4)
    assert sum(data_bytes(file) for file in data_files(shared_path)) == total
    run_gloo(load_pipeline, 8, shared_path, cut)
    run_gloo(load_pipeline, 8, shared_path, not cut)
    run_gloo(load_stages_on_one, 1, shared_path)


def data_bytes(file: Path) -> int:
    """Size of a safetensors file without its header."""
    content = file.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def on_a_subset(rank: TorchRank) -> dict[str, Tensor]:
    meshes = [DeviceMesh(rank.device.type, [1, 3]), DeviceMesh(rank.device.type, [[2], [1]])]
    if rank.rank == 0:
        return {}
    return {
        "rows": shard(values((5, 2)), meshes[0], [Shard(0)]),
        "both": shard(values((6,), seed=1), meshes[1], [Replicate(), Shard(0)]),
    }


def save_on_a_subset(rank: TorchRank, directory: Path) -> list[str]:
    return list(dcp_torch.save(on_a_subset(rank), checkpoint_id=directory).state_dict_metadata)


def load_on_a_subset(rank: TorchRank, directory: Path) -> None:
    state = on_a_subset(rank)
    poison(state)
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(state, on_a_subset(rank))


def load_rows(rank: TorchRank, directory: Path) -> None:
    state = {"rows": shard(values((5, 2)), world_mesh(rank), [Shard(1)])} if rank.rank != 1 else {}
    poison(state)
    dcp_torch.load(state, checkpoint_id=directory)
    if state:
        assert_same(state, {"rows": shard(values((5, 2)), world_mesh(rank), [Shard(1)])})


def test_meshes_over_some_ranks_and_ranks_with_nothing_to_save_or_load(shared_path: Path) -> None:
    assert run_gloo(save_on_a_subset, 4, shared_path) == [["both", "rows"]] * 4
    assert [file.name for file in data_files(shared_path) if "_rank0_" in file.name] == []
    run_gloo(load_on_a_subset, 4, shared_path)
    run_gloo(load_rows, 2, shared_path)


def save_nothing(rank: TorchRank, directory: Path) -> int:
    dcp_torch.save({}, checkpoint_id=directory)
    dcp_torch.load({}, checkpoint_id=directory)
    return len(dcp_torch.save({}, checkpoint_id=directory).state_dict_metadata)


def test_a_job_with_nothing_at_all_saves_and_loads(shared_path: Path) -> None:
    assert run_gloo(save_nothing, 2, shared_path) == [0, 0]
    assert not data_files(shared_path)


# -- memory that is not laid out row by row ------------------------------------------------------------------------


def odd_memory() -> dict[str, Tensor]:
    """The same values as `values`, in memory of other strides."""
    base = values((6, 8))
    image = values((2, 3, 4, 5), torch.bfloat16, seed=1)
    wide = torch.zeros(6, 16)
    wide[:, 3:11] = base.nan_to_num()
    return {
        "transposed": base.t().contiguous().t(),
        "permuted": base.reshape(2, 3, 8).permute(2, 0, 1),
        "channels_last": image.to(memory_format=torch.channels_last),
        "columns": wide[:, 3:11],
        "every other": values((7, 9), torch.int32, seed=2)[::2, ::3],
        "diagonal": values((5, 5), seed=3).diagonal(),
        "conjugate": values((3, 2), torch.complex64, seed=4).conj(),
        "imaginary": values((4,), torch.complex128, seed=5).conj().imag,
        "gradient": values((3, 3), seed=6).nan_to_num(0.5).requires_grad_(),
        "inference": _in_inference_mode(),
    }


def _in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return values((3, 5), seed=7)


def test_memory_of_any_strides_is_saved_and_filled_by_its_logical_values(shared_path: Path) -> None:
    state = odd_memory()
    plain = {name: tensor.detach().resolve_conj().resolve_neg().clone().contiguous() for name, tensor in state.items()}
    dcp_torch.save(state, checkpoint_id=shared_path / "odd")
    found = {name: torch.empty_like(tensor) for name, tensor in plain.items()}
    poison(found)
    dcp_torch.load(found, checkpoint_id=shared_path / "odd")
    assert_same(found, plain)

    dcp_torch.save(plain, checkpoint_id=shared_path / "plain")
    strides = {name: tensor.stride() for name, tensor in state.items()}
    for tensor in state.values():
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.zero_()
    before = dict(state)
    dcp_torch.load(state, checkpoint_id=shared_path / "plain")
    for name, tensor in state.items():
        assert tensor is before[name]
        assert tensor.stride() == strides[name]
        assert bits_of(tensor.detach().resolve_conj().resolve_neg()) == bits_of(plain[name]), name


def test_a_target_inside_a_larger_tensor_leaves_what_surrounds_it(shared_path: Path) -> None:
    whole = values((6, 8))
    dcp_torch.save({"t": whole}, checkpoint_id=shared_path)
    around = torch.full((10, 17), 7.0)
    target = around[2:8, 1::2]
    dcp_torch.load({"t": target}, checkpoint_id=shared_path)
    assert bits_of(target) == bits_of(whole)
    assert (around == 7).sum() == 10 * 17 - 6 * 8 + (whole == 7).sum()


def test_an_expanded_tensor_is_saved_whole_and_refused_as_a_target(shared_path: Path) -> None:
    expanded = values((4, 1)).expand(4, 3)
    dcp_torch.save({"t": expanded}, checkpoint_id=shared_path)
    target = {"t": torch.zeros(4, 3)}
    dcp_torch.load(target, checkpoint_id=shared_path)
    assert bits_of(target["t"]) == bits_of(expanded)
    row = torch.zeros(4, 1)
    kind, text = raised(lambda: dcp_torch.load({"t": row.expand(4, 3)}, checkpoint_id=shared_path))
    assert kind == "UnsupportedValueError"
    assert "'t'" in text and "clone" in text
    assert (row == 0).all()


def test_windows_that_overlap_are_refused_as_a_target(shared_path: Path) -> None:
    dcp_torch.save({"t": torch.zeros(3, 2)}, checkpoint_id=shared_path)
    kind, text = raised(
        lambda: dcp_torch.load({"t": torch.ones(4).as_strided((3, 2), (1, 1))}, checkpoint_id=shared_path)
    )
    assert kind == "UnsupportedValueError", text


def odd_shards(rank: TorchRank) -> dict[str, Tensor]:
    """DTensors whose local memory is transposed or part of something larger."""
    mesh = world_mesh(rank)
    local = values((3, 8), seed=rank.rank)
    wide = torch.zeros(3, 10)
    wide[:, 1:9] = local.nan_to_num()
    return {
        "transposed": DTensor.from_local(local.t().contiguous().t(), mesh, [Shard(0)], run_check=False),
        "inner": DTensor.from_local(wide[:, 1:9], mesh, [Shard(0)], run_check=False),
        "expanded": DTensor.from_local(values((3, 1)).expand(3, 8), mesh, [Shard(1)], run_check=False),
    }


def check_odd_shards(rank: TorchRank, directory: Path) -> None:
    dcp_torch.save(odd_shards(rank), checkpoint_id=directory)
    target = {name: tensor for name, tensor in odd_shards(rank).items() if name != "expanded"}
    poison(target)
    dcp_torch.load(target, checkpoint_id=directory)
    expected = {name: tensor for name, tensor in odd_shards(rank).items() if name != "expanded"}
    assert_same(target, expected)
    whole = {"expanded": torch.zeros(3, 16)}
    dcp_torch.load(whole, checkpoint_id=directory)
    assert bits_of(whole["expanded"]) == bits_of(values((3, 1)).expand(3, 16))
    kind, _ = raised(lambda: dcp_torch.load(odd_shards(rank), checkpoint_id=directory))
    assert kind == "UnsupportedValueError"
    assert all(t.numel() for t in tensors(target))
    dist.barrier()


def test_shards_of_any_strides_are_saved_and_filled(shared_path: Path) -> None:
    run_gloo(check_odd_shards, 2, shared_path)
