"""The benchmarks run, name what they measured, and leave nothing behind. No test looks at how long anything takes."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engines
from benchmarks.budgets import judge_memory, judge_times
from benchmarks.cases import Case, Settings, cases_of
from benchmarks.contestant import ContestantError
from benchmarks.contestants import CONTESTANTS, taking_part, why_not_installed
from benchmarks.counters import IoCounts, MemoryMeter, MemoryUse
from benchmarks.memory import Footprint
from benchmarks.places import Place, missing_room
from benchmarks.ranks import Rank, preload
from benchmarks.results import CaseResult
from benchmarks.states import make_state
from benchmarks.trials import FIRST, Run, Timed, check_loaded, merge
from benchmarks.workloads import MIB, WORKLOADS, TensorSpec
from dcp_core.testing.ranks import RankProcessError

preload()  # before the first test starts the fork server

ROOT = Path(__file__).parents[2]
SAVE = Case("transformer", 1024, 1, "memory", "save")


def quick(tmp_path: Path) -> list[str]:
    return ["--quick", "--memory-dir", str(tmp_path), "--disk-dir", str(tmp_path)]


def run_quick(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run the command's function in an empty directory, and give the figures that it writes."""
    figures, scratch = tmp_path / "figures.json", tmp_path / "scratch"
    scratch.mkdir()
    assert engines.main([*quick(scratch), "--timeout", "150", "--json", str(figures), *arguments]) == 0
    assert list(scratch.iterdir()) == []
    text = figures.read_text()
    assert str(tmp_path) not in text and platform.node() not in text.split('"')
    content: dict[str, Any] = json.loads(text)
    return content


def timed(contestant: str, seconds: float, rchar: int = 0) -> Timed:
    return Timed(contestant, (seconds,), seconds, IoCounts(rchar=rchar))


def test_a_quick_run_on_two_ranks_times_every_contestant_and_counts_its_bytes(tmp_path: Path) -> None:
    names = ["ours", "torch-dcp", "plain"]
    asked = ["--workloads", "transformer", "--ranks", "2", "--places", "disk", "--measures", "save", "load", "cold"]
    found = run_quick(tmp_path, *asked, "--contestants", *names)
    save, load, cold = found["cases"]
    for case in (save, load, cold):
        assert [row["contestant"] for row in case["timed"]] == names
        assert all(len(row["seconds"]) == 1 for row in case["timed"])
        assert case["left_out"] == {} and case["failure"] is None
    for row in save["timed"]:
        assert row["moved"]["wchar"] >= save["needed_bytes"]
    for row in load["timed"] + cold["timed"]:
        assert row["moved"]["rchar"] >= load["needed_bytes"]
    assert all("was_cold" in row for row in cold["timed"])
    assert found["machine"]["versions"]["torch"]


def test_a_quick_run_loads_under_another_layout_and_names_who_takes_no_part(tmp_path: Path) -> None:
    names = ["ours", "torch-hf", "plain"]
    asked = ["--workloads", "reshard", "reshard_short", "small", "--places", "memory", "--measures", "load"]
    found = run_quick(tmp_path, *asked, "--contestants", *names, "safetensors", "ours-replan")
    wide, narrow, small = found["cases"]
    for case in (wide, narrow):
        assert [row["contestant"] for row in case["timed"]] == names
        assert case["left_out"] == {"safetensors": "has no loads under another layout"}
    assert [row["contestant"] for row in small["timed"]] == ["ours", "torch-hf", "safetensors", "plain"]
    assert small["left_out"] == {"ours-replan": "loads as ours does"}


def test_a_quick_run_loads_open_weights_on_four_ranks(tmp_path: Path) -> None:
    found = run_quick(tmp_path, "--workloads", "open_weights", "--measures", "load", "--places", "disk")
    [case] = found["cases"]
    assert [row["contestant"] for row in case["timed"]] == ["ours-open", "torch-open"]
    assert case["timed"][0]["moved"]["rchar"] >= case["needed_bytes"]
    assert case["failure"] is None and case["left_out"] == {}


