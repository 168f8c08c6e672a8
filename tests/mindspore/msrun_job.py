"""Start a real job with msrun, and end it: a private log directory, a free port, nothing left."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # comes with MindSpore, without types

_OF_JOBS = ("MS_", "RANK_", "DEVICE_ID")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended.

    Attributes:
        code: The exit status of msrun; None if it ran past its time.
        logs: What each rank printed.
        left: Processes of it that were still there, and were ended.
    """

    code: int | None
    logs: tuple[str, ...]
    left: tuple[int, ...]


def run_msrun(script: Path, world_size: int, directory: Path, *args: str, timeout_seconds: float = 100.0) -> Ended:
    """Run a script on some ranks.

    Args:
        script: What every rank runs.
        world_size: How many there are.
        directory: For logs.
        args: Arguments of the script.
        timeout_seconds: When the job is ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {key: value for key, value in os.environ.items() if not key.startswith(_OF_JOBS)}
    variables |= {"GLOG_v": "3", "OMP_NUM_THREADS": "1"}
    variables["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # it starts "python"
    variables["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [
        *(sys.executable, "-m", "mindspore.parallel.cluster.run", "--master_addr=127.0.0.1", f"--master_port={port}"),
        *(f"--worker_num={world_size}", f"--local_worker_num={world_size}", "--join=True", "--tail_worker_log=999"),
        *("--cluster_time_out=60", f"--log_dir={directory}", str(script), *args),
    ]
    seen: dict[int, psutil.Process] = {}
    with open(directory / "msrun.out", "w") as out:
        job = subprocess.Popen(
            command,
            env=variables,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            cwd=directory,
            start_new_session=True,
        )
        try:
            _watch(job, seen, time.monotonic() + timeout_seconds)
        finally:
            left = _end(job, seen)
    files = [directory / f"worker_{rank}.log" for rank in range(world_size)]
    logs = tuple(file.read_text(errors="replace") if file.exists() else "" for file in files)
    return Ended(None if job.returncode == -9 else job.returncode, logs, left)


def _watch(job: subprocess.Popen[bytes], seen: dict[int, psutil.Process], deadline: float) -> None:
    """Wait for msrun, and note its workers: they are in sessions of their own."""
    while job.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen.update({child.pid: child for child in psutil.Process(job.pid).children(recursive=True)})
        time.sleep(0.1)


def _end(job: subprocess.Popen[bytes], seen: dict[int, psutil.Process]) -> tuple[int, ...]:
    if job.poll() is None:
        job.kill()
    job.wait()
    left = []
    for pid, process in seen.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # tells a pid that was used again
                process.kill()
                left.append(pid)
    return tuple(left)
