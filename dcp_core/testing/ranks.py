"""Ranks as real processes, for tests: fork them, run a function in each, bring results and errors back.

The processes come from multiprocessing's fork server, which has numpy and the core loaded already. Nothing outlives
`run_ranks`: at the time limit a rank prints where it stands and exits, and what is left is killed by its pid.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from dcp_core.coordination.verdict import name_ranks

_EXIT_SECONDS = 3.0
_TAIL_CHARS = 4000
_TIMEOUT_MARK = "Timeout ("
_FRAME = re.compile(r'File "(.+)", line \d+, in (.+)')
_ADDRESS = re.compile("0x[0-9a-f]+")  # of objects and threads: they differ where nothing else does
_PRELOADED = ["dcp_core.testing.numpy_ranks", "dcp_core.api"]
_PRELOADED_IF_IMPORTED = ("pytest", "hypothesis", "hypothesis.extra.numpy")


@dataclass(frozen=True, slots=True)
class RankContext:
    """Which rank a process of `run_ranks` is.

    Attributes:
        rank: Its number.
        world_size: How many there are.
        channel_directory: Where they talk, through `coordination.directory.DirectoryChannel`.
    """

    rank: int
    world_size: int
    channel_directory: Path


class RankProcessError(AssertionError):
    """Ranks raised, died, or did not finish: who, and a traceback, once for all ranks with the same error."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What a rank's process needs to know."""

    context: RankContext
    module: str
    file: str | None
    function: str
    arguments: bytes
    environment: dict[str, str]
    working_directory: str
    directory: Path
    timeout_seconds: float

    @property
    def outcome_file(self) -> Path:
        return self.directory / f"rank{self.context.rank}.outcome"

    @property
    def log_file(self) -> Path:
        return self.directory / f"rank{self.context.rank}.log"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a rank ended: its result, or what it raised (as an object where that can be pickled)."""

    result: Any = None
    error: BaseException | None = None
    text: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.text)


_current: RankContext | None = None


def preload(*modules: str) -> None:
    """Have modules imported once, before ranks are forked; takes effect for a fork server that has not started yet."""
    _PRELOADED.extend(module for module in modules if module not in _PRELOADED)


def current_rank() -> RankContext | None:
    """Which rank this process is, or None outside `run_ranks`."""
    return _current


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    directory: str | os.PathLike[str] | None = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """Run `function(context, *args)` in `world_size` processes.

    Args:
        function: A function of a module (not a closure); it gets its `RankContext` first.
        world_size: How many ranks.
        args: Handed to every rank, pickled.
        timeout_seconds: When ranks that still run are ended.
        directory: Where the ranks' channel, logs and results lie while they run (a directory of their own in it);
            None: with other temporary files.
        return_exceptions: Return what a rank raised in the place of its result; a `RankProcessError` for one that
            died or did not finish.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankProcessError: A rank raised, died, or did not finish, and `return_exceptions` is False.
    """
    with contextlib.ExitStack() as stack:
        if directory is not None:
            os.makedirs(directory, exist_ok=True)
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-", dir=directory))
        jobs = _make_jobs(function, world_size, args, Path(place), timeout_seconds)
        outcomes = _run(jobs, timeout_seconds)
    if not return_exceptions and any(outcome.failed for outcome in outcomes):
        raise RankProcessError(_told_once(outcomes))
    return [_result_of(outcome) for outcome in outcomes]


def _told_once(outcomes: Sequence[_Outcome]) -> str:
    """What failed ranks have to say, by the first that says it."""
    said: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.failed:
            said.setdefault(_gist(outcome), []).append(rank)
    return "\n".join(f"{name_ranks(ranks)}: {outcomes[ranks[0]].text}" for ranks in said.values())


def _gist(outcome: _Outcome) -> str:
    """The same for ranks with the same error: what it says, and which function raised it."""
    text = _ADDRESS.sub("0x", outcome.text)
    if outcome.error is None or not str(outcome.error):
        return text
    return f"{_FRAME.findall(text)[-1:]}: {type(outcome.error).__qualname__}: {_ADDRESS.sub('0x', str(outcome.error))}"


def _result_of(outcome: _Outcome) -> Any:
    if not outcome.failed:
        return outcome.result
    return RankProcessError(outcome.text) if outcome.error is None else outcome.error


def _make_jobs(
    function: Callable[..., Any], world_size: int, args: Sequence[Any], directory: Path, timeout_seconds: float
) -> list[_Job]:
    if "<locals>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is a closure; ranks need a function of a module")
    channel = directory / "channel"
    channel.mkdir()
    return [
        _Job(
            context=RankContext(rank, world_size, channel),
            module=function.__module__,
            file=inspect.getsourcefile(function),
            function=function.__qualname__,
            arguments=pickle.dumps(tuple(args)),
            environment=dict(os.environ),
            working_directory=os.getcwd(),
            directory=directory,
            timeout_seconds=timeout_seconds,
        )
        for rank in range(world_size)
    ]


# -- this process ---------------------------------------------------------------------------------------------------


def _run(jobs: Sequence[_Job], timeout_seconds: float) -> list[_Outcome]:
    context = _fork_server()
    processes: list[ForkServerProcess] = []
    try:
        for job in jobs:
            process = context.Process(target=_run_rank, args=(job,), name=f"rank{job.context.rank}")
            process.start()
            processes.append(process)
        _await(processes, time.monotonic() + timeout_seconds + _EXIT_SECONDS)
        is_late = [process.exitcode is None for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [_outcome_of(*ended) for ended in zip(jobs, processes, is_late, strict=True)]


def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    extra = [name for name in _PRELOADED_IF_IMPORTED if name in sys.modules]
    context.set_forkserver_preload([*_PRELOADED, *extra])
    with _search_path_in_environment():
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _search_path_in_environment() -> Iterator[None]:
    """Before Python 3.13 the fork server preloads only what its own search path reaches."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _await(processes: Sequence[ForkServerProcess], deadline: float) -> None:
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))


