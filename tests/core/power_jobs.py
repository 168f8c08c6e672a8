"""What the tests of power failures share: work that is written down, and every way in which the power may fail.

No framework is imported here: background processes import this module.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.power_loss import Chance, Recorded, RecordedOperations, at_random, disk_after, everything, nothing

CHOICES: list[tuple[str, Callable[[], Chance], Callable[[], Chance]]] = [
    ("nothing", lambda: nothing, lambda: nothing),
    ("names only", lambda: everything, lambda: nothing),
    ("pages only", lambda: nothing, lambda: everything),
    ("all", lambda: everything, lambda: everything),
    *((f"seed {seed}", lambda seed=seed: at_random(seed), lambda seed=seed: at_random(-1 - seed)) for seed in range(4)),
]


def record(root: Path, work: Callable[[Path, RecordedOperations], object]) -> tuple[Path, list[Recorded]]:
    """Do work in the directory `work`, and keep what it held before as `before`."""
    place, before = root / "work", root / "before"
    place.mkdir(exist_ok=True)
    shutil.copytree(place, before, symlinks=True)
    operations = RecordedOperations(place)
    work(place, operations)
    return before, operations.log


class RecordingWriter(FileSystemWriter):
    """A writer that writes down what it does, also in a background process.

    Args:
        path: The checkpoint's directory.
        root: As for `RecordedOperations`.
        log_file: As for `RecordedOperations`.
    """

    def __init__(self, path: CheckpointId, root: str, log_file: str) -> None:
        self._log = {"root": root, "log_file": log_file}
        super().__init__(storage=LocalStorage(os.fspath(path), RecordedOperations(root, log_file)))

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        storage = self._directory.storage
        assert isinstance(storage, LocalStorage)
        return {"path": storage.path, **self._log}


def outcomes(
    root: Path, before: Path, log: Sequence[Recorded], look: Callable[[Path], str]
) -> Iterator[tuple[int, str, str]]:
    """Lose power after every operation, in all manners: (operations done, manner, what was found).

    Most operations and manners leave a disk that others have left before; what is found follows from the disk alone.
    """
    seen: dict[str, str] = {}
    for count in range(len(log) + 1):
        for manner, names, pages in CHOICES:
            target = root / "after"
            disk_after(log[:count], before, root / "work", target, names=names(), pages=pages())
            content = _content_of(target)
            if content not in seen:
                seen[content] = look(target)
            yield count, manner, seen[content]
            shutil.rmtree(target)


def _content_of(directory: Path) -> str:
    """A digest of all names, with the bytes of files and where links lead."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        what = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        entry = f"{path.relative_to(directory)}\0{stat.S_IFMT(path.lstat().st_mode)} {len(what)}\0"
        digest.update(entry.encode() + what)
    return digest.hexdigest()


def places(log: Sequence[Recorded], operation: str, name: str) -> list[int]:
    """After how many operations something has been done."""
    return [
        number
        for number, record in enumerate(log, 1)
        if (record.operation, Path(record.path).name) == (operation, name)
    ]
