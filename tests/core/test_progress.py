"""The bar of conversions: shown to people, not to files; with rich and without."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import Any

import pytest

from dcp_core.convert.progress import progress_bar

_WITHOUT_RICH = "import sys; sys.modules['rich'] = None; sys.modules['rich.progress'] = None; "
_IN_TERMINAL = """
import sys
from dcp_core.convert.progress import progress_bar
assert sys.stderr.isatty()
with progress_bar("convert", 3 << 20) as advance:
    for _ in range(3):
        advance(1 << 20)
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_shown_where_nobody_watches() -> None:
    stream = io.StringIO()
    with progress_bar("convert", 100, stream=stream) as advance:
        advance(100)
    assert stream.getvalue() == ""


def test_a_watcher_sees_title_and_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich", "rich.progress", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    stream = Terminal()
    with progress_bar("convert", 200, stream=stream) as advance:
        advance(100)
        advance(100)
    lines = stream.getvalue().split("\r")
    assert "convert" in lines[-1]
    assert "100%" in lines[-1]
    assert stream.getvalue().endswith("\n")


def test_it_ends_its_line_when_the_conversion_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    stream = Terminal()
    with pytest.raises(KeyError), progress_bar("convert", 200, stream=stream):
        raise KeyError
    assert stream.getvalue().endswith("\n")


def test_it_can_be_asked_for_and_refused() -> None:
    hidden, shown = Terminal(), io.StringIO()
    with progress_bar("convert", 10, show=False, stream=hidden) as advance:
        advance(10)
    with progress_bar("convert", 10, show=True, stream=shown) as advance:
        advance(10)
    assert hidden.getvalue() == ""
    assert "convert" in shown.getvalue()


def test_rich_draws_it_where_it_is_installed() -> None:
    pytest.importorskip("rich")
    stream: Any = Terminal()
    with progress_bar("convert", 10, stream=stream) as advance:
        advance(10)
    assert "100" in stream.getvalue() or "10/10" in stream.getvalue()


@pytest.mark.parametrize("first", ["", _WITHOUT_RICH])
def test_a_real_terminal_shows_it(first: str) -> None:
    terminal, end = os.openpty()
    try:
        done = subprocess.run([sys.executable, "-c", first + _IN_TERMINAL], stderr=end, timeout=60, check=False)
        os.set_blocking(terminal, False)
        found = os.read(terminal, 1 << 16)
    finally:
        os.close(end)
        os.close(terminal)
    assert done.returncode == 0, found
    assert b"convert" in found
    assert b"3.0" in found or b"100%" in found
