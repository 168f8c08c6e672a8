"""Whether DCP would ask a describer: what installed plugins register it for, against the types of its values.

The name in an entry is a string, and nobody checks it until a value turns up: an entry for a name that the type is
merely imported under is never asked, and says nothing.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from dcp_core import plugins
from dcp_core.adapter import Describer
from dcp_core.hookspecs import ENTRY_POINT_GROUP, AdapterEntry, DescriberEntry, hookimpl
from dcp_core.plugin_discovery import PluginRecord
from dcp_core.type_names import name_of_type

_Entry = AdapterEntry | DescriberEntry


def registrations(describer: Describer, plugin: str | None) -> list[tuple[PluginRecord, _Entry]]:
    """Find what registers describers of this class.

    Args:
        describer: One of the class.
        plugin: Name of the entry point of the plugin that must; None: whichever does.

    Raises:
        LookupError: The plugin is not installed, is broken, or registers no such describer.
    """
    records = [record for record in plugins.plugins() if plugin in (None, record.name)]
    of = type(describer)
    found = [(record, entry) for record in records for entry in _entries(record) if _makes(entry, of)]
    if plugin is None or found:
        return found
    if not records:
        known = ", ".join(sorted(record.name for record in plugins.plugins()))
        raise LookupError(
            f"no plugin {plugin!r} is installed; there are: {known}. Is its package installed, and does it name the "
            f"plugin as an entry point of the group {ENTRY_POINT_GROUP!r}?"
        )
    (record, *_) = records
    problems = [record.problem, *(plugins.problem_of(entry, record) for entry in _entries(record))]
    for problem in problems:
        if problem is not None:
            raise LookupError(f"the plugin {record.label} is broken: {problem}")
    registered = "; ".join(f"{entry.name!r} made by {entry.factory}" for entry in _entries(record)) or "nothing"
    raise LookupError(f"the plugin {record.label} registers no {of.__qualname__}; it registers {registered}")


def problem_of_registration(describer: Describer, value: Any, plugin: str | None) -> str | None:
    """Why saves and loads would not ask a describer about a value.

    Args:
        describer: Describes it.
        value: A value of its type.
        plugin: Name of the entry point of the plugin that registers it; None: whichever does.

    Returns:
        What is wrong with the registration, and what to do; None where it is right, or where nobody registers the
        describer and no plugin was named.
    """
    try:
        found = registrations(describer, plugin)
    except LookupError as error:
        return str(error)
    if not found or plugins.active_adapters().describe(value) is not None:
        return None
    return "; ".join(_problem(record, entry, value) for record, entry in found)


def _problem(record: PluginRecord, entry: _Entry, value: Any) -> str:
    """Why an entry does not serve a value."""
    of, subject = type(value), f"the plugin {record.label} registers {entry.factory}"
    if entry.framework not in sys.modules:
        return (
            f"{subject} for the framework {entry.framework!r}, and no module of that name has been imported: it must "
            "be the top-level module of what the values are made of"
        )
    names = [name_of_type(base) for base in of.__mro__]
    if isinstance(entry, DescriberEntry) and entry.type_name not in names:
        return (
            f"{subject} for the type {entry.type_name!r}, and values are of the type {names[0]!r}, so no save or load "
            f"would ask it; an entry has the name where a type is defined, type(value).__module__ and __qualname__: "
            f"let type_name be {names[0]!r}"
        )
    problem = plugins.problem_of(entry, record)
    if problem is not None:
        return problem
    return f"{subject}, and yet a value of the type {names[0]!r} is described by nobody"


def _entries(record: PluginRecord) -> list[_Entry]:
    return [entry for entry in record.entries if isinstance(entry, (AdapterEntry, DescriberEntry))]


def _makes(entry: _Entry, of: type) -> bool:
    """Whether an entry's factory makes objects of a class; what cannot be imported here makes none."""
    try:
        module, _, name = entry.factory.partition(":")
        found: Any = importlib.import_module(module) if entry.framework in sys.modules else sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part)
        return found is of or (not isinstance(found, type) and type(found()) is of)
    except Exception:  # whatever somebody's factory raises: `problem_of` tells it
        return False


def make_known(describer: Describer, value: Any) -> None:
    """Register a describer in this process, unless a plugin or an adapter serves its values already."""
    if plugins.active_adapters().describe(value) is not None:
        return
    _known.append(describer)
    of = type(value)
    entry = DescriberEntry(name_of_type(of), of.__module__.partition(".")[0], f"{__name__}:known_describer")
    plugins.register(types.SimpleNamespace(dcp_describers=hookimpl(lambda: [entry])), "conformance")


def known_describer() -> Describer:
    """The describer that this process has registered last."""
    return _known[-1]


_known: list[Describer] = []
