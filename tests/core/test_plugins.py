"""Plugins are found late, checked, and cannot hurt each other."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api, plugins
from dcp_core.adapter import Adapter, Describer
from dcp_core.arrays import NumpyAdapter
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME
from dcp_core.errors import AdapterError
from dcp_core.formats import object_codecs, objects
from dcp_core.formats.objects import ObjectCodec
from dcp_core.hookspecs import (
    HOOKS,
    AdapterEntry,
    DescriberEntry,
    ObjectCodecEntry,
    StagingCopierEntry,
    StorageEntry,
    hookimpl,
)
from dcp_core.planning.leaves import LocalTensor
from dcp_core.plugin_checks import _members, protocol_problem
from dcp_core.plugins import PluginRegistry

_TOY = "toyframework"


class ToyAdapter(NumpyAdapter):
    """A whole framework for these tests: the module `toyplugin` that holds it is made by a fixture."""

    name = "toy"
    made = 0

    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.01)
        type(self).made += 1


class Wrapper:
    """A foreign tensor type."""

    def __init__(self, array: np.ndarray[Any, np.dtype[Any]]) -> None:
        self.array = array


class DerivedWrapper(Wrapper):
    """A subclass of it."""


class WrapperDescriber:
    """Describes both."""

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe what is wrapped."""
        return NumpyAdapter().describe(value.array)


class Chatty:
    """A value with a codec and a staging copier."""


def chatty_codec() -> ObjectCodec:
    return ObjectCodec("toyframework.Chatty", "toyframework.Chatty", lambda value: None, lambda plain: Chatty())


def copy_wrapper(value: Wrapper) -> Wrapper:
    return Wrapper(value.array.copy())


