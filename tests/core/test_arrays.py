from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dcp_core.adapter import Adapter, ProcessGroup
from dcp_core.arrays import ArrayAccess, NumpyAdapter, convert, storage_of
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, DTYPES, DType, Kind, conversion
from dcp_core.errors import ArgumentError, DTypeMismatchError, UnsupportedValueError

pytestmark = pytest.mark.timeout(120)

ADAPTER: Adapter = NumpyAdapter()
NUMPY_TYPES = [dtype for dtype in DTYPES if dtype.numpy is not None]
SMALL_FLOATS = [dtype for dtype in DTYPES if dtype.kind is Kind.FLOAT and dtype.itemsize <= 2]
FLOAT32 = BY_NAME["float32"]


def array(dtype: npt.DTypeLike, values: Sequence[Any]) -> npt.NDArray[Any]:
    return np.array(values, dtype)


# -- the oracle: values of a code, and the nearest code of a value, from the formats' definitions --------------------

NO_INFINITY = {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}


def value_of(dtype: DType, code: int) -> Fraction | float:
    """The exact value of a code: a fraction, or infinity or NaN."""
    if dtype.name == "float8_e8m0fnu":
        return math.nan if code == 255 else Fraction(2) ** (code - 127)
    bits = dtype.itemsize * 8
    sign = -1 if code >> bits - 1 else 1
    exponent = code >> dtype.mantissa & (1 << dtype.exponent) - 1
    fraction = code & (1 << dtype.mantissa) - 1
    bias = (1 << dtype.exponent - 1) - 1
    if dtype.name.endswith("fnuz"):
        bias += 1
        if code == 0x80:
            return math.nan
    elif dtype.name == "float8_e4m3fn":
        if code & 0x7F == 0x7F:
            return math.nan
    elif exponent == (1 << dtype.exponent) - 1:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * Fraction(fraction, 1 << dtype.mantissa) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(fraction, 1 << dtype.mantissa)) * Fraction(2) ** (exponent - bias)


def all_codes(dtype: DType) -> npt.NDArray[Any]:
    return np.arange(1 << dtype.itemsize * 8).astype(f"<u{dtype.itemsize}").view(dtype.bits)


def same_value(found: float, expected: Fraction | float) -> bool:
    if isinstance(expected, float):
        return math.isnan(found) if math.isnan(expected) else found == expected
    return math.isfinite(found) and Fraction(found) == expected


@functools.cache
def finite_codes(dtype: DType) -> dict[Fraction, int]:
    """The codes of the finite magnitudes, ascending."""
    codes = range(1 << dtype.itemsize * 8 - 1)
    return {exact: code for code in codes if isinstance(exact := value_of(dtype, code), Fraction)}


def nearest_code(dtype: DType, value: Fraction) -> int:
    """Round a finite value to a code: nearest, ties to the even code; beyond the range as the module says."""
    finite = finite_codes(dtype)
    magnitude = abs(value)
    ordered = list(finite)
    limit = ordered[-1] + (ordered[-1] - ordered[-2]) / 2
    sign = 1 << dtype.itemsize * 8 - 1 if value < 0 else 0
    if magnitude > limit or (magnitude == limit and finite[ordered[-1]] % 2 == 1):
        if dtype.name.endswith("fnuz"):
            return 0x80
        return sign | finite[ordered[-1]] + (0 if dtype.name == "float8_e4m3fn" else 1)
    best = min(ordered, key=lambda candidate: (abs(candidate - magnitude), finite[candidate] % 2))
    return finite[best] if dtype.name.endswith("fnuz") and finite[best] == 0 else sign | finite[best]


# -- conversions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_every_code_of_a_small_float_becomes_its_exact_value(dtype: DType, wide: str) -> None:
    codes = all_codes(dtype)
    if dtype.itemsize == 2:
        codes = np.concatenate([codes[:: 7 if wide == "float64" else 1], codes[-600:]])
    values = convert(codes, dtype, BY_NAME[wide])
    assert values.dtype == np.dtype(wide)
    for code, value in zip(codes.view(f"<u{dtype.itemsize}").tolist(), values.tolist(), strict=True):
        assert same_value(value, value_of(dtype, code)), hex(code)
        if value == 0:
            assert math.copysign(1, value) == (-1 if code else 1), hex(code)


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=lambda dtype: dtype.name)
def test_every_value_of_a_small_float_comes_back_from_a_wider_type(dtype: DType) -> None:
    codes = all_codes(dtype)
    for wide in ("float32", "float64"):
        values = convert(codes, dtype, BY_NAME[wide])
        back = convert(values, BY_NAME[wide], dtype).view(f"<u{dtype.itemsize}")
        expected = codes.view(f"<u{dtype.itemsize}")
        is_nan = np.isnan(values)
        np.testing.assert_array_equal(back[~is_nan], expected[~is_nan])
        assert np.isnan(convert(back[is_nan].view(dtype.bits), dtype, FLOAT32)).all()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_values_between_and_halfway_between_two_codes_round_to_nearest_even(name: str, wide: str) -> None:
    dtype = BY_NAME[name]
    exact = sorted({v for code in range(256) if isinstance(v := value_of(dtype, code), Fraction)})
    halfway = [(low + high) / 2 for low, high in itertools.pairwise(exact)]
    step = exact[-1] - exact[-2]
    beyond = [sign * (exact[-1] + step * n / 4) for n in range(1, 9) for sign in (1, -1)]
    middle = np.array([float(value) for value in [*exact, *halfway, *beyond]], dtype=wide)
    values = np.concatenate([middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)])
    found = convert(values, BY_NAME[wide], dtype)
    for value, code in zip(values.tolist(), found.tolist(), strict=True):
        assert code == nearest_code(dtype, Fraction(value)) or (value == 0 and code & 0x7F == 0), value


