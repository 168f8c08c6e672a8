"""All ways in which a checkpoint is looked at, loaded, saved over and converted, each as one call on a directory.

A way gives an exit code, or nothing; what it raises is the caller's to judge.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dcp_core.api import load, read, save
from dcp_core.cli import main as cli
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.coordination.exchange import Exchange, forget
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.formats.metadata_file import file_names
from dcp_core.manager.latest import latest_checkpoint
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.removal import clear_dead_save, remove_checkpoint

Way = Callable[[Path], int | None]

_PATIENCE_SECONDS = 0.3


def command(*arguments: str | Path) -> int:
    """Run `dcp`; what it says must not control a terminal."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main([str(argument) for argument in arguments])
    controls = {character for character in said.getvalue() if not character.isprintable()} - {"\n"}
    assert not controls, f"`dcp {arguments[0]}` writes {controls}"
    return code


def dcp_target() -> dict[str, Any]:
    """A state of the structure of the good checkpoint that holds what nobody saved."""
    return {
        "model": {"w": np.full((12, 10), np.nan, "f4"), "odd": np.full(7, 255, "u1"), "b": np.full(5, -1.0)},
        "step": -1,
        "notes": ["poison"],
        "of": {"rank0": (-1, -1), "rank1": (-1, -1)},
    }


def huggingface_target() -> dict[str, Any]:
    """The same for the Hugging Face directory."""
    return {"w": np.full((3, 4), np.nan, "f4"), "step": np.full((), -1, "i8"), "b": np.full(5, np.nan, "f2")}


def _save_over(directory: Path) -> None:
    """A save into the directory, whose checkpoint must then load."""
    save({"x": np.arange(3.0)}, checkpoint_id=directory, durable=False)
    target = {"x": np.zeros(3)}
    load(target, checkpoint_id=directory)
    assert target["x"].tolist() == [0.0, 1.0, 2.0]


def common_ways(good: Path) -> dict[str, Way]:
    """Those that take whatever lies in a directory."""
    return {
        "verify": lambda directory: command("verify", directory),
        "verify quick": lambda directory: command("verify", "--quick", directory),
        "inspect": lambda directory: command("inspect", directory),
        "inspect json": lambda directory: command("inspect", "--json", directory),
        "diff": lambda directory: command("diff", directory, good),
        "diff from": lambda directory: command("diff", good, directory),
        "convert to hf": lambda directory: command(
            "convert", directory, directory.parent / "written", "--to", "hf", "--not-durable"
        ),
        "convert to dcp": lambda directory: command(
            "convert", directory, directory.parent / "written", "--to", "dcp", "--not-durable"
        ),
        "convert onto": lambda directory: command(
            "convert", good, directory, "--to", "dcp", "--not-durable", "--overwrite"
        ),
        "export onto": lambda directory: command(
            "convert", good, directory, "--to", "hf", "--not-durable", "--overwrite"
        ),
        "latest": lambda directory: _quietly(latest_checkpoint(directory.parent)),
        "latest verified": lambda directory: _quietly(latest_checkpoint(directory.parent, verify=True)),
        "save over": _save_over,
        "clear": lambda directory: _quietly(clear_dead_save(LocalStorage(directory), files_of=file_names)),
        "remove": lambda directory: remove_checkpoint(LocalStorage(directory), files_of=file_names, durable=False),
    }


def _quietly(value: object) -> None:
    """Nobody asks what it is."""


def dcp_ways(good: Path) -> dict[str, Way]:
    """All for checkpoints of this library. Those that change the directory come last."""
    return {
        "read": lambda directory: _quietly(read(directory, "model.w")),
        "load quick": lambda directory: load(dcp_target(), checkpoint_id=directory, verify=False),
        "load full": lambda directory: load(dcp_target(), checkpoint_id=directory, verify="full"),
        "load one": lambda directory: load({"step": 0}, checkpoint_id=directory),
        "inspect a tensor": lambda directory: command("inspect", directory, "--tensor", "model.w"),
        **common_ways(good),
    }


def huggingface_ways(good: Path) -> dict[str, Way]:
    """All for Hugging Face directories."""
    return {
        "load one": lambda directory: load({"b": np.zeros(5, "f2")}, storage_reader=HuggingFaceReader(directory)),
        "inspect a tensor": lambda directory: command("inspect", directory, "--tensor", "w"),
        **common_ways(good),
    }


def huggingface_load(directory: Path, target: Mapping[str, Any]) -> None:
    """Load a Hugging Face directory."""
    load(target, storage_reader=HuggingFaceReader(directory))


def exchange(directory: Path, rank: int) -> bytes:
    """Meet the other of two ranks, whose message is there already."""
    forget("k", rank)
    channel = DirectoryChannel(directory, make=False)
    side = Exchange(rank, 2, channel, key="k", timeout_seconds=_PATIENCE_SECONDS)
    return side.run("meet", b"mine", compute=lambda payloads: payloads[1])
