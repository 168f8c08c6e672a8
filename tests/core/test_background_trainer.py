"""The background process under trainers of every kind: scripts, notebooks, forks, and trainers that are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.background_processes import check_none_left, is_running, wait_until
from tests.core.background_handler import REPOSITORY

_LIMIT_SECONDS = 60.0
_STRICT = ("-X", "dev", "-W", "error")

_HANDLER = """
import os, sys

class Small:
    def __init__(self, segments, notify):
        pass

    def handle(self, what, message):
        return {"value": message["value"] + 1, "modules": [name for name in sys.modules if "train" in name]}

    def cancel(self, save_id):
        return False

    def leave(self):
        pass
"""

_ASKING = """
from dcp_core.background.process import BackgroundProcess

process = BackgroundProcess(handler="small_handler:Small")
print(process.request({"do": "add", "value": 41}).result(60))
print(process.close(60))
"""

_STARTING = f"""
import os, sys
from dcp_core.background.process import BackgroundProcess

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def sockets():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{{name}}").startswith("socket:")
        except FileNotFoundError:
            pass
    return found

def start():
    return BackgroundProcess([{REPOSITORY!r}], handler="tests.core.background_handler:Toy")
"""

_WORKING = (
    _STARTING
    + """
go, mark = sys.argv[1:]
process = start()
process.request({"do": "hello"}).result(60)
working = process.request({"do": "work", "until": go, "mark": mark})
say(process.pid)
"""
)


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    check_none_left()


@pytest.fixture(autouse=True)
def _no_log_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setenv("DCP_BACKGROUND_LOG_DIR", str(logs))
    monkeypatch.setenv("PYTHONPATH", REPOSITORY)
    yield
    wait_until(lambda: list(logs.iterdir()) == [], "the log is removed", 5)


def _run(arguments: Sequence[str], directory: Path, text: str = "") -> str:
    """Standard output of a trainer that must not complain."""
    command = [sys.executable, *_STRICT, *arguments]
    result = subprocess.run(
        command, input=text, cwd=directory, capture_output=True, encoding="utf-8", timeout=_LIMIT_SECONDS
    )
    assert not result.stderr, result.stderr
    assert result.returncode == 0
    return result.stdout


@contextmanager
def _trainer(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer in a process group of its own, killed at the end."""
    command = [sys.executable, *_STRICT, "-c", program, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, encoding="utf-8", start_new_session=True
    ) as trainer:
        try:
            yield trainer
        finally:
            trainer.kill()


def _line(trainer: subprocess.Popen[str]) -> str:
    assert trainer.stdout is not None
    return trainer.stdout.readline().strip()


# --- where a trainer's code comes from ---------------------------------------------------------------


@pytest.fixture
def strange_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "Läufe mit Leerzeichen 'und' \"mehr\" {}"
    directory.mkdir()
    return directory


def _notebook(cell: str) -> str:
    """What runs a cell as notebooks do: in a namespace without a file, within an event loop."""
    return textwrap.dedent(f"""
        import asyncio, sys, types
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = [""]

        async def run_cell():
            exec(compile({cell!r}, "<cell 1>", "exec"), module.__dict__)

        asyncio.run(run_cell(), debug=False)
        """)


@pytest.mark.parametrize("kind", ["script", "module", "command", "standard input", "notebook", "directory gone"])
def test_it_works_without_a_main_guard_from(kind: str, strange_directory: Path) -> None:
    code = _ASKING
    (strange_directory / "handlers").mkdir()
    (strange_directory / "handlers" / "small_handler.py").write_text(_HANDLER)
    code = f"import sys; sys.path.insert(0, 'handlers')\n{_ASKING}"  # relative
    if kind == "directory gone":
        (strange_directory / "gone").mkdir()
        path = str(strange_directory / "handlers")
        lose = f"sys.path += [{path!r}, 'lost']; os.chdir('gone'); os.rmdir('../gone')"
        code = f"import os, sys, dcp_core.background.process; {lose}\n{_ASKING}"
    (strange_directory / "train.py").write_text(code)
    commands = {
        "script": ["train.py"],
        "module": ["-m", "train"],
        "command": ["-c", code],
        "standard input": ["-"],
        "notebook": ["-c", _notebook(code)],
        "directory gone": ["-c", code],
    }
    output = _run(commands[kind], strange_directory, code if kind == "standard input" else "")
    assert output.splitlines() == ["{'value': 42, 'modules': []}", "0"]


def test_it_works_where_python_has_a_home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("lib", "lib64"):
        (home / name).symlink_to(Path(sys.base_prefix, name))
    monkeypatch.setenv("PYTHONHOME", str(home))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([REPOSITORY, *sys.path]))
    program = f"{_STARTING}\nsay(sys.base_prefix, start().request({{'do': 'look'}}).result(60)['home'])"
    assert _run(["-c", program], tmp_path) == f"{home} {home}\n"


@pytest.mark.parametrize("is_utf8", ["0", "1"])
def test_names_of_files_mean_the_same_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_utf8: str) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    program = f"""{_STARTING}
process = start()
say(sys.getfilesystemencoding(), process.request({{"do": "look"}}).result(60)["encoding"], process.close(60))
"""
    encoding = {"0": "ascii", "1": "utf-8"}[is_utf8]
    assert _run(["-X", f"utf8={is_utf8}", "-c", program], tmp_path) == f"{encoding} {encoding} 0\n"


