"""Plugins: load what they register, when it is needed.

In: what `dcp_core.plugin_discovery` finds, at the first call and never at import. Out: the adapters of the frameworks
that the user has imported, and factories of storages, object codecs and staging copiers.

A plugin that is broken is skipped with one warning. Two plugins that claim one name are an `AdapterError` whenever
such a name is looked up: which of them would serve is nobody's guess.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from dcp_core.adapter import Adapter, AdapterSet, Describer
from dcp_core.errors import AdapterError
from dcp_core.formats.objects import ObjectCodec, register_codec
from dcp_core.hookspecs import (
    AdapterEntry,
    DescriberEntry,
    Entry,
    ObjectCodecEntry,
    StagingCopierEntry,
    StorageEntry,
)
from dcp_core.planning.leaves import LocalTensor
from dcp_core.plugin_discovery import BUILT_IN, PluginRecord, discover, installed_plugins, read_plugin
from dcp_core.storage.base import Storage

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_E = TypeVar("_E", bound=Entry)

_ADAPTER_MEMBERS = ("version", "host_array", "read_out", "copy_into", "narrow", "describe", "process_group")


@dataclass(frozen=True, slots=True)
class _Claim(Generic[_E]):
    """An entry and the plugin that registers it."""

    entry: _E
    plugin: PluginRecord


def _import_attribute(factory: str) -> Any:
    module, _, attribute = factory.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _base_names(of: type) -> list[str]:
    """Names of a type and its bases, most derived first."""
    return [f"{base.__module__}.{base.__qualname__}" for base in of.__mro__]


def _check_made(made: Any, entry: Entry) -> None:
    """Check what a factory made, as far as that can be told without using it."""
    if isinstance(entry, AdapterEntry):
        missing = [member for member in _ADAPTER_MEMBERS if not hasattr(made, member)]
        if missing:
            raise AdapterError(f"{type(made).__name__} is no adapter: it lacks {', '.join(missing)}")
        if getattr(made, "name", None) != entry.name:
            raise AdapterError(f"the adapter is called {getattr(made, 'name', None)!r}, not {entry.name!r}")
    elif isinstance(entry, ObjectCodecEntry):
        if not isinstance(made, ObjectCodec) or made.type_name != entry.type_name:
            raise AdapterError(f"expected an ObjectCodec of {entry.type_name}, found {made!r}")
    elif isinstance(entry, DescriberEntry) and not callable(getattr(made, "describe", None)):
        raise AdapterError(f"{type(made).__name__} is no describer: it lacks describe")
    elif isinstance(entry, (StorageEntry, StagingCopierEntry)) and not callable(made):
        raise AdapterError(f"{made!r} cannot be called")


class _TypeDescribers:
    """All registered describers as one: a value is offered only to those registered for its type or a base of it."""

    def __init__(self, registry: PluginRegistry, claims: dict[str, _Claim[DescriberEntry]]) -> None:
        self._registry = registry
        self._claims = claims
        self._of_type: dict[type, tuple[Describer, ...]] = {}

    def describe(self, value: Any) -> LocalTensor | None:
        """Ask the describer of the most derived type first."""
        describers = self._of_type.get(type(value))
        if describers is None:
            describers = self._of_type.setdefault(type(value), tuple(self._find(type(value))))
        for describer in describers:
            found = describer.describe(value)
            if found is not None:
                return found
        return None

    def _find(self, of: type) -> Iterable[Describer]:
        for name in _base_names(of):
            describer = self._registry.attempt(self._claims[name]) if name in self._claims else None
            if describer is not None:
                yield cast(Describer, describer)


class PluginRegistry:
    """The plugins of a process. Use the functions of this module; tests make registries of their own.

    Every method may be called from any thread.
    """

    def __init__(self, find: Callable[[], Iterable[EntryPoint]] = installed_plugins) -> None:
        self._find = find
        self._lock = threading.RLock()  # a factory may look up other plugins
        self._records: tuple[PluginRecord, ...] | None = None
        self._by_hand: tuple[PluginRecord, ...] = ()
        self._made: dict[Entry, Any] = {}
        self._failed: set[Entry] = set()
        self._codecs: set[ObjectCodecEntry] = set()

    def register(self, plugin: object, name: str) -> None:
        """Add a plugin that no entry point names.

        Args:
            plugin: A module, or any object whose attributes are hook implementations.
            name: What to call it in messages.

        Raises:
            AdapterError: It is broken.
        """
        record = read_plugin(name, "registered by hand", lambda: plugin)
        if record.problem is not None:
            raise AdapterError(f"cannot register the plugin {record.label}: {record.problem}")
        with self._lock:
            self._by_hand += (record,)

    def plugins(self) -> tuple[PluginRecord, ...]:
        """What was found, the core's own first, then by name; broken plugins tell their problem."""
        with self._lock:
            first_time = self._records is None
            if self._records is None:
                self._records = discover(self._find())
            records, by_hand = self._records, self._by_hand
        for record in records if first_time else ():
            if record.problem is not None:
                warnings.warn(f"DCP skips the plugin {record.label}: {record.problem}", RuntimeWarning, stacklevel=2)
        return (*records, *by_hand)

    def _claims(self, entry_type: type[_E]) -> dict[str, _Claim[_E]]:
        claims: dict[str, _Claim[_E]] = {}
        for record in self.plugins():
            for entry in record.entries:
                if not isinstance(entry, entry_type):
                    continue
                other = claims.setdefault(entry.name, _Claim(entry, record))
                if other.entry is not entry:
                    raise AdapterError(
                        f"two plugins claim the {_kind(entry)} {entry.name!r}: "
                        f"{other.plugin.label} and {record.label}; uninstall one of them"
                    )
        return claims

    def make(self, claim: _Claim[Any]) -> Any:
        """Call the factory of an entry, once.

        Raises:
            AdapterError: The factory cannot be imported, or raises, or makes something else.
        """
        entry = claim.entry
        with self._lock:
            if entry in self._made:
                return self._made[entry]
            try:
                attribute = _import_attribute(entry.factory)
                made = attribute if isinstance(entry, (StorageEntry, StagingCopierEntry)) else attribute()
                _check_made(made, entry)
            except Exception as error:
                raise AdapterError(
                    f"the {_kind(entry)} {entry.name!r} of the plugin {claim.plugin.label} cannot be made by "
                    f"{entry.factory}: {type(error).__name__}: {error}"
                ) from error
            self._made[entry] = made
            return made

    def attempt(self, claim: _Claim[Any]) -> Any:
        """`make`, but what is broken is None, with one warning."""
        with self._lock:
            if claim.entry in self._failed:
                return None
            try:
                return self.make(claim)
            except AdapterError as error:
                self._failed.add(claim.entry)
                problem = str(error)
        warnings.warn(f"DCP goes on without a plugin: {problem}", RuntimeWarning, stacklevel=2)
        return None

    def active_adapters(self) -> AdapterSet:
        """The adapters whose framework has been imported, by name, numpy last, behind the describers of their types."""
        claims = sorted(
            self._claims(AdapterEntry).values(), key=lambda claim: (claim.plugin is BUILT_IN, claim.entry.name)
        )
        made = [self.attempt(claim) for claim in claims if claim.entry.framework in sys.modules]
        described = {
            name: claim for name, claim in self._claims(DescriberEntry).items() if claim.entry.framework in sys.modules
        }
        describers = (_TypeDescribers(self, described),) if described else ()
        return AdapterSet([adapter for adapter in made if adapter is not None], describers)

    def adapter_named(self, name: str) -> Adapter:
        """One adapter, its framework imported if it must be.

        Raises:
            AdapterError: No plugin has it, or it is broken.
        """
        return cast(Adapter, self.make(self._claimed(AdapterEntry, name)))

    def storage_of_scheme(self, scheme: str) -> Callable[[str], Storage]:
        """What makes a storage from a URL of this scheme.

        Raises:
            AdapterError: No plugin has it, or it is broken.
        """
        return cast("Callable[[str], Storage]", self.make(self._claimed(StorageEntry, scheme)))

    def staging_copier(self, of: type) -> Callable[[Any], Any] | None:
        """What copies a value of this type to the host: the copier of the type or of its most derived base, or None."""
        claims = self._claims(StagingCopierEntry)
        name = next((name for name in _base_names(of) if name in claims), None)
        return cast("Callable[[Any], Any] | None", self.attempt(claims[name]) if name is not None else None)

    def activate_codecs(self) -> None:
        """Register the object codecs of all types whose top-level module has been imported."""
        for claim in self._claims(ObjectCodecEntry).values():
            entry = claim.entry
            with self._lock:
                if entry in self._codecs or entry.framework not in sys.modules:
                    continue
                self._codecs.add(entry)
                codec = self.attempt(claim)
                if codec is not None:
                    register_codec(cast(ObjectCodec, codec))

    def _claimed(self, entry_type: type[_E], name: str) -> _Claim[_E]:
        claims = self._claims(entry_type)
        if name not in claims:
            broken = [f"{record.label}: {record.problem}" for record in self.plugins() if record.problem is not None]
            raise AdapterError(
                f"no plugin registers the {entry_type.__name__.removesuffix('Entry').lower()} {name!r}; "
                f"known: {', '.join(sorted(claims)) or 'none'}" + (f"; broken: {'; '.join(broken)}" if broken else "")
            )
        return claims[name]


def _kind(entry: Entry) -> str:
    kinds = {
        AdapterEntry: "adapter",
        DescriberEntry: "describer of",
        ObjectCodecEntry: "object codec of",
        StorageEntry: "storage of scheme",
        StagingCopierEntry: "staging copier of",
    }
    return kinds[type(entry)]


_REGISTRY = PluginRegistry()

register = _REGISTRY.register
plugins = _REGISTRY.plugins
active_adapters = _REGISTRY.active_adapters
adapter_named = _REGISTRY.adapter_named
storage_of_scheme = _REGISTRY.storage_of_scheme
staging_copier = _REGISTRY.staging_copier
activate_codecs = _REGISTRY.activate_codecs
