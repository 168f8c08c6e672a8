"""Small saves for the tests of the commit protocol: the metadata is a JSON list of names, the content is known.

`python -m tests.core.commit_jobs DIRECTORY TAG RANK KILL_AT MAX_IO_BYTES` saves in a process of its own.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dcp_core.errors import IncompleteError
from dcp_core.file_names import OBJECT_FILE, TENSOR_FILE, data_file_name
from dcp_core.storage.base import Storage
from dcp_core.storage.commit import abort, begin, commit
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations

RANKS = 2


def files_of(metadata: bytes) -> list[str]:
    return [str(name) for name in json.loads(metadata)["files"]]


def content_of(tag: str, name: str) -> bytes:
    rank = name.removeprefix("_rank").split("_")[0]
    return f"{tag} of rank {rank}; ".encode() * (1 + len(tag))


def write_files(storage: Storage, tag: str, ranks: Sequence[int], suffix: str, written: list[str]) -> dict[str, int]:
    expected = {}
    for rank in ranks:
        for kind in (TENSOR_FILE, OBJECT_FILE) if rank == 0 else (TENSOR_FILE,):
            name = data_file_name(rank, 0, kind, suffix)
            content = content_of(tag, name)
            with storage.create(name, len(content)) as handle:
                written.append(name)
                handle.write(0, [content[:5], b"", content[5:]])
                handle.sync()
            expected[name] = len(content)
    storage.sync()
    return expected


def save(
    storage: Storage,
    tag: str,
    *,
    rank: int | None = None,
    ranks: int = RANKS,
    durable: bool = True,
    before_commit: Callable[[], object] = lambda: None,
) -> str:
    """Save as one process that plays all ranks; return the suffix."""
    opening = begin(storage, secrets.token_hex(16), rank=rank, files_of=files_of)
    written: list[str] = []
    try:
        expected = write_files(storage, tag, range(ranks) if rank is None else [rank], opening.suffix, written)
        before_commit()
        metadata = json.dumps({"tag": tag, "files": sorted(expected)}).encode()
        commit(storage, opening, metadata, expected, files_of=files_of, durable=durable)
    except BaseException:
        abort(storage, opening, written, files_of=files_of)
        raise
    return opening.suffix


def whole(directory: Path, name: str = ".metadata") -> str:
    """Load: return the tag of the checkpoint, every file of which must hold what was saved."""
    fields = json.loads((directory / name).read_bytes())
    tag = str(fields["tag"])
    for file in fields["files"]:
        path = directory / file
        if not path.exists() or path.read_bytes() != content_of(tag, file):
            raise IncompleteError(f"{file} of {tag} is not whole")
    return tag


def named(directory: Path, name: str = ".metadata") -> set[str]:
    """The names of a checkpoint: its files and its metadata."""
    return {name, *json.loads((directory / name).read_bytes())["files"]} if (directory / name).exists() else set()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def main() -> None:
    directory, tag, rank, kill_at, max_io_bytes = sys.argv[1:]
    operations = FaultyOperations(
        kill_at=int(kill_at) if kill_at else None, max_io_bytes=int(max_io_bytes) if max_io_bytes else None
    )
    save(LocalStorage(directory, operations), tag, rank=int(rank) if rank else None)


if __name__ == "__main__":
    main()