def test_compiled_files_go_where_the_trainers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small_handler.py").write_text(_HANDLER)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    _run(["-c", _ASKING], tmp_path)
    assert not (tmp_path / "__pycache__").exists()
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "compiled")
    _run(["-c", _ASKING], tmp_path)
    assert not (tmp_path / "__pycache__").exists()
    assert list((tmp_path / "compiled").rglob("small_handler.*.pyc"))


# --- how a trainer ends ------------------------------------------------------------------------------


def test_a_trainer_that_ends_without_a_word_waits_for_nothing_and_the_work_is_done(tmp_path: Path) -> None:
    go, mark = tmp_path / "go", tmp_path / "mark"
    pid = int(_run(["-c", _WORKING, str(go), str(mark)], tmp_path))  # captured output: nobody holds it open
    assert is_running(pid) and not mark.exists()
    go.touch()
    wait_until(lambda: not is_running(pid), "the background process has ended")
    assert mark.read_text() == "done\n"


@pytest.mark.parametrize("kill", ["SIGKILL", "group SIGKILL", "group SIGTERM", "group SIGINT", "group SIGHUP"])
def test_a_trainer_is_killed_and_the_work_is_done(tmp_path: Path, kill: str) -> None:
    go, mark = tmp_path / "go", tmp_path / "mark"
    program = f"import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)\n{_WORKING}\nworking.result()"
    with _trainer(program, str(go), str(mark)) as trainer:
        pid = int(_line(trainer))
        number = signal.Signals[kill.split()[-1]]
        if kill.startswith("group"):
            os.killpg(trainer.pid, number)
        else:
            trainer.send_signal(number)
        assert trainer.wait(_LIMIT_SECONDS) == -number
        assert is_running(pid) and not mark.exists()
        go.touch()
        wait_until(lambda: not is_running(pid), "the background process has ended")
        assert mark.read_text() == "done\n"


def test_a_trainer_that_is_killed_within_a_message_leaves_no_work_undone(tmp_path: Path) -> None:
    go, mark = tmp_path / "go", tmp_path / "mark"
    program = f"""{_WORKING}
import struct
process._control._socket.sendall(struct.pack("<QI", 1000, 0) + b"half")
say("sent")
working.result()
"""
    with _trainer(program, str(go), str(mark)) as trainer:
        pid = int(_line(trainer))
        assert _line(trainer) == "sent"
        trainer.kill()
        trainer.wait(_LIMIT_SECONDS)
        go.touch()
        wait_until(lambda: not is_running(pid), "the background process has ended")
        assert mark.read_text() == "done\n"


# --- forks -------------------------------------------------------------------------------------------

_FORKED = """
def look(waits=True):
    error = process.request({"do": "echo", "value": 1}).exception(60)
    say(sockets(), process.is_alive, process.close(1), type(error).__name__, error)
    own = start()
    say(own.request({"do": "echo", "value": 2}).result(60), own.close(60), sockets())
    if waits:
        sys.stdin.read()
"""
_REFUSED = r"0 False None CoordinationError .* \d+ belongs to the process that this one was forked from"


@pytest.mark.parametrize(
    "fork",
    [
        "pid = os.fork()\nif not pid:\n    look()\n    os._exit(0)",
        "import multiprocessing; multiprocessing.get_context('fork').Process(target=look).start()",
    ],
)
@pytest.mark.parametrize("ends", ["trainer", "background process"])
def test_a_forked_process_neither_uses_it_nor_hides_an_end(tmp_path: Path, fork: str, ends: str) -> None:
    program = f"""{_STARTING}{_FORKED}
process = start()
process.request({{"do": "hello"}}).result(60)
say(process.pid)
import warnings; warnings.simplefilter("ignore", DeprecationWarning)
pending = process.request({{"do": "work", "until": {str(tmp_path / "go")!r}, "mark": {str(tmp_path / "mark")!r}}})
{fork}
say("ended", pending.exception(60))
"""
    with _trainer(program) as trainer:
        pid = int(_line(trainer))
        assert re.fullmatch(_REFUSED + ".*", _line(trainer))
        assert _line(trainer) == "{'value': 2} 0 0"
        if ends == "trainer":
            trainer.kill()
            trainer.wait(_LIMIT_SECONDS)
            (tmp_path / "go").touch()
            wait_until(lambda: not is_running(pid), "the background process has ended")
            assert (tmp_path / "mark").exists()
        else:
            os.kill(pid, signal.SIGKILL)
            assert re.match(rf"ended the background process {pid} was killed by SIGKILL", _line(trainer))


def test_processes_forked_while_it_starts_have_none_of_its_sockets(tmp_path: Path) -> None:
    program = f"""{_STARTING}
import threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
is_over, held = threading.Event(), []

def fork():
    while not is_over.is_set():
        pid = os.fork()
        if not pid:
            os._exit(sockets())
        held.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

thread = threading.Thread(target=fork)
thread.start()
codes = set()
while len(held) < 20:
    process = start()
    codes.add((process.request({{"do": "echo", "value": 5}}).result(60)["value"], process.close(60)))
is_over.set()
thread.join()
say(codes, sum(held))
"""
    assert _run(["-c", program], tmp_path) == "{(5, 0)} 0\n"


def test_a_trainer_that_ignores_the_ends_of_its_children_still_sees_one(tmp_path: Path) -> None:
    program = f"""{_STARTING}
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
process = start()
say(type(process.request({{"do": "die", "how": "SIGKILL"}}).exception(60)).__name__, process.is_alive)
other = start()
say(other.request({{"do": "echo", "value": 3}}).result(60), other.close(60))
"""
    assert _run(["-c", program], tmp_path) == "RankFailedError False\n{'value': 3} 0\n"
