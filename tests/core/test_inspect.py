"""What `inspect` counts and draws, against counting element by element."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core import api
from dcp_core.box import Box, slices
from dcp_core.errors import ArgumentError, CorruptError, MissingKeysError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import ReadContext
from dcp_core.formats.objects import encode_value
from dcp_core.inspection.census import sum_by, take_census
from dcp_core.inspection.holdings import Folding, Holdings, fold, holdings_of
from dcp_core.inspection.names import key_matcher
from dcp_core.inspection.object_summaries import READ_BYTES, summarize_objects, summary_of
from dcp_core.inspection.palette import colour_of, text_colour_on
from dcp_core.inspection.svg_picture import draw_svg
from dcp_core.inspection.text_picture import as_text, draw_text, holding_runs
from dcp_core.metadata import EVERY_RANK, Metadata
from tests.core.metadata_samples import Checkpoint, Tensor, checkpoints, grid_cells, small_checkpoint

_SVG = "{http://www.w3.org/2000/svg}"
Cells = list[tuple[tuple[int, ...], tuple[int, ...]]]


class Tripwire:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch it-ran",)


def holdings(shape: tuple[int, ...], boxes: Cells, ranks: list[int]) -> Holdings:
    held = sorted(set(ranks))
    table = np.array([[*offsets, *sizes] for offsets, sizes in boxes], np.int64).reshape(len(boxes), 2 * len(shape))
    return Holdings(
        "model.w", "float32", shape, table[:, : len(shape)], table[:, len(shape) :],
        np.array([held.index(rank) for rank in ranks], np.int64), tuple(f"rank {rank}" for rank in held), 4,
    )  # fmt: skip


def regular(shape: tuple[int, ...], pieces: tuple[int, ...]) -> Cells:
    cuts = [[extent * at // count for at in range(1, count)] for extent, count in zip(shape, pieces, strict=True)]
    return grid_cells(shape, cuts)


# --- the census --------------------------------------------------------------------------------------


@given(made=checkpoints())
@settings(max_examples=60, deadline=None)
def test_what_is_counted_is_what_counting_one_by_one_finds(made: Checkpoint) -> None:
    census = take_census(Metadata(made.source()))
    entries = census.tensors(census.rows_of(key_matcher(None)))
    assert len(entries) == len(made.tensors)
    for entry, tensor in zip(entries, made.tensors, strict=True):
        assert (entry.name, entry.shape, entry.boxes) == (tensor.name, tensor.shape, len(tensor.boxes))
        assert entry.rank == (None if tensor.rank == EVERY_RANK else tensor.rank)
        assert entry.files == len(set(tensor.files))
        assert entry.stored_nbytes == sum(tensor.nbytes(box) for box in range(len(tensor.boxes)))
        starts = [sorted({offsets[dim] for offsets, _ in tensor.boxes}) for dim in range(len(tensor.shape))]
        is_grid = math.prod(map(len, starts)) == len(set(tensor.boxes))
        if tensor.boxes:
            assert entry.cut == (tuple(map(len, starts)) if is_grid else None)
    files = census.file_entries()
    assert [file.boxes for file in files[: made.ranks]] == [
        sum(tensor.files.count(row) for tensor in made.tensors) for row in range(made.ranks)
    ]
    assert sum(file.objects for file in files) == len(made.objects)
    balance = census.balance
    assert balance is not None
    assert balance.most == max(file.nbytes for file in files)
    assert balance.mean * balance.ranks == pytest.approx(sum(file.nbytes for file in files))


def test_names_are_chosen_by_a_pattern_of_the_shell() -> None:
    census = take_census(Metadata(small_checkpoint().source()))
    chosen = [entry.name for entry in census.tensors(census.rows_of(key_matcher("t*")))]
    assert chosen == ["tied", "tied.too"]
    assert census.object_rows_of(key_matcher("no*")) == [1, 2]
    assert census.rows_of(key_matcher("nothing")) == []


def test_sums_by_group_are_exact_where_doubles_are_not() -> None:
    values = np.array([2**60 + 1, 1, 2**53 + 1], np.int64)
    assert sum_by(np.array([0, 0, 2]), values, 4).tolist() == [2**60 + 2, 0, 2**53 + 1, 0]


def test_a_damaged_description_is_an_error(tmp_path: Path) -> None:
    api.save({"x": np.ones(3)}, checkpoint_id=tmp_path / "c", durable=False)
    path = tmp_path / "c" / ".metadata"
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)
    with pytest.raises(CorruptError):
        take_census(FileSystemReader(tmp_path / "c").load_metadata())


# --- objects -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "summary"),
    [
        (0.1, "0.1"),
        ({"a": [1, 2]}, "{'a': [1, 2]}"),
        ("x\ny", r"'x\ny'"),
        (list(range(100)), "[0, 1, 2, 3, ...]"),
        (b"\x1b[2J" * 100, None),
        (np.float32(2.5), None),
        (np.arange(100_000), None),
    ],
)
def test_plain_values_are_shown_in_one_short_line(value: object, summary: str | None) -> None:
    found = summary_of(encode_value(value))
    assert summary is None or found == summary
    assert len(found) <= 80 and found.isprintable()


def test_pickled_objects_are_named_and_never_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert summary_of(encode_value({"a": Tripwire()})) == "pickled: posix.system"
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("junk", [b"", b"?", b"l\x05", b"P\x02ab", b"i\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"])
def test_what_is_no_encoding_is_refused(junk: bytes) -> None:
    with pytest.raises(CorruptError):
        summary_of(junk)


def test_long_objects_are_measured_and_not_read_and_lost_ones_say_so(tmp_path: Path) -> None:
    state = {"long": b"x" * (READ_BYTES + 1), "short": 1}
    api.save(state, checkpoint_id=tmp_path / "c", durable=False)
    reader = FileSystemReader(tmp_path / "c")
    metadata = reader.load_metadata()
    reader.configure_reader(metadata, ReadContext(0, 1))
    census, read = take_census(metadata), []

    def counted(stored: Any) -> bytes:
        read.append(stored.name)
        return reader.read_object(stored)

    long, short = summarize_objects(census.columns, [0, 1], counted, reader.object_nbytes)
    assert (long.summary, read) == ("too long to be shown", ["short"])
    assert (short.summary, long.nbytes is not None and long.nbytes > READ_BYTES) == ("1", True)
    (objects,) = (tmp_path / "c").glob("*.bytes")
    objects.unlink()
    reader.configure_reader(metadata, ReadContext(0, 1))
    (lost,) = summarize_objects(census.columns, [1], reader.read_object, reader.object_nbytes)
    assert (lost.nbytes, "is missing" in lost.summary) == (None, True)


# --- who holds what ----------------------------------------------------------------------------------


def unfolded(folding: Folding, shape: tuple[int, ...]) -> npt.NDArray[np.object_]:
    """Paint every cell of every panel into an array of the tensor's shape: who holds each element."""
    painted = np.empty(shape, object)
    painted.fill(())
    for panel in folding.panels:
        index: list[slice] = [slice(None)] * len(shape)
        for dim, start, stop in panel.slices:
            index[dim] = slice(start, stop)
        for cell in panel.cells:
            for axis, (first, last) in ((folding.rows, cell.rows), (folding.columns, cell.columns)):
                if axis.dim is not None:
                    index[axis.dim] = slice(axis.bounds[first], axis.bounds[last])
            where: Any = (*index, ...)
            region = painted[where]
            for at in np.ndindex(region.shape):
                region[at] = tuple(sorted({*region[at], *cell.holders}))
    return painted


