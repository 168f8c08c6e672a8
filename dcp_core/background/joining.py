"""How ranks that share nothing but storage find each other, before a save has an id.

Each rank puts up a hello that carries a random number, its nonce; rank 0 answers every hello that it sees by a welcome
of the same nonce, which names the save. So an answer is never taken by anybody but who asked: whatever an earlier
attempt left behind bears other nonces. From then on the save's own mailbox carries everything, errors included, while
rank 0 goes on to answer, until every rank has sent something there.

The files lie in one folder for all saves of a checkpoint, under names that start with a digest of who belongs together:

    hello.<group>.<call>.<rank>.<nonce>      welcome.<group>.<call>.<rank>.<nonce>
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import xxhash

from dcp_core.background.mailbox import Mailbox
from dcp_core.coordination.exchange import COORDINATOR
from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError, RankCause
from dcp_core.execution.interfaces import MailboxFolder
from dcp_core.file_names import JOIN_NAME

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.25
_LONGEST_GRACE_SECONDS = 10.0
_REPEAT_SECONDS = 1.0
_SAVE_ID = re.compile(rb"[0-9a-f]{32}")
_NAME = re.compile(r"(hello|welcome)\.([0-9a-f]{16})\.(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,9})\.([0-9a-f]{32})")

_log = logging.getLogger("dcp.background")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Who meets, and for which of their saves.

    Attributes:
        rank: This rank in the group.
        world_size: Ranks of the group.
        key: Names the group: the same on its ranks, and another one for a job that may save into the same directory
            at the same time.
        call: Which call of `async_save` of this group this is, counted on the trainer's side at call entry.
        is_wanted: Whether the trainer that wants the save lives. Without it a process neither asks nor answers: the
            others belong to a later attempt.
    """

    rank: int
    world_size: int
    key: str
    call: int
    is_wanted: Callable[[], bool] = lambda: True

    @property
    def group(self) -> str:
        """What all names of the group have in common."""
        return xxhash.xxh3_64_hexdigest(self.key.encode("utf-8", "replace"))

    def name(self, kind: str, rank: int, nonce: str) -> str:
        """Name a file of this meeting."""
        return f"{kind}.{self.group}.{self.call}.{rank}.{nonce}"


def join_without_channel(
    open_mailbox: Callable[[str], MailboxFolder | None],
    meeting: Meeting,
    *,
    is_committed: Callable[[str], bool],
    timeout_seconds: float,
    check: Callable[[], None] | None = None,
) -> Mailbox:
    """Find the other ranks, and agree on the id of the save.

    Rank 0 returns at once: it answers the others while it waits for them in the first exchange over its mailbox. A
    rank with an error joins all the same, and hands the error into that exchange.

    Args:
        open_mailbox: `StorageWriter.open_mailbox` of a writer that points at the checkpoint.
        meeting: Who meets.
        is_committed: Tells whether the checkpoint on disk is that of a save, by its id.
        timeout_seconds: How long the slowest rank may take; the others wait for rank 0 a little longer.
        check: Called while this waits, and while the mailbox waits later.

    Returns:
        The mailbox of the save, the same on all ranks. Its `key` is the save's id.

    Raises:
        ArgumentError: The storage has no mailboxes.
        CoordinationTimeoutError: Rank 0 did not answer.
        CoordinationError: The trainer is gone.
        OSError: The folder cannot be read or written.
    """
    folder = _opened(open_mailbox, JOIN_NAME)
    is_host = meeting.rank == COORDINATOR
    save_id = secrets.token_hex(16) if is_host else _ask(folder, meeting, timeout_seconds, check)
    mailbox = Mailbox(
        _opened(open_mailbox, save_id), meeting.rank, meeting.world_size,
        key=save_id, is_committed=partial(is_committed, save_id), check=check,
    )  # fmt: skip
    if is_host:
        mailbox.open()
        folder.prepare()
        mailbox.receive_by(_Host(folder, meeting, save_id))
    return mailbox


def _opened(open_mailbox: Callable[[str], MailboxFolder | None], name: str) -> MailboxFolder:
    folder = open_mailbox(name)
    if folder is None:
        raise ArgumentError(
            "this storage has no mailboxes, and the ranks have no other channel: pass use_gloo=True or "
            "use_collectives=False, or save to a directory"
        )
    return folder


