"""Plugins: load what they register, when it is needed.

In: what `dcp_core.plugin_discovery` finds, at the first call and never at import. Out: the adapters of the frameworks
that the user has imported, and factories of storages, object codecs and staging copiers.

A plugin that is broken is skipped with one warning. Two plugins that claim one name are an `AdapterError` that names
both as soon as what they claim is needed, and not before: which of them would serve is nobody's guess.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dcp_core.adapter import Adapter, AdapterSet, Describer
from dcp_core.errors import AdapterError, DcpError
from dcp_core.formats.objects import ObjectCodec, register_codec
from dcp_core.hookspecs import (
    ENTRY_POINT_GROUP,
    KINDS,
    AdapterEntry,
    DescriberEntry,
    Entry,
    ObjectCodecEntry,
    StagingCopierEntry,
    StorageEntry,
)
from dcp_core.log import warn
from dcp_core.plugin_checks import attribute_named, check_made, check_storage, import_problem, weight_problem
from dcp_core.plugin_claims import (
    Claim,
    ContestedAdapters,
    TypeDescribers,
    base_names,
    claims_by_name,
    conflict,
    contested_codec,
    kind_in_words,
    sole,
)
from dcp_core.plugin_discovery import BUILT_IN, PluginRecord, discover, installed_plugins, read_plugin
from dcp_core.storage.base import Storage
from dcp_core.storage.urls import redacted

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_E = TypeVar("_E", bound=Entry)


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
        self._codecs: set[tuple[Claim[ObjectCodecEntry], ...]] = set()

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
                warn(f"DCP skips the plugin {record.label}: {record.problem}")
        return (*records, *by_hand)

    def _claims(self, entry_type: type[_E]) -> dict[str, tuple[Claim[_E], ...]]:
        return claims_by_name(self.plugins(), entry_type)

    def problem_of(self, entry: Entry, plugin: PluginRecord, *, check: bool = True) -> str | None:
        """Tell what is wrong with one thing that a plugin registers.

        Args:
            entry: What it registers.
            plugin: The plugin.
            check: Import its framework and its type, and make what it registers; what is `missing` is left out. False:
                only look whether it is claimed once.

        Returns:
            The problem and what to do; None where there is none.
        """
        problem = conflict(self._claims(type(entry))[entry.name])
        if problem is not None or not check or self.missing(entry, plugin) is not None:
            return problem
        problem = import_problem(entry)
        if problem is not None:
            return f"the {kind_in_words(entry)} {entry.name!r} of the plugin {plugin.label}: {problem}"
        try:
            self.make(Claim(entry, plugin))
        except AdapterError as error:
            return str(error)
        return None

    def missing(self, entry: Entry, plugin: PluginRecord) -> str | None:
        """The framework of an entry, where it is not installed and an extra of the plugin's distribution brings it."""
        framework: str | None = getattr(entry, "framework", None)
        if framework is None or framework not in plugin.optional or framework in sys.modules:
            return None
        return framework if importlib.util.find_spec(framework) is None else None

    def problems(self, name: str) -> list[str]:
        """Check one plugin, and everything that it registers, as `dcp plugins --check` does. For its tests.

        Args:
            name: That of its entry point.

        Returns:
            All that is wrong; empty where all is well. That no plugin has the name is a problem, too.
        """
        records = [record for record in self.plugins() if record.name == name]
        if not records:
            known = ", ".join(sorted({record.name for record in self.plugins()}))
            return [
                f"no plugin is called {name!r}: install the package whose entry point names it, an entry point of the "
                f"group {ENTRY_POINT_GROUP!r}; found: {known}"
            ]
        found = [record.problem or weight_problem(record.module) for record in records]
        found += [self.problem_of(entry, record) for record in records for entry in record.entries]
        return list(dict.fromkeys(problem for problem in found if problem is not None))  # a double claim is told once

    def make(self, claim: Claim[Any]) -> Any:
        """Call the factory of an entry, once.

        Raises:
            AdapterError: The factory cannot be imported, or raises, or makes something else.
        """
        entry = claim.entry
        with self._lock:
            if entry in self._made:
                return self._made[entry]
            try:
                attribute = attribute_named(entry.factory)
                made = attribute if isinstance(entry, (StorageEntry, StagingCopierEntry)) else attribute()
                check_made(made, entry)
            except Exception as error:
                raise AdapterError(
                    f"the {kind_in_words(entry)} {entry.name!r} of the plugin {claim.plugin.label} cannot be made by "
                    f"{entry.factory}: {type(error).__name__}: {error}"
                ) from error
            self._made[entry] = made
            return made

    def attempt(self, claim: Claim[Any]) -> Any:
        """`make`, but what is broken is None, with one warning."""
        with self._lock:
            if claim.entry in self._failed:
                return None
            try:
                return self.make(claim)
            except AdapterError as error:
                self._failed.add(claim.entry)
                problem = str(error)
        warn(f"DCP goes on without a plugin: {problem}")
        return None

    def active_adapters(self) -> AdapterSet:
        """The adapters whose framework has been imported, by name, numpy last, behind the describers of their types."""
        adapters: list[Adapter] = []
        describers: list[Describer] = []
        by_name = self._claims(AdapterEntry)
        for name in sorted(by_name, key=lambda name: (by_name[name][0].plugin is BUILT_IN, name)):
            active = [claim for claim in by_name[name] if claim.entry.framework in sys.modules]
            made = [adapter for adapter in map(self.attempt, active) if adapter is not None]
            problem = conflict(active)
            if problem is None:
                adapters.extend(made)
            else:
                describers.append(ContestedAdapters(made, problem))
        if not (described := self._claims(DescriberEntry)):
            return AdapterSet(adapters, describers)
        of_types = TypeDescribers(described, self.make)
        return AdapterSet(adapters, [of_types, *describers], of_types.declined)

    def adapter_named(self, name: str) -> Adapter:
        """One adapter, its framework imported if it must be.

        Raises:
            AdapterError: No plugin has it, two claim it, or it is broken.
        """
        return cast(Adapter, self.make(self._claimed(AdapterEntry, name)))

    def storage_of_scheme(self, scheme: str) -> Callable[[str], Storage]:
        """What makes a storage from a URL of this scheme.

        Raises:
            AdapterError: No plugin has it, two claim it, or it is broken.
        """
        return cast("Callable[[str], Storage]", self.make(self._claimed(StorageEntry, scheme)))

    def open_storage(self, url: str) -> Storage | None:
        """Make the storage of a URL; None where no plugin knows its scheme.

        Args:
            url: ``"scheme://..."``; upper and lower case of the scheme are one.

        Raises:
            AdapterError: The plugin is broken, made no storage, or raised what is no error of DCP; or two claim it.
        """
        claims = self._claims(StorageEntry).get(url.partition(":")[0].lower())
        if claims is None:
            return None
        claim = sole(claims)
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
        """What copies a value of this type to the host: the copier of the type or of its most derived base, or None.

        Raises:
            AdapterError: Two plugins claim that type.
        """
        claims = self._claims(StagingCopierEntry)
        name = next((name for name in base_names(of) if name in claims), None)
        return cast("Callable[[Any], Any] | None", self.attempt(sole(claims[name])) if name is not None else None)

    def activate_codecs(self) -> None:
        """Register the object codecs of all types whose top-level module has been imported.

        A type that two plugins claim gets a codec that says so.
        """
        for claims in self._claims(ObjectCodecEntry).values():
            with self._lock:
                if claims in self._codecs or claims[0].entry.framework not in sys.modules:
                    continue
                self._codecs.add(claims)
                codec = cast("ObjectCodec | None", self.attempt(claims[0]))
                problem = conflict(claims)
                if problem is not None:
                    type_name = claims[0].entry.type_name
                    codec = contested_codec(type_name if codec is None else codec.name, type_name, problem)
                if codec is not None:
                    _register(codec, claims[0].plugin)

    def _claimed(self, entry_type: type[_E], name: str) -> Claim[_E]:
        claims = self._claims(entry_type)
        if name not in claims:
            broken = [f"{record.label}: {record.problem}" for record in self.plugins() if record.problem is not None]
            raise AdapterError(
                f"no plugin registers the {KINDS[entry_type]} {name!r}; "
                f"known: {', '.join(sorted(claims)) or 'none'}" + (f"; broken: {'; '.join(broken)}" if broken else "")
            )
        return sole(claims[name])


def _register(codec: ObjectCodec, plugin: PluginRecord) -> None:
    """Make a codec known; where the type has one that no plugin claims, the core's own say, that stays."""
    try:
        register_codec(codec)
    except AdapterError as error:
        warn(f"DCP goes on without a codec of the plugin {plugin.label}: {error}")


_REGISTRY = PluginRegistry()

register = _REGISTRY.register
plugins = _REGISTRY.plugins
active_adapters = _REGISTRY.active_adapters
adapter_named = _REGISTRY.adapter_named
storage_of_scheme = _REGISTRY.storage_of_scheme
open_storage = _REGISTRY.open_storage
schemes = _REGISTRY.schemes
problem_of = _REGISTRY.problem_of
problems = _REGISTRY.problems
missing = _REGISTRY.missing
staging_copier = _REGISTRY.staging_copier
activate_codecs = _REGISTRY.activate_codecs
