"""The storage side of agreeing in the background: a save is announced, its mailbox made, its commit recognised.

In: a writer that points at the checkpoint. Out: the channel to the other ranks for one save, or what was found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dcp_core.adapter import KeyValueChannel, drain
from dcp_core.background.cancellation import Cancellation
from dcp_core.background.joining import Meeting, join_without_channel
from dcp_core.background.mailbox import Mailbox
from dcp_core.background.steps import Steps
from dcp_core.background.task import PersistTask, Seat
from dcp_core.errors import ArgumentError
from dcp_core.execution.interfaces import MailboxFolder, StorageWriter
from dcp_core.recipes.committed import committed_metadata
from dcp_core.recipes.save_back import abort_quietly

_DRAIN_SECONDS = 2.0

NO_MAILBOX = (
    "the background processes of the ranks agree through files in the checkpoint's directory, and {writer} has none; "
    "pass a checkpoint_id that is a path, or use_gloo=True, or use_collectives=False"
)


def mailbox_folder(writer: StorageWriter, save_id: str) -> MailboxFolder:
    """The folder of a save's mailbox; not made yet.

    Raises:
        ArgumentError: The storage has no place for one.
    """
    folder = writer.open_mailbox(save_id)
    if folder is None:
        raise ArgumentError(NO_MAILBOX.format(writer=type(writer).__name__))
    return folder


def mailbox_of(
    board: KeyValueChannel | None,
    writer: StorageWriter,
    seat: Seat,
    save_id: str,
    check: Callable[[], None] | None = None,
) -> Mailbox:
    """The mailbox of a save that is agreed on: on a board, or None: in files next to the checkpoint's."""
    return Mailbox(
        mailbox_folder(writer, save_id) if board is None else board,
        seat.rank,
        seat.world_size,
        key=save_id,
        is_committed=lambda: is_committed(writer, save_id),
        check=check,
    )


@contextmanager
def channel_to_peers(
    board: KeyValueChannel | None,
    writer: StorageWriter,
    task: PersistTask,
    cancellation: Cancellation,
    steps: Steps,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Iterator[Mailbox | None]:
    """The way to the other ranks for one save.

    Args:
        board: What carries the messages; None: files next to the checkpoint's.
        writer: Where the checkpoint is.
        task: The save.
        cancellation: Ends the waits of the coordinator. The others hand an error in instead.
        steps: Told of every look for a message.
        is_wanted: Whether the trainer still lives: without it a save that is not agreed on has no point.
    """
    seat, save_id = task.seat, task.ticket.save_id
    if not seat.needs_channel:
        yield None
        return

    def check() -> None:
        steps.step()
        if seat.is_coordinator:
            cancellation.check()

    steps.enter("meeting the other ranks")
    if task.meeting is not None:
        mailbox = join_without_channel(
            writer.open_mailbox,
            Meeting(seat.rank, seat.world_size, *task.meeting, is_wanted=is_wanted),
            is_committed=lambda found: is_committed(writer, found),
            timeout_seconds=seat.timeout_seconds,
            check=check,
        )
    else:
        mailbox = mailbox_of(board, writer, seat, save_id, check)
    committed = False
    try:
        yield mailbox
        committed = True
    finally:
        mailbox.close(committed=committed)
        if not committed:
            _remove_new_directories(writer, mailbox)
        if board is not None:
            drain(board, _DRAIN_SECONDS)


def _remove_new_directories(writer: StorageWriter, mailbox: Mailbox) -> None:
    """Let a writer remove what directories it made for a save that was taken back: the mailbox was there until now."""
    remove: Callable[[], None] | None = getattr(writer, "remove_new_directories", None)
    with suppress(Exception):
        if remove is not None and not mailbox.is_open:
            remove()


def is_committed(writer: StorageWriter, save_id: str, rank: int | None = None) -> bool:
    """Whether the checkpoint that lies there is that of a save; of a rank that saved alone, whether its own is."""
    try:
        return committed_metadata(writer, save_id, rank).save_id == save_id
    except Exception:
        return False


def begin(writer: StorageWriter, save_id: str, rank: int | None, *, with_mailbox: bool) -> str:
    """Announce a save, and make its mailbox before anybody else knows the save's id; gives the suffix of its files."""
    suffix = writer.begin_checkpoint(save_id, rank)
    if with_mailbox:
        try:
            mailbox_folder(writer, save_id).prepare()
        except BaseException:
            abandon(writer, save_id)
            raise
    return suffix


def abandon(writer: StorageWriter, save_id: str) -> None:
    """Take back what `begin` did."""
    try:
        folder = writer.open_mailbox(save_id)
        if folder is not None:
            folder.remove()
    finally:  # last, as what it made it removes only where nothing is left in it
        abort_quietly(writer)