class _Host:
    """Rank 0: answers whoever asks, until all have come."""

    def __init__(self, folder: MailboxFolder, meeting: Meeting, save_id: str) -> None:
        self._folder = folder
        self._meeting = meeting
        self._save_id = save_id.encode()
        self._answered: set[str] = set()
        self._missing = set(range(1, meeting.world_size))
        self._is_closed = False
        if not self._missing:
            self.close()

    def attend(self) -> None:
        """Answer new hellos.

        Raises:
            CoordinationError: The trainer is gone, and not all ranks have come.
        """
        meeting = self._meeting
        if self._is_closed:
            return
        if not meeting.is_wanted():
            raise CoordinationError(
                f"the trainer of rank {COORDINATOR} ended before all ranks had come to call {meeting.call} of "
                "async_save; there is no save"
            )
        if self._folder.names() is None:  # another group left, and found nothing in it
            self._folder.prepare()
        for kind, call, rank, nonce, _ in self._files():
            if kind != "hello" or call != meeting.call or nonce in self._answered:
                continue
            if 0 < rank < meeting.world_size:
                with contextlib.suppress(FileNotFoundError):  # removed a moment ago: the rank will ask again
                    self._folder.put(meeting.name("welcome", rank, nonce), self._save_id)
                    self._answered.add(nonce)

    def arrived(self, rank: int) -> None:
        """Stop when the last rank has come."""
        self._missing.discard(rank)
        if not self._missing:
            self.close()

    def close(self) -> None:
        """Remove what this meeting and earlier ones of the group left, and the folder when nothing else is in it.

        A hello for a later call stays: its rank may be ahead, for this call has failed there.
        """
        if self._is_closed:
            return
        self._is_closed = True
        meeting = self._meeting
        try:
            for _, call, rank, _, name in self._files():
                if call <= meeting.call or rank >= meeting.world_size:
                    self._folder.delete(name)
            self._folder.remove(only_if_empty=True)
        except Exception as error:
            _log.debug("the folder where ranks meet stays until a later save removes it: %s", error)

    def _files(self) -> Iterator[tuple[str, int, int, str, str]]:
        """The files of this group: kind, call, rank, nonce, name."""
        for name in sorted(self._folder.names() or ()):
            match = _NAME.fullmatch(name)
            if match is not None and match[2] == self._meeting.group:
                yield match[1], int(match[3]), int(match[4]), match[5], name


def _ask(folder: MailboxFolder, meeting: Meeting, timeout_seconds: float, check: Callable[[], None] | None) -> str:
    """Any other rank: put up a hello, wait for the welcome; returns the save's id."""
    nonce = secrets.token_hex(16)
    hello, welcome = (meeting.name(kind, meeting.rank, nonce) for kind in ("hello", "welcome"))
    longest_wait = timeout_seconds + min(_LONGEST_GRACE_SECONDS, timeout_seconds / 4)
    deadline = time.monotonic() + longest_wait
    repeat_at, pause = 0.0, _FIRST_PAUSE_SECONDS
    try:
        while True:
            now = time.monotonic()
            if now >= repeat_at and _put_up(folder, hello):
                repeat_at = now + _REPEAT_SECONDS
            answer = folder.wait(welcome, min(pause, max(deadline - now, 0.0)))
            if not meeting.is_wanted():
                raise CoordinationError(f"rank {meeting.rank}: its trainer is gone, so it joins no save")
            if answer is not None:
                return _save_id(answer)
            if now >= deadline:
                raise _unanswered(meeting, longest_wait)
            if check is not None:
                check()
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
    finally:
        with contextlib.suppress(OSError):
            folder.delete(hello)
            folder.delete(welcome)


def _put_up(folder: MailboxFolder, hello: str) -> bool:
    """See that the hello is there; False while there is no folder, which rank 0 makes."""
    if hello in (folder.names() or ()):
        return True
    try:
        folder.put(hello, b"")
    except FileNotFoundError:
        return False
    return True


def _save_id(answer: bytes) -> str:
    if _SAVE_ID.fullmatch(answer) is None:
        raise CoordinationError(f"rank {COORDINATOR} answered by {len(answer)} bytes that are no save's id")
    return answer.decode()


def _unanswered(meeting: Meeting, seconds: float) -> CoordinationTimeoutError:
    text = f"rank {COORDINATOR} did not come to call {meeting.call} of async_save within {seconds:g} s"
    return CoordinationTimeoutError(
        f"{text} (rank {meeting.rank} waited): it is gone, or hangs, or makes other calls, or does not see the same "
        "directory. See its log; if it is only slow, pass a larger timeout_seconds",
        [RankCause(COORDINATOR, CoordinationTimeoutError.__name__, text)],
    )
