from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.errors import CorruptError, NewerVersionError, PlanningError
from dcp_core.formats import metadata_reader
from dcp_core.formats.block_container import FIRST_READ_NBYTES, BlockContainer, BlockSource
from dcp_core.formats.group_directory import GROUP_WEIGHT, MAX_GROUPS, NAME_WEIGHT, cut_groups
from dcp_core.formats.metadata_file import (
    MetadataColumns,
    assemble,
    encode_body,
    file_names,
    open_bytes,
    open_metadata,
)
from dcp_core.metadata import EVERY_RANK, ChunkColumns, FileColumns, Metadata, SaveRecord, TensorColumns, WriterRecord
from tests.core.metadata_samples import (
    SAVE,
    SAVE_ID,
    WRITER,
    Checkpoint,
    Tensor,
    checkpoints,
    everything,
    grid_cells,
    path_of,
    replaced,
    small_checkpoint,
)


class CountingFile:
    """Bytes that note which ranges were read."""

    def __init__(self, blob: bytes) -> None:
        self.blob = blob
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, nbytes: int) -> bytes:
        self.reads.append((offset, nbytes))
        return self.blob[offset : offset + nbytes]

    @property
    def nbytes_read(self) -> int:
        return sum(nbytes for _, nbytes in self.reads)

    def blocks_touched(self) -> set[str]:
        """Blocks beyond the first read of which a byte was read."""
        container = BlockContainer(lambda offset, nbytes: self.blob[offset : offset + nbytes], len(self.blob))
        spans = container._spans.items()
        reads = [(start, nbytes) for start, nbytes in self.reads if start > 0]
        return {
            name
            for name, (start, nbytes, _) in spans
            if any(start < offset + length and offset < start + nbytes for offset, length in reads)
        }


def large_checkpoint(tensors: int = 30_000) -> Checkpoint:
    """Names that no compression makes small, so that blocks lie far beyond the first read."""
    random = np.random.default_rng(3)
    names = sorted("layer." + random.bytes(12).hex() for _ in range(tensors))
    boxes = grid_cells((8, 4), [[4], []])
    made = Checkpoint([Tensor(name, (8, 4), boxes, files=[0, 1]) for name in names], [], 2)
    made.place()
    return made


@given(checkpoints())
def test_what_was_written_is_what_is_read(made: Checkpoint) -> None:
    opened = open_bytes(made.blob())
    assert everything(opened) == everything(made.source())


@given(checkpoints())
def test_whole_columns_come_back_as_they_were_written(made: Checkpoint) -> None:
    columns, found = made.columns(), open_bytes(made.blob()).columns()
    for kind in ("tensors", "chunks", "objects"):
        for name in getattr(columns, kind).__slots__:
            expected, got = getattr(getattr(columns, kind), name), getattr(getattr(found, kind), name)
            if isinstance(expected, np.ndarray):
                assert got.dtype == expected.dtype
                np.testing.assert_array_equal(got, expected, err_msg=name)
            elif expected is None:
                assert got is None, name
            else:
                assert list(got) == list(expected)
    assert found.nesting == columns.nesting


@given(checkpoints())
def test_columns_that_were_read_encode_to_the_same_bytes(made: Checkpoint) -> None:
    blob = made.blob()
    opened = open_bytes(blob)
    assert assemble(encode_body(opened.columns()), opened.files, opened.save, opened.writer) == blob
    assert made.blob() == blob


def test_names_that_are_not_there_have_no_entries() -> None:
    for source in (open_bytes(small_checkpoint().blob()), small_checkpoint().source()):
        for name in ("", "a", "grid.", "grie", "zzz", "tied.t", "\U0010ffff"):
            assert list(source.tensors(name)) == []
            assert list(source.objects(name)) == []


