"""Plugin discovery: what is installed, and what it registers.

In: entry points of the group ``dcp``. Out: one `PluginRecord` a plugin. A plugin that cannot be imported, whose hooks
raise or return something else, is a record with a problem; it never keeps the others from being found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    """

    name: str
    origin: str
    entries: tuple[Entry, ...] = ()
    problem: str | None = None

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
    manager.check_pending()
    entries: list[Entry] = []
    for hook, entry_type in HOOKS.items():
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            found = implementation.function()
            if not isinstance(found, Sequence) or not all(isinstance(entry, entry_type) for entry in found):
                raise AdapterError(f"{hook}() must return a sequence of {entry_type.__name__}, found {found!r}")
            entries.extend(found)
    return tuple(entries)


def read_plugin(name: str, origin: str, load: Callable[[], object]) -> PluginRecord:
    """Import a plugin by `load` and call its hooks."""
    try:
        return PluginRecord(name, origin, _entries_of(load(), name))
    except (Exception, SystemExit) as error:  # a module may end like a script where something is missing
        return PluginRecord(name, origin, problem=f"{type(error).__name__}: {error}")


def discover(points: Iterable[EntryPoint]) -> tuple[PluginRecord, ...]:
    """Read every plugin: the core's own first, then by name."""
    return (BUILT_IN, *_read_all(points))


def _read_all(points: Iterable[EntryPoint]) -> Iterator[PluginRecord]:
    seen: set[str] = set()
    for point in sorted(points, key=lambda point: (point.name, point.value)):
        if point.value not in seen:  # installed twice, say as a wheel and in place
            seen.add(point.value)
            origin = f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
            yield read_plugin(point.name, origin, point.load)
