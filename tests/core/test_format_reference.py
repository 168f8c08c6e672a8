"""A second reader of `.metadata`, written from docs/reference/format.md alone, against what the writer writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given

from dcp_core.dtype import DTYPES
from dcp_core.metadata import EVERY_RANK
from tests.core import format_reader
from tests.core.format_reader import TYPES, Description, Tensor
from tests.core.format_records import Container
from tests.core.metadata_samples import Checkpoint, checkpoints, path_of, small_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "format.md"


@given(checkpoints())
def test_a_reader_that_knows_only_the_page_reads_every_tensor_and_chunk(made: Checkpoint) -> None:
    assert Description(made.blob()).tensors == [
        Tensor(t.name, path_of(t.name), t.rank, t.dtype, t.shape, tuple(t.boxes), tuple(t.files), tuple(t.byte_offsets))
        for t in made.tensors
    ]


@given(checkpoints())
def test_it_reads_every_object_and_file_and_container_too(made: Checkpoint) -> None:
    found = Description(made.blob())
    ordered = sorted(made.objects, key=lambda entry: (entry[0].encode(), entry[1]))
    assert found.objects == [
        format_reader.Object(name, path_of(name), rank, per_rank, made.ranks + file, row)
        for row, (name, rank, per_rank, file) in enumerate(ordered)
    ]
    files = made.files()
    assert b"".join(file.digest for file in found.files) == files.digest.astype("<u8").tobytes()
    for name in ("rank", "part", "kind", "nbytes", "data_start", "field_start", "field_nbytes"):
        assert [getattr(file, name) for file in found.files] == getattr(files, name).tolist()
    assert found.nesting == made.containers


def test_it_reads_who_saved() -> None:
    strings = Container(small_checkpoint().blob()).strings
    assert (strings["format"], strings["version"], strings["rank"], strings["world_size"]) == ("dcp", "1", "", "4")
    assert strings["suffix"] == "." + strings["save_id"]
    assert (strings["library"], strings["framework"], strings["framework_version"]) == ("dcp 0.1", "torch", "2.13")
    assert EVERY_RANK == -1


def test_the_page_lists_every_element_type_as_it_is_stored() -> None:
    rows = re.findall(r"^\| ([0-9, ]+) \| ([\w, ]+) \| ([0-9, ]+) \| ([\w, ]+) \|$", PAGE.read_text(), re.MULTILINE)
    listed = set()
    for codes, names, sizes, spelled in rows:
        tail = spelled.partition(", tail ")[2]
        spellings = spelled.partition(", tail ")[0].split(", ")
        for row in zip(codes.split(", "), names.split(", "), sizes.split(", "), spellings, strict=True):
            listed.add((*row, tail))
    expected = {(str(d.code), d.name, str(d.itemsize), d.file_dtype, ",".join(map(str, d.file_tail))) for d in DTYPES}
    assert listed == expected
    known = {(str(code), t.name, str(t.itemsize), t.spelled, ",".join(map(str, t.tail))) for code, t in TYPES.items()}
    assert listed == known


@pytest.mark.parametrize("name", ["format_records", "format_reader", "format_value_reader", "format_data_reader"])
def test_the_reader_takes_nothing_from_the_packages(name: str) -> None:
    source = Path(__file__).with_name(f"{name}.py").read_text()
    assert re.findall(r"^ *(?:from|import) +(dcp_\w+|tests\.(?!core\.format_)\w+)", source, re.MULTILINE) == []
