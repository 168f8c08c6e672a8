from __future__ import annotations

import os
import struct
import tracemalloc
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dcp_core.errors import CorruptError
from dcp_core.formats.column_codec import FREE_NBYTES, MAX_EXPANSION, ColumnReader, ColumnWriter

LOWEST, HIGHEST = -(2**63), 2**63 - 1
INTEGER_RECORD = struct.Struct("<BBQqq")
BYTES_RECORD = struct.Struct("<BQQ")

int64s = st.one_of(st.integers(LOWEST, HIGHEST), st.integers(0, 300), st.sampled_from([LOWEST, HIGHEST, -1, 0]))
columns = hnp.arrays(np.int64, st.integers(0, 60), elements=int64s)


def written(values: np.ndarray[tuple[int], np.dtype[np.int64]], *, delta: bool) -> bytes:
    writer = ColumnWriter()
    writer.integers(values, delta=delta)
    return writer.to_bytes()


def reader_of(block: bytes) -> ColumnReader:
    return ColumnReader(block, "block 'x'")


@given(columns, st.booleans())
def test_any_integer_column_comes_back(values: np.ndarray[tuple[int], np.dtype[np.int64]], delta: bool) -> None:
    reader = reader_of(written(values, delta=delta))
    found = reader.integers(len(values), low=LOWEST, high=HIGHEST)
    reader.finish()
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, values)


