"""The socket between a trainer and its background process: whole messages, with descriptors where there are any.

A message is its length and how many descriptors come with it (8 and 4 bytes, little-endian), then a value in the
objects encoding, without pickles. Descriptors travel beside the first bytes, at most 64 at a time; where there are
more, a byte after the message carries each further 64. Either side sees the death of the other as the end of the
stream.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from dcp_core.errors import CoordinationError, UnsupportedValueError
from dcp_core.formats.object_encoder import Encoder
from dcp_core.formats.objects import decode_value
from dcp_core.type_names import type_name

_HEAD = struct.Struct("<QI")
_CARRIER = b"\0"
_DESCRIPTOR = struct.Struct("=i")
_MAX_DESCRIPTORS = 64
_MAX_MESSAGE_NBYTES = 1 << 40
_PIECE_NBYTES = 1 << 24
_SMALL_NBYTES = 1 << 16
_FINISH_SECONDS = 1.0
_ROOM_SECONDS = 60
_TIMEVAL = struct.Struct("@ll")


class ControlSocket:
    """One end.

    Sending is safe from any thread; receiving belongs to one, which also closes the socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._is_finished = False

    @staticmethod
    def pair(room_seconds: int = _ROOM_SECONDS) -> tuple[ControlSocket, socket.socket]:
        """Our end, and the raw other end for the new process.

        Args:
            room_seconds: How long our end waits until the other one takes what is sent; then the stream is broken off.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(room_seconds, 0))
        return ControlSocket(ours), theirs

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message.

        Args:
            message: What has a safe encoding.
            descriptors: Open files that go with it; they stay open here.

        Raises:
            UnsupportedValueError: The message would need pickle; nothing was sent.
            ConnectionError: The other side is gone, or this side has finished.
            OSError: The descriptors cannot be sent; nothing was sent.
        """
        body = Encoder("a control message", _refuse_pickle).encoded(message, 0)
        groups = [list(descriptors[at : at + _MAX_DESCRIPTORS]) for at in range(0, len(descriptors), _MAX_DESCRIPTORS)]
        head = _HEAD.pack(len(body), len(descriptors))
        if len(body) <= _SMALL_NBYTES:
            head, body = head + body, b""
        with self._sending:
            if self._is_finished:
                raise BrokenPipeError("this end of the control socket has finished")
            sent = socket.send_fds(self._socket, [head], groups[0]) if groups else 0
            try:
                self._socket.sendall(head[sent:])
                self._socket.sendall(body)
                for group in groups[1:]:
                    socket.send_fds(self._socket, [_CARRIER], group)
            except BaseException as error:
                self._is_finished = True  # half a message is in the stream: nothing sensible can follow it
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                if isinstance(error, BlockingIOError):
                    raise ConnectionAbortedError("the other end of the control socket takes nothing") from error
                if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                    raise ConnectionAbortedError(f"the control socket broke within a message: {error}") from error
                raise

    def receive(self) -> tuple[Any, list[int]] | None:
        """Wait for the next message and its descriptors.

        Returns:
            None when the other side is gone, also where it went within a message.

        Raises:
            CoordinationError: Descriptors were lost, or the stream holds no message.
            CorruptError: The same.
        """
        descriptors: list[int] = []
        try:
            message = self._receive(descriptors)
        except BaseException as error:
            _close_all(descriptors)
            if isinstance(error, _StreamEndedError):
                return None
            raise
        return message, descriptors

    def is_readable_within(self, seconds: float) -> bool:
        """Wait until there is something to receive, the end of the stream included."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def finish(self) -> None:
        """Send nothing more: the other side sees the end of the stream, and may still send."""
        is_ours = self._sending.acquire(timeout=_FINISH_SECONDS)  # else another thread waits for room: it is cut off
        try:
            self._is_finished = True
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        finally:
            if is_ours:
                self._sending.release()

    def close(self) -> None:
        """Close this end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a sender that waits for room
        with self._sending:
            self._is_finished = True
            self._socket.close()

    def leave_behind(self) -> None:
        """Close, in a forked process, its copy of the descriptor; the connection stays."""
        self._sending = threading.Lock()
        self._is_finished = True
        self._socket.close()

    def _receive(self, descriptors: list[int]) -> Any:
        head = self._receive_bytes(_HEAD.size, descriptors)
        nbytes, count = _HEAD.unpack(head)
        if nbytes > _MAX_MESSAGE_NBYTES:
            raise CoordinationError(f"a control message of {nbytes} bytes cannot be")
        body = self._receive_exactly(nbytes)
        for _ in range(_MAX_DESCRIPTORS, count, _MAX_DESCRIPTORS):
            self._receive_bytes(len(_CARRIER), descriptors)
        if len(descriptors) != count:
            raise CoordinationError(
                f"{len(descriptors)} of {count} descriptors arrived; the process may have too many files open"
            )
        return decode_value(bytes(body), name="a control message")

    def _receive_bytes(self, nbytes: int, descriptors: list[int]) -> bytes:
        """A few bytes, with the descriptors that come beside the first of them."""
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _DESCRIPTOR.size)
        try:  # not recv_fds, which forgets its flags in some versions of Python
            first, beside, _, _ = self._socket.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            raise _StreamEndedError from None
        for level, kind, content in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) // _DESCRIPTOR.size * _DESCRIPTOR.size
                descriptors.extend([number for (number,) in _DESCRIPTOR.iter_unpack(content[:whole])])
        if not first:
            raise _StreamEndedError
        return first + bytes(self._receive_exactly(nbytes - len(first)))

    def _receive_exactly(self, nbytes: int) -> bytearray:
        content = bytearray(nbytes)
        view, done = memoryview(content), 0
        while done < nbytes:
            try:
                count = self._socket.recv_into(view[done:], min(nbytes - done, _PIECE_NBYTES))
            except ConnectionResetError:
                raise _StreamEndedError from None
            if count == 0:
                raise _StreamEndedError
            done += count
        return content


class _StreamEndedError(Exception):
    """The other side is gone."""


def _refuse_pickle(encoder: Encoder, value: object, depth: int) -> NoReturn:
    raise UnsupportedValueError(f"{encoder.where} cannot hold a {type_name(value)}")


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
