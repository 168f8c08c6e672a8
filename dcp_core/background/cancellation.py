"""Whether a save is cancelled: until it may be committed."""

from __future__ import annotations

import threading

from dcp_core.errors import SaveCancelledError


class Cancellation:
    """Whether a save is cancelled: possible until it may be committed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._is_too_late = False

    def cancel(self) -> bool:
        """Cancel; whether it was in time."""
        with self._lock:
            self._is_cancelled = not self._is_too_late
            return self._is_cancelled

    def check(self) -> None:
        """Raise if the save is cancelled."""
        if self._is_cancelled:
            raise SaveCancelledError("the save was cancelled; nothing of it is committed")

    def close(self) -> None:
        """From now on it is too late to cancel. Raises if the save is cancelled already."""
        with self._lock:
            self.check()
            self._is_too_late = True
