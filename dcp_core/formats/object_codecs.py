"""Safe encodings of types beyond the plain ones: the registry, and the standard library's types.

A codec turns a value into a plain one (numbers, strings, bytes, tuples, lists, dicts, or anything else that has a safe
encoding) and back. Adapters register their framework's types; numpy's are in `numpy_codecs`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from typing import Any

from dcp_core.errors import AdapterError, ArgumentError
from dcp_core.type_names import name_of_type


@dataclass(frozen=True, slots=True)
class ObjectCodec:
    """A safe encoding of one type.

    Attributes:
        name: What stands in the file: "framework.Type", where importing `dcp_framework` registers the codec.
        type_name: "module.qualname" of the exact type; subclasses are not meant.
        encode: Gives the plain value; NotImplemented for a value that must be pickled after all.
        decode: Makes the value from a plain one, which may come from a stranger: it checks types and sizes, and may
            raise anything.
    """

    name: str
    type_name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_BY_TYPE: dict[str, ObjectCodec] = {}
_BY_NAME: dict[str, ObjectCodec] = {}


def register_codec(codec: ObjectCodec) -> None:
    """Make a codec known to this process; the same one again does no harm. One name may serve several types.

    Raises:
        ArgumentError: A name without a framework in it.
        AdapterError: Another codec has the type.
    """
    if "." not in codec.name:
        raise ArgumentError(f"the codec {codec.name!r} needs a name like 'framework.Type'")
    known = _BY_TYPE.get(codec.type_name)
    if known is not None and known.name != codec.name:
        raise AdapterError(f"two codecs for the type {codec.type_name}: {known.name!r} and {codec.name!r}")
    _add(codec)


def codec_for(kind: type) -> ObjectCodec | None:
    """The codec of exactly this type."""
    return _BY_TYPE.get(name_of_type(kind))


def codec_named(name: str) -> ObjectCodec | None:
    """The codec that a file names."""
    return _BY_NAME.get(name)


def _add(codec: ObjectCodec) -> None:
    _BY_TYPE[codec.type_name] = codec
    _BY_NAME[codec.name] = codec


def _decode_timezone(plain: Any) -> timezone:
    offset, name = plain
    return timezone(offset) if name is None else timezone(offset, name)


def _encode_timezone(value: Any) -> object:
    offset, *name = value.__getinitargs__()
    return offset, name[0] if name else None


def _encode_time(value: time) -> object:
    return value.hour, value.minute, value.second, value.microsecond, value.fold, value.tzinfo


def _decode_time(plain: Any) -> time:
    hour, minute, second, microsecond, fold, zone = plain
    return time(hour, minute, second, microsecond, zone, fold=fold)


def _encode_datetime(value: datetime) -> object:
    moment = (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
    return *moment, value.fold, value.tzinfo


def _decode_datetime(plain: Any) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold, zone = plain
    return datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)


def _encode_zone(value: Any) -> object:
    return NotImplemented if value.key is None else value.key


def _decode_zone(plain: Any) -> object:
    import zoneinfo  # read only where it is used: importing it looks for the time zone database

    return zoneinfo.ZoneInfo(plain)


def _encode_slice(value: slice) -> object:
    return value.start, value.stop, value.step


def _decode_path(plain: Any) -> pathlib.PurePath:
    kind, text = plain
    pure = {"PosixPath": pathlib.PurePosixPath, "WindowsPath": pathlib.PureWindowsPath}
    if kind == type(pathlib.Path()).__name__:
        return pathlib.Path(text)
    if kind not in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
        raise ValueError(f"{kind} is no kind of path")
    return pure[kind.removeprefix("Pure")](text)


def _register_standard_types() -> None:
    codecs: list[tuple[str, type, Callable[[Any], object], Callable[[Any], object]]] = [
        ("ellipsis", type(...), lambda value: None, lambda plain: ...),
        ("range", range, lambda value: (value.start, value.stop, value.step), lambda plain: range(*plain)),
        ("slice", slice, _encode_slice, lambda plain: slice(*plain)),
        ("date", date, lambda value: (value.year, value.month, value.day), lambda plain: date(*plain)),
        ("time", time, _encode_time, _decode_time),
        ("datetime", datetime, _encode_datetime, _decode_datetime),
        ("timedelta", timedelta, lambda value: (value.days, value.seconds, value.microseconds), _decode_timedelta),
        ("timezone", timezone, _encode_timezone, _decode_timezone),
    ]
    for path_type in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath):
        codecs.append(("path", path_type, lambda value: (type(value).__name__, str(value)), _decode_path))
    for name, kind, encode, decode in codecs:
        _add(ObjectCodec(name, name_of_type(kind), encode, decode))
    _add(ObjectCodec("zone", "zoneinfo.ZoneInfo", _encode_zone, _decode_zone))


def _decode_timedelta(plain: Any) -> timedelta:
    days, seconds, microseconds = (int(part) for part in plain)
    return timedelta(days, seconds, microseconds)


_register_standard_types()
