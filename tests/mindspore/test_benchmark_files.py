"""The benchmark beside MindSpore's own files runs, compares every bit, and leaves nothing behind; no time is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mindspore_files import Clocked, judge
from benchmarks.workloads import TensorSpec, transformer
from tests.mindspore.ms_ranks import MindSporeRank, run_mindspore

NAMES = [
    "mindspore", "mindspore-fsync", "ours", "ours-no-fsync",
    "load-mapped", "load-mindspore", "load-copied", "load-ours", "load-unverified", "copy", "async",
]  # fmt: skip
TINY = (TensorSpec("fc.weight", (3, 5), "bfloat16"), TensorSpec("fc.bias", (1025,), "float32"))


def _run_command(rank: MindSporeRank, arguments: list[str]) -> int:
    from benchmarks.mindspore_files import main

    return main(arguments)


def run_quick(tmp_path: Path) -> dict[str, Any]:
    """Run the command's function in an empty directory, and give the figures that it writes."""
    figures, scratch = tmp_path / "figures.json", tmp_path / "scratch"
    scratch.mkdir()
    arguments = ["--quick", "--memory-dir", str(scratch), "--disk-dir", str(scratch), "--json", str(figures)]
    assert run_mindspore(_run_command, 1, arguments, start="alone", timeout_seconds=120.0) == [0]
    assert list(scratch.iterdir()) == []
    content: dict[str, Any] = json.loads(figures.read_text(), parse_constant=pytest.fail)
    return content


def test_a_quick_run_times_every_operation_on_both_kinds_of_storage(tmp_path: Path) -> None:
    found = run_quick(tmp_path)
    assert [result["place"] for result in found["results"]] == ["memory", "disk"]
    for result in found["results"]:
        assert [row["name"] for row in result["operations"]] == NAMES and result["budgets"] == []
        assert all(len(row["seconds"]) == len(row["processor_seconds"]) == 1 for row in result["operations"])
        assert all(row["seconds"][0] > 0 and row["first_seconds"] > 0 for row in result["operations"])
    assert found["machine"]["versions"]["mindspore"]


def _loads_in_turn(rank: MindSporeRank, directory: str) -> dict[str, tuple[str | None, str | None]]:
    """What differs before and after each operation that fills a net."""
    from benchmarks.mindspore_contest import Contest

    contest = Contest(TINY, directory)
    contest.save_sources()
    found = {}
    for name, operation in contest.operations().items():
        if operation.fills:
            net = contest.fresh_net()
            before = contest.first_difference(net)
            operation.run(net)
            found[name] = before, contest.first_difference(net)
    return found


def test_every_load_and_the_copy_fill_a_net_that_held_something_else(tmp_path: Path) -> None:
    [found] = run_mindspore(_loads_in_turn, 1, str(tmp_path), start="alone")
    assert found == {name: ("fc.weight", None) for name in NAMES if name.startswith(("load", "copy"))}


def _bits_of_a_damaged_source(rank: MindSporeRank, directory: str) -> str | None:
    from benchmarks.mindspore_contest import Contest

    contest = Contest(TINY, directory)
    contest.save_sources()
    file = Path(directory) / "net.safetensors"
    file.chmod(0o600)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    net = contest.fresh_net()
    contest.operations()["load-mapped"].run(net)
    return contest.first_difference(net)


def test_one_wrong_byte_is_found(tmp_path: Path) -> None:
    [found] = run_mindspore(_bits_of_a_damaged_source, 1, str(tmp_path), start="alone")
    assert found == "fc.weight"  # safetensors puts wider elements first


def test_saves_and_loads_are_judged_by_mindspore_and_the_call_by_a_copy() -> None:
    seconds = dict.fromkeys(NAMES, 1.0) | {"mindspore": 4.0, "ours": 2.0, "load-ours": 0.6, "async": 1.25}
    found = [Clocked(name, "", [value], [value]) for name, value in seconds.items()]
    assert [(each.found, each.is_met) for each in judge(found, 1024)] == [
        (2.0, True), (pytest.approx(1 / 0.6), False), (1.25, True),
    ]  # fmt: skip
    assert list(judge(found, 4)) == []


def test_the_state_is_a_transformer_of_some_hundred_parameters_of_two_types() -> None:
    specs = transformer(1024)
    assert 200 < len(specs) < 400 and {spec.dtype for spec in specs} == {"bfloat16", "float32"}
