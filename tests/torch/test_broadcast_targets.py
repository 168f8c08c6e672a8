"""Loads that share reads into targets of all kinds: memory layouts, element types, boxes that only some ranks want."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dcp_torch
from dcp_core.errors import UnsupportedValueError
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.shared_reads import (
    CountedOperations,
    Layout,
    Part,
    load,
    poisoned,
    reader_on,
    save_whole,
    watched,
    wrong_in,
)
from tests.torch.states import bits_of, poison, values

pytestmark = pytest.mark.timeout(90)

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
BATCH_BYTES = (0, 6 << 20)


# -- memory layouts and element types ---------------------------------------------------------------------------------


def every_value() -> dict[str, Tensor]:
    """A matrix, a scalar and an empty tensor of every type."""
    state = {}
    for number, dtype in enumerate(DTYPES):
        name = str(dtype).removeprefix("torch.")
        state[name] = values((6, 10), dtype, number)
        state[f"{name}.0d"] = values((), dtype, 100 + number)
        state[f"{name}.empty"] = torch.empty((0, 4), dtype=dtype)
    return state


def as_target(value: Tensor, kind: int) -> Tensor:
    """A tensor of the same shape in other memory, all of it wrong; layouts differ by kind."""
    shape = tuple(value.shape)
    if len(shape) < 2 or kind == 0:
        target = value.clone()
    elif kind == 1:
        target = torch.empty(shape[::-1], dtype=value.dtype).t()
        target.copy_(value)
    elif kind == 2:
        target = torch.zeros((2 * shape[0], shape[1] + 3), dtype=value.dtype)[::2, 1:-2]
        target.copy_(value)
    else:
        target = torch.empty(value.numel() + 5, dtype=value.dtype)[5:].view(shape)
        target.copy_(value)
    poison({"target": target})
    may_learn = (value.is_floating_point() or value.is_complex()) and kind == 3
    return target.requires_grad_() if may_learn and target.is_leaf else target


def load_into_every_target(rank: TorchRank, directory: Path) -> tuple[list[str], int]:
    wrong, expected = [], every_value()
    with watched() as seen:
        for batch_bytes in BATCH_BYTES:
            for turn in range(4):
                state = {name: as_target(value, (rank.rank + turn) % 4) for name, value in expected.items()}
                memory = {
                    name: (value.data_ptr(), value.stride(), value.requires_grad) for name, value in state.items()
                }
                load(state, directory, broadcast_batch_bytes=batch_bytes)
                for name, value in state.items():
                    same_memory = memory[name] == (value.data_ptr(), value.stride(), value.requires_grad)
                    if bits_of(value) != bits_of(expected[name]) or not same_memory:
                        wrong.append(f"{name} {turn}")
    return wrong, len(seen.sizes)


def test_targets_of_every_layout_and_type_receive_and_send_every_bit(tmp_path: Path) -> None:
    dcp_torch.save(every_value(), checkpoint_id=tmp_path / "c", durable=False)
    for wrong, broadcasts in run_gloo(load_into_every_target, 4, tmp_path / "c"):
        assert wrong == []
        assert broadcasts > 4 * 2 * len(DTYPES)  # buffers of batches of 0 bytes travel alone; empty ones do not travel


# -- element types that change or differ ------------------------------------------------------------------------------


def load_converted(rank: TorchRank, directory: Path, dtypes: tuple[torch.dtype, ...]) -> tuple[bool, int, int]:
    expected = values((64, 32), torch.float16, 1).nan_to_num().to(dtypes[rank.rank])
    state = {"w": torch.full((64, 32), 7, dtype=dtypes[rank.rank])}
    operations = CountedOperations()
    with watched() as seen:
        load(state, None, storage_reader=reader_on(directory, operations))
    return torch.equal(state["w"], expected), len(seen.sizes), operations.nbytes


def test_converted_elements_travel_as_their_targets_hold_them(tmp_path: Path) -> None:
    dcp_torch.save({"w": values((64, 32), torch.float16, 1).nan_to_num()}, checkpoint_id=tmp_path / "c", durable=False)
    same = run_gloo(load_converted, 4, tmp_path / "c", (torch.float32,) * 4)
    assert [right for right, _, _ in same] == [True] * 4
    assert [broadcasts for _, broadcasts, _ in same] == [1] * 4
    assert sum(nbytes for _, _, nbytes in same) == 2 * 64 * 32
    mixed = run_gloo(load_converted, 4, tmp_path / "c", (torch.float32, torch.float64, torch.float16, torch.float32))
    assert [right for right, _, _ in mixed] == [True] * 4
    assert [broadcasts for _, broadcasts, _ in mixed] == [1, 0, 0, 1]  # only targets of one type are filled together
    assert sum(nbytes for _, _, nbytes in mixed) == 3 * 2 * 64 * 32


# -- boxes that only some ranks want ----------------------------------------------------------------------------------


def saved_layout(rank: int) -> Layout:
    return {
        "rows": Part.even((12, 50), 4, rank),
        "columns": Part.even((10, 40), 4, rank, dim=1),
        "w": Part((9, 9)),
    }


def other_layout(rank: int) -> Layout:
    """Ranks 0 and 3 want one box, rank 1 a part of that, rank 2 none; pairs want columns of what was cut by rows."""
    bounds = {0: (2, 11), 1: (3, 11), 3: (2, 11)}
    layout = {"columns": Part.even((10, 40), 2, rank // 2, dim=0), "rows": Part.even((12, 50), 2, rank % 2, dim=1)}
    return (
        layout
        | ({"w": Part((9, 9))} if rank != 1 else {})
        | ({"odd": Part((13, 6), bounds=bounds[rank])} if rank in bounds else {})
    )


def load_resharded(rank: TorchRank, directory: Path, batch_bytes: int) -> tuple[list[str], list[tuple[int, ...]]]:
    layout = other_layout(rank.rank)
    state = poisoned(layout)
    with watched() as seen:
        load(state, directory, broadcast_batch_bytes=batch_bytes)
    return wrong_in(state, layout), [group.ranks for group in seen.opened]


@pytest.mark.parametrize("batch_bytes", BATCH_BYTES)
def test_boxes_that_only_some_ranks_want_are_shared_by_these(batch_bytes: int, tmp_path: Path) -> None:
    save_whole(tmp_path / "c", saved_layout(0), {"odd": Part((13, 6))})
    found = run_gloo(load_resharded, 4, tmp_path / "c", batch_bytes)
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert [groups for _, groups in found] == [
        [(0, 1), (0, 2), (0, 2, 3), (0, 3)],
        [(0, 1), (1, 3)],
        [(0, 2), (0, 2, 3), (2, 3)],
        [(0, 2, 3), (0, 3), (1, 3), (2, 3)],
    ]


# -- targets that share memory ----------------------------------------------------------------------------------------


def load_into_shared_memory(rank: TorchRank, directory: Path) -> tuple[list[str], list[int]]:
    """Rank 2 fills two keys of different values in one memory: it reads alone, and the last one wins as ever."""
    both = torch.zeros(40, 30)
    state: dict[str, Any] = {name: torch.zeros(40, 30) for name in ("a", "b", "c")}
    if rank.rank == 2:
        state.update(a=both, b=both)
    wrong = []
    tied = torch.zeros(40, 30)
    with watched() as seen:
        load(state, directory)
    counts = [len(seen.sizes)]
    plain = {**state, "a": both.clone(), "b": both.clone()}
    for name in ("b", "c") if rank.rank == 2 else ("a", "b", "c"):
        wrong += wrong_in(state, {name: Part((40, 30))})
    if rank.rank == 2:
        plain["a"] = plain["b"] = torch.zeros(40, 30)
        load(plain, directory, use_collectives=False)
        wrong += [] if bits_of(plain["b"]) == bits_of(both) else ["not as alone"]
    with watched() as seen:  # two names of one stored tensor are no reason to read alone
        load({"d": tied, "e": tied}, directory)
    wrong += [] if bits_of(tied) == bits_of(Part((40, 30)).true_elements("d")) else ["tied"]
    return wrong, [*counts, len(seen.sizes)]


def test_a_rank_whose_targets_share_memory_reads_alone(tmp_path: Path) -> None:
    whole = {name: Part((40, 30)).true_elements(name) for name in ("a", "b", "c", "d")}
    dcp_torch.save({**whole, "e": whole["d"]}, checkpoint_id=tmp_path / "c", durable=False)
    found = run_gloo(load_into_shared_memory, 4, tmp_path / "c")
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert [counts[0] > 0 for _, counts in found] == [True, True, False, True]
    assert all(counts[1] > 0 for _, counts in found)


def load_into_overlapping_targets(rank: TorchRank, directory: Path) -> list[str]:
    """On rank 0 some targets overlap, or lie in between each other's elements; those of rank 1 are apart."""
    layout = {f"w{number:02}": Part((60, 50)) for number in range(12)}
    wrong = []
    for dtype, step in ((torch.float32, 1), (torch.float64, 1), (torch.float32, 2)):
        state = poisoned(layout)
        if rank.rank == 0:
            memory = torch.zeros(100_000, dtype=dtype)
            for number in range(0, 12, 2):
                state[f"w{number:02}"] = memory[700 * number :][: step * 3000 : step].view(60, 50)
        before = {name: bits_of(value) for name, value in state.items()}
        with pytest.raises(UnsupportedValueError, match="^rank 0: 'w00' and 'w02' .*their memory overlaps"):
            load(state, directory)
        wrong += [f"{name} was touched" for name, bits in before.items() if bits_of(state[name]) != bits]
    state = poisoned(layout)
    if rank.rank == 0:
        columns = torch.zeros(60, 50, 12)
        state.update({f"w{number:02}": columns[:, :, number] for number in range(0, 12, 2)})
    load(state, directory)
    return wrong + wrong_in(state, layout)


def test_targets_that_overlap_are_refused_on_all_ranks_and_those_in_between_each_other_are_filled(
    tmp_path: Path,
) -> None:
    save_whole(tmp_path / "c", {f"w{number:02}": Part((60, 50)) for number in range(12)})
    assert run_gloo(load_into_overlapping_targets, 2, tmp_path / "c") == [[], []]
