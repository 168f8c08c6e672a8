"""The benchmark of background saves runs, names what it measured, and leaves nothing behind. No test looks at times."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import async_save
from benchmarks.background.calls import Call, CallTimes, Run, _check, merge
from benchmarks.background.cases import MEASURES, AsyncCase, AsyncSettings, cases_of
from benchmarks.background.child import ChildUse, judge_child
from benchmarks.background.contestants import ASYNC_CONTESTANTS, NOTHING, taking_part
from benchmarks.background.judge import judge_calls
from benchmarks.background.report import AsyncResult
from benchmarks.background.training import Turn, together
from benchmarks.contestant import ContestantError
from benchmarks.places import Place
from benchmarks.ranks import Rank, preload
from benchmarks.states import make_state
from benchmarks.trials import FIRST
from benchmarks.workloads import MIB, TensorSpec

preload()  # before the first test starts the fork server

CALL = AsyncCase("call", 1024, 2, "memory", MEASURES["call"].contestants)
REPLICATED = AsyncCase("replicated", 512, 4, "memory", MEASURES["replicated"].contestants)


def run_quick(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run the command's function in an empty directory, and give the figures that it writes."""
    figures, scratch = tmp_path / "figures.json", tmp_path / "scratch"
    scratch.mkdir()
    places = ["--memory-dir", str(scratch), "--disk-dir", str(scratch)]
    assert async_save.main(["--quick", *places, "--timeout", "150", "--json", str(figures), *arguments]) == 0
    assert list(scratch.iterdir()) == []
    text = figures.read_text()
    assert str(tmp_path) not in text and platform.node() not in text.split('"')
    content: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    return content


def run(seconds: float, waited: float = 0.0, staged_nbytes: int = 0) -> Run:
    return Run(seconds, waited, 0.0, 0.0, seconds, staged_nbytes)


def times(contestant: str, seconds: float, staged_nbytes: int = 0) -> CallTimes:
    return CallTimes(contestant, run(9.0), (run(seconds, staged_nbytes=staged_nbytes),))


def test_a_quick_run_on_two_ranks_times_every_way_to_save_and_what_each_stages(tmp_path: Path) -> None:
    found = run_quick(tmp_path, "--measures", "call", "--ranks", "2")
    memory, disk = found["cases"]
    names = ["ours", "ours-gloo", "ours-alone", "torch-thread", "torch-process", "copy"]
    assert [row["contestant"] for row in memory["calls"]] == names
    assert [row["contestant"] for row in disk["calls"]] == ["ours", "torch-thread", "copy"]
    assert memory["left_out"] == {"copy-1": "as copy: every rank has one core"} and disk["left_out"] == {}
    for row in [row for row in memory["calls"] if row["contestant"].startswith("ours")]:
        assert [each["staged_nbytes"] for each in (row["first"], *row["rounds"])] == [MIB, MIB]
        assert row["rounds"][0]["agree_seconds"] > 0 and row["rounds"][0]["stage_seconds"] > 0
    assert found["machine"]["versions"]["torch"] and memory["failure"] is None


def test_a_quick_run_of_replicas_stages_a_share_and_the_first_time_everything(tmp_path: Path) -> None:
    found = run_quick(tmp_path, "--measures", "replicated", "fixed", "--ranks", "4", "--contestants", "ours", "copy")
    fixed, replicated = sorted(found["cases"], key=lambda case: str(case["measure"]))
    [row] = fixed["calls"]
    assert row["contestant"] == "ours" and row["rounds"][0]["staged_nbytes"] == 2 * MIB // 4
    row, copy = replicated["calls"]
    assert row["first"]["staged_nbytes"] == 2 * MIB and row["rounds"][0]["staged_nbytes"] == 2 * MIB // 4
    assert copy["contestant"] == "copy"


def test_a_quick_run_measures_the_background_process(tmp_path: Path) -> None:
    child, small = run_quick(tmp_path, "--measures", "child", "small")["cases"]
    assert child["frameworks"] == [] and len(child["ready_seconds"]) == 1 and len(child["budgets"]) == 3
    assert child["ready_nbytes"] > MIB and child["saved_nbytes"] > MIB
    assert [row["contestant"] for row in small["calls"]] == ["ours", "torch-thread", "copy"]


def test_a_quick_run_trains_and_saves_many_times(tmp_path: Path) -> None:
    found = run_quick(tmp_path, "--measures", "training", "many", "--ranks", "2")
    training, many = found["cases"]
    assert [row["contestant"] for row in training["training"]] == [NOTHING, "ours", "torch-thread"]
    assert len(training["training"][0]["beside_seconds"]) == found["settings"]["steps"]
    for moments in many["many"]:
        assert [moment["saves"] for moment in moments] == [found["settings"]["saves"]]
        assert all(moment["children"] == 1 and moment["child"]["threads"] >= 2 for moment in moments)


