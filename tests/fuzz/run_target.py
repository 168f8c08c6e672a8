"""Drives targets with inputs that coverage guides: `python -m tests.fuzz.run_target SECONDS FOLDER [NAME ...]`.

Each target runs in a process of its own for so many seconds. What fails is left as a file in FOLDER/NAME, and the exit
code says so: `python -m tests.fuzz.run_target --one NAME FILE` runs it again. Needs atheris.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

RSS_MIB = 3072
SECONDS_PER_INPUT = 10
TORCH_MODULES = ("dcp_torch.torch_dcp_metadata", "dcp_torch.torch_dcp_entries", "dcp_torch.torch_values")
"""What targets import when they run, and what shall be instrumented."""


def _fuzz(name: str, seconds: int, folder: Path) -> None:
    """Run one target in this process; does not return."""
    atheris: Any = importlib.import_module("atheris")  # has no types, and is in no environment but that of its session
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with atheris.instrument_imports(
        include=["dcp_core.formats", "dcp_core.coordination", "dcp_core.storage", "dcp_torch"]
    ):
        from tests.fuzz.targets import TARGETS, run_one, seeds_of

        for module in TORCH_MODULES if TARGETS[name].needs_torch else ():
            importlib.import_module(module)
    corpus = folder / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds_of(name)):
        (corpus / f"seed-{number:04d}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds}", f"-timeout={SECONDS_PER_INPUT}", f"-rss_limit_mb={RSS_MIB}",
        "-malloc_limit_mb=1024", "-max_len=65536", f"-artifact_prefix={folder / name}/", "-print_final_stats=1",
        "-verbosity=0", str(corpus),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options], lambda raw: run_one(name, raw))
    atheris.Fuzz()


def main(arguments: list[str]) -> int:
    """Run targets one after the other; 1 when one failed."""
    if arguments[0] == "--one":
        from tests.fuzz.targets import run_one

        run_one(arguments[1], Path(arguments[2]).read_bytes())
        return 0
    seconds, folder = int(arguments[0]), Path(arguments[1])
    if arguments[2:3] == ["--here"]:
        _fuzz(arguments[3], seconds, folder)
    from tests.fuzz.targets import names

    failed = []
    for name in arguments[2:] or names(with_torch=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.fuzz.run_target", str(seconds), str(folder), "--here", name]
        ended = subprocess.run(command, check=False, timeout=seconds + 120).returncode
        left = sorted(path.name for path in (folder / name).iterdir())
        sys.stdout.write(f"{name}: {'failed' if ended or left else 'well'} {' '.join(left)}\n")
        sys.stdout.flush()
        failed += [name] if ended or left else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