@st.composite
def held_tensors(draw: st.DrawFn) -> Holdings:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    pieces = tuple(draw(st.integers(1, extent)) for extent in shape)
    cells = [cell for cell in regular(shape, pieces) if draw(st.integers(0, 7))]
    cells += [cell for cell in cells if not draw(st.integers(0, 5))]
    return holdings(shape, cells, [draw(st.integers(0, 3)) for _ in cells])


@given(held=held_tensors())
@settings(max_examples=100, deadline=None)
def test_unfolding_what_was_folded_gives_every_element_its_holders(held: Holdings) -> None:
    expected = np.empty(held.shape, object)
    expected.fill(())
    for offsets, sizes, holder in zip(held.offsets.tolist(), held.sizes.tolist(), held.holder.tolist(), strict=True):
        where: Any = (*slices(Box(tuple(offsets), tuple(sizes))), ...)
        region = expected[where]
        for at in np.ndindex(region.shape):
            region[at] = tuple(sorted({*region[at], holder}))
    folding = fold(held, max_rows=9, max_columns=9, max_panels=999)
    assert folding.more_panels == 0
    found = unfolded(folding, held.shape)
    assert found.tolist() == expected.tolist()


@given(count=st.integers(1, 60), most=st.integers(3, 12), shift=st.integers(0, 3))
def test_what_is_left_out_lies_in_the_middle_and_the_rest_is_where_it_belongs(
    count: int, most: int, shift: int
) -> None:
    boxes: Cells = [((at * 10,), (10 + (10 if at % 7 == shift and at + 1 < count else 0),)) for at in range(count)]
    taken = 0
    chosen: Cells = []
    for offsets, sizes in boxes:
        if offsets[0] >= taken:
            chosen.append((offsets, sizes))
            taken = offsets[0] + sizes[0]
    held = holdings((taken,), chosen, list(range(len(chosen))))
    folding = fold(held, max_rows=most, max_columns=most, max_panels=1)
    axis = folding.columns
    assert len(axis.shown) <= most
    for cell in folding.panels[0].cells:
        assert 0 <= cell.columns[0] < cell.columns[1] <= len(axis.shown)
        assert axis.bounds[cell.columns[0]] == cell.offsets[0]
        assert axis.bounds[cell.columns[1]] == cell.offsets[0] + cell.sizes[0]
    covered = {at for cell in folding.panels[0].cells for at in range(*cell.columns)}
    assert covered >= {at for at, piece in enumerate(axis.shown) if piece >= 0}


