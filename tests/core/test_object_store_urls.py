"""What a URL names: which file system, when none is there, and what of it is never shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.errors import ArgumentError, ArgumentsDifferError, NotFoundError, StorageError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.manager.latest import latest_checkpoint
from dcp_core.manager.manager import CheckpointManager
from dcp_core.storage.fsspec_client import FsspecClient, time_of
from dcp_core.storage.fsspec_storage import FsspecStorage, open_fsspec_url
from dcp_core.storage.retries import Retries
from dcp_core.storage.urls import is_url, passwords_in, redacted, schemes_of
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.rank_jobs import error_of, save

PASSWORD = "pass-word-1"


def state(value: float) -> dict[str, Any]:
    return {"weight": np.full((8, 4), value), "step": int(value)}


@pytest.mark.parametrize(
    "template",
    [
        "memory://urls/{name}",
        "local://{path}/step 1",
        "dir::file://{path}/step",
        "simplecache::memory://urls/chained {name}",
        "simplecache::file://{path}/cached",
    ],
)
def test_a_checkpoint_goes_wherever_fsspec_does(template: str, tmp_path: Path) -> None:
    url = template.format(path=tmp_path, name=tmp_path.name)
    for value in (1.0, 2.0):
        with pytest.raises(NotFoundError):
            api.load(state(0.0), checkpoint_id=f"{url} none")
        step = f"{url}-{value:g}"  # a cache that never looks again needs a place of its own for each
        api.save(state(value), checkpoint_id=step)
        target = state(0.0)
        api.load(target, checkpoint_id=step)
        assert target["step"] == value and (target["weight"] == value).all()
        assert (api.read(step, "weight") == value).all()
        assert all(name == ".metadata" or len(name.split(".")[1]) == 32 for name in FsspecStorage(step).list())


def test_a_rank_that_saves_alone_does_so_there_too() -> None:
    url = "memory://urls/alone"
    for value in (1.0, 2.0):
        api.save(state(value), checkpoint_id=url, use_collectives=False)
        target = state(0.0)
        api.load(target, checkpoint_id=url, use_collectives=False)
        assert target["step"] == value
    assert "0.metadata" in FsspecStorage(url).list()
    api.save(state(3.0), checkpoint_id=url)
    assert "0.metadata" not in FsspecStorage(url).list()
    assert len(FsspecStorage(url).list()) == 3


def test_a_save_in_the_background_to_memory_is_seen_by_its_process() -> None:
    url = "memory://urls/background"
    api.async_save(state(4.0), checkpoint_id=url).get_result(30)
    assert (api.read(url, "weight") == 4.0).all()


def test_a_writer_and_a_reader_take_a_url_by_themselves() -> None:
    url = "memory://urls/alone by class"
    api.save(state(5.0), storage_writer=FileSystemWriter(url))
    target = state(0.0)
    api.load(target, storage_reader=FileSystemReader(url))
    assert target["step"] == 5


def test_without_fsspec_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*(name for name in sys.modules if name.partition(".")[0] == "fsspec"), "fsspec"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ArgumentError, match=r'python3 -m pip install "hyper-dcp\[fsspec\]"'):
        api.save(state(1.0), checkpoint_id="memory://urls/none")


def test_a_scheme_whose_package_is_missing_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ArgumentError, match=r"'gs://bucket/x' needs a package that is not installed: .*gcsfs"):
        api.load(state(1.0), checkpoint_id="gs://bucket/x")


@pytest.mark.parametrize("options", [{"no such option": 1}, 5])
def test_options_that_cannot_be_understood_are_a_bad_argument(options: Any) -> None:
    with pytest.raises(ArgumentError):
        FileSystemWriter("s3://bucket/x" if options != 5 else None, storage_options=options).initialize_writer(
            "sftp://127.0.0.1:9/x"
        )


@pytest.mark.parametrize("url", ["", "no url", "memory:/x", "a::b", "memory://x\0y"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ArgumentError, match="no URL"):
        FsspecStorage(url)
    assert open_fsspec_url("step_1") is None


def test_a_url_never_becomes_a_directory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lost = (Path("s3://bucket/x"), "s3:/bucket/x", "file:/x", "simplecache::s3:/x")
    for place, text in (
        ("s3://", "names no bucket"),
        ("gs:///", "names no bucket"),
        ("nope::memory://x", "'nope::memory'"),
        ("nope::file:///x", "'nope::file'"),
        *((place, "lost a slash") for place in lost),
    ):
        for call in (
            lambda place=place: api.save(state(1.0), checkpoint_id=place),
            lambda place=place: api.load(state(1.0), checkpoint_id=place),
            lambda place=place: latest_checkpoint(place),
        ):
            with pytest.raises(ArgumentError, match=text):
                call()
    assert list(tmp_path.iterdir()) == []
    api.save(state(1.0), checkpoint_id="./s3:/x")  # a strange name, but a path
    assert (api.read(tmp_path / "s3:" / "x", "weight") == 1.0).all()


def test_the_root_of_a_store_is_a_place_too_and_schemes_have_no_case() -> None:
    api.save(state(2.0), checkpoint_id="memory://")
    assert (api.read("Memory:///", "weight") == 2.0).all()
    manager = CheckpointManager("MEMORY://", keep=1)
    manager.save(1, state(1.0))
    manager.save(2, state(2.0))
    assert manager.latest() == "memory://step_2" and manager.resume(state(0.0)) == 2
    assert FsspecStorage("memory://").list_directories().count("step_1") == 0
    for name in FsspecStorage("memory://step_2").list():
        FsspecStorage("memory://step_2").remove(name)


@pytest.mark.parametrize(
    ("scheme", "package"),
    [("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs"), ("hdfs", "pyarrow"), ("sftp", "paramiko")],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    scheme: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*arguments: object, **options: object) -> None:
        raise ImportError(f"no {package}")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(ArgumentError, match=f"python3 -m pip install {package}"):
        FsspecStorage(f"{scheme}://nobody/at/{scheme}")


def test_hdfs_without_java_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_java(*arguments: object, **options: object) -> None:
        raise OSError("Unable to load libjvm: libjvm.so: cannot open shared object file")  # as pyarrow says it

    monkeypatch.setattr("fsspec.core.url_to_fs", without_java)
    with pytest.raises(ArgumentError, match=r"'hdfs://nobody/at': .*libjvm.*set JAVA_HOME, HADOOP_HOME and CLASSPATH"):
        FsspecStorage("hdfs://nobody/at")
    with pytest.raises(ArgumentError, match="makes no file system") as caught:
        FsspecStorage("gs://nobody/at/home")
    assert "JAVA_HOME" not in str(caught.value)


# -- what is not shown ----------------------------------------------------------------------------------------------


def test_passwords_and_signatures_of_urls_are_hidden() -> None:
    text = f"cannot open ftp://me:{PASSWORD}@host:21/a/b or https://host/x?X-Sig=abc&b=c: 404"
    assert redacted(text) == "cannot open ftp://me:***@host:21/a/b or https://host/x?***: 404"
    assert redacted("s3://bucket/step 1") == "s3://bucket/step 1"
    assert redacted("/a/path:with@signs") == "/a/path:with@signs"
    assert passwords_in(f"simplecache::sftp://me:{PASSWORD}@host/x") == (PASSWORD,)
    assert schemes_of(f"simplecache::SFTP://me:{PASSWORD}@host/x") == ("simplecache", "sftp")
    assert is_url("simplecache::s3://x") and not is_url("a::b/c")


@pytest.mark.parametrize("scheme", ["s9", "gs", "ftp"])
def test_no_error_shows_a_password(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    url = f"{scheme}://me:{PASSWORD}@127.0.0.1:9/step"
    for call in (
        lambda: api.save(state(1.0), checkpoint_id=url),
        lambda: api.load(state(1.0), checkpoint_id=url),
        lambda: api.read(url, "weight"),
    ):
        with pytest.raises((ArgumentError, StorageError)) as caught:
            call()
        seen: BaseException | None = caught.value
        assert "127.0.0.1" in str(seen)
        while seen is not None:
            assert PASSWORD not in repr(seen)
            seen = None if seen.__suppress_context__ else seen.__context__ or seen.__cause__


def _differ(context: RankContext) -> tuple[type[BaseException], str]:
    return error_of(save, {"a": np.ones(3)}, f"memory://me:{PASSWORD}@host/step {context.rank}")


def test_ranks_that_name_different_urls_are_told_without_passwords() -> None:
    for kind, text in run_ranks(_differ, 2):
        assert kind is ArgumentsDifferError
        assert "memory://me:***@host/step" in text and PASSWORD not in text


def test_what_a_client_says_is_scrubbed_of_secret_options() -> None:
    options = {
        "secret": "abcdefg", "nested": {"account_key": "hijklmn"}, "endpoint_url": "http://127.0.0.1:1", "n": 3,
    }  # fmt: skip
    client = FsspecClient("memory://x", {}, Retries())
    assert client.scrubbed("abcdefg") == "abcdefg"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FsspecClient, "_file_system", lambda self: None)
        client = FsspecClient("memory://x", options, Retries())
    assert client.scrubbed("no https://host/x?sig=abc") == "no https://host/x?***"
    assert client.scrubbed("abcdefg of hijklmn at http://127.0.0.1:1") == "*** of *** at http://127.0.0.1:1"
    assert client.cause(ValueError()) is None


def test_times_come_in_many_shapes() -> None:
    assert time_of({"mtime": 5.5}) == 5.5
    assert time_of({"updated": "2026-01-02T03:04:05.500Z"}) == 1767323045.5
    assert time_of({"LastModified": "not a time", "created": 7}) == 7.0
    assert time_of({"size": 3}) is None
