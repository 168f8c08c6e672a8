"""A process between clients and a server, through which all bytes pass: it can be stopped, killed and started anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import TracebackType
from urllib.parse import urlsplit

_PROGRAM = """
import asyncio, sys

async def carry(reader, writer):
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

async def meet(reader, writer):
    try:
        inner_reader, inner_writer = await asyncio.open_connection(sys.argv[1], int(sys.argv[2]))
    except OSError:
        writer.close()
        return
    await asyncio.gather(carry(reader, inner_writer), carry(inner_reader, writer))

async def main():
    server = await asyncio.start_server(meet, "127.0.0.1", int(sys.argv[3]))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


class StoreFront:
    """The address of a server that may be away.

    Args:
        behind: URL of the server.
    """

    def __init__(self, behind: str) -> None:
        split = urlsplit(behind)
        self._behind = (str(split.hostname), str(split.port))
        self._process: subprocess.Popen[str] | None = None
        self._port = "0"
        self.come_back()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def leave(self, how: str) -> None:
        """Be "stopped", so that connections are made and nothing is answered; or "killed". Any thread may ask."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)

    def come_back(self) -> None:
        """Answer again, under the same address."""
        self._end()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *self._behind, self._port], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._port = self._process.stdout.readline().strip()
        assert self._port, "the process did not start"

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def __enter__(self) -> StoreFront:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
