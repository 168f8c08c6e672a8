from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.adapter import Adapter
from dcp_core.box import Box
from dcp_core.coordination.exchange import Exchange
from dcp_core.dtype import BY_NAME
from dcp_core.errors import ArgumentError, StorageError
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, RankProcessError, current_rank, run_ranks

pytestmark = pytest.mark.timeout(60)

ADAPTER: Adapter = NumpyRankAdapter()


def whoami(context: RankContext, *args: Any) -> tuple[RankContext, bool, int, tuple[Any, ...]]:
    return context, current_rank() is context, os.getpid(), args


def raise_on_odd_ranks(context: RankContext) -> int:
    if context.rank % 2:
        raise StorageError(f"rank {context.rank} is odd")
    return context.rank


def end_in_many_ways(context: RankContext) -> None:
    sys.stderr.write(f"last words of {context.rank}\n")
    sys.stderr.flush()
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if context.rank == 2:
        os._exit(7)
    if context.rank == 3:
        sys.exit(5)


def sleep_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        time.sleep(60)


def stop_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


class Unpicklable:
    def __reduce__(self) -> str:
        raise ValueError("not me")


class UnpicklableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("needs two arguments")


def return_something_unpicklable(context: RankContext) -> object:
    if context.rank == 1:
        raise UnpicklableError(1, 2)
    return Unpicklable()


def see_environment(context: RankContext) -> tuple[str | None, str, bool, bool]:
    return os.environ.get("DCP_RANKS_TEST"), os.getcwd(), "torch" in sys.modules, sys.stdin.isatty()


class Holder:
    @staticmethod
    def double(context: RankContext, value: int) -> int:
        return 2 * value + context.rank


def test_every_rank_runs_in_a_process_of_its_own_and_knows_who_it_is() -> None:
    results = run_ranks(whoami, 4, "a", 5)
    assert [context.rank for context, *_ in results] == [0, 1, 2, 3]
    assert all(context.world_size == 4 and is_current and args == ("a", 5) for context, is_current, _, args in results)
    assert len({os.getpid(), *(pid for _, _, pid, _ in results)}) == 5
    assert len({context.channel_directory for context, *_ in results}) == 1
    assert current_rank() is None


def test_the_function_may_be_a_static_method_but_not_a_closure() -> None:
    assert run_ranks(Holder.double, 2, 10) == [20, 21]
    with pytest.raises(TypeError, match="closure"):
        run_ranks(lambda context: None, 1)


def test_errors_of_ranks_are_raised_together_or_returned() -> None:
    with pytest.raises(RankProcessError) as caught:
        run_ranks(raise_on_odd_ranks, 4)
    text = str(caught.value)
    assert "rank 1: Traceback" in text
    assert "StorageError: rank 3 is odd" in text
    results = run_ranks(raise_on_odd_ranks, 4, return_exceptions=True)
    assert [type(result) for result in results] == [int, StorageError, int, StorageError]
    assert str(results[1]) == "rank 1 is odd"


def test_ranks_that_die_are_told_apart_with_their_last_words() -> None:
    results = [str(result) for result in run_ranks(end_in_many_ways, 5, return_exceptions=True)]
    assert results[0].startswith("was killed by SIGKILL")
    assert results[1].startswith("was killed by SIGTERM")
    assert results[2].startswith("ended with exit code 7 and no result")
    assert all(f"last words of {rank}" in results[rank] for rank in range(3))
    assert results[3:] == ["5", "None"]


@pytest.mark.parametrize("function", [sleep_on_rank_1, stop_on_rank_1])
def test_a_rank_that_does_not_finish_is_ended_at_the_time_limit(function: Any) -> None:
    started = time.monotonic()
    with pytest.raises(RankProcessError) as caught:
        run_ranks(function, 2, timeout_seconds=3)
    assert time.monotonic() - started < 30
    assert str(caught.value).startswith("rank 1: still ran after 3 s")
    assert function is stop_on_rank_1 or "in sleep_on_rank_1" in str(caught.value)


def test_what_cannot_be_pickled_comes_back_as_text() -> None:
    first, second = run_ranks(return_something_unpicklable, 2, return_exceptions=True)
    assert "can't be pickled: ValueError: not me" in str(first)
    assert "UnpicklableError: needs two arguments" in str(second)


def test_ranks_see_this_environment_and_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for value in ("one", "two"):
        monkeypatch.setenv("DCP_RANKS_TEST", value)
        monkeypatch.chdir(tmp_path)
        assert [result[:2] for result in run_ranks(see_environment, 2)] == [(value, str(tmp_path))] * 2


def test_ranks_start_without_a_framework() -> None:
    program = "from dcp_core.testing.ranks import run_ranks; from tests.core.test_numpy_ranks import see_environment; "
    program += "print([result[2] for result in run_ranks(see_environment, 2)])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[False, False]"


def test_nothing_stays_in_the_given_directory(tmp_path: Path) -> None:
    place = tmp_path / "ranks"
    (result,) = run_ranks(whoami, 1, directory=place)
    assert result[0].channel_directory.is_relative_to(place)
    assert os.listdir(place) == []


