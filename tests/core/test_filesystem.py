"""The filesystem writer and reader carry checkpoints into directories and back, whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core.arrays import ArrayAccess
from dcp_core.dtype import BY_NAME, DType
from dcp_core.errors import ArgumentError, CorruptError, IncompleteError, NewerVersionError, NotFoundError, StorageError
from dcp_core.execution.checkpoint_place import local_path
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter, file_columns
from dcp_core.execution.interfaces import FileRecord, MetadataDraft, ReadContext, WriteContext, WriteResult
from dcp_core.formats.metadata_file import MetadataColumns, encode_body
from dcp_core.metadata import (
    EVERY_RANK,
    ChunkColumns,
    Metadata,
    MetadataIndex,
    Nesting,
    ObjectColumns,
    SaveRecord,
    TensorColumns,
    WriterRecord,
)
from dcp_core.planning.items import ItemType, ReadItem, WriteItem
from dcp_core.state_path import PathKey, encode_path
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from tests.core.engine_fakes import Array, ArraySource, Region, Span, ViewTarget, bits_of, same, spans_of

ID_ONE, ID_TWO = "a" * 32, "b" * 32
FLOAT32 = BY_NAME["float32"]


@dataclass(frozen=True)
class RankState:
    """What one rank writes: its rows of tensors, cut along the first dimension, and its objects."""

    tensors: Mapping[str, Array] = field(default_factory=dict)
    objects: Mapping[str, bytes] = field(default_factory=dict)

    def spans(self) -> list[Span]:
        return spans_of({key: (array, FLOAT32) for key, array in self.tensors.items()})

    def items(self) -> list[WriteItem]:
        return [WriteItem(MetadataIndex(key), ItemType.BYTES, (), 0, 0) for key in self.objects]


@dataclass(frozen=True)
class FakePlan:
    """A plan of ready spans and items."""

    tensors: Sequence[Any] = ()
    bytes_items: Sequence[WriteItem] = ()

    def spans(self) -> Sequence[Any]:
        return self.tensors

    def objects(self) -> Sequence[WriteItem]:
        return self.bytes_items


def path_of(name: str) -> bytes:
    return encode_path((PathKey("key", name),))


def columns_of(states: Sequence[RankState]) -> MetadataColumns:
    """The columns that a planner would make; tensors lie one after the other along dimension 0."""
    row_of_file: dict[tuple[int, int], int] = {}
    for rank, state in enumerate(states):
        for kind, parts in enumerate((state.tensors, state.objects)):
            if parts:
                row_of_file[rank, kind] = len(row_of_file)
    names = sorted({name for state in states for name in state.tensors})
    chunks, first_rows, shapes = [], [0], []
    for name in names:
        start = 0
        for rank, state in enumerate(states):
            for span in state.spans():
                if span.key == name:
                    chunks.append(((start, 0), span.item.sizes, row_of_file[rank, 0], span.byte_offset))
                    start += span.item.sizes[0]
        shapes.append((start, chunks[-1][1][1]))
        first_rows.append(len(chunks))
    objects = sorted(
        (name, row_of_file[rank, 1], i) for rank, state in enumerate(states) for i, name in enumerate(state.objects)
    )
    count = len(names)
    return MetadataColumns(
        TensorColumns(
            names,
            [path_of(name) for name in names],
            np.full(count, EVERY_RANK, np.int32),
            np.full(count, FLOAT32.code, np.uint8),
            np.full(count, 2, np.uint8),
            np.array(shapes, np.int64).reshape(-1, 2),
            np.array(first_rows, np.int64),
        ),
        ChunkColumns(
            np.array([chunk[0] for chunk in chunks], np.int64).reshape(-1, 2),
            np.array([chunk[1] for chunk in chunks], np.int64).reshape(-1, 2),
            np.array([chunk[2] for chunk in chunks], np.int32),
            np.array([chunk[3] for chunk in chunks], np.int64),
        ),
        ObjectColumns(
            [name for name, _, _ in objects],
            [path_of(name) for name, _, _ in objects],
            np.full(len(objects), EVERY_RANK, np.int32),
            np.zeros(len(objects), np.uint8),
            np.array([row for _, row, _ in objects], np.int32),
            np.array([ordinal for _, _, ordinal in objects], np.int32),
        ),
        Nesting(),
    )


def write_all(
    writers: Sequence[FileSystemWriter], states: Sequence[RankState], save_id: str, durable: bool = True
) -> tuple[MetadataDraft, list[WriteResult]]:
    """Everything up to the commit, rank after rank; the first writer is the coordinator's."""
    suffix = writers[0].begin_checkpoint(save_id, None)
    results = []
    for rank, (writer, state) in enumerate(zip(writers, states, strict=True)):
        writer.configure_writer(WriteContext(rank, len(states), rank == 0, save_id, suffix, durable=durable))
        plan = FakePlan(state.spans(), state.items())
        results.append(writer.execute_write(plan, ArraySource({**state.tensors, **state.objects})))
    record = WriterRecord("0", "numpy", np.__version__, len(states))
    return MetadataDraft(encode_body(columns_of(states)), record, SaveRecord(save_id, suffix)), results


