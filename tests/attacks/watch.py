"""Sees what a process does while an attack runs: files that it opens, programs that it starts, memory and time.

`sys.addaudithook` tells of everything that goes through the interpreter; nothing can take the hook away again.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from dcp_core.recipes import torch_package

_PATHS = {
    "open": 1, "os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.link": 2, "os.symlink": 2, "os.truncate": 1,
    "os.mkdir": 1, "os.chmod": 1, "os.chown": 1, "os.utime": 1, "os.listdir": 1, "os.scandir": 1, "shutil.rmtree": 1,
}  # fmt: skip
"""Events whose first so many arguments are paths."""

_NEVER = (
    "subprocess.", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.fork", "os.startfile", "pty.", "socket.",
    "urllib.", "ctypes.dlopen", "marshal.load", "exec", "compile", "import", "pickle.find_class", "webbrowser.",
)  # fmt: skip
_LOOKED_FOR = ("rich",)
"""What commands look for again and again where it is not installed."""
_HARMLESS = ("socket.gethostname",)
_FREE = ("/proc/", "/dev/null", "/sys/")
_RESIDENT = Path("/proc/self/statm")


class Watch:
    """What this process does; one for its whole life.

    Attributes:
        seen: What it should not have done, in words.
    """

    def __init__(self, inside: Path) -> None:
        self.seen: list[str] = []
        self._inside = os.path.abspath(inside) + os.sep
        self._is_on = False
        os.chdir(inside)  # events do not tell the open directory that a name is relative to: only "../" leads out of it
        sys.addaudithook(self._hear)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look while the block runs."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event == "os.kill":
            if arguments[1] != 0:
                self._note(f"{event} {arguments}")
        elif event in _PATHS:
            for path in arguments[: _PATHS[event]]:
                self._check_path(event, path)
        elif event.startswith(_NEVER) and event not in _HARMLESS and not self._is_known_module(event, arguments):
            self._note(f"{event} {str(arguments)[:200]}")

    def _is_known_module(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """An import of a package's own lazy parts is none of the attack's."""
        package = str(arguments[0]).partition(".")[0]
        return event == "import" and (package in sys.modules or package in _LOOKED_FOR)

    def _check_path(self, event: str, path: Any) -> None:
        if isinstance(path, int) or path is None:
            return
        where = os.path.abspath(os.fsdecode(path))
        if not (where + os.sep).startswith(self._inside) and not where.startswith(_FREE):
            self._note(f"{event} {where}")

    def _note(self, what: str) -> None:
        if len(self.seen) < 20 and not _is_our_own():
            self.seen.append(what)


def _is_our_own() -> bool:
    """Whether a traceback is written, which looks lines of the source up, or this library imports a part of its own."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename in (traceback.__file__, torch_package.__file__):
            return True
        frame = frame.f_back
    return False


class TooLongError(BaseException):
    """An attack took more processor time than any may."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupt a block that takes more seconds of processor time, or ten times as long by the clock."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TooLongError(f"{number} after {seconds} s")

    for timer, alarm, limit in (
        (signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, 10 * seconds)
    ):  # fmt: skip
        signal.signal(alarm, interrupt)
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def limit_memory(room_nbytes: int) -> None:
    """Let this process have so much more address space, so that no attack harms the machine."""
    pages = int(_RESIDENT.read_text().split()[0])
    limit = pages * resource.getpagesize() + room_nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def peak_nbytes() -> int:
    """The most memory that this process ever had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def cpu_seconds() -> float:
    """Processor time of this process."""
    return time.process_time()
