"""Many names looked up at once: the same entries as one name after the other, however it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.arrays import NumpyAdapter
from dcp_core.dtype import BY_NAME
from dcp_core.errors import CorruptError, DcpError, MissingKeysError, PlanningError
from dcp_core.formats import group_directory, name_table
from dcp_core.formats.block_container import BlockContainer
from dcp_core.formats.metadata_file import ColumnsSource, MetadataColumns, assemble, encode_body, open_bytes
from dcp_core.formats.name_table import build_name_table
from dcp_core.key_codec import KeyValue
from dcp_core.metadata import (
    EVERY_RANK,
    ChunkColumns,
    FileColumns,
    Metadata,
    MetadataSource,
    Nesting,
    ObjectColumns,
    SaveRecord,
    TensorColumns,
    WriterRecord,
)
from dcp_core.planning import matching
from dcp_core.planning.bulk_matching import match_plainly
from dcp_core.planning.local_plan import LocalState, read_state
from dcp_core.planning.matching import Matches, MatchRules, match_state
from dcp_core.state_path import (
    PathKey,
    canonical_name,
    canonical_names,
    decode_path,
    encode_path,
    key_path,
    plain_name,
    spell_names,
)
from tests.core.metadata_samples import Checkpoint, Tensor, checkpoints, grid_cells, small_checkpoint

SEEDS = st.integers(0, 2**32)
NASTY = ("a", "b", "a.b", ".", "..", "", "$", "$[", '$["a"]', "w@0", "слой 1/w", "\U0010ffff", "\ud800", "__metadata__")
KEYS: tuple[KeyValue, ...] = (*NASTY, 1, "1", True, None, 1.5, b"a", ("a", 1), 1 << 70)
SHAPES = ((), (3,), (4, 2), (0, 2))
DTYPES = ("float32", "float64", "float16", "int32", "bool")
_CHUNK_COLUMNS = ("offsets", "sizes", "file", "byte_offset")

# -- one table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bisections", [0, 1 << 30], ids=["bisecting", "passing"])
@given(SEEDS)
def test_many_names_are_found_like_one_by_one(bisections: int, seed: int) -> None:
    rng = Random(seed)
    writable = [name for name in NASTY if name.isascii() or "\ud800" not in name]
    names = sorted(rng.choice(writable) + rng.choice(("", "x", ".")) for _ in range(rng.randint(0, 12)))
    paths = [bytes([rng.randrange(3)]) for _ in names]
    table = build_name_table(names, paths)
    asked = [rng.choice(NASTY) + rng.choice(("", "x", ".")) for _ in range(rng.randint(0, 12))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name_table, "BISECTIONS", bisections)
        first, runs = table.find_runs(asked)
    for name, start, count in zip(asked, first.tolist(), runs.tolist(), strict=True):
        expected = [run for run, other in enumerate(table.names) if other == name]
        assert list(table.runs_of(name)) == expected
        assert count == len(expected)
        assert list(range(start, start + count)) == (expected if expected else list(range(start, start)))


# -- a whole checkpoint -----------------------------------------------------------------------------------------------


def tensors_one_by_one(source: MetadataSource, names: Sequence[str]) -> tuple[dict[int, Any], list[int]]:
    found: dict[int, Any] = {}
    others = []
    for position, name in enumerate(names):
        stored = source.tensors(name)
        if len(stored) == 1 and stored[0].rank == EVERY_RANK:
            tensor = stored[0]
            chunks = [getattr(tensor.chunks, column).tolist() for column in _CHUNK_COLUMNS]
            found[position] = encode_path(tensor.path), tensor.dtype.code, tensor.shape, chunks
        elif stored:
            others.append(position)
    return found, others


def tensors_at_once(source: MetadataSource, names: Sequence[str]) -> tuple[dict[int, Any], list[int]]:
    parts, others = source.find_tensors(names)
    found: dict[int, Any] = {}
    for part in parts:
        for row, position in enumerate(part.asked.tolist()):
            ndim, rows = int(part.ndim[row]), slice(int(part.first[row]), int(part.first[row] + part.count[row]))
            columns = part.chunks.offsets[rows, :ndim], part.chunks.sizes[rows, :ndim]
            chunks = [column.tolist() for column in (*columns, part.chunks.file[rows], part.chunks.byte_offset[rows])]
            shape = tuple(part.shape[row, :ndim].tolist())
            assert position not in found
            found[position] = part.paths[row], int(part.dtype[row]), shape, chunks
    return found, sorted(others)


def objects_one_by_one(source: MetadataSource, names: Sequence[str]) -> tuple[dict[int, Any], list[int]]:
    stored = [source.objects(name) for name in names]
    is_plain = [len(found) == 1 and found[0].rank == EVERY_RANK and not found[0].per_rank for found in stored]
    plain = {
        position: (encode_path(found[0].path), found[0].file, found[0].ordinal)
        for position, found in enumerate(stored)
        if is_plain[position]
    }
    return plain, [position for position, found in enumerate(stored) if found and not is_plain[position]]


def objects_at_once(source: MetadataSource, names: Sequence[str]) -> tuple[dict[int, Any], list[int]]:
    parts, others = source.find_objects(names)
    found = {
        position: (part.paths[row], int(part.file[row]), int(part.ordinal[row]))
        for part in parts
        for row, position in enumerate(part.asked.tolist())
    }
    return found, sorted(others)


@pytest.mark.parametrize("weight", [64, group_directory.GROUP_WEIGHT], ids=["many groups", "one group"])
@given(checkpoints(), SEEDS)
def test_a_checkpoint_answers_for_many_names_as_for_each(weight: int, made: Checkpoint, seed: int) -> None:
    rng = Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_directory, "GROUP_WEIGHT", weight)
        blob = made.blob()
    stored = [tensor.name for tensor in made.tensors] + [entry[0] for entry in made.objects]
    asked = [rng.choice([*stored, *NASTY]) for _ in range(rng.randint(0, 20))]
    for source in (made.source(), open_bytes(blob)):
        assert tensors_at_once(source, asked) == tensors_one_by_one(source, asked)
        assert objects_at_once(source, asked) == objects_one_by_one(source, asked)


def test_values_per_rank_and_of_single_ranks_are_left_to_be_asked_for() -> None:
    made = small_checkpoint()
    made.objects += [("alone", 2, False, 0), ("strange", EVERY_RANK, True, 0)]
    names = ["alone", "epoch", "grid", "note", "rng", "strange", "tied"]
    for source in (made.source(), open_bytes(made.blob())):
        assert [len(part.asked) for part in source.find_tensors(names)[0]] == [2]
        assert sorted(source.find_tensors(names)[1]) == [4]
        assert sorted(source.find_objects(names)[1]) == [0, 3, 5]


def test_a_name_with_a_value_of_all_ranks_and_others_is_left_to_be_asked_for() -> None:
    whole = Entry(("x",), {EVERY_RANK: "tensor", 0: "tensor"}, (3,), "float32")
    two_paths = [Entry(("y",), {EVERY_RANK: "tensor"}, (3,), "float32"), Entry(("z",), {0: "tensor"}, (3,), "float32")]
    two_paths[1].name = "y"
    for source in Stored([whole, *two_paths], 1).sources():
        assert [len(source.tensors(name)) for name in ("x", "y")] == [2, 2]
        assert tensors_at_once(source, ["x", "y"]) == ({}, [0, 1])


def test_only_the_groups_that_can_hold_a_name_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_directory, "GROUP_WEIGHT", 64 * 64)
    random = np.random.default_rng(3)
    names = sorted("layer." + random.bytes(12).hex() for _ in range(300))
    made = Checkpoint([Tensor(name, (8, 4), grid_cells((8, 4), [[4], []]), files=[0, 1]) for name in names], [], 2)
    made.place()
    blob = made.blob()
    read: list[str] = []
    block = BlockContainer.block

    def noted(self: BlockContainer, name: str) -> bytes:
        read.append(name)
        return block(self, name)

    monkeypatch.setattr(BlockContainer, "block", noted)
    source = open_bytes(blob)
    parts, others = source.find_tensors([names[0], names[1], names[0] + "x", names[-1]])
    assert sorted(position for part in parts for position in part.asked.tolist()) == [0, 1, 3]
    assert others == []
    groups = sorted(name for name in read if name.startswith(("tensors.", "chunks.")))
    last = max(int(name.split(".")[1]) for name in groups)
    assert last > 3
    assert groups == sorted(["tensors.0", "chunks.0", f"tensors.{last}", f"chunks.{last}"])
    source.find_tensors(["layer.", "zzz"])
    assert {name for name in read if name.startswith("chunks.")} == {"chunks.0", f"chunks.{last}"}


# -- canonical names --------------------------------------------------------------------------------------------------


@given(SEEDS)
def test_canonical_names_of_bytes_are_those_of_the_paths(seed: int) -> None:
    rng = Random(seed)
    components = [*(PathKey("key", key) for key in (*KEYS, "x" * 200)), PathKey("list", 3), PathKey("tuple", 500)]
    paths = [tuple(rng.choice(components) for _ in range(rng.randint(0, 5))) for _ in range(5)]
    assert canonical_names(map(encode_path, paths)) == [canonical_name(path) for path in paths]


@given(st.binary(max_size=12))
def test_canonical_names_refuse_what_is_no_path(blob: bytes) -> None:
    try:
        expected = canonical_name(decode_path(blob))
    except CorruptError:
        with pytest.raises(CorruptError):
            canonical_names([encode_path(key_path("a")), blob])
    else:
        assert canonical_names([blob]) == [expected]


# -- a state and a checkpoint -----------------------------------------------------------------------------------------


@dataclass
class Entry:
    """What is stored under one path: a tensor or an object of all ranks, or what each of some ranks has."""

    path: tuple[KeyValue, ...]
    kinds: dict[int, str]
    shape: tuple[int, ...]
    dtype: str
    pieces: int = 1
    name: str | None = None
    """Stored under this name, as no save of ours does."""
    encoded_path: bytes | None = None
    """Stored with this path, likewise."""


@dataclass
class Stored:
    """A checkpoint of entries as columns in memory."""

    entries: Sequence[Entry]
    world_size: int
    tensors: list[tuple[str, bytes, int, Entry]] = field(default_factory=list)
    objects: list[tuple[str, bytes, int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = spell_names([key_path(*entry.path) for entry in self.entries])
        taken = set()
        for spelled, entry in zip(names, self.entries, strict=True):
            name = spelled if entry.name is None else entry.name
            path = encode_path(key_path(*entry.path)) if entry.encoded_path is None else entry.encoded_path
            for rank, kind in entry.kinds.items():
                if (name, rank, kind == "tensor") in taken:
                    continue
                taken.add((name, rank, kind == "tensor"))
                if kind == "tensor":
                    self.tensors.append((name, path, rank, entry))
                else:
                    self.objects.append((name, path, rank, kind == "per rank"))
        self.tensors.sort(key=lambda row: (row[0], row[2]))
        self.objects.sort(key=lambda row: (row[0], row[2]))

    def columns(self) -> MetadataColumns:
        shapes = [entry.shape for *_, entry in self.tensors]
        counts = [0 if 0 in entry.shape else min(entry.pieces, *entry.shape[:1], 3) for *_, entry in self.tensors]
        counts = [1 if entry.shape == () else n for n, (*_, entry) in zip(counts, self.tensors, strict=True)]
        tensors = TensorColumns(
            [row[0] for row in self.tensors],
            [row[1] for row in self.tensors],
            np.array([row[2] for row in self.tensors], np.int32),
            np.array([BY_NAME[entry.dtype].code for *_, entry in self.tensors], np.uint8),
            np.array([len(shape) for shape in shapes], np.uint8),
            np.array([(*shape, *(1,) * (2 - len(shape))) for shape in shapes], np.int64).reshape(-1, 2),
            np.cumsum([0, *counts]),
        )
        boxes = [box for shape, count in zip(shapes, counts, strict=True) for box in _pieces(shape, count)]
        both = np.array(boxes, np.int64).reshape(-1, 2, 2)
        chunks = ChunkColumns(
            both[:, 0], both[:, 1], np.zeros(len(boxes), np.int32), 1000 * np.arange(len(boxes), dtype=np.int64)
        )
        objects = ObjectColumns(
            [row[0] for row in self.objects],
            [row[1] for row in self.objects],
            np.array([row[2] for row in self.objects], np.int32),
            np.array([row[3] for row in self.objects], np.uint8),
            np.ones(len(self.objects), np.int32),
            np.arange(len(self.objects), dtype=np.int32),
        )
        return MetadataColumns(tensors, chunks, objects, Nesting())

    def sources(self) -> Sequence[MetadataSource]:
        """The columns, and a file of them with a group a name or so."""
        columns, two = self.columns(), np.full(2, 1 << 30, np.int64)
        kinds = np.array([0, 1], np.uint8)
        ranks = np.zeros(2, np.int32)
        start = np.full(2, 4096, np.int64)
        files = FileColumns(ranks, ranks, kinds, two, start, start // 2, start // 4, np.ones((2, 2), np.uint64))
        save, writer = SaveRecord("0" * 32, ""), WriterRecord("dcp", "numpy", "1", self.world_size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group_directory, "GROUP_WEIGHT", 64)
            blob = assemble(encode_body(columns), files, save, writer)
        return ColumnsSource(columns, files, save, writer), open_bytes(blob)


def _pieces(shape: tuple[int, ...], count: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Rows of a tensor of at most two dimensions, dealt to `count` chunks."""
    padded = (*shape, *(1,) * (2 - len(shape)))
    edges = [padded[0] * piece // max(count, 1) for piece in range(count + 1)]
    return [((low, 0), (high - low, padded[1])) for low, high in pairwise(edges)]


def random_entries(rng: Random, world_size: int) -> list[Entry]:
    """Entries whose names collide more often than not; some as only a stranger would store them."""
    keys: Sequence[KeyValue] = rng.sample(KEYS, 6) if rng.random() < 0.5 else ("a", "b", "a.b", 1, "1")
    paths = {tuple(rng.choice(keys) for _ in range(rng.randint(1, 3))): None for _ in range(rng.randint(1, 10))}
    names = [plain_name(key_path(*path)) for path in paths] + [canonical_name(key_path(*path)) for path in paths]
    names = [name for name in names if "\ud800" not in name] or [""]
    strange = rng.choice(("", "names", "paths"))
    entries = []
    for path in paths:
        kinds = {EVERY_RANK: "tensor" if rng.random() < 0.7 else "object"}
        if rng.random() < 0.15:
            ranks = rng.sample(range(-1, world_size), rng.randint(1, world_size + 1))
            kinds = {rank: rng.choice(("tensor", "object", "per rank")) for rank in ranks}
        entry = Entry(path, kinds, rng.choice(SHAPES), rng.choice(DTYPES), rng.randint(1, 3))
        entry.name = rng.choice(names) if strange == "names" and rng.random() < 0.3 else None
        if strange == "paths" and len(kinds) == 1 and rng.random() < 0.1:
            entry.encoded_path = rng.choice((b"", b"junk", b"s\x01a"))
        entries.append(entry)
    return entries


def random_target(rng: Random, entries: Sequence[Entry]) -> dict[Any, Any]:
    """Leaves for most entries, mostly fitting; nested as saved, flat, or with keys of another type."""
    state: dict[Any, Any] = {}
    for entry in entries:
        path = entry.path
        if rng.random() < 0.4:
            path = (".".join(map(str, path)),) if rng.random() < 0.5 else tuple(map(str, path))
        if rng.random() < 0.1:
            path = (*path[:-1], "gone")
        kind = rng.choice(list(entry.kinds.values())) if rng.random() < 0.95 else rng.choice(("tensor", "object"))
        _put(state, path, _array(rng, entry) if kind == "tensor" else "a value")
    return state


def _array(rng: Random, entry: Entry) -> npt.NDArray[Any]:
    shape = entry.shape if rng.random() < 0.95 else rng.choice(SHAPES)
    array = np.zeros(shape, entry.dtype if rng.random() < 0.9 else rng.choice(DTYPES))
    array.flags.writeable = rng.random() < 0.97
    return array


def _put(state: dict[Any, Any], path: tuple[KeyValue, ...], value: Any) -> None:
    """Put a value where a nested dict has room for it."""
    for key in path[:-1]:
        state = state.setdefault(key, {})
        if not isinstance(state, dict):
            return
    state.setdefault(path[-1], value)


def outcome(state: LocalState, source: MetadataSource, rank: int, world_size: int, rules: MatchRules) -> Any:
    """What matching gives, as plain values."""
    try:
        found = match_state(state, Metadata(source), rank, world_size, rules)
    except DcpError as error:
        return type(error), str(error)
    return shown(found)


def shown(found: Matches) -> Any:
    wanted = []
    boxes = found.wanted
    for row, item in enumerate(boxes):
        tensor = item.stored
        own = [getattr(tensor.chunks, column).tolist() for column in _CHUNK_COLUMNS]
        count = len(tensor.chunks)
        assert int(boxes.chunks.count[row]) == count
        rows = boxes.chunk_rows(np.full(count, row), np.arange(count))
        ndim = len(tensor.shape)
        assert [rows.offsets[:, :ndim].tolist(), rows.sizes[:, :ndim].tolist()] == own[:2]
        assert [rows.file.tolist(), rows.byte_offset.tolist()] == own[2:]
        assert (boxes.stored_names[row], boxes.stored_dtype[row]) == (tensor.name, tensor.dtype.code)
        about = tensor.name, tensor.path, tensor.rank, tensor.dtype, tensor.shape
        wanted.append((item.name, item.leaf, item.ordinal, item.box, item.dtype, about, own))
    return wanted, list(found.objects), sorted(found.lossy), sorted(found.borrowed)


@settings(max_examples=600)
@given(SEEDS)
def test_a_state_is_matched_at_once_as_leaf_by_leaf(seed: int) -> None:
    rng = Random(seed)
    world_size = rng.randint(1, 3)
    entries = random_entries(rng, world_size)
    state = read_state(random_target(rng, entries), NumpyAdapter().describe)
    loaders = rng.choice((world_size, world_size + 1))
    rules = MatchRules(rng.random() < 0.7, rng.choice(("auto", "exact", "any")))
    for source in Stored(entries, world_size).sources():
        arguments = state, source, rng.randrange(loaders), loaders, rules
        at_once = outcome(*arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(matching, "match_plainly", _refuse)
            assert at_once == outcome(*arguments)


def _refuse(*_: object) -> None:
    raise CorruptError("look at leaves one by one")


def test_what_fits_without_a_question_is_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        Entry((key, 1), {EVERY_RANK: kind}, (4, 2), "float32", 2) for key, kind in zip("abc", KINDS, strict=True)
    ]
    nested = {"a": {1: np.zeros((4, 2), "f4")}, "b": {1: 0}, "c": {1: np.zeros((4, 2), "f8")}}
    flat = {"a.1": np.zeros((4, 2), "f4"), "c.1": np.zeros((4, 2), "f2")}
    monkeypatch.setattr(matching, "find_entries", _refuse)
    for source in Stored(entries, 1).sources():
        for state, lossy in ((nested, []), (flat, ["c.1: float32 to float16"])):
            found = match_state(read_state(state, NumpyAdapter().describe), Metadata(source), 0, 1, MatchRules())
            assert [item.name for item in found.wanted] == ["a.1", "c.1"]
            assert [item.name for item in found.objects] == (["b.1"] if state is nested else [])
            assert found.lossy == tuple(lossy)


KINDS = ("tensor", "object", "tensor")


@pytest.mark.parametrize("stored_under", ["a.b", '$["a"]["b"]'], ids=["plain", "canonical"])
def test_a_value_with_the_path_of_a_leaf_counts_before_a_tensor_with_its_name(stored_under: str) -> None:
    by_name = Entry(("a.b",), {EVERY_RANK: "tensor"}, (3,), "float32")
    by_path = Entry(("a", "b"), {EVERY_RANK: "object"}, (), "float32", name=stored_under)
    state = read_state({"a": {"b": np.zeros(3, "f4")}}, NumpyAdapter().describe)
    for source in Stored([by_name, by_path], 1).sources():
        with pytest.raises(PlanningError, match="'a.b': the checkpoint has a plain value, the target has a tensor"):
            match_state(state, Metadata(source), 0, 1, MatchRules())


@pytest.mark.parametrize("value", [np.zeros(3, "f4"), 0], ids=["tensor", "object"])
def test_nothing_is_looked_up_under_the_empty_name(value: Any) -> None:
    kind = "tensor" if isinstance(value, np.ndarray) else "object"
    entries = [Entry(("",), {EVERY_RANK: kind}, (3,), "float32", name="")]
    state = read_state({"": value}, NumpyAdapter().describe)
    for source in Stored(entries, 1).sources():
        with pytest.raises(MissingKeysError):
            match_state(state, Metadata(source), 0, 1, MatchRules())


def test_the_first_leaf_that_does_not_fit_is_named_even_where_a_later_one_needs_what_is_damaged() -> None:
    entries = [Entry((key,), {EVERY_RANK: "tensor"}, (3,), "float32") for key in "abc"]
    _, source = Stored(entries, 1).sources()
    state = {"a": np.zeros(3, "f4"), "b": np.zeros(4, "f4"), "c": np.zeros(3, "f4")}
    leaves = read_state(state, NumpyAdapter().describe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "find_tensors", _refuse)
        with pytest.raises(DcpError, match="'b': the checkpoint has global shape"):
            match_state(leaves, Metadata(source), 0, 1, MatchRules())


def test_matching_at_once_passes_on_what_the_metadata_refuses() -> None:
    entries = [Entry(("a",), {EVERY_RANK: "tensor"}, (3,), "float32")]
    _, source = Stored(entries, 1).sources()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "find_tensors", _refuse)
        with pytest.raises(CorruptError):
            match_plainly(read_state({"a": np.zeros(3)}, NumpyAdapter().describe), source, lambda *_: "same")
