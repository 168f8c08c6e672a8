"""What an attack is, and how the folder keeps it: `manifest.json` says what files are, and what comes of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MANIFEST, FILES, BASE = "manifest.json", "files", "base"

CORRUPT = ("CorruptError",)
INCOMPLETE = ("IncompleteError",)
UNTRUSTED = ("UntrustedObjectError",)
SOUND: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attack:
    """One attack: what is put into a copy of a good checkpoint.

    Attributes:
        way: Which way in it takes; names the folder of its files.
        what: What it is, in words; tells it from others.
        errors: Classes of which the error of a load must be one; none: the load succeeds, and is right.
        files: What is put into the copy, by place.
        makes: What is made there that no folder can keep, by place: `{"link": target}`, `{"pipe": true}`,
            `{"directory": true}`, `{"nbytes": size}` of a file without content, `{"grow": size}` of one with some.
        base: The good checkpoint.
    """

    way: str
    what: str
    errors: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    makes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    base: str = "dcp"

    @property
    def name(self) -> str:
        """Names its files."""
        return re.sub(r"[^a-z0-9]+", "-", self.what.lower()).strip("-")[:80]

    def place_in(self, directory: Path) -> None:
        """Put it into a copy of the good checkpoint."""
        for place, content in self.files.items():
            _remove(directory / place)
            (directory / place).write_bytes(content)
        for place, how in self.makes.items():
            self._make(directory, place, how)

    def _make(self, directory: Path, place: str, how: Mapping[str, Any]) -> None:
        path = directory / place
        if "grow" in how:
            os.truncate(path, how["grow"])
            return
        _remove(path)
        if "link" in how:
            path.symlink_to(how["link"])
        elif "pipe" in how:
            os.mkfifo(path)
        elif "directory" in how:
            path.mkdir()
        else:
            with path.open("wb") as file:
                file.truncate(how["nbytes"])


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def write_folder(folder: Path, bases: Mapping[str, Mapping[str, bytes]], attacks: Iterable[Attack]) -> None:
    """Write the good checkpoints, the files of all attacks and the manifest."""
    for base, files in bases.items():
        for name, content in files.items():
            _put(folder / BASE / base / name, content)
    entries = []
    for attack in attacks:
        kept = {place: f"{FILES}/{attack.way}/{_file_name(attack, place)}" for place in attack.files}
        for place, content in attack.files.items():
            _put(folder / kept[place], content)
        entry: dict[str, Any] = {"way": attack.way, "what": attack.what, "base": attack.base, "files": kept}
        if attack.makes:
            entry["makes"] = {place: dict(how) for place, how in attack.makes.items()}
        entries.append({**entry, "errors": list(attack.errors)})
    text = ",\n".join(json.dumps(entry) for entry in entries)
    _put(folder / MANIFEST, f'{{"attacks": [\n{text}\n]}}\n'.encode())


def read_folder(folder: Path = FOLDER) -> list[Attack]:
    """Read the manifest and all files."""
    return [
        Attack(
            entry["way"],
            entry["what"],
            tuple(entry["errors"]),
            {place: (folder / kept).read_bytes() for place, kept in entry["files"].items()},
            entry.get("makes", {}),
            entry["base"],
        )
        for entry in json.loads((folder / MANIFEST).read_bytes())["attacks"]
    ]


def _file_name(attack: Attack, place: str) -> str:
    return attack.name if len(attack.files) == 1 else f"{attack.name}{'' if place.startswith('.') else '.'}{place}"


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