def save_all(directory: Path, states: Sequence[RankState], save_id: str) -> Metadata:
    writers = [FileSystemWriter(directory) for _ in states]
    for writer in writers:
        writer.initialize_writer()
    draft, results = write_all(writers, states, save_id)
    wire = [WriteResult.from_bytes(result.to_bytes()) for result in results]
    return writers[0].finalize_checkpoint(draft, wire)


def load_tensor(reader: FileSystemReader, metadata: Metadata, name: str) -> Array:
    (stored,) = metadata.source.tensors(name)
    view = np.zeros(stored.shape, np.float32)
    views, regions = [], []
    for row in range(len(stored.chunks)):
        offsets = tuple(stored.chunks.offsets[row].tolist())
        sizes = tuple(stored.chunks.sizes[row].tolist())
        views.append(view[offsets[0] : offsets[0] + sizes[0]])
        start = (0,) * len(sizes)
        item = ReadItem(ItemType.TENSOR, MetadataIndex(name, None, row), start, MetadataIndex(name), start, sizes)
        file, byte_offset = int(stored.chunks.file[row]), int(stored.chunks.byte_offset[row])
        regions.append(Region(item, file, byte_offset, sizes, stored.dtype, stored.dtype))
    reader.execute_read(FakePlan(regions), ViewTarget(views, [ArrayAccess()] * len(views)))
    return view


def load_object(reader: FileSystemReader, metadata: Metadata, name: str) -> bytes:
    (stored,) = metadata.source.objects(name)
    return reader.read_object(stored)


def opened(directory: Path) -> tuple[FileSystemReader, Metadata]:
    reader = FileSystemReader(directory)
    reader.initialize_reader()
    metadata = reader.load_metadata()
    reader.configure_reader(metadata, ReadContext(0, 1))
    return reader, metadata


def array_of(rows: int, columns: int, seed: int, dtype: DType = FLOAT32) -> Array:
    return bits_of((rows, columns), dtype, seed)


def states_of(seed: int) -> list[RankState]:
    return [
        RankState({"w": array_of(3, 5, seed), "x": array_of(1, 2, seed + 1)}, {"step": b"7", "empty": b""}),
        RankState(),
        RankState({"w": array_of(4, 5, seed + 2)}, {"other": bytes(range(200))}),
    ]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def check(directory: Path, states: Sequence[RankState]) -> None:
    reader, metadata = opened(directory)
    parts = [state.tensors["w"] for state in states if "w" in state.tensors]
    assert same(load_tensor(reader, metadata, "w"), np.concatenate(parts))
    for state in states:
        for name, value in state.objects.items():
            assert load_object(reader, metadata, name) == value