def broken_factory() -> object:
    raise OSError("no such library")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An importable module with the factories above, and a framework that has been imported."""
    module = types.ModuleType("toyplugin")
    for member in (ToyAdapter, WrapperDescriber, chatty_codec, copy_wrapper, broken_factory):
        setattr(module, member.__name__, member)
    framework = types.ModuleType(_TOY)
    for kind in (Wrapper, DerivedWrapper, Chatty):
        monkeypatch.setattr(kind, "__module__", _TOY)
        setattr(framework, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "toyplugin", module)
    monkeypatch.setitem(sys.modules, _TOY, framework)
    ToyAdapter.made = 0
    return module


def _plugin(**hooks: Callable[..., Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{f"dcp_{name}": hookimpl(hook) for name, hook in hooks.items()})


def _toy_adapter(name: str = "toy", factory: str = "toyplugin:ToyAdapter") -> Callable[[], list[AdapterEntry]]:
    return lambda: [AdapterEntry(name, framework=_TOY, factory=factory)]


def _with_argument(argument: object) -> tuple[AdapterEntry, ...]:
    return ()


def _registry(**found: object) -> PluginRegistry:
    """A registry over entry points; an exception as plugin is raised at its import."""

    class Point:
        def __init__(self, name: str, plugin: object) -> None:
            self.name, self.value, self.dist, self._plugin = name, f"{name}_module", None, plugin

        def load(self) -> object:
            if isinstance(self._plugin, (Exception, SystemExit)):
                raise self._plugin
            return self._plugin

    def find() -> Iterable[EntryPoint]:
        return [Point(name, plugin) for name, plugin in found.items()]  # type: ignore[misc]  # a stand-in that has what is used

    return PluginRegistry(find)


def _names(registry: PluginRegistry) -> list[str]:
    return [adapter.name for adapter in registry.active_adapters().adapters]


@pytest.mark.usefixtures("toy")
class TestAdapters:
    def test_the_numpy_adapter_is_built_in_and_comes_last(self) -> None:
        assert _names(_registry()) == ["numpy"]
        assert _names(_registry(toy=_plugin(adapters=_toy_adapter()))) == ["toy", "numpy"]

    def test_an_adapter_whose_framework_is_not_imported_stays_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        registry = _registry(toy=_plugin(adapters=_toy_adapter()))
        framework = sys.modules[_TOY]
        monkeypatch.delitem(sys.modules, _TOY)
        assert _names(registry) == ["numpy"]
        assert ToyAdapter.made == 0
        monkeypatch.setitem(sys.modules, _TOY, framework)
        assert _names(registry) == ["toy", "numpy"]

    def test_an_adapter_is_made_once_whatever_asks_for_it(self) -> None:
        registry = _registry(toy=_plugin(adapters=_toy_adapter()))
        first = registry.adapter_named("toy")
        assert registry.active_adapters().adapters[0] is first
        assert registry.active_adapters().adapters[0] is first
        assert ToyAdapter.made == 1

    def test_threads_that_ask_at_once_get_the_same_adapter(self) -> None:
        registry = _registry(toy=_plugin(adapters=_toy_adapter()))
        together = threading.Barrier(8, timeout=30)
        found: list[object] = []

        def ask() -> None:
            together.wait()
            found.append(registry.adapter_named("toy"))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, found))) == 1
        assert (len(found), ToyAdapter.made) == (8, 1)

    def test_an_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(AdapterError, match="registers the adapter 'jax'; known: numpy, toy"):
            _registry(toy=_plugin(adapters=_toy_adapter())).adapter_named("jax")

    def test_a_tensor_of_two_plugins_that_claim_one_name_is_an_error_that_names_both(
        self, toy: types.ModuleType
    ) -> None:
        class WrapperAdapter(ToyAdapter):
            def describe(self, value: Any) -> LocalTensor | None:
                return super().describe(value.array) if isinstance(value, Wrapper) else None

        vars(toy).update(WrapperAdapter=WrapperAdapter)
        found = {name: _plugin(adapters=_toy_adapter(factory="toyplugin:WrapperAdapter")) for name in ("one", "two")}
        registry = _registry(**found)
        message = (
            r"two plugins claim the adapter 'toy': 'one' \(one_module\) and 'two' \(two_module\); "
            "uninstall all but one of them"
        )
        adapters = registry.active_adapters()
        for _ in range(2):
            with pytest.raises(AdapterError, match=message):
                adapters.describe(Wrapper(np.zeros(2)))
        assert adapters.describe(np.zeros(2)) is not None
        assert adapters.describe(Chatty()) is None
        with pytest.raises(AdapterError, match=message):
            registry.adapter_named("toy")

    def test_names_claimed_twice_for_a_framework_that_is_not_imported_hurt_nobody(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, _TOY)
        registry = _registry(one=_plugin(adapters=_toy_adapter()), two=_plugin(adapters=_toy_adapter()))
        assert registry.active_adapters().describe(np.zeros(2)) is not None

    def test_a_plugin_that_claims_a_name_twice_is_told_so(self) -> None:
        twice = _plugin(adapters=lambda: _toy_adapter()() + _toy_adapter()())
        with pytest.raises(AdapterError, match=r"the plugin 'one' \(one_module\) claims the adapter 'toy' twice"):
            _registry(one=twice).adapter_named("toy")

    def test_the_built_in_name_cannot_be_claimed(self) -> None:
        registry = _registry(
            mine=_plugin(adapters=lambda: [AdapterEntry("numpy", _TOY, "dcp_core.arrays:NumpyAdapter")])
        )
        with pytest.raises(AdapterError, match=r"'numpy': 'dcp_core' \(built in\) and 'mine'"):
            registry.active_adapters().describe(np.zeros(1))

    @pytest.mark.parametrize(
        ("factory", "cause"),
        [
            ("toyplugin:broken_factory", "OSError: no such library"),
            ("toyplugin:missing", "AttributeError"),
            ("no_such_module_xyz:Adapter", "ModuleNotFoundError"),
            ("toyplugin:WrapperDescriber", "it lacks name, version, process_group, host_array, read_out"),
            ("dcp_core.arrays:NumpyAdapter", "the adapter is called 'numpy', not 'toy'"),
        ],
    )
    def test_an_adapter_that_cannot_be_made_is_left_out_with_one_warning(self, factory: str, cause: str) -> None:
        registry = _registry(toy=_plugin(adapters=_toy_adapter(factory=factory)))
        with pytest.warns(RuntimeWarning, match=cause):
            assert _names(registry) == ["numpy"]
        assert _names(registry) == ["numpy"]
        with pytest.raises(AdapterError, match=cause):
            registry.adapter_named("toy")

    def test_a_plugin_may_be_registered_by_hand(self) -> None:
        registry = _registry()
        registry.register(_plugin(adapters=_toy_adapter()), "mine")
        assert _names(registry) == ["toy", "numpy"]
        assert registry.plugins()[-1].origin == "registered by hand"
        with pytest.raises(AdapterError, match="cannot register the plugin 'bad'"):
            registry.register(_plugin(adapters=lambda: 5), "bad")


@pytest.mark.usefixtures("toy")
class TestBrokenPlugins:
    @pytest.mark.parametrize(
        ("plugin", "problem"),
        [
            (ImportError("needs libfoo"), "ImportError: needs libfoo"),
            (SystemExit("install libfoo"), "SystemExit: install libfoo"),
            (SyntaxError("invalid"), "SyntaxError"),
            (_plugin(adapters=lambda: 1 / 0), "ZeroDivisionError"),
            (_plugin(adapters=lambda: AdapterEntry("a", "b", "c:d")), "must return a sequence of AdapterEntry"),
            (_plugin(adapters=lambda: ["toyplugin:ToyAdapter"]), "must return a sequence of AdapterEntry"),
            (_plugin(adapters=lambda: None), "must return a sequence of AdapterEntry, found None"),
            (_plugin(storages=_toy_adapter()), "must return a sequence of StorageEntry"),
            (_plugin(adapters=lambda: [AdapterEntry("a", "b", "no colon")]), "an adapter's factory must look like"),
            (_plugin(nonsense=lambda: ()), "PluginValidationError: .*the hooks are dcp_adapters, dcp_describers, dcp_"),
            (_plugin(adapters=_with_argument), "PluginValidationError"),
            (types.SimpleNamespace(dcp_adapters=_toy_adapter()), r"dcp_adapters\(\) is not marked: write @hookimpl"),
            (types.SimpleNamespace(), "it implements no hook: the module that its entry point names must have"),
            (_plugin(), "it implements no hook"),
        ],
    )
    def test_it_is_skipped_with_one_warning_and_the_rest_serves(self, plugin: object, problem: str) -> None:
        registry = _registry(broken=plugin, toy=_plugin(adapters=_toy_adapter()))
        with pytest.warns(RuntimeWarning, match=f"skips the plugin 'broken' .*{problem}") as caught:
            assert _names(registry) == ["toy", "numpy"]
        assert len(caught) == 1
        assert _names(registry) == ["toy", "numpy"]  # and warns no more: warnings are errors here
        found = {record.name: record.problem for record in registry.plugins()}
        assert re.search(problem, str(found["broken"]))
        assert found["toy"] is None

    def test_nothing_of_a_half_broken_plugin_serves(self) -> None:
        half = _plugin(adapters=_toy_adapter(), storages=lambda: 1 / 0)
        registry = _registry(half=half)
        with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
            assert _names(registry) == ["numpy"]
        with pytest.raises(AdapterError, match="broken: 'half' .*ZeroDivisionError"):
            registry.adapter_named("toy")

    def test_warnings_as_errors_lose_no_plugin(self) -> None:
        registry = _registry(broken=ImportError("gone"), toy=_plugin(adapters=_toy_adapter()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning):
                registry.active_adapters()
        assert _names(registry) == ["toy", "numpy"]


@pytest.mark.usefixtures("toy")
class TestOtherEntries:
    @pytest.mark.parametrize(
        ("found", "problem"),
        [
            (5, "returned a int: it must be a LocalTensor, or None"),
            (
                LocalTensor((2,), BY_NAME["int8"], (Box((0,), (2,)),), (), NumpyAdapter()),
                "gave 1 boxes and 0 views: one a box",
            ),
            (
                LocalTensor((2, 1), BY_NAME["int8"], (Box((0,), (2,)),), (None,), NumpyAdapter()),
                r"gave .*\(2,\)\) of a tensor of shape \(2, 1\)",
            ),
        ],
    )
    def test_what_a_describer_says_is_checked(self, toy: types.ModuleType, found: object, problem: str) -> None:
        vars(toy).update(Wrong=type("Wrong", (), {"describe": lambda self, value: found}))
        entry = DescriberEntry(f"{_TOY}.Wrapper", framework=_TOY, factory="toyplugin:Wrong")
        adapters = _registry(toy=_plugin(describers=lambda: [entry])).active_adapters()
        with pytest.raises(AdapterError, match=f"Wrong.describe {problem}"):
            adapters.describe(Wrapper(np.zeros(1)))

    def test_a_describer_is_asked_for_its_type_and_subclasses_only(self) -> None:
        entry = DescriberEntry(f"{_TOY}.Wrapper", framework=_TOY, factory="toyplugin:WrapperDescriber")
        adapters = _registry(toy=_plugin(describers=lambda: [entry])).active_adapters()
        for kind in (Wrapper, DerivedWrapper):
            found = adapters.describe(kind(np.zeros((2, 3))))
            assert found is not None
            assert found.boxes == (Box((0, 0), (2, 3)),)
        assert adapters.describe(Chatty()) is None
        plain = adapters.describe(np.zeros(4))
        assert plain is not None
        assert plain.global_shape == (4,)

    def test_a_describer_is_asked_whatever_framework_it_names(self) -> None:
        entry = DescriberEntry(f"{_TOY}.Wrapper", framework="nosuchframework", factory="toyplugin:WrapperDescriber")
        adapters = _registry(toy=_plugin(describers=lambda: [entry])).active_adapters()
        assert adapters.describe(Wrapper(np.zeros(1))) is not None

    def test_a_value_whose_describer_is_broken_is_an_error_and_other_values_are_not(
        self, toy: types.ModuleType
    ) -> None:
        calls: list[int] = []

        def broken() -> object:
            calls.append(1)
            raise OSError("no such library")

        vars(toy).update(broken=broken)
        entry = DescriberEntry(f"{_TOY}.Wrapper", framework=_TOY, factory="toyplugin:broken")
        registry = _registry(toy=_plugin(describers=lambda: [entry]))
        adapters = registry.active_adapters()
        message = (
            r"the describer of 'toyframework.Wrapper' of the plugin 'toy' \(toy_module\) cannot be made by "
            r"toyplugin:broken: OSError: no such library; repair the plugin \(`dcp plugins --check`"
        )
        for kind in (Wrapper, DerivedWrapper, Wrapper):
            with pytest.raises(AdapterError, match=message):
                adapters.describe(kind(np.zeros(1)))
        assert calls == [1]  # a state may have thousands of such values
        assert adapters.describe(np.zeros(1)) is not None
        assert adapters.describe(Chatty()) is None
        vars(toy).update(broken=WrapperDescriber)
        assert registry.active_adapters().describe(Wrapper(np.zeros(1))) is not None

    def test_a_broken_describer_of_a_base_does_not_hurt_a_subclass_that_has_its_own(self) -> None:
        entries = [
            DescriberEntry(f"{_TOY}.Wrapper", framework=_TOY, factory="toyplugin:broken_factory"),
            DescriberEntry(f"{_TOY}.DerivedWrapper", framework=_TOY, factory="toyplugin:WrapperDescriber"),
        ]
        adapters = _registry(toy=_plugin(describers=lambda: entries)).active_adapters()
        assert adapters.describe(DerivedWrapper(np.zeros(1))) is not None

    def test_a_value_whose_type_is_registered_under_another_name_is_an_error(self) -> None:
        vars(sys.modules[_TOY]).update(Again=Wrapper, five=5)
        entries = [
            DescriberEntry(f"{_TOY}.{name}", framework=_TOY, factory="toyplugin:WrapperDescriber")
            for name in ("Again", "Gone", "five", "five.real")
        ]
        adapters = _registry(toy=_plugin(describers=lambda: entries)).active_adapters()
        assert adapters.describe(np.zeros(1)) is not None
        assert adapters.describe(Chatty()) is None
        for kind in (Wrapper, DerivedWrapper):
            with pytest.raises(
                AdapterError, match=r"plugin 'toy' .*: toyframework.Again is .*write 'toyframework.Wrapper'"
            ):
                adapters.describe(kind(np.zeros(1)))
        entries.append(DescriberEntry(f"{_TOY}.Wrapper", framework=_TOY, factory="toyplugin:WrapperDescriber"))
        assert _registry(toy=_plugin(describers=lambda: entries)).active_adapters().describe(Wrapper(np.zeros(1)))

    def test_a_value_that_two_describers_claim_is_an_error_that_names_both(self) -> None:
        def plugin(*names: str) -> types.SimpleNamespace:
            return _plugin(
                describers=lambda: [DescriberEntry(f"{_TOY}.{of}", _TOY, "toyplugin:WrapperDescriber") for of in names]
            )

        registry = _registry(one=plugin("Wrapper"), two=plugin("Wrapper", "DerivedWrapper"))
        adapters = registry.active_adapters()
        assert adapters.describe(DerivedWrapper(np.zeros(1))) is not None
        assert adapters.describe(np.zeros(1)) is not None
        with pytest.raises(
            AdapterError,
            match=r"two plugins claim the describer of 'toyframework.Wrapper': 'one' \(one_module\) and "
            r"'two' \(two_module\); uninstall all but one of them$",
        ):
            adapters.describe(Wrapper(np.zeros(1)))

    @pytest.mark.parametrize(
        ("entry", "problem"),
        [
            (
                ObjectCodecEntry(f"{_TOY}.Chatty", "toyplugin:ToyPlain"),
                "expected an ObjectCodec of toyframework.Chatty",
            ),
            (
                ObjectCodecEntry(f"{_TOY}.Other", "toyplugin:chatty_codec"),
                "expected an ObjectCodec of toyframework.Other",
            ),
            (ObjectCodecEntry(f"{_TOY}.Chatty", "toyplugin:nameless"), "'Chatty' must look like 'framework.Type'"),
            (StagingCopierEntry(f"{_TOY}.Wrapper", "toyplugin:not_callable"), "5 cannot be called"),
            (
                StagingCopierEntry(f"{_TOY}.Wrapper", "toyplugin:WrapperDescriber"),
                r"WrapperDescriber\(\) must take one argument, the value",
            ),
        ],
    )
    def test_what_a_factory_makes_must_be_of_its_kind(self, toy: types.ModuleType, entry: Any, problem: str) -> None:
        nameless = ObjectCodec("Chatty", f"{_TOY}.Chatty", str, str)
        vars(toy).update(ToyPlain=type("ToyPlain", (), {}), not_callable=5, nameless=lambda: nameless)
        hooks = {ObjectCodecEntry: "object_codecs", StagingCopierEntry: "staging_copiers"}
        registry = _registry(toy=_plugin(**{hooks[type(entry)]: lambda: [entry]}))

        def use_all() -> None:
            registry.activate_codecs()
            registry.staging_copier(Wrapper)

        with pytest.warns(RuntimeWarning, match=problem):
            use_all()
        use_all()

    def test_codecs_are_registered_once_their_module_is_imported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        registered: list[ObjectCodec] = []
        monkeypatch.setattr(plugins, "register_codec", registered.append)
        entry = ObjectCodecEntry(f"{_TOY}.Chatty", factory="toyplugin:chatty_codec")
        registry = _registry(toy=_plugin(object_codecs=lambda: [entry]))
        framework = sys.modules[_TOY]
        monkeypatch.delitem(sys.modules, _TOY)
        registry.activate_codecs()
        assert registered == []
        monkeypatch.setitem(sys.modules, _TOY, framework)
        registry.activate_codecs()
        registry.activate_codecs()
        assert [codec.type_name for codec in registered] == [f"{_TOY}.Chatty"]
        assert callable(objects.register_codec)

    def test_a_value_that_two_codecs_claim_can_be_neither_stored_nor_loaded_and_others_can(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for known in ("_BY_TYPE", "_BY_NAME"):
            monkeypatch.setattr(object_codecs, known, dict(getattr(object_codecs, known)))
        registry = _registry()

        def register(name: str) -> None:
            entry = ObjectCodecEntry(f"{_TOY}.Chatty", factory="toyplugin:chatty_codec")
            registry.register(_plugin(object_codecs=lambda: [entry]), name)
            registry.activate_codecs()

        register("one")
        blob = objects.encode_value([Chatty()])
        register("two")
        assert objects.decode_value(objects.encode_value([1, "a"])) == [1, "a"]
        message = (
            r"two plugins claim the object codec of 'toyframework.Chatty': 'one' .* and 'two' .*; uninstall all but"
        )
        with pytest.raises(AdapterError, match=message):
            objects.encode_value([Chatty()])
        with pytest.raises(AdapterError, match=message):
            objects.decode_value(blob)

    def test_a_codec_for_a_type_of_the_core_is_left_out_with_one_warning(self, toy: types.ModuleType) -> None:
        vars(toy).update(date_codec=lambda: ObjectCodec("toy.date", "datetime.date", str, str))
        registry = _registry(
            toy=_plugin(object_codecs=lambda: [ObjectCodecEntry("datetime.date", "toyplugin:date_codec")])
        )
        day = datetime.date(2026, 1, 2)
        with pytest.warns(
            RuntimeWarning, match="goes on without a codec of the plugin 'toy' .*two codecs for the type"
        ):
            registry.activate_codecs()
        registry.activate_codecs()
        assert objects.decode_value(objects.encode_value(day)) == day

    def test_a_type_that_two_copiers_claim_is_an_error_and_others_are_not(self) -> None:
        def plugin(*names: str) -> types.SimpleNamespace:
            return _plugin(
                staging_copiers=lambda: [StagingCopierEntry(f"{_TOY}.{of}", "toyplugin:copy_wrapper") for of in names]
            )

        registry = _registry(one=plugin("Wrapper"), two=plugin("Wrapper", "DerivedWrapper"))
        assert registry.staging_copier(DerivedWrapper) is copy_wrapper
        assert registry.staging_copier(Chatty) is None
        with pytest.raises(
            AdapterError, match=r"two plugins claim the staging copier of 'toyframework.Wrapper': 'one'"
        ):
            registry.staging_copier(Wrapper)

    def test_a_storage_is_found_by_its_scheme(self) -> None:
        entry = StorageEntry("toy", factory="toyplugin:copy_wrapper")
        registry = _registry(toy=_plugin(storages=lambda: [entry]))
        factory: object = registry.storage_of_scheme("toy")
        assert factory is copy_wrapper
        with pytest.raises(AdapterError, match="no plugin registers the storage 's3'; known: toy"):
            registry.storage_of_scheme("s3")
        assert registry.schemes() == ["toy"]
        assert registry.open_storage("s3://bucket/x") is None

    def test_what_is_no_storage_is_refused_when_it_is_opened(self, toy: types.ModuleType) -> None:
        vars(toy).update(open_toy=lambda url: url.upper())
        entry = StorageEntry("toy", factory="toyplugin:open_toy")
        with pytest.raises(AdapterError, match=r"toyplugin:open_toy made a str of 'toy://x': it must be a .*Storage"):
            _registry(toy=_plugin(storages=lambda: [entry])).open_storage("toy://x")

    def test_what_a_storage_raises_when_it_is_opened_names_the_plugin(self, toy: types.ModuleType) -> None:
        vars(toy).update(open_toy=lambda url: 1 / 0)
        entry = StorageEntry("toy", factory="toyplugin:open_toy")
        with pytest.raises(AdapterError, match=r"plugin 'toy' .* made no storage of 'TOY://x': ZeroDivisionError"):
            _registry(toy=_plugin(storages=lambda: [entry])).open_storage("TOY://x")

    def test_a_scheme_that_two_storages_claim_is_an_error_and_others_are_not(self) -> None:
        def plugin(*schemes: str) -> types.SimpleNamespace:
            return _plugin(storages=lambda: [StorageEntry(scheme, "toyplugin:copy_wrapper") for scheme in schemes])

        registry = _registry(one=plugin("toy", "other"), two=plugin("toy"))
        assert _names(registry) == ["numpy"]
        assert registry.schemes() == ["other", "toy"]
        found: object = registry.storage_of_scheme("other")
        assert found is copy_wrapper
        message = "two plugins claim the storage of scheme 'toy': 'one' .* and 'two' .*; uninstall all but one of them"
        with pytest.raises(AdapterError, match=message):
            registry.storage_of_scheme("toy")
        with pytest.raises(AdapterError, match=message):
            registry.open_storage("toy://x")

    def test_a_staging_copier_serves_subclasses(self) -> None:
        entry = StagingCopierEntry(f"{_TOY}.Wrapper", factory="toyplugin:copy_wrapper")
        registry = _registry(toy=_plugin(staging_copiers=lambda: [entry]))
        assert registry.staging_copier(Wrapper) is copy_wrapper
        assert registry.staging_copier(DerivedWrapper) is copy_wrapper
        assert registry.staging_copier(Chatty) is None


def test_a_state_with_a_value_whose_describer_is_broken_is_neither_saved_nor_loaded(
    toy: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = DescriberEntry(f"{_TOY}.Wrapper", framework=_TOY, factory="toyplugin:broken_factory")
    registry = _registry(toy=_plugin(describers=lambda: [entry]))
    monkeypatch.setattr(api, "active_adapters", registry.active_adapters)
    api.save({"x": np.arange(3)}, checkpoint_id=tmp_path / "step_1")
    message = r"rank 0: 'layers.0.w': the describer of 'toyframework.Wrapper' of the plugin 'toy' .*; repair the plugin"
    for call in (api.save, api.async_save):
        with pytest.raises(AdapterError, match=message):
            call({"layers": [{"w": Wrapper(np.zeros(3))}]}, checkpoint_id=tmp_path / "step_2")
    target = np.zeros(3, np.int64)
    with pytest.raises(AdapterError, match=message):
        api.load({"x": target, "layers": [{"w": Wrapper(np.zeros(3))}]}, checkpoint_id=tmp_path / "step_1")
    assert target.tolist() == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


@pytest.mark.usefixtures("toy")
class TestChecks:
    @pytest.mark.parametrize(
        ("entry", "problem"),
        [
            (DescriberEntry(f"{_TOY}.Wrapper", _TOY, "toyplugin:WrapperDescriber"), None),
            (
                DescriberEntry(f"{_TOY}.Again", _TOY, "toyplugin:WrapperDescriber"),
                "toyframework.Again is toyframework.Wrapper, and values are looked up by where their type is defined: "
                "write 'toyframework.Wrapper'",
            ),
            (
                StagingCopierEntry("toyplugin.sub.Wrapper", "toyplugin:copy_wrapper"),
                "toyplugin.sub.Wrapper is toyframework.Wrapper, and .*write 'toyframework.Wrapper'",
            ),
            (DescriberEntry(f"{_TOY}.Nested.Inner", _TOY, "toyplugin:WrapperDescriber"), None),
            (ObjectCodecEntry(f"{_TOY}.Chatty", "toyplugin:chatty_codec"), None),
            (
                ObjectCodecEntry(f"{_TOY}.Gone", "toyplugin:chatty_codec"),
                "there is no type toyframework.Gone: AttributeError",
            ),
            (StagingCopierEntry(f"{_TOY}.function", "toyplugin:copy_wrapper"), "toyframework.function is no type"),
            (StagingCopierEntry("tests.f.<locals>.Thing", "toyplugin:copy_wrapper"), None),
            (
                DescriberEntry("nomod.sub.Y", _TOY, "toyplugin:WrapperDescriber"),
                "there is no type nomod.sub.Y: ModuleNotFoundError: No module named 'nomod'",
            ),
            (
                DescriberEntry("toy_types.broken.Y", _TOY, "toyplugin:WrapperDescriber"),
                "there is no type toy_types.broken.Y: ModuleNotFoundError: No module named 'libfoo'",
            ),
            (
                DescriberEntry(f"{_TOY}.Wrapper", "nosuchframework", "toyplugin:WrapperDescriber"),
                "its framework 'nosuchframework' cannot be imported: ModuleNotFoundError",
            ),
            (
                AdapterEntry("toy", "nosuchframework", "toyplugin:ToyAdapter"),
                "the adapter 'toy' of the plugin 'toy' .*: its framework 'nosuchframework' cannot be imported",
            ),
            (DescriberEntry(f"{_TOY}.Wrapper", _TOY, "toyplugin:broken_factory"), "OSError: no such library"),
            (DescriberEntry(f"{_TOY}.Wrapper", _TOY, "toyplugin:Chatty"), "Chatty is no describer"),
            (StorageEntry("toy", "toyplugin:copy_wrapper"), None),
        ],
    )
    def test_what_a_plugin_names_must_be_there_under_that_name(
        self, entry: Any, problem: str | None, toy: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Inner(Wrapper):
            pass

        Inner.__module__, Inner.__qualname__ = _TOY, "Nested.Inner"
        vars(toy).update(Chatty=Chatty, sub=types.SimpleNamespace(Wrapper=Wrapper))
        nested = types.SimpleNamespace(Inner=Inner)
        vars(sys.modules[_TOY]).update(Again=Wrapper, Nested=nested, function=broken_factory)
        (tmp_path / "toy_types").mkdir()
        (tmp_path / "toy_types" / "broken.py").write_text("import libfoo\n")
        monkeypatch.syspath_prepend(tmp_path)
        hook = next(hook for hook, of in HOOKS.items() if of is type(entry)).removeprefix("dcp_")
        registry = _registry(toy=_plugin(**{hook: lambda: [entry]}))
        found = registry.problems("toy")
        assert len(found) == (problem is not None), found
        if problem is not None:
            assert re.search(problem, found[0])
            assert "'toy' (toy_module)" in found[0]

    def test_a_broken_plugin_a_missing_one_and_a_contested_one_have_problems(self) -> None:
        registry = _registry(
            broken=ImportError("needs libfoo"),
            one=_plugin(storages=lambda: [StorageEntry("toy", "toyplugin:copy_wrapper")]),
            two=_plugin(storages=lambda: [StorageEntry("toy", "toyplugin:copy_wrapper")]),
        )
        with pytest.warns(RuntimeWarning, match="skips the plugin 'broken'"):
            assert registry.problems("broken") == ["ImportError: needs libfoo"]
        (missing,) = registry.problems("mine")
        assert missing.startswith("no plugin is called 'mine': install the package")
        assert "an entry point of the group 'dcp'" in missing
        assert missing.endswith("found: broken, dcp_core, one, two")
        (contested,) = registry.problems("one")
        assert contested.startswith("two plugins claim the storage of scheme 'toy'")

    def test_a_plugin_module_that_imports_a_framework_has_a_problem(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "mindspore.py").write_text("")
        for name, line in (("heavy_module", "import mindspore"), ("light_module", "import json")):
            (tmp_path / f"{name}.py").write_text(f"{line}\nprint('noise')\n")
        monkeypatch.syspath_prepend(tmp_path)
        registry = _registry(heavy=_plugin(adapters=lambda: []), light=_plugin(adapters=lambda: []))
        assert registry.problems("light") == []
        (problem,) = registry.problems("heavy")
        assert problem.startswith(
            "importing heavy_module imports mindspore, and plugins are imported in processes that"
        )

    def test_what_a_plugin_claims_twice_is_one_problem(self) -> None:
        entry = StorageEntry("toy", "toyplugin:copy_wrapper")
        (problem,) = _registry(one=_plugin(storages=lambda: [entry, entry])).problems("one")
        assert problem.startswith("the plugin 'one' (one_module) claims the storage of scheme 'toy' twice")

    def test_a_framework_that_an_extra_brings_may_be_missing(self, tmp_path: Path) -> None:
        entries = [
            AdapterEntry("a", "extra_one", "no_such_module:A"),
            AdapterEntry("b", "extra_two", "no_such_module:A"),
        ]
        (tmp_path / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: toy\nVersion: 1\nProvides-Extra: x\nRequires-Dist: extra_two>=1\n"
            "Requires-Dist: Extra-One[y]<2,>=1; (python_version > '3') and extra == 'x'\n"
            "Requires-Dist: extra-two; extra == 'x'\n"
        )

        class Point:
            name, value, dist = "toy", "toy.plugin", PathDistribution(tmp_path)

            def load(self) -> object:
                return _plugin(adapters=lambda: entries)

        registry = PluginRegistry(lambda: [Point()])  # type: ignore[list-item]  # a stand-in that has what is used
        record = registry.plugins()[-1]
        assert [registry.missing(entry, record) for entry in entries] == ["extra_one", None]
        assert registry.problem_of(entries[0], record) is None
        assert "its framework 'extra_two' cannot be imported" in str(registry.problem_of(entries[1], record))


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdapterEntry("", "torch", "a:b"),
        lambda: AdapterEntry("toy", "torch.nn", "a:b"),
        lambda: AdapterEntry("toy", "torch", "a.b"),
        lambda: AdapterEntry("toy", "torch", "a:b:c"),
        lambda: AdapterEntry("toy", "torch", ToyAdapter),  # type: ignore[arg-type]  # what an untyped plugin may pass
        lambda: DescriberEntry("Wrapper", "torch", "a:b"),
        lambda: ObjectCodecEntry("torch.", "a:b"),
        lambda: StorageEntry("S3", "a:b"),
        lambda: StorageEntry("s3://", "a:b"),
        lambda: StagingCopierEntry("a b.c", "a:b"),
    ],
)
def test_a_malformed_entry_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(AdapterError, match="must look like"):
        make()


def test_a_local_type_may_be_named() -> None:
    assert StagingCopierEntry("tests.test_x.f.<locals>.Thing", "a:b").name == "tests.test_x.f.<locals>.Thing"


class WideAdapter(NumpyAdapter):
    """Takes more than it must."""

    def narrow(self, view: Any, box: Box, *more: Any, **options: Any) -> Any: ...


class ShortAdapter(NumpyAdapter):
    """Its methods would fail in the middle of a save."""

    def copy_into(self, view: Any, bits: Any) -> None:  # type: ignore[override]  # what is refused here
        ...


class MuteAdapter(NumpyAdapter):
    """Leaves out an option."""

    def process_group(self, group: Any = None) -> Any:  # type: ignore[override]  # what is refused here
        ...


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (NumpyAdapter(), None),
        (WideAdapter(), None),
        (ShortAdapter(), "its copy_into(view, bits) must take (view, bits, source_dtype)"),
        (MuteAdapter(), "its process_group(group) must take (group, *, with_channel)"),
        (types.SimpleNamespace(**dict.fromkeys((*dir(Adapter), "name", "version"), 5)), "its describe is no method"),
    ],
)
def test_an_adapter_is_called_as_its_protocol_says(made: object, problem: str | None) -> None:
    assert protocol_problem(made, Adapter) == problem


def test_an_adapter_has_fewer_than_ten_methods_and_a_describer_one() -> None:
    assert [name for name, parameters in _members(Adapter) if parameters is not None] == [
        *("describe", "process_group"),
        *("host_array", "read_out", "copy_into", "narrow", "writable_problem", "transfers"),
    ]
    assert [name for name, _ in _members(Describer)] == ["describe"]


def test_every_hook_of_the_specification_is_called() -> None:
    from dcp_core import hookspecs

    assert set(HOOKS) == {name for name in vars(hookspecs) if name.startswith("dcp_")}


_REAL_PLUGIN = """
from dcp_core.hookspecs import AdapterEntry, StorageEntry, hookimpl

@hookimpl
def dcp_storages():
    return [StorageEntry("toy", factory="real_plugin:Storage")]

class Storage:
    def __init__(self, url):
        pass
"""


def test_an_installed_distribution_is_found_at_the_first_call_and_not_before(tmp_path: Path) -> None:
    (tmp_path / "real_plugin.py").write_text(_REAL_PLUGIN)
    distribution = tmp_path / "real_plugin-1.2.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: real-plugin\nVersion: 1.2\n")
    (distribution / "entry_points.txt").write_text("[dcp]\nreal = real_plugin\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import dcp_core.plugins as plugins; "
        "print('real_plugin' in sys.modules); print(plugins.storage_of_scheme('toy').__name__); "
        "print([record.label for record in plugins.plugins() if record.name == 'real'])"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout.split("\n") == ["False", "Storage", """["'real' (real-plugin 1.2)"]""", ""], result.stderr