def test_waiting_for_slower_ranks_does_not_count_as_time_in_the_call() -> None:
    def call(number: int, began: float, returned: float, agree: float) -> Call:
        stages = {"all_gather_object": agree, "build_staged_state_dict": 0.5}
        return Call("ours", number, began, returned, returned + 3.0, stages, 100)

    early = [call(FIRST, 0.0, 2.0, 0.0), call(0, 10.0, 13.0, 2.25)]
    late = [call(FIRST, 0.0, 1.0, 0.0), call(0, 12.0, 13.0, 0.25)]
    [found] = merge(["ours"], [early, late])
    assert found.first == Run(2.0, 0.0, 0.0, 0.5, 5.0, 100)
    assert found.rounds == (Run(1.0, 2.0, 0.25, 0.5, 6.0, 100),)


def test_a_call_is_judged_by_the_copy_and_by_torch() -> None:
    rows = [times("ours", 1.2), times("copy", 1.0), times("torch-thread", 4.0)]
    assert [(verdict.found, verdict.is_met) for verdict in judge_calls(CALL, rows)] == [(1.2, True), (0.3, False)]
    assert list(judge_calls(replace(CALL, mib=2), rows)) == []
    assert list(judge_calls(CALL, rows[1:])) == []
    assert list(judge_calls(replace(CALL, measure="fixed"), rows)) == []


@pytest.mark.parametrize(("staged_nbytes", "is_met"), [(128 * MIB, True), (256 * MIB, False)])
def test_a_replica_must_stage_its_share_only(staged_nbytes: int, is_met: bool) -> None:
    share = list(judge_calls(REPLICATED, [times("ours", 1.0, staged_nbytes)]))
    assert [verdict.is_met for verdict in share] == [is_met]


def test_a_background_process_that_is_slow_large_or_has_a_framework_misses_its_budgets() -> None:
    good, bad = ChildUse((0.2, 9.0, 0.3), MIB, 60 * MIB, ()), ChildUse((0.8,), MIB, 61 * MIB, ("torch",))
    assert [verdict.is_met for verdict in judge_child(good)] == [True, True, True]
    assert [verdict.is_met for verdict in judge_child(bad)] == [False, False, False]


def test_steps_count_as_beside_a_save_when_it_was_in_flight_on_any_rank() -> None:
    idle = Turn(NOTHING, (1.0, 1.0, 1.5), (False, False, False), (), 4.0)
    first = Turn("ours", (2.0, 2.0, 1.0), (True, False, False), (0.5,), 6.0)
    second = Turn("ours", (1.0, 3.0, 9.0), (True, True, False), (0.25,), 5.0)
    none, ours = together([NOTHING, "ours"], [[idle, first], [idle, second]]).rows
    assert none.beside_seconds == (1.0, 1.0, 1.5) and none.median_step == 1.0 and none.throughput == 0.75
    assert ours.beside_seconds == (2.0, 3.0) and ours.call_seconds == (0.5,) and ours.throughput == 0.5
    assert together(["ours"], [[replace(first, is_beside=(False,) * 3)]]).rows[0].median_step is None


def test_a_checkpoint_that_is_no_snapshot_is_found() -> None:
    state = make_state([TensorSpec("a", (3, 5), "float32")], Rank(0, 1))
    before = {name: tensor.clone() for name, tensor in state.locals.items()}
    _check("ours", state, before)
    state.zero()
    with pytest.raises(ContestantError, match="ours: saved something else than the state held when it was called: a"):
        _check("ours", state, before)


@pytest.mark.parametrize(("broken", "is_failure"), [("torch-process", False), ("ours-gloo", True)])
def test_who_fails_is_left_out_and_only_one_of_ours_fails_the_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str, is_failure: bool
) -> None:
    def measure(case: AsyncCase, settings: AsyncSettings, running: Sequence[str], directory: str) -> AsyncResult:
        if broken in running:
            raise ContestantError(broken, "RuntimeError: lost")
        return AsyncResult(case)

    monkeypatch.setattr(async_save, "_measure", measure)
    place = Place("memory", str(tmp_path), "tmpfs")
    result = async_save._result_of(CALL, AsyncSettings(), ["ours", broken], {}, place)
    assert result.left_out == {broken: "failed: RuntimeError: lost"}
    assert (result.failure is not None) == is_failure


def test_a_run_that_would_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert async_save.main(["--mib", str(1 << 30), "--measures", "many", "--memory-dir", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "many, memory, 2 ranks" in message and "--mib" in message
    assert list(tmp_path.iterdir()) == []


def test_every_case_has_one_of_ours_and_shapes_that_its_ranks_can_cut() -> None:
    cases = list(cases_of(list(MEASURES), [1, 2, 4], ["memory", "disk"]))
    assert {case.measure for case in cases} == set(MEASURES) and len(set(cases)) == len(cases)
    assert {case.measure for case in cases if case.place == "disk"} == {"call"}
    for case in cases:
        assert "ours" in taking_part(case, list(ASYNC_CONTESTANTS))[0]
        assert all(spec.shape[0] % case.world_size == 0 for spec in case.tensors)
        assert case.held_nbytes == case.nbytes * (4 if case.measure == "replicated" else 1) > 0
