"""The benchmark of shared reads runs, counts what ranks read, and leaves nothing behind. No test looks at its times."""

from __future__ import annotations

import io
import json
import platform
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import shared_reads
from benchmarks.contestant import ContestantError
from benchmarks.counters import IoCounts
from benchmarks.machine import CpuTimes, MachineLoad, cpu_times
from benchmarks.ranks import Rank, preload
from benchmarks.sharing.cases import MEASURES, SharedCase, cases_of
from benchmarks.sharing.judge import judge_loads
from benchmarks.sharing.loads import RankLoads, SharedLoads, _check, _load_of, together
from benchmarks.sharing.metered import MeteredFile, MeteredStorage, ReadMeter
from benchmarks.sharing.report import LoadsFound
from benchmarks.states import make_state
from benchmarks.trials import FIRST, Run, Timed
from benchmarks.workloads import MIB, TensorSpec

preload()  # before the first test starts the fork server

WARM = SharedCase("warm", 1024, 4, "memory", None)


def run_quick(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run the command's function in an empty directory, and give the figures that it writes."""
    figures, scratch = tmp_path / "figures.json", tmp_path / "scratch"
    scratch.mkdir()
    places = ["--memory-dir", str(scratch), "--disk-dir", str(scratch)]
    assert shared_reads.main(["--quick", *places, "--timeout", "150", "--json", str(figures), *arguments]) == 0
    assert list(scratch.iterdir()) == []
    text = figures.read_text()
    assert str(tmp_path) not in text and platform.node() not in text.split('"')
    content: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    return content


def loads(contestant: str, *seconds: float, nbytes: int = 25) -> SharedLoads:
    return SharedLoads(Timed(contestant, seconds, None, IoCounts()), ((nbytes,) * 4,) * len(seconds), 100)


def test_a_quick_run_reads_shared_tensors_once_and_others_on_every_rank(tmp_path: Path) -> None:
    found = run_quick(tmp_path, "--measures", "batches", "throttled", "--mb-per-second", "1000")
    batches, throttled = found["cases"]
    rows = {row["timed"]["contestant"]: row for row in batches["loads"]}
    assert list(rows) == ["ours", "ours-unbatched", "ours-apart", "ours-auto", "torch-dcp"]
    for name, least, most in [("ours", 0.9, 1.1), ("ours-unbatched", 0.9, 1.1), ("ours-apart", 3.5, 4.5)]:
        assert least < rows[name]["times_read"] < most
    assert rows["ours"]["imbalance"] < 1.5 and rows["torch-dcp"]["times_read"] > 3.5
    assert [len(row["read_nbytes"]) for row in batches["loads"]] == [1] * 5
    assert throttled["bytes_per_second"] == 1e9 and throttled["left_out"] == {} and throttled["failure"] is None
    assert throttled["machine_load"]["others"] >= 0 and found["machine"]["versions"]["torch"]


def test_no_more_bytes_pass_a_meter_than_its_rate_allows_also_after_a_pause_and_in_threads() -> None:
    meter = ReadMeter(1e6)
    meter.passed(1, time.monotonic())
    time.sleep(0.05)  # lost: nothing is saved up for later
    began = time.monotonic()
    threads = [threading.Thread(target=meter.passed, args=(10_000, began)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.04 and meter.nbytes == 40_001


def test_every_way_to_read_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    meter = ReadMeter()
    assert MeteredStorage(str(tmp_path), meter).read("a", 10, 20) == bytes(range(10, 30)) and meter.nbytes == 20
    with MeteredFile(str(tmp_path / "a"), meter) as file:
        stream = io.BufferedReader(file, 10)
        assert stream.read(7) == bytes(range(7)) and meter.nbytes == 30  # a buffer of it
        assert stream.read() == bytes(range(7, 100)) and meter.nbytes == 120


def test_the_ranks_views_are_put_together_by_round_and_the_first_is_kept_apart() -> None:
    def rank(number: int) -> RankLoads:
        order = [("ours", FIRST), ("torch-dcp", FIRST), ("torch-dcp", 0), ("ours", 0)]
        runs = tuple(Run(name, at, 10.0 * i, 10.0 * i + 1 + number, IoCounts()) for i, (name, at) in enumerate(order))
        return RankLoads(runs, (1, 2, 300, 50 + number), {"ours": 101, "torch-dcp": 300}, 2.0, CpuTimes(7.0, 1.0), 10.0)

    by_rank = [rank(0), rank(1)]
    ours, theirs = together(["ours", "torch-dcp"], by_rank)
    assert ours.read_nbytes == ((50, 51),) and ours.times_read == 1.0 and ours.imbalance == 51 / 50
    assert ours.timed.seconds == (2.0,) and theirs.times_read == 2.0
    assert _load_of(by_rank, 0.5, 2.5) == MachineLoad(0.5, 2.5, 0.3, 0.1)


def test_a_rank_that_read_nothing_leaves_the_imbalance_open_and_the_table_says_so() -> None:
    idle = replace(loads("ours", 1.0), read_nbytes=((100, 0),))
    assert idle.imbalance is None
    lines = list(LoadsFound(MIB, (idle,), MachineLoad(0.0, 0.0, 0.0, 0.0)).lines())
    assert lines[1].split()[-1] == "-" and lines[-1].startswith("  machine: load average 0.00 before")


def test_auto_is_judged_by_the_better_way_and_reads_by_the_checkpoint() -> None:
    rows = [loads("ours", 4.0), loads("ours-apart", 2.0), loads("ours-auto", 2.5)]
    assert [(verdict.found, verdict.is_met) for verdict in judge_loads(WARM, rows)] == [(1.25, True), (1.0, True)]
    slow = [loads("ours", 2.0, nbytes=26), rows[1], loads("ours-auto", 9.0, 2.6, 1.0)]
    assert [(verdict.found, verdict.is_met) for verdict in judge_loads(WARM, slow)] == [(1.3, False), (1.04, False)]
    assert list(judge_loads(replace(WARM, mib=2), rows)) == [] and list(judge_loads(WARM, rows[1:])) == []
    text = "\n".join(LoadsFound(MIB, tuple(rows), MachineLoad(0.0, 0.0, 0.0, 0.0)).lines())
    assert "by round: 1.25" in text


def test_loaded_bits_that_differ_are_found() -> None:
    state = make_state([TensorSpec("a", (3, 5), "float32")], Rank(0, 1))
    digests = state.digests()
    _check("ours", state, digests)
    state.locals["a"].view(-1)[14] += 1
    with pytest.raises(ContestantError, match="ours: loaded other bits than were saved: a"):
        _check("ours", state, digests)


def test_a_run_that_would_not_fit_or_has_one_rank_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shared_reads.main(["--mib", str(1 << 21), "--measures", "warm", "--memory-dir", str(tmp_path)]) == 2
    assert "warm, memory, 4 ranks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        shared_reads.main(["--replicas", "1", "--memory-dir", str(tmp_path)])
    assert "--replicas" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_states_have_the_sizes_that_the_page_says() -> None:
    by_name = {case.measure: case for case in cases_of(list(MEASURES), [4], ["memory"])}
    assert (len(by_name["batches"].tensors), by_name["batches"].nbytes) == (512, 32 * MIB)
    for name in ("warm", "throttled"):
        assert {spec.nbytes for spec in by_name[name].tensors} == {16 * MIB} and by_name[name].nbytes == 1024 * MIB
    assert by_name["throttled"].about == "slow storage, 100 MB/s for each rank"


def test_the_machine_counts_its_busy_seconds() -> None:
    before, own = cpu_times(), time.process_time()
    while time.process_time() < own + 0.05:
        pass
    spent = cpu_times() - before
    assert spent.busy >= 0.03 and spent.stolen >= 0  # it counts in steps of 10 ms
