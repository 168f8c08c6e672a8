"""Looks a pickle of torch's over before it is read: no more memory and time than its bytes are worth.

Goes in: bytes from a stranger. Comes out: nothing, or an error. The pickle machine takes memory as a pickle tells it
to (a memo of 2**32 places is five bytes) and walks what is shared each time that it is met (a key that is a tuple of
twice the same tuple, 40 times over), so both are checked before. What names mean is checked while it is read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from dcp_core.errors import CorruptError

_MAX_WEIGHT = 1024
"""Values that a tuple may hold, those in its tuples included; keys and paths hold a few."""

_PLAIN = 1
_MARK = -1
_NUMBER = 0
_BYTEARRAY = -2
_ONE_NUMBER = 2
"""What a tuple of one number weighs: as an argument of `bytearray` it asks for so many bytes."""

_FIXED = {
    ord("N"): 0, 0x88: 0, 0x89: 0, ord("]"): 0, ord("}"): 0, 0x8F: 0, ord("G"): 8,
}  # fmt: skip
"""Opcodes that put one value, and bytes of their argument: None, booleans, empty list, dict and set, a float."""
_NUMBERS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
_COUNTED = {
    0x8C: "<B", ord("X"): "<I", 0x8D: "<Q", ord("C"): "<B", ord("B"): "<I", 0x8E: "<Q", 0x96: "<Q",
    ord("U"): "<B", ord("T"): "<i",
}  # fmt: skip
"""Opcodes of texts and bytes, and the form of their length."""
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_TAKEN = {ord("R"): 2, 0x81: 2, 0x93: 2, ord("Q"): 1}
"""Opcodes that take so many values and put one: calls, a name by texts, a persistent id."""
_FILL = {ord("a"): 1, ord("s"): 2, ord("b"): 1}
_FILL_TO_MARK = frozenset({ord("e"), ord("u"), 0x90})


def check_pickle(raw: bytes, name: str, *, max_weight: int = _MAX_WEIGHT) -> None:
    """Refuse a pickle that would take memory or time out of proportion, or has opcodes that torch never writes.

    Args:
        raw: The pickle, up to its end or beyond.
        name: What to call it in errors.
        max_weight: Values that a tuple may hold, those in its tuples included.

    Raises:
        CorruptError: It is such a pickle, or is cut short.
    """
    try:
        _Scan(raw, max_weight).run()
    except (IndexError, struct.error, ValueError) as error:
        raise CorruptError(f"{name} is damaged: its pickle ends, or goes wrong, in the middle: {error}") from error
    except CorruptError as error:
        raise CorruptError(f"{name} is damaged, or made to do harm: {error.message}") from error


class _Scan:
    """The pickle machine with weights in the place of values."""

    def __init__(self, raw: bytes, max_weight: int) -> None:
        self._raw = raw
        self._max_weight = max_weight
        self._at = 0
        self._stack: list[int] = []
        self._memo: list[int] = []

    def run(self) -> None:
        """Go through all opcodes."""
        raw, stack = self._raw, self._stack
        while True:
            opcode = raw[self._at]
            self._at += 1
            if opcode in _FIXED:
                self._at += _FIXED[opcode]
                stack.append(_PLAIN)
            elif opcode in _NUMBERS:
                self._at += _NUMBERS[opcode]
                stack.append(_NUMBER)
            elif opcode in _COUNTED:
                self._skip_counted(_COUNTED[opcode])
                stack.append(_PLAIN)
            elif opcode == 0x94:
                self._memo.append(stack[-1])
            elif opcode in _TAKEN:
                if self._take(_TAKEN[opcode]) == [_BYTEARRAY, _ONE_NUMBER]:
                    raise CorruptError("it asks for bytes that it does not hold")
                stack.append(_PLAIN)
            elif opcode in _TUPLES:
                self._put_tuple(self._take(_TUPLES[opcode]))
            elif opcode in _FILL:
                self._take(_FILL[opcode])
                self._top()
            elif opcode in _FILL_TO_MARK:
                self._take_to_mark()
                self._top()
            elif opcode == ord("("):
                stack.append(_MARK)
            elif opcode == ord("."):
                self._top()
                return
            else:
                self._step_rarely(opcode)

    def _step_rarely(self, opcode: int) -> None:
        action = _RARE.get(opcode)
        if action is None:
            raise CorruptError(f"opcode {opcode:#x} at byte {self._at - 1} is none that torch writes")
        action(self)

    def _top(self) -> int:
        if not self._stack or self._stack[-1] == _MARK:
            raise CorruptError("it takes more from its stack than it put there")
        return self._stack[-1]

    def _take(self, count: int) -> list[int]:
        taken = self._stack[-count:]
        if len(taken) < count or _MARK in taken:
            raise CorruptError("it takes more from its stack than it put there")
        del self._stack[-count:]
        return taken

    def _take_to_mark(self) -> list[int]:
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] == _MARK:
                taken = self._stack[at + 1 :]
                del self._stack[at:]
                return taken
        raise CorruptError("it lacks a mark")

    def _put_tuple(self, items: list[int]) -> None:
        weight = 1 + len(items) + sum(map(abs, items))
        if weight > self._max_weight:
            raise CorruptError(f"a tuple holds more than {self._max_weight} values")
        self._stack.append(weight)

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._raw, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def _skip_counted(self, form: str) -> None:
        count = self._number(form)
        if not 0 <= count <= len(self._raw) - self._at:
            raise CorruptError(f"{count} bytes are announced, {len(self._raw) - self._at} are left")
        self._at += count

    def _memoize_at(self, index: int) -> None:
        if index == len(self._memo):
            self._memo.append(self._top())
        elif index < len(self._memo):
            self._memo[index] = self._top()
        else:
            raise CorruptError(f"memo {index} comes after {len(self._memo)} others")

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _name(self) -> None:
        start = self._at
        for _ in range(2):
            self._at = self._raw.index(b"\n", self._at) + 1
        self._stack.append(_BYTEARRAY if self._raw[start : self._at].endswith(b"\nbytearray\n") else _PLAIN)

    def _long(self) -> None:
        self._skip_counted("<B")
        self._stack.append(_NUMBER)

    def _frame(self) -> None:
        if self._number("<Q") > len(self._raw) - self._at:
            raise CorruptError("a frame is longer than its pickle")

    def _start(self) -> None:
        self._at += 1

    def _pop(self) -> None:
        self._take(1)

    def _empty_tuple(self) -> None:
        self._put_tuple([])


_RARE: dict[int, Callable[[_Scan], None]] = {
    0x80: _Scan._start,
    0x95: _Scan._frame,
    0x8A: _Scan._long,
    ord("c"): _Scan._name,
    ord(")"): _Scan._empty_tuple,
    ord("t"): lambda scan: scan._put_tuple(scan._take_to_mark()),
    ord("h"): lambda scan: scan._get(scan._number("<B")),
    ord("j"): lambda scan: scan._get(scan._number("<I")),
    ord("q"): lambda scan: scan._memoize_at(scan._number("<B")),
    ord("r"): lambda scan: scan._memoize_at(scan._number("<I")),
    ord("0"): _Scan._pop,
}
