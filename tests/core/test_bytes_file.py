"""The `.bytes` file: layout, index, and files that contradict themselves."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.errors import CorruptError, NewerVersionError
from dcp_core.formats.bytes_file import (
    ENTRY_NBYTES,
    MAGIC,
    PREAMBLE_NBYTES,
    BytesIndex,
    build_bytes_file,
    check_value,
    parse_index,
    parse_preamble,
)

VALUES = [b"one", b"", b"three" * 100]


def index_of(raw: bytes, nbytes: int) -> BytesIndex:
    return parse_index(raw, xxhash.xxh3_128_intdigest(raw), nbytes, name="_rank0_.bytes")


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_values_are_found_by_the_index(values: list[bytes]) -> None:
    file = build_bytes_file(values)
    whole = file.header + b"".join(values)
    assert len(whole) == file.nbytes
    assert len(file.header) == file.data_start
    assert parse_preamble(whole[:PREAMBLE_NBYTES], file.nbytes) == len(values)
    raw = whole[file.field_start : file.field_start + file.field_nbytes]
    index = parse_index(raw, file.digest, file.nbytes)
    assert len(index) == len(values)
    for ordinal, value in enumerate(values):
        start = int(index.offsets[ordinal])
        blob = whole[start : start + int(index.nbytes[ordinal])]
        assert blob == value
        check_value(blob, int(index.digests[ordinal]), "a value")


def test_the_bytes_are_those_of_the_format() -> None:
    file = build_bytes_file([b"ab", b""])
    entries = [(2, xxhash.xxh3_64_intdigest(b"ab")), (0, xxhash.xxh3_64_intdigest(b""))]
    assert file.header == b"DCPBYTES" + struct.pack("<II", 1, 2) + b"".join(
        struct.pack("<QQ", *entry) for entry in entries
    )
    assert (file.field_start, file.field_nbytes, file.data_start, file.nbytes) == (16, 32, 48, 50)
    assert file.digest == xxhash.xxh3_128_intdigest(file.header[16:])


def test_any_flipped_byte_of_the_index_is_found() -> None:
    file = build_bytes_file(VALUES)
    raw = file.header[file.field_start :]
    for at in range(len(raw)):
        damaged = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises(CorruptError, match=r"_rank0_\.bytes: its index does not match"):
            parse_index(damaged, file.digest, file.nbytes, name="_rank0_.bytes")


def test_any_flipped_byte_of_a_value_is_found() -> None:
    for at in range(3):
        damaged = bytearray(b"one")
        damaged[at] ^= 1
        with pytest.raises(CorruptError, match="'rng' in _rank0_.bytes: its 3 bytes"):
            check_value(bytes(damaged), xxhash.xxh3_64_intdigest(b"one"), "'rng' in _rank0_.bytes")


@pytest.mark.parametrize("size", [-1, 1, 2**40])
def test_an_index_that_contradicts_the_size_of_the_file_is_refused(size: int) -> None:
    file = build_bytes_file(VALUES)
    raw = file.header[file.field_start :]
    with pytest.raises(CorruptError, match="describes"):
        index_of(raw, file.nbytes + size)


@pytest.mark.parametrize("lengths", [[2**64 - 1], [2**63, 2**63], [2**64 - 32, 2], [10, 2**64 - 10]])
def test_absurd_lengths_are_refused_even_where_their_sum_wraps(lengths: list[int]) -> None:
    raw = b"".join(struct.pack("<QQ", length, 0) for length in lengths)
    for nbytes in (0, 32, 48, 100, (PREAMBLE_NBYTES + len(raw) + sum(lengths)) % 2**64 % 2**63):
        with pytest.raises(CorruptError):
            index_of(raw, nbytes)


@pytest.mark.parametrize("raw", [b"x", b"x" * 15, b"x" * 17])
def test_an_index_of_broken_entries_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptError, match="whole entries"):
        index_of(raw, PREAMBLE_NBYTES + len(raw))


@pytest.mark.parametrize("raw", [b"", MAGIC, b"DCPBYTEZ" + bytes(8), b"\x80\x04cos\nsystem\n....", bytes(16)])
def test_another_file_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptError, match="does not start like"):
        parse_preamble(raw, 1000)


def test_a_newer_version_and_an_impossible_count_are_refused() -> None:
    with pytest.raises(NewerVersionError, match="version 2"):
        parse_preamble(struct.pack("<8sII", MAGIC, 2, 0), 16)
    with pytest.raises(CorruptError, match="does not fit"):
        parse_preamble(struct.pack("<8sII", MAGIC, 1, 2**32 - 1), 10_000)
    with pytest.raises(CorruptError, match="does not fit"):
        parse_preamble(struct.pack("<8sII", MAGIC, 0, 0), 16)


def test_an_empty_file_has_an_empty_index() -> None:
    file = build_bytes_file([])
    assert (file.field_nbytes, file.nbytes, file.data_start) == (0, 16, 16)
    index = parse_index(b"", file.digest, 16)
    assert len(index) == 0
    assert index.offsets.dtype == np.int64
    assert ENTRY_NBYTES == 16
