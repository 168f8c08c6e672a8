"""Somebody presses Ctrl-C while files are written: a real SIGINT, at a chosen operation of the disk."""

from __future__ import annotations

import os
import signal

from dcp_core.testing.faults import FaultyOperations, OperationRecord


def interrupted_at(number: int) -> FaultyOperations:
    """File operations during which this process gets a SIGINT, once, right before the given one is done."""

    def interrupt(record: OperationRecord) -> None:
        if record.number == number:
            os.kill(os.getpid(), signal.SIGINT)

    return FaultyOperations(before=interrupt)
