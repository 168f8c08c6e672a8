"""The control socket: whole messages, descriptors beside them, nothing kept open."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from dcp_core.background.control import ControlSocket
from dcp_core.errors import CoordinationError, CorruptError, UnsupportedValueError
from dcp_core.formats.objects import encode_value

_LIMIT_SECONDS = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[ControlSocket, ControlSocket]]:
    one, raw = ControlSocket.pair()
    other = ControlSocket(raw)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def raw_end() -> Iterator[tuple[ControlSocket, socket.socket]]:
    one, raw = ControlSocket.pair()
    yield one, raw
    one.close()
    raw.close()


def _open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@contextmanager
def _nothing_left_open() -> Iterator[None]:
    before = _open_descriptors()
    yield
    assert _open_descriptors() == before


def _files(count: int) -> list[int]:
    """Open files, each holding its number."""
    made = []
    for number in range(count):
        descriptor = os.memfd_create(f"file {number}", os.MFD_CLOEXEC)
        os.write(descriptor, str(number).encode())
        made.append(descriptor)
    return made


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _within_the_limit(action: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result(_LIMIT_SECONDS)


def _received(end: ControlSocket) -> tuple[Any, list[int]] | None:
    return _within_the_limit(end.receive)  # type: ignore[no-any-return]  # what receive returns


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"do": "hello", "id": 7},
        {"nested": [(1, -2.5, 3j), {4: b"\0\xff", "ü\ud800": bytearray(b"x")}, {"s"}, frozenset()], "big": 1 << 200},
        OrderedDict([("b", True), ("a", "x" * 70_000)]),
    ],
)
def test_a_message_arrives_as_it_was_sent(ends: tuple[ControlSocket, ControlSocket], message: Any) -> None:
    ends[0].send(message)
    found = _received(ends[1])
    assert found == (message, [])
    assert found is not None and type(found[0]) is type(message)


def test_columns_arrive_bit_for_bit(ends: tuple[ControlSocket, ControlSocket]) -> None:
    column = np.array([[0.5, np.nan], [-0.0, np.inf]], ">f4")
    ends[1].send({"column": column})
    found = _received(ends[0])
    assert found is not None
    assert found[0]["column"].dtype == column.dtype
    assert found[0]["column"].tobytes() == column.tobytes()


def test_a_message_of_hundreds_of_megabytes_arrives(ends: tuple[ControlSocket, ControlSocket]) -> None:
    column = np.random.default_rng(1).integers(0, 256, 200 << 20, np.uint8)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(ends[0].send, {"column": column})
        found = _received(ends[1])
        sent.result(_LIMIT_SECONDS)
    assert found is not None
    assert np.array_equal(found[0]["column"], column)


def test_messages_of_many_threads_stay_whole(ends: tuple[ControlSocket, ControlSocket]) -> None:
    def send_all(sender: int) -> None:
        for number in range(40):
            ends[0].send([sender, number, bytes([sender]) * (number * 9_001)])

    with ThreadPoolExecutor(4) as pool:
        sending = [pool.submit(send_all, sender) for sender in range(3)]
        found = [_received(ends[1]) for _ in range(120)]
        for one in sending:
            one.result(_LIMIT_SECONDS)
    messages = [message for message, _ in filter(None, found)]
    assert all(content == bytes([sender]) * (number * 9_001) for sender, number, content in messages)
    for sender in range(3):
        assert [number for who, number, _ in messages if who == sender] == list(range(40))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("text_nbytes", [10, 300_000])
def test_descriptors_arrive_in_order_beside_their_message(
    ends: tuple[ControlSocket, ControlSocket], count: int, text_nbytes: int
) -> None:
    with _nothing_left_open(), ThreadPoolExecutor(1) as pool:
        files = _files(count)
        sent = pool.submit(ends[0].send, "x" * text_nbytes, files)
        found = _received(ends[1])
        sent.result(_LIMIT_SECONDS)
        ends[0].send("the next")
        assert found is not None
        message, arrived = found
        assert message == "x" * text_nbytes
        assert [os.pread(descriptor, 10, 0) for descriptor in arrived] == [str(n).encode() for n in range(count)]
        assert not any(os.get_inheritable(descriptor) for descriptor in arrived)
        assert [os.pread(descriptor, 10, 0) for descriptor in files] == [str(n).encode() for n in range(count)]
        assert _received(ends[1]) == ("the next", [])
        _close(files + arrived)


def test_the_end_of_the_other_side_is_no_error(ends: tuple[ControlSocket, ControlSocket]) -> None:
    ends[0].send("last words")
    ends[0].close()
    assert _received(ends[1]) == ("last words", [])
    assert _received(ends[1]) is None
    with pytest.raises(ConnectionError):
        ends[1].send("too late")


def test_a_side_that_goes_without_reading_is_no_error_either(ends: tuple[ControlSocket, ControlSocket]) -> None:
    ends[1].send("never read")
    ends[0].close()
    assert _received(ends[1]) is None


@pytest.mark.parametrize("cut", [1, 11, 12, 20])
def test_a_message_that_breaks_off_is_an_end_and_leaves_nothing_open(
    raw_end: tuple[ControlSocket, socket.socket], cut: int
) -> None:
    end, raw = raw_end
    body = encode_value("a message that is not whole")
    files = _files(3)
    with _nothing_left_open():
        socket.send_fds(raw, [(struct.pack("<QI", len(body), 3) + body)[:cut]], files)
        raw.shutdown(socket.SHUT_WR)
        assert _received(end) is None
    _close(files)


def test_a_message_that_breaks_off_before_all_descriptors_is_an_end(
    raw_end: tuple[ControlSocket, socket.socket],
) -> None:
    end, raw = raw_end
    body = encode_value("whole")
    files = _files(64)
    with _nothing_left_open():
        socket.send_fds(raw, [struct.pack("<QI", len(body), 70) + body], files)
        raw.shutdown(socket.SHUT_WR)
        assert _received(end) is None
    _close(files)


def test_bytes_that_are_no_message_are_an_error_and_leave_nothing_open(
    raw_end: tuple[ControlSocket, socket.socket],
) -> None:
    end, raw = raw_end
    files = _files(2)
    with _nothing_left_open():
        socket.send_fds(raw, [struct.pack("<QI", 3, 2) + b"\xff\xff\xff"], files)
        with pytest.raises(CorruptError, match="a control message"):
            _received(end)
    _close(files)


def test_an_absurd_length_is_an_error_before_any_memory_is_taken(raw_end: tuple[ControlSocket, socket.socket]) -> None:
    end, raw = raw_end
    raw.sendall(struct.pack("<QI", 1 << 60, 0))
    with pytest.raises(CoordinationError, match=f"{1 << 60} bytes"):
        _received(end)


def test_more_descriptors_than_announced_are_an_error_and_are_closed(
    raw_end: tuple[ControlSocket, socket.socket],
) -> None:
    end, raw = raw_end
    files = _files(4)
    body = encode_value("few")
    with _nothing_left_open():
        socket.send_fds(raw, [struct.pack("<QI", len(body), 1) + body], files)
        with pytest.raises(CoordinationError, match="4 of 1 descriptors"):
            _received(end)
    _close(files)


def test_descriptors_that_find_no_room_are_an_error_and_the_others_are_closed(
    ends: tuple[ControlSocket, ControlSocket],
) -> None:
    files = _files(30)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _nothing_left_open():
        ends[0].send("many", files)
        taken = {int(name) for name in _open_descriptors()}
        free = [number for number in range(soft) if number not in taken]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[10], hard))
        try:
            with pytest.raises(CoordinationError, match=r"\d+ of 30 descriptors arrived; .* too many files open"):
                _received(ends[1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    _close(files)


def test_what_needs_pickle_is_refused_and_the_next_message_arrives(ends: tuple[ControlSocket, ControlSocket]) -> None:
    with pytest.raises(UnsupportedValueError, match="cannot hold a builtins.object"):
        ends[0].send({"value": [object()]})
    ends[0].send("plain")
    assert _received(ends[1]) == ("plain", [])


def test_a_descriptor_that_is_not_open_is_refused_and_the_next_message_arrives(
    ends: tuple[ControlSocket, ControlSocket],
) -> None:
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        ends[0].send("with a descriptor", [1 << 20])
    assert not isinstance(caught.value, ConnectionError)
    ends[0].send("without")
    assert _received(ends[1]) == ("without", [])


def test_a_message_that_cannot_be_finished_ends_the_stream(ends: tuple[ControlSocket, ControlSocket]) -> None:
    files = _files(64)
    with _nothing_left_open():
        with pytest.raises(ConnectionAbortedError, match="Bad file descriptor"):
            ends[0].send("half", [*files, 1 << 20])
        assert _received(ends[1]) is None
        assert _received(ends[0]) is None
        with pytest.raises(BrokenPipeError, match="finished"):
            ends[0].send("more")
    _close(files)


def test_a_side_that_has_finished_still_receives(ends: tuple[ControlSocket, ControlSocket]) -> None:
    ends[0].send("the last request")
    ends[0].finish()
    with pytest.raises(BrokenPipeError, match="finished"):
        ends[0].send("one more")
    assert _received(ends[1]) == ("the last request", [])
    assert _received(ends[1]) is None
    ends[1].send("the answer")
    assert _received(ends[0]) == ("the answer", [])


@pytest.mark.parametrize("how", ["close", "finish"])
def test_ending_a_side_frees_a_sender_that_waits_for_room(
    ends: tuple[ControlSocket, ControlSocket], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcp_core.background.control._FINISH_SECONDS", 0.01)
    sending = threading.Event()
    real = socket.socket.sendall

    def sendall(self: socket.socket, content: Any) -> None:
        sending.set()
        real(self, content)

    monkeypatch.setattr(socket.socket, "sendall", sendall)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(ends[0].send, bytes(32 << 20))  # nobody reads it
        assert sending.wait(_LIMIT_SECONDS)
        getattr(ends[0], how)()
        with pytest.raises(ConnectionError):
            sent.result(_LIMIT_SECONDS)


def test_something_to_receive_is_noticed_and_so_is_the_end(ends: tuple[ControlSocket, ControlSocket]) -> None:
    assert not ends[1].is_readable_within(0.001)
    ends[0].send("x")
    assert ends[1].is_readable_within(_LIMIT_SECONDS)
    assert _received(ends[1]) == ("x", [])
    ends[0].close()
    assert ends[1].is_readable_within(_LIMIT_SECONDS)
