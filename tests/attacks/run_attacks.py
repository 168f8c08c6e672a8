"""Runs attacks, many in one process: `python -m tests.attacks.run_attacks BASE PLACE FOLDER`; a line of JSON for each.

BASE is the good checkpoint that they are put into ("none": messages), PLACE an empty directory to work in, FOLDER the
folder of attacks. A line says what the load of the attack ended with, and lists whatever should not have happened.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dcp_core.errors import DcpError
from tests.attacks.manifest import BASE, Attack, read_folder
from tests.attacks.watch import TooLongError, Watch, at_most, cpu_seconds, limit_memory, peak_nbytes
from tests.attacks.ways_in import (
    Way,
    dcp_target,
    dcp_ways,
    exchange,
    huggingface_load,
    huggingface_target,
    huggingface_ways,
)
from tests.core.fault_jobs import same

ROOM_NBYTES = 4 << 30
GROWTH_NBYTES = 96 << 20
"""What one attack may add to the most memory that the process had before."""
SECONDS = 6.0
"""Of processor time, for one call."""

_WORLD_CODES = (0, 1, 2)


@dataclass
class Report:
    """What an attack came to.

    Attributes:
        what: The attack.
        kind: Class of what the load raised; empty where it returned.
        text: What it said.
        wrong: What should not have happened, in words.
        seconds: Processor time of all calls.
    """

    what: str
    kind: str = ""
    text: str = ""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Kind:
    """How checkpoints of one kind are attacked.

    Attributes:
        target: A target that holds what nobody saved.
        load: Loads into it.
        ways: All other ways in, by name.
    """

    target: Callable[[], dict[str, Any]]
    load: Callable[[Path, dict[str, Any]], object]
    ways: Mapping[str, Way]


def kind_of(base: str, good: Path) -> Kind:
    """The kind of a base."""
    if base == "dcp":
        from dcp_core.api import load

        return Kind(dcp_target, lambda directory, target: load(target, checkpoint_id=directory), dcp_ways(good))
    if base == "huggingface":
        return Kind(huggingface_target, huggingface_load, huggingface_ways(good))
    from tests.attacks.torch_ways_in import torch_load, torch_target, torch_ways

    return Kind(torch_target, torch_load, torch_ways(good))


class Runner:
    """Runs attacks on copies of one good checkpoint."""

    def __init__(self, base: str, place: Path, folder: Path) -> None:
        self._good = place / "good"
        self._original = place / "original"
        for copy in (self._original, self._good):
            shutil.copytree(folder / BASE / base, copy)
        self._place = place
        self._outside = place / "outside"
        self._outside.mkdir()
        (self._outside / "secret").write_text("a secret")
        self._canary = place / "ran"
        os.environ["ATTACK_CANARY"] = str(self._canary)
        self._kind = kind_of(base, self._good)
        self._watch = Watch(place)
        self._expected: Mapping[str, Any] | None = None
        self._warm_up(folder)

    def _warm_up(self, folder: Path) -> None:
        """Take every way once with the good checkpoint, so that all modules are imported."""
        report = self.run(Attack("none", "the good checkpoint", ()), is_watched=False)
        assert not report.kind and not report.wrong, report
        for codec in ("unicode_escape", "utf_8_sig", "utf_16", "utf_16_le", "utf_16_be", "utf_32"):
            codecs.lookup(codec)
        foreign = (folder / BASE / "torch" / ".metadata").read_bytes()
        self.run(Attack("none", "the description of another program", (), {".metadata": foreign}), is_watched=False)
        limit_memory(ROOM_NBYTES)

    def run(self, attack: Attack, *, is_watched: bool = True) -> Report:
        """Run all ways in, each on a fresh copy where the one before may have changed it."""
        report = Report(attack.what)
        started, peak = cpu_seconds(), peak_nbytes()
        self._load(attack, report, is_watched)
        for name, way in self._kind.ways.items():
            self._go(name, way, attack, report, is_watched)
        self._look_after(report)
        grown = peak_nbytes() - peak
        if is_watched and grown > GROWTH_NBYTES:
            report.wrong.append(f"{grown >> 20} MiB more memory than before")
        report.seconds = round(cpu_seconds() - started, 3)
        return report

    def _copy(self, attack: Attack) -> Path:
        root = self._place / "root"
        shutil.rmtree(root, ignore_errors=True)
        directory = root / "step_1"
        shutil.copytree(self._original, directory)
        if not (root / "outside").exists():
            (root / "outside").symlink_to(self._outside)
        attack.place_in(directory)
        return directory

    def _load(self, attack: Attack, report: Report, is_watched: bool) -> None:
        target = self._kind.target()
        error = self._call(lambda: self._kind.load(directory, target), "load", report, is_watched) if (
            directory := self._copy(attack)
        ) else None  # fmt: skip
        if error is None:
            if self._expected is None:
                self._expected = target
            elif not report.wrong and not self._is_right(target, attack):
                report.wrong.append("load: wrong values, and no error")
            return
        report.kind, report.text = type(error).__name__, str(error)[:400]
        if "undefined" not in str(error) and not same(dict(target), self._kind.target()):
            report.wrong.append("load: the target was touched")

    def _is_right(self, target: Mapping[str, Any], attack: Attack) -> bool:
        """Whether a load gave what the good checkpoint holds, but for the value that an attack replaced."""
        assert self._expected is not None
        other = ("notes",) if attack.way == "values" else ("step",) if attack.base == "torch" else ()
        pairs = [({k: v for k, v in state.items() if k not in other}) for state in (target, self._expected)]
        return same(*pairs)

    def _go(self, name: str, way: Way, attack: Attack, report: Report, is_watched: bool) -> None:
        directory = self._copy(attack)
        code = self._call(lambda: way(directory), name, report, is_watched)
        if isinstance(code, int) and code not in _WORLD_CODES:
            report.wrong.append(f"{name}: exit code {code}")

    def _call(self, call: Callable[[], object], name: str, report: Report, is_watched: bool) -> Any:
        """Make a call; gives what it gives, or the `DcpError` that it raises."""
        found: Any = None
        self._watch.seen.clear()
        try:
            with at_most(SECONDS), np.errstate(all="ignore"):
                if is_watched:
                    with self._watch.watching():
                        found = call()
                else:
                    found = call()
        except DcpError as error:
            found = error
        except TooLongError as error:
            report.wrong.append(f"{name}: took too long: {error}")
        except BaseException as error:
            report.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        report.wrong += [f"{name}: {seen}" for seen in self._watch.seen]
        return found

    def _look_after(self, report: Report) -> None:
        if self._canary.exists():
            report.wrong.append("code ran")
            self._canary.unlink()
        if os.listdir(self._outside) != ["secret"] or (self._outside / "secret").read_text() != "a secret":
            report.wrong.append("something outside of the directory was changed")


class MessageRunner(Runner):
    """Runs attacks on ranks that talk through a directory."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._outside = place / "outside"
        self._outside.mkdir()
        (self._outside / "secret").write_text("a secret")
        self._canary = place / "ran"
        os.environ["ATTACK_CANARY"] = str(self._canary)
        self._watch = Watch(place)
        self.run(Attack("none", "no message", ()), is_watched=False)
        limit_memory(ROOM_NBYTES)

    def run(self, attack: Attack, *, is_watched: bool = True) -> Report:
        """Meet as rank 0, and as rank 1."""
        report = Report(attack.what)
        started, peak, opened = cpu_seconds(), peak_nbytes(), len(os.listdir("/proc/self/fd"))
        for rank in (1, 0):
            directory = self._place / "mailbox"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            attack.place_in(directory)
            found = self._call(partial(exchange, directory, rank), f"rank {rank}", report, is_watched)
            if isinstance(found, DcpError):
                report.kind, report.text = type(found).__name__, str(found)[:400]
        self._look_after(report)
        if len(os.listdir("/proc/self/fd")) > opened:
            report.wrong.append("descriptors stay open")
        if is_watched and peak_nbytes() - peak > GROWTH_NBYTES:
            report.wrong.append(f"{(peak_nbytes() - peak) >> 20} MiB more memory than before")
        report.seconds = round(cpu_seconds() - started, 3)
        return report


def main(base: str, place: Path, folder: Path, only: str = "") -> None:
    """Run all attacks on a base, and report."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    attacks = [
        attack
        for attack in read_folder(folder)
        if attack.base == ("" if base == "none" else base) and only in attack.what and attack.way != "payloads"
    ]
    runner = MessageRunner(place) if base == "none" else Runner(base, place, folder)
    for attack in attacks:
        sys.stdout.write(json.dumps({**asdict(runner.run(attack)), "errors": attack.errors, "way": attack.way}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
