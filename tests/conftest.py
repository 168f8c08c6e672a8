"""What all tests rely on: Ctrl-C works, also where a shell started them in the background, which ignores it."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Make interrupts raise, in every process that runs tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
