"""The background process of a trainer: a fresh interpreter that runs the core only; started, asked, watched.

In: requests, each with a number, answered by the process in any order. Out: answers, and word of its death: exit code
and the last lines of its log. It is used until it dies or is closed; then whoever needs one makes another.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from dcp_core.background import forks
from dcp_core.background.arena import Arena
from dcp_core.background.control import ControlSocket
from dcp_core.background.launch import ProcessLog, start_interpreter
from dcp_core.errors import CoordinationError, DcpError, RankFailedError, decode_error

START_SECONDS = 60.0
PERSISTER = "dcp_core.background.persister:Persister"

Answer = Mapping[str, Any]

_LOGGER = logging.getLogger("dcp.background")
_FORWARDED = ("dcp", "py")
_END_SECONDS = 5.0


class BackgroundProcess:
    """One background process, from its start to its end.

    Making one starts the process and returns at once; requests may follow at once too.

    Args:
        extra_paths: Directories that it imports from besides those of this process.
        environment: Variables that it gets besides this process's.
        notify: Called, on a thread of this object, with every message that answers no request; must not wait for
            answers.
        handler: "module:qualname" of what serves requests in it.

    Raises:
        CoordinationError: It could not be started.
    """

    def __init__(
        self,
        extra_paths: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        notify: Callable[[Any], None] | None = None,
        *,
        handler: str = PERSISTER,
    ) -> None:
        self._notify = notify
        self._waiting: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._last_number = 0
        self._is_closing = False
        self._is_elsewhere = False
        self._end: str | None = None
        self._problem = ""
        self._is_ready = False
        self._ended = threading.Event()
        self._shared: tuple[Arena, int, int] | None = None
        with forks.NO_FORK:
            self._log = ProcessLog()
            self._control, theirs = ControlSocket.pair()
            try:
                with theirs:
                    self._process = start_interpreter(
                        theirs.fileno(), self._log, handler, extra_paths, environment or {}
                    )
                self._reader = threading.Thread(target=self._read, name="dcp-background", daemon=True)
                self._reader.start()
            except BaseException:
                self._control.close()  # a process that was started ends by this
                self._log.remove()
                self._log.close()
                raise
            forks.stays_here(self)
        self.request({"do": "hello"})

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has been heard of."""
        return self._is_ready

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests from this process."""
        if self._is_elsewhere or self._is_closing or self._end is not None:
            return False
        try:  # not poll(), which says that it lives while the reading thread asks at the same moment
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # its end was seen
            return False

    def request(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Future[Answer]:
        """Send a request.

        Args:
            message: Plain values; `do` says what is wanted.
            descriptors: Open files that go with it; they stay open here.

        Returns:
            A future of the answer, which cannot be cancelled. It fails with the error that the process answered, with
            a `RankFailedError` that tells of the death of the process, or, where the request was not sent, with why.
        """
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()
        with self._lock:
            refusal = self._refusal()
            if refusal is None:
                self._last_number += 1
                number = self._last_number
                self._waiting[number] = answer
        if refusal is not None:
            answer.set_exception(refusal)
            return answer
        try:
            self._control.send({"id": number, "request": dict(message)}, descriptors)
        except ConnectionAbortedError as error:
            self._problem = self._problem or f"was cut off ({error}); "
        except ConnectionError:
            pass  # the reading thread sees the end of the stream too, and learns why
        except OSError as error:
            self._settle(number, error=CoordinationError(f"a request to the background process was not sent: {error}"))
        except DcpError as error:
            self._settle(number, error=error)
        return answer

    def share(self, arena: Arena) -> Future[Answer]:
        """Have the process map the segments of an arena that it does not map yet.

        Returns:
            A future of `{"segments": how many it maps}`.
        """
        segments = arena.descriptors()
        shared = self._shared
        known = shared[2] if shared is not None and shared[:2] == (arena, arena.generation) else 0
        if known and known == len(segments):
            done: Future[Answer] = Future()
            done.set_result({"segments": known})
            return done
        new = segments[known:]
        message = {"do": "segments", "nbytes": [nbytes for _, nbytes in new], "first": known}
        self._shared = (arena, arena.generation, len(segments))
        answer = self.request(message, [descriptor for descriptor, _ in new])
        answer.add_done_callback(self._forget_if_not_shared)
        return answer

    def give_up(self, why: str) -> None:
        """Kill the process, whatever it does. All its requests fail at once: it may take its time to end.

        Args:
            why: In words; after "the background process 1234".
        """
        if self._is_elsewhere:
            return
        with self._lock:
            self._end = self._end or f"the background process {self.pid} {why}"
            waiting, self._waiting = self._waiting, {}
        self._process.kill()
        for answer in waiting.values():
            answer.set_exception(RankFailedError(self._end))

    def has_ended_within(self, seconds: float) -> bool:
        """Wait for its end. A process that was killed goes on for as long as the kernel holds it in an operation."""
        return self._ended.wait(seconds)

    def close(self, timeout_seconds: float) -> int | None:
        """Take no more requests; the process answers those it has, then ends.

        Args:
            timeout_seconds: How long to wait for that.

        Returns:
            Its exit code; None if it is still at work after the time (it goes on), or belongs to another process.
        """
        if self._is_elsewhere:
            return None
        self._is_closing = True
        self._control.finish()
        if not self._ended.wait(timeout_seconds):
            return None
        if threading.current_thread() is not self._reader:  # a callback may close too
            self._reader.join()
        return self._process.returncode

    def leave_behind(self) -> None:
        """Let go, in a forked process, of its copies of descriptors; the background process stays the parent's."""
        self._is_elsewhere = True
        self._lock = threading.Lock()
        self._control.leave_behind()
        self._log.close()
        self._process.returncode = 0  # nothing to wait for here

    def _forget_if_not_shared(self, answer: Future[Answer]) -> None:
        if answer.exception() is not None:
            self._shared = None

    def _refusal(self) -> DcpError | None:
        """Why no request can be taken."""
        if self._is_elsewhere:
            return CoordinationError(
                f"the background process {self.pid} belongs to the process that this one was forked from; save there, "
                "or start a background process here"
            )
        if self._end is not None:
            return RankFailedError(self._end)
        if self._is_closing:
            return CoordinationError(f"the background process {self.pid} was closed")
        return None

    def _read(self) -> None:
        """Hand answers to those who wait for them, until the process is gone."""
        problem = ""
        try:
            if self._control.is_readable_within(START_SECONDS):
                self._is_ready = True
                while self._take_next():
                    pass
            else:
                problem = f"it was not ready after {START_SECONDS:g} s; "
                self._process.kill()
        except Exception as error:
            problem = f"what it said cannot be understood ({type(error).__name__}: {error}); "
        self._control.close()
        code = self._reap()
        end = self._end_in_words(code, problem or self._problem)
        with self._lock:
            self._end = end = self._end or end
            waiting, self._waiting = self._waiting, {}
        self._log.close()
        for answer in waiting.values():
            answer.set_exception(RankFailedError(end))
        self._ended.set()

    def _take_next(self) -> bool:
        found = self._control.receive()
        if found is None:
            return False
        message, descriptors = found
        for descriptor in descriptors:
            os.close(descriptor)
        if not isinstance(message, dict):
            raise CoordinationError(f"a {type(message).__name__} instead of a mapping")
        if "id" in message:
            error = message.get("error")
            self._settle(message["id"], message.get("answer"), None if error is None else decode_error(error))
        elif "log" in message:
            _log_here(*message["log"])
        elif self._notify is not None:
            try:
                self._notify(message)
            except Exception:
                _LOGGER.exception("a message of the background process could not be dealt with")
        return True

    def _settle(self, number: int, value: Answer | None = None, error: DcpError | None = None) -> None:
        with self._lock:
            answer = self._waiting.pop(number, None)
        if answer is None:
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value or {})

    def _reap(self) -> int:
        """Wait for its end, which follows the end of the stream; its exit code."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_SECONDS)
        self._process.kill()
        return self._process.wait()

    def _end_in_words(self, code: int, problem: str) -> str:
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {_signal_name(-code)} (exit code {code})"
        words = self._log.last_words()
        if not words:
            self._log.remove()
        elif self._log.path:
            words += f" (whole log: {self._log.path})"
        hint = "; the kernel sends SIGKILL when memory runs out" if code == -signal.SIGKILL and not problem else ""
        return f"the background process {self.pid} {problem}{how}; its last words: {words or 'none'}{hint}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _log_here(level: int, name: str, text: str) -> None:
    """Pass on what the process logged."""
    if name.partition(".")[0] in _FORWARDED:
        logging.getLogger(name).log(level, "background: %s", text)
