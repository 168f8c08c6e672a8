"""Data files are valid safetensors files, and no byte of their header can change unnoticed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from xxhash import xxh3_64_intdigest

from dcp_core.dtype import DTYPES, DType, dtype_named
from dcp_core.errors import CorruptError, DcpError, IncompleteError, PlanningError
from dcp_core.formats.checksums import (
    BLOCK_BYTES,
    ChecksumTable,
    block_checksum,
    block_counts,
    decode_field,
    encode_field,
    field_length,
    make_table,
)
from dcp_core.formats.safetensors_file import (
    SAVE_ID_START,
    FileFacts,
    HeaderEntry,
    HeaderLayout,
    build_header,
    fill_header,
    read_checksums,
)
from dcp_core.formats.safetensors_parser import header_nbytes, parse_header

SAVE_ID = "0123456789abcdef" * 2


def entries_of(*parts: tuple[str, DType, tuple[int, ...]]) -> list[HeaderEntry]:
    position, entries = 0, []
    for key, dtype, sizes in parts:
        nbytes = int(np.prod(sizes)) * dtype.itemsize
        entries.append(HeaderEntry(key, dtype, sizes, position, nbytes))
        position += nbytes
    return entries


def blocks_of(content: bytes, layout: HeaderLayout) -> list[int]:
    found, position = [], 0
    for nbytes in layout.chunk_nbytes.tolist():
        chunk = content[position : position + nbytes]
        found += [block_checksum(chunk[i : i + BLOCK_BYTES]) for i in range(0, nbytes, BLOCK_BYTES)]
        position += nbytes
    return found


def file_of(entries: list[HeaderEntry], content: bytes) -> tuple[bytes, FileFacts]:
    layout = build_header(entries)
    header, digest = fill_header(layout, SAVE_ID, blocks_of(content, layout))
    facts = FileFacts("f", SAVE_ID, layout.nbytes, layout.data_start, layout.field_start, layout.field_nbytes, digest)
    return header + content, facts


def random_bytes(count: int) -> bytes:
    return random.Random(count).randbytes(count)


def test_every_dtype_comes_back_through_safetensors_own_reader(tmp_path: Path) -> None:
    entries = entries_of(*((dtype.name, dtype, (2, 3)) for dtype in DTYPES))
    content = random_bytes(sum(entry.nbytes for entry in entries))
    raw, _ = file_of(entries, content)
    (tmp_path / "f.safetensors").write_bytes(raw)
    with safe_open(tmp_path / "f.safetensors", framework="numpy") as opened:
        assert sorted(opened.keys()) == sorted(dtype.name for dtype in DTYPES)
        for dtype, entry in zip(DTYPES, entries, strict=True):
            found = opened.get_slice(dtype.name)
            assert found.get_dtype() == dtype.file_dtype
            assert found.get_shape() == [2, 3, *dtype.file_tail]
            if dtype.numpy is not None or dtype.name == "complex32":
                array = opened.get_tensor(dtype.name)
                assert array.tobytes() == content[entry.byte_offset : entry.byte_offset + entry.nbytes]


def test_our_parser_agrees_with_safetensors_on_names_shapes_and_spans() -> None:
    entries = entries_of(*((f"t.{dtype.name}", dtype, (3, 1, 2)) for dtype in DTYPES), ("0d", DTYPES[4], ()))
    raw, facts = file_of(entries, random_bytes(sum(entry.nbytes for entry in entries)))
    assert header_nbytes(raw[:8], len(raw), "f") == facts.data_start
    arrays, notes = parse_header(raw[: facts.data_start], len(raw), "f")
    assert notes["dcp.save_id"] == SAVE_ID
    assert [(a.key, a.byte_offset, a.nbytes) for a in arrays] == [(e.key, e.byte_offset, e.nbytes) for e in entries]
    assert arrays[-1].shape == ()


@pytest.mark.parametrize(
    "key", ["a.b", "päth/ü 中", 'quo"te\\', "new\nline\ttab\0nul", "x" * 3000, '$["a"]@0,1', "\U0001f600"]
)
def test_nasty_keys_survive_in_the_header(key: str, tmp_path: Path) -> None:
    raw, _ = file_of(entries_of((key, dtype_named("uint8"), (4,))), b"abcd")
    (tmp_path / "f").write_bytes(raw)
    with safe_open(tmp_path / "f", framework="numpy") as opened:
        assert list(opened.keys()) == [key]
        assert opened.get_tensor(key).tobytes() == b"abcd"


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_data_starts_at_a_multiple_of_64_and_fields_lie_where_the_layout_says(count: int) -> None:
    layout = build_header(entries_of(*((f"k{i}", dtype_named("int16"), (i + 1,)) for i in range(count))))
    assert layout.data_start % 64 == 0
    assert layout.header[SAVE_ID_START : SAVE_ID_START + 32] == b"0" * 32
    field = layout.header[layout.field_start : layout.field_start + layout.field_nbytes]
    assert field == b"A" * layout.field_nbytes
    assert layout.header[layout.field_start + layout.field_nbytes :].startswith(b'"}')
    blocks = blocks_of(bytes(layout.data_nbytes), layout)
    header, _ = fill_header(layout, SAVE_ID, blocks)
    notes = json.loads(header[8:])["__metadata__"]
    assert notes["dcp.save_id"] == SAVE_ID and notes["dcp.format"] == "1"
    assert len(header) == len(layout.header)
    other, _ = fill_header(layout, "f" * 32, blocks)
    assert [i for i in range(len(header)) if header[i] != other[i]] == [
        SAVE_ID_START + i for i in range(32) if SAVE_ID[i] != "f"
    ]


def test_a_chunk_checksum_is_the_checksum_of_its_block_checksums() -> None:
    content = random_bytes(2 * BLOCK_BYTES + 5)
    entries = entries_of(("a", dtype_named("uint8"), (2 * BLOCK_BYTES + 1,)), ("b", dtype_named("uint8"), (4,)))
    raw, facts = file_of(entries, content)
    table = read_checksums(raw[: facts.data_start], facts)
    first, last = content[: 2 * BLOCK_BYTES + 1], content[2 * BLOCK_BYTES + 1 :]
    blocks = [first[:BLOCK_BYTES], first[BLOCK_BYTES : 2 * BLOCK_BYTES], first[2 * BLOCK_BYTES :], last]
    expected = np.array([xxh3_64_intdigest(block) for block in blocks], dtype="<u8")
    assert table.block.tolist() == expected.tolist()
    assert table.chunk.tolist() == [
        xxh3_64_intdigest(expected[:3].tobytes()),
        xxh3_64_intdigest(expected[3:].tobytes()),
    ]
    whole, end = 2 * BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 5
    starts, lengths = [0, whole, 0, 1, whole, end, 0], [whole, 4, 4, 3, 0, 9, end]
    found = table.first_blocks_of(np.array(starts, np.int64), np.array(lengths, np.int64))
    assert found.tolist() == [0, 3, -1, -1, -1, -1, -1]


def test_every_flipped_bit_pattern_in_the_header_is_noticed() -> None:
    raw, facts = file_of(entries_of(("a", dtype_named("float32"), (3,)), ("b", dtype_named("int8"), (1,))), b"x" * 13)
    header = raw[: facts.data_start]
    read_checksums(header, facts)
    for position in range(len(header)):
        for mask in (0x01, 0x20, 0xFF):
            broken = bytearray(header)
            broken[position] ^= mask
            with pytest.raises(CorruptError, match="^f: "):
                read_checksums(bytes(broken), facts)


def test_a_file_of_another_save_or_an_unfinished_one_is_named_as_such() -> None:
    raw, facts = file_of(entries_of(("a", dtype_named("float32"), (3,))), b"x" * 12)
    other = FileFacts("f", "f" * 32, *(getattr(facts, name) for name in FileFacts.__slots__[2:]))
    with pytest.raises(CorruptError, match="belongs to the save"):
        read_checksums(raw[: facts.data_start], other)
    with pytest.raises(CorruptError, match="was never finished"):
        read_checksums(bytes(facts.data_start), facts)


@pytest.mark.parametrize(
    "entries",
    [
        [HeaderEntry("a", DTYPES[0], (2,), 1, 2)],
        [HeaderEntry("a", DTYPES[0], (2,), 0, 3)],
        entries_of(("a", DTYPES[0], (2,)), ("a", DTYPES[0], (2,))),
        entries_of(("__metadata__", DTYPES[0], (2,))),
        entries_of(("\ud800", DTYPES[0], (2,))),
    ],
    ids=["gap", "length", "repeated", "reserved", "surrogate"],
)
def test_chunks_that_no_safetensors_file_can_hold_are_refused(entries: list[HeaderEntry]) -> None:
    with pytest.raises(PlanningError):
        build_header(entries)


def test_a_header_longer_than_safetensors_allows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_core.formats.safetensors_file.MAX_HEADER_BYTES", 500)
    with pytest.raises(PlanningError, match="safetensors allows"):
        build_header(entries_of(*((f"k{i}", DTYPES[0], (1,)) for i in range(20))))


def test_the_checksum_field_comes_back_and_has_the_announced_length() -> None:
    for lengths in ([], [0], [1], [BLOCK_BYTES], [BLOCK_BYTES + 1, 0, 7], [5] * 40):
        nbytes = np.array(lengths, np.int64)
        blocks = list(range(int(block_counts(nbytes).sum())))
        field = encode_field(make_table(17, nbytes, blocks))
        assert len(field) == field_length(nbytes)
        table = decode_field(field, sum(lengths), "f")
        assert table.header == 17 and table.block.tolist() == blocks
        assert np.diff(table.byte_offset).tolist() == lengths


def field_of_words(*words: int) -> bytes:
    import binascii

    return binascii.b2a_base64(np.array(words, dtype="<u8").tobytes(), newline=False)


@pytest.mark.parametrize(
    "field",
    [
        b"",
        b"!!!!",
        b"AAAA",
        b"A",
        field_of_words(1),
        field_of_words(1, 2**63),
        field_of_words(1, 5, 1, 2),
        field_of_words(1, 1, 2**64 - 1, 0, 0),
        field_of_words(1, 2, 2**63, 2**63 + 8, 0, 0),
        field_of_words(1, 1, 8, 0),
        field_of_words(1, 1, 8, 0, 0, 0),
        field_of_words(1, 1, 8, 12345, 0),
        field_of_words(1, 1, 9, xxh3_64_intdigest(bytes(8)), 0),
    ],
)
def test_a_checksum_field_that_lies_is_refused(field: bytes) -> None:
    with pytest.raises(CorruptError, match="^f: "):
        decode_field(field, 8, "f")


def header_for(text: str) -> bytes:
    body = text.encode()
    return len(body).to_bytes(8, "little") + body


@pytest.mark.parametrize(
    ("text", "data_nbytes"),
    [
        ("", 0),
        ("[]", 0),
        ("{", 0),
        ("[" * 100_000, 0),
        ('{"__metadata__": 5}', 0),
        ('{"__metadata__": {"a": 5}}', 0),
        ('{"a": 5}', 0),
        ('{"a": {"dtype": "U8", "shape": [1]}}', 0),
        ('{"a": {"dtype": "XX", "shape": [1], "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": 5, "shape": [1], "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', 2),
        ('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0.0, 1.0]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [false, true]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": ["0", "1"]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [null, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": 1}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": {"0": 0, "1": 1}}}', 1),
        ('{"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": null, "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}', 1),
        ('{"a": null}', 1),
        ('{"a": {"dtype": "U8", "shape": [4611686018427387904, 4], "data_offsets": [0, 1]}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": {}}', 1),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', 2),
        ('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', 0),
        (
            '{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},'
            ' "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}',
            3,
        ),
    ],
)
def test_a_foreign_header_that_breaks_the_format_is_refused(text: str, data_nbytes: int) -> None:
    header = header_for(text)
    with pytest.raises((CorruptError, IncompleteError), match="^f: "):
        parse_header(header, len(header) + data_nbytes, "f")


def test_absurd_header_lengths_are_refused_before_anything_is_read() -> None:
    for prefix, nbytes in ((b"", 0), (b"1234567", 7), (b"\xff" * 8, 100), (b"\x10" + bytes(7), 20)):
        with pytest.raises((CorruptError, IncompleteError), match="^f: "):
            header_nbytes(prefix, nbytes, "f")


def test_random_damage_to_a_foreign_header_never_raises_anything_but_our_errors() -> None:
    raw, facts = file_of(entries_of(("a", dtype_named("float32"), (3,)), ("b", dtype_named("int8"), (1,))), b"x" * 13)
    draw = random.Random(5)
    for _ in range(3000):
        broken = bytearray(raw[: facts.data_start])
        for _ in range(draw.randint(1, 4)):
            broken[draw.randrange(8, len(broken))] = draw.randrange(256)
        try:
            parse_header(bytes(broken), facts.nbytes, "f")
        except DcpError:
            continue


def test_a_table_with_a_wrong_number_of_blocks_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="block checksums"):
        make_table(0, np.array([5], np.int64), [])
    assert isinstance(make_table(0, np.array([5], np.int64), [1]), ChecksumTable)
