"""`dcp convert`: what it writes, what it says, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dcp_core import api
from dcp_core.cli.main import main
from dcp_core.convert.huggingface_files import INDEX_NAME, SINGLE_NAME
from dcp_core.recipes import places
from dcp_core.storage.base import Storage
from dcp_core.storage.local import LocalStorage


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {
        "model": {"a.w": np.arange(6.0).reshape(2, 3), "b.w": np.ones(4, np.float32)},
        "optimizer": {"lr": 0.1},
        "step": 3,
    }
    api.save(state, checkpoint_id=tmp_path / "dcp", durable=False)
    return tmp_path / "dcp"


def test_a_checkpoint_becomes_safetensors_and_a_checkpoint_again(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "hf"), "--to", "hf", "--prefix", "model"]) == 0
    said = capsys.readouterr().out
    assert "wrote 2 tensors" in said
    assert "optimizer.lr" in said
    assert "step" in said
    assert load_file(tmp_path / "hf" / SINGLE_NAME).keys() == {"a.w", "b.w"}
    arguments = ["convert", str(tmp_path / "hf"), str(tmp_path / "again"), "--to", "dcp", "--rename", "^", "model."]
    assert main(arguments) == 0
    assert np.array_equal(api.read(tmp_path / "again", "model.a.w"), np.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_a_dry_run_says_what_would_be_written_and_writes_nothing(
    to: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = ["--max-shard-size", "40B"] if to == "hf" else []
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--to", to, "--dry-run", *limit]) == 0
    said = capsys.readouterr().out
    expected = (
        ["model-00001-of-00002.safetensors", INDEX_NAME, "not a tensor"]
        if to == "hf"
        else ["model.a.w", "float64", "[2, 3]", "48 B"]
    )
    assert all(word in said for word in expected)
    assert not (tmp_path / "out").exists()
    assert "refused" not in said
    taken = tmp_path / "taken"
    api.save({"w": np.ones(2)}, checkpoint_id=taken, durable=False)
    assert main(["convert", str(checkpoint), str(taken), "--to", to, "--dry-run"]) == 0
    assert "as it is, this would be refused: " in capsys.readouterr().out


def test_what_is_there_is_only_replaced_when_asked(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"x": np.ones(2)}, tmp_path / "x.safetensors")
    for to in ("dcp", "hf"):
        source = [str(checkpoint if to == "hf" else tmp_path / "x.safetensors"), str(tmp_path / to), "--to", to]
        assert main(["convert", *source]) == 0 if not (tmp_path / to / ".metadata").exists() else 2
        assert main(["convert", *source]) == 2
        assert "overwrite" in capsys.readouterr().err
        assert main(["convert", *source, "--overwrite"]) == 0


def test_urls_whose_scheme_a_plugin_knows_are_read_and_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(places, "open_storage", open_toy)
    monkeypatch.setattr(api, "open_storage", open_toy)
    url = f"toy://{tmp_path}"
    assert main(["convert", f"{url}/dcp", f"{url}/hf", "--to", "hf", "--prefix", "model"]) == 0
    assert load_file(tmp_path / "hf" / SINGLE_NAME).keys() == {"a.w", "b.w"}
    for number, source in enumerate((f"{url}/hf", f"{url}/hf/{SINGLE_NAME}")):
        assert main(["convert", source, f"{url}/again{number}", "--to", "dcp"]) == 0
        assert np.array_equal(api.read(tmp_path / f"again{number}", "b.w"), np.ones(4))
    assert main(["convert", f"{url}/hf", f"{url}/again0", "--to", "dcp"]) == 2
    assert main(["convert", f"{url}/dcp", f"{url}/hf", "--to", "hf"]) == 2
    assert main(["convert", "s9://x/y", f"{url}/new", "--to", "hf"]) == 2
    assert "scheme 's9'" in capsys.readouterr().err


def open_toy(url: str) -> Storage | None:
    scheme, _, path = url.partition("://")
    return LocalStorage(path) if scheme == "toy" else None


@pytest.mark.parametrize(
    "wrong",
    [
        ["--to", "hf", "--max-shard-size", "0"],
        ["--to", "hf", "--dtype", "int8"],
        ["--to", "hf", "--prefix", "nix"],
        ["--to", "hf", "--rename", "(", "x"],
        ["--to", "dcp", "--prefix", "model"],
        ["--to", "dcp", "--rename", "a", "b"],
        ["--to", "hf", "--from", "torch"],
    ],
    ids=" ".join,
)
def test_arguments_that_make_no_sense_are_explained_and_nothing_is_written(
    wrong: list[str], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), *wrong]) == 2
    assert capsys.readouterr().err.startswith("dcp: ")
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_and_what_is_damaged(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path / "nix"), str(tmp_path / "out"), "--to", "hf"]) == 2
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "hf"]) == 2
    assert "is it one of the directories in it, such as 'dcp'?" in capsys.readouterr().err
    (data,) = checkpoint.glob("*.safetensors")
    os.truncate(data, 10)
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--to", "hf"]) == 1
    assert data.name in capsys.readouterr().err


def test_it_runs_as_a_program_without_a_framework(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dcp_core.cli", "convert", str(checkpoint), str(tmp_path / "hf"), "--to", "hf"]
    done = subprocess.run(
        [*command, "--max-shard-size", "40B"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "hf" / INDEX_NAME).read_text())["metadata"]["total_size"] == 64
    code = "import sys; from dcp_core.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "dcp"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
