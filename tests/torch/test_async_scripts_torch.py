"""Scripts under torchrun that end right after `async_save`: the checkpoint lands, and nobody is held up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_torch
from tests.background_processes import background_processes, check_none_left, mark, wait_until
from tests.core.async_writers import Gate
from tests.core.fault_jobs import checkpoint_names, names_in
from tests.torch.gloo_ranks import free_port
from tests.torch.states import assert_same

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.slow,
    pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="starts jobs of its own"),
]

_TORCH_ABORTS = "terminate called without an active exception"
"""What torch says where a process with gloo threads ends at a bad moment, now and then: after the save, as Python has
waited for that by then."""

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    mark()
    yield tmp_path / "größe ✓ 1"
    check_none_left()


def launch(script: Path, *arguments: str) -> None:
    """Run a script on two ranks, its output captured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    done = subprocess.run(
        [*command, str(free_port()), str(script), *arguments],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 or _TORCH_ABORTS in done.stderr, done.stdout + done.stderr
    wait_until(lambda: not background_processes() or Gate(arguments[0]).directory.is_dir(), "the end of the saves")


_SCRIPT = """
import sys
import torch, torch.distributed as dist
import dcp_torch

dist.init_process_group("gloo")
rank = dist.get_rank()
state = {"t": torch.arange(5.0), "own": {rank: torch.full((4,), float(rank))}, "n": 7}
dcp_torch.async_save(state, checkpoint_id=sys.argv[1], use_gloo=sys.argv[2] == "gloo")
state["t"].zero_()
state["own"][rank].zero_()
if sys.argv[3] == "destroy":
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("how", "ending"), [("mailbox", "just ends"), ("gloo", "just ends"), ("mailbox", "destroy"), ("gloo", "destroy")]
)
def test_a_script_under_torchrun_ends_right_after_the_call_and_its_checkpoint_lands(
    directory: Path, how: str, ending: str
) -> None:
    script = directory.parent / "träin it.py"
    script.write_text(_SCRIPT)
    launch(script, str(directory), how, ending)
    assert names_in(directory) == checkpoint_names(directory)
    target: dict[str, Any] = {"t": torch.zeros(5), "own": {rank: torch.zeros(4) for rank in (0, 1)}, "n": 0}
    dcp_torch.load(target, checkpoint_id=directory)
    own = {rank: torch.full((4,), float(rank)) for rank in (0, 1)}
    assert_same(target, {"t": torch.arange(5.0), "own": own, "n": 7})


_GATED = (
    f"import sys; sys.path.append({str(_ROOT)!r})\n"
    + _SCRIPT.replace(
        "import dcp_torch\n", "import dcp_torch\nfrom tests.core.async_writers import GatedWriter\n"
    ).replace("async_save(state,", "async_save(state, storage_writer=GatedWriter(),")
    + "import os; os._exit(0)\n"
)


def test_a_launcher_whose_workers_do_not_wait_is_not_held_up_and_the_checkpoint_lands(directory: Path) -> None:
    script = directory.parent / "train.py"
    script.write_text(_GATED)
    gate = Gate(directory).close()
    launch(script, str(directory), "mailbox", "just ends")
    assert not (directory / ".metadata").exists()
    gate.open()
    wait_until(lambda: not background_processes(), "the end of the background processes")
    assert names_in(directory) == checkpoint_names(directory)
