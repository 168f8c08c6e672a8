"""What a plugin may register: the hooks, and the entries that they return.

A plugin is a module named by an entry point of the group ``dcp``. Its hooks only *register*: they return entries whose
heavy part, the factory, is a string ``"module:attribute"`` that is imported when it is first needed. So a plugin
module imports `dcp_core.hookspecs` and nothing heavy, and plugins are found without importing a framework::

    from dcp_core.hookspecs import AdapterEntry, hookimpl

    @hookimpl
    def dcp_adapters() -> list[AdapterEntry]:
        return [AdapterEntry("toy", framework="toyframework", factory="dcp_toy.adapter:ToyAdapter")]

In: what plugins return. Out: entries for `dcp_core.plugins`, which finds, checks and loads them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from dcp_core.errors import AdapterError

ENTRY_POINT_GROUP = "dcp"
"""The entry-point group, and pluggy's project name."""

hookspec = pluggy.HookspecMarker(ENTRY_POINT_GROUP)
hookimpl = pluggy.HookimplMarker(ENTRY_POINT_GROUP)
"""Marks a function of a plugin module as an implementation of the hook of the same name."""

_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_FACTORY = re.compile(rf"{_DOTTED}:{_DOTTED}")
_TYPE_NAME = re.compile(r"[^\W\d]\w*(\.([^\W\d]\w*|<locals>))+")
_MODULE = re.compile(r"[^\W\d]\w*")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def _check(what: str, value: object, pattern: re.Pattern[str], example: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise AdapterError(f"{what} must look like {example!r}, found {value!r}")


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One framework's adapter.

    Attributes:
        name: What the adapter is called, also its `Adapter.name`; unique.
        framework: Top-level module of the framework. The adapter is active once the user has imported that.
        factory: ``"module:attribute"`` of what makes the `Adapter`, called once and without arguments.

    Raises:
        AdapterError: A field is malformed.
    """

    name: str
    framework: str
    factory: str

    def __post_init__(self) -> None:
        _check("an adapter's name", self.name, _MODULE, "torch")
        _check("an adapter's framework", self.framework, _MODULE, "torch")
        _check("an adapter's factory", self.factory, _FACTORY, "dcp_torch.adapter:TorchAdapter")


@dataclass(frozen=True, slots=True)
class DescriberEntry:
    """A describer for one foreign tensor type.

    Attributes:
        type_name: ``"module.qualname"`` of the type, where it is defined: its ``__module__`` and ``__qualname__``.
            Subclasses are offered too. Unique.
        framework: Top-level module of the framework whose tensors it wraps; shown in lists, and imported by checks.
        factory: ``"module:attribute"`` of what makes the `Describer`, called once and without arguments.

    Raises:
        AdapterError: A field is malformed.
    """

    type_name: str
    framework: str
    factory: str

    @property
    def name(self) -> str:
        """What may be claimed once."""
        return self.type_name

    def __post_init__(self) -> None:
        _check("a describer's type name", self.type_name, _TYPE_NAME, "package.module.ShardedThing")
        _check("a describer's framework", self.framework, _MODULE, "torch")
        _check("a describer's factory", self.factory, _FACTORY, "dcp_toy.describers:ToyDescriber")


@dataclass(frozen=True, slots=True)
class ObjectCodecEntry:
    """A safe encoding for values of one type.

    Attributes:
        type_name: ``"module.qualname"`` of the type; values of exactly this type are encoded. Unique.
        factory: ``"module:attribute"`` of what makes the `ObjectCodec`, called once and without arguments, when the
            top-level module of the type has been imported.

    Raises:
        AdapterError: A field is malformed.
    """

    type_name: str
    factory: str

    @property
    def name(self) -> str:
        """What may be claimed once."""
        return self.type_name

    @property
    def framework(self) -> str:
        """Top-level module of the type."""
        return self.type_name.partition(".")[0]

    def __post_init__(self) -> None:
        _check("an object codec's type name", self.type_name, _TYPE_NAME, "torch.Size")
        _check("an object codec's factory", self.factory, _FACTORY, "dcp_torch.codecs:size_codec")


@dataclass(frozen=True, slots=True)
class StorageEntry:
    """A storage for checkpoint URLs of one scheme.

    Attributes:
        scheme: URL scheme in lower case, such as ``"s3"``. Unique.
        factory: ``"module:attribute"`` of what makes the `Storage`, called with the whole URL.

    Raises:
        AdapterError: A field is malformed.
    """

    scheme: str
    factory: str

    @property
    def name(self) -> str:
        """What may be claimed once."""
        return self.scheme

    def __post_init__(self) -> None:
        _check("a storage's scheme", self.scheme, _SCHEME, "s3")
        _check("a storage's factory", self.factory, _FACTORY, "dcp_toy.storage:ToyStorage")


@dataclass(frozen=True, slots=True)
class StagingCopierEntry:
    """How values of one type are copied to the host before an asynchronous save returns.

    Attributes:
        type_name: ``"module.qualname"`` of the type; serves its subclasses too, unless one has a copier of its own.
            Unique.
        factory: ``"module:attribute"`` of the function that takes a value and returns its copy on the host.

    Raises:
        AdapterError: A field is malformed.
    """

    type_name: str
    factory: str

    @property
    def name(self) -> str:
        """What may be claimed once."""
        return self.type_name

    def __post_init__(self) -> None:
        _check("a staging copier's type name", self.type_name, _TYPE_NAME, "package.module.Thing")
        _check("a staging copier's factory", self.factory, _FACTORY, "dcp_toy.staging:copy_thing")


Entry = AdapterEntry | DescriberEntry | ObjectCodecEntry | StorageEntry | StagingCopierEntry


@hookspec
def dcp_adapters() -> Sequence[AdapterEntry]:
    """Register adapters, one a framework.

    Returns:
        The adapters of this plugin.
    """
    return ()


@hookspec
def dcp_describers() -> Sequence[DescriberEntry]:
    """Register describers of tensor types that no adapter knows.

    Returns:
        The describers of this plugin.
    """
    return ()


@hookspec
def dcp_object_codecs() -> Sequence[ObjectCodecEntry]:
    """Register safe encodings for values that would be pickled otherwise.

    Returns:
        The object codecs of this plugin.
    """
    return ()


@hookspec
def dcp_storages() -> Sequence[StorageEntry]:
    """Register storages by URL scheme.

    Returns:
        The storages of this plugin.
    """
    return ()


@hookspec
def dcp_staging_copiers() -> Sequence[StagingCopierEntry]:
    """Register how values are copied to the host for an asynchronous save.

    Returns:
        The staging copiers of this plugin.
    """
    return ()


HOOKS: dict[str, type[Entry]] = {
    "dcp_adapters": AdapterEntry,
    "dcp_describers": DescriberEntry,
    "dcp_object_codecs": ObjectCodecEntry,
    "dcp_storages": StorageEntry,
    "dcp_staging_copiers": StagingCopierEntry,
}
"""Every hook, and the type of the entries that it returns."""

KINDS: dict[type[Any], str] = {
    AdapterEntry: "adapter",
    DescriberEntry: "describer",
    ObjectCodecEntry: "object codec",
    StorageEntry: "storage",
    StagingCopierEntry: "staging copier",
}
"""What entries of each type register, in words."""
