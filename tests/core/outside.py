"""Traps for a program that follows links: names that lead out of a directory, and proof that nothing happened there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

KINDS = ("link to a file", "link to nothing", "link to a directory", "hard link")
"""What can stand in the place of a name."""

Traces = Mapping[str, tuple[int, int, int, int, bytes]]


class Outside:
    """A place beside the checkpoint that no save may touch.

    Args:
        path: It; made here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"precious")
        (path / "file").chmod(0o640)
        (path / "folder").mkdir()
        (path / "folder" / "inner").write_bytes(b"precious too")
        (path / "folder" / "_rank0_.safetensors").write_bytes(b"and this")
        self.before = self.look()

    def look(self) -> Traces:
        """Everything that is there: kind and mode, owner, size, time of the last change, content."""
        found = {}
        for place, folders, files in os.walk(self.path):
            for path in (place, *(os.path.join(place, name) for name in (*folders, *files))):
                about = os.lstat(path)
                content = Path(path).read_bytes() if stat.S_ISREG(about.st_mode) else b""
                found[path] = (about.st_mode, about.st_uid, about.st_size, about.st_mtime_ns, content)
        return found

    def plant(self, kind: str, name: Path) -> None:
        """Put a trap under a name."""
        if kind == "hard link":
            os.link(self.path / "file", name)
            return
        target = {"link to a file": "file", "link to nothing": "nothing", "link to a directory": "folder"}[kind]
        name.symlink_to(self.path / target)

    def check(self, what: object) -> None:
        """See that nothing was made, changed or removed."""
        assert self.look() == self.before, what


@contextmanager
def foreseen_ids(number: int) -> Iterator[str]:
    """Let this process choose ids that are known beforehand, as an attacker would wish; gives that of the next save."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.token_hex", lambda nbytes=32: f"{number:02x}" * nbytes)
        yield f"{number:02x}" * 16
