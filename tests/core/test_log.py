"""Stages are timed, logged and traced as the environment asks."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dcp_core.log import stage

_COST = re.compile(r"\[INFO\] \[HP-DCP\]: \[rank=3\] >>> func build_local_plan cost \d+\.\d{4} seconds")
_ONE_STAGE = """
from dcp_core.log import set_rank, stage
set_rank(3)
with stage("build_local_plan"):
    pass
"""
_MANY_STAGES = """
import sys
from dcp_core.log import set_rank, stage
set_rank(int(sys.argv[1]))
for _ in range(200):
    with stage("execute_write"):
        pass
"""


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DCP_", "HP_", "RANK"))}
    return kept | dict(variables)


def _run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "always", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=_environment(variables), check=True)


def _events(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.startswith("[\n")
    events: list[dict[str, Any]] = json.loads(text.rstrip().rstrip(",") + "]")
    return events


def test_nothing_is_printed_unless_asked_for() -> None:
    assert _run(_ONE_STAGE).stderr == ""


@pytest.mark.parametrize(
    "variables",
    [
        {"DCP_LOG": "INFO"},
        {"DCP_LOG": "debug"},
        {"HP_LOG_CONFIG": "DCP:INFO"},
        {"HP_LOG_CONFIG": "FSDP:ERROR, DCP:info"},
        {"DCP_LOG": "INFO", "HP_LOG_CONFIG": "DCP:ERROR"},
    ],
)
def test_a_stage_is_logged_with_rank_and_seconds(variables: dict[str, str]) -> None:
    assert _COST.fullmatch(_run(_ONE_STAGE, **variables).stderr.strip())


@pytest.mark.parametrize("variables", [{"DCP_LOG": "ERROR"}, {"HP_LOG_CONFIG": "FSDP:INFO"}])
def test_a_stage_is_not_logged_below_the_level_or_for_others(variables: dict[str, str]) -> None:
    assert _run(_ONE_STAGE, **variables).stderr == ""


def test_an_unknown_level_is_one_warning() -> None:
    result = _run(_ONE_STAGE + "with stage('x'):\n    pass\n", DCP_LOG="LOUD")
    assert result.stderr.count("DCP_LOG asks for the log level 'LOUD'") == 1


@pytest.mark.parametrize("variable", ["RANK", "RANK_ID"])
def test_before_a_rank_is_set_the_launchers_is_shown(variable: str) -> None:
    code = "from dcp_core.log import stage\nwith stage('save'):\n    pass\n"
    assert "[rank=5]" in _run(code, DCP_LOG="INFO", **{variable: "5"}).stderr


def test_a_decorated_function_keeps_name_and_result_and_may_nest(caplog: pytest.LogCaptureFixture) -> None:
    @stage("countdown")
    def countdown(number: int) -> int:
        return countdown(number - 1) + 1 if number else 0

    with caplog.at_level(logging.INFO, logger="dcp"):
        assert countdown(3) == 3
    assert countdown.__name__ == "countdown"
    costs = [float(record.getMessage().split()[4]) for record in caplog.records]
    assert len(costs) == 4
    assert costs == sorted(costs)  # the inner calls end first


def test_a_stage_that_fails_says_so_and_lets_the_error_through(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dcp"), pytest.raises(KeyError), stage("execute_read"):
        raise KeyError("w")
    assert caplog.records[0].getMessage().startswith(">>> func execute_read failed with KeyError after 0.")


def test_the_trace_of_one_rank_names_rank_stage_and_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _run(_ONE_STAGE, DCP_TRACE=str(path))
    name, event = _events(path)
    assert name == {"name": "process_name", "ph": "M", "pid": 3, "args": {"name": "rank 3"}}
    assert (event["name"], event["ph"], event["pid"]) == ("build_local_plan", "X", 3)
    assert 0 <= event["dur"] < 1e6
    assert event["ts"] > 1.6e15  # microseconds since 1970: the clocks of ranks agree
    assert list(tmp_path.iterdir()) == [path]


def test_processes_that_trace_into_one_file_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command = [sys.executable, "-W", "error", "-c", _MANY_STAGES]
    environment = _environment({"DCP_TRACE": str(path)})
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(4)]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0, 0, 0]
    events = _events(path)
    for rank in range(4):
        of_rank = [event["ph"] for event in events if event["pid"] == rank]
        assert of_rank == ["M", *["X"] * 200]
    assert list(tmp_path.iterdir()) == [path]


def test_a_second_run_appends_to_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _run(_ONE_STAGE, DCP_TRACE=str(path))
    _run(_ONE_STAGE, DCP_TRACE=str(path))
    assert len(_events(path)) == 4


def test_a_trace_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    result = _run(_ONE_STAGE + "with stage('x'):\n    pass\n", DCP_TRACE=str(tmp_path / "missing" / "trace.json"))
    assert result.stderr.count("RuntimeWarning: DCP_TRACE: cannot write") == 1


def test_a_full_disk_ends_the_trace_and_not_the_stage() -> None:
    result = _run(_ONE_STAGE + "with stage('x'):\n    pass\n", DCP_TRACE="/dev/full")
    assert result.stderr.count("RuntimeWarning: DCP_TRACE: cannot write /dev/full") == 1


def test_threads_time_their_own_stages(caplog: pytest.LogCaptureFixture) -> None:
    both_inside = threading.Barrier(2, timeout=30)

    @stage("shared")
    def shared() -> None:
        both_inside.wait()

    with caplog.at_level(logging.INFO, logger="dcp"):
        threads = [threading.Thread(target=shared) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caplog.records) == 2


def test_importing_the_module_configures_nothing() -> None:
    code = "import logging, dcp_core.log; print(logging.getLogger('dcp').handlers)"
    assert _run(code, DCP_LOG="INFO").stdout.strip() == "[]"


def test_the_rank_that_was_set_wins() -> None:
    code = "from dcp_core.log import current_rank, set_rank; print(current_rank()); set_rank(2); print(current_rank())"
    assert _run(code, RANK="9").stdout.split() == ["9", "2"]
