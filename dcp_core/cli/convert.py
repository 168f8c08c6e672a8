"""`dcp convert SRC DST --to dcp|hf`: offline conversion, in one process and in bounded memory.

What lies at SRC is found out by looking: a checkpoint of this library or of torch DCP, safetensors, or a file of
`torch.save`. With `--dry-run` nothing is written, and what would be is listed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcp_core.cli.sources import FORMATS, open_reader
from dcp_core.cli.storage_options import add_storage_options, parsed_storage_options
from dcp_core.cli.tables import shown_bytes, write_line, write_table
from dcp_core.convert.huggingface_files import INDEX_NAME, refuse_beside_weights
from dcp_core.convert.shard_sizes import MAX_SHARD_SIZE
from dcp_core.convert.to_dcp import convert_to_dcp, stored_nbytes
from dcp_core.convert.to_huggingface import HuggingFaceConversion
from dcp_core.errors import ArgumentError, DcpError
from dcp_core.file_names import METADATA_NAME
from dcp_core.inspection.detection import checkpoint_format
from dcp_core.recipes.places import options_for, storage_at
from dcp_core.recipes.stored_source import StoredSource
from dcp_core.recipes.torch_package import torch_package_module
from dcp_core.storage.urls import redacted

_SHOWN_SKIPPED = 20
_Options = Mapping[str, Any] | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("src", metavar="SRC", help="the checkpoint: a directory or a file")
    parser.add_argument("dst", metavar="DST", help="the directory to write")
    parser.add_argument("--to", required=True, choices=("dcp", "hf"), help="dcp: any layout loads it; hf: safetensors")
    parser.add_argument(
        "--from", dest="source", choices=FORMATS, default=None, help="what SRC is; found out by looking if left out"
    )
    parser.add_argument("--dry-run", action="store_true", help="write nothing; list what would be written")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint or weights that are at DST")
    parser.add_argument(
        "--max-shard-size", default=MAX_SHARD_SIZE, metavar="SIZE", help=f"of a file, with --to hf ({MAX_SHARD_SIZE})"
    )
    parser.add_argument("--prefix", default="", help="convert only names under this, without it, with --to hf")
    parser.add_argument("--dtype", default=None, help="what floating-point tensors become, with --to hf")
    parser.add_argument(
        "--rename",
        nargs=2,
        action="append",
        default=[],
        metavar=("PATTERN", "REPLACEMENT"),
        help="rename tensors: a regular expression and what replaces its match; the first that matches counts. With "
        "--to hf, or from safetensors",
    )
    parser.add_argument("--not-durable", action="store_true", help="do not wait for the disk")
    add_storage_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert, or say what would be converted."""
    options = options_for(parsed_storage_options(arguments), arguments.src, arguments.dst)
    source = arguments.source or checkpoint_format(arguments.src, options[0])
    if arguments.to == "hf":
        return _to_huggingface(arguments, source, *options)
    return _to_dcp(arguments, source, *options)


def _to_huggingface(arguments: argparse.Namespace, source: str, of_src: _Options, of_dst: _Options) -> int:
    renames = dict(arguments.rename) or None
    conversion = HuggingFaceConversion(
        open_reader(arguments.src, source, of_src),
        max_shard_size=arguments.max_shard_size,
        prefix=arguments.prefix,
        dtype=arguments.dtype,
        key_map=renames,
    )
    files = conversion.file_tensors
    if arguments.dry_run:
        rows = [(name, str(len(inside)), shown_bytes(sum(t.nbytes for t in inside))) for name, inside in files]
        write_table(("would write", "tensors", "bytes"), rows + [(INDEX_NAME, "", "")] * (len(files) > 1))
        _write_skipped([(entry.name, entry.reason) for entry in conversion.plan.skipped])
        _write_objection(
            lambda: conversion.check_target(arguments.dst, overwrite=arguments.overwrite, storage_options=of_dst)
        )
        return 0
    report = conversion.run(
        arguments.dst, overwrite=arguments.overwrite, durable=not arguments.not_durable, storage_options=of_dst
    )
    write_line(f"wrote {report.tensors} tensors, {shown_bytes(report.nbytes)}, to {redacted(arguments.dst)}")
    _write_skipped([(entry.name, entry.reason) for entry in report.skipped])
    return 0


def _to_dcp(arguments: argparse.Namespace, source: str, of_src: _Options, of_dst: _Options) -> int:
    if arguments.prefix or arguments.dtype or arguments.max_shard_size != MAX_SHARD_SIZE:
        raise ArgumentError("--prefix, --dtype and --max-shard-size belong to --to hf")
    if arguments.rename and source != "huggingface":
        raise ArgumentError("--rename with --to dcp is for safetensors; other checkpoints keep their names")
    if not arguments.dry_run:
        _check_target(arguments.dst, of_dst, overwrite=arguments.overwrite)
    durable = not arguments.not_durable
    if source == "torch":
        if arguments.dry_run:
            raise ArgumentError("--dry-run cannot look into files of torch.save without reading them")
        module = torch_package_module("offline_transform")
        module.convert_full_checkpoint_to_dcp(
            arguments.src, arguments.dst, "torch", durable=durable, storage_options=of_dst
        )
        write_line(f"wrote {redacted(arguments.dst)}")
        return 0
    reader = open_reader(arguments.src, source, of_src, dict(arguments.rename) or None)
    if arguments.dry_run:
        opened = StoredSource(reader)
        tensors = opened.tensors()
        opened.check(tensors)
        rows = [
            (tensor.name, tensor.dtype.name, str(list(tensor.shape)), shown_bytes(stored_nbytes(tensor)))
            for tensor in tensors
        ]
        rows += [(entry.name, "value", "", "") for entry in opened.objects()]
        write_table(("would write", "type", "shape", "bytes"), rows)
        write_line(f"{len(tensors)} tensors, {shown_bytes(sum(map(stored_nbytes, tensors)))}")
        _write_objection(lambda: _check_target(arguments.dst, of_dst, overwrite=arguments.overwrite))
        return 0
    metadata = convert_to_dcp(reader, arguments.dst, durable=durable, storage_options=of_dst)
    write_line(f"wrote {len(metadata.state_dict_metadata)} tensors and values to {redacted(arguments.dst)}")
    return 0


def _check_target(dst: str, options: _Options, *, overwrite: bool) -> None:
    storage = storage_at(dst, options)
    if not overwrite and storage.exists(METADATA_NAME):
        raise ArgumentError(f"there is a checkpoint at {redacted(dst)!r}; choose another place, or pass --overwrite")
    refuse_beside_weights(storage)


def _write_objection(check: Callable[[], object]) -> None:
    """After a dry run, say what the conversion would refuse."""
    try:
        check()
    except DcpError as error:
        write_line(f"as it is, this would be refused: {error}")


def _write_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    if not skipped:
        return
    write_line(f"not converted: {len(skipped)}")
    write_table(("name", "why"), skipped[:_SHOWN_SKIPPED])
    if len(skipped) > _SHOWN_SKIPPED:
        write_line(f"and {len(skipped) - _SHOWN_SKIPPED} more")
