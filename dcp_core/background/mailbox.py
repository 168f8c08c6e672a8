"""The mailbox of one save: the channel on which its background processes agree, and hear of each other's death.

Goes in and comes out: the messages of exchanges, as with any channel. What it adds: a message that stands for a rank
that can send none any more, `.metadata` as the answer to a commit, and an end, after which nothing lies around.
Nothing here relies on the clocks of other hosts, nor on a name being seen soon after it was made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from dcp_core.adapter import KeyValueChannel
from dcp_core.coordination.exchange import COORDINATOR
from dcp_core.coordination.frames import Frame, FrameKind, decode_frame, encode_frame
from dcp_core.coordination.verdict import ANY_STAGE, decode_failure, error_frame
from dcp_core.errors import CoordinationError, encode_error, merge_errors
from dcp_core.execution.interfaces import KeyedMailboxFolder, MailboxFolder

ABSENCE_SECONDS = 120.0
"""How long a folder must be missing before it counts as gone: twice what network file systems remember."""

_KNOWN_ABSENCE_SECONDS = 1.0
_FIRST_SLICE_SECONDS = 0.01
_LONGEST_SLICE_SECONDS = 0.25
_LARGE_FOLDER_SLICE_SECONDS = 2.0
_STORE_LOOKS_A_SECOND = 5_000
_PROBE_SECONDS = 0.002
_PROBE_LISTING_SECONDS = 0.02
_LISTING_SECONDS = 0.2
_FIRST_COMMIT_LOOK_SECONDS = 2.0
_LONGEST_COMMIT_LOOK_SECONDS = 30.0
_PROMPT_READING_SECONDS = 2.0
_READING_SECONDS = 75.0
_KEYED_LOOK_SECONDS = 1.0

_COMMITTED = encode_frame(Frame(FrameKind.SHARED, ANY_STAGE))

_log = logging.getLogger("dcp.background")


class Reception(Protocol):
    """What the coordinator does while it waits for ranks that may not know yet where they are expected."""

    def attend(self) -> None:
        """Look after those who come."""
        ...

    def arrived(self, rank: int) -> None:
        """Told that a rank has found its way."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


