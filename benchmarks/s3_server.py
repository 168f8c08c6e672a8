"""The part of S3 that checkpoints use, from memory, on loopback: what benchmarks measure clients against.

A server for tests (moto's) reads a whole object to answer for a range of it, so that figures would tell of the server.
This one sends the range from where it lies. It checks neither signatures nor checksums.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class S3Server(ThreadingHTTPServer):
    """Objects by "bucket/key".

    Attributes:
        url: Where clients reach it.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.numbers = itertools.count()
        self.lock = threading.Lock()

    def put(self, key: str, content: bytes) -> None:
        """Give a key a content."""
        with self.lock:
            self.objects[key] = content, time.time()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Server

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY

    def _asked(self) -> tuple[str, dict[str, str]]:
        split = urlsplit(self.path)
        query = parse_qs(split.query, keep_blank_values=True)
        return unquote(split.path).strip("/"), {name: values[0] for name, values in query.items()}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, content: bytes | memoryview = b"", **headers: str) -> None:
        self.send_response(status)
        headers.setdefault("Content_Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD" and len(content):
            self.connection.sendall(content)

    def _xml(self, root: str, inner: str) -> None:
        self._answer(200, f'<?xml version="1.0"?><{root} {_NAMESPACE}>{inner}</{root}>'.encode())

    def do_HEAD(self) -> None:
        key, _ = self._asked()
        found = self.server.objects.get(key)
        if "/" not in key:
            self._answer(200)
        elif found is None:
            self._answer(404)
        else:
            self._answer(200, Content_Length=str(len(found[0])), Last_Modified=formatdate(found[1], usegmt=True))

    def do_GET(self) -> None:
        key, query = self._asked()
        if "uploads" in query:
            self._xml("ListMultipartUploadsResult", "<IsTruncated>false</IsTruncated>")
            return
        if "/" not in key:
            self._list(key, query.get("prefix", ""), query.get("delimiter", ""))
            return
        found = self.server.objects.get(key)
        if found is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
            return
        content, modified = found
        stamp = formatdate(modified, usegmt=True)
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None:
            self._answer(200, content, Last_Modified=stamp)
            return
        first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
        some = memoryview(content)[first : last + 1]
        self._answer(206, some, Last_Modified=stamp, Content_Range=f"bytes {first}-{last}/{len(content)}")

    def _list(self, bucket: str, prefix: str, delimiter: str) -> None:
        start = f"{bucket}/"
        keys = sorted(key[len(start) :] for key in list(self.server.objects) if key.startswith(start + prefix))
        inner, folders = ["<IsTruncated>false</IsTruncated>"], set()
        for key in keys:
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            content, _ = self.server.objects[start + key]
            inner.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f'<ETag>"0"</ETag><Size>{len(content)}</Size><StorageClass>STANDARD</StorageClass></Contents>'
            )
        inner += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)]
        self._xml("ListBucketResult", "".join(inner))

    def do_PUT(self) -> None:
        key, query = self._asked()
        content = self._body()
        source = self.headers.get("x-amz-copy-source")
        if "partNumber" in query:
            self.server.parts[query["uploadId"]][int(query["partNumber"])] = content
        elif source:
            self.server.put(key, self.server.objects[unquote(source).strip("/")][0])
            self._xml("CopyObjectResult", '<ETag>"0"</ETag>')
            return
        elif "/" in key:
            self.server.put(key, content)
        self._answer(200, ETag=f'"{hashlib.blake2b(content[:64], digest_size=16).hexdigest()}"')

    def do_POST(self) -> None:
        key, query = self._asked()
        body = self._body()
        if "uploads" in query:
            number = f"upload-{next(self.server.numbers)}"
            self.server.parts[number] = {}
            self._xml("InitiateMultipartUploadResult", f"<UploadId>{number}</UploadId>")
        elif "uploadId" in query:
            parts = self.server.parts.pop(query["uploadId"])
            self.server.put(key, b"".join(parts[number] for number in sorted(parts)))
            self._xml("CompleteMultipartUploadResult", '<ETag>"0"</ETag>')
        else:  # many keys at once
            for name in re.findall(rb"<Key>(.*?)</Key>", body):
                self.server.objects.pop(f"{key}/{name.decode()}", None)
            self._xml("DeleteResult", "")

    def do_DELETE(self) -> None:
        key, query = self._asked()
        if "uploadId" in query:
            self.server.parts.pop(query["uploadId"], None)
        else:
            self.server.objects.pop(key, None)
        self._answer(204)
