"""How the background process is started: which interpreter, what it sees of the trainer's environment, where it writes.

In: the trainer's own interpreter, import path and environment. Out: a process with a session of its own that inherits
nothing but its end of the control socket, sees no devices and keeps numerical libraries to one thread.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder

import dcp_core
from dcp_core.errors import CoordinationError

LOG_DIRECTORY_VARIABLE = "DCP_BACKGROUND_LOG_DIR"

_LOGGER = logging.getLogger("dcp.background")
_LAST_WORDS_NBYTES = 4096
_LOG_PREFIX, _LOG_SUFFIX = "dcp-background-", ".log"
_LOCKED_WITHIN_SECONDS = 60.0
_PROGRAM = "import sys; sys.path[:] = {path}; from dcp_core.background.child import main; main{arguments}"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_NO_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_DROPPED = ("LD_PRELOAD", "LD_AUDIT")
_FILES = ("DCP_TRACE",)


class ProcessLog:
    """The file that takes what the process prints; the process removes it when it ends well.

    It lies in `DCP_BACKGROUND_LOG_DIR`, else with temporary files. Where neither can be written it is memory. A process
    that is killed together with its trainer leaves it: the next one removes it, where it is empty. Who lives holds a
    lock on its own, the process by the descriptor that it inherits.

    Attributes:
        path: Where it is; empty for memory.
        descriptor: It, open; not inherited.
    """

    def __init__(self) -> None:
        directory = os.environ.get(LOG_DIRECTORY_VARIABLE)
        try:
            directory = os.path.abspath(directory or tempfile.gettempdir())
            os.makedirs(directory, exist_ok=True)
            remove_left_logs(directory)
            self.descriptor, self.path = tempfile.mkstemp(_LOG_SUFFIX, f"{_LOG_PREFIX}{os.getpid()}-", directory)
            with suppress(OSError):  # a file system without locks: then it may be taken for left behind
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            _LOGGER.warning("no log file for the background process: %s", error)
            self.descriptor, self.path = os.memfd_create("dcp-background.log", os.MFD_CLOEXEC), ""

    def last_words(self) -> str:
        """The end of what was printed."""
        size = os.fstat(self.descriptor).st_size
        tail = os.pread(self.descriptor, _LAST_WORDS_NBYTES, max(0, size - _LAST_WORDS_NBYTES))
        return tail.decode("utf-8", "replace").strip()

    def remove(self) -> None:
        """Remove the file: it has served."""
        if self.path:
            with suppress(OSError):
                os.unlink(self.path)

    def close(self) -> None:
        """Close it here; a second time does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def remove_left_logs(directory: str) -> None:
    """Remove empty logs of this user that nobody holds any more; never raises.

    Args:
        directory: Where logs lie. One that is younger than a minute may be about to be locked, and stays.
    """
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(_LOG_PREFIX) and entry.name.endswith(_LOG_SUFFIX):
                with suppress(OSError):
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    if not _may_be_left(entry.stat(follow_symlinks=False)):
        return
    descriptor = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _may_be_left(os.fstat(descriptor)):
            os.unlink(entry.path)
    finally:
        os.close(descriptor)


def _may_be_left(found: os.stat_result) -> bool:
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_size and time.time() - found.st_mtime > _LOCKED_WITHIN_SECONDS


def start_interpreter(
    descriptor: int, log: ProcessLog, handler: str, extra_paths: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the background process.

    Args:
        descriptor: Its end of the control socket.
        log: What it prints to.
        handler: "module:qualname" of what serves requests.
        extra_paths: Directories to import from after those of this process.
        environment: Variables it gets besides what it gets from this process.

    Raises:
        CoordinationError: It could not be started.
    """
    program = _PROGRAM.format(
        path=ascii(import_path(extra_paths)), arguments=ascii((descriptor, log.path, handler, dcp_core.__version__))
    )
    try:
        return subprocess.Popen(  # without preexec_fn: it is a vfork, whose cost does not grow with this process
            [_executable(), *_interpreter_options(), "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=log.descriptor,
            stderr=log.descriptor,
            cwd="/",
            env={**child_environment(os.environ), **environment},
            pass_fds=(descriptor,),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise CoordinationError(f"the background process could not be started: {error}") from error


def child_environment(parent: Mapping[str, str]) -> dict[str, str]:
    """The environment of the process: the trainer's, less what would make it heavy, talkative, or another program."""
    kept = {
        name: value
        for name, value in parent.items()
        if name not in _DROPPED and (name == "PYTHONHOME" or not name.startswith("PYTHON"))
    }
    for name in _FILES:  # it works in another directory
        if kept.get(name):
            kept[name] = _absolute(kept[name]) or kept[name]
    kept["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return {**kept, **dict.fromkeys(_ONE_THREAD, "1"), **dict.fromkeys(_NO_DEVICES, "")}


def import_path(extra_paths: Sequence[str] = ()) -> list[str]:
    """This process's import path with absolute entries, on which this very `dcp_core` is found."""
    entries = [_absolute(entry) for entry in (*sys.path, *extra_paths) if isinstance(entry, str)]
    path = list(dict.fromkeys([entry for entry in entries if entry is not None]))
    here = os.path.abspath(dcp_core.__path__[0])
    found = PathFinder.find_spec("dcp_core", path)
    if found is None or not found.origin or not _is_same_file(os.path.dirname(found.origin), here):
        path.insert(0, os.path.dirname(here))  # found by an import hook, which the process does not have
    return _standard_first(path)


def _standard_first(path: Sequence[str]) -> list[str]:
    """Move the standard library to the front: what stands before it may hide it, too late to concern the trainer."""
    standard = {os.path.abspath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    standard |= {os.path.join(place, "lib-dynload") for place in standard}
    return [*(entry for entry in path if entry in standard), *(entry for entry in path if entry not in standard)]


def _absolute(entry: str) -> str | None:
    """None where it is relative to a directory that is gone."""
    try:
        return os.path.abspath(entry)
    except OSError:
        return None


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _executable() -> str:
    """The interpreter: this one, or what an embedding program told multiprocessing."""
    from multiprocessing import spawn

    executable = os.fsdecode(spawn.get_executable() or "")
    if not executable:
        raise CoordinationError(
            "no Python interpreter is known to start the background process with (sys.executable is empty); name one "
            "with multiprocessing.set_executable"
        )
    return os.path.abspath(executable)


def _interpreter_options() -> list[str]:
    """As little as possible at the start; files and their names are treated as in this process."""
    needs_home = bool(os.environ.get("PYTHONHOME")) and not sys.flags.ignore_environment
    options = ["-s", "-S"] if needs_home else ["-I", "-S"]
    options += ["-X", f"utf8={sys.flags.utf8_mode}"]
    if sys.dont_write_bytecode:
        options.append("-B")
    if sys.pycache_prefix:
        options += ["-X", f"pycache_prefix={os.path.abspath(sys.pycache_prefix)}"]
    return options
