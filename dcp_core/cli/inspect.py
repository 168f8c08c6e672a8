"""`dcp inspect PATH`: what is in a checkpoint, how it is cut, who wrote how much; and a picture of one tensor."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict

from dcp_core.cli.sources import open_reader
from dcp_core.cli.storage_options import add_storage_options, parsed_storage_options
from dcp_core.cli.tables import (
    can_be_written,
    counted,
    printable,
    shown_bytes,
    write_json,
    write_line,
    write_table,
)
from dcp_core.errors import ArgumentError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import ReadContext
from dcp_core.inspection.census import Census, TensorEntry, take_census
from dcp_core.inspection.description import open_metadata
from dcp_core.inspection.detection import checkpoint_format
from dcp_core.inspection.holdings import holdings_of
from dcp_core.inspection.names import key_matcher
from dcp_core.inspection.object_summaries import ObjectEntry, summarize_objects
from dcp_core.inspection.palette import colour_of, text_colour_on
from dcp_core.inspection.svg_picture import draw_svg
from dcp_core.inspection.text_picture import LINES, boxes_text, draw_text
from dcp_core.metadata import Metadata
from dcp_core.storage.urls import redacted

_LIMIT = 50
_BAR_CHARS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("path", metavar="PATH", help="a directory or URL; or safetensors, or their index")
    parser.add_argument("--keys", metavar="GLOB", help="only names that match, such as 'model.*.weight'")
    parser.add_argument("--limit", type=int, default=_LIMIT, metavar="N", help=f"rows of a table; 0: all ({_LIMIT})")
    parser.add_argument("--tensor", metavar="KEY", help="draw who holds what of this tensor, instead of the lists")
    parser.add_argument("--svg", metavar="FILE", help="draw it into this file; with --tensor")
    parser.add_argument(
        "--rank", type=int, metavar="R", help="as this rank would load it: its own values, and all ranks'"
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    add_storage_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show what is in a checkpoint."""
    if arguments.limit < 0:
        raise ArgumentError(f"--limit takes a number, 0 or more, found {arguments.limit}")
    if arguments.svg is not None and arguments.tensor is None:
        raise ArgumentError("--svg draws one tensor: name it by --tensor KEY")
    if arguments.svg is not None and arguments.json:
        raise ArgumentError("--svg and --json are two ways to show a tensor: give one of them")
    options = parsed_storage_options(arguments)
    kind = checkpoint_format(arguments.path, options)
    reader = open_reader(arguments.path, kind, options)
    reader.initialize_reader()
    metadata = open_metadata(reader, arguments.rank)
    if arguments.tensor is not None:
        return _draw(metadata, arguments)
    reader.configure_reader(metadata, ReadContext(0, 1))
    census = take_census(metadata)
    wanted = key_matcher(arguments.keys)
    rows, object_rows = census.rows_of(wanted, arguments.rank), census.object_rows_of(wanted, arguments.rank)
    most = arguments.limit if arguments.limit and not arguments.json else None
    shown = object_rows[:most]
    measure = reader.object_nbytes if type(reader) is FileSystemReader else None
    objects = summarize_objects(census.columns, shown, reader.read_object, measure)
    if arguments.json:
        values = {"place": redacted(arguments.path), "format": kind, **census.to_values(rows)}
        write_json({**values, "objects": [asdict(entry) for entry in objects]})
        return 0
    _write_head(redacted(arguments.path), kind, census)
    if arguments.keys is not None and not rows and not object_rows:
        write_line(f"no name matches {arguments.keys!r}")
    _write_tensors(census.tensors(rows[:most]), len(rows))
    _write_objects(objects, len(object_rows))
    _write_files(census, most)
    return 0


