"""`storage_options`: whatever takes the URL of a checkpoint takes them and shows none; a path is no place for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.cli import storage_options as of_command_line
from dcp_core.cli.main import main
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.convert.to_huggingface import HuggingFaceConversion
from dcp_core.errors import ArgumentError, DcpError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.inspection.detection import checkpoint_format
from dcp_core.inspection.verify import verify
from dcp_core.manager.latest import latest_checkpoint, survey_checkpoints
from dcp_core.manager.manager import CheckpointManager
from dcp_core.recipes.places import dcp_reader, storage_at
from dcp_core.storage.fsspec_client import FsspecClient
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.retries import Retries
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.guarded_store import OPTIONS, SCHEME, TOKEN, GuardedFileSystem, names_in_store
from tests.core.rank_jobs import error_of, save

Options = Mapping[str, Any] | None
Call = Callable[[str, Options], object]


def state(step: int = 1) -> dict[str, Any]:
    return {"w": np.arange(6.0) + step, "step": step}


def save_at(place: str, options: Options) -> object:
    return api.save(state(2), checkpoint_id=place, storage_writer=FileSystemWriter(storage_options=options))


def save_in_the_background(place: str, options: Options) -> object:
    writer = FileSystemWriter(storage_options=options)
    return api.async_save(state(2), checkpoint_id=place, storage_writer=writer).get_result(60)


def load_from(place: str, options: Options) -> object:
    target = state(0)
    api.load(target, checkpoint_id=place, storage_reader=FileSystemReader(storage_options=options))
    return target["step"]


def to_huggingface(place: str, options: Options) -> object:
    conversion = HuggingFaceConversion(dcp_reader(_LOCAL["source"]))
    return conversion.run(f"{place}_hf", storage_options=options).tensors


def from_huggingface(place: str, options: Options) -> object:
    return HuggingFaceReader(f"{place}_weights", storage_options=options).load_metadata()


def convert_here(place: str, options: Options) -> object:
    return convert_to_dcp(dcp_reader(_LOCAL["source"]), f"{place}_converted", storage_options=options)


_LOCAL: dict[str, str] = {}

CALLS: dict[str, Call] = {
    "save": save_at,
    "async_save": save_in_the_background,
    "load": load_from,
    "writer": lambda place, options: FileSystemWriter(place, storage_options=options),
    "reader": lambda place, options: FileSystemReader(place, storage_options=options),
    "read": lambda place, options: api.read(place, "w", storage_options=options),
    "verify": lambda place, options: verify(place, storage_options=options).raise_problems(),
    "format": lambda place, options: checkpoint_format(place, options),
    "latest": lambda place, options: latest_checkpoint(place, storage_options=options),
    "survey": lambda place, options: survey_checkpoints(place, storage_options=options),
    "manager": lambda place, options: CheckpointManager(place, storage_options=options),
    "to huggingface": to_huggingface,
    "from huggingface": from_huggingface,
    "convert": convert_here,
}


@pytest.fixture(autouse=True)
def _sources(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("source") / "checkpoint"
    api.save(state(), checkpoint_id=place)
    _LOCAL["source"] = str(place)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    place = f"{SCHEME}://{request.node.name}/step_1"
    api.save(state(), checkpoint_id=place, storage_writer=FileSystemWriter(storage_options=OPTIONS))
    HuggingFaceConversion(dcp_reader(_LOCAL["source"])).run(f"{place}_weights", storage_options=OPTIONS)
    return place


# Another process has no file system that this one registered; test_object_store_ranks saves in the background to S3.
@pytest.mark.parametrize("name", [name for name in CALLS if name != "async_save"])
def test_whatever_takes_a_url_takes_options_and_is_refused_without(name: str, url: str) -> None:
    call = CALLS[name]
    before = names_in_store()
    for options in (None, {}, {"token": "another-secret-value"}):
        with pytest.raises(DcpError, match="the token is wrong") as caught:
            call(url, options)
        assert "another-secret-value" not in str(caught.value)
    assert names_in_store() == before
    call(url, OPTIONS)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_options_with_a_path_are_refused_before_anything_is_written(call: Call, scheme: str, tmp_path: Path) -> None:
    place = f"{scheme}{tmp_path}/step_1"
    with pytest.raises(ArgumentError, match=r"storage_options \(token\) are for URLs") as caught:
        call(place, OPTIONS)
    assert TOKEN not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_no_options_are_none(tmp_path: Path) -> None:
    save_at(str(tmp_path / "step_1"), {})
    assert load_from(str(tmp_path / "step_1"), {}) == 2
    CheckpointManager(tmp_path, storage_options={})


def test_options_beside_a_storage_are_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for call in (
        partial(FileSystemWriter, storage=storage),
        partial(FileSystemReader, storage=storage),
        partial(HuggingFaceReader, storage=storage),
    ):
        with pytest.raises(ArgumentError, match=r"\(token\).*a storage was given"):
            call(storage_options=OPTIONS)
    with pytest.raises(ArgumentError, match=r"\(token\).*a storage was given"):
        storage_at(storage, OPTIONS)


def test_a_plugin_that_opens_a_url_gets_no_options_and_says_so(tmp_path: Path) -> None:
    reader = FileSystemReader(open_url=lambda url: LocalStorage(tmp_path), storage_options=OPTIONS)
    with pytest.raises(ArgumentError, match=r"\(token\).*a plugin opens 'toy://me:\*\*\*@x'"):
        reader.initialize_reader("toy://me:pass-word@x")


def _with_options_on_one_rank(context: RankContext, place: str) -> tuple[type[BaseException], str]:
    options = OPTIONS if context.rank == 1 else None
    return error_of(save, state(), place, storage_writer=FileSystemWriter(storage_options=options))


def test_what_one_rank_gives_in_vain_is_the_error_of_all(tmp_path: Path) -> None:
    ends = run_ranks(_with_options_on_one_rank, 2, str(tmp_path / "step_1"))
    assert {kind for kind, _ in ends} == {ArgumentError} and ends[0] == ends[1]
    assert "rank 1" in ends[0][1] and "storage_options (token)" in ends[0][1] and TOKEN not in ends[0][1]
    assert list(tmp_path.iterdir()) == []


# -- the command line -------------------------------------------------------------------------------------------------


def commands(url: str, local: str) -> dict[str, tuple[str, ...]]:
    return {
        "verify": ("verify", url),
        "verify several": ("verify", local, url),
        "inspect": ("inspect", url),
        "diff": ("diff", local, url),
        "diff the other way": ("diff", url, local),
        "convert from": ("convert", url, f"{local}_out", "--to", "hf"),
        "convert to": ("convert", local, f"{url}_out", "--to", "dcp"),
        "convert to weights": ("convert", local, f"{url}_out", "--to", "hf"),
        "try to convert": ("convert", local, f"{url}_out", "--to", "dcp", "--dry-run"),
        "from weights": ("convert", f"{url}_weights", f"{local}_out", "--to", "dcp"),
    }


@pytest.mark.parametrize("name", commands("", ""))
def test_every_command_takes_options_and_shows_none(
    name: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = str(tmp_path / "local")
    api.save(state(), checkpoint_id=local)
    command = commands(url, local)[name]
    assert main([*command, "--storage-option", f"token={TOKEN}"]) == 0, capsys.readouterr()
    shown = "".join(capsys.readouterr())
    if "--dry-run" not in command:
        assert main([*command, "--storage-option", "token=another-secret"]) in (1, 2)
        shown += (refused := "".join(capsys.readouterr()))
        assert "the token is wrong" in refused or "is there" in refused or "there is a checkpoint" in refused
    assert TOKEN not in shown and "another-secret" not in shown


@pytest.mark.parametrize("command", [("verify",), ("inspect",), ("diff", "."), ("convert", "--to", "hf", ".")])
def test_a_command_refuses_options_for_paths(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path / "local"), "--storage-option", f"token={TOKEN}"]) == 2
    shown = "".join(capsys.readouterr())
    assert "storage_options (token) are for URLs" in shown and TOKEN not in shown


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        ((f"{TOKEN}",), "number 1 is no KEY=VALUE"),
        (("a=1", f"={TOKEN}"), "number 2 is no KEY=VALUE"),
        ((f"token={TOKEN}", f"token={TOKEN}"), "token is given twice"),
    ],
)
def test_what_is_no_option_is_refused_without_showing_it(
    texts: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [part for text in texts for part in ("--storage-option", text)]
    assert main(["verify", "memory://x", *given]) == 2
    shown = "".join(capsys.readouterr())
    assert complaint in shown and TOKEN not in shown


@pytest.mark.parametrize("words", [("--storage-optoin", f"token={TOKEN}"), (f"--storage-optoin=token={TOKEN}",)])
def test_a_misspelled_option_is_refused_without_showing_its_value(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "memory://x", *words]) == 2
    shown = "".join(capsys.readouterr())
    assert "--storage-optoin" in shown and TOKEN not in shown


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("anon=true", True),
        ("n=3", 3),
        ("endpoint_url=http://127.0.0.1:9000/?a=b", "http://127.0.0.1:9000/?a=b"),
        ('client_kwargs={"region_name": "us-east-1"}', {"region_name": "us-east-1"}),
        ("x=", ""),
        ("secret=12345678", "12345678"),
        ("account_key=1e5", "1e5"),
        ('token="12"', "12"),
        ("token={broken", "{broken"),
    ],
)
def test_a_value_is_json_where_it_parses_and_digits_of_a_secret_are_text(text: str, value: object) -> None:
    namespace = type("Arguments", (), {"storage_options": [text]})()
    assert of_command_line.parsed_storage_options(namespace) == {text.partition("=")[0]: value}


def test_secrets_are_scrubbed_wherever_they_are_among_options() -> None:
    client = FsspecClient(
        f"{SCHEME}://x",
        {**OPTIONS, "headers": [("Authorization", "Bearer-abcdefg")], "secret": 12345678},
        Retries(),
    )
    assert GuardedFileSystem.protocol == SCHEME
    assert client.scrubbed(f"{TOKEN} Bearer-abcdefg 12345678 1234") == "*** *** *** 1234"
    assert re.search("token", client.scrubbed("the token is wrong"))
