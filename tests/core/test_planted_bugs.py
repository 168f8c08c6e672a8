"""The conformance kit finds what it is there for: each wrong class fails the test of the kit that is named for it.

Pytest runs the suites of `planted_bugs` in a process of its own: those tests alone, on the wrong classes and on the
right ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.core.planted_bugs import adapters, carriers, describers, groups, storages

_ROOT = Path(__file__).parents[2]
_KINDS: dict[str, tuple[str, dict[type, str], str]] = {
    "adapter": (adapters.__name__, adapters.FOUND_BY, "TestRightAdapter"),
    "device": (adapters.__name__, adapters.FOUND_BY_ON_DEVICES, "TestRightDevice"),
    "group": (groups.__name__, groups.FOUND_BY_AMONG_GROUPS, "TestRightGroup"),
    "broadcasts": (groups.__name__, groups.FOUND_BY_AMONG_BROADCASTS, "TestRightBroadcasts"),
    "carrier": (carriers.__name__, carriers.FOUND_BY, "TestRightCarrier"),
    "describer": (describers.__name__, describers.FOUND_BY, "TestRightDescriber"),
    "storage": (storages.__name__, storages.FOUND_BY, "TestRightStorage"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one test of the kit ended, in one of its parametrizations."""

    kind: str
    text: str


def _nodes(kind: str) -> list[str]:
    module, found_by, right = _KINDS[kind]
    file = module.replace(".", "/") + ".py"
    wrong = [f"{file}::Test{bug.__name__}::{test}" for bug, test in found_by.items()]
    return [*wrong, *sorted({f"{file}::{right}::{test}" for test in found_by.values()})]


@cache
def _outcomes(kind: str, directory: Path) -> dict[tuple[str, str], list[Outcome]]:
    """What became of each test: by suite and test."""
    report = directory / f"{kind}.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"),
        *("--timeout", "60", f"--junitxml={report}", f"--basetemp={directory / kind}", *_nodes(kind)),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        children = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = Outcome(children[0].tag, children[0].text or "") if children else Outcome("passed", "")
        suite, test = case.attrib["classname"].rpartition(".")[2], case.attrib["name"].partition("[")[0]
        found[suite, test].append(outcome)
    return dict(found)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kit")


def _bugs() -> list[tuple[str, str, str]]:
    return [(kind, bug.__name__, test) for kind, (_, found_by, _) in _KINDS.items() for bug, test in found_by.items()]


@pytest.mark.parametrize(("kind", "bug", "test"), _bugs())
def test_the_kit_finds(kind: str, bug: str, test: str, directory: Path) -> None:
    found = _outcomes(kind, directory)[f"Test{bug}", test]
    assert "failure" in {outcome.kind for outcome in found}, found


@pytest.mark.parametrize("kind", _KINDS)
def test_the_same_tests_pass_on_what_is_right(kind: str, directory: Path) -> None:
    _, found_by, right = _KINDS[kind]
    for test in set(found_by.values()):
        found = _outcomes(kind, directory)[right, test]
        assert {outcome.kind for outcome in found} <= {"passed", "skipped"}, (test, found)
        assert "passed" in {outcome.kind for outcome in found}, test


@pytest.mark.parametrize("kind", _KINDS)
def test_every_test_of_the_kit_has_a_bug_to_find(kind: str) -> None:
    module, found_by, right = _KINDS[kind]
    suite = getattr(sys.modules[module], right)
    tests = {name for name in dir(suite) if name.startswith("test_")}
    if kind == "device":
        tests = {test for test in tests if "page_locked" in test or "under_way" in test}
    elif kind == "adapter":
        tests -= set(adapters.FOUND_BY_ON_DEVICES.values())
    assert tests == set(found_by.values())
