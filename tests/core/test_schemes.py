"""A storage that a plugin registers by its scheme serves save, load and read by URL."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api, plugins
from dcp_core.errors import AdapterError, ArgumentError, NotFoundError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.hookspecs import StorageEntry, hookimpl
from dcp_core.plugins import PluginRegistry
from dcp_core.storage.base import Storage
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core import rank_jobs


def open_toy(url: str) -> Storage:
    """A storage behind a scheme of its own: `toy:///path`."""
    return LocalStorage(url.partition("://")[2])


def open_broken(url: str) -> Storage:
    raise OSError(f"no credentials for {url}")


def registry() -> PluginRegistry:
    made = PluginRegistry(lambda: ())
    for scheme in ("toy", "broken"):
        entry = StorageEntry(scheme, factory=f"tests.core.test_schemes:open_{scheme}")
        plugin = types.SimpleNamespace(dcp_storages=hookimpl(lambda entry=entry: [entry]))
        made.register(plugin, f"plugin of {scheme}")
    return made


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    use_registry(monkeypatch)


def use_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    from dcp_core.recipes import read

    found = registry()
    for module in (api, read, plugins):
        monkeypatch.setattr(module, "open_storage", found.open_storage)


def state(value: float) -> dict[str, Any]:
    return {"weight": np.full((8, 4), value), "step": int(value)}


def test_a_checkpoint_is_saved_loaded_and_read_by_url(tmp_path: Path) -> None:
    url = f"toy://{tmp_path}/step 1"
    api.save(state(3.0), checkpoint_id=url)
    assert (tmp_path / "step 1" / ".metadata").exists()
    target = state(0.0)
    api.load(target, checkpoint_id=url)
    assert target["step"] == 3
    assert (target["weight"] == 3.0).all()
    assert (api.read(url, "weight") == 3.0).all()


def test_a_save_in_the_background_goes_there_too(tmp_path: Path) -> None:
    api.async_save(state(4.0), checkpoint_id=f"toy://{tmp_path}/step").persist_completion.result(30)
    assert (api.read(f"TOY://{tmp_path}/step", "weight") == 4.0).all()


def test_one_writer_serves_urls_and_paths_in_turn(tmp_path: Path) -> None:
    writer, reader = FileSystemWriter(open_url=plugins.open_storage), FileSystemReader(open_url=plugins.open_storage)
    places = [f"toy://{tmp_path}/a", str(tmp_path / "b"), f"toy://{tmp_path}/c", f"file://{tmp_path}/d"]
    for value, place in enumerate(places):
        api.save(state(value), checkpoint_id=place, storage_writer=writer)
        target = state(-1)
        api.load(target, checkpoint_id=place, storage_reader=reader)
        assert target["step"] == value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d"]


def test_a_scheme_that_nobody_knows_is_a_bad_argument_that_says_where_to_look() -> None:
    with pytest.raises(ArgumentError, match=r"scheme 's9'; .*an installed plugin knows \(`dcp plugins` lists them\)"):
        api.save(state(1.0), checkpoint_id="s9://bucket/x")
    with pytest.raises(ArgumentError, match="scheme 's9'"):
        api.load(state(1.0), checkpoint_id="s9://bucket/x")
    with pytest.raises(ArgumentError, match="scheme 's9'"):
        api.read("s9://bucket/x", "weight")


def test_a_storage_that_cannot_be_opened_names_the_plugin_and_the_cause() -> None:
    with pytest.raises(AdapterError, match=r"plugin 'plugin of broken' .*OSError: no credentials for broken://x"):
        api.save(state(1.0), checkpoint_id="broken://x")


def test_nothing_at_a_url_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        api.load(state(0.0), checkpoint_id=f"toy://{tmp_path}/nothing")


def save_and_load_by_url(context: RankContext, directory: str) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        use_registry(patch)
        url = f"toy://{directory}/step"
        rank_jobs.save({"shared": np.ones(4), f"own{context.rank}": np.full(3, float(context.rank))}, url)
        target = {"own0": np.zeros(3), "own1": np.zeros(3)}
        rank_jobs.load(target, url)
        return [float(array[0]) for array in target.values()]


def test_ranks_save_and_load_by_url(tmp_path: Path) -> None:
    assert run_ranks(save_and_load_by_url, 2, str(tmp_path)) == [[0.0, 1.0]] * 2
