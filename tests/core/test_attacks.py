"""The folder of attack files against every way in: one clear error, no code run, nothing outside looked at or changed,
little memory, little time, and targets left alone.
"""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.make_attacks import make_folder
from tests.attacks.manifest import FOLDER, MANIFEST, read_folder
from tests.core.fault_jobs import memory_directory

pytestmark = pytest.mark.timeout(600)

_ROOT = FOLDER.parents[1]


def run(base: str, place: Path, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Run all attacks on one good checkpoint, in a process of its own; gives the reports."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.attacks.run_attacks", base, str(place), str(folder)]
    ended = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False, timeout=550
    )
    reports = [json.loads(line) for line in ended.stdout.splitlines()]
    after = reports[-1]["what"] if reports else "the start"
    assert ended.returncode == 0, f"ended with {ended.returncode} after {after!r}: {ended.stderr[-3000:]}"
    return reports


def check(reports: list[dict[str, Any]], expected: int) -> None:
    """Every attack was refused, or did no harm, as the manifest says."""
    assert len(reports) == expected
    for report in reports:
        assert not report["wrong"], report
        assert report["kind"] in (report["errors"] or [""]), report


def _count(base: str) -> int:
    return sum(attack.base == base and attack.way != "payloads" for attack in read_folder())


@pytest.mark.parametrize("base", ["dcp", "huggingface"])
def test_every_attack_on_a_checkpoint_is_refused_by_every_way_in_and_does_no_harm(base: str) -> None:
    with memory_directory() as place:
        check(run(base, place), _count(base))


def test_every_attack_on_messages_is_an_error_on_the_rank_that_reads_them() -> None:
    with memory_directory() as place:
        check(run("none", place), _count(""))


def test_the_folder_is_what_its_generator_makes(tmp_path: Path) -> None:
    make_folder(tmp_path)
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    kept = {
        path.relative_to(FOLDER)
        for path in FOLDER.rglob("*")
        if path.is_file() and (path.name == MANIFEST or path.parent != FOLDER) and "__pycache__" not in path.parts
    }
    assert made == kept
    different = [str(path) for path in sorted(made) if not filecmp.cmp(tmp_path / path, FOLDER / path, shallow=False)]
    assert not different, "run `python -m tests.attacks.make_attacks` and look at what changed"


def test_every_attack_has_a_name_of_its_own_and_is_small() -> None:
    attacks = read_folder()
    names = [(attack.way, attack.name) for attack in attacks]
    assert len(set(names)) == len(names) >= 50
    assert sum(len(content) for attack in attacks for content in attack.files.values()) < 4 << 20


def test_an_attack_that_succeeds_is_seen(tmp_path: Path) -> None:
    """The watch itself: an open outside, a program, code, memory, time, a touched target."""
    script = """
import os, subprocess, sys
from pathlib import Path
from tests.attacks.watch import TooLongError, Watch, at_most
watch = Watch(Path(sys.argv[1]))
with watch.watching():
    open('/etc/hostname').close() if os.path.exists('/etc/hostname') else os.listdir('/etc')
    open(sys.argv[1] + '/fine', 'w').close()
    os.listdir('/')
    eval('1 + 1')
    subprocess.run(['true'])
    os.rename(sys.argv[1] + '/fine', sys.argv[1] + '/../away')
    __import__('this_is_no_module_of_anybody') if False else None
try:
    with at_most(0.2):
        while True:
            pass
except TooLongError:
    watch.seen.append('too long')
print(chr(10).join(watch.seen))
"""
    inside = tmp_path / "inside"
    inside.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", script, str(inside)], cwd=_ROOT, env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    for expected in ("/etc", "os.listdir /", "compile", "exec", "subprocess.Popen", "os.rename", "away", "too long"):
        assert expected in ended.stdout, (expected, ended.stdout)
    assert "fine" not in ended.stdout.replace("os.rename", "")
