"""Wherever the output of a command goes, it ends with its own exit code, and never with a traceback."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.cli import tables
from dcp_core.cli.main import main
from dcp_core.cli.tables import plain_table, width_of, write_table
from dcp_core.inspection import verify as verifying
from tests.core.damage import flipped

LONG = "model." + "x" * 200


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("output")
    state = {LONG: np.ones(3), "層": {"w": np.arange(12.0).reshape(3, 4)}, "step": 3}
    state |= {f"t{number}": np.ones(1) for number in range(3000)}
    for name in ("whole", "damaged"):
        api.save(state, checkpoint_id=path / name, durable=False)
    (data,) = (path / "damaged").glob("*.safetensors")
    flipped(data.name, -1)(path / "damaged")
    return path


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-m", "dcp_core.cli", *map(str, arguments)]
    return subprocess.Popen(command, text=True, encoding="utf-8", stderr=subprocess.PIPE, **options)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, out, err


def test_whoever_reads_no_further_changes_no_exit_code(root: Path) -> None:
    for command, code in ((["inspect", root / "whole", "--limit", 0], 0), (["verify", root / "damaged", "--json"], 1)):
        process = start(*command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        with process.stderr:
            assert (process.wait(60), process.stderr.read()) == (code, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line(root: Path) -> None:
    for command in (["inspect", root / "whole"], ["verify", root / "whole"], ["verify", root / "whole", "--json"]):
        with open("/dev/full", "w") as full:
            code, _, err = ended(start(*command, stdout=full))
        assert (code, err.count("\n")) == (1, 1)
        assert err.startswith("dcp: cannot write the output: ")


def test_a_process_without_stdout_still_has_its_exit_code(root: Path) -> None:
    for name, code in (("whole", 0), ("damaged", 1)):
        script = f'exec "{sys.executable}" -m dcp_core.cli verify "{root / name}" >&- 2>&-'
        assert subprocess.run(["sh", "-c", script], timeout=60, check=False).returncode == code


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_encoding_can_show_every_name_and_picture(encoding: str, root: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    shown = "層" if encoding == "utf-8" else "\\u5c64"
    code, out, err = ended(start("inspect", root / "whole", "--keys", "*.w", stdout=subprocess.PIPE, env=environment))
    assert (code, err, f"\n{shown}.w " in out) == (0, "", True)
    code, out, err = ended(
        start("inspect", root / "whole", "--tensor", "層.w", stdout=subprocess.PIPE, env=environment)
    )
    assert (code, err) == (0, "")
    assert ("│ 0 " in out) == (encoding == "utf-8")
    assert ("| 0 " in out and "+---" in out) == (encoding != "utf-8")


def test_an_interrupt_ends_a_command_with_one_line_and_no_thread(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verifying, "_taken", interrupted)
    assert main(["verify", str(root / "whole")]) == 130
    assert capsys.readouterr() == ("", "dcp: interrupted\n")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcp-verify")]


# --- tables ------------------------------------------------------------------------------------------


def test_a_long_name_makes_its_own_row_long_and_no_other() -> None:
    lines = plain_table(["name", "bytes"], [[LONG, "1 B"], ["b", "2 B"]]).splitlines()
    assert lines[1] == f"{LONG}  1 B"
    assert max(len(line) for line in (lines[0], lines[2])) < 70


def test_columns_stand_below_each_other_whatever_the_script() -> None:
    lines = plain_table(["name", "n"], [["層層", "1"], ["e\u0301a", "2"], ["abcd", "3"]]).splitlines()
    assert {width_of(line) for line in lines} == {len("name  n")}


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_shows_names_whole_however_narrow_it_is(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    name = "model.layers.10.[red]self_attention[/red].query.weight"
    write_table(("name", "type", "shape", "bytes"), [[name, "bfloat16", "[1024, 1024]", "2.0 MiB"]])
    text = re.sub("\x1b\\[[0-9;]*m", "", output.getvalue())
    lines = text.splitlines()
    assert "…" not in text
    if "┃" in text:
        assert max(map(len, lines)) <= width
        first = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
        assert "".join(first) == name
        assert "bfloat16" in text and "[1024, 1024]" in text
    else:
        assert (width, name in text) == (40, True)


def test_what_is_wrong_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    tables.write_error("no \x1b[31m such\nkey")
    assert capsys.readouterr().err == "dcp: no \\x1b[31m such key\n"
