"""A writer that a background process rebuilds, and whose operations of the disk or messages fail there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.execution.interfaces import CheckpointId, MailboxFolder
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations, OperationRecord


class FailingWriter(FileSystemWriter):
    """Operation N of the process that saves fails; the trainer, which made the writer, is spared.

    Args:
        path: The checkpoint's directory.
        fail_at: The operation, from 1; 0: none fails.
        fail_message: The message of the mailbox that cannot be posted, from 1; 0: none fails.
        error_number: What is raised.
        diary: A file that takes a line for each operation and message.
        spared: The trainer.
    """

    def __init__(
        self,
        path: CheckpointId | None = None,
        *,
        diary: str,
        fail_at: int = 0,
        fail_message: int = 0,
        error_number: int = 0,
        spared: int = 0,
    ) -> None:
        spared = spared or os.getpid()
        self._fate = {
            "fail_at": fail_at, "fail_message": fail_message, "error_number": error_number, "diary": diary,
            "spared": spared,
        }  # fmt: skip
        self._is_spared = os.getpid() == spared
        self._error_number = error_number
        self._diary, self._fail_message, self._messages = Path(diary), fail_message, 0
        operations = FaultyOperations(
            fail_at=None if self._is_spared or not fail_at else fail_at, error_number=error_number, before=self._note
        )
        super().__init__(storage=LocalStorage("/nowhere" if path is None else os.fspath(path), operations))

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        return self._fate | {"path": self._directory.storage.describe().strip("'")}

    def open_mailbox(self, save_id: str) -> MailboxFolder | None:
        folder = super().open_mailbox(save_id)
        if folder is None or self._is_spared:
            return folder
        put, error = folder.put, self._error_number

        def put_or_fail(name: str, payload: bytes) -> None:
            self._messages += 1
            self._write(f"message {name}")
            if self._messages == self._fail_message:
                raise OSError(error, os.strerror(error), name)
            put(name, payload)

        folder.put = put_or_fail  # type: ignore[method-assign]
        return folder

    def _note(self, record: OperationRecord) -> None:
        if not self._is_spared:
            self._write(f"{record.operation} {record.name}")

    def _write(self, line: str) -> None:
        with self._diary.open("a") as file:
            file.write(f"{line}\n")


def diary_of(path: Path, kind: str) -> list[str]:
    """What was noted: operations, or messages."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith("message ") == (kind == "message")]
