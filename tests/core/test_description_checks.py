"""What adapters and describers say is checked before anything relies on it, and errors name who said it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api, plugins
from dcp_core.arrays import ArrayAccess, NumpyAdapter
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME
from dcp_core.errors import AdapterError, UnsupportedValueError
from dcp_core.hookspecs import DescriberEntry, hookimpl
from dcp_core.planning.description_checks import description_problem
from dcp_core.planning.leaves import LocalTensor
from dcp_core.plugins import PluginRegistry

Change = Callable[[Any], Any]


def _matrix() -> Any:
    found = NumpyAdapter().describe(np.zeros((3, 2), np.float32))
    assert found is not None
    return found


def _rows(found: Any, rows: int = 2) -> Any:
    """The first rows of it, as a shard."""
    return replace(found, boxes=(Box((0, 0), (rows, 2)),), views=(found.views[0][:rows],), plain=False)


class _Access(ArrayAccess):
    pass


class _NoAccess:
    pass


_WRONG: dict[str, tuple[Change, str]] = {
    "a number": (lambda _: 5, "returned a int: it must be a LocalTensor, or None"),
    "a list": (lambda found: [found], "returned a list: it must be a LocalTensor, or None"),
    "no views": (lambda found: replace(found, views=()), "gave 1 boxes and 0 views: one a box"),
    "a numpy dtype": (lambda found: replace(found, dtype=np.dtype("f4")), r"the dtype dtype\('float32'\): it must be"),
    "a dtype's name": (lambda found: replace(found, dtype="float32"), "the dtype 'float32': it must be a DType, as"),
    "a list as shape": (lambda found: replace(found, global_shape=[3, 2]), r"\[3, 2\]: it must be a tuple of whole"),
    "floats in the shape": (lambda found: replace(found, global_shape=(3.0, 2)), r"\(3.0, 2\): it must be a tuple"),
    "a negative extent": (lambda found: replace(found, global_shape=(-3, 2)), r"\(-3, 2\): it must be a tuple"),
    "a flag in the shape": (lambda found: replace(found, global_shape=(3, True)), r"\(3, True\): it must be a tuple"),
    "a list of boxes": (lambda found: replace(found, boxes=list(found.boxes)), "a list as boxes: it must be a tuple"),
    "no box": (lambda found: replace(found, boxes=((0, 0),)), r"gave \(0, 0\) among its boxes: each must be a .*Box"),
    "a flat box": (
        lambda found: replace(_rows(found), boxes=(Box((0,), (3,)),)),
        r"Box\(offsets=\(0,\), sizes=\(3,\)\) of a tensor of shape \(3, 2\): a box has as many dimensions .*at \+ 1",
    ),
    "a box outside": (
        lambda found: replace(_rows(found), boxes=(Box((2, 0), (2, 2)),)),
        r"Box\(offsets=\(2, 0\), sizes=\(2, 2\)\) of a tensor of shape \(3, 2\): the box leaves the tensor",
    ),
    "a list as storage": (lambda found: replace(found, storage=[1]), r"the storage \[1\], which cannot be hashed"),
    "no access": (lambda found: replace(found, access=None), "gave None as access, which lacks host_array, read_out"),
    "a class as access": (
        lambda found: replace(found, access=_Access),
        r"gave the class _Access as access: it must be an object; write _Access\(...\)",
    ),
    "another access": (lambda found: replace(found, access=_NoAccess()), "as access, which lacks host_array"),
    "a plain shard": (
        lambda found: replace(_rows(found), plain=True),
        r"said plain=True of 4 of the 6 elements of a tensor of shape \(3, 2\): plain is for a value that every rank",
    ),
    "a plain nothing": (
        lambda found: replace(found, boxes=(), views=()),
        "said plain=True of 0 of the 6 elements",
    ),
}


class Thing:
    """A value of a foreign type."""


class Wrong(NumpyAdapter):
    """An adapter, and a describer, that says something wrong of things."""

    name = "wrong"
    change: Change = staticmethod(lambda found: found)

    def describe(self, value: Any) -> LocalTensor | None:
        found: LocalTensor | None = self.change(_matrix()) if isinstance(value, Thing) else super().describe(value)
        return found


def _registry(monkeypatch: pytest.MonkeyPatch) -> PluginRegistry:
    entry = DescriberEntry(f"{__name__}.Thing", framework="numpy", factory=f"{__name__}:Wrong")
    registry = PluginRegistry(lambda: [])
    registry.register(types.SimpleNamespace(dcp_describers=hookimpl(lambda: [entry])), "things")
    monkeypatch.setattr(api, "active_adapters", registry.active_adapters)
    return registry


@pytest.fixture
def _change() -> Iterator[None]:
    yield
    Wrong.change = staticmethod(lambda found: found)


@pytest.mark.usefixtures("_change")
@pytest.mark.parametrize("wrong", _WRONG)
def test_a_wrong_description_of_an_adapter_is_an_error_with_key_adapter_and_remedy(wrong: str, tmp_path: Path) -> None:
    change, problem = _WRONG[wrong]
    Wrong.change = staticmethod(change)
    told = rf"'w': Wrong\.describe .*{problem}.*the adapter 'wrong', asked about a value of type .*Thing: repair"
    api.save({"w": np.zeros((3, 2), np.float32)}, checkpoint_id=tmp_path / "right")
    for call, name in ((api.save, "wrong"), (api.load, "right")):
        with pytest.raises(AdapterError, match=told):
            call({"w": Thing()}, adapter=Wrong(), checkpoint_id=tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["right"]


@pytest.mark.usefixtures("_change")
@pytest.mark.parametrize("wrong", _WRONG)
def test_a_wrong_description_of_a_describer_is_an_error_with_key_plugin_and_remedy(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, problem = _WRONG[wrong]
    _registry(monkeypatch)
    Wrong.change = staticmethod(change)
    told = rf"'w': Wrong\.describe .*{problem}.*the describer of '.*Thing' of the plugin 'things' .*: repair it"
    api.save({"w": np.zeros((3, 2), np.float32)}, checkpoint_id=tmp_path / "right")
    for call, name in ((api.save, "wrong"), (api.load, "right")):
        with pytest.raises(AdapterError, match=told):
            call({"w": Thing()}, checkpoint_id=tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["right"]


@pytest.mark.usefixtures("_change")
def test_a_describer_that_raises_is_named_with_its_plugin_and_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _registry(monkeypatch)
    Wrong.change = staticmethod(lambda found: found.no_such_thing)
    told = r"'w': Wrong\.describe raised AttributeError: .*no_such_thing.*of the plugin 'things' .*type .*Thing"
    with pytest.raises(AdapterError, match=told):
        api.save({"w": Thing()}, checkpoint_id=tmp_path / "c")


@pytest.mark.usefixtures("_change")
def test_an_adapter_that_raises_is_named_with_the_key(tmp_path: Path) -> None:
    Wrong.change = staticmethod(lambda found: found.no_such_thing)
    with pytest.raises(AdapterError, match=r"'w': Wrong\.describe raised AttributeError: .*the adapter 'wrong'"):
        api.save({"w": Thing()}, adapter=Wrong(), checkpoint_id=tmp_path / "c")


@pytest.mark.usefixtures("_change")
def test_a_describer_that_declines_a_value_of_its_very_type_is_an_error_and_nothing_is_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = _registry(monkeypatch)
    Wrong.change = staticmethod(lambda found: None)
    told = r"'w': Wrong\.describe returned None for a value of the type that it is registered for.*plugin 'things'"
    with pytest.raises(AdapterError, match=told):
        api.save({"w": Thing()}, checkpoint_id=tmp_path / "c")
    derived = type("Derived", (Thing,), {})()
    assert registry.active_adapters().describe(derived) is None  # of another type: it may be left to others
    assert registry.active_adapters().describe(np.zeros(2)) is not None


@pytest.mark.parametrize("said", [True, False, 0, ["read-only"]])
def test_a_writable_problem_that_is_no_sentence_is_an_error(said: Any, tmp_path: Path) -> None:
    class Access(ArrayAccess):
        def writable_problem(self, view: Any) -> Any:
            return said

    class Adapter(NumpyAdapter):
        name = "flags"

        def describe(self, value: Any) -> LocalTensor | None:
            found = super().describe(value)
            return None if found is None else replace(found, access=Access(found.dtype))

    state = {"w": np.zeros(3)}
    api.save(state, checkpoint_id=tmp_path / "c")
    with pytest.raises(AdapterError, match=r"'w': .*Access.writable_problem returned .*: it must say in words"):
        api.load(state, adapter=Adapter(), checkpoint_id=tmp_path / "c")


def test_what_is_right_has_no_problem() -> None:
    found = _matrix()
    empty = NumpyAdapter().describe(np.zeros((3, 0)))
    numbers = replace(_rows(found), global_shape=tuple(np.array([3, 2])))
    parts = replace(found, boxes=(Box((0, 0), (1, 2)), Box((1, 0), (2, 2))), views=(found.views[0][:1],) * 2)
    for right in (found, _rows(found), empty, numbers, parts, replace(_rows(found), boxes=(), views=())):
        assert description_problem(right) is None
    assert BY_NAME["float32"] == found.dtype


@pytest.mark.usefixtures("_change")
def test_errors_of_dcp_that_a_describer_raises_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(found: LocalTensor) -> None:
        raise UnsupportedValueError("a sum that is not reduced yet")

    Wrong.change = staticmethod(refuse)
    with pytest.raises(UnsupportedValueError, match="^a sum that is not reduced yet$"):
        _registry(monkeypatch).active_adapters().describe(Thing())
    assert plugins.active_adapters().describe(Thing()) is None
