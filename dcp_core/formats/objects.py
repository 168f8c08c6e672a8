"""Objects as bytes: a safe and exact encoding of plain values, and pickles for the rest.

In: any value that is no tensor. Out: bytes that decode to an equal value of the same types, bit for bit. Plain values
and what a codec knows run no code when they are decoded; anything else is pickled just at its place inside the
value, and refused on load unless its classes are allowed.

An encoding is one node: a tag byte and what it says below. Sizes and counts are varints (7 bits a byte, low first).

====  ==========================================================================================
N T F  None, True, False
i      int: size, little-endian two's complement
f c    float, complex: the 8 or 16 bytes of IEEE 754 doubles, little-endian
s      str: size, UTF-8 (lone surrogates too)
b B    bytes, bytearray: size, bytes
l t    list, tuple: count, nodes
S Z    set, frozenset: count, nodes sorted by their bytes
d O    dict, OrderedDict: count, key and value nodes in turn
X      a codec's value: size, codec name in UTF-8, node
P      anything else: size, pickle
====  ==========================================================================================
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import xxhash

from dcp_core.errors import CorruptError, DcpError, FormatError, UntrustedObjectError
from dcp_core.formats import numpy_codecs  # noqa: F401  # registers numpy's types
from dcp_core.formats.object_codecs import ObjectCodec, codec_for, codec_named, register_codec
from dcp_core.formats.object_decoder import Decoder
from dcp_core.formats.object_encoder import Encoder, short_text, sized
from dcp_core.formats.pickle_scan import ClassName, scan_pickle
from dcp_core.formats.pickles import allow_pickled, allowed_classes, dump_pickle, load_pickle
from dcp_core.type_names import type_name

__all__ = [
    "ObjectCodec",
    "allow_pickled",
    "decode_value",
    "encode_value",
    "needs_pickle",
    "pickled_classes",
    "register_codec",
    "value_digest",
]


def encode_value(value: object, *, path: str = "", replace: Callable[[object], object] | None = None) -> bytes:
    """Encode a value.

    Args:
        value: Any value that is no tensor leaf. Objects that lie in it several times are stored several times.
        path: Its name, for errors.
        replace: Given what would be pickled, gives what to encode in its place; the same object to go on.

    Raises:
        UnsupportedValueError: It can be neither encoded nor pickled, holds itself, or is nested too deep.
    """
    return Encoder(_name_of(path), partial(_pickled, replace=replace)).encoded(value, 0)


def decode_value(blob: bytes, *, allow: Iterable[type] = (), name: str = "") -> object:
    """Undo `encode_value`.

    Args:
        blob: The encoding; it may come from a stranger.
        allow: Classes whose pickled objects may be made, besides those of `allow_pickled`.
        name: Its name, for errors.

    Raises:
        UntrustedObjectError: It holds pickled objects of classes that nobody allowed. Nothing of theirs was run.
        CorruptError: It is no encoding.
        FormatError: It holds a value whose codec is not registered.
    """
    allowed = allowed_classes(allow)
    with _only_our_errors(_name_of(name)):
        try:
            return _decode(blob, name, 0, allowed)
        except UntrustedObjectError:
            refused = [class_name for class_name in _pickled_classes(blob, 0) if class_name not in allowed]
            raise _untrusted(refused, _name_of(name)) from None


def value_digest(value: object) -> int:
    """128 bits that are equal for equal values, on every rank and in every run.

    The order of dicts and sets does not count; types do, and floats go by their bits. A value that needs pickle
    counts with its type and place only.

    Raises:
        UnsupportedValueError: It holds itself or is nested too deep.
    """
    encoder = Encoder("a value", lambda _, other, depth: sized(b"P", type_name(other).encode()), ignores_order=True)
    return xxhash.xxh3_128_intdigest(encoder.encoded(value, 0))


def needs_pickle(value: object) -> bool:
    """Tell whether a value or something in it has no safe encoding.

    Raises:
        UnsupportedValueError: It holds itself or is nested too deep.
    """
    try:
        Encoder("a value", _refuse_pickle).encoded(value, 0)
    except _PickleNeededError:
        return True
    return False


def pickled_classes(blob: bytes) -> tuple[str, ...]:
    """Name the classes ("module.qualname") that decoding would need allowed, each once, in order. Runs nothing.

    Raises:
        CorruptError: It is no encoding.
    """
    with _only_our_errors("an object"):
        return tuple(dict.fromkeys(".".join(name) for name in _pickled_classes(blob, 0)))


@contextmanager
def _only_our_errors(where: str) -> Iterator[None]:
    """Constructors of strangers' values raise anything, RecursionError included: make it ours."""
    try:
        yield
    except DcpError:
        raise
    except Exception as error:
        raise CorruptError(f"{where}: cannot be made from its bytes: {short_text(error)}") from error


class _PickleNeededError(Exception):
    pass


def _refuse_pickle(encoder: Encoder, value: object, depth: int) -> NoReturn:
    raise _PickleNeededError


def _pickled(
    encoder: Encoder, value: object, depth: int, *, replace: Callable[[object], object] | None = None
) -> bytes:
    if replace is not None:
        replacement = replace(value)
        if replacement is not value:
            return encoder.encoded(replacement, depth + 1)

    def encode_safe(inner: object) -> bytes | None:
        if type(inner) not in (complex, OrderedDict) and codec_for(type(inner)) is None:
            return None
        try:
            return Encoder(encoder.where, _refuse_pickle).encoded(inner, depth + 1)
        except _PickleNeededError:
            return None

    return sized(b"P", dump_pickle(value, encode_safe, encoder.where))


def _decode(blob: bytes, name: str, depth: int, allowed: dict[ClassName, object]) -> object:
    def unpickle(pickle: bytes, at_depth: int) -> object:
        return load_pickle(pickle, allowed, lambda inner: _decode(inner, name, at_depth + 1, allowed))

    return Decoder(blob, _name_of(name), unpickle, _decode_by_codec).whole(depth)


def _decode_by_codec(codec_name: str, plain: object, where: str) -> object:
    codec = codec_named(codec_name)
    if codec is None:
        framework = codec_name.partition(".")[0]
        raise FormatError(f"{where}: holds a {codec_name!r} value; import dcp_{framework}, which can decode it")
    return codec.decode(plain)


def _pickled_classes(blob: bytes, depth: int) -> list[ClassName]:
    found: list[ClassName] = []

    def look_into(pickle: bytes, at_depth: int) -> object:
        report = scan_pickle(pickle)
        found.extend(report.classes)
        for inner in report.embedded:
            found.extend(_pickled_classes(inner, at_depth + 1))
        return object()

    Decoder(blob, "an object", look_into, lambda name, plain, where: object()).whole(depth)
    return found


def _untrusted(refused: list[ClassName], where: str) -> UntrustedObjectError:
    names = list(dict.fromkeys(".".join(class_name) for class_name in refused))
    lines = "".join([f"\n    allow_pickled({name})" for name in names])
    return UntrustedObjectError(
        f"{where}: holds pickled objects of {', '.join(names)}. Making them could run code of the checkpoint's choice, "
        f"so they were not made. If you trust who wrote it, allow exactly these and load again:{lines}"
    )


def _name_of(path: str) -> str:
    return repr(path) if path else "an object"
