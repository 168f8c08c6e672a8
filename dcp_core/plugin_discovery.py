"""Plugin discovery: what is installed, and what it registers.

In: entry points of the group ``dcp``. Out: one `PluginRecord` a plugin. A plugin that cannot be imported, whose hooks
raise or return something else, is a record with a problem; it never keeps the others from being found.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pluggy

from dcp_core import hookspecs
from dcp_core.errors import AdapterError
from dcp_core.hookspecs import ENTRY_POINT_GROUP, HOOKS, AdapterEntry, Entry

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What was found of one plugin.

    Attributes:
        name: Name of its entry point.
        origin: The distribution that brings it, ``"built in"`` or ``"registered by hand"``.
        entries: What it registers; empty when it is broken.
        problem: Why it was skipped; None when it is sound.
        optional: What only extras of its distribution ask for, as modules are called: frameworks that may be missing.
        module: The module that its entry point names; None without one.
    """

    name: str
    origin: str
    entries: tuple[Entry, ...] = ()
    problem: str | None = None
    optional: frozenset[str] = frozenset()
    module: str | None = None

    @property
    def label(self) -> str:
        """Name and origin, for messages."""
        return f"{self.name!r} ({self.origin})"


BUILT_IN = PluginRecord(
    "dcp_core", "built in", (AdapterEntry("numpy", framework="numpy", factory="dcp_core.arrays:NumpyAdapter"),)
)


def installed_plugins() -> Iterable[EntryPoint]:
    """The entry points of this environment, not imported yet."""
    from importlib.metadata import entry_points  # a fifth of the time that importing the core takes

    return entry_points(group=ENTRY_POINT_GROUP)


def _entries_of(plugin: object, name: str) -> tuple[Entry, ...]:
    """Call the hooks of one plugin and check what they return."""
    # One manager a plugin: a hook call over several would be stopped by the first that raises.
    manager = pluggy.PluginManager(ENTRY_POINT_GROUP)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise pluggy.PluginValidationError(error.plugin, f"{error}; the hooks are {', '.join(HOOKS)}") from error
    _check_marks(manager, plugin)
    entries: list[Entry] = []
    for hook, entry_type in HOOKS.items():
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            found = implementation.function()
            if not isinstance(found, Sequence) or not all(isinstance(entry, entry_type) for entry in found):
                raise AdapterError(f"{hook}() must return a sequence of {entry_type.__name__}, found {found!r}")
            entries.extend(found)
    return tuple(entries)


def _check_marks(manager: pluggy.PluginManager, plugin: object) -> None:
    """A hook that is not marked, and a module without hooks, would register nothing, and nobody would hear of it."""
    for hook in HOOKS:
        found = getattr(plugin, hook, None)
        is_imported = found is getattr(hookspecs, hook)
        if inspect.isroutine(found) and not is_imported and manager.parse_hookimpl_opts(plugin, hook) is None:
            raise AdapterError(f"{hook}() is not marked: write @hookimpl, of dcp_core.hookspecs, above it")
    if not manager.get_hookcallers(plugin):
        raise AdapterError(
            "it implements no hook: the module that its entry point names must have a function marked @hookimpl "
            f"and called {' or '.join(HOOKS)}"
        )


def read_plugin(
    name: str, origin: str, load: Callable[[], object], optional: frozenset[str] = frozenset()
) -> PluginRecord:
    """Import a plugin by `load` and call its hooks."""
    try:
        return PluginRecord(name, origin, _entries_of(load(), name), optional=optional)
    except (Exception, SystemExit) as error:  # a module may end like a script where something is missing
        return PluginRecord(name, origin, problem=f"{type(error).__name__}: {error}", optional=optional)


def discover(points: Iterable[EntryPoint]) -> tuple[PluginRecord, ...]:
    """Read every plugin: the core's own first, then by name."""
    return (BUILT_IN, *_read_all(points))


def _read_all(points: Iterable[EntryPoint]) -> Iterator[PluginRecord]:
    seen: set[str] = set()
    for point in sorted(points, key=lambda point: (point.name, point.value)):
        if point.value not in seen:  # installed twice, say as a wheel and in place
            seen.add(point.value)
            origin = f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
            record = read_plugin(point.name, origin, point.load, _optional(point))
            yield replace(record, module=point.value.partition(":")[0].strip())


def _optional(point: EntryPoint) -> frozenset[str]:
    """What only the extras of a plugin's distribution require."""
    extra: set[str] = set()
    always: set[str] = set()
    for line in (point.dist.requires if point.dist is not None else None) or ():
        requirement, _, marker = line.partition(";")
        name = re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]
        (extra if re.search(r"\bextra\b", marker) else always).add(name.lower().replace("-", "_"))
    return frozenset(extra - always)