def test_the_text_is_as_it_should_be() -> None:
    held = holdings((8, 6), [((0, 0), (4, 6)), ((0, 0), (4, 6)), ((4, 0), (2, 3))], [0, 4, 1])
    assert as_text(draw_text(held, width=80)).splitlines() == [
        "model.w  float32 [8, 6]  3 boxes",
        "down: dimension 0  across: dimension 1",
        "   0       3       6",
        " 0 ┌───────────────┐",
        "   │ 0+4           │",
        " 4 ├───────┬───────┤",
        "   │ 1     │ nobody│",
        " 6 ├───────┘       │",
        "   │     nobody    │",
        " 8 └───────────────┘",
        "    0  rank 0: 1 box, 96 bytes",
        "    1  rank 1: 1 box, 24 bytes",
        "    4  rank 4: 1 box, 96 bytes",
    ]


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [((), ()), ((100,), (4,)), ((4096, 16), (1024, 1)), ((8, 8, 8, 8), (2, 2, 2, 2)), ((0, 3), None)],
)
def test_lines_fit_the_terminal_and_every_shape_can_be_drawn(shape: Any, pieces: Any) -> None:
    cells: Cells = [] if pieces is None else regular(shape, pieces) if shape else [((), ())]
    held = holdings(shape, cells, list(range(len(cells))))
    for width in (40, 100):
        text = as_text(draw_text(held, width=width))
        drawn = [line for line in text.splitlines() if "│" in line or "─" in line]
        assert drawn and max(map(len, drawn)) <= width
    ElementTree.fromstring(draw_svg(held).encode())


def test_lines_of_ascii_have_the_same_shape_and_the_name_stays() -> None:
    held = dataclasses.replace(holdings((4, 4), regular((4, 4), (2, 2)), [0, 1, 2, 3]), name="│w")
    plain, ascii_only = (as_text(draw_text(held, is_ascii=chosen)) for chosen in (False, True))
    assert ascii_only.startswith("│w ")
    assert ascii_only[2:].isascii()
    swapped = str.maketrans("│─┌┐└┘├┤┬┴┼", "|-+++++++++")
    assert plain[2:].translate(swapped) == ascii_only[2:]


@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=40), most=st.integers(1, 40))
def test_holders_are_told_one_by_one_or_in_runs_that_hold_the_same(counts: list[int], most: int) -> None:
    holder = np.repeat(np.arange(len(counts)), counts).tolist()
    held = holdings((len(holder), 2), [((row, 0), (1, 2)) for row in range(len(holder))], holder)
    runs = holding_runs(held, most)
    assert [each for run in runs for each in range(run.first, run.last + 1)] == list(range(len(counts)))
    if len(counts) <= most:
        assert len(runs) == len(counts)
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        own = counts[run.first]
        assert set(counts[run.first : run.last + 1]) == {own}
        assert f": {own} box" in run.text and f"{own * 2 * held.itemsize:,} bytes" in run.text
        if following is not None and len(counts) > most:
            assert counts[following.first] != own
        if run.first != run.last:
            assert f"ranks {run.first} to {run.last}: " in run.text


def test_a_thousand_ranks_are_one_line_of_the_legend() -> None:
    held = holdings((1000, 2), [((row, 0), (1, 2)) for row in range(1000)], list(range(1000)))
    text = as_text(draw_text(held))
    assert len(text.splitlines()) < 50
    assert "ranks 0 to 999: 1 box, " in text
    assert "ranks 0 to 999: 1 box, " in draw_svg(held)


def test_every_box_of_the_picture_has_room_for_its_label_and_holes_are_hatched() -> None:
    held = holdings((32, 32), regular((32, 32), (32, 32)), list(range(1024)))
    picture = draw_svg(held)
    texts = {each.text for each in ElementTree.fromstring(picture.encode()).iter(f"{_SVG}text")}
    assert texts >= {str(rank) for rank in range(1024)}
    assert "nobody holds this" not in texts
    hole = draw_svg(holdings((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2))], [0, 1]))
    assert "nobody holds this" in {each.text for each in ElementTree.fromstring(hole.encode()).iter(f"{_SVG}text")}


