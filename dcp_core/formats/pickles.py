"""Pickles that run nothing but what was allowed.

Only what has no safe encoding is pickled. `pickle_scan` reads a pickle before it is run; the classes that it names come
from the caller's list, never from an import.

Values with a safe encoding that lie inside a pickled object are embedded as a call of `restore_value` with their
encoding, so that allowing a class allows nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

from dcp_core.errors import ArgumentError, CorruptError, DcpError, UnsupportedValueError, UntrustedObjectError
from dcp_core.formats.pickle_scan import PROTOCOL, RESTORE, ClassName, scan_pickle
from dcp_core.type_names import type_name

_ALLOWED: dict[ClassName, object] = {}


def allow_pickled(*classes: Any) -> None:
    """Allow pickled objects of exactly these classes (or made by these functions) to be loaded by this process.

    Whoever writes a checkpoint can have an allowed class called with any arguments, so allow only what you would
    let a stranger call.

    Raises:
        ArgumentError: Something that has no module and qualified name.
    """
    _ALLOWED.update(named_classes(classes))


def allowed_classes(more: Iterable[Any] = ()) -> dict[ClassName, object]:
    """What `allow_pickled` allowed in this process, and `more`."""
    return {**_ALLOWED, **named_classes(more)}


def named_classes(classes: Iterable[Any]) -> dict[ClassName, object]:
    """Index classes by module and qualified name.

    Raises:
        ArgumentError: Something that has none.
    """
    named: dict[ClassName, object] = {}
    for item in classes:
        module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            raise ArgumentError(f"allow_pickled takes classes, found {item!r}; pass the class itself, not its name")
        named[module, name] = item
    return named


def restore_value(blob: bytes) -> object:
    """Stand in a pickle for a value that has a safe encoding; `load_pickle` puts the decoder in its place."""
    raise CorruptError(f"a value of {len(blob)} bytes embedded in a pickle can only be loaded by this library")


def dump_pickle(value: object, encode_safe: Callable[[object], bytes | None], where: str) -> bytes:
    """Pickle a value.

    Args:
        value: What has no safe encoding.
        encode_safe: The safe encoding of an object inside, None if it has none.
        where: How an error names the place.

    Raises:
        UnsupportedValueError: It cannot be pickled.
    """
    out = io.BytesIO()
    try:
        _Pickler(out, encode_safe).dump(value)
        blob = out.getvalue()
        scan_pickle(blob)
    except CorruptError as error:
        raise _not_picklable(value, where, f"its pickle could not be loaded again ({error})") from error
    except DcpError:
        raise
    except Exception as error:
        raise _not_picklable(value, where, f"{type(error).__name__}: {error}") from error
    return blob


def load_pickle(blob: bytes, allowed: Mapping[ClassName, object], restore: Callable[[bytes], object]) -> object:
    """Unpickle what `scan_pickle` let through.

    Args:
        blob: The pickle.
        allowed: Classes that may be called.
        restore: Decodes embedded values.

    Raises:
        CorruptError: It is none of ours.
        UntrustedObjectError: It names a class that is not allowed; nothing was run.
    """
    refused = [name for name in scan_pickle(blob).classes if name not in allowed]
    if refused:
        raise UntrustedObjectError(", ".join([".".join(name) for name in refused]))
    return _Unpickler(blob, allowed, restore).load()


class _Pickler(pickle.Pickler):
    """Embeds safe encodings, and makes enums name nothing but their class."""

    def __init__(self, out: io.BytesIO, encode_safe: Callable[[object], bytes | None]) -> None:
        super().__init__(out, protocol=PROTOCOL)
        self._encode_safe = encode_safe

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return type(value), (value._value_,)
        blob = self._encode_safe(value)
        return NotImplemented if blob is None else (restore_value, (blob,))


class _Unpickler(pickle.Unpickler):
    """Finds classes in a table only."""

    def __init__(self, blob: bytes, allowed: Mapping[ClassName, object], restore: Callable[[bytes], object]) -> None:
        super().__init__(io.BytesIO(blob))
        self._allowed = allowed
        self._restore = restore

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == RESTORE:
            return self._restore
        found = self._allowed.get((module_name, global_name))
        if found is None:
            raise UntrustedObjectError(f"{module_name}.{global_name}")
        return found


def _not_picklable(value: object, where: str, reason: str) -> UnsupportedValueError:
    kind = type_name(value)
    return UnsupportedValueError(
        f"{where}: a value of type {kind} cannot be stored: {reason}; take it out of the state or store plain values"
    )