def test_a_quick_run_measures_memory_and_the_variants_of_checksums(tmp_path: Path) -> None:
    names = ["ours", "plain-hashed", "ours-unverified", "ours-full"]
    asked = ["--workloads", "huge", "checksums", "--places", "memory", "--measures", "memory", "load"]
    found = run_quick(tmp_path, *asked, "--contestants", *names, "--no-verify", "--no-fsync")
    by_measure = {(case["workload"], case["measure"]): case for case in found["cases"]}
    [ours] = by_measure["huge", "memory"]["footprints"]
    assert ours["contestant"] == "ours" and ours["save_tables"]["peak"] > 0 and ours["load_tables"]["peak"] > 0
    assert {row["contestant"] for row in by_measure["checksums", "load"]["timed"]} == set(names)
    assert found["settings"]["verify"] is found["settings"]["durable"] is False


def test_a_peer_that_is_not_installed_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONTESTANTS["orbax"], "module", "no_such_package.checkpoint")
    reason = why_not_installed("orbax")
    assert reason == "not installed: there is no module 'no_such_package.checkpoint'"
    assert taking_part(SAVE, ["ours", "orbax"], {"orbax": reason}) == (["ours"], {"orbax": reason})


def test_a_contestant_that_fails_is_left_out_and_the_others_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried = []

    def measure(case: Case, settings: Settings, running: Sequence[str], directory: str) -> Any:
        tried.append(list(running))
        if "orbax" in running:
            raise ContestantError("orbax", f"OSError: can't write {tmp_path}/x\nmore")
        return CaseResult(case)

    monkeypatch.setattr(engines, "_measure", measure)
    place = Place("memory", str(tmp_path), "tmpfs")
    result = engines._result_of(SAVE, Settings(), ["ours", "orbax"], {}, place)
    assert tried == [["ours", "orbax"], ["ours"]]
    assert result.left_out == {"orbax": "failed: OSError: can't write DIR/x"} and result.failure is None


@pytest.mark.parametrize("error", [ContestantError("ours", "lost"), RankProcessError("rank 1: lost")])
def test_a_case_in_which_ours_or_a_whole_rank_fails_is_reported_as_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def measure(case: Case, settings: Settings, running: Sequence[str], directory: str) -> Any:
        if "ours" in running:
            raise error
        return CaseResult(case)

    monkeypatch.setattr(engines, "_measure", measure)
    result = engines._result_of(SAVE, Settings(), ["ours"], {}, Place("memory", str(tmp_path), "tmpfs"))
    assert "lost" in (result.failure or "")


def test_a_run_that_would_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_much = ["--mib", str(1 << 30), "--workloads", "huge", "--places", "disk", "--disk-dir", str(tmp_path)]
    assert engines.main(too_much) == 2
    message = capsys.readouterr().err
    assert "huge, save, disk, 1 rank" in message and "--mib" in message
    assert list(tmp_path.iterdir()) == []
    assert missing_room(str(tmp_path), 0, 0) is None
    assert "of memory available" in str(missing_room(str(tmp_path), 0, 1 << 60))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_directory_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    asked = ["--workloads", "transformer", "--places", "disk", "--measures", "save", "--repeats", "1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.engines", *quick(tmp_path), *asked, "--contestants", "plain"],
        cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _await(lambda: any(tmp_path.glob("dcp-bench-*/case-*/plain-*")), 90)
        os.killpg(process.pid, number)
        assert process.wait(60) == 130
        _await(lambda: _session(process.pid) == [], 60)
    finally:
        for pid in _session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert list(tmp_path.iterdir()) == []


