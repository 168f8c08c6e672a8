"""A real S3 server on loopback, and a way in between that records requests and makes some of them fail."""

from __future__ import annotations

import contextlib
import http.client
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

BUCKET = "checkpoints"
SECRET = "loopback-secret-value"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "loopback-key",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_LATE_SECONDS = 1.0
_PIECES = 20
_PIECE_SECONDS = 0.02
_DRIP_SECONDS = 0.25
_KEPT_HEADERS = ("content-length", "connection", "transfer-encoding", "date", "server")


@dataclass(frozen=True)
class Request:
    """What a client asked for."""

    method: str
    key: str
    query: str
    range: str

    @property
    def name(self) -> str:
        """The last component of the key."""
        return self.key.rpartition("/")[2]

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type" in self.query


@dataclass
class Rule:
    """Which requests fail, and how.

    "500", "503", "403", "reset", "stall", "slow" (late), "lost" (done, not answered); or with its body: "trickle" (a
    few bytes at a time), "drip" (so for ever), "torn" (ends in the middle), "short", "long" (of that very length).
    """

    matches: Callable[[Request], bool]
    fault: str
    times: int
    action: Callable[[], None] | None = None


@dataclass
class Traffic:
    """What passes between the clients and the server."""

    requests: list[Request] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    slow_seconds: float = 0.0
    stall_seconds: float = 2.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, fault: str, pattern: str, *, times: int = 1) -> None:
        """Make the next requests fail that match "METHOD key?query"."""
        found = re.compile(pattern)
        self.rules.append(Rule(lambda r: found.search(f"{r.method} {r.key}?{r.query}") is not None, fault, times))

    def tell(self, pattern: str, action: Callable[[], None]) -> None:
        """Call when the next request comes that matches, before anything is done about it."""
        found = re.compile(pattern)
        self.rules.append(Rule(lambda r: found.search(f"{r.method} {r.key}?{r.query}") is not None, "", 1, action))

    def of(self, pattern: str) -> list[Request]:
        """The requests so far that match "METHOD key?query"."""
        found = re.compile(pattern)
        return [r for r in list(self.requests) if found.search(f"{r.method} {r.key}?{r.query}")]

    def clear(self) -> None:
        self.requests.clear()
        self.rules.clear()
        self.most_in_flight = 0
        self.slow_seconds = 0.0

    def _enter(self, request: Request) -> str:
        with self.lock:
            self.requests.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            for rule in self.rules:
                if rule.times > 0 and rule.matches(request):
                    rule.times -= 1
                    if rule.action is not None:
                        rule.action()
                    return rule.fault
        return ""

    def _leave(self) -> None:
        with self.lock:
            self.in_flight -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Between

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def handle_any(self) -> None:
        traffic = self.server.traffic
        split = urlsplit(self.path)
        key = unquote(split.path).lstrip("/")
        fault = traffic._enter(Request(self.command, key, split.query, self.headers.get("Range", "")))
        try:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if traffic.slow_seconds:
                time.sleep(traffic.slow_seconds)
            if fault in ("500", "503", "403"):
                self._refuse(int(fault))
            elif fault == "stall":
                time.sleep(traffic.stall_seconds)
                self._reset()
            elif fault == "reset":
                self._reset()
            else:
                if fault == "slow":
                    time.sleep(_LATE_SECONDS)
                self._forward(body, fault)
        except OSError:
            self.close_connection = True
        finally:
            traffic._leave()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815  # as the base class calls them

    def _forward(self, body: bytes, fault: str) -> None:
        connection = http.client.HTTPConnection(*self.server.behind, timeout=30)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            connection.request(self.command, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
            if fault == "lost":
                self._reset()
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _KEPT_HEADERS:
                    self.send_header(name, value)
            if fault == "short":
                content = content[: len(content) // 2]
            elif fault == "long":
                content += b"more than was asked for"
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self._send(content, fault)
        finally:
            connection.close()

    def _send(self, content: bytes, fault: str) -> None:
        if fault == "torn":
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self._reset()
        elif fault == "trickle":
            piece = max(len(content) // _PIECES, 1)
            for at in range(0, len(content), piece):
                self.wfile.write(content[at : at + piece])
                time.sleep(_PIECE_SECONDS)
        elif fault == "drip":
            for at in range(len(content) - 1):
                self.wfile.write(content[at : at + 1])
                time.sleep(_DRIP_SECONDS)
        else:
            self.wfile.write(content)

    def _refuse(self, status: int) -> None:
        code = {500: "InternalError", 503: "SlowDown", 403: "AccessDenied"}[status]
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


class _Between(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behind: tuple[str, int], traffic: Traffic) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = behind
        self.traffic = traffic

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no news."""


@dataclass(frozen=True)
class ObjectStore:
    """The server, and what passes.

    Attributes:
        direct: Its address.
        endpoint: The address of what lies in between.
        traffic: What passes there.
    """

    direct: str
    endpoint: str
    traffic: Traffic

    def environment(self, *, direct: bool = False) -> dict[str, str]:
        """What a process needs to reach it."""
        return ENVIRONMENT | {"AWS_ENDPOINT_URL": self.direct if direct else self.endpoint}


@contextlib.contextmanager
def running_store() -> Iterator[ObjectStore]:
    """Start the server with an empty bucket; it ends with the context."""
    import boto3  # type: ignore[import-untyped]  # has no types
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it tells of every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    traffic = Traffic()
    between = _Between((host, port), traffic)
    thread = threading.Thread(target=between.serve_forever, args=(0.05,), name="between", daemon=True)
    thread.start()
    direct = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=direct, region_name="us-east-1", aws_access_key_id="loopback-key",
        aws_secret_access_key=SECRET,
    )  # fmt: skip
    client.create_bucket(Bucket=BUCKET)
    client.close()
    try:
        yield ObjectStore(direct, f"http://127.0.0.1:{between.server_address[1]}", traffic)
    finally:
        between.shutdown()
        between.server_close()
        thread.join(10)
        server.stop()