def _draw(metadata: Metadata, arguments: argparse.Namespace) -> int:
    holdings = holdings_of(metadata, _meant(metadata, arguments.tensor), arguments.rank)
    if arguments.json:
        write_json({"place": redacted(arguments.path), **holdings.to_values()})
        return 0
    if arguments.svg is not None:
        try:
            with open(arguments.svg, "w", encoding="utf-8") as file:
                file.write(draw_svg(holdings))
        except OSError as error:
            raise ArgumentError(f"cannot write {arguments.svg!r}: {error.strerror or error}") from error
        write_line(f"wrote {arguments.svg}")
        return 0
    width = shutil.get_terminal_size((100, 24)).columns
    for line in draw_text(holdings, width=width, is_ascii=not can_be_written(LINES)):
        write_line(*(text if holder is None else (text, _style(holder)) for text, holder in line))
    return 0


def _meant(metadata: Metadata, key: str) -> str:
    """A key as it is, or the one that is shown like this because it cannot be printed."""
    if key in metadata.source.names() or "\\" not in key:
        return key
    return next((name for name in metadata.source.names() if printable(name) == key), key)


def _style(holder: int) -> str:
    colour = colour_of(holder)
    return f"{text_colour_on(colour)} on {colour}"


def _write_head(path: str, kind: str, census: Census) -> None:
    columns, writer = census.columns, census.writer
    write_line((path, "bold"), f"  {kind}")
    if kind == "dcp":
        framework = " ".join(filter(None, (writer.framework, writer.framework_version)))
        write_line(
            f"  save {census.save.save_id} of {counted(writer.world_size, 'rank')}, by {writer.library}, {framework}"
        )
    described = "" if census.metadata_nbytes is None else f"; description {shown_bytes(census.metadata_nbytes)}"
    stored, plain = int(census.stored_nbytes.sum()), int(census.nbytes.sum())
    copies = f", {shown_bytes(stored)} with copies" if stored > plain else ""
    write_line(
        f"  {counted(len(columns.tensors.names), 'tensor')} in {boxes_text(len(columns.chunks))}, "
        f"{shown_bytes(plain)}{copies}; {counted(len(columns.objects.names), 'other value')}; "
        f"{counted(len(census.files), 'file')}{described}"
    )
    balance = census.balance
    if balance is not None:
        write_line(
            f"  balance: {balance.writers} of {counted(balance.ranks, 'rank')} wrote; rank {balance.most_rank} most, "
            f"{shown_bytes(balance.most)}, {balance.ratio:.2f} x the mean"
        )


def _write_tensors(entries: list[TensorEntry], count: int) -> None:
    if not count:
        return
    write_line()
    header = ("tensor", "type", "shape", "cut", "boxes", "files", "bytes")
    write_table(header, [_tensor_row(entry) for entry in entries])
    _write_more(count - len(entries), "tensor")


def _tensor_row(entry: TensorEntry) -> tuple[str, ...]:
    name = entry.name if entry.rank is None else f"{entry.name} (of rank {entry.rank})"
    cut = "irregular" if entry.cut is None else " x ".join(map(str, entry.cut))
    counts = (str(entry.boxes), str(entry.files), shown_bytes(entry.nbytes))
    return name, entry.dtype, str(list(entry.shape)), cut, *counts


def _write_objects(entries: list[ObjectEntry], count: int) -> None:
    if not count:
        return
    write_line()
    rows = []
    for entry in entries:
        name = entry.name if entry.rank is None else f"{entry.name} (of rank {entry.rank})"
        rows.append((name, "" if entry.nbytes is None else shown_bytes(entry.nbytes), entry.summary))
    write_table(("value", "bytes", "what it is"), rows)
    _write_more(count - len(entries), "value")


def _write_files(census: Census, most: int | None) -> None:
    entries = census.file_entries()
    if not entries:
        return
    write_line()
    largest = max(entry.nbytes for entry in entries)
    rows = []
    for entry in entries[:most]:
        content = boxes_text(entry.boxes) if entry.kind == "tensors" else counted(entry.objects, "value")
        bar = "#" * round(_BAR_CHARS * entry.nbytes / max(largest, 1))
        rows.append((entry.name, content, shown_bytes(entry.nbytes), bar))
    write_table(("file", "holds", "bytes", "share"), rows)
    _write_more(len(entries) - len(rows), "file")


def _write_more(left: int, what: str) -> None:
    if left > 0:
        write_line(f"and {counted(left, f'more {what}')} (--limit 0 shows all)")