@given(st.lists(st.binary(max_size=40), max_size=20), st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_any_strings_and_texts_come_back(strings: list[bytes], texts: list[str]) -> None:
    writer = ColumnWriter()
    writer.count(len(texts))
    writer.strings(strings)
    writer.texts(texts)
    reader = reader_of(writer.to_bytes())
    assert reader.count() == len(texts)
    found_strings, found_texts = reader.strings(len(strings)), reader.texts(len(texts))
    reader.finish()
    assert list(found_strings) == strings
    assert [found_strings[row] for row in range(len(strings))] == strings
    assert list(found_texts) == texts
    assert list(found_texts[1:]) == texts[1:]


def test_a_constant_column_and_a_constant_step_take_a_record_header_only() -> None:
    assert len(written(np.full(100_000, 7), delta=False)) == INTEGER_RECORD.size
    assert len(written(np.arange(0, 800_000, 8), delta=True)) == INTEGER_RECORD.size


def test_the_same_column_gives_the_same_bytes() -> None:
    values = np.random.default_rng(0).integers(0, 1000, 10_000)
    assert written(values, delta=True) == written(values.copy(), delta=True)


@pytest.mark.parametrize("values", [np.zeros(FREE_NBYTES + 2, dtype=np.int64), np.arange(FREE_NBYTES + 2) % 251])
@pytest.mark.parametrize("delta", [False, True])
def test_a_column_beyond_the_free_size_is_stored_so_that_the_reader_takes_it(
    values: np.ndarray[tuple[int], np.dtype[np.int64]], delta: bool
) -> None:
    block = written(values, delta=delta)
    assert len(block) * MAX_EXPANSION >= len(values)
    np.testing.assert_array_equal(reader_of(block).integers(len(values)), values)


def test_strings_beyond_the_free_size_come_back() -> None:
    names = [b"model.layers.%08d.weight" % row for row in range(FREE_NBYTES // 16)]
    writer = ColumnWriter()
    writer.strings(names)
    assert list(reader_of(writer.to_bytes()).strings(len(names))) == names


@pytest.mark.parametrize("count", [2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("coding", [0, 1, 2, 3])
@pytest.mark.parametrize("width", [0, 1, 8])
def test_an_absurd_count_is_refused_before_memory_is_taken(count: int, coding: int, width: int) -> None:
    block = INTEGER_RECORD.pack(coding, width, 16, 0, 0) + bytes(16)
    tracemalloc.start()
    with pytest.raises(CorruptError, match="claims to hold"):
        reader_of(block).integers(count)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_a_bomb_is_refused_whatever_size_it_claims() -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)
    for claimed in (10, FREE_NBYTES, 50_000_000, 2**40):
        tracemalloc.start()
        with pytest.raises(CorruptError):
            reader_of(BYTES_RECORD.pack(1, claimed, len(bomb)) + bomb).blob()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 * FREE_NBYTES


def test_a_stream_cut_short_or_followed_by_more_is_refused() -> None:
    stored = zlib.compress(b"x" * 100)
    for broken in (stored[:-1], stored + b"!", stored[:5], b"junk"):
        with pytest.raises(CorruptError):
            reader_of(BYTES_RECORD.pack(1, 100, len(broken)) + broken).blob()


def test_values_outside_the_range_asked_for_are_refused() -> None:
    block = written(np.array([5, -1, 3]), delta=False)
    with pytest.raises(CorruptError, match=r"outside 0\.\.10: found -1\.\.5"):
        reader_of(block).integers(3, high=10)
    with pytest.raises(CorruptError, match=r"outside -1\.\.4"):
        reader_of(block).integers(3, low=-1, high=4)


def test_texts_that_are_no_utf8_or_split_a_character_are_refused() -> None:
    for parts in ([b"\xff"], [b"\xc3", b"\xa9"]):
        writer = ColumnWriter()
        writer.strings(parts)
        with pytest.raises(CorruptError, match="UTF-8"):
            reader_of(writer.to_bytes()).texts(len(parts))


def test_lengths_that_do_not_add_up_are_refused() -> None:
    for lengths in ([3, 3], [1, 1], [2**62 - 1, 2**62 - 1]):
        writer = ColumnWriter()
        writer.integers(np.array(lengths))
        writer.blob(b"abcde")
        with pytest.raises(CorruptError):
            reader_of(writer.to_bytes()).strings(2)


def sample_block() -> bytes:
    writer = ColumnWriter()
    writer.count(3)
    writer.integers(np.array([1, 500, 70_000]))
    writer.integers(np.arange(0, 4000, 40) ** 2, delta=True)
    writer.texts(["a", "bc", "é" * 40])
    return writer.to_bytes()


def read_sample(block: bytes) -> list[int]:
    reader = reader_of(block)
    lengths = [reader.count(), len(reader.integers(3)), len(reader.integers(100)), len(reader.texts(3))]
    reader.finish()
    return lengths


def test_a_block_cut_anywhere_or_with_bytes_behind_it_is_refused() -> None:
    block = sample_block()
    assert read_sample(block) == [3, 3, 100, 3]
    for nbytes in range(len(block)):
        with pytest.raises(CorruptError):
            read_sample(block[:nbytes])
    with pytest.raises(CorruptError, match="follow the last record"):
        read_sample(block + b"\0")


def test_a_block_with_any_bit_flipped_raises_nothing_but_corrupt() -> None:
    block = sample_block()
    for position in range(len(block)):
        for bit in range(8):
            broken = bytearray(block)
            broken[position] ^= 1 << bit
            with suppress(CorruptError):
                assert read_sample(bytes(broken))[1:] == [3, 100, 3]


@given(st.binary(max_size=200), st.integers(0, 2**64))
def test_random_bytes_raise_nothing_but_corrupt(block: bytes, count: int) -> None:
    for take in ("integers", "strings", "texts"):
        with suppress(CorruptError):
            getattr(reader_of(block), take)(count)
    with suppress(CorruptError):
        reader_of(block).blob()


@pytest.mark.parametrize("count", [FREE_NBYTES, FREE_NBYTES + 1, FREE_NBYTES + 2])
@pytest.mark.parametrize("delta", [False, True])
def test_the_edge_of_the_free_size_is_the_same_for_writer_and_reader(count: int, delta: bool) -> None:
    for values in (np.zeros(count, dtype=np.int64), np.arange(count) % 7):
        np.testing.assert_array_equal(reader_of(written(values, delta=delta)).integers(count), values)


def test_incompressible_bytes_are_stored_as_they_are() -> None:
    raw = os.urandom(1000)
    writer = ColumnWriter()
    writer.blob(raw)
    assert writer.to_bytes() == BYTES_RECORD.pack(0, 1000, 1000) + raw
