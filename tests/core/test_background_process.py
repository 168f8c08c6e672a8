"""The background process from its start to its end: what it inherits, answers, survives, and leaves behind."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dcp_core
from dcp_core.background import launch
from dcp_core.background import process as process_module
from dcp_core.background.arena import MAX_SEGMENTS, Arena, Place
from dcp_core.background.process import PERSISTER, BackgroundProcess
from dcp_core.errors import CoordinationError, CoverageError, RankFailedError, UnsupportedValueError
from tests.background_processes import check_none_left, is_running, wait_until
from tests.core.background_handler import READY_LATER, REPOSITORY, TOY

_LIMIT_SECONDS = 60.0
_MIB = 1 << 20
_PRIVATE_KIB = 60 * 1024
_READY_CPU_SECONDS = 0.7


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    check_none_left()


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DCP_BACKGROUND_LOG_DIR", str(tmp_path / "logs"))
    return tmp_path / "logs"


@pytest.fixture
def start(logs: Path) -> Iterator[Callable[..., BackgroundProcess]]:
    started = []

    def start_one(**options: Any) -> BackgroundProcess:
        started.append(BackgroundProcess(**{"extra_paths": [REPOSITORY], "handler": TOY, **options}))
        return started[-1]

    yield start_one
    for one in started:
        if one.close(_LIMIT_SECONDS) is None:
            os.kill(one.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def shared_one() -> Iterator[BackgroundProcess]:
    """A process that tests use which leave it as it was."""
    one = BackgroundProcess([REPOSITORY], handler=TOY)
    yield one
    assert one.close(_LIMIT_SECONDS) == 0


def _ask(process: BackgroundProcess, what: str, **values: Any) -> Any:
    return process.request({"do": what, **values}).result(_LIMIT_SECONDS)


def _failure(future: Future[Any]) -> BaseException:
    error = future.exception(_LIMIT_SECONDS)
    assert error is not None
    return error


def _death(process: BackgroundProcess, how: str, words: str = "") -> str:
    error = _failure(process.request({"do": "die", "how": how, "words": words}))
    assert isinstance(error, RankFailedError)
    return str(error)


def _private_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _links(pid: int) -> dict[int, str]:
    links = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            links[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return links


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


# --- starting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("handler", [TOY, PERSISTER])
def test_it_is_ready_soon_and_is_small(start: Callable[..., BackgroundProcess], handler: str) -> None:
    process = start(handler=handler)
    assert _ask(process, "hello") == {"pid": process.pid}
    ticks = sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    assert ticks / os.sysconf("SC_CLK_TCK") <= _READY_CPU_SECONDS
    assert _private_kib(process.pid) <= _PRIVATE_KIB
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "numpy" in maps and not re.search("/site-packages/(torch|mindspore)/", maps)


def test_it_knows_no_framework(shared_one: BackgroundProcess) -> None:
    modules = _ask(shared_one, "modules")["modules"]
    assert "dcp_core.recipes.save" in modules
    assert not {"torch", "mindspore", "dcp_torch", "dcp_mindspore", "site", "pytest"} & set(modules)


def test_it_has_a_session_and_a_group_of_its_own(shared_one: BackgroundProcess) -> None:
    seen = _ask(shared_one, "look")
    assert seen["session"] == seen["group"] == shared_one.pid
    assert (seen["directory"], seen["nice"]) == ("/", min(19, os.nice(0) + 5))


def test_it_inherits_no_file_but_its_socket(start: Callable[..., BackgroundProcess], logs: Path) -> None:
    ours = [os.memfd_create("inheritable", 0) for _ in range(3)]  # without CLOEXEC
    process = start()
    _ask(process, "hello")
    files = _links(process.pid)
    for descriptor in ours:
        os.close(descriptor)
    (log,) = logs.iterdir()
    assert [files.pop(number) for number in (0, 1, 2)] == ["/dev/null", str(log), str(log)]
    assert [link.partition(":")[0] for link in files.values()] == ["socket"]


def test_its_environment_is_the_trainers_less_what_would_change_it(
    start: Callable[..., BackgroundProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "PYTHONSTARTUP": "x",
        "PYTHONWARNINGS": "error",
        "PYTHONPATH": "/x",
        "LD_PRELOAD": "",
        "OMP_NUM_THREADS": "8",
    }
    given |= {"CUDA_VISIBLE_DEVICES": "3", "DCP_TRACE": "trace.json", "KEPT": "ü"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = _ask(start(environment={"ADDED": "yes", "KEPT2": ""}), "look")["environment"]
    assert not [name for name in seen if name.startswith("PYTHON") or name == "LD_PRELOAD"]
    expected = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "KEPT": "ü"}
    expected |= {
        "ASCEND_RT_VISIBLE_DEVICES": "",
        "ADDED": "yes",
        "KEPT2": "",
        "DCP_TRACE": str(tmp_path / "trace.json"),
    }
    assert {name: seen.get(name) for name in expected} == expected


def test_its_signals_are_not_those_that_the_trainer_blocks_or_ignores(start: Callable[..., BackgroundProcess]) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
    try:
        process = start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, before)
    seen = _ask(process, "look")
    assert seen["blocked"] == []
    assert signal.SIGTERM in seen["default signals"]


def test_it_finds_the_core_that_the_trainer_has_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "dcp_core"
    other.mkdir()
    (other / "__init__.py").write_text("raise ImportError('another core')")
    (tmp_path / "plain").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), "plain", "", "plain", *sys.path])
    monkeypatch.chdir(tmp_path)
    stdlib = os.path.dirname(os.__file__)
    found = launch.import_path(["more"])
    assert found[0] == stdlib
    standard = (stdlib, os.path.join(stdlib, "lib-dynload"))
    path = [entry for entry in found if entry not in standard]
    assert path[0] == str(Path(dcp_core.__file__).parents[1])
    assert path[1:3] == [str(tmp_path), str(tmp_path / "plain")]
    assert path[-1] == str(tmp_path / "more")
    monkeypatch.setattr(sys, "path", sys.path[1:])
    monkeypatch.chdir("/")
    path = [entry for entry in launch.import_path() if entry not in standard]
    assert path[:2] == ["/plain", "/"]  # it is found without help
    assert len(set(path)) == len(path)


def test_it_does_not_run_another_version_of_the_core(
    start: Callable[..., BackgroundProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_core, "__version__", "0.0.1")
    error = _failure(start().request({"do": "hello"}))
    assert re.search(r"exit code 1.*the trainer runs dcp_core 0.0.1, but .* restart the trainer", str(error), re.DOTALL)


def test_a_handler_that_is_not_there_ends_it_and_the_error_tells_why(
    start: Callable[..., BackgroundProcess], logs: Path
) -> None:
    process = start(handler="no_such_module:Handler")
    text = str(_failure(process.request({"do": "hello"})))
    (log,) = logs.iterdir()
    assert f"the background process {process.pid} ended with exit code 1; its last words: " in text
    assert "ModuleNotFoundError: No module named 'no_such_module'" in text
    assert f"(whole log: {log})" in text
    assert "no_such_module" in log.read_text()


@pytest.mark.parametrize(("executable", "reason"), [("/no/such/python", "No such file"), ("", "set_executable")])
def test_an_interpreter_that_is_not_there_is_an_error_that_leaves_nothing(
    start: Callable[..., BackgroundProcess], logs: Path, monkeypatch: pytest.MonkeyPatch, executable: str, reason: str
) -> None:
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: os.fsencode(executable))
    before, threads = _links(os.getpid()), threading.active_count()
    with pytest.raises(CoordinationError, match=reason):
        start()
    assert _links(os.getpid()) == before
    assert threading.active_count() == threads
    assert list(logs.iterdir()) == []


def test_one_that_is_never_ready_is_ended(
    start: Callable[..., BackgroundProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "START_SECONDS", 0.2)
    process = start(handler=READY_LATER, environment={"READY_WHEN": "/never"})
    assert re.search(
        r"it was not ready after 0.2 s; was killed by SIGKILL", str(_failure(process.request({"do": "look"})))
    )
    assert not process.is_alive


def test_where_no_log_can_be_written_it_starts_all_the_same(
    start: Callable[..., BackgroundProcess], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DCP_BACKGROUND_LOG_DIR", "/dev/null/logs")
    process = start()
    assert "no log file for the background process" in caplog.text
    assert "these are they, once more" in _death(process, "exit", "these are they")


# --- requests ----------------------------------------------------------------------------------------


def test_values_come_back_as_they_were_sent(shared_one: BackgroundProcess) -> None:
    value = {"ü": [1, 2.5, None, (True, b"\0")], "column": np.arange(5, dtype=">i2")}
    answer = _ask(shared_one, "echo", value=value)["value"]
    assert answer["ü"] == value["ü"]
    assert answer["column"].dtype == ">i2" and answer["column"].tolist() == [0, 1, 2, 3, 4]


def test_hundreds_of_megabytes_pass_both_ways_and_do_not_stay(start: Callable[..., BackgroundProcess]) -> None:
    process = start()
    column = np.random.default_rng(3).integers(0, 256, 160 * _MIB, np.uint8)
    assert np.array_equal(_ask(process, "echo", value=column)["value"], column)
    _ask(process, "hello")
    assert _private_kib(process.pid) <= _PRIVATE_KIB
    gc.collect()


def test_work_is_done_in_order_while_other_questions_are_answered(
    shared_one: BackgroundProcess, tmp_path: Path
) -> None:
    go, mark = tmp_path / "go", tmp_path / "mark"
    working = shared_one.request({"do": "work", "until": str(go), "mark": str(mark)})
    waiting = shared_one.request({"do": "echo", "value": 1})
    assert _ask(shared_one, "hello") == {"pid": shared_one.pid}
    assert _ask(shared_one, "cancel", save_id="this one") == {"cancelled": True}
    assert _ask(shared_one, "cancel", save_id="another") == {"cancelled": False}
    assert not working.done() and not waiting.done()
    assert not waiting.cancel()
    go.touch()
    assert working.result(_LIMIT_SECONDS) == {}
    assert waiting.result(_LIMIT_SECONDS) == {"value": 1}


def test_its_own_errors_come_back_as_they_are(shared_one: BackgroundProcess) -> None:
    error = _failure(shared_one.request({"do": "fail", "kind": "ours"}))
    assert (type(error), str(error)) == (CoverageError, "weights[3:5] belong to nobody")


@pytest.mark.parametrize(
    ("request_", "expected", "text"),
    [
        (
            {"do": "fail", "kind": "storage"},
            RankFailedError,
            "'fail' in the background process: OSError: .*No space left",
        ),
        ({"do": "fail", "kind": "exit"}, RankFailedError, "SystemExit: 5"),
        ({"do": "fail", "kind": "answer"}, UnsupportedValueError, "cannot hold a builtins.object"),
        ({"do": "nonsense"}, RankFailedError, "AttributeError"),
        ({"what": "nothing"}, RankFailedError, "''"),
        ({"do": "cancel", "save_id": "broken"}, RankFailedError, "'cancel' .*ZeroDivisionError: a broken cancel"),
        ({"do": "cancel"}, RankFailedError, "KeyError"),
        ({"do": "segments", "nbytes": [10]}, CoordinationError, "0 descriptors came for segments"),
        ({"do": "segments", "nbytes": [], "first": 1000}, CoordinationError, "do not follow"),
    ],
)
def test_what_goes_wrong_fails_one_request_and_the_next_is_served(
    shared_one: BackgroundProcess, request_: dict[str, Any], expected: type[Exception], text: str
) -> None:
    error = _failure(shared_one.request(request_))
    assert type(error) is expected
    assert re.search(text, str(error))
    assert _ask(shared_one, "echo", value=2) == {"value": 2}


def test_an_error_of_others_brings_its_traceback(shared_one: BackgroundProcess) -> None:
    error = _failure(shared_one.request({"do": "fail", "kind": "storage"}))
    assert isinstance(error, RankFailedError)
    (cause,) = error.causes
    assert cause.kind == "OSError" and "in do_fail" in cause.detail


@pytest.mark.parametrize(
    ("message", "descriptors", "expected", "text"),
    [
        ({"do": "echo", "value": object()}, [], UnsupportedValueError, "cannot hold a builtins.object"),
        ({"do": "echo", "value": 1}, [1 << 20], CoordinationError, "was not sent: .*Bad file descriptor"),
    ],
)
def test_a_request_that_cannot_be_sent_fails_and_the_next_is_served(
    shared_one: BackgroundProcess, message: dict[str, Any], descriptors: list[int], expected: type[Exception], text: str
) -> None:
    error = _failure(shared_one.request(message, descriptors))
    assert type(error) is expected and re.search(text, str(error))
    assert _ask(shared_one, "echo", value=3) == {"value": 3}


def test_descriptors_that_belong_to_no_segment_are_closed(shared_one: BackgroundProcess) -> None:
    before = _links(shared_one.pid)
    descriptor = os.memfd_create("stray", os.MFD_CLOEXEC)
    shared_one.request({"do": "echo", "value": 1}, [descriptor]).result(_LIMIT_SECONDS)
    _failure(shared_one.request({"do": "segments", "nbytes": [1, 2]}, [descriptor]))
    _failure(shared_one.request({"do": "segments", "nbytes": [4096]}, [descriptor]))
    os.close(descriptor)
    assert _links(shared_one.pid) == before


# --- shared memory -----------------------------------------------------------------------------------


def _read(process: BackgroundProcess, place: Place) -> bytes:
    answer = _ask(process, "read", segment=place.segment, offset=place.offset, nbytes=place.nbytes)
    assert answer["is writeable"] is False
    return answer["bytes"]  # type: ignore[no-any-return]  # bytes by construction


def test_what_is_staged_is_read_there_through_growth_and_replacement(start: Callable[..., BackgroundProcess]) -> None:
    process, arena = start(), Arena()
    mapped = []
    for save in range(1, 2 * MAX_SEGMENTS):
        places = arena.place([save, *[2 * _MIB] * save])
        mapped.append(process.share(arena).result(_LIMIT_SECONDS)["segments"])
        for place in places:
            arena.buffer(place)[:] = save * 16 + place.segment
        for place in (places[0], places[-1]):
            assert _read(process, place) == bytes([save * 16 + place.segment]) * place.nbytes
    assert mapped == [1, 2, 3, 4, 1, 2, 3]
    assert len([link for link in _links(process.pid).values() if "dcp-arena" in link]) == 3
    arena.close()


def test_only_new_segments_are_sent_and_another_process_gets_all(
    start: Callable[..., BackgroundProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, arena, sent = start(), Arena(), []
    request = BackgroundProcess.request

    def spy(self: BackgroundProcess, message: Any, descriptors: Any = ()) -> Future[Any]:
        sent.append((message.get("first"), len(descriptors)))
        return request(self, message, descriptors)

    monkeypatch.setattr(BackgroundProcess, "request", spy)
    arena.place([2 * _MIB])
    process.share(arena).result(_LIMIT_SECONDS)
    process.share(arena).result(_LIMIT_SECONDS)
    arena.place([2 * _MIB] * 2)
    assert process.share(arena).result(_LIMIT_SECONDS) == {"segments": 2}
    assert process.share(arena).result(_LIMIT_SECONDS) == {"segments": 2}
    assert sent == [(0, 1), (1, 1)]
    other = start()
    assert other.share(arena).result(_LIMIT_SECONDS) == {"segments": 2}
    arena.close()
    assert process.share(arena).result(_LIMIT_SECONDS) == {"segments": 0}
    assert not [link for link in _links(process.pid).values() if "dcp-arena" in link]


def test_segments_that_could_not_be_mapped_are_sent_again(
    start: Callable[..., BackgroundProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, arena = start(), Arena()
    (place,) = arena.place([10])
    (segment,) = arena.descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "descriptors", lambda self: [(segment[0], segment[1] + 1)])
        assert isinstance(_failure(process.share(arena)), CoordinationError)
    assert process.share(arena).result(_LIMIT_SECONDS) == {"segments": 1}
    assert _read(process, place) == bytes(10)
    arena.close()


def test_more_segments_than_one_message_carries_arrive(shared_one: BackgroundProcess) -> None:
    descriptors = [os.memfd_create(f"segment {number}", os.MFD_CLOEXEC) for number in range(150)]
    for number, descriptor in enumerate(descriptors):
        os.write(descriptor, number.to_bytes(2, "little") * 2048)
    before = _links(shared_one.pid)
    message = {"do": "segments", "nbytes": [4096] * len(descriptors)}
    assert shared_one.request(message, descriptors).result(_LIMIT_SECONDS) == {"segments": 150}
    assert [_read(shared_one, Place(n, 0, 2)) for n in range(150)] == [n.to_bytes(2, "little") for n in range(150)]
    assert shared_one.request({"do": "segments", "nbytes": []}).result(_LIMIT_SECONDS) == {"segments": 0}
    for descriptor in descriptors:
        os.close(descriptor)
    assert _links(shared_one.pid) == before


# --- logs --------------------------------------------------------------------------------------------


def test_what_it_logs_appears_in_the_trainers_log(
    shared_one: BackgroundProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "dcp"):
        for level, name in [(10, "dcp.x"), (20, "dcp.stage"), (40, "dcp"), (30, "someone.else")]:
            _ask(shared_one, "log", level=level, name=name, text=f"said at {level}")
        _ask(shared_one, "warn", text="be warned")
    found = [record for record in caplog.records if record.getMessage().startswith("background: ")]
    assert [(record.levelno, record.name) for record in found] == [
        (20, "dcp.stage"),
        (40, "dcp"),
        (30, "py.warnings"),
    ]
    assert found[0].getMessage() == "background: said at 20"
    assert "RuntimeWarning: be warned" in found[2].getMessage()


def test_a_failure_of_others_is_logged_with_its_traceback(
    shared_one: BackgroundProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "dcp"):
        _failure(shared_one.request({"do": "fail", "kind": "storage"}))
        _ask(shared_one, "hello")
    (record,) = [record for record in caplog.records if record.name == "dcp.background"]
    assert re.search(r"background: the request 'fail' failed\nTraceback .*do_fail", record.getMessage(), re.DOTALL)


def test_other_messages_go_to_whoever_wants_them(
    start: Callable[..., BackgroundProcess], caplog: pytest.LogCaptureFixture
) -> None:
    found: list[Any] = []

    def notify(message: Any) -> None:
        found.append(message)
        if message == {"progress": 1}:
            raise ZeroDivisionError("a broken listener")

    process = start(notify=notify)
    for number in (1, 2):
        _ask(process, "notify", message={"progress": number})
    assert found == [{"progress": 1}, {"progress": 2}]
    assert "a broken listener" in caplog.text


# --- ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGTERM"])
def test_killed_it_fails_what_waits_at_once_and_another_can_be_made(
    start: Callable[..., BackgroundProcess], tmp_path: Path, signal_name: str
) -> None:
    process = start()
    pending = [
        process.request({"do": "work", "until": str(tmp_path / "never"), "mark": "/never"}),
        process.request({"do": "echo", "value": 1}),
    ]
    _ask(process, "hello")
    number = signal.Signals[signal_name]
    os.kill(process.pid, number)
    for future in pending:
        error = _failure(future)
        assert isinstance(error, RankFailedError)
        how = f"was killed by {signal_name} (exit code {-number}); its last words: none"
        text = f"the background process {process.pid} {how}"
        assert str(error).startswith(text)
    assert not process.is_alive
    assert not is_running(process.pid) and not Path(f"/proc/{process.pid}").exists()  # and it was collected
    assert str(_failure(process.request({"do": "hello"}))).startswith(text)
    assert process.close(_LIMIT_SECONDS) == -number
    other = start()
    assert _ask(other, "echo", value=5) == {"value": 5}
    assert other.is_alive


def test_that_it_is_dead_is_seen_before_its_messages_are_read(start: Callable[..., BackgroundProcess]) -> None:
    seen: list[bool] = []

    def kill(message: Any) -> None:  # on the thread that reads
        seen.append(process.is_alive)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not process.is_alive, "it is dead")  # its threads do not die all at once
        seen.append(process.is_alive)

    process = start(notify=kill)
    _failure(process.request({"do": "notify_and_wait"}))
    assert seen == [True, False]


def test_that_it_is_dead_is_seen_while_another_thread_asks_too(start: Callable[..., BackgroundProcess]) -> None:
    process = start()
    _ask(process, "hello")
    lock = process._process._waitpid_lock  # type: ignore[attr-defined]  # held while somebody asks for its end
    with lock:
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(process.pid), "its end")
        assert not process.is_alive


def test_its_last_words_are_kept_and_told(start: Callable[..., BackgroundProcess], logs: Path) -> None:
    text = _death(start(), "exit", "the disk " * 2_000 + "is on fire")
    (log,) = logs.iterdir()
    assert "ended with exit code 3; its last words: " in text
    assert text.endswith(f"is on fire, once more (whole log: {log})")
    assert len(text) < 5_000
    assert log.read_text().count("is on fire") == 2


def test_without_words_no_log_is_kept(start: Callable[..., BackgroundProcess], logs: Path) -> None:
    assert _death(start(), "SIGKILL").endswith("its last words: none; the kernel sends SIGKILL when memory runs out")
    assert list(logs.iterdir()) == []


def test_a_crash_tells_where_it_happened(start: Callable[..., BackgroundProcess]) -> None:
    text = _death(start(), "fault")
    assert "was killed by SIGSEGV (exit code -11)" in text
    assert re.search(r"Fatal Python error: Segmentation fault.*in do_die", text, re.DOTALL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_is_meant_for_the_trainer_does_not_end_it(
    shared_one: BackgroundProcess, number: signal.Signals
) -> None:
    _ask(shared_one, "hello")
    os.kill(shared_one.pid, number)
    assert _ask(shared_one, "echo", value=int(number)) == {"value": int(number)}


def test_closed_it_takes_nothing_more_finishes_what_it_has_and_answers(
    start: Callable[..., BackgroundProcess], logs: Path, tmp_path: Path
) -> None:
    go, mark = tmp_path / "go", tmp_path / "mark"
    process = start(environment={"LEFT": str(mark)})
    working = [process.request({"do": "work", "until": str(go), "mark": str(mark)}) for _ in range(2)]
    assert process.close(0.0) is None
    assert not process.is_alive
    refused = _failure(process.request({"do": "echo", "value": 1}))
    assert isinstance(refused, CoordinationError) and "was closed" in str(refused)
    go.touch()
    assert process.close(_LIMIT_SECONDS) == 0
    assert [future.result(_LIMIT_SECONDS) for future in working] == [{}, {}]
    assert mark.read_text() == "done\ndone\nleft\n"
    assert list(logs.iterdir()) == []
    assert process.close(_LIMIT_SECONDS) == 0


def test_a_stream_that_makes_no_sense_ends_it(start: Callable[..., BackgroundProcess]) -> None:
    process = start()
    _ask(process, "hello")
    process._control._socket.sendall(b"\xff" * 12)
    assert re.search(
        r"exit code 1\); its last words|exit code 1; its last words: .*control message",
        str(_failure(process.request({"do": "hello"}))),
        re.DOTALL,
    )


@pytest.mark.parametrize("answer", [["no", "mapping"], 5, {"id": 1, "error": b"no error"}, {"log": 7}])
def test_answers_that_make_no_sense_end_it_too(
    start: Callable[..., BackgroundProcess], monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr(process_module, "_END_SECONDS", 0.1)
    process = start()
    _ask(process, "hello")
    error = _failure(process.request({"do": "notify", "message": answer}))
    assert re.search("what it said cannot be understood", str(error))
    assert not is_running(process.pid)


def test_twenty_of_them_leave_nothing(start: Callable[..., BackgroundProcess], logs: Path) -> None:
    def held() -> tuple[int, int, list[str], list[str], list[str]]:
        gc.collect()
        return (
            threading.active_count(),
            len(_links(os.getpid())),
            _children(),
            [name for name in os.listdir("/dev/shm") if re.match("dcp-(arena|background)", name)],
            sorted(os.listdir(logs)),
        )

    counts = []
    for number in range(20):
        process, arena = BackgroundProcess([REPOSITORY], handler=TOY), Arena()
        (place,) = arena.place([1000 + number])
        process.share(arena)
        arena.buffer(place)[:] = number
        assert _read(process, place) == bytes([number]) * place.nbytes
        assert process.close(_LIMIT_SECONDS) == 0
        assert not Path(f"/proc/{process.pid}").exists()
        arena.close()
        del process, arena, place
        counts.append(held())
    assert counts == [counts[0]] * 20


def test_starting_returns_before_the_process_is_ready(start: Callable[..., BackgroundProcess], tmp_path: Path) -> None:
    go = tmp_path / "go"
    process = start(handler=READY_LATER, environment={"READY_WHEN": str(go)})
    answers = [process.request({"do": "echo", "value": number}) for number in range(3)]
    assert process.is_alive and not any(answer.done() for answer in answers)
    go.touch()
    assert [answer.result(_LIMIT_SECONDS) for answer in answers] == [{"value": number} for number in range(3)]