def rectangles(picture: str) -> list[tuple[str, float, str]]:
    """Fill, area and title of every rectangle that has a title."""
    root = ElementTree.fromstring(picture.encode())
    found = []
    for rect in root.iter(f"{_SVG}rect"):
        title = rect.find(f"{_SVG}title")
        if title is not None and title.text is not None:
            found.append((rect.attrib["fill"], float(rect.attrib["width"]) * float(rect.attrib["height"]), title.text))
    return found


def test_the_picture_has_a_box_for_each_box_in_its_holders_colour_and_to_scale() -> None:
    held = holdings((8, 6), [((0, 0), (2, 6)), ((2, 0), (6, 3)), ((2, 3), (6, 3))], [0, 1, 2])
    drawn = {title: (fill, area) for fill, area, title in rectangles(draw_svg(held)) if "offsets" in title}
    assert {title.split(":")[0]: fill for title, (fill, _) in drawn.items()} == {
        str(rank): colour_of(rank) for rank in range(3)
    }
    areas = {title.split(":")[0]: area for title, (_, area) in drawn.items()}
    assert areas["1"] == pytest.approx(areas["2"], rel=0.01)
    assert areas["0"] / areas["1"] == pytest.approx(12 / 18, rel=0.02)
    texts = [text.text for text in ElementTree.fromstring(draw_svg(held).encode()).iter(f"{_SVG}text")]
    assert {"0", "2", "3", "6", "8"} <= set(texts)
    assert "rank 2: 1 box, 72 bytes" in texts


def test_copies_share_a_box_and_all_their_colours_are_there() -> None:
    held = holdings((4,), [((0,), (4,)), ((0,), (4,))], [0, 5])
    fills = [fill for fill, _, title in rectangles(draw_svg(held)) if "offsets" in title]
    assert fills == [colour_of(0), colour_of(1)]


def test_a_strangers_name_cannot_break_the_picture_or_the_terminal() -> None:
    held = dataclasses.replace(
        holdings((4,), [((0,), (4,))], [0]), name='</text><script>alert("x")</script>\x1b[2J\x00'
    )
    root = ElementTree.fromstring(draw_svg(held).encode())
    assert not list(root.iter(f"{_SVG}script"))


def test_colours_differ_and_can_be_written_on() -> None:
    colours = [colour_of(holder) for holder in range(256)]
    assert len(set(colours)) == 256
    channels = np.array([[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in colours[:16]])
    apart = np.abs(channels[:, None] - channels[None]).sum(axis=-1)
    assert apart[~np.eye(16, dtype=bool)].min() > 40
    assert {text_colour_on(colour) for colour in colours} == {"#000000", "#ffffff"}


def test_holders_are_ranks_and_a_rank_of_its_own_can_be_chosen() -> None:
    made = small_checkpoint()
    made.tensors[1].files = [3, 2, 1, 0, 3, 2]
    made.place()
    metadata = Metadata(made.source())
    held = holdings_of(metadata, "grid")
    assert held.holders == ("rank 0", "rank 1", "rank 2", "rank 3")
    assert held.holder.tolist() == [3, 2, 1, 0, 3, 2]
    assert [int(column[3]) for column in held.all_held()] == [2, sum(made.tensors[1].nbytes(box) for box in (0, 4))]
    assert holdings_of(metadata, "rng", 1).holders == ("rank 1",)
    assert holdings_of(metadata, "rng").holders == ("rank 0",)
    with pytest.raises(ArgumentError, match="rank 7"):
        holdings_of(metadata, "rng", 7)
    with pytest.raises(MissingKeysError, match="nothing under 'nix'"):
        holdings_of(metadata, "nix")
    with pytest.raises(MissingKeysError, match="not a tensor"):
        holdings_of(metadata, "epoch")


def test_millions_of_boxes_are_counted_and_drawn_by_columns() -> None:
    """Too slow by far if a box cost a line of Python: there is a limit on calls, not on time."""
    count = 300_000
    tensor = Tensor("w", (count, 2), [], files=[])
    made = Checkpoint([tensor], [], 4)
    source = made.source()
    offsets = np.stack([np.arange(count), np.zeros(count, np.int64)], axis=1)
    chunks = dataclasses.replace(
        source.columns.chunks, offsets=offsets, sizes=np.broadcast_to(np.array([1, 2]), (count, 2)),
        file=(np.arange(count) % 4).astype(np.int32), byte_offset=np.arange(count) // 4 * 8,
    )  # fmt: skip
    tensors = dataclasses.replace(source.columns.tensors, row=np.array([0, count]))
    source.columns = dataclasses.replace(source.columns, tensors=tensors, chunks=chunks)
    calls = _calls_of(lambda: take_census(Metadata(source)).tensors([0]))
    calls += _calls_of(lambda: draw_text(holdings_of(Metadata(source), "w")))
    calls += _calls_of(lambda: draw_svg(holdings_of(Metadata(source), "w")))
    assert calls < 40_000


def _calls_of(action: Callable[[], object]) -> int:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls
