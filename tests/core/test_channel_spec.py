"""How another process is told to make a channel, and where a job meets."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from dcp_core.adapter import ChannelSpec, KeyValueChannel, ProcessGroup, drain, rendezvous_address
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError, MissingRendezvousError


def make_directory(path: str) -> DirectoryChannel:
    return DirectoryChannel(path)


def fail_to_connect(host: str) -> KeyValueChannel:
    raise OSError(f"no route to {host}")


def run_out_of_time() -> KeyValueChannel:
    raise CoordinationTimeoutError("nobody came")


def make_something_else() -> object:
    return "a channel"


def spec(function: str, **arguments: str) -> ChannelSpec:
    return ChannelSpec(__name__, function, arguments)


def test_a_spec_opens_the_channel_that_its_function_makes(tmp_path: Path) -> None:
    channel = spec("make_directory", path=str(tmp_path)).open()
    channel.put("a", b"x")
    assert DirectoryChannel(tmp_path).wait("a", 0) == b"x"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (ChannelSpec("no.such.module", "f"), "no.such.module:f .*ModuleNotFoundError.*importable"),
        (ChannelSpec("", "f"), "ValueError.*importable"),
        (spec("no_such_function"), "no_such_function .*AttributeError"),
        (spec("fail_to_connect", host="node9"), "fail_to_connect .*OSError: no route to node9"),
        (spec("fail_to_connect", port="1"), "fail_to_connect .*TypeError.*port"),
        (spec("make_something_else"), "make_something_else returned a str, which lacks put, wait or delete"),
        (ChannelSpec(__name__, "__doc__"), "__doc__ .*TypeError"),
    ],
)
def test_what_fails_in_opening_is_named_with_a_remedy(broken: ChannelSpec, said: str) -> None:
    with pytest.raises(CoordinationError, match=said) as caught:
        broken.open()
    assert "use_gloo=False" in str(caught.value)


def test_an_import_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_broken_adapter.py").write_text("raise OSError('libfabric.so is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CoordinationError, match="a_broken_adapter:join .*libfabric.so is missing.*importable"):
        ChannelSpec("a_broken_adapter", "join").open()
    assert "a_broken_adapter" not in sys.modules


def test_an_error_of_the_channel_itself_stays_what_it_is() -> None:
    with pytest.raises(CoordinationTimeoutError, match="^nobody came$"):
        spec("run_out_of_time").open()


def test_arguments_are_plain_and_the_specs_own() -> None:
    for value in ([1], (1,), {"a": 1}, object(), Path("x")):
        with pytest.raises(ArgumentError, match="'bad' of m:f is a "):
            ChannelSpec("m", "f", {"good": None, "bad": value})  # type: ignore[dict-item]  # what is tested
    arguments = {"port": 1}
    made = ChannelSpec("m", "f", arguments)
    arguments["port"] = 2
    assert made.arguments == {"port": 1}
    assert made == ChannelSpec("m", "f", {"port": 1}) != ChannelSpec("m", "f", {"port": 2})
    assert len({ProcessGroup(remote=made), ProcessGroup(remote=made), ProcessGroup()}) == 2


class Draining(DirectoryChannel):
    waited = 0.0

    def drain(self, timeout_seconds: float) -> None:
        self.waited = timeout_seconds


class Broken(DirectoryChannel):
    def drain(self, timeout_seconds: float) -> None:
        raise CoordinationError("the store is gone")


def test_only_a_channel_that_can_tell_is_drained(tmp_path: Path) -> None:
    started = time.monotonic()
    drain(None, 100)
    drain(DirectoryChannel(tmp_path), 100)
    assert time.monotonic() - started < 50
    channel = Draining(tmp_path)
    drain(channel, 7)
    assert channel.waited == 7
    drain(Broken(tmp_path), 7)  # the save has its outcome by then


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "neither"),
        ({"MASTER_ADDR": "node7"}, "MASTER_ADDR='node7'"),
        ({"MASTER_PORT": "29500"}, "MASTER_PORT='29500'"),
        ({"MASTER_ADDR": "", "MASTER_PORT": "29500"}, "MASTER_ADDR='', MASTER_PORT='29500'"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "auto"}, "MASTER_PORT='auto'"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "-1"}, "MASTER_PORT='-1'"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "0"}, "MASTER_PORT='0'"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "65536"}, "MASTER_PORT='65536'"),
    ],
)
def test_without_an_address_to_meet_at_an_assertion_error_says_what_is_missing(
    variables: Mapping[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=f"needs MASTER_ADDR and MASTER_PORT.*{found}.*use_gloo=False") as caught:
        rendezvous_address(variables)
    assert isinstance(caught.value, MissingRendezvousError)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MissingRendezvousError):
        rendezvous_address()


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert rendezvous_address() == ("node7", 29500)
    assert rendezvous_address({"MASTER_ADDR": "::1", "MASTER_PORT": "1"}) == ("::1", 1)
