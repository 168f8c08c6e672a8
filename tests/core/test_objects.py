"""Objects as bytes: exact round trips, digests, and attacks."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import enum
import io
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import tracemalloc
import types
import zoneinfo
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dcp_core.errors import (
    AdapterError,
    ArgumentError,
    CorruptError,
    DcpError,
    FormatError,
    UnsupportedValueError,
    UntrustedObjectError,
)
from dcp_core.formats import object_codecs, pickles
from dcp_core.formats.objects import (
    ObjectCodec,
    allow_pickled,
    decode_value,
    encode_value,
    needs_pickle,
    pickled_classes,
    register_codec,
    value_digest,
)
from dcp_core.formats.pickle_scan import RESTORE, scan_pickle

UTC = dt.timezone.utc
CALLS: list[object] = []


@dataclass
class Config:
    name: str
    sizes: Any = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    value: Any


class Color(enum.Enum):
    RED = 1
    BLUE = (2, "b")


class Level(enum.IntEnum):
    LOW = 1


class Permission(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Word(str):
    __slots__ = ()


class Names(dict[str, int]):
    pass


class Spy:
    """Leaves a trace when it is made from a pickle."""

    def __reduce__(self) -> Any:
        return note, ("made",)


def note(what: object) -> object:
    CALLS.append(what)
    return what


class Unpicklable:
    def __reduce__(self) -> NoReturn:
        raise RuntimeError("no way")


class Money:
    """A type with a codec."""

    def __init__(self, amount: Any) -> None:
        self.amount = amount

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and self.amount == other.amount

    def __hash__(self) -> int:
        return hash(self.amount)


MONEY = ObjectCodec("shop.Money", f"{__name__}.Money", lambda value: value.amount, Money)


@pytest.fixture
def _registries() -> Iterator[None]:
    """Give back what a test registers."""
    tables: list[dict[Any, Any]] = [pickles._ALLOWED, object_codecs._BY_NAME, object_codecs._BY_TYPE]
    kept = [dict(table) for table in tables]
    CALLS.clear()
    yield
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)


def exactly(value: Any) -> Any:
    """Something that is equal only for values of the same types and bits, in the same order."""
    kind = type(value)
    if isinstance(value, (float, complex)) and kind in (float, complex):
        parts = [value] if kind is float else [value.real, value.imag]
        return kind, [struct.pack("<d", part) for part in parts]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.char in "gG":
        return kind, value.dtype, repr(value)
    if isinstance(value, np.ndarray):
        return kind, value.dtype.str, value.dtype, value.dtype.char, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return kind, value.dtype, value.dtype.char, value.tobytes()
    if isinstance(value, (list, tuple)):
        return kind, [exactly(item) for item in value]
    if isinstance(value, dict):
        return kind, [(exactly(key), exactly(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(repr(exactly(item)) for item in value)
    if isinstance(value, slice):
        return kind, exactly((value.start, value.stop, value.step))
    if isinstance(value, (dt.datetime, dt.time)):
        return kind, value.replace(tzinfo=None), value.fold, value.tzinfo
    return kind, value


def assert_comes_back(value: Any, allow: Any = ()) -> None:
    blob = encode_value(value)
    back = decode_value(blob, allow=allow)
    assert exactly(back) == exactly(value)
    assert encode_value(back) == blob
    assert value_digest(back) == value_digest(value)


# Round trips

NANS = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8000000000001, 0xFFF8DEADBEEF0000)]
floats = st.floats() | st.sampled_from([0.0, -0.0, *NANS])
text = st.text(st.characters(exclude_categories=()), max_size=5) | st.sampled_from(["\ud800", "\ud800\udc00", "\0"])
zones = (
    st.none()
    | st.just(UTC)
    | st.builds(
        dt.timezone,
        st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)),
        st.text("abc", min_size=1, max_size=4),
    )
)
plain_times = (
    st.dates()
    | st.times(timezones=zones)
    | st.datetimes(timezones=zones)
    | st.timedeltas()
    | zones
    | st.datetimes().map(lambda moment: moment.replace(fold=1))
)
paths = st.sampled_from(["", ".", "/", "a/b", "/x/y.z", "é\ud800"]).flatmap(
    lambda value: st.sampled_from([pathlib.Path, pathlib.PurePosixPath, pathlib.PureWindowsPath]).map(
        lambda kind: kind(value)
    )
)
hashable_atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63), 2**64, 10**3000, -(10**50), 127, 128, -128, -129])
    | floats
    | st.complex_numbers()
    | text
    | st.binary(max_size=8)
    | plain_times
    | paths
    | st.just(...)
    | st.builds(range, st.integers(-5, 5), st.integers(), st.integers(1, 9))
)
hashables = st.recursive(
    hashable_atoms,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
arrays = hnp.arrays(
    hnp.boolean_dtypes()
    | hnp.integer_dtypes()
    | hnp.unsigned_integer_dtypes()
    | hnp.floating_dtypes(sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(sizes=(64, 128))
    | hnp.datetime64_dtypes()
    | hnp.timedelta64_dtypes()
    | hnp.byte_string_dtypes(max_len=4)
    | hnp.unicode_string_dtypes(max_len=4),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
scalars = hnp.scalar_dtypes().flatmap(lambda dtype: hnp.arrays(dtype, ()).map(lambda array: array[()]))
dtypes = hnp.scalar_dtypes() | hnp.nested_dtypes(max_leaves=4, max_itemsize=400)
atoms = hashables | st.binary(max_size=4).map(bytearray) | arrays | scalars | dtypes
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashables, inner, max_size=3)
        | st.dictionaries(hashables, inner, max_size=3).map(OrderedDict)
        | st.sets(hashables, max_size=3)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=8,
)


@given(values)
def test_a_plain_value_comes_back_with_exact_types_bits_and_order(value: Any) -> None:
    if not needs_pickle(value):  # numpy scalars without bytes and dtypes with titles are
        assert_comes_back(value)


EXACT: list[Any] = [
    True,
    1,
    1.0,
    -0.0,
    NANS[1],
    complex(-0.0, NANS[0]),
    {1: "int"},
    {True: "bool", "1": 1, None: ()},
    {1.0: {-0.0}},
    {float("nan"): 1, (NANS[0],): 2},
    OrderedDict([("b", 1), ("a", 2)]),
    [bytearray(b"x"), b"x", "x", [], (), set(), frozenset(), {}],
    [10**5000, -(2**20000)],
    slice(None, ..., [1]),
    np.float32("nan"),
    np.bool_(True),
    np.longlong(5),
    np.str_("a\0"),
    np.bytes_(b"a\0"),
    np.str_(""),
    np.datetime64("NaT"),
    np.datetime64(5, "25s"),
    np.longdouble(1.5),
    np.array([1.5, 2**-70], ">g"),
    np.array([[1.5j]], "G"),
    np.array(3, ">i2"),
    np.array(["a", "\U0001f600"], "<U2"),
    np.zeros((0, 5), "M8[us]"),
    np.array([(1, 2.0, "x")], np.dtype([("a", "<i4"), ("b", ">f8"), ("c", "<U3")], align=True)),
    np.array([(1, 2.0)], [("a", "u1"), ("b", "f4", (2,))])[0],
    np.zeros(2, np.dtype((np.record, [("a", "i4")]))),
    np.zeros(2, np.dtype((np.record, [("a", "i4")])))[0],
    np.arange(6).reshape(2, 3).T,
    np.dtype("f4"),
    np.dtype([("a", "f4", (2, 3)), ("b", [("c", "S2")])]),
    dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
]


@pytest.mark.parametrize("value", EXACT, ids=lambda value: type(value).__name__)
def test_a_nasty_value_comes_back_exactly(value: Any) -> None:
    assert not needs_pickle(value)
    assert_comes_back(value)


def test_an_array_that_came_back_is_writeable_and_its_own() -> None:
    array = decode_value(encode_value(np.arange(4)))
    assert isinstance(array, np.ndarray)
    assert array.flags.writeable
    assert array.flags.owndata


def test_gaps_between_fields_do_not_leak_memory_into_the_encoding() -> None:
    dtype = np.dtype([("a", "u1"), ("b", "<u8")], align=True)
    dirty = np.frombuffer(bytes(range(64)), dtype).copy()
    clean = np.zeros(4, dtype)
    clean["a"], clean["b"] = dirty["a"], dirty["b"]
    assert encode_value(dirty) == encode_value(clean)


def test_unused_bytes_of_long_doubles_do_not_leak_memory_into_the_encoding() -> None:
    for dtype in ("<g", ">g", "<G"):
        array = np.full(100, 1.5, dtype)
        dirty: Any = np.ndarray((100,), dtype, buffer=os.urandom(array.nbytes)).copy()
        dirty[:] = array
        assert encode_value(dirty) == encode_value(array)


def test_the_encoding_of_a_set_does_not_depend_on_the_hash_seed() -> None:
    script = (
        "from dcp_core.formats.objects import *; v = {'a': {'x', 'y', 'zz', 'long'}};"
        "print(encode_value(v).hex(), value_digest(v))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


# Digests


def test_dicts_and_sets_built_in_another_order_have_one_digest() -> None:
    one = {"a": {1, 2, 3}, "b": [{"x": 1, "y": 2}]}
    other = {"b": [{"y": 2, "x": 1}], "a": {3, 2, 1}}
    assert value_digest(one) == value_digest(other)
    assert encode_value(one) != encode_value(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (1, "1"),
        (0.0, -0.0),
        (NANS[0], NANS[1]),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ({1: 2}, OrderedDict({1: 2})),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        ([1, 2], [2, 1]),
        ([[1], 2], [[1, 2]]),
        (np.zeros(2, "f4"), np.zeros(2, "f8")),
        (np.zeros(2), np.array([0.0, -0.0])),
        (np.int64(1), 1),
        (b"a", bytearray(b"a")),
        (Config("a"), Frozen("a")),
        ([Config("a"), 1], [1, Config("a")]),
    ],
)
def test_values_that_differ_in_type_bits_or_order_differ_in_digest(one: Any, other: Any) -> None:
    assert value_digest(one) != value_digest(other)


def test_equal_bits_have_one_digest_even_where_values_are_not_equal() -> None:
    assert value_digest([NANS[0]]) == value_digest([NANS[0]])


def test_a_value_that_needs_pickle_counts_with_type_and_place_only() -> None:
    assert value_digest({"a": Config("one")}) == value_digest({"a": Config("other")})
    assert value_digest({"a": Config("one")}) != value_digest({"b": Config("one")})
    assert value_digest({"a": Config("one"), "n": 1}) != value_digest({"a": Config("one"), "n": 2})
    assert 0 <= value_digest(Unpicklable()) < 2**128


def test_the_digest_stays_the_same_from_release_to_release() -> None:
    assert value_digest({"b": (1, -0.0), "a": {None, "x"}}) == value_digest({"a": {"x", None}, "b": (1, -0.0)})
    assert encode_value({"b": (1, -0.0), "a": {None, "x"}}).hex() == (
        "640273016274026901016600000000000000807301615302" + "4e730178"
    )


# Pickled values


@pytest.mark.parametrize(
    "value",
    [
        Config("a", [1]),
        Color.RED,
        Level.LOW,
        Permission.READ,
        Word("x"),
        Names(a=1),
        collections.deque([1]),
        note,
        Config,
    ],
)
def test_a_value_without_a_safe_encoding_needs_pickle(value: Any) -> None:
    assert needs_pickle(value)
    assert needs_pickle([{"k": (value,)}])
    with pytest.raises(UntrustedObjectError):
        decode_value(encode_value([{"k": (value,)}]))


@pytest.mark.parametrize(
    ("value", "classes"),
    [
        (Config("a", {"x": [1, (2,)], "s": {1}, "f": frozenset({2}), "b": bytearray(b"z")}), [Config]),
        (Color.RED, [Color]),
        (Color.BLUE, [Color]),
        (Level.LOW, [Level]),
        (Permission.READ | Permission.WRITE, [Permission]),
        (Word("x"), [Word]),
        (Names(a=1), [Names]),
        ([Config("a", Color.RED), {Frozen(1): 2}], [Config, Color, Frozen]),
        (Config("safe things inside", [1j, ..., dt.date(2024, 1, 1), pathlib.Path("x"), OrderedDict(a=1)]), [Config]),
        (Config("numpy", [np.float32(2), np.dtype("f4"), np.str_("x")]), [Config]),
        (Config("long", ["x" * 300, "y" * 70000, b"z" * 300, b"z" * 70000, 10**700, -5, 300, 70000, 1.5]), [Config]),
        (Config("many", [[str(number)] for number in range(2000)]), [Config]),
    ],
)
def test_a_pickled_value_comes_back_once_exactly_its_classes_are_allowed(value: Any, classes: list[Any]) -> None:
    blob = encode_value(value)
    assert pickled_classes(blob) == tuple(f"{__name__}.{item.__qualname__}" for item in classes)
    for left_out in range(len(classes)):
        with pytest.raises(UntrustedObjectError, match=classes[left_out].__qualname__):
            decode_value(blob, allow=classes[:left_out] + classes[left_out + 1 :])
    assert decode_value(blob, allow=classes) == value


def test_an_array_in_a_pickled_value_needs_no_class_of_numpy() -> None:
    value = Config("a", np.arange(3, dtype=">i2"))
    back = decode_value(encode_value(value), allow=[Config])
    assert isinstance(back, Config)
    assert exactly(back.sizes) == exactly(value.sizes)


def test_references_inside_one_pickled_value_are_kept() -> None:
    inner = Config("inner", np.zeros(2))
    back: Any = decode_value(encode_value(Config("outer", [inner, inner, inner.sizes])), allow=[Config])
    assert back.sizes[0] is back.sizes[1]
    assert back.sizes[2] is back.sizes[0].sizes
    loop = Config("loop")
    loop.sizes = [loop]
    back = decode_value(encode_value(loop), allow=[Config])
    assert back.sizes[0] is back


def test_only_the_place_in_the_container_is_pickled() -> None:
    blob = encode_value({"plain": [1, 2], "config": Config("a"), "again": (Frozen(None),)})
    assert blob.startswith(b"d\x03s\x05plainl\x02")
    assert pickled_classes(blob) == (f"{__name__}.Config", f"{__name__}.Frozen")


def test_the_error_names_every_class_and_the_lines_that_allow_them() -> None:
    blob = encode_value([Config("a"), Frozen(1), Config("b")])
    with pytest.raises(UntrustedObjectError) as caught:
        decode_value(blob, name="model.config")
    message = str(caught.value)
    assert message.startswith("'model.config'")
    assert message.count(f"\n    allow_pickled({__name__}.Config)") == 1
    assert message.count(f"\n    allow_pickled({__name__}.Frozen)") == 1


@pytest.mark.usefixtures("_registries")
def test_allowing_holds_for_the_process_and_for_the_exact_class_only() -> None:
    allow_pickled(Config)
    assert decode_value(encode_value(Config("a"))) == Config("a")
    with pytest.raises(UntrustedObjectError, match="Frozen"):
        decode_value(encode_value(Frozen(Config("a"))))


@pytest.mark.parametrize("wrong", ["os.system", 5, Config("a")])
def test_only_classes_can_be_allowed(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="takes classes"):
        allow_pickled(wrong)


@pytest.mark.usefixtures("_registries")
def test_nothing_is_run_before_it_is_allowed() -> None:
    blob = encode_value([Spy()])
    assert pickled_classes(blob) == (f"{__name__}.note",)
    with pytest.raises(UntrustedObjectError, match=rf"allow_pickled\({__name__}.note\)"):
        decode_value(blob)
    assert CALLS == []
    assert decode_value(blob, allow=[note]) == ["made"]  # type: ignore[list-item]  # a function works too
    assert CALLS == ["made"]


@pytest.mark.parametrize("value", [Unpicklable(), lambda: None, types.ModuleType("m"), iter([]), open])
def test_a_value_that_cannot_be_pickled_is_refused_with_path_and_type(value: Any) -> None:
    if value is open:
        value = open(os.devnull)  # noqa: SIM115  # closed below
    try:
        with pytest.raises(UnsupportedValueError, match=r"'a\.b'.*type \w+\.") as caught:
            encode_value([value] if not isinstance(value, type(iter([]))) else [Unpicklable()], path="a.b")
        assert "cannot be stored" in str(caught.value)
    finally:
        if hasattr(value, "close"):
            value.close()


def looped(make: Callable[[], Any], close: Callable[[Any], None]) -> Any:
    value = make()
    close(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        looped(list, lambda value: value.append(value)),
        looped(list, lambda value: value.append((value,))),
        looped(dict, lambda value: value.update(a=[value])),
        looped(OrderedDict, lambda value: value.update(a=value)),
    ],
    ids=["list", "tuple", "dict", "OrderedDict"],
)
def test_a_value_that_holds_itself_is_refused(value: Any) -> None:
    for attempt in (encode_value, value_digest, needs_pickle):
        with pytest.raises(UnsupportedValueError, match="hold themselves or nest"):
            attempt(value)


# Codecs


@pytest.mark.usefixtures("_registries")
def test_a_registered_codec_makes_a_type_safe() -> None:
    assert needs_pickle(Money(5))
    register_codec(MONEY)
    register_codec(MONEY)
    assert not needs_pickle({Money(5): [Money((1, "x"))]})
    blob = encode_value({Money(5): [Money((1, "x"))]})
    assert decode_value(blob) == {Money(5): [Money((1, "x"))]}
    assert value_digest(Money(5)) != value_digest(Money(6))
    inside = encode_value(Config("a", Money(5)))
    assert decode_value(inside, allow=[Config]) == Config("a", Money(5))
    object_codecs._BY_NAME.pop("shop.Money")
    with pytest.raises(FormatError, match="import dcp_shop"):
        decode_value(blob)


@pytest.mark.usefixtures("_registries")
def test_a_codec_that_declines_leaves_a_value_to_pickle() -> None:
    register_codec(ObjectCodec("shop.Money", MONEY.type_name, lambda value: NotImplemented, Money))
    assert pickled_classes(encode_value([Money(1)])) == (f"{__name__}.Money",)
    assert decode_value(encode_value([Money(1)]), allow=[Money]) == [Money(1)]


@pytest.mark.usefixtures("_registries")
def test_codecs_that_fail_or_contradict_each_other_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"framework\.Type"):
        register_codec(ObjectCodec("money", MONEY.type_name, lambda value: 1, Money))
    register_codec(ObjectCodec("shop.Money", MONEY.type_name, lambda value: 1 // 0, lambda plain: 1 // 0))
    with pytest.raises(AdapterError, match=r"shop\.Money.*other\.Money"):
        register_codec(ObjectCodec("other.Money", MONEY.type_name, lambda value: 1, Money))
    with pytest.raises(UnsupportedValueError, match=r"'m'.*Money.*ZeroDivisionError"):
        encode_value(Money(1), path="m")
    with pytest.raises(CorruptError, match=r"'m'.*ZeroDivisionError"):
        decode_value(b"X\x0ashop.MoneyN", name="m")


@pytest.mark.usefixtures("_registries")
def test_a_codec_that_encodes_to_its_own_type_is_no_endless_loop() -> None:
    register_codec(ObjectCodec("shop.Money", MONEY.type_name, lambda value: [Money(1)], Money))
    with pytest.raises(UnsupportedValueError, match="nest"):
        encode_value(Money(1))


# Attacks


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def pickled(body: bytes) -> bytes:
    return b"P" + varint(len(body)) + body


def coded(name: str, *plain: Any) -> bytes:
    return b"X" + varint(len(name)) + name.encode() + encode_value(plain if len(plain) != 1 else plain[0])


def name_op(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)) + b"\x93"


HUGE = 2**40
PROTO = b"\x80\x05"
CONFIG = name_op(__name__, "Config")
RESTORE_OP = name_op(*RESTORE)
A_CONFIG = CONFIG + b")\x81"  # NEWOBJ without arguments

PICKLES: dict[str, bytes] = {
    "os.system": PROTO + name_op("os", "system") + b"\x8c\x06exit 3\x85R.",
    "posix.system": PROTO + name_op("posix", "system") + b"\x8c\x06exit 3\x85R.",
    "builtins.eval": PROTO + name_op("builtins", "eval") + b"\x8c\x071/0 + 1\x85R.",
    "builtins.getattr": PROTO + name_op("builtins", "getattr") + CONFIG + b"\x8c\x04eval\x86R.",
    "attribute of an allowed class": PROTO + name_op(__name__, "Config.__init__.__globals__") + b".",
    "old protocol": b"cos\nsystem\n(S'exit 3'\ntR.",
    "GLOBAL opcode": PROTO + b"cos\nsystem\n.",
    "INST opcode": PROTO + b"(S'x'\nios\nsystem\n.",
    "persistent id": PROTO + A_CONFIG + b"\x8c\x01xQ.",
    "text persistent id": PROTO + b"Pabc\n.",
    "extension code": PROTO + b"\x82\x01.",
    "long extension code": PROTO + b"\x84\xff\xff\xff\x7f.",
    "out-of-band buffer": PROTO + b"\x97.",
    "huge memo index": PROTO + A_CONFIG + b"r\xff\xff\xff\xff.",
    "text memo index": PROTO + A_CONFIG + b"p99999999999\n.",
    "memo that is not there": PROTO + A_CONFIG + b"j\xff\xff\xff\xff.",
    "BYTEARRAY8 of an absurd length": PROTO + b"\x96" + struct.pack("<Q", HUGE) + b"x.",
    "BYTEARRAY8 of 2**63": PROTO + b"\x96" + struct.pack("<Q", 2**63) + b"x.",
    "BINBYTES8 of an absurd length": PROTO + b"\x8e" + struct.pack("<Q", HUGE) + b"x.",
    "BINUNICODE8 of an absurd length": PROTO + b"\x8d" + struct.pack("<Q", HUGE) + b"x.",
    "BINBYTES of an absurd length": PROTO + b"B" + struct.pack("<I", 2**32 - 1) + b"x.",
    "LONG4 of an absurd length": PROTO + b"\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "LONG4 of a negative length": PROTO + b"\x8b" + struct.pack("<i", -1) + b"x.",
    "frame of an absurd length": PROTO + b"\x95" + struct.pack("<Q", HUGE) + A_CONFIG + b".",
    "decimal number": PROTO + b"I" + b"9" * 100_000 + b"\n.",
    "no class": PROTO + b"].",
    "no stop": PROTO + A_CONFIG,
    "more after the stop": PROTO + A_CONFIG + b"..",
    "empty": b"",
    "no protocol": A_CONFIG + b".",
    "newer protocol": b"\x80\x09" + A_CONFIG + b".",
    "empty stack": PROTO + b"R.",
    "two results": PROTO + A_CONFIG + b"N.",
    "no mark": PROTO + A_CONFIG + b"t.",
    "class name that is no name": PROTO + name_op("os\n", "system") + b".",
    "name from a number": PROTO + b"K\x01K\x02\x93.",
    "call of a number": PROTO + A_CONFIG + b"K\x01)R.",
    "state on a class": PROTO + CONFIG + b"}\x8c\x04name\x8c\x03bad\x73b.",
    "items on a class": PROTO + CONFIG + b"(\x8c\x04name\x8c\x03badu.",
    "restore of no bytes": PROTO + RESTORE_OP + b"K\x01\x85R" + A_CONFIG + b"\x86.",
    "restore of two": PROTO + RESTORE_OP + b"C\x01NC\x01N\x86R" + A_CONFIG + b"\x86.",
    "restore of one thing often": (
        PROTO
        + RESTORE_OP
        + b"\x94C\xff"
        + encode_value(b"x" * 252)
        + b"\x85\x94("
        + b"h\x00h\x01R" * 1000
        + b"t"
        + A_CONFIG
        + b"\x86."
    ),
    "restore of junk": PROTO + RESTORE_OP + b"C\x02QQ\x85R" + A_CONFIG + b"\x86.",
    "deep tuples": PROTO + A_CONFIG + b"\x85" * 200_000 + b".",
    "deep tuples as a key": PROTO + A_CONFIG + b"}K\x01" + b"\x85" * 200_000 + b"Nsb.",
}


@pytest.mark.parametrize("body", PICKLES.values(), ids=PICKLES.keys())
@pytest.mark.parametrize("allow", [[], [Config]], ids=["nothing allowed", "a class allowed"])
def test_a_malicious_pickle_is_refused_without_running_or_allocating(body: bytes, allow: list[Any]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((CorruptError, UntrustedObjectError)):
            decode_value(b"l\x01" + pickled(body), allow=allow)
        assert tracemalloc.get_traced_memory()[1] < 64 * len(body) + 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("os.system", ("os.system",)),
        ("builtins.eval", ("builtins.eval",)),
        ("attribute of an allowed class", (f"{__name__}.Config.__init__.__globals__",)),
        ("builtins.getattr", ("builtins.getattr", f"{__name__}.Config")),
    ],
)
def test_what_a_malicious_pickle_would_call_is_named(name: str, classes: tuple[str, ...]) -> None:
    blob = pickled(PICKLES[name])
    assert pickled_classes(blob) == classes
    with pytest.raises(UntrustedObjectError) as caught:
        decode_value(blob, allow=[Config])
    assert f"allow_pickled({classes[0]})" in str(caught.value)


def test_classes_hidden_in_an_embedded_value_are_named_and_refused_too() -> None:
    inner = pickled(PICKLES["os.system"])
    body = PROTO + RESTORE_OP + b"C" + bytes([len(inner)]) + inner + b"\x85R" + A_CONFIG + b"\x86."
    blob = pickled(body)
    assert pickled_classes(blob) == (f"{__name__}.Config", "os.system")
    with pytest.raises(UntrustedObjectError, match=r"allow_pickled\(os.system\)"):
        decode_value(blob, allow=[Config])


def test_embedded_values_cannot_nest_without_end() -> None:
    blob = encode_value(1)
    for _ in range(300):
        body = PROTO + RESTORE_OP + b"B" + struct.pack("<I", len(blob)) + blob + b"\x85R" + A_CONFIG + b"\x86."
        blob = pickled(body)
    with pytest.raises(CorruptError, match="nest"):
        decode_value(blob, allow=[Config])
    with pytest.raises(CorruptError, match="nest"):
        pickled_classes(blob)


BLOBS: dict[str, bytes] = {
    "empty": b"",
    "unknown tag": b"?",
    "left-over": b"NN",
    "size beyond the end": b"s\x05ab",
    "absurd size": b"b" + varint(2**62),
    "size out of range": b"b" + b"\xff" * 9 + b"\x01",
    "endless size": b"b" + b"\x80" * 50,
    "absurd int": b"i" + varint(2**40) + b"x",
    "absurd list": b"l" + varint(2**62),
    "absurd dict": b"d" + varint(2**61) + b"N" * 10,
    "absurd set": b"S" + varint(2**40) + b"N",
    "short list": b"l\x02N",
    "short float": b"f1234567",
    "broken text": b"s\x02\xff\xff",
    "list as a key": b"d\x01l\x00N",
    "list in a set": b"S\x01l\x00",
    "key twice": b"d\x02NNNN",
    "1 and True as keys": b"d\x02TNi\x01\x01N",
    "set twice": b"S\x02NN",
    "deep lists": b"l\x01" * 100_000 + b"N",
    "deep tuples": b"t\x01" * 100_000 + b"N",
    "deep dicts": b"d\x01N" * 100_000 + b"N",
    "deep sets": b"Z\x01" * 100_000 + b"N",
    "deep codecs": b"X\x04pathX\x04path" * 50_000 + b"N",
    "codec name that is no text": b"X\x01\xffN",
    "date out of range": coded("date", 0, 0, 0),
    "date of wrong types": coded("date", "2024", None, []),
    "date of nothing": coded("date", 5),
    "time zone that is none": coded("datetime", 2024, 1, 1, 0, 0, 0, 0, 0, "UTC"),
    "time zone too far": coded("timezone", dt.timedelta(days=3), None),
    "time zone from a path": coded("zone", "../../../etc/passwd"),
    "time zone from an absolute path": coded("zone", "/etc/passwd"),
    "range of step 0": coded("range", 1, 2, 0),
    "range of text": coded("range", "a", "b", "c"),
    "path of another kind": coded("path", "Path", "x"),
    "path of no text": coded("path", "PosixPath", 5),
    "array that is too short": coded("numpy.array", "<f4", (3,), b"1234"),
    "array of an absurd shape": coded("numpy.array", "<f4", (2**62, 2**62), b"1234"),
    "array of a negative shape": coded("numpy.array", "<f4", (-1, -1), b"1234"),
    "array of an empty absurd shape": coded("numpy.array", "<f4", (0, 2**62, 2**62), b""),
    "array of no bytes an element": coded("numpy.array", "|V0", (2**40,), b""),
    "array of too many dimensions": coded("numpy.array", "|u1", (1,) * 1000, b"1"),
    "array of objects": coded("numpy.array", "|O", (1,), b"12345678"),
    "array of objects in a structure": coded(
        "numpy.array", ("structure", ("a",), ("|O",), (0,), 8, False, False), (1,), b"12345678"
    ),
    "array of no characters": coded("numpy.array", "<U1", (1,), b"\xff\xff\xff\xff"),
    "array of a wild dtype": coded("numpy.array", "i4, (2,3)f8", (1,), b"1234"),
    "dtype of an absurd size": coded("numpy.dtype", "<U999999999999"),
    "dtype of a class": coded("numpy.dtype", "builtins.eval"),
    "dtype with fields outside": coded("numpy.dtype", "structure", ("a",), ("<f8",), (100,), 8, False, False),
    "dtype of an absurd shape": coded("numpy.dtype", "array", "<f8", (2**40, 2**40)),
    "scalar with dimensions": coded("numpy.scalar", "<f4", (1,), b"1234"),
}


@pytest.mark.parametrize("blob", BLOBS.values(), ids=BLOBS.keys())
def test_bytes_that_are_no_encoding_are_refused_without_allocating(blob: bytes) -> None:
    decode_value(encode_value([1, np.zeros(1)]))  # warm up what numpy imports
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="'the key'"):
            decode_value(blob, name="the key")
        assert tracemalloc.get_traced_memory()[1] < 64 * len(blob) + 2**20
    finally:
        tracemalloc.stop()


def test_a_value_of_an_unknown_codec_says_what_to_import() -> None:
    with pytest.raises(FormatError, match=r"'w': holds a 'jax\.Array' value; import dcp_jax"):
        decode_value(b"X\x09jax.ArrayN", name="w")


SAMPLE = encode_value(
    [
        {"a": (1, 2.5, "text", None), "s": {1, 2}},
        np.arange(6.0).reshape(2, 3),
        np.datetime64(3, "s"),
        np.zeros(2, [("x", "f4"), ("y", "S3")]),
        dt.datetime(2024, 2, 29, tzinfo=UTC),
        Config("c", [1, np.zeros(2), "x"]),
        OrderedDict(k=slice(1, 2)),
    ]
)


def only_ours(blob: bytes) -> None:
    with contextlib.suppress(DcpError):
        decode_value(blob, allow=[Config])
    with contextlib.suppress(DcpError):
        pickled_classes(blob)


@given(st.binary(max_size=60))
@example(b"")
def test_random_bytes_give_a_value_or_an_error_of_ours(blob: bytes) -> None:
    only_ours(blob)


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_give_a_value_or_an_error_of_ours(changes: list[tuple[int, int]]) -> None:
    blob = bytearray(SAMPLE)
    for at, byte in changes:
        blob[at] = byte
    only_ours(bytes(blob))


def test_every_truncation_is_refused() -> None:
    for end in range(len(SAMPLE)):
        with pytest.raises(CorruptError):
            decode_value(SAMPLE[:end], allow=[Config])
        with pytest.raises(CorruptError):
            pickled_classes(SAMPLE[:end])


@given(st.lists(st.sampled_from([bytes([code]) for code in range(256)]), max_size=30).map(b"".join))
def test_random_opcodes_are_scanned_or_refused(body: bytes) -> None:
    with contextlib.suppress(CorruptError):
        scan_pickle(PROTO + body)


def test_what_the_scan_says_of_our_pickles_is_what_they_look_up() -> None:
    value = [Config("a", [Color.BLUE, {Frozen((1, 2)): Word("w")}]), Names(x=1)]
    looked_up: list[str] = []

    class Recorder(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str) -> Any:
            looked_up.append(f"{module_name}.{global_name}")
            return super().find_class(module_name, global_name)

    blob = pickles.dump_pickle(value, lambda inner: None, "here")
    assert Recorder(io.BytesIO(blob)).load() == value
    assert [".".join(name) for name in scan_pickle(blob).classes] == list(dict.fromkeys(looked_up))
