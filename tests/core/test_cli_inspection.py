"""`dcp verify`, `dcp inspect` and `dcp diff`: what they print, their exit codes, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from dcp_core import api
from dcp_core.cli.main import main
from dcp_core.cli.tables import printable, write_line
from dcp_core.inspection.report import RESTORE
from dcp_core.state_path import PerRank
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.damage import flipped
from tests.core.huggingface_files import write_shards

WORLD = 2
Run = Callable[..., tuple[int, str, str]]


def save_cut(context: RankContext, directory: Path, dim: int, tag: float = 1.0) -> None:
    whole = np.arange(48.0).reshape(8, 6) * tag
    state = {
        "model": {"w": ShardedArray.cut(whole, even_boxes((8, 6), WORLD, context.rank, dim), "float64")},
        "lr": 0.1 * tag,
    }
    api.save(state, checkpoint_id=directory, adapter=NumpyRankAdapter(), durable=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspection")
    for name, dim, tag in (("rows", 0, 1.0), ("columns", 1, 1.0), ("other", 0, 2.0)):
        run_ranks(save_cut, WORLD, path / name, dim, tag)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


# --- verify ------------------------------------------------------------------------------------------


def test_a_whole_checkpoint_has_exit_code_0(root: Path, run: Run) -> None:
    code, out, err = run("verify", root / "rows")
    assert (code, err) == (0, "")
    assert out.startswith(f"{root / 'rows'}: whole\n")
    assert "1 tensor in 2 boxes, 1 other value\n" in out
    code, out, _ = run("verify", root / "rows", "--quick")
    assert code == 0
    assert "as far as a quick look tells" in out and "not compared" in out


def test_a_damaged_one_has_exit_code_1_and_every_problem_says_what_where_and_what_to_do(
    root: Path, tmp_path: Path, run: Run
) -> None:
    run_ranks(save_cut, WORLD, tmp_path / "c", 0)
    flipped("_rank0_.safetensors", -1)(tmp_path / "c")
    (tmp_path / "c" / "_rank1_.safetensors").unlink()
    (tmp_path / "c" / "stray.txt").write_text("x")
    code, out, err = run("verify", tmp_path / "c")
    assert (code, err) == (1, "")
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert out.startswith(f"{tmp_path / 'c'}: 2 problems\n")
    for word in (
        "damaged data  _rank0_.safetensors  bytes",
        "missing file  _rank1_.safetensors",
        "'model.w'",
        "stray.txt",
    ):
        assert word in out
    assert [rest for label, *rest in lines if label == "remedy"] == [[RESTORE]] * 2
    assert [rest for label, *rest in lines if label == "found"] == [["no file"]]
    found = json.loads(run("verify", tmp_path / "c", "--json")[1])
    assert (found["is_whole"], [each["kind"] for each in found["problems"]]) == (
        False,
        ["damaged data", "missing file"],
    )
    assert found["problems"][0]["keys"] == ["model.w"]
    assert [stray["name"] for stray in found["strays"]] == ["stray.txt"]


@pytest.mark.parametrize("arguments", [["nowhere"], ["."], [], ["a", "b"], ["--nonsense", "x"], ["nix://a/b"]])
def test_no_checkpoint_and_wrong_arguments_have_exit_code_2(
    arguments: list[str], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("verify", *arguments)
    assert (code, out) == (2, "")
    assert err


def test_a_save_that_was_not_completed_has_exit_code_1(root: Path, tmp_path: Path, run: Run) -> None:
    run_ranks(save_cut, WORLD, tmp_path / "c", 0)
    (tmp_path / "c" / ".metadata").unlink()
    code, out, _ = run("verify", tmp_path / "c")
    assert code == 1
    assert "no save has been completed" in out
    for command in ("inspect", "convert"):
        more = () if command == "inspect" else (tmp_path / "out", "--to", "hf")
        code, _, err = run(command, tmp_path / "c", *more)
        assert (code, "no checkpoint has been completed" in err) == (1, True)


def test_safetensors_are_verified_as_far_as_they_go(tmp_path: Path, run: Run) -> None:
    (tmp_path / "hf").mkdir()
    names = write_shards(tmp_path / "hf", [{"a": np.ones(3)}, {"b": np.ones(4)}, {"c": np.ones(5)}])
    code, out, _ = run("verify", tmp_path / "hf")
    assert (code, "no checksums" in out) == (0, True)
    (tmp_path / "hf" / "extra.safetensors").write_bytes((tmp_path / "hf" / names[0]).read_bytes())
    short = (tmp_path / "hf" / names[1]).read_bytes()
    (tmp_path / "hf" / names[1]).write_bytes(short[:-1])
    (tmp_path / "hf" / names[2]).unlink()
    found = json.loads(run("verify", tmp_path / "hf", "--json")[1])
    assert [(each["kind"], each["file"], each["keys"]) for each in found["problems"]] == [
        ("wrong size", names[1], ["b"]),
        ("missing file", names[2], ["c"]),
    ]
    assert [stray["name"] for stray in found["strays"]] == ["extra.safetensors"]
    assert run("verify", tmp_path / "hf" / names[0])[0] == 0
    assert run("verify", tmp_path / "hf" / names[1])[0] == 1
    (tmp_path / "hf" / "model.safetensors.index.json").write_text("{")
    code, out, _ = run("verify", tmp_path / "hf")
    assert (code, "damaged description" in out) == (1, True)


def test_several_checkpoints_are_verified_one_after_the_other(root: Path, tmp_path: Path, run: Run) -> None:
    run_ranks(save_cut, WORLD, tmp_path / "c", 0)
    (tmp_path / "c" / "_rank1_.safetensors").unlink()
    code, out, err = run("verify", root / "rows", tmp_path / "c", root / "columns")
    assert (code, err) == (1, "")
    heads = [line for line in out.splitlines() if line.startswith("/")]
    assert heads == [f"{root / 'rows'}: whole", f"{tmp_path / 'c'}: 1 problem", f"{root / 'columns'}: whole"]
    code, out, err = run("verify", tmp_path / "c", root / "nowhere", root / "rows", "--json")
    assert (code, "nowhere" in err) == (2, True)
    found = json.loads(out)
    assert [each["place"] for each in found] == [str(tmp_path / "c"), str(root / "nowhere"), str(root / "rows")]
    assert [each.get("is_whole", each.get("error", "")[:8]) for each in found] == [False, "there is", True]


def test_a_file_is_not_taken_for_what_it_is_not(root: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "notes").write_text("nothing that torch would write")
    for path in (root / "rows" / ".metadata", root / "rows" / "_rank0_.bytes"):
        for command in (["verify"], ["inspect"], ["diff", root / "rows"]):
            code, _, err = run(*command, path)
            assert (code, f"the directory that it lies in: {str(root / 'rows')!r}" in err) == (2, True)
    code, _, err = run("verify", tmp_path / "notes")
    assert (code, "no kind that is known" in err) == (2, True)
    code, out, _ = run("verify", root / "rows" / "_rank0_.safetensors")
    assert (code, "verify the directory" in out) == (0, True)


def test_what_cannot_be_looked_at_is_unreadable_not_damaged(root: Path, tmp_path: Path, run: Run) -> None:
    run_ranks(save_cut, WORLD, tmp_path / "c", 0)
    (tmp_path / "c" / ".metadata").unlink()
    (tmp_path / "c" / ".metadata").symlink_to(".metadata")
    code, out, _ = run("verify", tmp_path / "c", "--json")
    found = json.loads(out)
    assert (code, [each["kind"] for each in found["problems"]]) == (1, ["unreadable"])
    assert {stray["text"].partition(", ")[2] for stray in found["strays"]} == {
        "which may be part of what cannot be read"
    }


# --- inspect -----------------------------------------------------------------------------------------


def test_what_is_inside_is_listed(root: Path, run: Run) -> None:
    code, out, err = run("inspect", root / "rows")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["model.w", "float64", "[8,", "6]", "2", "x", "1", "2", "2", "384", "B"] in lines
    assert ["lr", "9", "B", "0.1"] in lines
    assert "balance: 2 of 2 ranks wrote" in out
    assert any(line[:3] == ["_rank1_.safetensors", "1", "box"] for line in lines if line)


def test_json_has_all_of_it(root: Path, run: Run) -> None:
    found = json.loads(run("inspect", root / "columns", "--json")[1])
    assert (found["format"], found["world_size"], found["tensor_count"], found["box_count"]) == ("dcp", 2, 1, 2)
    (tensor,) = found["tensors"]
    assert (tensor["name"], tensor["cut"], tensor["nbytes"]) == ("model.w", [1, 2], 384)
    assert [entry["summary"] for entry in found["objects"]] == ["0.1"]
    assert {file["rank"] for file in found["files"]} == {0, 1}
    assert json.loads(run("inspect", root / "columns", "--json", "--keys", "nix*")[1])["tensors"] == []


def test_tables_are_cut_short_and_say_so(tmp_path: Path, run: Run) -> None:
    api.save({f"x{n}": np.ones(1) for n in range(5)}, checkpoint_id=tmp_path / "c", durable=False)
    _, out, _ = run("inspect", tmp_path / "c", "--limit", 2)
    assert "and 3 more tensors" in out and "x1" in out and "x2" not in out
    assert "x4" in run("inspect", tmp_path / "c", "--limit", 0)[1]
    assert "x4" in run("inspect", tmp_path / "c", "--keys", "x[34]", "--limit", 2)[1]


def test_a_tensor_is_drawn_as_text_and_into_a_file(root: Path, tmp_path: Path, run: Run) -> None:
    code, out, _ = run("inspect", root / "rows", "--tensor", "model.w")
    assert code == 0
    assert "│ 0" in out and "│ 1" in out and "rank 1: 1 box, 192 bytes" in out
    code, out, _ = run("inspect", root / "rows", "--tensor", "model.w", "--svg", tmp_path / "w.svg")
    assert (code, out) == (0, f"wrote {tmp_path / 'w.svg'}\n")
    ElementTree.parse(tmp_path / "w.svg")


def test_what_a_rank_saved_alone_is_inspected_by_its_number(tmp_path: Path, run: Run) -> None:
    run_ranks(_save_alone, WORLD, tmp_path / "c")
    code, _, err = run("inspect", tmp_path / "c")
    assert (code, "these ranks saved alone there: 0, 1. Pass --rank" in err) == (1, True)
    assert run("inspect", tmp_path / "c", "--rank", 2)[0] == 1
    code, out, _ = run("inspect", tmp_path / "c", "--rank", 1)
    assert (code, "float64  [1]" in out) == (0, True)


def _save_alone(context: RankContext, directory: Path) -> None:
    state = {"x": np.ones(context.rank)}
    api.save(state, checkpoint_id=directory, adapter=NumpyRankAdapter(), use_collectives=False, durable=False)


def test_values_of_one_rank_are_chosen_by_its_number(tmp_path: Path, run: Run) -> None:
    run_ranks(_save_own, WORLD, tmp_path / "c")
    found = json.loads(run("inspect", tmp_path / "c", "--json", "--rank", 1)[1])
    assert [(each["name"], each["rank"], each["summary"]) for each in found["objects"]] == [
        ("lr", None, "0.5"),
        ("seed", 1, "10"),
    ]
    assert [(each["name"], each["rank"]) for each in found["tensors"]] == [("generator", 1)]
    code, _, err = run("inspect", tmp_path / "c", "--rank", 2)
    assert (code, "there is no rank 2" in err) == (2, True)
    assert run("diff", tmp_path / "c", tmp_path / "c", "--rank", 1)[0] == 0
    assert run("diff", tmp_path / "c", tmp_path / "c", "--rank", 2)[0] == 2


def _save_own(context: RankContext, directory: Path) -> None:
    state = {"seed": PerRank(10 * context.rank), "generator": np.full(3, context.rank), "lr": 0.5}
    api.save(state, checkpoint_id=directory, adapter=NumpyRankAdapter(), durable=False)


def test_a_name_is_found_as_it_is_shown_and_others_that_are_like_it(tmp_path: Path, run: Run) -> None:
    state = {"a\nb[0]": np.ones(3), "model": {"weight": np.ones(4)}}
    api.save(state, checkpoint_id=tmp_path / "c", durable=False)
    assert run("inspect", tmp_path / "c", "--tensor", "a\\nb[0]")[0] == 0
    assert "a\\nb[0]" in run("inspect", tmp_path / "c", "--keys", "a\nb[0]")[1]
    assert "no name matches 'nix'" in run("inspect", tmp_path / "c", "--keys", "nix")[1]
    for wrong in ("model.weigth", "weight"):
        code, _, err = run("inspect", tmp_path / "c", "--tensor", wrong)
        assert (code, "did you mean 'model.weight'?" in err) == (1, True)


def test_the_boxes_of_a_tensor_come_as_json(root: Path, run: Run) -> None:
    found = json.loads(run("inspect", root / "columns", "--tensor", "model.w", "--json")[1])
    assert found["boxes"] == [
        {"offsets": [0, 0], "sizes": [8, 3], "holder": "rank 0"},
        {"offsets": [0, 3], "sizes": [8, 3], "holder": "rank 1"},
    ]
    assert (found["name"], found["dtype"], found["shape"]) == ("model.w", "float64", [8, 6])


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere"], 2, "there is nothing"),
        (["rows", "--tensor", "model.w", "--svg", "x.svg", "--json"], 2, "one of them"),
        (["rows", "--svg", "x.svg"], 2, "--tensor"),
        (["rows", "--limit", "-1"], 2, "--limit"),
        (["rows", "--tensor", "nix"], 1, "nothing under 'nix'"),
        (["rows", "--tensor", "lr"], 1, "not a tensor"),
        (["rows", "--tensor", "model.w", "--svg", "no/such/place.svg"], 2, "cannot write"),
    ],
)
def test_what_cannot_be_inspected_says_why(
    arguments: list[str], code: int, says: str, root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    found, out, err = run("inspect", *arguments)
    assert (found, out, says in err) == (code, "", True)


# --- diff --------------------------------------------------------------------------------------------


def test_exit_codes_are_those_of_diff(root: Path, run: Run) -> None:
    code, out, err = run("diff", root / "rows", root / "columns")
    assert (code, err) == (0, "")
    assert out == "nothing differs: 1 tensor and 1 other value in both, 384 B compared\n"
    code, out, _ = run("diff", root / "rows", root / "other")
    assert code == 1
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:2] == ["2", "differences:"]
    assert ["lr", "object", "0.1", "0.2"] in lines
    assert "47 of 48 elements, by at most 47, first at [0, 1]" in out
    assert run("diff", root / "rows", root / "other", "--no-values")[0] == 0
    assert run("diff", root / "rows", root / "other", "--keys", "nix")[0] == 2
    assert run("diff", root / "rows", root / "nowhere")[0] == 2
    assert run("diff", root / "rows")[0] == 2


def test_where_nothing_was_compared_nothing_is_said_to_be_equal(root: Path, run: Run) -> None:
    for more in (["--keys", "nix"], ["--prefix", "nix"], ["--limit", "-1"], ["--rtol", "-1"], ["--rename", "(", ""]):
        code, out, err = run("diff", root / "rows", root / "columns", *more)
        assert (code, out, err.count("\n")) == (2, "", 1), more


def test_trouble_with_one_tensor_is_exit_code_2(root: Path, tmp_path: Path, run: Run) -> None:
    run_ranks(save_cut, WORLD, tmp_path / "c", 0)
    (tmp_path / "c" / "_rank1_.safetensors").unlink()
    code, out, _ = run("diff", root / "rows", tmp_path / "c")
    assert (code, "unreadable" in out) == (2, True)
    assert "  b: _rank1_.safetensors is missing" in out and "arget" not in out


def test_differences_come_as_json(root: Path, run: Run) -> None:
    found = json.loads(run("diff", root / "rows", root / "other", "--json")[1])
    assert [each["key"] for each in found["differences"]] == ["lr", "model.w"]
    assert (found["is_equal"], found["differences"][1]["max_abs"]) == (False, 47.0)


# --- all of them -------------------------------------------------------------------------------------


def test_what_a_stranger_calls_a_tensor_cannot_control_the_terminal(tmp_path: Path, run: Run) -> None:
    name = "\x1b[2J\x07\u202ew\n"
    for place in ("a", "b"):
        state = {name: np.full(3, ord(place)), "v": {name: f"\x1b[31m{place}"}}
        api.save(state, checkpoint_id=tmp_path / place, durable=False)
    (data,) = (tmp_path / "b").glob("*.safetensors")
    said = [
        run("inspect", tmp_path / "a")[1],
        run("inspect", tmp_path / "a", "--tensor", name)[1],
        run("diff", tmp_path / "a", tmp_path / "b")[1],
    ]
    flipped(data.name, -1)(tmp_path / "b")
    said.append(run("verify", tmp_path / "b")[1])
    for out in said:
        assert "[2J" in out
        assert not [each for each in out if each != "\n" and not each.isprintable()]


def test_on_a_terminal_with_rich_lines_have_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    write_line("a ", ("[b]", "bold red"))
    out = capsys.readouterr().out
    assert "[b]" in out and "\x1b[" in out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    write_line("a ", ("[b]", "bold red"))
    assert capsys.readouterr().out == "a [b]\n"


def test_texts_that_can_be_printed_stay_as_they_are() -> None:
    assert printable("ä → 層.w") == "ä → 層.w"
    assert printable("a\x1b\n\u202e") == "a\\x1b\\n\\u202e"


@pytest.mark.parametrize(
    "command", [["verify"], ["inspect"], ["inspect", "--tensor", "model.w"], ["diff"]], ids=" ".join
)
def test_they_run_as_programs_without_any_framework(command: list[str], root: Path) -> None:
    code = "import sys; from dcp_core.cli.main import main; code = main(sys.argv[1:]); "
    code += "sys.exit(code or any(name in sys.modules for name in ('torch', 'mindspore', 'rich')))"
    paths = [str(root / "rows")] * (2 if command == ["diff"] else 1)
    arguments: list[Any] = [sys.executable, "-W", "error", "-c", code, command[0], *paths, *command[1:]]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