@pytest.mark.parametrize("name", [dtype.name for dtype in SMALL_FLOATS])
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_infinities_and_nans_become_what_the_type_has(name: str, wide: str) -> None:
    dtype = BY_NAME[name]
    values = np.array([np.inf, -np.inf, np.nan, -np.nan], dtype=wide)
    found = convert(convert(values, BY_NAME[wide], dtype), dtype, FLOAT32)
    assert np.isnan(found[2:]).all()
    if name == "float8_e4m3fn":
        assert found[:2].tolist() == [448.0, -448.0]
    elif name in NO_INFINITY:
        assert np.isnan(found[:2]).all()
    else:
        assert found[:2].tolist() == [np.inf, -np.inf]


def test_powers_of_two_round_to_the_nearest_with_ties_up_and_have_no_sign() -> None:
    values = array("float64", [0.0, 1e-300, 1.0, 1.25, 1.5, 1.75, 2.0, 2.0**127, 1.4 * 2.0**127, 2.0**128, -1.0, -0.0])
    found = convert(values, BY_NAME["float64"], BY_NAME["float8_e8m0fnu"])
    assert found.tolist() == [0, 0, 127, 127, 128, 128, 128, 254, 254, 255, 255, 0]


def nearest_bfloat16(value: float) -> int:
    """Round through exact fractions: the two neighbours are what truncation gives, and the one after it."""
    if math.isinf(value):
        return 0x7F80 if value > 0 else 0xFF80
    sign = 0x8000 if math.copysign(1, value) < 0 else 0
    magnitude = Fraction(abs(value))
    low, high = 0, 0x7F7F
    dtype = BY_NAME["bfloat16"]
    while low < high:
        middle = (low + high + 1) // 2
        exact = value_of(dtype, middle)
        assert isinstance(exact, Fraction)
        low, high = (middle, high) if exact <= magnitude else (low, middle - 1)
    below = value_of(dtype, low)
    above = value_of(dtype, low + 1) if low < 0x7F7F else Fraction(2) ** 128
    assert isinstance(below, Fraction)
    assert isinstance(above, Fraction)
    to_below, to_above = magnitude - below, above - magnitude
    up = to_above < to_below or (to_above == to_below and low % 2 == 1)
    return sign | low + up


@given(hnp.arrays(np.float64, 20, elements=st.floats(allow_nan=False)))
def test_float64_rounds_to_bfloat16_once(values: npt.NDArray[np.float64]) -> None:
    found = convert(values, BY_NAME["float64"], BY_NAME["bfloat16"])
    assert found.tolist() == [nearest_bfloat16(value) for value in values.tolist()]


@given(hnp.arrays(np.float32, 20, elements=st.floats(width=32, allow_nan=False)))
def test_float32_rounds_to_bfloat16(values: npt.NDArray[np.float32]) -> None:
    found = convert(values, FLOAT32, BY_NAME["bfloat16"])
    assert found.tolist() == [nearest_bfloat16(value) for value in values.tolist()]


def test_float64_that_would_round_twice_through_float32_does_not() -> None:
    halfway = 1.0 + 2.0**-8
    values = array("float64", [halfway, halfway + 2.0**-40, halfway - 2.0**-40, -(halfway + 2.0**-52)])
    assert convert(values, BY_NAME["float64"], BY_NAME["bfloat16"]).tolist() == [0x3F80, 0x3F81, 0x3F80, 0xBF81]


def test_a_signalling_nan_whose_payload_is_cut_off_stays_a_nan() -> None:
    values = array("uint32", [0x7F800001, 0xFF800001, 0x7FFFFFFF]).view(np.float32)
    for name in ("bfloat16", "float16"):
        assert np.isnan(convert(convert(values, FLOAT32, BY_NAME[name]), BY_NAME[name], FLOAT32)).all()


