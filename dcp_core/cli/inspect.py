"""`dcp inspect PATH`: what is in a checkpoint, how it is cut, who wrote how much; and a picture of one tensor."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict

from dcp_core.cli.sources import open_reader
from dcp_core.cli.tables import shown_bytes, write_line, write_table
from dcp_core.errors import ArgumentError, NotFoundError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import ReadContext, StorageReader
from dcp_core.inspection.census import Census, TensorEntry, take_census
from dcp_core.inspection.detection import checkpoint_format
from dcp_core.inspection.holdings import holdings_of
from dcp_core.inspection.object_summaries import ObjectEntry, summarize_objects
from dcp_core.inspection.palette import colour_of, text_colour_on
from dcp_core.inspection.svg_picture import draw_svg
from dcp_core.inspection.text_picture import draw_text
from dcp_core.metadata import Metadata

_LIMIT = 50
_BAR_CHARS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("path", metavar="PATH", help="a directory or URL; or safetensors, or their index")
    parser.add_argument("--keys", metavar="GLOB", help="only names that match, such as 'model.*.weight'")
    parser.add_argument("--limit", type=int, default=_LIMIT, metavar="N", help=f"rows of a table; 0: all ({_LIMIT})")
    parser.add_argument("--tensor", metavar="KEY", help="draw who holds what of this tensor, instead of the lists")
    parser.add_argument("--svg", metavar="FILE", help="draw it into this file; with --tensor")
    parser.add_argument("--rank", type=int, metavar="R", help="where ranks saved alone, or values of their own: whose")
    parser.add_argument("--json", action="store_true", help="write one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Show what is in a checkpoint."""
    if arguments.limit < 0 or (arguments.svg is not None and arguments.tensor is None):
        raise ArgumentError("--limit takes a number, 0 or more; --svg goes with --tensor")
    kind = checkpoint_format(arguments.path)
    reader = open_reader(arguments.path, kind)
    reader.initialize_reader()
    metadata = _opened(reader, arguments.rank)
    if arguments.tensor is not None:
        return _draw(metadata, arguments)
    reader.configure_reader(metadata, ReadContext(0, 1))
    census = take_census(metadata)
    rows, object_rows = census.rows_of(arguments.keys), census.object_rows_of(arguments.keys)
    most = arguments.limit if arguments.limit and not arguments.json else None
    shown = object_rows[:most]
    measure = reader.object_nbytes if type(reader) is FileSystemReader else None
    objects = summarize_objects(census.columns, shown, reader.read_object, measure)
    if arguments.json:
        values = {"place": arguments.path, "format": kind, **census.to_values(rows)}
        sys.stdout.write(json.dumps({**values, "objects": [asdict(entry) for entry in objects]}, indent=2) + "\n")
        return 0
    _write_head(arguments.path, kind, census)
    _write_tensors(census.tensors(rows[:most]), len(rows))
    _write_objects(objects, len(object_rows))
    _write_files(census, most)
    return 0


def _opened(reader: StorageReader, rank: int | None) -> Metadata:
    """The description of all ranks, or of one that saved alone."""
    try:
        return reader.load_metadata()
    except NotFoundError as error:
        if rank is None:
            raise NotFoundError(f"{error}. Where ranks saved alone, pass --rank") from error
    return reader.load_metadata(rank)


def _draw(metadata: Metadata, arguments: argparse.Namespace) -> int:
    holdings = holdings_of(metadata, arguments.tensor, arguments.rank)
    if arguments.svg is not None:
        try:
            with open(arguments.svg, "w", encoding="utf-8") as file:
                file.write(draw_svg(holdings))
        except OSError as error:
            raise ArgumentError(f"cannot write {arguments.svg!r}: {error.strerror or error}") from error
        write_line(f"wrote {arguments.svg}")
        return 0
    width = shutil.get_terminal_size((100, 24)).columns
    for line in draw_text(holdings, width=width):
        write_line(*(text if holder is None else (text, _style(holder)) for text, holder in line))
    return 0


def _style(holder: int) -> str:
    colour = colour_of(holder)
    return f"{text_colour_on(colour)} on {colour}"


def _write_head(path: str, kind: str, census: Census) -> None:
    columns, writer = census.columns, census.writer
    write_line((path, "bold"), f"  {kind}")
    if kind == "dcp":
        framework = " ".join(filter(None, (writer.framework, writer.framework_version)))
        write_line(f"  save {census.save.save_id} of {writer.world_size} ranks, by {writer.library}, {framework}")
    described = "" if census.metadata_nbytes is None else f"; description {shown_bytes(census.metadata_nbytes)}"
    stored, plain = int(census.stored_nbytes.sum()), int(census.nbytes.sum())
    copies = f", {shown_bytes(stored)} with copies" if stored > plain else ""
    write_line(
        f"  {len(columns.tensors.names)} tensors in {len(columns.chunks)} boxes, {shown_bytes(plain)}{copies}; "
        f"{len(columns.objects.names)} other values; {len(census.files)} files{described}"
    )
    balance = census.balance
    if balance is not None:
        write_line(
            f"  balance: {balance.writers} of {balance.ranks} ranks wrote; rank {balance.most_rank} most, "
            f"{shown_bytes(balance.most)}, {balance.ratio:.2f} x the mean"
        )


def _write_tensors(entries: list[TensorEntry], count: int) -> None:
    if not count:
        return
    write_line()
    header = ("tensor", "type", "shape", "cut", "boxes", "files", "bytes")
    write_table(header, [_tensor_row(entry) for entry in entries])
    _write_more(count - len(entries), "tensors")


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
    _write_more(count - len(entries), "values")


def _write_files(census: Census, most: int | None) -> None:
    entries = census.file_entries()
    if not entries:
        return
    write_line()
    largest = max(entry.nbytes for entry in entries)
    rows = []
    for entry in entries[:most]:
        content = f"{entry.boxes} boxes" if entry.kind == "tensors" else f"{entry.objects} values"
        bar = "#" * round(_BAR_CHARS * entry.nbytes / max(largest, 1))
        rows.append((entry.name, content, shown_bytes(entry.nbytes), bar))
    write_table(("file", "holds", "bytes", "share"), rows)
    _write_more(len(entries) - len(rows), "files")


def _write_more(left: int, what: str) -> None:
    if left > 0:
        write_line(f"and {left} more {what} (--limit 0 shows all)")
