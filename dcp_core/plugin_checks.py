"""Checks what a plugin's factory made, before anything relies on it; and the names that its entries give.

In: an object, and the entry that registered it. Out: nothing, or an `AdapterError` that says what is missing. A method
that would not take what the core passes is found here, once, and not in the middle of a save.
"""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from dcp_core.adapter import Adapter, Describer
from dcp_core.errors import AdapterError
from dcp_core.formats.objects import ObjectCodec
from dcp_core.hookspecs import (
    AdapterEntry,
    DescriberEntry,
    Entry,
    ObjectCodecEntry,
    StagingCopierEntry,
    StorageEntry,
)
from dcp_core.storage.base import Storage
from dcp_core.type_names import name_of_type

_FRAMEWORKS = ("torch", "mindspore")
_SECONDS = 120.0
_MARK = "frameworks:"
_TELL_FRAMEWORKS = f"""
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
before = {{*sys.modules}}
importlib.import_module(sys.argv[2])
print("{_MARK}", *[name for name in sys.argv[3:] if name in sys.modules and name not in before])
"""

_NOT_OF_THE_PROTOCOL = (object, Protocol)


def attribute_named(factory: str) -> Any:
    """Import what ``"module:attribute"`` names. Raises whatever that raises."""
    module, _, attribute = factory.partition(":")
    return _attribute(importlib.import_module(module), attribute.split("."))


def import_problem(entry: Entry) -> str | None:
    """Import the framework and the type that an entry names.

    Returns:
        Why that fails; or that the type has another name: values are looked up by the name under which their type was
        defined, and a describer under any other would never be asked. None where both are right. A type of a function
        cannot be imported, and is taken for right.
    """
    framework = getattr(entry, "framework", None)
    if framework is not None and not isinstance(entry, ObjectCodecEntry):
        try:
            importlib.import_module(framework)
        except (Exception, SystemExit) as error:
            return f"its framework {framework!r} cannot be imported: {type(error).__name__}: {error}"
    type_name: str | None = getattr(entry, "type_name", None)
    return None if type_name is None or "<locals>" in type_name else _type_problem(type_name)


def _type_problem(type_name: str) -> str | None:
    try:
        found = _type_named(type_name)
    except (Exception, SystemExit) as error:
        return f"there is no type {type_name}: {type(error).__name__}: {error}"
    if not isinstance(found, type):
        return f"{type_name} is no type but a {type(found).__qualname__}"
    defined = name_of_type(found)
    return None if defined == type_name else wrong_name(type_name, defined)


def wrong_name(type_name: str, defined: str) -> str:
    """What is wrong with an entry for a type that is defined under another name."""
    return f"{type_name} is {defined}, and values are looked up by where their type is defined: write {defined!r}"


def imported_as(type_name: str) -> str | None:
    """Where the type that an entry names is defined, if it has been imported. Imports nothing."""
    parts = type_name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        if found is not None:
            for name in parts[count:]:
                found = getattr(found, "__dict__", {}).get(name)  # no getattr: a module may import for it
            return name_of_type(found) if isinstance(found, type) else None
    return None


def _type_named(type_name: str) -> Any:
    """Import what ``"module.qualname"`` names: as much of it as is a module, and then attributes."""
    parts = type_name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            is_of_the_name = error.name is not None and f"{module}.".startswith(f"{error.name}.")
            if count == 1 or not is_of_the_name:
                raise
            continue
        return _attribute(found, parts[count:])
    raise AssertionError("a type's name has a dot")


def _attribute(module: Any, names: Sequence[str]) -> Any:
    found = module
    for name in names:
        found = getattr(found, name)
    return found


def weight_problem(module: str | None) -> str | None:
    """Import a plugin's module in a fresh interpreter, and tell whether a framework comes along.

    Args:
        module: The module; None for a plugin without one.

    Returns:
        What it imports and what to do; None where it imports no framework, or cannot be imported at all.
    """
    if module is None:
        return None
    command = [sys.executable, "-c", _TELL_FRAMEWORKS, json.dumps(sys.path), module, *_FRAMEWORKS]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = done.stdout.rpartition(_MARK)[2].split()
    if done.returncode != 0 or not found:
        return None
    return (
        f"importing {module} imports {', '.join(found)}, and plugins are imported in processes that must stay light: "
        "let the module, and the packages that it lies in, import nothing but dcp_core.hookspecs"
    )