def test_bfloat16_and_float16_convert_into_each_other() -> None:
    bfloat16, float16 = BY_NAME["bfloat16"], BY_NAME["float16"]
    halves = array("float16", [1.0, -2.5, 65504.0, 2**-24, np.inf])
    assert convert(halves, float16, bfloat16).tolist() == [0x3F80, 0xC020, 0x4780, 0x3380, 0x7F80]
    back = convert(array("uint16", [0x3F80, 0xC020, 0x4780, 0x3380, 0x7F80]), bfloat16, float16)
    assert back.tolist() == [1.0, -2.5, np.inf, 2**-24, np.inf]


def test_integers_and_complex_numbers_convert() -> None:
    int64 = BY_NAME["int64"]
    assert convert(array("int64", [3, -(2**40)]), int64, BY_NAME["bfloat16"]).tolist() == [0x4040, 0xD380]
    assert convert(array("int64", [3, -5]), int64, BY_NAME["float8_e5m2"]).tolist() == [0x42, 0xC5]
    complex32, complex64 = BY_NAME["complex32"], BY_NAME["complex64"]
    numbers = array("complex64", [1 + 2j, -0.5 - 4j])
    halves = convert(numbers, complex64, complex32)
    assert halves.tolist() == [0x40003C00, 0xC400B800]
    np.testing.assert_array_equal(convert(halves, complex32, complex64), numbers)
    assert convert(halves, complex32, FLOAT32).tolist() == [1.0, -0.5]
    assert convert(array("float32", [2.0]), FLOAT32, complex32).tolist() == [0x4000]


def test_conversions_without_meaning_are_refused() -> None:
    opaque = BY_NAME["float4_e2m1fn_x2"]
    codes = array("uint8", [1, 2])
    assert convert(codes, opaque, opaque) is codes
    for source, target in ((opaque, FLOAT32), (FLOAT32, opaque)):
        with pytest.raises(DTypeMismatchError, match="float4_e2m1fn_x2"):
            convert(codes.view(source.bits) if source is opaque else array("float32", [1]), source, target)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3)])
def test_every_pair_of_types_converts_any_shape(shape: tuple[int, ...]) -> None:
    for source in DTYPES:
        for target in DTYPES:
            if Kind.OPAQUE in (source.kind, target.kind):
                continue
            found = convert(np.ones(shape, source.bits), source, target)
            assert (type(found), found.shape, found.dtype) == (np.ndarray, shape, target.bits)


@pytest.mark.parametrize("source", DTYPES, ids=lambda dtype: dtype.name)
def test_a_lossless_conversion_comes_back_bit_for_bit(source: DType) -> None:
    codes = all_codes(source) if source.itemsize <= 2 else _edges(source)
    if source.kind is Kind.BOOL:
        codes = np.array([False, True])
    for target in DTYPES:
        if conversion(source, target) != "lossless":
            continue
        back = convert(convert(codes, source, target), target, source)
        is_nan = np.zeros(codes.shape, bool)
        if source.kind is Kind.FLOAT:
            is_nan = np.isnan(convert(codes, source, BY_NAME["float64"]))
        bits = f"u{source.itemsize}" if source.itemsize <= 8 else source.bits
        np.testing.assert_array_equal(back[~is_nan].view(bits), codes[~is_nan].view(bits), err_msg=target.name)


