"""The example plugin installs into a fresh environment, and its tests pass there, DCP's conformance kit among them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.conftest import FreshEnvironment
from tests.docs.pages import python_blocks

_EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "toy_parallel"
_PACKAGES = ("dcp_core", "dcp_torch", "toy_parallel", "toy_parallel_dcp")

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def with_example(fresh_environment: FreshEnvironment) -> FreshEnvironment:
    fresh_environment.install(_EXAMPLE)
    return fresh_environment


def test_what_is_used_is_what_was_installed(with_example: FreshEnvironment, tmp_path: Path) -> None:
    code = f"import {', '.join(_PACKAGES)}; print(*(package.__file__ for package in ({', '.join(_PACKAGES)})))"
    for file in with_example.run("-W", "error", "-c", code, directory=tmp_path).split():
        assert Path(file).is_relative_to(with_example.directory)


def test_the_tests_of_the_example_and_the_conformance_kit_pass(with_example: FreshEnvironment, tmp_path: Path) -> None:
    assert " passed" in with_example.run_tests(_EXAMPLE, tmp_path)


@pytest.mark.parametrize("ranks", [None, 3])
def test_the_program_in_the_readme_of_the_example_runs(
    ranks: int | None, with_example: FreshEnvironment, tmp_path: Path
) -> None:
    (block,) = python_blocks(_EXAMPLE / "README.md")
    (tmp_path / "toy.py").write_text(block.code)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    with_example.run(*(torchrun if ranks else ("-W", "error")), "toy.py", directory=tmp_path)
    files = {path.name for path in (tmp_path / "step_1").iterdir()}
    assert files == {".metadata", *(f"_rank{rank}_.safetensors" for rank in range(ranks or 1))}


def test_the_check_of_the_example_finds_nothing_wrong(with_example: FreshEnvironment, tmp_path: Path) -> None:
    found = json.loads(with_example.run("-m", "dcp_core.cli", "plugins", "--check", "--json", directory=tmp_path))
    (example,) = (plugin for plugin in found["plugins"] if plugin["name"] == "toy_parallel")
    assert [entry["problem"] for entry in example["entries"]] == [None]