class Mailbox:
    """A `KeyValueChannel` for the exchanges of one save.

    On a `MailboxFolder` the coordinator's process makes the folder, in `open` or else when it first waits; the others
    wait for it to appear, and never make it, so that one that has been removed stays removed. Call `open` before
    anybody else can know the save's id: then a rank that comes after everything is over finds out in two minutes.
    Any other channel will do as well, where messages of several saves may lie side by side. On a `KeyedMailboxFolder`
    a wait ends by what is found under a known name; a listing only spares looks for many ranks at once.

    Args:
        board: What carries the messages.
        rank: This rank in the group.
        world_size: Ranks of the group.
        key: The save's id.
        is_committed: Tells whether the checkpoint on disk is that of this save.
        check: Called while this waits; what it raises ends the wait.
    """

    def __init__(
        self,
        board: KeyValueChannel,
        rank: int,
        world_size: int,
        *,
        key: str,
        is_committed: Callable[[], bool],
        check: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.key = key
        self._board = board
        self._folder = board if isinstance(board, MailboxFolder) else None
        self._keyed = board if isinstance(board, KeyedMailboxFolder) else None
        self._abort_look = float("-inf")
        self._is_committed = is_committed
        self._check = check
        self._reception: Reception | None = None
        self._was_opened = False
        self._was_seen = False
        self._was_answered = False
        self._has_told = False
        self._absent_since: float | None = None
        self._commit_look = (0.0, _FIRST_COMMIT_LOOK_SECONDS)
        self._listing_cost_seconds = 0.0
        self._closing: threading.Thread | None = None

    # --- the coordinator's part --------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the folder, on the coordinator.

        Raises:
            DcpError: The storage refuses.
            OSError: The same.
        """
        self._was_opened = self._was_seen = True
        if self._folder is not None:
            self._folder.prepare()

    def receive_by(self, reception: Reception) -> None:
        """Have somebody look after ranks that are still on their way, for as long as this waits for them."""
        self._reception = reception

    def close(self, *, committed: bool) -> None:
        """Take leave: the coordinator removes the folder. Never raises one of our errors, nor the system's.

        It waits until the others have read how it ended, or have left. After a commit for two seconds at most: from
        then on `.metadata` is the answer, until another save replaces it. After a failure, where that takes more than
        two seconds, on a thread of its own, which gives them 75.

        Args:
            committed: Whether the checkpoint is complete.
        """
        if self._reception is not None:
            self._reception.close()
        if self._folder is None or self._closing is not None:
            return
        if self.rank != COORDINATOR:
            if not self._has_told and (self._was_answered or not committed):
                self._tell_read(self._folder, "the commit" if committed else "how it ended")
            return
        if self._await_readers(self._folder, _PROMPT_READING_SECONDS) or committed:
            self._remove(self._folder)
            return
        self._closing = threading.Thread(
            target=self._remove_late, args=(self._folder,), name=f"dcp-mailbox-{self.key[:8]}"
        )
        self._closing.start()

    @property
    def is_open(self) -> bool:
        """Whether the folder is there still."""
        return self._folder is not None and self._folder.names() is not None

    # --- the channel -------------------------------------------------------------------------------------------

    def put(self, name: str, payload: bytes) -> None:
        """Post a message.

        Raises:
            CoordinationError: The folder is gone.
            OSError: It cannot be written. On the coordinator, after the commit, that is only logged.
        """
        self._open_once()
        try:
            self._put(name, payload)
        except (CoordinationError, OSError) as error:
            if self.rank != COORDINATOR or not self._asked():
                raise
            _log.info("save %s is committed, but the others must see that for themselves: %s", self.key, error)

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        """Wait for a message, or for what stands for it; None when neither came in time.

        For a rank that was aborted that is its error. For an answer of the coordinator, when the save is committed,
        it is an empty one.

        Raises:
            CoordinationError: The folder is gone for two minutes, and the save is not committed.
            OSError: The folder cannot be read.
        """
        self._open_once()
        sender = _sender(name)
        deadline = time.monotonic() + timeout_seconds
        self._commit_look = (time.monotonic() + _FIRST_COMMIT_LOOK_SECONDS, _FIRST_COMMIT_LOOK_SECONDS)
        patience = _FIRST_SLICE_SECONDS
        while True:
            left = deadline - time.monotonic()
            if timeout_seconds <= _PROBE_SECONDS:
                message, left = self._look(name), 0.0
            else:
                message = self._board.wait(name, min(patience, max(left, 0.0)))
            if message is None:
                message = self._instead(name, sender, is_last_look=left <= 0)
            if message is not None:
                self._received(name, sender, message)
            if message is not None or left <= 0:
                return message
            if self._check is not None:
                self._check()
            if self._reception is not None:
                self._reception.attend()
            patience = min(patience * 1.5, self._longest_slice_seconds)

    def delete(self, name: str) -> None:
        """Remove a message; one that is not there is no error."""
        self._board.delete(name)

    def post_abort(self, rank: int, error: BaseException) -> bool:
        """Let everybody know that a rank will not come any more, in its place: its process has died, for instance.

        Args:
            rank: The rank that is gone.
            error: Why.

        Returns:
            Whether it was posted. Not for the coordinator of a save that is committed: there is nothing to abort.

        Raises:
            OSError: It cannot be written.
        """
        if rank == COORDINATOR and self._asked():
            return False
        message = encode_frame(error_frame(ANY_STAGE, error, rank))
        try:
            self._board.put(self._abort_name(rank), message)
        except FileNotFoundError:
            if self._folder is None or self._asked():
                return False
            self._folder.prepare()  # somebody took the whole save for dead; who still waits must hear of it
            self._board.put(self._abort_name(rank), message)
        return True

    # --- what this is made of ----------------------------------------------------------------------------------

    @property
    def _longest_slice_seconds(self) -> float:
        if self._folder is None:  # a store answers so many looks a second, of all ranks together
            return max(self.world_size / _STORE_LOOKS_A_SECOND, _LONGEST_SLICE_SECONDS)
        return min(max(100 * self._listing_cost_seconds, _LONGEST_SLICE_SECONDS), _LARGE_FOLDER_SLICE_SECONDS)

    def _abort_name(self, rank: int) -> str:
        return f"{self.key}.abort.{rank}"

    def _read_name(self, rank: int) -> str:
        return f"{self.key}.read.{rank}"

    def _open_once(self) -> None:
        if self.rank == COORDINATOR and not self._was_opened:
            self.open()

    def _put(self, name: str, payload: bytes) -> None:
        patience = _KNOWN_ABSENCE_SECONDS if self._was_seen else ABSENCE_SECONDS
        deadline = time.monotonic() + patience
        pause = _FIRST_SLICE_SECONDS
        while True:
            try:
                self._board.put(name, payload)
                self._was_seen = True
                return
            except FileNotFoundError as error:
                if time.monotonic() >= deadline:
                    raise self._gone() from error
            if self._check is not None:
                self._check()
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_SLICE_SECONDS)

    def _look(self, name: str) -> bytes | None:
        """Look for a message at once. Thousands of looks in a row cost few listings."""
        if self._folder is not None:
            names = self._names(self._folder, _PROBE_LISTING_SECONDS)
            if names is not None and name not in names:
                return None
        return self._board.wait(name, _PROBE_SECONDS)

    def _names(self, folder: MailboxFolder, max_age_seconds: float) -> frozenset[str] | None:
        started = time.monotonic()
        names = folder.names(max(max_age_seconds, 10 * self._listing_cost_seconds))
        self._listing_cost_seconds = max(time.monotonic() - started, 0.9 * self._listing_cost_seconds)
        return names

    def _received(self, name: str, sender: int, message: bytes) -> None:
        if self._reception is not None:
            self._reception.arrived(sender)
        self._was_answered = self._was_answered or sender == COORDINATOR
        if self.rank != COORDINATOR and self._folder is not None and message[:1] == bytes((FrameKind.ERROR,)):
            self._tell_read(self._folder, name)

    def _tell_read(self, folder: MailboxFolder, name: str) -> None:
        self._has_told = True
        try:
            folder.put(self._read_name(self.rank), b"")
        except OSError as error:
            _log.debug("save %s: rank 0 is not told that %s was read: %s", self.key, name, error)

    def _instead(self, name: str, sender: int, *, is_last_look: bool) -> bytes | None:
        """What stands for a message that is not there."""
        if sender == self.rank:
            return None
        if sender == COORDINATOR and self._learns_of_commit(is_last_look=is_last_look):
            return _COMMITTED
        abort = self._abort_of(sender, is_probe=is_last_look)
        if abort is None:
            return None
        message = self._board.wait(name, 0.0)  # what the rank posted before it died counts
        if message is not None or sender != COORDINATOR:
            return message or abort
        if self._asked():
            return _COMMITTED
        failure = merge_errors(decode_failure(decode_frame(abort).body).causes)
        return encode_frame(Frame(FrameKind.ERROR, ANY_STAGE, encode_error(failure)))

    def _abort_of(self, rank: int, *, is_probe: bool) -> bytes | None:
        name = self._abort_name(rank)
        if self._folder is None:
            return self._board.wait(name, _PROBE_SECONDS)
        if self._keyed is not None and not is_probe:
            now = time.monotonic()
            if now < self._abort_look:
                return None
            self._abort_look = now + _KEYED_LOOK_SECONDS
            return self._board.wait(name, 0.0)
        names = self._names(self._folder, _LISTING_SECONDS)
        return None if names is None or name not in names else self._board.wait(name, 0.0)

    def _learns_of_commit(self, *, is_last_look: bool) -> bool:
        """Look at the checkpoint now and then, often once the folder is gone, and when the time is up."""
        now = time.monotonic()
        is_absent = self._is_absent()
        if not is_absent:
            self._was_seen, self._absent_since = True, None
        elif self._absent_since is None:
            self._absent_since = now
        due, pause = self._commit_look
        if is_absent:
            due, pause = min(due, now), _FIRST_COMMIT_LOOK_SECONDS / 2
        if now < due and not is_last_look:
            return False
        self._commit_look = (now + pause, min(pause * 1.5, _LONGEST_COMMIT_LOOK_SECONDS))
        if self._asked():
            return True
        if self._absent_since is not None and now - self._absent_since > ABSENCE_SECONDS:
            raise self._gone()
        return False

    def _is_absent(self) -> bool:
        if self._keyed is not None:
            return not self._keyed.is_there(_KEYED_LOOK_SECONDS)
        return self._folder is not None and self._names(self._folder, _LISTING_SECONDS) is None

    def _asked(self) -> bool:
        """Whether the save is known to be committed; False when that cannot be seen."""
        try:
            return self._is_committed()
        except Exception as error:
            _log.debug("save %s: whether it is committed cannot be seen: %s", self.key, error)
            return False

    def _gone(self) -> CoordinationError:
        return CoordinationError(
            f"rank {self.rank}: the mailbox of save {self.key} is gone, or never came: rank {COORDINATOR} gave the "
            "save up, or does not see the same directory. See its log"
        )

    def _await_readers(self, folder: MailboxFolder, seconds: float) -> bool:
        """Wait until every other rank has read of the failure, or is aborted itself; False when time is up."""
        deadline = time.monotonic() + seconds
        pause = _FIRST_SLICE_SECONDS
        while True:
            names = folder.names()
            if names is None or all(
                self._read_name(rank) in names or self._abort_name(rank) in names for rank in range(1, self.world_size)
            ):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_SLICE_SECONDS)

    def _remove_late(self, folder: MailboxFolder) -> None:
        self._await_readers(folder, _READING_SECONDS)
        self._remove(folder)

    def _remove(self, folder: MailboxFolder) -> None:
        try:
            folder.remove()
        except Exception as error:
            _log.warning("the mailbox of save %s stays until a later save removes it: %s", self.key, error)


def _sender(name: str) -> int:
    """Who posts the message of an exchange: the rank it ends with, else the coordinator."""
    last = name.rpartition(".")[2]
    return int(last) if last.isdecimal() else COORDINATOR