def _edges(dtype: DType) -> npt.NDArray[Any]:
    if dtype.numpy is None:
        return array("uint32", [0, 0x3C00, 0x40003C00, 0x80000000]).view(dtype.bits)
    if dtype.kind in (Kind.SIGNED, Kind.UNSIGNED):
        bounds = np.iinfo(np.dtype(dtype.numpy).name)
        return np.array([bounds.min, bounds.max, 0, 1, bounds.max // 3], dtype.bits)
    limits = np.finfo(np.dtype(dtype.numpy).name)
    return np.array([0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_subnormal, 1 / 3], dtype.bits)


# -- the adapter ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMPY_TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_arrays_of_every_type_and_byte_order_are_whole_tensors(
    dtype: DType, order: str, shape: tuple[int, ...]
) -> None:
    values = np.full(shape, 1, order + np.dtype(dtype.numpy).str[1:])
    local = ADAPTER.describe(values)
    assert local is not None
    assert (local.global_shape, local.dtype, local.boxes) == (shape, dtype, (Box.whole(shape),))
    assert local.views[0] is values
    assert (local.device, local.plain, local.ragged, local.replica_ranks) == ("cpu", True, False, None)
    bits = local.access.read_out(values)
    assert (bits.dtype, bits.shape) == (dtype.bits, shape)
    np.testing.assert_array_equal(bits, values)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_array_is_a_tensor_without_boxes(shape: tuple[int, ...]) -> None:
    local = ADAPTER.describe(np.empty(shape, np.int8))
    assert local is not None
    assert (local.global_shape, local.boxes, local.views, local.storage) == (shape, (), (), None)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        np.float32(3),
        [1, 2],
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([object()]),
        np.zeros(2, [("a", "i4"), ("b", "f4")]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, "V2"),
        np.zeros(2, np.longdouble),
        np.ma.masked_array([1, 2]),  # type: ignore[no-untyped-call]  # numpy's stub lacks it
        np.zeros((2, 2)).view(np.recarray),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_array_of_numbers_is_left_to_others(value: object) -> None:
    assert ADAPTER.describe(value) is None


def test_the_host_array_shares_memory_and_knows_whether_it_may_be_written() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2]
    shared = ADAPTER.host_array(values)
    assert shared is not None
    assert np.shares_memory(shared, values)
    shared[...] = 7
    assert (values == 7).all()
    values.flags.writeable = False
    read_only = ADAPTER.host_array(values)
    assert read_only is not None
    assert not read_only.flags.writeable
    assert ADAPTER.host_array(values.astype(">f4")) is None


def test_nan_payloads_survive_reading_out_and_copying_in_either_byte_order() -> None:
    bits = array("uint64", [0x7FF0000000000001, 0xFFF8000000ABCDEF])
    for order in "<>":
        target = np.zeros(2, f"{order}f8")
        ADAPTER.copy_into(target, bits.view("<f8"), BY_NAME["float64"])
        np.testing.assert_array_equal(ADAPTER.read_out(target).view("<u8"), bits)


def test_copying_into_an_array_converts_and_keeps_to_the_view() -> None:
    values = np.zeros((4, 4), ">f4")
    view = ADAPTER.narrow(values, Box((1, 0), (2, 2)))
    ADAPTER.copy_into(view, array("uint16", [[0x3F80, 0xC020], [0x4040, 0]]), BY_NAME["bfloat16"])
    expected = np.zeros((4, 4))
    expected[1:3, :2] = [[1, -2.5], [3, 0]]
    np.testing.assert_array_equal(values, expected)


def test_copying_into_a_read_only_array_is_refused() -> None:
    values = np.broadcast_to(np.float32(1), (3,))
    with pytest.raises(UnsupportedValueError, match="read-only"):
        ADAPTER.copy_into(values, array("float32", [1, 2, 3]), FLOAT32)


def test_narrowing_a_0_d_array_keeps_its_memory() -> None:
    values = np.zeros((), np.int32)
    view = ADAPTER.narrow(values, Box((), ()))
    ADAPTER.copy_into(view, np.array(5, np.int32), BY_NAME["int32"])
    assert values == 5


def test_raw_bits_are_reached_through_the_type_that_they_stand_for() -> None:
    access = ArrayAccess(BY_NAME["bfloat16"])
    values = np.zeros((2, 2), np.uint16)
    access.copy_into(access.narrow(values, Box((0, 1), (2, 1))), array("float32", [[1], [-2.5]]), FLOAT32)
    assert values.tolist() == [[0, 0x3F80], [0, 0xC020]]
    assert access.host_array(values) is not None
    with pytest.raises(UnsupportedValueError, match="float32"):
        access.read_out(np.zeros(2, np.float32))


def test_arrays_of_foreign_float_types_are_described_by_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1.0, -2.5], ml_dtypes.bfloat16)
    local = ADAPTER.describe(values)
    assert local is not None
    assert local.dtype == BY_NAME["bfloat16"]
    assert ADAPTER.read_out(values).tolist() == [0x3F80, 0xC020]


def test_storage_is_equal_exactly_for_the_same_elements_of_the_same_memory() -> None:
    values = np.zeros((4, 4), np.float32)
    assert storage_of(values) == storage_of(values[:, :]) == storage_of(values.view())
    assert storage_of(values[:1]) == storage_of(values.T[:, :1].T)
    others = [
        values[1:],
        values[:, 1:],
        values.T,
        values.view(np.int32),
        values.reshape(2, 8),
        values.copy(),
        values[::2],
    ]
    keys = [storage_of(other) for other in (values, *others)]
    assert len(set(keys)) == len(keys)
    assert storage_of(values[:0]) is None


def test_a_process_with_numpy_alone_is_a_group_of_one() -> None:
    assert ADAPTER.process_group() == ProcessGroup(0, 1, 0, None, "alone")
    with pytest.raises(ArgumentError, match="no process groups"):
        ADAPTER.process_group("gloo")
