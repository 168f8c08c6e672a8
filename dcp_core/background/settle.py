"""What becomes of a save whose background process has died on this rank: told to the other ranks, and found out.

In: the death. Out: nothing where the save is committed after all, else the error.
"""

from __future__ import annotations

import time
from contextlib import suppress

from dcp_core.adapter import ChannelSpec
from dcp_core.background.peers import is_committed, mailbox_of
from dcp_core.background.steps import GRACE_SECONDS, within
from dcp_core.background.task import Seat
from dcp_core.errors import DcpError, InDoubtError, doubt_about
from dcp_core.execution.interfaces import StorageWriter

_PAUSE_SECONDS = 0.5


def outcome_after_death(
    death: DcpError,
    seat: Seat,
    save_id: str,
    writer: StorageWriter,
    channel: ChannelSpec | None,
    *,
    may_be_committed: bool,
    may_still_act: bool = False,
) -> None:
    """Tell the other ranks in the place of the dead process, and find out whether the save is committed.

    Args:
        death: How it ended.
        seat: Which rank this is.
        save_id: The save.
        writer: Where the checkpoint is.
        channel: How the background processes talk where that is not a mailbox.
        may_be_committed: Whether this rank's result had been handed in before.
        may_still_act: Whether an operation of the dead process may still take effect.

    Raises:
        DcpError: `death`, where nothing is or will be committed.
        InDoubtError: Nobody can say.
    """
    doubt = InDoubtError(f"{doubt_about(save_id)}: {death.message}", death.causes)
    doubt.__cause__ = death

    def look() -> None:
        if seat.is_coordinator:
            _decide(death, seat, save_id, writer, channel, doubt if may_be_committed and may_still_act else death)
        elif may_be_committed:
            _await_commit(seat, save_id, writer, doubt)
        else:
            _post(death, seat, save_id, writer, channel)
            raise death

    # The storage may be what the process hung in.
    within(look, seat.timeout_seconds + GRACE_SECONDS, lambda: doubt if may_be_committed else death)


def _decide(
    death: DcpError, seat: Seat, save_id: str, writer: StorageWriter, channel: ChannelSpec | None, failure: DcpError
) -> None:
    """On the coordinator, whose process alone commits."""
    if is_committed(writer, save_id, None if seat.use_collectives else seat.rank):
        return
    if failure is death:
        _post(death, seat, save_id, writer, channel)
    raise failure


def _await_commit(seat: Seat, save_id: str, writer: StorageWriter, doubt: InDoubtError) -> None:
    """On any other rank, whose result the coordinator has."""
    deadline = time.monotonic() + seat.timeout_seconds
    while time.monotonic() < deadline:
        if is_committed(writer, save_id):
            return
        if _has_ended(writer, save_id):
            break
        time.sleep(_PAUSE_SECONDS)
    if is_committed(writer, save_id):
        return
    raise doubt


def _post(death: DcpError, seat: Seat, save_id: str, writer: StorageWriter, channel: ChannelSpec | None) -> None:
    """Post the abort; the others wait for their deadlines where that fails."""
    if not seat.needs_channel:
        return
    with suppress(Exception):
        board = None if channel is None else channel.open()
        mailbox = mailbox_of(board, writer, seat, save_id)
        mailbox.post_abort(seat.rank, death)
        mailbox.close(committed=False)


def _has_ended(writer: StorageWriter, save_id: str) -> bool:
    """Whether the coordinator has removed the mailbox: it is done, one way or the other."""
    try:
        folder = writer.open_mailbox(save_id)
        return folder is not None and folder.names() is None
    except Exception:
        return False