def _outcome_of(job: _Job, process: ForkServerProcess, is_late: bool) -> _Outcome:
    """What a rank left behind; the process has ended."""
    log = _tail(job.log_file)
    code = process.exitcode
    if is_late or (code == 1 and _TIMEOUT_MARK in log):
        text = f"still ran after {job.timeout_seconds:g} s"
    elif job.outcome_file.exists():
        return _read_outcome(job.outcome_file)
    elif code is not None and code < 0:
        text = f"was killed by {signal.Signals(-code).name}"
    else:
        text = f"ended with exit code {code} and no result"
    return _Outcome(text=f"{text}\n{log}".rstrip())


def _read_outcome(file: Path) -> _Outcome:
    try:
        outcome: _Outcome = pickle.loads(file.read_bytes())
    except Exception as error:
        return _Outcome(text=f"its result can't be read here: {type(error).__name__}: {error}")
    return outcome


def _tail(file: Path) -> str:
    return file.read_text(errors="replace")[-_TAIL_CHARS:] if file.exists() else ""


# -- the rank's process ---------------------------------------------------------------------------------------------


def _run_rank(job: _Job) -> None:
    global _current
    log = os.open(job.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(log)
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.working_directory)
    _current = job.context
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    faulthandler.dump_traceback_later(job.timeout_seconds, exit=True, file=log)
    _leave(job.outcome_file, _call(job))


def _call(job: _Job) -> _Outcome:
    try:
        target: Any = load_module(job.module, job.file)
        for name in job.function.split("."):
            target = getattr(target, name)
        return _Outcome(target(job.context, *pickle.loads(job.arguments)))
    except BaseException as error:
        return _Outcome(error=error, text="".join(traceback.format_exception(error)))


def _leave(file: Path, outcome: _Outcome) -> None:
    """Write the outcome for the parent; what can't be pickled goes as text."""
    try:
        pickled = pickle.dumps(outcome)
        pickle.loads(pickled)
    except Exception as error:
        text = outcome.text or f"its result can't be pickled: {type(error).__name__}: {error}"
        pickled = pickle.dumps(_Outcome(text=text))
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(pickled)
    temporary.replace(file)


def load_module(module: str, file: str | None) -> Any:
    """Import a module, by its file if its name is on no path (pytest's importlib mode)."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        spec = None if file is None else importlib.util.spec_from_file_location(module, file)
        if spec is None or spec.loader is None:
            raise
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)
        return loaded
