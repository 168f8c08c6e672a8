"""A background process as far as its channel goes: a bare interpreter that joins by a `ChannelSpec` and does as told.

`Child` is the side of the rank that starts it. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dcp_core.adapter import ChannelSpec, KeyValueChannel, drain
from dcp_core.background.launch import child_environment, import_path
from dcp_core.coordination.exchange import Exchange

_PROGRAM = "import sys; sys.path[:] = {path}; from tests.torch.remote_child import main; main({name})"
_MOST_SECONDS = 100


class Child:
    """One background process.

    Args:
        spec: How it joins; it does so at once.
        file: Where it appends its answers as well, for who outlives the rank.
    """

    def __init__(self, spec: ChannelSpec | None, file: Path) -> None:
        assert spec is not None
        program = _PROGRAM.format(path=ascii(import_path()), name=ascii(str(file)))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": "", **child_environment(os.environ)},
            cwd="/",
            text=True,
            start_new_session=True,
        )
        self.tell(do="open", module=spec.module, function=spec.function, arguments=dict(spec.arguments))

    def tell(self, **request: Any) -> None:
        """Send a request; they are served in turn."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The answer to the oldest request that has none yet."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the background process ended with {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and take its answer."""
        self.tell(**request)
        return self.hear()

    def end(self) -> None:
        """Let it end when it is through, and wait for that."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class _Late:
    """A channel whose messages are read late."""

    def __init__(self, channel: KeyValueChannel, seconds: float) -> None:
        self._channel = channel
        self._seconds = seconds
        self.put = channel.put
        self.delete = channel.delete

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        time.sleep(self._seconds)
        return self._channel.wait(name, timeout_seconds)


class _Served:
    """The process itself: what it does for each request."""

    def __init__(self) -> None:
        self._rank = 0
        self._world_size = 1
        self._channel: KeyValueChannel | None = None

    def open(self, module: str, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self._rank, self._world_size = arguments["rank"], arguments["world_size"]
        self._channel = ChannelSpec(module, function, arguments).open()
        import torch.distributed as dist

        return {
            "bare": bool(sys.flags.isolated and sys.flags.no_site),
            "group": dist.is_initialized(),
            "pid": os.getpid(),
        }

    def exchange(
        self, save: str, payload: str = "", fails: str = "", own: bool = False, late: float = 0.0, **options: Any
    ) -> dict[str, Any]:
        assert self._channel is not None
        channel = _Late(self._channel, late) if late else self._channel
        exchange = Exchange(
            self._rank, self._world_size, channel, key=save, timeout_seconds=options.pop("timeout_seconds", 30.0)
        )
        error = ValueError(fails) if fails else None

        def answers(payloads: Any) -> Any:
            joined = b"|".join(payloads)
            return [joined + b"for %d" % rank for rank in range(self._world_size)] if own else joined

        return {"answer": exchange.run("test", payload.encode(), error=error, compute=answers, **options).decode()}

    def drain(self, seconds: float) -> dict[str, Any]:
        drain(self._channel, seconds)
        return {}

    def sleep(self, seconds: float) -> dict[str, Any]:
        time.sleep(seconds)
        return {}


def main(name: str) -> None:
    """Serve until the rank is gone."""
    import faulthandler

    faulthandler.dump_traceback_later(_MOST_SECONDS, exit=True)
    served = _Served()
    for line in sys.stdin:
        request = json.loads(line)
        started = time.monotonic()
        try:
            answer = getattr(served, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        answer["seconds"] = time.monotonic() - started
        with open(name, "a") as file:
            file.write(json.dumps(answer) + "\n")
        try:
            print(json.dumps(answer), flush=True)  # noqa: T201  # the answer
        except OSError:  # the rank is gone
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the end
