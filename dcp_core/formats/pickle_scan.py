"""Read a pickle without running it.

In: bytes from a stranger. Out: what the pickle would look up by name, or an error. Opcode by opcode, every length and
memo index must be possible, and only what our own pickles do is let through: calls of named classes, and changes of
what such calls made.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from dcp_core.errors import CorruptError

ClassName: TypeAlias = tuple[str, str]
"""Module and qualified name."""

PROTOCOL = 5
"""Of all pickles that are written and read."""

RESTORE: ClassName = ("dcp_core.formats.pickles", "restore_value")
"""Stands in a pickle for the decoder of an embedded safe encoding. Part of the format: the name must not change."""

_MAX_TUPLE_DEPTH = 1000
_MAX_TUPLE_WEIGHT = 1 << 20
"""Values that a tuple may hold, those in its tuples included: what several share counts each time, as in a hash."""
_TEXT = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_RAW = frozenset({"SHORT_BINBYTES", "BINBYTES", "BINBYTES8"})
_NUMBERS = frozenset({"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"})
_MADE = frozenset({"BYTEARRAY8", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_SET"})


@dataclass(frozen=True, slots=True)
class PickleReport:
    """What a pickle would do.

    Attributes:
        classes: Everything that it looks up by name, in order, each once; `restore_value` left out.
        embedded: The encodings that it hands to `restore_value`.
    """

    classes: tuple[ClassName, ...]
    embedded: tuple[bytes, ...]


def scan_pickle(blob: bytes) -> PickleReport:
    """Read a pickle without running it.

    Raises:
        CorruptError: Not a pickle as this library writes them: truncated, with impossible lengths or memo indices,
            with persistent ids, extension codes or other opcodes that we never write, or naming no class at all.
    """
    machine = _Machine()
    last = -1
    try:
        for opcode, argument, at in pickletools.genops(blob):
            last = at or 0
            machine.step(opcode.name, argument, len(blob) - last)
    except CorruptError:
        raise
    except Exception as error:
        raise CorruptError(f"a pickle that cannot be read: {error}") from error
    if last != len(blob) - 1 or not machine.classes or sum(map(len, machine.embedded)) > len(blob):
        raise CorruptError("a pickle that this library did not write")
    return PickleReport(tuple(machine.classes), tuple(machine.embedded))


class _Item:
    """Something on the stack of which only the nesting of tuples matters, and how much there is to walk."""

    __slots__ = ("depth", "weight")

    def __init__(self, depth: int = 0, weight: int = 1) -> None:
        self.depth = depth
        self.weight = weight


@dataclass(frozen=True, slots=True)
class _Global:
    name: ClassName


@dataclass(frozen=True, slots=True)
class _OneBytes:
    """The tuple (bytes,): what `restore_value` may be called with."""

    value: bytes


_MARK = object()
_RESTORED = object()
_PLAIN = _Item()


class _Machine:
    """The pickle machine, with names in place of values."""

    def __init__(self) -> None:
        self.classes: dict[ClassName, None] = {}
        self.embedded: list[bytes] = []
        self._stack: list[object] = []
        self._memo: list[object] = []
        self._is_started = False

    def step(self, name: str, argument: Any, left: int) -> None:
        """Do what one opcode does, `left` bytes before the end."""
        if not self._is_started:
            self._start(name, argument)
        elif name == "FRAME":
            if argument > left:
                raise CorruptError("a pickle with a frame longer than itself")
        elif name in _TEXT or name in _RAW:
            self._stack.append(argument)
        elif name in _NUMBERS or name in _MADE:
            self._stack.append(_PLAIN)
        else:
            action = _ACTIONS.get(name)
            if action is None:
                raise CorruptError(f"a pickle with the opcode {name}, which this library never writes")
            action(self, argument)

    def _start(self, name: str, argument: Any) -> None:
        if name != "PROTO" or argument != PROTOCOL:
            raise CorruptError(f"a pickle that does not start with protocol {PROTOCOL}")
        self._is_started = True

    def _pop(self) -> object:
        if not self._stack or self._stack[-1] is _MARK:
            raise CorruptError("a pickle that takes more from its stack than it put there")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[object]:
        items: list[object] = []
        while self._stack and self._stack[-1] is not _MARK:
            items.append(self._stack.pop())
        if not self._stack:
            raise CorruptError("a pickle that lacks a mark")
        self._stack.pop()
        return items

    def _memoize(self, _: Any) -> None:
        top = self._pop()
        self._memo.append(top)
        self._stack.append(top)

    def _get(self, index: int) -> None:
        if index >= len(self._memo):
            raise CorruptError(f"a pickle that refers to memo {index} of {len(self._memo)}")
        self._stack.append(self._memo[index])

    def _global(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str) or not _is_dotted(module) or not _is_dotted(name):
            raise CorruptError("a pickle that names a class in a way this library never writes")
        if (module, name) != RESTORE:
            self.classes[module, name] = None
        self._stack.append(_Global((module, name)))

    def _tuple(self, items: list[object]) -> None:
        if len(items) == 1 and isinstance(items[0], bytes):
            self._stack.append(_OneBytes(items[0]))
            return
        known = [item for item in items if isinstance(item, _Item)]
        depth = 1 + max([item.depth for item in known], default=0)
        if depth > _MAX_TUPLE_DEPTH:
            raise CorruptError(f"a pickle with tuples nested more than {_MAX_TUPLE_DEPTH} deep")
        self._stack.append(_Item(depth, _weight_of(items, known)))

    def _call(self, arguments: int) -> None:
        """REDUCE, NEWOBJ and NEWOBJ_EX: only names can be called, `restore_value` only with bytes."""
        popped = [self._pop() for _ in range(arguments)]
        called = self._pop()
        if not isinstance(called, _Global):
            raise CorruptError("a pickle that calls something that it does not name")
        if called.name == RESTORE:
            if not isinstance(popped[0], _OneBytes):
                raise CorruptError("a pickle with a damaged embedded value")
            self.embedded.append(popped[0].value)
            self._stack.append(_RESTORED)  # may be anybody's, a type of numpy's for instance: nothing changes it
            return
        self._stack.append(_Item(0, _weight_of(popped, [item for item in popped if isinstance(item, _Item)])))

    def _fill(self, items: int | None) -> None:
        """APPEND, SETITEM, BUILD and the like: never on a class."""
        if items is None:
            self._pop_to_mark()
        else:
            for _ in range(items):
                self._pop()
        target = self._pop()
        if not isinstance(target, _Item):
            raise CorruptError("a pickle that changes something it did not make")
        self._stack.append(target)

    def _stop(self, _: Any) -> None:
        self._pop()
        if self._stack:
            raise CorruptError("a pickle that leaves something on its stack")


_ACTIONS: dict[str, Callable[[_Machine, Any], object]] = {
    "MARK": lambda machine, _: machine._stack.append(_MARK),
    "POP": lambda machine, _: machine._pop(),
    "POP_MARK": lambda machine, _: machine._pop_to_mark(),
    "MEMOIZE": _Machine._memoize,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "STACK_GLOBAL": _Machine._global,
    "TUPLE": lambda machine, _: machine._tuple(machine._pop_to_mark()),
    "TUPLE1": lambda machine, _: machine._tuple([machine._pop()]),
    "TUPLE2": lambda machine, _: machine._tuple([machine._pop(), machine._pop()]),
    "TUPLE3": lambda machine, _: machine._tuple([machine._pop(), machine._pop(), machine._pop()]),
    "FROZENSET": lambda machine, _: machine._tuple([*machine._pop_to_mark(), _PLAIN]),
    "REDUCE": lambda machine, _: machine._call(1),
    "NEWOBJ": lambda machine, _: machine._call(1),
    "NEWOBJ_EX": lambda machine, _: machine._call(2),
    "APPEND": lambda machine, _: machine._fill(1),
    "SETITEM": lambda machine, _: machine._fill(2),
    "BUILD": lambda machine, _: machine._fill(1),
    "APPENDS": lambda machine, _: machine._fill(None),
    "SETITEMS": lambda machine, _: machine._fill(None),
    "ADDITEMS": lambda machine, _: machine._fill(None),
    "STOP": _Machine._stop,
}


def _weight_of(items: list[object], known: list[_Item]) -> int:
    """How many values there are to walk in a tuple of these, or in what is made of them."""
    weight = 1 + len(items) - len(known) + sum([item.weight for item in known])
    if weight > _MAX_TUPLE_WEIGHT:
        raise CorruptError(f"a pickle whose tuples hold more than {_MAX_TUPLE_WEIGHT} values, the same ones many times")
    return weight


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))
