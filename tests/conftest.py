"""What all tests rely on: Ctrl-C works, also where a shell started them in the background, which ignores it; and no
test fails because the machine is busy.
"""

from __future__ import annotations

import signal

from hypothesis import settings


def pytest_configure() -> None:
    """Make interrupts raise, in every process that runs tests; give single examples all the time they need."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("unhurried", settings.default, deadline=None)
    settings.load_profile("unhurried")
