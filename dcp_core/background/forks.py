"""What a forked process must not keep of its parent: the control socket and the shared memory.

A fork copies every descriptor and mapping. A data-loading worker that kept the control socket would hide the trainer's
death from the background process, and one that kept the arena would hold its memory. In: things that own such. Out: in
every process forked from then on, `leave_behind` was called on each of them before anything else runs there.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from typing import Protocol


class LeftBehind(Protocol):
    """Owns what stays with the process that made it."""

    def leave_behind(self) -> None:
        """Close, in a forked process, this process's copies; locks may be held by threads that are not here."""


NO_FORK = threading.RLock()
"""While it is held no fork begins: between making a descriptor and `stays_here`."""

_OWNERS: weakref.WeakSet[LeftBehind] = weakref.WeakSet()


def stays_here(owner: LeftBehind) -> None:
    """Have an owner let go of what it owns in every process that will be forked. Held weakly."""
    _OWNERS.add(owner)


def _leave_all() -> None:
    try:
        for owner in list(_OWNERS):
            with suppress(Exception):
                owner.leave_behind()
        _OWNERS.clear()
    finally:
        NO_FORK.release()


os.register_at_fork(before=NO_FORK.acquire, after_in_parent=NO_FORK.release, after_in_child=_leave_all)
