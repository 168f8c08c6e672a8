"""The example plugin installs into a fresh environment, and its tests pass there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.pages import python_blocks

_ROOT = Path(__file__).parents[2]
_EXAMPLE = _ROOT / "docs" / "examples" / "toy_parallel"

pytest.importorskip("torch")


def _run(command: Sequence[str | os.PathLike[str]], directory: Path, seconds: int = 120) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, cwd=directory, env=environment, check=False
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with hyper-dcp and the example, built and installed like any other package.

    Torch and the like are those of this environment; they come last on the path, so that ours are the installed ones.
    Nothing is fetched where hatchling, which builds both, is here.
    """
    place = tmp_path_factory.mktemp("fresh")
    isolation = [] if importlib.util.find_spec("hatchling") is None else ["--no-build-isolation"]
    pip = (sys.executable, "-m", "pip")
    _run((*pip, "wheel", "-q", "--no-deps", *isolation, "-w", place / "wheels", _ROOT, _EXAMPLE), place)
    _run((sys.executable, "-m", "venv", "--without-pip", place / "venv"), place)
    python = place / "venv" / "bin" / "python"
    wheels = sorted((place / "wheels").glob("*.whl"))
    assert len(wheels) == 2
    _run((*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", *wheels), place)
    (installed,) = (place / "venv").glob("lib/python*/site-packages")
    (installed / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_installed_is_what_was_built(fresh_python: Path, tmp_path: Path) -> None:
    code = "import dcp_core, dcp_torch, toy_parallel_dcp\nfor m in dcp_core, dcp_torch, toy_parallel_dcp: print(m.__file__)"
    for file in _run((fresh_python, "-W", "error", "-c", code), tmp_path).split():
        assert Path(file).is_relative_to(fresh_python.parents[1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tests_of_the_example_and_the_conformance_kit_pass(fresh_python: Path, tmp_path: Path) -> None:
    arguments = ("-q", "-p", "no:cacheprovider", "-c", _EXAMPLE / "pyproject.toml", "--rootdir", _EXAMPLE)
    found = _run((fresh_python, "-m", "pytest", *arguments, _EXAMPLE / "tests"), tmp_path, seconds=250)
    assert " passed" in found
    assert "skipped" not in found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_program_in_the_readme_of_the_example_runs(fresh_python: Path, tmp_path: Path) -> None:
    (block,) = python_blocks(_EXAMPLE / "README.md")
    code = f"{block.code}\nassert torch.equal(other.whole(), weight.whole())"
    _run((fresh_python, "-W", "error", "-c", code), tmp_path)
    assert (tmp_path / "step_1" / ".metadata").exists()