def test_the_public_view_shows_tensors_and_objects() -> None:
    metadata = Metadata(open_bytes(small_checkpoint().blob()))
    assert list(metadata.state_dict_metadata) == [
        "empty",
        "epoch",
        "grid",
        "loose",
        "note",
        "rng",
        "scalar",
        "tied",
        "tied.too",
    ]
    assert metadata.save_id == SAVE_ID
    assert metadata.world_size == 4


def test_chunks_of_a_stored_tensor_are_as_wide_as_the_tensor() -> None:
    opened = open_bytes(small_checkpoint().blob())
    for name, ndim in (("scalar", 0), ("loose", 1), ("grid", 2)):
        (tensor,) = opened.tensors(name)
        assert tensor.chunks.offsets.shape == tensor.chunks.sizes.shape == (len(tensor.chunks), ndim)


def test_a_checkpoint_without_anything_comes_back() -> None:
    made = Checkpoint([], [], 0)
    opened = open_bytes(made.blob())
    assert everything(opened) == everything(made.source())
    assert opened.names() == ()
    assert opened.file_names() == []


def test_the_file_is_a_safetensors_file() -> None:
    blob = small_checkpoint().blob()
    names = {name for name, _ in safetensors.deserialize(blob)}  # type: ignore[no-untyped-call]  # safetensors has no annotations here
    assert names >= {"directory.tensors", "directory.objects", "nesting", "tensors.0", "chunks.0", "objects.0", "files"}


def test_file_names_follow_from_rank_part_kind_and_suffix() -> None:
    files = small_checkpoint().files()
    files = replace(files, part=np.array([0, 0, 0, 0, 0, 0, 0, 0], dtype=np.int32))
    body = encode_body(small_checkpoint().columns())
    plain = assemble(body, files, replace(SAVE, suffix=""), WRITER)
    assert file_names(plain)[3:5] == ["_rank3_.safetensors", "_rank4_.bytes"]
    assert file_names(small_checkpoint().blob())[0] == f"_rank0_.{SAVE_ID}.safetensors"


def test_a_later_save_reuses_the_body_byte_for_byte() -> None:
    made = large_checkpoint(500)
    body, files = encode_body(made.columns()), made.files()
    first = assemble(body, files, SAVE, WRITER)
    later_files = replace(files, nbytes=files.nbytes + 5, digest=files.digest + np.uint64(1))
    second = assemble(body, later_files, SaveRecord("f" * 32, ""), WriterRecord("dcp 0.1", "torch", "2.13", 4))
    bodies = []
    for blob in (first, second):
        start = 8 + int.from_bytes(blob[:8], "little")
        bodies.append(blob[start : start + body.nbytes])
    assert bodies[0] == bodies[1] == b"".join(block.content for block in body.blocks)
    assert open_bytes(second).save.save_id == "f" * 32
    assert open_bytes(second).files.nbytes.tolist() == later_files.nbytes.tolist()
    assert open_bytes(first).header_digest != open_bytes(second).header_digest


def test_opening_a_small_file_is_one_read() -> None:
    file = CountingFile(small_checkpoint().blob())
    everything(open_metadata(file.read, len(file.blob)))
    assert len(file.reads) == 1


def test_one_name_reads_the_directory_the_files_and_one_group_only() -> None:
    made = large_checkpoint()
    file = CountingFile(made.blob())
    assert len(file.blob) > 10 * FIRST_READ_NBYTES
    opened = open_metadata(file.read, len(file.blob))
    assert file.nbytes_read <= FIRST_READ_NBYTES
    assert opened.tensors(made.tensors[-1].name)[0].shape == (8, 4)
    touched = file.blocks_touched()
    assert touched <= {"files", "tensors.7", "chunks.7"}
    assert "tensors.7" in touched
    assert file.nbytes_read < len(file.blob) // 4
    opened.tensors(made.tensors[-2].name)
    before = file.nbytes_read
    assert opened.tensors("zzz") == ()
    assert file.nbytes_read == before


