"""`DataCopier`: how values that have no exact encoding are copied before an asynchronous save returns."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from dcp_core.background import data_copier
from dcp_core.background.arena import Arena
from dcp_core.background.data_copier import DataCopier, StagingEncoding
from dcp_core.errors import ArgumentError, DTypeMismatchError, RankFailedError, UnsupportedValueError
from dcp_core.formats.objects import decode_value, encode_value
from dcp_core.hookspecs import StagingCopierEntry, hookimpl
from dcp_core.plugins import PluginRegistry
from dcp_core.recipes.job import ObjectEncoding
from dcp_core.state_path import PerRank
from tests.core.staging_samples import staged_values


class Base:
    def __init__(self, content: Any) -> None:
        self.content = content


class Middle(Base):
    pass


class Derived(Middle):
    pass


class Other:
    def __init__(self) -> None:
        self.content = np.arange(3)


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> PluginRegistry:
    """Registries of this test alone."""
    registry = PluginRegistry(lambda: ())
    monkeypatch.setattr(data_copier, "_COPIERS", {})
    monkeypatch.setattr(data_copier, "_named", set())
    monkeypatch.setattr(data_copier, "staging_copier", registry.staging_copier)
    return registry


def encoded(value: Any) -> bytes:
    return StagingEncoding().encode(value, "the key")


def decoded(value: Any, *allow: type) -> Any:
    return decode_value(encoded(value), allow=allow)


def copy_from_a_plugin(value: Base) -> object:
    return "plugin", value.content


class Plugin:
    @hookimpl
    def dcp_staging_copiers(self) -> list[StagingCopierEntry]:
        return [StagingCopierEntry(f"{__name__}.Middle", f"{__name__}:copy_from_a_plugin")]


def test_a_registered_function_makes_what_is_stored() -> None:
    @DataCopier.register(Base)
    def copy_base(value: Base) -> dict[str, Any]:
        return {"content": list(value.content)}

    assert copy_base(Base((1, 2))) == {"content": [1, 2]}
    assert decoded(Base((3, 4))) == {"content": [3, 4]}


def test_the_exact_type_comes_first_and_then_the_most_derived_base() -> None:
    DataCopier.register(object)(lambda value: "object")
    DataCopier.register(Middle)(lambda value: "middle")
    DataCopier.register(Base)(lambda value: "base")
    assert [decoded(kind(0)) for kind in (Base, Middle, Derived)] == ["base", "middle", "middle"]
    assert decoded(Other()) == "object"
    DataCopier.register(Derived)(lambda value: "derived")
    DataCopier.register(Base)(lambda value: "a later function")
    assert [decoded(kind(0)) for kind in (Base, Middle, Derived)] == ["a later function", "middle", "derived"]


def test_a_plugin_serves_types_that_nobody_registered(plugins: PluginRegistry) -> None:
    plugins.register(Plugin(), "test")
    assert decoded(Derived(7)) == ("plugin", 7)
    assert decoded(Middle(8)) == ("plugin", 8)
    DataCopier.register(Base)(lambda value: "by hand")
    assert decoded(Derived(7)) == "by hand"


def test_values_inside_containers_are_copied_too() -> None:
    DataCopier.register(Base)(lambda value: ["copy", value.content])
    assert decoded({"a": (Base(1), [Base(2)])}) == {"a": (["copy", 1], [["copy", 2]])}
    assert decoded([Base(Base(3))]) == [["copy", ["copy", 3]]]


def test_a_copy_that_has_no_exact_encoding_is_pickled_and_not_copied_again() -> None:
    calls: list[Base] = []

    @DataCopier.register(Base)
    def copy_base(value: Base) -> Base:
        calls.append(value)
        return Base([*value.content, "copied"])

    value = Base(["x"])
    found = decoded(value, Base)
    assert isinstance(found, Base) and found.content == ["x", "copied"]
    assert calls == [value]
    DataCopier.register(Base)(lambda value: value)
    assert decoded(value, Base).content == ["x"]


def test_values_with_an_exact_encoding_are_not_handed_to_copiers() -> None:
    DataCopier.register(object)(lambda value: "not this")
    values = [{"a": [1, 2.5, None, (3,)]}, {4}, np.arange(3), np.float32(2), b"x"]
    for value in values:
        assert encoded(value) == encode_value(value)


def test_a_type_without_a_copier_is_copied_whole_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    content: dict[str, Any] = {"array": np.arange(3), "list": [1]}
    value, other = Base(content), Derived([2])
    with caplog.at_level(logging.WARNING, "dcp.background"):
        blob = encoded(value)
        for _ in range(3):
            encoded([Base(1), other])
    content["array"] += 7
    content["list"].append(2)
    found: Any = decode_value(blob, allow=[Base])
    assert found.content["list"] == [1] and found.content["array"].tolist() == [0, 1, 2]
    kinds = [f"{__name__}.{kind}" for kind in ("Base", "Derived")]
    assert len(caplog.messages) == 2
    for message, kind, name in zip(caplog.messages, kinds, ("Base", "Derived"), strict=True):
        assert f"'the key': no copier is registered for {kind}" in message
        assert f"@DataCopier.register({name})" in message


def test_what_a_copier_raises_names_the_key_and_the_type() -> None:
    @DataCopier.register(Base)
    def copy_base(value: Base) -> object:
        raise value.content

    with pytest.raises(RankFailedError, match=r"copier of .*test_data_copier\.Base for 'the key' raised KeyError: 'k'"):
        encoded([Base(KeyError("k"))])
    with pytest.raises(DTypeMismatchError, match="^ours$"):
        encoded(Base(DTypeMismatchError("ours")))


def test_a_copier_that_never_ends_wrapping_is_refused() -> None:
    DataCopier.register(Base)(lambda value: [Base(value.content)])
    with pytest.raises(UnsupportedValueError, match="'the key'.*nest more than 64 deep"):
        encoded(Base(1))


def test_only_types_can_be_registered() -> None:
    wrong: list[Any] = [lambda value: value, Base(1), "Base", None]
    for value in wrong:
        with pytest.raises(ArgumentError, match=r"takes a type.*@DataCopier\.register\(MyType\)"):
            DataCopier.register(value)


def test_in_all_else_the_codec_is_that_of_a_save_that_waits() -> None:
    DataCopier.register(Base)(lambda value: 1)
    ours, plain = StagingEncoding(), ObjectEncoding()
    for value in ({"a": {1, 2}}, Other(), [Other()], 5):
        assert ours.digest(value) == plain.digest(value)
        assert ours.needs_pickle(value) == plain.needs_pickle(value)
    assert ours.decode(ours.encode({1}, ""), "") == {1}


def test_a_value_with_a_copier_counts_as_its_copy_when_ranks_compare_values() -> None:
    DataCopier.register(Base)(lambda value: {"content": value.content})
    ours, plain = StagingEncoding(), ObjectEncoding()
    for value, copy in ((Base(1), {"content": 1}), ([Base(2), 3], [{"content": 2}, 3])):
        assert ours.digest(value) == plain.digest(copy)
        assert not ours.needs_pickle(value)
        assert ours.encode(value, "a") == plain.encode(copy, "a")
    assert ours.digest(Base(1)) != ours.digest(Base(2))


def test_planners_encode_with_it_what_is_staged() -> None:
    DataCopier.register(Base)(lambda value: ["copy", value.content])
    arena = Arena()
    found = staged_values({"a": Base(1), "own": PerRank(Base(2)), "plain": "x"}, arena)
    assert {name: decode_value(blob) for name, blob in found.items() if isinstance(blob, bytes)} == {
        "a": ["copy", 1], "own": ["copy", 2], "plain": "x",
    }  # fmt: skip
    arena.close()
