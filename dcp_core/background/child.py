"""The main program of the background process: takes requests from the control socket, works on one at a time.

The thread that reads the socket answers at once what is quick (hello, segments, cancel, progress); everything that
touches storage or talks to peers runs on the worker thread, in order. When the trainer is gone (end of the stream) the
worker finishes what it has, and the process ends.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import dcp_core
from dcp_core.background.arena import SegmentViews
from dcp_core.background.control import ControlSocket
from dcp_core.errors import CoordinationError, DcpError, RankFailedError, cause_of, encode_error
from dcp_core.log import configure, current_rank

NICENESS = 5

_LOGGER = logging.getLogger("dcp.background")
_NOT_FOR_US = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Work = Callable[[], Mapping[str, Any]]


class Handler(Protocol):
    """Serves requests; made with the segments that the trainer shares, and what sends it messages unasked."""

    def handle(self, what: str, message: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Serve one request, on the worker thread; plain values in and out."""

    def cancel(self, save_id: Any, /) -> bool:
        """Stop a save if it can be stopped still, on another thread; whether it will."""

    def progress(self) -> Mapping[str, Any]:
        """How far the work is, on another thread; see `steps`."""

    def leave(self) -> None:
        """Told that the trainer is gone and all its requests are served."""


class BackgroundMain:
    """One background process, seen from within.

    Args:
        control: Its end of the control socket.
        handler: Serves what is not quick.
        segments: Where shared memory is mapped.
    """

    def __init__(self, control: ControlSocket, handler: Handler, segments: SegmentViews) -> None:
        self._control = control
        self._handler = handler
        self._segments = segments
        self._work: queue.SimpleQueue[tuple[int, str, Work] | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Serve until the trainer is gone and the last request is served.

        Raises:
            DcpError: The socket brought what is no message.
        """
        worker = threading.Thread(target=self._serve, name="dcp-worker")
        worker.start()
        try:
            while self._take_next():
                pass
        finally:
            self._work.put(None)
            worker.join()
            self._handler.leave()

    def _take_next(self) -> bool:
        """Take one message; whether there was one. Nothing of it stays here."""
        found = self._control.receive()
        if found is None:
            return False
        envelope, descriptors = found
        number, message = envelope["id"], envelope["request"]
        what = message.get("do", "")
        if what == "segments":
            self._answer(number, what, lambda: self._map(descriptors, message))
            return True
        _close_all(descriptors)
        if what == "hello":
            self._answer(number, what, lambda: {"pid": os.getpid()})
        elif what == "cancel":
            self._answer(number, what, lambda: {"cancelled": self._handler.cancel(message["save_id"])})
        elif what == "progress":
            self._answer(number, what, self._handler.progress)
        else:
            self._work.put((number, what, lambda: self._handler.handle(what, message)))
        return True

    def _map(self, descriptors: list[int], message: Mapping[str, Any]) -> Mapping[str, Any]:
        sizes = message.get("nbytes", [])
        if len(sizes) != len(descriptors):
            _close_all(descriptors)
            raise CoordinationError(f"{len(descriptors)} descriptors came for segments of {sizes} bytes")
        self._segments.replace(zip(descriptors, sizes, strict=True), first=message.get("first", 0))
        return {"segments": len(self._segments)}

    def _serve(self) -> None:
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """Serve one request; whether there was one. Nothing of it stays here."""
        task = self._work.get()
        if task is None:
            return False
        self._answer(*task)
        return True

    def _answer(self, number: int, what: str, work: Work) -> None:
        answer = _outcome(what, work)
        with suppress(ConnectionError):  # the trainer is gone; the log and the checkpoint are what is left
            try:
                self._control.send({"id": number, **answer})
            except DcpError as error:  # the answer is not plain
                self._control.send({"id": number, "error": encode_error(error)})


class _Forwarding(logging.Handler):
    """Sends records to the trainer, whose own logging shows them."""

    def __init__(self, control: ControlSocket) -> None:
        super().__init__(logging.INFO)
        self._control = control

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._control.send({"log": [record.levelno, record.name, self.format(record)]})
        except OSError:
            pass  # the trainer is gone
        except Exception:
            self.handleError(record)


def main(descriptor: int, log_path: str, handler: str, version: str) -> None:
    """Run until the trainer is gone, then end the process.

    Args:
        descriptor: The control socket.
        log_path: The file that takes what is printed, removed at a good end; may be empty.
        handler: "module:qualname" of a `Handler` class.
        version: The trainer's version of the core.

    Raises:
        CoordinationError: The core was replaced on disk since the trainer imported it.
    """
    if version != dcp_core.__version__:
        raise CoordinationError(
            f"the trainer runs dcp_core {version}, but {dcp_core.__version__} is installed by now; restart the trainer"
        )
    faulthandler.enable()
    _settle_signals()
    with suppress(OSError):
        os.nice(NICENESS)
    code = 0
    try:
        _serve(descriptor, handler)
    except BaseException:
        code = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if log_path and code == 0:
        with suppress(OSError):
            os.unlink(log_path)
    os._exit(code)  # whatever a storage left running must not keep the process


def _serve(descriptor: int, handler: str) -> None:
    end = socket.socket(fileno=descriptor)
    end.set_inheritable(False)
    control = ControlSocket(end)
    _forward_logs(control)
    segments = SegmentViews()
    BackgroundMain(control, _named(handler)(segments, control.send), segments).run()


def _outcome(what: str, work: Work) -> dict[str, Any]:
    """What a request came to."""
    try:
        return {"answer": dict(work())}
    except DcpError as error:
        return {"error": encode_error(error)}
    except BaseException as error:  # SystemExit too: whoever waits must hear of it
        _LOGGER.exception("the request %r failed", what)
        text = f"{what!r} in the background process: {type(error).__name__}: {error}"
        return {"error": encode_error(RankFailedError(text, [cause_of(error, current_rank())]))}


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _settle_signals() -> None:
    """End on SIGTERM, however the trainer treats it; leave signals that batch systems send to all to the trainer."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)


def _forward_logs(control: ControlSocket) -> None:
    """Send DCP's records and all warnings to the trainer; warnings and errors to the log file too."""
    logger = logging.getLogger("dcp")
    logger.setLevel(logging.INFO)
    configure()  # where the environment asks for a level it counts
    logging.captureWarnings(True)
    forwarding, to_file = _Forwarding(control), logging.StreamHandler()
    to_file.setLevel(logging.WARNING)
    to_file.setFormatter(logging.Formatter("%(asctime)s [%(levelname)s] %(name)s: %(message)s"))
    for name, has_file in (("dcp", bool(logger.handlers)), ("py.warnings", False)):
        logging.getLogger(name).addHandler(forwarding)
        if not has_file:
            logging.getLogger(name).addHandler(to_file)


def _named(handler: str) -> Callable[[SegmentViews, Callable[[Mapping[str, Any]], None]], Handler]:
    module, _, qualname = handler.partition(":")
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]  # what the trainer named
