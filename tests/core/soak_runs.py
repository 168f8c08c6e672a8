"""How long a soak runs, and what is looked at: a short one among the tests, and one of minutes; for any framework."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from dcp_core.testing.ranks import run_ranks
from tests.core.async_jobs import checkpoint_directory
from tests.core.fault_jobs import Seat
from tests.core.soak import Soak, Stage
from tests.core.soak_events import DECK, QUIET, chosen_count, chosen_seed, events
from tests.core.soak_vitals import MOST_GROWTH_NBYTES, Vitals, check_flat, table_of

WORLD = 4
_YOUNG_GROWTH_NBYTES = 32 << 20
"""A short soak is warm-up for the most part."""

_LOOK_EVERY = 40
Found = tuple[list[Vitals], dict[str, int]]
Job = Callable[..., Found]
"""What each rank does: a function of a module; it is given its context, a directory, a seed, a count, and its looks."""


@contextmanager
def soak_directory() -> Iterator[Path]:
    """Where the checkpoints of a soak go; its temporary files lie beside it."""
    with checkpoint_directory() as path:
        path.with_name("temporary").mkdir()
        yield path


def soak_on(
    seat: Seat, stage: Callable[[Seat, Path], Stage], root: Path, seed: int, count: int, looks: tuple[int, ...]
) -> Found:
    """Run a soak on one rank.

    Args:
        seat: Which rank.
        stage: Makes the states of its framework.
        root: The directory of checkpoints.
        seed: By which events come.
        count: How many.
        looks: After which of them the vitals are noted.
    """
    os.environ["TMPDIR"] = tempfile.tempdir = str(root.with_name("temporary"))
    soak = Soak(seat, stage(seat, root), root)
    soak.run(events(seed, count, seat.world), lambda number: number in looks)
    return soak.vitals, soak.counts


def check_deck(job: Job, root: Path, seed: int) -> None:
    """Every fault once: all values are right, and nothing is left behind."""
    count = len(QUIET) + len(DECK)
    _run(job, root, chosen_seed(seed), count, (count // 2, count), 120, _YOUNG_GROWTH_NBYTES)


def check_long(
    job: Job, root: Path, most: int, first_look: int, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hundreds of events: all values are right, and what the ranks use is flat.

    Args:
        job: What each rank does.
        root: The directory of checkpoints.
        most: How many events, unless the environment says otherwise.
        first_look: After which event the job counts as warm.
        request: Of the test.
        capsys: Of the test; what is found is shown as it comes.
    """
    if "soak" not in request.config.option.markexpr:
        pytest.skip("takes minutes; `nox -s soak` runs it")
    count = chosen_count(most)
    looks = (*range(first_look, count, _LOOK_EVERY), count)
    with capsys.disabled():
        _run(job, root, chosen_seed(Random().randrange(10**6)), count, looks, 3000, MOST_GROWTH_NBYTES)


def _run(
    job: Job, root: Path, seed: int, count: int, looks: tuple[int, ...], seconds: float, most_growth_nbytes: int
) -> None:
    sys.stdout.write(f"DCP_SOAK_SEED={seed} DCP_SOAK_EVENTS={count} does the same again\n")
    found = run_ranks(job, WORLD, root, seed, count, looks, timeout_seconds=seconds)
    sys.stdout.write("".join(f"{number:4} {name}\n" for name, number in sorted(found[0][1].items())))
    sys.stdout.write(table_of([vitals for vitals, _ in found]) + "\n")
    check_flat([vitals for vitals, _ in found], most_growth_nbytes)