def check_made(made: Any, entry: Entry) -> None:
    """Check what a factory made, as far as that can be told without using it.

    Args:
        made: What the factory returned; for a storage or a staging copier the factory itself.
        entry: What registered it.

    Raises:
        AdapterError: It is not what the entry says.
    """
    problem = _problem(made, entry)
    if problem is not None:
        raise AdapterError(problem)


def _problem(made: Any, entry: Entry) -> str | None:
    if isinstance(entry, AdapterEntry):
        problem = protocol_problem(made, Adapter)
        if problem is not None:
            return f"{type(made).__name__} is no adapter: {problem}"
        return None if made.name == entry.name else f"the adapter is called {made.name!r}, not {entry.name!r}"
    if isinstance(entry, DescriberEntry):
        problem = protocol_problem(made, Describer)
        return None if problem is None else f"{type(made).__name__} is no describer: {problem}"
    if isinstance(entry, ObjectCodecEntry):
        if not isinstance(made, ObjectCodec) or made.type_name != entry.type_name:
            return f"expected an ObjectCodec of {entry.type_name}, found {made!r}"
        return None if "." in made.name else f"the codec's name {made.name!r} must look like 'framework.Type'"
    assert isinstance(entry, (StorageEntry, StagingCopierEntry))
    if not callable(made):
        return f"{made!r} cannot be called"
    argument = "the URL" if isinstance(entry, StorageEntry) else "the value"
    return None if _takes(made, 1, ()) else f"{entry.factory}{_shown(made)} must take one argument, {argument}"


def check_storage(made: Any, entry: StorageEntry, url: str) -> Storage:
    """Check what a storage's factory made of a URL.

    Raises:
        AdapterError: It is no `Storage`.
    """
    if not isinstance(made, Storage):
        raise AdapterError(
            f"{entry.factory} made a {type(made).__qualname__} of {url!r}: it must be a dcp_core.storage.base.Storage"
        )
    return made


def protocol_problem(made: Any, protocol: type) -> str | None:
    """Why an object does not fit a protocol, or None.

    Args:
        made: The object.
        protocol: A `Protocol`, whose attributes and methods count, those of its bases too.

    Returns:
        What is missing, or cannot be called as the core calls it: with all arguments of the protocol, those before its
        ``*`` by position.
    """
    members = dict(_members(protocol))
    missing = [name for name in members if not hasattr(made, name)]
    if missing:
        return f"it lacks {', '.join(missing)}"
    for name, expected in members.items():
        if expected is None:
            continue
        method = getattr(made, name)
        if not callable(method):
            return f"its {name} is no method"
        by_position = [p for p in expected if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        by_name = tuple(p.name for p in expected if p.kind is inspect.Parameter.KEYWORD_ONLY)
        if not _takes(method, len(by_position), by_name):
            return f"its {name}{_shown(method)} must take ({', '.join(map(str, _bare(expected)))})"
    return None


def _members(protocol: type) -> Iterator[tuple[str, list[inspect.Parameter] | None]]:
    """Names of attributes, with None, and of methods, with their parameters after `self`; those of the class first."""
    for base in protocol.__mro__:
        if base in _NOT_OF_THE_PROTOCOL or base.__name__ == "Generic":
            continue
        for name in inspect.get_annotations(base):
            yield name, None
        for name, value in vars(base).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                yield name, list(inspect.signature(value).parameters.values())[1:]


def _takes(function: Any, positions: int, names: tuple[str, ...]) -> bool:
    """Whether a call with so many arguments, and those by name, fits; what cannot be told fits."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C
        return True
    try:
        signature.bind(*range(positions), **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def _shown(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    return f"({', '.join(map(str, _bare(list(parameters))))})"


def _bare(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Parameters without types and defaults."""
    star = False
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            star = True
            yield "*"
        star = star or parameter.kind is inspect.Parameter.VAR_POSITIONAL
        yield str(parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty))
