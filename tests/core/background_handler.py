"""What a background process serves in tests: a handler of its own in place of the one that saves."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dcp_core.recipes.save  # noqa: F401  # what serves saves imports it too
from dcp_core.background.arena import Place, SegmentViews
from dcp_core.errors import CoverageError

TOY = f"{__name__}:Toy"
PLODDING = f"{__name__}:Plodding"
READY_LATER = f"{__name__}:ReadyLater"
REPOSITORY = str(Path(__file__).parents[2])
LIMIT_SECONDS = 60.0


def wait_for(path: str) -> None:
    """Wait until a file is there; the process ends when it never comes."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            os._exit(99)
        time.sleep(0.005)


class Toy:
    """Every request names one of the methods below."""

    def __init__(self, segments: SegmentViews, notify: Callable[[Mapping[str, Any]], None]) -> None:
        self._segments = segments
        self._notify = notify

    def handle(self, what: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
        return getattr(self, f"do_{what}")(**{key: value for key, value in message.items() if key != "do"})  # type: ignore[no-any-return]  # a dict by construction

    def cancel(self, save_id: Any) -> bool:
        if save_id == "broken":
            raise ZeroDivisionError("a broken cancel")
        return bool(save_id == "this one")

    def leave(self) -> None:
        mark = os.environ.get("LEFT")
        if mark:
            with open(mark, "a") as file:
                file.write("left\n")

    def do_echo(self, value: Any) -> dict[str, Any]:
        return {"value": value}

    def do_modules(self) -> dict[str, Any]:
        return {"modules": sorted(sys.modules)}

    def do_look(self) -> dict[str, Any]:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        is_default = [number for number in range(1, 32) if signal.getsignal(number) is signal.SIG_DFL]
        return {
            "session": os.getsid(0),
            "group": os.getpgid(0),
            "nice": os.nice(0),
            "directory": os.getcwd(),
            "environment": dict(os.environ),
            "path": list(sys.path),
            "blocked": sorted([int(number) for number in blocked]),
            "default signals": is_default,
            "encoding": sys.getfilesystemencoding(),
            "home": sys.base_prefix,
            "threads": [thread.name for thread in threading.enumerate()],
        }

    def do_read(self, segment: int, offset: int, nbytes: int) -> dict[str, Any]:
        array = self._segments.buffer(Place(segment, offset, nbytes))
        return {"bytes": array.tobytes(), "is writeable": array.flags.writeable}

    def do_work(self, until: str, mark: str) -> dict[str, Any]:
        """Work until a file is there, then leave a mark."""
        wait_for(until)
        with open(mark, "a") as file:
            file.write("done\n")
        return {}

    def do_log(self, level: int, name: str, text: str) -> dict[str, Any]:
        logging.getLogger(name).log(level, "%s", text)
        return {}

    def do_warn(self, text: str) -> dict[str, Any]:
        warnings.warn(text, RuntimeWarning, stacklevel=1)
        return {}

    def do_notify(self, message: Any) -> dict[str, Any]:
        self._notify(message)
        return {}

    def do_notify_and_wait(self) -> dict[str, Any]:
        self._notify({})
        time.sleep(LIMIT_SECONDS)
        return {}

    def do_fail(self, kind: str) -> dict[str, Any]:
        if kind == "ours":
            raise CoverageError("weights[3:5] belong to nobody")
        if kind == "storage":
            raise OSError(28, "No space left on device")
        if kind == "exit":
            raise SystemExit(5)
        return {"answer": object()}

    def do_die(self, how: str, words: str = "") -> dict[str, Any]:
        os.write(1, f"{words}\n".encode() if words else b"")
        os.write(2, f"{words}, once more\n".encode() if words else b"")
        if how == "exit":
            os._exit(3)
        if how == "fault":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.Signals[how])
        return {}


class ReadyLater(Toy):
    """Its process is ready when a file is there."""

    def __init__(self, segments: SegmentViews, notify: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(segments, notify)
        wait_for(os.environ["READY_WHEN"])


class Plodding(Toy):
    """Does one step whenever it is asked how far it is, as long as it works."""

    def __init__(self, segments: SegmentViews, notify: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(segments, notify)
        self._steps, self._wanted = 0, 0
        self._is_done = threading.Event()

    def progress(self) -> Mapping[str, Any]:
        if self._steps < self._wanted:
            self._steps += 1
        if self._steps == self._wanted:
            self._is_done.set()
        return {"count": self._steps, "phase": "plodding"}

    def do_plod(self, steps: int, hangs: bool) -> dict[str, Any]:
        """Work for so many steps, then hang or end."""
        self._wanted = steps
        self._is_done.wait(LIMIT_SECONDS)
        if hangs:
            time.sleep(LIMIT_SECONDS)
        return {"steps": self._steps}
