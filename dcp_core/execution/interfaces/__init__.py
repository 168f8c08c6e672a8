"""What moves bytes: the classes that storages extend, and what they are handed.

Goes in: a plan and a planner. A writer asks the planner for bytes and answers with a `WriteResult`; a reader asks it
where bytes belong. Neither decides anything: what to move, and who moves it, stands in the plan.
"""

from __future__ import annotations

from dcp_core.execution.interfaces.arguments import CheckpointId, Plan, Verify
from dcp_core.execution.interfaces.mailbox_folder import KeyedMailboxFolder, MailboxFolder
from dcp_core.execution.interfaces.reader import PlannedRead, ReadContext, ReadTarget, StorageReader
from dcp_core.execution.interfaces.write_result import FileRecord, WriteResult
from dcp_core.execution.interfaces.writer import MetadataDraft, PlannedWrite, StorageWriter, WriteContext, WriteSource

__all__ = [
    "CheckpointId",
    "FileRecord",
    "KeyedMailboxFolder",
    "MailboxFolder",
    "MetadataDraft",
    "Plan",
    "PlannedRead",
    "PlannedWrite",
    "ReadContext",
    "ReadTarget",
    "StorageReader",
    "StorageWriter",
    "Verify",
    "WriteContext",
    "WriteResult",
    "WriteSource",
]
