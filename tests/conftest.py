"""What all tests rely on: Ctrl-C works, also where a shell started them in the background, which ignores it; and no
test fails because the machine is busy; what a test keeps in the background of its own process ends with the test.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.background_processes import end_own
from tests.core.object_store import ObjectStore, running_store

_FUZZ_EXAMPLES = 2000
"""Of each property that does not say otherwise, where `DCP_HYPOTHESIS=fuzz` asks for many."""


def pytest_configure() -> None:
    """Make interrupts raise, in every process that runs tests; give single examples all the time they need."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("unhurried", settings.default, deadline=None)
    settings.register_profile("fuzz", settings.get_profile("unhurried"), max_examples=_FUZZ_EXAMPLES)
    settings.load_profile("fuzz" if os.environ.get("DCP_HYPOTHESIS") == "fuzz" else "unhurried")


@pytest.fixture(autouse=True)
def own_background_processes_end() -> Iterator[None]:
    """A test that saves asynchronously in the process that runs the tests leaves nothing to the tests after it."""
    yield
    end_own()


@pytest.fixture(scope="session")
def object_store_server() -> Iterator[ObjectStore]:
    """A real S3 server, one for all tests of this process."""
    with running_store() as store:
        yield store


@pytest.fixture
def object_store(object_store_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server, for this process and all that it starts; no request fails yet."""
    for name, value in object_store_server.environment().items():
        monkeypatch.setenv(name, value)
    object_store_server.traffic.clear()
    yield object_store_server
    object_store_server.traffic.clear()