def test_what_ranks_write_is_one_checkpoint_and_ranks_with_nothing_write_no_file(tmp_path: Path) -> None:
    states = states_of(0)
    metadata = save_all(tmp_path / "step 1", states, ID_ONE)
    assert metadata.save_id == ID_ONE
    assert list(metadata.state_dict_metadata) == ["empty", "other", "step", "w", "x"]
    assert names_in(tmp_path / "step 1") == [
        ".metadata",
        "_rank0_.bytes",
        "_rank0_.safetensors",
        "_rank2_.bytes",
        "_rank2_.safetensors",
    ]
    check(tmp_path / "step 1", states)


def test_a_second_save_replaces_the_first_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    save_all(tmp_path, states_of(0), ID_ONE)
    states = states_of(100)[:1]
    save_all(tmp_path, states, ID_TWO)
    assert names_in(tmp_path) == [".metadata", f"_rank0_.{ID_TWO}.bytes", f"_rank0_.{ID_TWO}.safetensors"]
    check(tmp_path, states)


def test_an_aborted_save_leaves_the_old_checkpoint_and_nothing_of_its_own(tmp_path: Path) -> None:
    states = states_of(0)
    save_all(tmp_path, states, ID_ONE)
    before = names_in(tmp_path)
    writers = [FileSystemWriter(tmp_path) for _ in states]
    write_all(writers, states_of(50), ID_TWO)
    assert len(names_in(tmp_path)) == len(before) + 5
    for writer in writers:
        writer.abort_checkpoint()
    assert names_in(tmp_path) == before
    check(tmp_path, states)


