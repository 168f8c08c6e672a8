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
from dcp_core.errors import AdapterError, DcpError
from dcp_core.formats.objects import ObjectCodec, register_codec
from dcp_core.hookspecs import (
    KINDS,
    AdapterEntry,
    DescriberEntry,
    Entry,
    ObjectCodecEntry,
    StagingCopierEntry,
    StorageEntry,
)
from dcp_core.planning.leaves import LocalTensor
from dcp_core.plugin_checks import check_described, check_made, check_storage
from dcp_core.plugin_discovery import BUILT_IN, PluginRecord, discover, installed_plugins, read_plugin
from dcp_core.storage.base import Storage
from dcp_core.storage.urls import redacted

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_E = TypeVar("_E", bound=Entry)


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
                check_described(found, describer)
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
                    raise AdapterError(_conflict(entry, other.plugin, record))
        return claims

    def claimants(self, entry: Entry) -> tuple[PluginRecord, ...]:
        """Every plugin that claims what an entry claims, as often as it does; more than one is a conflict."""
        return tuple(
            record
            for record in self.plugins()
            for other in record.entries
            if type(other) is type(entry) and other.name == entry.name
        )

    def problem_of(self, entry: Entry, plugin: PluginRecord) -> str | None:
        """Make what an entry registers, which imports its framework; tell why that fails, or None."""
        try:
            self.make(_Claim(entry, plugin))
        except AdapterError as error:
            return str(error)
        return None

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
                check_made(made, entry)
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

    def open_storage(self, url: str) -> Storage | None:
        """Make the storage of a URL; None where no plugin knows its scheme.

        Args:
            url: ``"scheme://..."``; upper and lower case of the scheme are one.

        Raises:
            AdapterError: The plugin is broken, made no storage, or raised what is no error of DCP.
        """
        claim = self._claims(StorageEntry).get(url.partition(":")[0].lower())
        if claim is None:
            return None
        factory = self.make(claim)
        try:
            return check_storage(factory(url), claim.entry, url)
        except DcpError:
            raise
        except Exception as error:
            raise AdapterError(
                f"{claim.entry.factory} of the plugin {claim.plugin.label} made no storage of {redacted(url)!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def schemes(self) -> list[str]:
        """The URL schemes that plugins know, sorted."""
        return sorted(self._claims(StorageEntry))

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
                f"no plugin registers the {KINDS[entry_type]} {name!r}; "
                f"known: {', '.join(sorted(claims)) or 'none'}" + (f"; broken: {'; '.join(broken)}" if broken else "")
            )
        return claims[name]


def _conflict(entry: Entry, one: PluginRecord, other: PluginRecord) -> str:
    claimed = f"the {_kind(entry)} {entry.name!r}"
    if one is other:
        return f"the plugin {one.label} claims {claimed} twice; it must do so once"
    return f"two plugins claim {claimed}: {one.label} and {other.label}; uninstall one of them"


def _kind(entry: Entry) -> str:
    """A kind of entry, as it reads before a name: the *describer of* a type, the *storage of scheme* "s3"."""
    suffix = {AdapterEntry: "", StorageEntry: " of scheme"}.get(type(entry), " of")
    return KINDS[type(entry)] + suffix


_REGISTRY = PluginRegistry()

register = _REGISTRY.register
plugins = _REGISTRY.plugins
active_adapters = _REGISTRY.active_adapters
adapter_named = _REGISTRY.adapter_named
storage_of_scheme = _REGISTRY.storage_of_scheme
open_storage = _REGISTRY.open_storage
schemes = _REGISTRY.schemes
claimants = _REGISTRY.claimants
problem_of = _REGISTRY.problem_of
staging_copier = _REGISTRY.staging_copier
activate_codecs = _REGISTRY.activate_codecs