def test_listing_names_reads_no_chunks() -> None:
    made = large_checkpoint()
    file = CountingFile(made.blob())
    assert list(open_metadata(file.read, len(file.blob)).names()) == [tensor.name for tensor in made.tensors]
    assert not any(name.startswith("chunks") for name in file.blocks_touched())


def test_a_broken_group_is_seen_only_by_who_reads_it() -> None:
    made = large_checkpoint()
    blob = bytearray(made.blob())
    blob[len(blob) // 2] ^= 1
    opened = open_bytes(bytes(blob))
    good = [tensor.name for tensor in made.tensors if _answers(opened.tensors, tensor.name)]
    assert 0 < len(good) < len(made.tensors)
    with pytest.raises(CorruptError, match="is corrupt: expected digest"):
        opened.names()


def _answers(ask: Callable[[str], object], name: str) -> bool:
    try:
        ask(name)
    except CorruptError:
        return False
    return True


def test_values_of_many_ranks_under_one_name_stay_in_one_group() -> None:
    ranks = 9000
    tensors = [Tensor("rng", (4,), [((0,), (4,))], 6, rank, [0]) for rank in range(ranks)]
    tensors += [Tensor(f"w{row:05}", (4,), [((0,), (4,))], 6, files=[0]) for row in range(ranks)]
    made = Checkpoint(tensors, [("note", rank, True, 0) for rank in range(ranks)], 1)
    made.place()
    opened = open_bytes(made.blob())
    assert [tensor.rank for tensor in opened.tensors("rng")] == list(range(ranks))
    assert [entry.rank for entry in opened.objects("note")] == list(range(ranks))
    assert len(opened.names()) == ranks + 2


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200_000)), max_size=60))
def test_groups_cover_all_entries_and_never_cut_a_name(entries: list[tuple[int, int]]) -> None:
    names = [f"{value:05}" for value in np.cumsum([step for step, _ in entries], dtype=np.int64)]
    rows = np.array([count for _, count in entries], dtype=np.int64)
    cuts = cut_groups(names, rows)
    assert [row for cut in cuts for row in range(cut.start, cut.stop)] == list(range(len(names)))
    for left, right in pairwise(cuts):
        assert names[left.stop - 1] != names[right.start]
    assert len(cuts) <= MAX_GROUPS
    for cut in cuts:
        weight = int(rows[cut].sum()) + NAME_WEIGHT * (cut.stop - cut.start)
        heaviest = max(int(rows[row]) for row in range(cut.start, cut.stop))
        assert len(set(names[cut])) == 1 or weight - heaviest < 2 * GROUP_WEIGHT + 4 * 200_000


def test_a_regular_cut_costs_next_to_nothing() -> None:
    made = _regular(tensors=40, ranks=2048)
    blob = assemble(encode_body(made[0]), made[1], SAVE, WRITER)
    assert len(blob) - 16 * 2048 < 20_000
    opened = open_bytes(blob)
    np.testing.assert_array_equal(opened.columns().chunks.offsets, made[0].chunks.offsets)
    np.testing.assert_array_equal(opened.columns().chunks.byte_offset, made[0].chunks.byte_offset)


def _regular(tensors: int, ranks: int) -> tuple[MetadataColumns, FileColumns]:
    names = [f"layers.{row:03}.weight" for row in range(tensors)]
    rows = tensors * ranks
    rank = np.tile(np.arange(ranks), tensors)
    empty = Checkpoint([], [], 0).columns()
    described = TensorColumns(
        names=names,
        paths=[path_of(name) for name in names],
        rank=np.full(tensors, EVERY_RANK, dtype=np.int32),
        dtype=np.full(tensors, 11, dtype=np.uint8),
        ndim=np.full(tensors, 2, dtype=np.uint8),
        shape=np.tile([[4 * ranks, 64]], (tensors, 1)),
        row=np.arange(tensors + 1) * ranks,
    )
    offsets = np.stack([rank * 4, np.zeros(rows, dtype=np.int64)], axis=1)
    byte_offset = np.repeat(np.arange(tensors), ranks) * 512
    chunks = ChunkColumns(offsets, np.tile([[4, 64]], (rows, 1)), rank.astype(np.int32), byte_offset)
    digest = np.random.default_rng(0).integers(0, 2**63, (ranks, 2)).astype(np.uint64)
    zero = np.zeros(ranks, dtype=np.int32)
    wide = zero.astype(np.int64)
    files = FileColumns(
        np.arange(ranks, dtype=np.int32),
        zero,
        zero.astype(np.uint8),
        wide + 4096 + 512 * tensors,
        wide + 4096,
        wide + 99,
        wide + 64,
        digest,
    )
    return replace(empty, tensors=described, chunks=chunks), files


def test_another_header_than_the_agreed_one_is_refused() -> None:
    blob = small_checkpoint().blob()
    digest = open_bytes(blob).header_digest
    assert open_bytes(blob, header_digest=digest).header_digest == digest
    with pytest.raises(CorruptError, match="not the one that was agreed on"):
        open_bytes(replaced(blob, {}, {"save_id": "f" * 32}), header_digest=digest)


def test_a_newer_version_is_refused_by_name() -> None:
    blob = replaced(small_checkpoint().blob(), {}, {"version": "2"})
    with pytest.raises(NewerVersionError, match=r"3\.metadata has format version 2.*reads up to 1; upgrade"):
        open_bytes(blob, file_name="3.metadata")


class OlderBlocks:
    """A version 0 that named its files block otherwise."""

    def __init__(self, older: BlockSource) -> None:
        self._older = older

    @property
    def strings(self) -> Mapping[str, str]:
        return self._older.strings

    @property
    def block_names(self) -> Sequence[str]:
        return self._older.block_names

    def block(self, name: str) -> bytes:
        return self._older.block(name)


def test_an_older_version_is_migrated_a_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = replaced(small_checkpoint().blob(), {}, {"version": "0"})
    with pytest.raises(CorruptError, match="never existed"):
        open_bytes(blob)
    monkeypatch.setattr(metadata_reader, "MIGRATIONS", {0: OlderBlocks})
    assert everything(open_bytes(blob)) == everything(small_checkpoint().source())


def _broken_columns() -> dict[str, MetadataColumns]:
    sound = small_checkpoint().columns()
    tensors, chunks = sound.tensors, sound.chunks
    names = list(tensors.names)
    swapped = [names[1], names[0], *names[2:]]
    beyond = chunks.sizes.copy()
    beyond[7, 0] = 9
    empty = chunks.sizes.copy()
    empty[7, 0] = 0
    return {
        "names out of order": replace(sound, tensors=replace(tensors, names=swapped)),
        "a name twice": replace(sound, tensors=replace(tensors, names=[names[1], *names[1:]])),
        "a box outside its tensor": replace(sound, chunks=replace(chunks, sizes=beyond)),
        "an empty box": replace(sound, chunks=replace(chunks, sizes=empty)),
    }


@pytest.mark.parametrize("broken", _broken_columns())
def test_columns_that_no_reader_would_take_are_not_written(broken: str) -> None:
    with pytest.raises(PlanningError, match="cannot be written as metadata"):
        encode_body(_broken_columns()[broken])


def test_a_body_is_not_assembled_with_files_that_it_does_not_fit() -> None:
    made = small_checkpoint()
    body, files = encode_body(made.columns()), made.files()
    fewer = FileColumns(*(getattr(files, name)[:3] for name in FileColumns.__slots__))
    with pytest.raises(PlanningError, match="puts chunks into files"):
        assemble(body, fewer, SAVE, WRITER)
    with pytest.raises(PlanningError, match="hold something else"):
        assemble(body, replace(files, kind=files.kind[::-1]), SAVE, WRITER)
