"""SIGKILL after every single operation that changes the disk; then a fresh process looks at what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core import api
from dcp_core.convert.to_huggingface import HuggingFaceConversion
from dcp_core.errors import DcpError, NotFoundError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import Seat, loaded_tag, matrix, memory_directory, state_of
from tests.core.kill_jobs import NEW, OLD, SHARD_NBYTES, check_order, sweep

pytestmark = pytest.mark.faults


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path.resolve()


def _save(directory: Path, tag: int) -> None:
    run_ranks(_save_on, 1, directory, tag)


def _save_on(context: RankContext, directory: Path, tag: int) -> None:
    seat = Seat.of(context)
    seat.save(state_of(seat.rank, seat.world, tag), checkpoint_id=directory)


def _tags(context: RankContext, directories: list[Path]) -> list[int | None]:
    """Load every element of each checkpoint: the number of its save; None where there is none."""
    tags: list[int | None] = []
    for directory in directories:
        try:
            tags.append(loaded_tag(Seat.of(context), directory))
        except NotFoundError:
            tags.append(None)
    return tags


@pytest.mark.parametrize("work", ["save", "save in the background"])
@pytest.mark.parametrize("over", [False, True], ids=["first", "over another"])
def test_a_save_that_is_killed_leaves_the_old_or_the_new_checkpoint(root: Path, work: str, over: bool) -> None:
    template = root / "template" if over else None
    if template:
        _save(template, OLD)
    found = sweep(root, work, template, root)
    [tags] = run_ranks(_tags, 1, [directory for directory, _ in found])
    check_order(tags, [done for _, done in found], OLD if over else None)


def test_an_offline_reshard_that_is_killed_leaves_the_old_or_the_new_checkpoint(root: Path) -> None:
    run_ranks(_save_on, 3, root / "source", NEW)
    _save(root / "template", OLD)
    found = sweep(root, "reshard", root / "template", root / "source")
    [tags] = run_ranks(_tags, 1, [directory for directory, _ in found])
    check_order(tags, [done for _, done in found], OLD)


def _exported(root: Path, tag: int) -> Path:
    _save(root / f"step_{tag}", tag)
    HuggingFaceConversion(FileSystemReader(root / f"step_{tag}"), max_shard_size=SHARD_NBYTES).run(root / f"hf_{tag}")
    return root / f"hf_{tag}"


def _targets() -> dict[str, npt.NDArray[np.generic]]:
    return {"model.w": np.zeros((12, 10), np.float32), "model.b": np.zeros(5)}


def _tag_of(load: Callable[[dict[str, npt.NDArray[np.generic]]], object]) -> int | None:
    targets = _targets()
    try:
        load(targets)
    except DcpError:
        assert all(not array.any() for array in targets.values())
        return None
    tag = int(targets["model.b"][1])
    assert targets["model.b"].tobytes() == (np.arange(5.0) * tag).tobytes()
    assert targets["model.w"].tobytes() == matrix(tag).tobytes()
    return tag


def test_an_import_that_is_killed_leaves_the_old_or_the_new_checkpoint(root: Path) -> None:
    source = _exported(root, NEW)
    _save(root / "template", OLD)
    found = sweep(root, "convert from Hugging Face", root / "template", source)
    tags = [_tag_of(lambda targets, place=place: api.load(_nested(targets), checkpoint_id=place)) for place, _ in found]  # type: ignore[misc]
    check_order(tags, [done for _, done in found], OLD)


def _nested(targets: dict[str, npt.NDArray[np.generic]]) -> dict[str, dict[str, npt.NDArray[np.generic]]]:
    return {"model": {key.removeprefix("model."): array for key, array in targets.items()}}
