"""Hugging Face directories are read by their headers: which files, what is refused, and what is left alone."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from dcp_core import api
from dcp_core.errors import (
    ArgumentError,
    CorruptError,
    DcpError,
    IncompleteError,
    MissingKeysError,
    NotFoundError,
    ShapeMismatchError,
)
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.formats.huggingface_source import HuggingFaceSource
from dcp_core.metadata import TensorStorageMetadata
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from tests.core.huggingface_files import (
    INDEX,
    MODEL,
    Array,
    assert_equal,
    file_bytes,
    header_entry,
    load,
    numbered,
    write_file,
    write_index,
    write_saved_shard,
    write_shards,
    zeros_like,
)

TENSORS: dict[str, Array] = {
    "embed.weight": numbered(6, 4),
    "layers.0.weight": numbered(4, 4, start=100),
    "layers.0.bias": numbered(4, dtype="float64", start=200),
    "layers.1.weight": numbered(3, 5, dtype="float16", start=50),
    "step": np.array(5.0, np.float32),
    "mask": np.array([[True, False], [False, True]]),
    "empty": np.zeros((0, 3), np.float32),
}


def halves(tensors: Mapping[str, Array]) -> list[dict[str, Array]]:
    names = list(tensors)
    return [{name: tensors[name] for name in names[:3]}, {name: tensors[name] for name in names[3:]}]


def test_columns_of_whole_tensors_are_those_of_their_pieces(tmp_path: Path) -> None:
    write_shards(tmp_path, halves(TENSORS))
    described = HuggingFaceReader(tmp_path).load_metadata().source
    assert isinstance(described, HuggingFaceSource)
    assert described.is_whole
    in_pieces = HuggingFaceSource(described.described, None, {"embed.weight": "embed.weight"})
    assert not in_pieces.is_whole
    assert described.save == in_pieces.save
    for part in ("tensors", "chunks"):
        own, other = getattr(described.columns, part), getattr(in_pieces.columns, part)
        for field in fields(own):
            found, expected = getattr(own, field.name), getattr(other, field.name)
            assert getattr(found, "dtype", None) == getattr(expected, "dtype", None), field.name
            np.testing.assert_array_equal(found, expected, field.name)


# -- which files ---------------------------------------------------------------------------------------------------


def test_one_file_is_read_from_its_directory_and_by_its_own_path(tmp_path: Path) -> None:
    write_file(tmp_path / MODEL, TENSORS, {"format": "pt"})
    for path in (tmp_path, tmp_path / MODEL, f"file://{tmp_path}", f"file://{tmp_path / MODEL}"):
        target = zeros_like(TENSORS)
        load(target, path)
        assert_equal(target, TENSORS)


def test_a_directory_with_an_index_is_read_by_it(tmp_path: Path) -> None:
    write_shards(tmp_path, halves(TENSORS))
    for path in (tmp_path, tmp_path / INDEX):
        target = zeros_like(TENSORS)
        load(target, path)
        assert_equal(target, TENSORS)


def test_an_index_of_another_name_is_read_if_it_is_the_only_one(tmp_path: Path) -> None:
    write_shards(tmp_path, halves(TENSORS))
    os.rename(tmp_path / INDEX, tmp_path / "diffusion_pytorch_model.safetensors.index.json")
    target = zeros_like(TENSORS)
    load(target, tmp_path)
    assert_equal(target, TENSORS)
    write_index(tmp_path, {}, "other.safetensors.index.json")
    with pytest.raises(ArgumentError, match=r"2 indices.*pass the path"):
        load(target, tmp_path)


def test_several_files_without_an_index_are_read_together(tmp_path: Path) -> None:
    for number, arrays in enumerate(halves(TENSORS)):
        write_file(tmp_path / f"part{number}.safetensors", arrays)
    target = zeros_like(TENSORS)
    load(target, tmp_path)
    assert_equal(target, TENSORS)


def test_a_numbered_series_without_an_index_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    names = write_shards(tmp_path, halves(TENSORS))
    os.remove(tmp_path / INDEX)
    target = zeros_like(TENSORS)
    load(target, tmp_path)
    assert_equal(target, TENSORS)
    os.remove(tmp_path / names[0])
    with pytest.raises(IncompleteError, match=r"1 of the 2 files model-NNNNN-of-00002.*missing are 1: restore"):
        load(target, tmp_path)
    load({"empty": np.zeros((0, 3), np.float32)}, tmp_path / names[1])
    os.rename(tmp_path / names[1], tmp_path / f"model-00001-of-{'9' * 30}.safetensors")
    with pytest.raises(IncompleteError, match="missing are 2, 3, 4"):
        load(target, tmp_path)


def test_a_whole_model_beside_an_index_of_other_files_is_refused_until_one_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, halves(TENSORS))
    write_file(tmp_path / MODEL, zeros_like(TENSORS))
    target = zeros_like(TENSORS)
    with pytest.raises(ArgumentError, match="pass the path of the one to read"):
        load(target, tmp_path)
    load(target, tmp_path / INDEX)
    assert_equal(target, TENSORS)
    write_index(tmp_path, dict.fromkeys(TENSORS, MODEL))
    load(target, tmp_path)
    assert_equal(target, zeros_like(TENSORS))


def test_a_cache_of_links_is_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, name in enumerate(write_shards(blobs, halves(TENSORS))):
        os.rename(blobs / name, blobs / f"hash{number}")
        os.symlink(f"../../blobs/hash{number}", snapshot / name)
    os.rename(blobs / INDEX, blobs / "hash-of-index")
    os.symlink("../../blobs/hash-of-index", snapshot / INDEX)
    target = zeros_like(TENSORS)
    load(target, snapshot)
    assert_equal(target, TENSORS)


def test_the_checkpoint_id_of_a_load_replaces_the_path_of_the_reader(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", TENSORS)
    target, reader = zeros_like(TENSORS), HuggingFaceReader()
    api.load(target, checkpoint_id=tmp_path / "a.safetensors", storage_reader=reader, adapter=NumpyRankAdapter())
    assert_equal(target, TENSORS)
    with pytest.raises(ArgumentError, match="where is the checkpoint"):
        load(target, None)


def test_a_directory_without_safetensors_says_so(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(NotFoundError, match="no safetensors files"):
        load({"w": np.zeros(1)}, tmp_path)
    with pytest.raises(NotFoundError):
        load({"w": np.zeros(1)}, tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"x\.safetensors"):
        load({"w": np.zeros(1)}, tmp_path / "x.safetensors")


def test_a_checkpoint_of_this_library_is_told_apart(tmp_path: Path) -> None:
    api.save({"w": np.ones(3)}, checkpoint_id=tmp_path, durable=False, adapter=NumpyRankAdapter())
    with pytest.raises(ArgumentError, match=r"without HuggingFaceReader$"):
        load({"w": np.zeros(3)}, tmp_path)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / ".metadata").write_bytes(b"\x80")
    with pytest.raises(ArgumentError, match="or with TorchDCPReader"):
        load({"w": np.zeros(3)}, tmp_path / "torch")


def test_a_file_of_any_name_is_looked_into(tmp_path: Path) -> None:
    write_file(tmp_path / "3f786850e387550f", TENSORS)
    target = zeros_like(TENSORS)
    load(target, tmp_path / "3f786850e387550f")
    assert_equal(target, TENSORS)
    (tmp_path / "full.pt").write_bytes(b"PK\x03\x04" + bytes(range(60)))
    with pytest.raises(CorruptError, match=r"full\.pt.*not such a file"):
        load(target, tmp_path / "full.pt")


def test_quantised_weights_that_lose_their_scales_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    header = {
        "a.weight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]},
        "a.weight_scale_inv": {"dtype": "U8", "shape": [1], "data_offsets": [4, 5]},
        "b.weight": {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [5, 7]},
    }
    (tmp_path / MODEL).write_bytes(file_bytes(header, b"\x38\x40\x44\x48\x07\x3c\x3c"))
    target = {"a.weight": np.zeros(4, np.float32), "b.weight": np.zeros(2, np.float32)}
    load({**target, "a.weight_scale_inv": np.zeros(1, np.uint8)}, tmp_path)
    assert target["a.weight"].tolist() == [1, 2, 3, 4]
    assert "scales" not in caplog.text
    load(target, tmp_path)
    assert "1 tensors of 8-bit floats" in caplog.text
    assert "a.weight" in caplog.text
    assert "b.weight" not in caplog.text


# -- what is read ----------------------------------------------------------------------------------------------------


def test_what_the_index_does_not_name_is_not_read(tmp_path: Path) -> None:
    names = write_shards(tmp_path, halves(TENSORS))
    write_file(tmp_path / "stale.safetensors", {"embed.weight": numbered(6, 4) * 0})
    first, *_ = TENSORS
    write_index(tmp_path, {key: names[key not in halves(TENSORS)[0]] for key in TENSORS if key != first})
    with pytest.raises(MissingKeysError, match=first):
        load(zeros_like(TENSORS), tmp_path)
    target = {name: np.zeros_like(array) for name, array in TENSORS.items() if name != first}
    load(target, tmp_path)
    assert_equal(target, {name: TENSORS[name] for name in target})


def test_a_missing_weight_is_named_and_may_be_allowed(tmp_path: Path) -> None:
    write_file(tmp_path / MODEL, TENSORS)
    target = {"embed.weight": np.zeros((6, 4), np.float32), "head.weight": np.full(2, 7.0)}
    with pytest.raises(MissingKeysError, match=r"head\.weight"):
        load(target, tmp_path)
    load(target, tmp_path, planner=StandardLoadPlanner(allow_partial_load=True))
    assert_equal(target, {"embed.weight": TENSORS["embed.weight"], "head.weight": np.full(2, 7.0)})


def test_two_names_of_one_memory_are_filled_by_one_tensor(tmp_path: Path) -> None:
    write_file(tmp_path / MODEL, TENSORS)
    shared = np.zeros((6, 4), np.float32)
    load({"embed.weight": shared, "lm_head.weight": shared}, tmp_path)
    np.testing.assert_array_equal(shared, TENSORS["embed.weight"])
    with pytest.raises(MissingKeysError, match=r"lm_head\.weight"):
        load({"embed.weight": shared, "lm_head.weight": shared[:3]}, tmp_path)


def test_shapes_must_agree_and_nothing_is_touched_before_that_is_known(tmp_path: Path) -> None:
    write_file(tmp_path / MODEL, TENSORS)
    target: dict[str, Array] = {"embed.weight": np.zeros((6, 4), np.float32), "layers.0.weight": np.zeros((2, 8))}
    with pytest.raises(ShapeMismatchError, match=r"layers\.0\.weight"):
        load(target, tmp_path)
    assert not target["embed.weight"].any()


def test_a_nested_state_is_matched_by_its_printed_names(tmp_path: Path) -> None:
    write_file(tmp_path / MODEL, TENSORS)
    layers: list[dict[str, Array]] = [
        {"weight": np.zeros((4, 4), np.float32)},
        {"weight": np.zeros((3, 5), np.float16)},
    ]
    load({"layers": layers}, tmp_path)
    for row, layer in enumerate(layers):
        np.testing.assert_array_equal(layer["weight"], TENSORS[f"layers.{row}.weight"])


def test_the_description_lists_shapes_and_chunks(tmp_path: Path) -> None:
    write_file(tmp_path / MODEL, TENSORS)
    reader = HuggingFaceReader(tmp_path)
    reader.initialize_reader()
    found = reader.load_metadata().state_dict_metadata
    assert sorted(found) == sorted(TENSORS)
    entry = found["layers.1.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    assert (entry.dtype.name, entry.shape, len(entry.chunks)) == ("float16", (3, 5), 1)


# -- shards that torch DCP wrote -----------------------------------------------------------------------------------


def quarters() -> dict[str, dict[str, tuple[tuple[int, ...], Array]]]:
    """A tensor of 6 x 8 in four files, in uneven parts, and one that only one file has."""
    whole = numbered(6, 8)
    files: dict[str, dict[str, tuple[tuple[int, ...], Array]]] = {}
    for row, (top, bottom) in enumerate(((0, 2), (2, 6))):
        for column, (left, right) in enumerate(((0, 5), (5, 8))):
            files[f"shard-{row}{column}.safetensors"] = {"w": ((top, left), whole[top:bottom, left:right])}
    files["shard-01.safetensors"]["b"] = ((0,), numbered(3))
    return files


def write_quarters(directory: Path, files: Mapping[str, Mapping[str, tuple[tuple[int, ...], Array]]]) -> None:
    for name, arrays in files.items():
        write_saved_shard(directory / name, arrays)


def test_shards_are_put_where_their_headers_say(tmp_path: Path) -> None:
    write_quarters(tmp_path, quarters())
    target = {"w": np.zeros((6, 8), np.float32), "b": np.zeros(3, np.float32)}
    load(target, tmp_path)
    assert_equal(target, {"w": numbered(6, 8), "b": numbered(3)})


def test_a_gap_between_shards_names_the_elements(tmp_path: Path) -> None:
    files = quarters()
    del files["shard-10.safetensors"]
    write_quarters(tmp_path, files)
    with pytest.raises(IncompleteError, match=r"'w' at offsets \(2, 0\) sizes \(4, 5\).*shard missing"):
        load({"b": np.zeros(3, np.float32)}, tmp_path)


def test_a_shard_that_two_files_have_names_both(tmp_path: Path) -> None:
    files = quarters()
    files["again.safetensors"] = {"w": files["shard-11.safetensors"]["w"]}
    write_quarters(tmp_path, files)
    with pytest.raises(CorruptError, match=r"shard-11\.safetensors.*'w' is in again\.safetensors"):
        load({"b": np.zeros(3, np.float32)}, tmp_path)


def test_shards_that_overlap_name_the_files(tmp_path: Path) -> None:
    files = quarters()
    files["wide.safetensors"] = {"w": ((0, 4), numbered(1, 2))}
    write_quarters(tmp_path, files)
    with pytest.raises(CorruptError, match=r"more than one shard.*wide\.safetensors"):
        load({"b": np.zeros(3, np.float32)}, tmp_path)


def test_shards_of_two_types_are_refused(tmp_path: Path) -> None:
    files = quarters()
    files["shard-11.safetensors"] = {"w": ((2, 5), numbered(4, 3, dtype="float64"))}
    write_quarters(tmp_path, files)
    with pytest.raises(CorruptError, match="not shards of one tensor"):
        load({"b": np.zeros(3, np.float32)}, tmp_path)


@pytest.mark.parametrize(
    "note",
    [
        "{",
        "[]",
        '{"w": {"saved_offsets": [0, 0]}, "w": {"saved_offsets": [0, 0]}}',
        '{"v": {"saved_offsets": [0, 0]}}',
        '{"w": {"saved_offsets": [0]}}',
        '{"w": {"saved_offsets": [0, -1]}}',
        '{"w": {"saved_offsets": [0, 4611686018427387904]}}',
        '{"w": {"saved_offsets": [0, 1.0]}}',
        '{"w": {"saved_offsets": [4611686018427387901, 4611686018427387901]}}',
        '{"w": {}}',
        '{"w": 3}',
        "[" * 100_000,
    ],
)
def test_notes_of_shards_that_make_no_sense_are_refused(tmp_path: Path, note: str) -> None:
    write_file(tmp_path / "a.safetensors", {"w": numbered(2, 2)}, {"DCP_SHARDING_INFO": note})
    with pytest.raises(CorruptError, match=r"a\.safetensors.*DCP_SHARDING_INFO|is too large"):
        load({"w": np.zeros((2, 2), np.float32)}, tmp_path)


def test_a_shard_that_claims_to_lie_far_away_is_a_gap(tmp_path: Path) -> None:
    write_saved_shard(tmp_path / "a.safetensors", {"w": ((1 << 58,), numbered(2))})
    with pytest.raises(IncompleteError, match="'w' at offsets"):
        load({"w": np.zeros(2, np.float32)}, tmp_path)


# -- what is broken ------------------------------------------------------------------------------------------------


def rewritten_index(directory: Path, text: str) -> None:
    (directory / INDEX).write_text(text)


def _write_junk(directory: Path) -> None:
    (directory / INDEX).write_bytes(b"\xff\xfe\x00")


INDEX_DAMAGES: dict[str, tuple[Callable[[Path], None], type[DcpError], str]] = {
    "no JSON": (lambda d: rewritten_index(d, '{"weight_map": {'), CorruptError, INDEX),
    "a list": (lambda d: rewritten_index(d, "[]"), CorruptError, INDEX),
    "deep": (lambda d: rewritten_index(d, "[" * 200_000), CorruptError, INDEX),
    "no map": (lambda d: rewritten_index(d, '{"metadata": {}}'), CorruptError, INDEX),
    "a map of numbers": (lambda d: rewritten_index(d, '{"weight_map": {"step": 3}}'), CorruptError, INDEX),
    "a name twice": (
        lambda d: rewritten_index(d, '{"weight_map": {"step": "a.safetensors", "step": "b.safetensors"}}'),
        CorruptError,
        "twice",
    ),
    "bytes": (lambda d: _write_junk(d), CorruptError, INDEX),
    "no safetensors": (lambda d: write_index(d, {"step": "model.bin"}), CorruptError, r"model\.bin"),
    "up and out": (lambda d: write_index(d, {"step": "../x.safetensors"}), CorruptError, r"\.\./x\.safetensors"),
    "absolute": (lambda d: write_index(d, {"step": "/etc/x.safetensors"}), CorruptError, "/etc/x"),
    "below": (lambda d: write_index(d, {"step": "a/x.safetensors"}), CorruptError, "a/x"),
    "a NUL": (lambda d: write_index(d, {"step": "a\0.safetensors"}), CorruptError, "no name of a file"),
    "a surrogate": (lambda d: write_index(d, {"step": "a\ud800.safetensors"}), CorruptError, "no name of a file"),
    "no such file": (lambda d: write_index(d, {"step": "x.safetensors"}), IncompleteError, r"x\.safetensors"),
    "no such tensor": (
        lambda d: write_index(d, {"nothing": "model-00001-of-00002.safetensors"}),
        CorruptError,
        r"model-00001-of-00002\.safetensors.*lacks 1 tensors.*nothing",
    ),
}


@pytest.mark.parametrize("kind", INDEX_DAMAGES)
def test_a_broken_index_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    damage, error, words = INDEX_DAMAGES[kind]
    write_shards(tmp_path, halves(TENSORS))
    (tmp_path.parent / "x.safetensors").write_bytes((tmp_path / "model-00001-of-00002.safetensors").read_bytes())
    damage(tmp_path)
    target = {"step": np.array(-1.0, np.float32)}
    with pytest.raises(error, match=words):
        load(target, tmp_path)
    assert target["step"] == -1


def test_an_index_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / INDEX, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptError, match="too many for an index"):
        load({"step": np.zeros(1)}, tmp_path)


def entry(**changes: object) -> dict[str, object]:
    return {**header_entry(numbered(2, 2), 0), **changes}


HEADERS: dict[str, bytes | dict[str, object]] = {
    "no JSON": b'{"w": ',
    "a list": b"[]",
    "deep": b"[" * 200_000,
    "a name twice": b'{"w":%s,"w":%s}' % ((json.dumps(entry()).encode(),) * 2),
    "an unknown type": {"w": entry(dtype="F7")},
    "no type": {"w": {"shape": [2, 2], "data_offsets": [0, 16]}},
    "a negative size": {"w": entry(shape=[-2, -2])},
    "a huge size": {"w": entry(shape=[1 << 62, 1 << 62])},
    "a fraction": {"w": entry(shape=[2.0, 2])},
    "a hole": {"w": entry(data_offsets=[8, 24])},
    "an overlap": {"w": entry(), "v": entry(data_offsets=[8, 24])},
    "backwards": {"w": entry(data_offsets=[16, 0])},
    "many dimensions": {"w": entry(shape=[2, 2] + [1] * 70)},
    "half bytes": {"w": entry(dtype="F4", shape=[33], data_offsets=[0, 16])},
    "a name that is no Unicode": b'{"\\ud800":%s}' % json.dumps(entry()).encode(),
    "notes that are numbers": {"__metadata__": {"a": 1}, "w": entry()},
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_broken_header_is_refused_and_names_the_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / MODEL).write_bytes(file_bytes(HEADERS[kind], bytes(16)))
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        load({"w": np.zeros((2, 2), np.float32)}, tmp_path)


def test_a_file_that_is_cut_short_at_any_byte_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / MODEL, {"w": numbered(2, 2)})
    whole = (tmp_path / MODEL).read_bytes()
    for nbytes in range(len(whole)):
        (tmp_path / MODEL).write_bytes(whole[:nbytes])
        target = {"w": np.full((2, 2), -1, np.float32)}
        with pytest.raises(IncompleteError, match=r"model\.safetensors"):
            load(target, tmp_path)
        assert (target["w"] == -1).all()
    (tmp_path / MODEL).write_bytes(whole + b"\0")
    with pytest.raises(CorruptError, match="behind the last tensor"):
        load({"w": np.zeros((2, 2), np.float32)}, tmp_path)


def test_a_header_that_claims_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    for length in (1 << 62, 100_000_000, 99_999_999):
        (tmp_path / MODEL).write_bytes(length.to_bytes(8, "little") + b"{}")
        tracemalloc.start()
        try:
            with pytest.raises((CorruptError, IncompleteError), match=r"model\.safetensors"):
                load({"w": np.zeros((2, 2), np.float32)}, tmp_path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 22
        finally:
            tracemalloc.stop()


def test_names_and_dimensions_that_would_blow_up_columns_are_refused(tmp_path: Path) -> None:
    count = 20_000
    tensors: dict[str, object] = {
        f"t{row}": {"dtype": "U8", "shape": [1], "data_offsets": [row, row + 1]} for row in range(count)
    }
    tensors["wide"] = {"dtype": "U8", "shape": [1] * 64, "data_offsets": [count, count + 1]}
    (tmp_path / MODEL).write_bytes(file_bytes(tensors, bytes(count + 1)))
    load_it = {"t7": np.ones(1, np.uint8)}
    load(load_it, tmp_path)
    assert load_it["t7"] == 0
    more = {f"m{row}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for row in range(250_000)}
    (tmp_path / MODEL).write_bytes(file_bytes({**more, **tensors}, bytes(count + 1)))
    with pytest.raises(CorruptError, match="cannot be true: 270001 tensors"):
        load(load_it, tmp_path)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / MODEL)
    with pytest.raises(CorruptError, match="no regular file"):
        load({"w": np.zeros(2, np.float32)}, tmp_path)


def test_a_tensor_in_two_files_without_an_index_names_both(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {"w": numbered(2, 2)})
    write_file(tmp_path / "b.safetensors", {"w": numbered(2, 2)})
    with pytest.raises(CorruptError, match=r"b\.safetensors: the tensor 'w' is in a\.safetensors too"):
        load({"w": np.zeros((2, 2), np.float32)}, tmp_path)


def test_a_file_that_shrinks_between_planning_and_reading_leaves_targets_alone(tmp_path: Path) -> None:
    write_file(tmp_path / MODEL, {"w": numbered(2, 2)})

    class Late(StandardLoadPlanner):
        def build_local_plan(self):  # type: ignore[no-untyped-def]  # as the base class has it
            with open(tmp_path / MODEL, "r+b") as file:
                file.truncate(os.path.getsize(tmp_path / MODEL) - 1)
            return super().build_local_plan()

    target = {"w": np.full((2, 2), -1, np.float32)}
    with pytest.raises(IncompleteError, match=r"model\.safetensors has \d+ bytes, expected"):
        load(target, tmp_path, planner=Late())
    assert (target["w"] == -1).all()


def test_types_that_no_framework_has_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    header = {
        "odd": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        "w": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
    }
    (tmp_path / MODEL).write_bytes(file_bytes(header, b"abcde"))
    target = {"w": np.zeros(2, np.uint8)}
    load(target, tmp_path)
    assert target["w"].tobytes() == b"de"
    assert "odd (F6_E2M3)" in caplog.text
    with pytest.raises(MissingKeysError):
        load({"odd": np.zeros(4, np.uint8)}, tmp_path)