def _await(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def _session(leader: int) -> list[int]:
    """The processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_a_budget_is_met_when_the_peer_takes_enough_times_longer() -> None:
    rows = [timed("ours", 1.0), timed("torch-dcp", 1.6), timed("plain", 0.7)]
    assert [(verdict.found, verdict.is_met) for verdict in judge_times(SAVE, Settings(), rows)] == [
        (1.6, True), (0.7, False),
    ]  # fmt: skip


def test_budgets_are_not_judged_without_fsync_without_checksums_or_on_tiny_states() -> None:
    rows = [timed("ours", 1.0), timed("torch-dcp", 9.0), timed("plain", 1.0), timed("torch-hf", 1.0)]
    load = replace(SAVE, measure="load")
    assert list(judge_times(SAVE, Settings(durable=False), rows)) == []
    assert list(judge_times(replace(SAVE, mib=2), Settings(), rows)) == []
    unverified = list(judge_times(load, Settings(verify=False), rows))
    assert [verdict.demand for verdict in unverified] == ["ours at least 2.5x as fast as torch-dcp"]
    assert len(list(judge_times(load, Settings(), rows))) == 3


def test_the_bytes_that_a_resharded_load_reads_are_judged() -> None:
    case = Case("reshard", 1024, 2, "memory", "load")
    for times, is_met in ((1.0, True), (1.2, False)):
        verdicts = judge_times(case, Settings(), [timed("ours", 1.0, rchar=int(times * case.nbytes))])
        assert [(round(verdict.found, 3), verdict.is_met) for verdict in verdicts] == [(times, is_met)]


def test_peak_memory_is_judged_without_what_plans_take() -> None:
    save, load, plan = MemoryUse(200 * MIB, 0), MemoryUse(100 * MIB, 0), MemoryUse(80 * MIB, 0)
    case = replace(SAVE, measure="memory")
    verdicts = judge_memory(case, [Footprint("ours", save, load, plan, None), Footprint("torch-dcp", save, save)])
    assert [(verdict.found, verdict.is_met) for verdict in verdicts] == [(120.0, True), (100.0, True)]
    assert not next(judge_memory(case, [Footprint("ours", save, load)])).is_met


def test_a_run_lasts_from_the_first_rank_to_the_last_and_the_first_run_is_kept_apart() -> None:
    def run(number: int, began: float, ended: float) -> Run:
        return Run("ours", number, began, ended, IoCounts(rchar=5))

    ranks = [[run(FIRST, 0, 9), run(0, 10, 11), run(1, 20, 22)], [run(FIRST, 0, 8), run(0, 10.5, 13), run(1, 20, 21)]]
    assert merge(["ours"], ranks) == [Timed("ours", (3, 2), 9, IoCounts(rchar=10))]


def test_one_changed_bit_after_a_load_is_found() -> None:
    state = make_state([TensorSpec("a", (3, 5), "float32"), TensorSpec("b", (7,), "bfloat16")], Rank(0, 1))
    check_loaded("ours", state)
    state.locals["b"].view(-1)[6:].zero_()
    with pytest.raises(ContestantError, match="ours: loaded other bits than were saved: b"):
        check_loaded("ours", state)


def test_peak_memory_counts_what_is_freed_before_the_end() -> None:
    meter = MemoryMeter()
    block = bytearray(os.urandom(64)) * (1 << 20)
    del block
    use = meter.use()
    assert use.peak >= 60 * MIB > use.kept


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_its_size_and_can_be_cut_by_its_ranks(name: str) -> None:
    workload = WORKLOADS[name]
    for mib in (workload.mib, engines.QUICK_MIB):
        case = Case(name, mib, max(workload.world_sizes), "memory", "load")
        assert 0.9 < case.nbytes / (mib * MIB) < 1.5
        assert len({spec.name for spec in case.tensors}) == len(case.tensors)
        for spec in case.tensors:
            assert math.prod(spec.shape) > 0
            assert spec.shape[0] % case.world_size == spec.shape[workload.load_cut] % case.world_size == 0


def test_every_selectable_case_has_a_contestant_of_ours_and_cold_loads_are_on_disk() -> None:
    cases = list(cases_of(list(WORKLOADS), [1, 2, 4], ["memory", "disk"], ["save", "load", "cold", "memory"]))
    assert {case.workload for case in cases} == set(WORKLOADS)
    assert all(case.place == "disk" for case in cases if case.measure == "cold")
    for case in cases:
        assert {"ours", "ours-open"} & set(taking_part(case, list(CONTESTANTS), {})[0])
    assert len(set(cases)) == len(cases)
