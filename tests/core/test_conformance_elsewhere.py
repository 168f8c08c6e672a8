"""Somebody else's project runs the kit: from a directory of its own, whatever way pytest imports its tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]

_MODULE = '''
from pathlib import Path

from dcp_core.storage.local import LocalStorage
from dcp_core.testing.conformance.carrier import CarrierConformance
from dcp_core.testing.conformance.storage import StorageConformance


class TestMine(StorageConformance):
    def make_storage(self, place: Path) -> LocalStorage:
        return LocalStorage(place)


class Forgetful:
    """A carrier that is wrong in a simple way."""

    def put(self, name, payload):
        pass

    def wait(self, name, timeout_seconds):
        return None

    def delete(self, name):
        pass


class TestCarrier(CarrierConformance):
    patience_seconds = 0.1

    def open_channel(self, place, rank, world_size):
        return Forgetful()


def test_a_class_of_a_function_cannot_be_found_by_ranks():
    class Inner(StorageConformance):
        pass

    try:
        Inner().run_in_ranks(Inner._write_own, 1)
    except TypeError as error:
        assert "is a class of a function" in str(error)
    else:
        raise AssertionError("it ran")
'''


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_it_runs_there_and_its_failures_show_values(mode: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_mine.py").write_text(_MODULE)
    chosen = "TestMine or class_of_a_function or read_by_everybody"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--import-mode={mode}", "-k", chosen]
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    last = done.stdout.splitlines()[-1]
    assert " failed" in last and last.startswith("1 failed"), done.stdout
    assert "test_a_message_is_read_by_everybody_and_again" in done.stdout
    shown = [line for line in done.stdout.splitlines() if line.startswith("E ")]
    assert any("[None, None" in line and "b'for all'" in line for line in shown), done.stdout


def test_nothing_but_the_kit_needs_pytest() -> None:
    code = """
import importlib, pathlib, sys
import dcp_core
root = pathlib.Path(dcp_core.__file__).parent
for file in root.rglob("*.py"):
    parts = file.relative_to(root.parent).with_suffix("").parts
    if "conformance" not in parts and parts[-1] != "__main__":
        importlib.import_module(".".join(parts))
print([name for name in ("pytest", "_pytest", "hypothesis", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