def test_an_abort_never_removes_a_file_that_somebody_else_made(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write_file("_rank0_.safetensors", b"somebody else's")
    writer = FileSystemWriter(tmp_path)
    writer.configure_writer(WriteContext(0, 1, False, ID_ONE, ""))
    state = states_of(0)[0]
    with pytest.raises(StorageError):
        writer.execute_write(FakePlan(state.spans()), ArraySource(state.tensors))
    writer.abort_checkpoint()
    assert storage.read("_rank0_.safetensors") == b"somebody else's"


def test_a_commit_without_all_files_fails_and_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    states = states_of(0)
    save_all(tmp_path, states, ID_ONE)
    writers = [FileSystemWriter(tmp_path) for _ in states]
    draft, results = write_all(writers, states_of(50), ID_TWO)
    (tmp_path / f"_rank2_.{ID_TWO}.safetensors").unlink()
    with pytest.raises(IncompleteError, match="_rank2_"):
        writers[0].finalize_checkpoint(draft, results)
    for writer in writers:
        writer.abort_checkpoint()
    check(tmp_path, states)


def test_one_writer_and_one_reader_serve_many_checkpoints(tmp_path: Path) -> None:
    writer, reader = FileSystemWriter(), FileSystemReader()
    for number in range(3):
        state = states_of(number)[0]
        writer.initialize_writer(tmp_path / str(number))
        draft, results = write_all([writer], [state], ID_ONE)
        writer.finalize_checkpoint(draft, results)
        reader.initialize_reader(f"file://{tmp_path}/{number}")
        metadata = reader.load_metadata()
        reader.configure_reader(metadata, ReadContext(0, 1))
        assert same(load_tensor(reader, metadata, "w"), state.tensors["w"])
        assert load_object(reader, metadata, "step") == b"7"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcp-heartbeat")]


def test_a_rank_alone_has_its_own_metadata(tmp_path: Path) -> None:
    state = states_of(0)[0]
    writer = FileSystemWriter(tmp_path)
    suffix = writer.begin_checkpoint(ID_ONE, 0)
    writer.configure_writer(WriteContext(0, 4, True, ID_ONE, suffix, use_collectives=False))
    result = writer.execute_write(
        FakePlan(state.spans(), state.items()), ArraySource({**state.tensors, **state.objects})
    )
    record = WriterRecord("0", "numpy", np.__version__, 4)
    draft = MetadataDraft(encode_body(columns_of([state])), record, SaveRecord(ID_ONE, suffix, 0))
    writer.finalize_checkpoint(draft, [result])
    assert names_in(tmp_path) == ["0.metadata", "_rank0_.bytes", "_rank0_.safetensors"]
    reader = FileSystemReader(tmp_path)
    metadata = reader.load_metadata(0)
    reader.configure_reader(metadata, ReadContext(0, 1))
    assert same(load_tensor(reader, metadata, "w"), state.tensors["w"])
    with pytest.raises(NotFoundError, match=r"no 1\.metadata"):
        reader.load_metadata(1)
    with pytest.raises(NotFoundError, match=r"no \.metadata"):
        reader.load_metadata()


def test_open_metadata_stays_what_it_was_when_a_save_replaces_it(tmp_path: Path) -> None:
    save_all(tmp_path, states_of(0), ID_ONE)
    _, metadata = opened(tmp_path)
    save_all(tmp_path, states_of(1)[:1], ID_TWO)
    assert metadata.save_id == ID_ONE
    assert metadata.source.tensors("w")[0].shape == (7, 5)


def test_a_load_whose_checkpoint_is_replaced_meanwhile_says_which_file_is_gone(tmp_path: Path) -> None:
    save_all(tmp_path, states_of(0), ID_ONE)
    reader, metadata = opened(tmp_path)
    save_all(tmp_path, states_of(1), ID_TWO)
    with pytest.raises(IncompleteError, match="_rank0_.safetensors is missing"):
        load_tensor(reader, metadata, "w")
    with pytest.raises(IncompleteError, match="_rank0_.bytes is missing"):
        load_object(reader, metadata, "step")


def test_every_flipped_byte_of_a_bytes_file_is_noticed(tmp_path: Path) -> None:
    states = states_of(0)
    save_all(tmp_path, states, ID_ONE)
    path = tmp_path / "_rank0_.bytes"
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        reader, metadata = opened(tmp_path)
        with pytest.raises((CorruptError, NewerVersionError), match="_rank0_.bytes"):
            load_object(reader, metadata, "step")
    path.write_bytes(good[:-1])
    reader, metadata = opened(tmp_path)
    with pytest.raises(IncompleteError, match=f"has {len(good) - 1} bytes, expected {len(good)}"):
        load_object(reader, metadata, "step")


class RecordedOperations(FileOperations):
    """Notes what is done to the disk."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []

    def perform(self, operation: str, path: str, action: Any) -> Any:
        self.log.append((operation, Path(path).name))
        return action()


@pytest.mark.parametrize("durable", [True, False])
def test_data_is_synced_before_the_commit_exactly_when_a_save_is_durable(durable: bool, tmp_path: Path) -> None:
    operations = RecordedOperations()
    writer = FileSystemWriter(storage=LocalStorage(tmp_path / "a", operations))
    draft, results = write_all([writer], states_of(0)[:1], ID_ONE, durable)
    written = list(operations.log)
    writer.finalize_checkpoint(draft, results)
    synced = [name for operation, name in written if operation == "fsync"]
    expected = ["_rank0_.bytes", "_rank0_.safetensors"] if durable else []
    assert sorted(name for name in synced if name.startswith("_rank")) == expected
    if durable:
        assert written[-1][0] == "fsync_directory"
    else:
        assert not [entry for entry in operations.log if "fsync" in entry[0]]


def test_a_writer_that_is_not_durable_overrides_a_save_that_is(tmp_path: Path) -> None:
    operations = RecordedOperations()
    writer = FileSystemWriter(storage=LocalStorage(tmp_path, operations), durable=False)
    write_all([writer], states_of(0)[:1], ID_ONE)
    assert ("fsync", "_rank0_.safetensors") not in operations.log
    writer.abort_checkpoint()


def test_storage_operations_are_kept_when_a_save_names_another_directory(tmp_path: Path) -> None:
    operations = RecordedOperations()
    writer = FileSystemWriter(storage=LocalStorage(tmp_path, operations))
    writer.initialize_writer(tmp_path / "other")
    write_all([writer], states_of(0)[:1], ID_ONE)
    assert ("create", "_rank0_.safetensors") in operations.log
    assert "_rank0_.safetensors" in names_in(tmp_path / "other")
    writer.abort_checkpoint()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/tmp/a b", "/tmp/a b"),
        (Path("/tmp/x"), "/tmp/x"),
        ("relative/x", "relative/x"),
        ("file:///tmp/a%20b%C3%A4", "/tmp/a bä"),
        ("FILE://localhost/tmp/x#1?2", "/tmp/x#1?2"),
        ("/tmp/100%25", "/tmp/100%25"),
        ("odd:name", "odd:name"),
    ],
)
def test_paths_and_file_urls_name_directories(given: str | Path, expected: str) -> None:
    assert local_path(given) == expected


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("s9://bucket/x", "scheme 's9'"),
        ("file://host/tmp/x", "host 'host'"),
        ("file://", "expected file:///path"),
        ("", "no path"),
        ("/tmp/\0", "no path"),
        ("file:///tmp/%00", "no path"),
    ],
)
def test_what_names_no_local_directory_is_refused(given: str, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        FileSystemWriter(given)
    with pytest.raises(ArgumentError, match=match):
        FileSystemReader().initialize_reader(given)


def test_a_checkpoint_id_is_needed_somewhere(tmp_path: Path) -> None:
    for initialize in (FileSystemWriter().initialize_writer, FileSystemReader().initialize_reader):
        with pytest.raises(ValueError, match="checkpoint_id"):
            initialize()
    with pytest.raises(ArgumentError, match="a path and a storage"):
        FileSystemWriter(tmp_path, storage=LocalStorage(tmp_path))


def test_calls_out_of_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="configure_writer"):
        FileSystemWriter(tmp_path).execute_write(FakePlan(), ArraySource({}))
    with pytest.raises(ArgumentError, match="configure_reader"):
        FileSystemReader(tmp_path).execute_read(FakePlan(), ViewTarget([], []))


def test_a_link_to_the_newest_checkpoint_is_followed_anew_at_every_load(tmp_path: Path) -> None:
    first, second = states_of(0)[:1], states_of(7)[:1]
    save_all(tmp_path / "step_1", first, ID_ONE)
    save_all(tmp_path / "step_2", second, ID_TWO)
    link = tmp_path / "latest"
    link.symlink_to("step_1")
    reader = FileSystemReader(link)
    for target, states in (("step_1", first), ("step_2", second)):
        link.unlink()
        link.symlink_to(target)
        reader.initialize_reader()
        metadata = reader.load_metadata()
        reader.configure_reader(metadata, ReadContext(0, 1))
        assert same(load_tensor(reader, metadata, "w"), states[0].tensors["w"])


def test_the_files_block_is_sorted_by_rank_kind_and_part() -> None:
    records = [
        FileRecord(2, 0, 0, 9, 1, 2, 3, 5 << 64 | 7),
        FileRecord(0, 0, 1, 9, 1, 2, 3, 4),
        FileRecord(0, 1, 0, 9, 1, 2, 3, 4),
        FileRecord(0, 0, 0, 9, 1, 2, 3, 4),
    ]
    columns = file_columns([WriteResult(2, tuple(records[:1]), 0, 0), WriteResult(0, tuple(records[1:]), 0, 0)])
    rows = zip(columns.rank.tolist(), columns.kind.tolist(), columns.part.tolist(), strict=True)
    assert list(rows) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (2, 0, 0)]
    assert columns.digest[3].tolist() == [7, 5]
    assert len(file_columns([WriteResult(0, (), 0, 0)])) == 0
