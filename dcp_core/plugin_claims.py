"""Who claims what: the entries of all plugins by name, and what stands in for a claim that cannot be used.

In: the records of all plugins. Out: claims by name, and describers over them. Nothing is made before a value turns up
that needs it, and a claim that cannot be used hurts the values that it is for, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from dcp_core.adapter import Adapter, Describer
from dcp_core.errors import AdapterError, ArgumentError, DcpError
from dcp_core.formats.objects import ObjectCodec
from dcp_core.hookspecs import KINDS, AdapterEntry, DescriberEntry, Entry, StorageEntry
from dcp_core.planning.description_checks import description_problem
from dcp_core.planning.leaves import LocalTensor
from dcp_core.plugin_checks import imported_as, wrong_name
from dcp_core.plugin_discovery import PluginRecord
from dcp_core.type_names import name_of_type

_E = TypeVar("_E", bound=Entry)

_REPAIR = "repair the plugin (`dcp plugins --check` tells what is wrong), or take such values out of the state"


@dataclass(frozen=True, slots=True)
class Claim(Generic[_E]):
    """An entry and the plugin that registers it."""

    entry: _E
    plugin: PluginRecord


def claims_by_name(records: Iterable[PluginRecord], entry_type: type[_E]) -> dict[str, tuple[Claim[_E], ...]]:
    """All claims of one kind by what they claim; several on one name are a conflict, which nobody is told of yet."""
    claims: dict[str, tuple[Claim[_E], ...]] = {}
    for record in records:
        for entry in record.entries:
            if isinstance(entry, entry_type):
                claims[entry.name] = (*claims.get(entry.name, ()), Claim(entry, record))
    return claims


def conflict(claims: Sequence[Claim[Any]]) -> str | None:
    """What is wrong with several claims on one name, with the remedy; None for a single one."""
    if len(claims) < 2:
        return None
    claimed = f"the {kind_in_words(claims[0].entry)} {claims[0].entry.name!r}"
    labels = list(dict.fromkeys(claim.plugin.label for claim in claims))
    if len(labels) == 1:
        return f"the plugin {labels[0]} claims {claimed} twice; it must do so once"
    count = "two" if len(labels) == 2 else str(len(labels))
    return f"{count} plugins claim {claimed}: {' and '.join(labels)}; uninstall all but one of them"


def sole(claims: Sequence[Claim[_E]]) -> Claim[_E]:
    """The only claim on a name.

    Raises:
        AdapterError: There are several. Names all plugins.
    """
    problem = conflict(claims)
    if problem is not None:
        raise AdapterError(problem)
    return claims[0]


def kind_in_words(entry: Entry) -> str:
    """A kind of entry, as it reads before a name: the *describer of* a type, the *storage of scheme* "s3"."""
    suffix = {AdapterEntry: "", StorageEntry: " of scheme"}.get(type(entry), " of")
    return KINDS[type(entry)] + suffix


def base_names(of: type) -> list[str]:
    """Names of a type and its bases, most derived first."""
    return [name_of_type(base) for base in of.__mro__]


class TypeDescribers:
    """All registered describers as one: a value is offered only to those registered for its type or a base of it.

    A value whose describer cannot be made, or is registered under a name that the type is only imported by, is an
    error. Left to others it would be pickled, shard by shard, and no other layout could load it.
    """

    def __init__(
        self,
        claims: dict[str, tuple[Claim[DescriberEntry], ...]],
        make: Callable[[Claim[DescriberEntry]], Describer],
    ) -> None:
        self._claims = claims
        self._make = make
        self._names: dict[type, tuple[str, ...]] = {}
        self._made: dict[str, Describer] = {}
        for name in claims:
            defined = imported_as(name)
            if defined is not None and defined not in claims:
                label = claims[name][0].plugin.label
                problem = f"the describer of {name!r} of the plugin {label}: {wrong_name(name, defined)}"
                self._made[defined] = _Unusable(problem)

    def describe(self, value: Any) -> LocalTensor | None:
        """Ask the describer of the most derived type first.

        Raises:
            AdapterError: It cannot be made, two plugins claim the type, its entry has a wrong name, or what it says is
                wrong.
        """
        names = self._names.get(type(value))
        if names is None:
            names = tuple(name for name in base_names(type(value)) if name in self._claims or name in self._made)
            self._names[type(value)] = names
        for name in names:
            describer = self._describer(name)
            try:
                found = describer.describe(value)
            except Exception as error:
                if isinstance(error, DcpError) and not isinstance(error, ArgumentError):
                    raise
                problem = f"raised {type(error).__name__}: {error}"
                raise AdapterError(self._told(name, describer, value, problem)) from error
            if found is not None:
                wrong = description_problem(found)
                if wrong is not None:
                    raise AdapterError(self._told(name, describer, value, wrong))
                return found
        return None

    def declined(self, value: Any) -> str | None:
        """Why a value that nobody described cannot be left to the codecs of plain values, or None.

        A describer that is registered for the very type of a value is asked because the type is one of tensors: where
        it returns None, an oversight of its own would be pickled, shard by shard.
        """
        names = self._names.get(type(value), ())
        if not names or names[0] != base_names(type(value))[0]:
            return None
        problem = "returned None for a value of the type that it is registered for, and nobody else describes it"
        return self._told(names[0], self._describer(names[0]), value, problem)

    def _told(self, name: str, describer: Describer, value: Any, problem: str) -> str:
        """A problem with the words of a describer about a value, as an error tells it."""
        claims = self._claims.get(name, ())
        of = f" of the plugin {claims[0].plugin.label}" if claims else ""
        kind = base_names(type(value))[0]
        return (
            f"{type(describer).__qualname__}.describe {problem}; this is the describer of {name!r}{of}, asked about a "
            f"value of type {kind}: repair it, or take such values out of the state"
        )

    def _describer(self, name: str) -> Describer:
        if name not in self._made:
            try:
                self._made[name] = self._make(sole(self._claims[name]))
            except AdapterError as error:  # kept: a state may have thousands of such values
                remedy = "" if len(self._claims[name]) > 1 else f"; {_REPAIR}"
                self._made[name] = _Unusable(f"{error}{remedy}")
        return self._made[name]


class _Unusable:
    """Stands for a describer that cannot be used."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def describe(self, value: Any) -> NoReturn:
        raise AdapterError(self._problem)


class ContestedAdapters:
    """Adapters that claim one name: a tensor that one of them knows is an error."""

    def __init__(self, adapters: Sequence[Adapter], problem: str) -> None:
        self._adapters = tuple(adapters)
        self._problem = problem

    def describe(self, value: Any) -> None:
        """Leave what is no tensor of theirs to others.

        Raises:
            AdapterError: It is one.
        """
        if any(adapter.describe(value) is not None for adapter in self._adapters):
            raise AdapterError(self._problem)


def contested_codec(name: str, type_name: str, problem: str) -> ObjectCodec:
    """Stands for codecs that claim one type: a value of it can be neither encoded nor decoded."""

    def refuse(_: Any) -> NoReturn:
        raise AdapterError(problem)

    return ObjectCodec(name, type_name, refuse, refuse)
