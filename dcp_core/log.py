"""Logs and traces: every stage of save and load is timed in one place.

`stage` times a block or a function. The time goes to the logger ``dcp.stage`` and, when ``DCP_TRACE`` names a file, as
an event into that file. Nothing happens at import: the environment is read when the first stage begins.

====================================  =======================================================================
``DCP_LOG=INFO``                      log to standard error from this level on
``HP_LOG_CONFIG=DCP:INFO``            the same, as HyperParallel spells it; ``DCP_LOG`` wins
``DCP_TRACE=trace.json``              append the stages of all ranks to this file, in Chrome's trace format
====================================  =======================================================================

In: stage names. Out: lines such as ``[INFO] [HP-DCP]: [rank=0] >>> func build_local_plan cost 0.0003 seconds``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import sys
import threading
import time
import warnings
from types import FrameType, TracebackType
from typing import Final

LOG_VARIABLE: Final = "DCP_LOG"
SHARED_LOG_VARIABLE: Final = "HP_LOG_CONFIG"
TRACE_VARIABLE: Final = "DCP_TRACE"

_LOGGER = logging.getLogger("dcp")
_STAGE_LOGGER = logging.getLogger("dcp.stage")
_FORMAT = "[%(levelname)s] [HP-DCP]: [rank=%(dcp_rank)d] %(message)s"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_RANK_VARIABLES = ("RANK", "RANK_ID")  # of torchrun and of msrun


class _Settings:
    """What the environment said at the first stage; one for the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_read = False
        self.rank: int | None = None
        self.trace: _TraceFile | None = None


_SETTINGS = _Settings()


def set_rank(rank: int) -> None:
    """Say which rank this process is in its group; it appears in every line and event from now on."""
    _SETTINGS.rank = rank


def current_rank() -> int:
    """The rank that lines and events carry: the one that was set, else the launcher's, else 0."""
    if _SETTINGS.rank is not None:
        return _SETTINGS.rank
    for variable in _RANK_VARIABLES:
        text = os.environ.get(variable, "")
        if text.isdecimal():
            return int(text)
    return 0


def configure() -> None:
    """Attach the handler and open the trace that the environment asks for. Only the first call in a process acts."""
    if _SETTINGS.is_read:
        return
    with _SETTINGS.lock:
        if _SETTINGS.is_read:
            return
        _SETTINGS.is_read = True
        level = _level_asked_for()
        if level is not None:
            handler = _StderrHandler()
            handler.setFormatter(logging.Formatter(_FORMAT))
            _LOGGER.addHandler(handler)
            _LOGGER.setLevel(level)
        path = os.environ.get(TRACE_VARIABLE)
        if path:
            _SETTINGS.trace = _TraceFile(path)


def warn(message: str) -> None:
    """Warn, at the line that called the library: the user's, however deep in it this is.

    Args:
        message: What is wrong, and what the library does about it.
    """
    level, depth = 2, 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if _is_of_library(module) or (module == "contextlib" and level == depth + 1):  # the latter calls a `stage`
            level = depth + 2
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, RuntimeWarning, stacklevel=min(level, depth))


def _is_of_library(module: str) -> bool:
    """Whether a module is DCP's, or that of an adapter package that is named like these; tests of it are users."""
    return module.startswith("dcp_") and not module.startswith("dcp_core.testing")


def _level_asked_for() -> str | None:
    variable, text = LOG_VARIABLE, os.environ.get(LOG_VARIABLE, "")
    if not text:
        variable, text = SHARED_LOG_VARIABLE, os.environ.get(SHARED_LOG_VARIABLE, "")
        parts = [part.strip().partition(":") for part in text.replace(";", ",").split(",")]
        text = next((level for module, _, level in parts if module.strip().upper() == "DCP"), "")
    level = text.strip().upper()
    if not level:
        return None
    if level not in _LEVELS:
        warn(f"{variable} asks for the log level {text!r}; known: {', '.join(_LEVELS)}")
        return None
    return level


class _StderrHandler(logging.Handler):
    """Writes each record in one piece, so that the lines of many ranks stay whole.

    Looks up `sys.stderr` anew for each record, as it may be replaced after the first.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            record.dcp_rank = current_rank()
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class stage(contextlib.ContextDecorator):  # noqa: N801  (it reads as a verb, like contextlib.suppress)
    """Time a block, or every call of a function, as one stage.

    Args:
        name: What lines and events call it.

    Examples:
        >>> @stage("build_local_plan")
        ... def build_local_plan() -> int:
        ...     return 7
        >>> build_local_plan()
        7
        >>> with stage("execute_write"):
        ...     pass
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._began_ns = 0
        self._began = 0.0

    def _recreate_cm(self) -> stage:
        return stage(self.name)  # calls may nest, and come from several threads

    def __enter__(self) -> stage:
        configure()
        self._began_ns = time.time_ns()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._began
        if kind is None:
            _STAGE_LOGGER.info(">>> func %s cost %.4f seconds", self.name, seconds)
        else:
            _STAGE_LOGGER.info(">>> func %s failed with %s after %.4f seconds", self.name, kind.__name__, seconds)
        if _SETTINGS.trace is not None:
            _SETTINGS.trace.add(self.name, self._began_ns, seconds, None if kind is None else kind.__name__)


class _TraceFile:
    """A file that the processes of a job append events to.

    The format is Chrome's JSON array, whose closing bracket may be missing. Every event is one `write` to a file opened
    with O_APPEND, so events of different processes never mix. A trace that cannot be written warns once and is given
    up: it never fails a save.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._named: set[tuple[int, int]] = set()
        self._file: int | None = None
        try:
            self._begin()
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self._give_up(error)

    def _begin(self) -> None:
        """Make the file, its opening bracket in it from the start, unless another rank has."""
        temporary = f"{self._path}.{secrets.token_hex(8)}.tmp"
        if os.path.exists(self._path):
            return
        with open(temporary, "xb") as file:
            file.write(b"[\n")
        try:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, self._path)
        finally:
            os.unlink(temporary)

    def add(self, name: str, began_ns: int, seconds: float, failure: str | None) -> None:
        """Append one complete event; ranks are the processes of the trace, threads its threads."""
        rank, process = current_rank(), os.getpid()
        events: list[dict[str, object]] = []
        if (process, rank) not in self._named:
            self._named.add((process, rank))
            events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        event: dict[str, object] = {"name": name, "cat": "dcp", "ph": "X", "ts": began_ns / 1000}
        event |= {"dur": seconds * 1e6, "pid": rank, "tid": threading.get_native_id()}
        event["args"] = {"process": process} | ({} if failure is None else {"failure": failure})
        events.append(event)
        if self._file is None:
            return
        try:
            os.write(self._file, "".join(json.dumps(event) + ",\n" for event in events).encode())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        warn(f"{TRACE_VARIABLE}: cannot write {self._path}: {error}; no trace")
