"""What the caller of `async_save` holds while its save goes on."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from dcp_core.arguments import check_wait
from dcp_core.errors import CoordinationError, DcpError, RankFailedError, SaveCancelledError
from dcp_core.metadata import Metadata

NOT_BEGUN = "\nThis save has not begun; await persist_completion of each, or call wait_all(), and save again"


class SaveFuture(Future[Metadata]):
    """The outcome of a save; knows whether somebody has seen it fail.

    Args:
        save_id: Of the save.

    Attributes:
        thread: Resolves it, once the callback has returned.
    """

    def __init__(self, save_id: str) -> None:
        super().__init__()
        self.save_id = save_id
        self._is_seen = False
        self.thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Metadata:
        """Wait for the outcome; a builtin `TimeoutError` leaves the save running."""
        self._refuse_endless_wait()
        try:
            return super().result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self.done():
                self._is_seen = True
                raise
            raise TimeoutError(f"save {self.save_id} still goes on after {timeout} s") from error
        except BaseException:
            self._is_seen = self.done()
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome; gives the failure."""
        self._refuse_endless_wait()
        found = super().exception(timeout)
        self._is_seen = self._is_seen or found is not None
        return found

    def _refuse_endless_wait(self) -> None:
        if self.done():
            return
        if threading.current_thread() is self.thread:
            raise CoordinationError("a callback runs while its save is in flight still, so it cannot wait for it")
        if os.getpid() != self._pid:
            raise CoordinationError(
                f"save {self.save_id} was begun by process {self._pid}, and this one, forked from it, never hears how "
                "it ends: wait there"
            )

    def mark_seen(self) -> None:
        """Say that the caller was told already that this save fails."""
        self._is_seen = True

    def unseen_failure(self, remedy: str = NOT_BEGUN) -> DcpError | None:
        """The failure that nobody has seen, for somebody to raise, once; None where there is none.

        Args:
            remedy: What to say besides; by default, what concerns the next save.
        """
        if not self.done() or self._is_seen:
            return None
        error = super().exception()
        self._is_seen = True
        if error is None or isinstance(error, SaveCancelledError):
            return None
        kind = type(error) if isinstance(error, DcpError) else RankFailedError
        text = str(error) if isinstance(error, DcpError) else f"{type(error).__name__}: {error}"
        failure = kind(
            f"an earlier asynchronous save (id {self.save_id}) failed and nobody awaited it: {text}{remedy}",
            error.causes if isinstance(error, DcpError) else (),
        )
        failure.__cause__ = error
        return failure


class AsyncSaveResponse:
    """A save that goes on in the background.

    Attributes:
        persist_completion: Resolves with the checkpoint's description once it is committed, and fails with what all
            ranks raise.
    """

    def __init__(self, completion: SaveFuture, cancel: Callable[[], bool]) -> None:
        self.persist_completion: Future[Metadata] = completion
        self._cancel = cancel

    def get_result(self, timeout: float | None = None) -> Metadata:
        """Wait until the checkpoint is committed.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Returns:
            Its description, read as far as it is asked.

        Raises:
            TimeoutError: It takes longer; the save goes on.
            ArgumentError: `timeout` is no number of seconds.
            DcpError: The save failed, on all ranks alike.
        """
        check_wait(timeout)
        return self.persist_completion.result(timeout)

    def cancel(self) -> bool:
        """Stop the save on all ranks, as far as that is possible still; one rank that calls is enough.

        Returns:
            True: nothing of it will be committed, and `persist_completion` fails with `SaveCancelledError`. False: it
            is over, or may be committed already.
        """
        return not self.persist_completion.done() and self._cancel()