def test_ranks_run_from_a_plain_script(tmp_path: Path) -> None:
    script = tmp_path / "a script.py"
    script.write_text(
        "from dcp_core.testing.ranks import run_ranks\n"
        "def double(context, value):\n"
        "    return value * 2 + context.rank\n"
        "if __name__ == '__main__':\n"
        "    assert run_ranks(double, 3, 5) == [10, 11, 12]\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-W", "error", str(script)], env=environment, check=True, timeout=40)


# -- the adapter of the ranks ---------------------------------------------------------------------------------------


def exchange_over_groups(context: RankContext) -> list[tuple[int, int, int, bytes]]:
    """The group of all, and one of ranks 1 and 3, in turn."""
    seen = []
    for ranks in (None, (1, 3), None):
        if ranks is not None and context.rank not in ranks:
            continue
        group = NumpyRankAdapter().process_group(ranks)
        exchange = Exchange(group.rank, group.world_size, group.channel, key=group.key, timeout_seconds=20)
        answer = exchange.run("who", b"%d" % context.rank, compute=b"".join)
        seen.append((group.rank, group.world_size, group.global_rank, answer))
    return seen


def test_the_adapter_knows_the_group_of_the_ranks_and_groups_within_it() -> None:
    results = run_ranks(exchange_over_groups, 4)
    for rank, seen in enumerate(results):
        whole = (rank, 4, rank, b"0123")
        part = [((1, 3).index(rank), 2, rank, b"13")] if rank in (1, 3) else []
        assert seen == [whole, *part, whole]


def test_outside_of_ranks_the_adapter_is_alone() -> None:
    group = ADAPTER.process_group()
    assert (group.rank, group.world_size, group.channel) == (0, 1, None)


def ask_for_a_group_of_others(context: RankContext) -> None:
    group = NumpyRankAdapter().process_group((0,))
    assert (group.world_size, group.channel, context.rank) == (1, None, 0)


def test_a_group_without_this_rank_is_refused() -> None:
    first, second = run_ranks(ask_for_a_group_of_others, 2, return_exceptions=True)
    assert first is None
    assert type(second) is ArgumentError


def test_a_sharded_array_is_described_by_its_boxes_without_the_empty_ones() -> None:
    boxes = (Box((0, 0), (2, 4)), Box((2, 0), (0, 4)), Box((4, 1), (1, 3)))
    arrays = [np.zeros(box.sizes, np.float32) for box in boxes]
    local = ADAPTER.describe(ShardedArray((5, 4), boxes, arrays, ragged=True, replica_ranks=(0, 1)))
    assert local is not None
    assert (local.global_shape, local.dtype, local.boxes) == ((5, 4), BY_NAME["float32"], (boxes[0], boxes[2]))
    assert local.views[0] is arrays[0]
    assert local.views[1] is arrays[2]
    assert (local.plain, local.ragged, local.replica_ranks, local.nbytes) == (False, True, (0, 1), 44)
    assert local.storage is not None
    tied = ADAPTER.describe(ShardedArray((5, 4), boxes, arrays))
    untied = ADAPTER.describe(ShardedArray((5, 4), boxes, [array.copy() for array in arrays]))
    assert tied is not None
    assert untied is not None
    assert tied.storage == local.storage != untied.storage


def test_a_sharded_array_of_raw_bits_converts_as_its_type() -> None:
    sharded = ShardedArray((4,), [Box((2,), (2,))], [np.zeros(2, np.uint16)], "bfloat16")
    local = ADAPTER.describe(sharded)
    assert local is not None
    local.access.copy_into(local.views[0], np.array([1, -2.5], np.float32), BY_NAME["float32"])
    assert sharded.arrays[0].tolist() == [0x3F80, 0xC020]


def test_a_sharded_array_may_hold_nothing() -> None:
    local = ADAPTER.describe(ShardedArray((4,), [], [], "int8"))
    assert local is not None
    assert (local.boxes, local.storage, local.dtype) == ((), None, BY_NAME["int8"])


def test_arrays_that_do_not_fit_their_boxes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="fit"):
        ShardedArray((4,), [Box((0,), (2,))], [np.zeros(3)])
    with pytest.raises(ArgumentError, match="fit"):
        ShardedArray((4,), [Box((0,), (2,))], [])
    with pytest.raises(ArgumentError, match="dtype_name"):
        ShardedArray((4,), [], [])
    with pytest.raises(ArgumentError, match="raw bits"):
        ShardedArray((2,), [Box((0,), (2,))], [np.zeros(2, np.float32)], "bfloat16")


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(1, 9), st.data())
def test_even_cuts_put_together_are_the_array(shape: Sequence[int], parts: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    array = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    copy = np.full(shape, -1)
    for part in range(parts):
        boxes = even_boxes(shape, parts, part, dim)
        assert all(box.sizes[dim] > 0 for box in boxes)
        ShardedArray.cut(array, boxes).put_into(copy)
    np.testing.assert_array_equal(copy, array)
