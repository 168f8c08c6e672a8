"""How far a conversion is, shown to whoever watches a terminal.

Goes in: bytes as they are moved. Comes out: a bar on standard error where that is a terminal, and nothing elsewhere.
`rich` draws it where it is installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TextIO

Advance = Callable[[int], None]
"""Told how many more bytes have been moved; any thread may call it."""

REDRAW_SECONDS = 0.1
_BAR_CHARS = 30
_MIB = 1 << 20


@contextmanager
def progress_bar(title: str, total: int, show: bool | None = None, stream: TextIO | None = None) -> Iterator[Advance]:
    """Show a bar while a conversion runs.

    Args:
        title: What is done.
        total: All bytes.
        show: None: only where a person watches, which is on a terminal.
        stream: Where to; standard error by default.
    """
    stream = sys.stderr if stream is None else stream
    is_shown = stream is not None and stream.isatty() if show is None else show
    if not is_shown or total <= 0:
        yield _ignore
        return
    try:
        import rich.progress as rich_progress
        from rich.console import Console
    except ImportError:
        with _plain_bar(title, total, stream) as advance:
            yield advance
        return
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(binary_units=True),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)


def _ignore(nbytes: int) -> None:
    """Nobody watches."""


@contextmanager
def _plain_bar(title: str, total: int, stream: TextIO) -> Iterator[Advance]:
    bar = _PlainBar(title, total, stream)
    try:
        yield bar.advance
    finally:
        bar.close()


class _PlainBar:
    """A line that is drawn anew over itself."""

    def __init__(self, title: str, total: int, stream: TextIO) -> None:
        self._title = title
        self._total = total
        self._stream = stream
        self._done = 0
        self._started = time.monotonic()
        self._drawn = 0.0
        self._lock = Lock()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._drawn >= REDRAW_SECONDS:
                self._drawn = now
                self._draw(now)

    def close(self) -> None:
        with self._lock:
            self._draw(time.monotonic())
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, now: float) -> None:
        share = min(self._done / self._total, 1.0)
        filled = int(share * _BAR_CHARS)
        speed = self._done / max(now - self._started, 1e-9) / _MIB
        self._stream.write(
            f"\r{self._title} [{'#' * filled}{'.' * (_BAR_CHARS - filled)}] {share:4.0%} of {self._total / _MIB:.0f} "
            f"MiB, {speed:.0f} MiB/s "
        )
        self._stream.flush()
