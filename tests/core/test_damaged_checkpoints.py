"""Loads of damaged and of hostile checkpoints, on real ranks: one clear error, never wrong values with success."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core.api import load
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core import hostile
from tests.core.damage import (
    Damage,
    bytes_file_positions,
    copy_linked,
    data_block_positions,
    edited,
    flips,
    metadata_positions,
    no_files,
    other_lengths,
    rewrite,
    safetensors_header_positions,
)
from tests.core.fault_jobs import (
    SOON_SECONDS,
    Outcome,
    Seat,
    memory_directory,
    outcome_of,
    poison_of,
    same,
    state_of,
    whole_tag,
)

pytestmark = pytest.mark.faults

WORLD = 2
DATA, OWN_DATA = "_rank0_.safetensors", "_rank1_.safetensors"
OBJECTS, OWN_OBJECTS = "_rank0_.bytes", "_rank1_.bytes"
_LARGE_SHAPE = (1200, 1024)
_ROOM_BYTES = 192 << 20
_NOT_SOUND = ("CorruptError", "NewerVersionError")


def _large(value: float, rank: int, dim: int) -> ShardedArray:
    """A matrix of several checksum blocks a rank."""
    whole = np.arange(np.prod(_LARGE_SHAPE), dtype=np.float32).reshape(_LARGE_SHAPE) * np.float32(value)
    return ShardedArray.cut(whole, even_boxes(_LARGE_SHAPE, WORLD, rank, dim), "float32")


def _saved(rank: int, tag: int, dim: int = 0) -> dict[str, Any]:
    return state_of(rank, WORLD, tag, dim) | {"large": _large(float(tag), rank, dim)}


def _poisoned(rank: int, dim: int) -> dict[str, Any]:
    return poison_of(rank, WORLD, dim) | {"large": _large(float("nan"), rank, dim)}


def _save(context: RankContext, directory: Path, tag: int) -> None:
    Seat.of(context).save(_saved(context.rank, tag), checkpoint_id=directory)


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture(scope="module")
def template(root: Path) -> Path:
    run_ranks(_save, WORLD, root / "template", 1)
    return root / "template"


@pytest.fixture(scope="module")
def other_template(root: Path) -> Path:
    """Another save of the same structure: its files have the same names and sizes."""
    run_ranks(_save, WORLD, root / "other", 2)
    return root / "other"


@pytest.fixture
def place(root: Path) -> Iterator[Path]:
    place = root / "place"
    place.mkdir()
    yield place
    shutil.rmtree(place)


@dataclass(frozen=True)
class Loaded:
    """How a load ended on one rank, and what became of its target."""

    outcome: Outcome
    untouched: bool
    tag: int | None


def _load_each(context: RankContext, directories: Sequence[Path], dim: int, verify: Any) -> list[Loaded]:
    """Load from each directory into a poisoned target, with little memory to spare."""
    seat = Seat.of(context)
    _limit_memory(_ROOM_BYTES)
    found = []
    for directory in directories:
        target = _poisoned(seat.rank, dim)
        outcome = outcome_of(seat.load, target, checkpoint_id=directory, verify=verify)
        untouched = same(target, _poisoned(seat.rank, dim))
        found.append(Loaded(outcome, untouched, None if outcome.kind else _tag_of(target, seat.rank, dim)))
    return found


def _tag_of(target: dict[str, Any], rank: int, dim: int) -> int:
    large = target.pop("large")
    tag = whole_tag(target, rank, WORLD, dim)
    assert same(large, _large(float(tag), rank, dim))
    return tag


def _limit_memory(room_bytes: int) -> None:
    """Let this process allocate so much more, and fail at what is above."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + room_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _damaged(template: Path, place: Path, damages: Sequence[Damage]) -> list[Path]:
    directories = [
        place / f"{number} {re.sub('[^a-z0-9]+', '-', damage.name)}" for number, damage in enumerate(damages)
    ]
    for damage, directory in zip(damages, directories, strict=True):
        copy_linked(template, directory)
        damage.change(directory)
    return directories


def _check_refused(template: Path, place: Path, damages: Sequence[Damage], *, dim: int = 0, verify: Any = True) -> None:
    """All ranks refuse each damaged copy with the same error, which names what is damaged."""
    directories = _damaged(template, place, damages)
    found = run_ranks(_load_each, WORLD, directories, dim, verify, timeout_seconds=120)
    for damage, ranks in zip(damages, zip(*found, strict=True), strict=True):
        outcome = ranks[0].outcome
        assert {loaded.outcome.kind for loaded in ranks} <= set(damage.kinds), (damage.name, ranks)
        assert {(loaded.outcome.kind, loaded.outcome.message) for loaded in ranks} == {(outcome.kind, outcome.message)}
        assert damage.text in outcome.message, (damage.name, outcome)
        assert max(loaded.outcome.seconds for loaded in ranks) < SOON_SECONDS, (damage.name, ranks)
        if damage.touches:
            assert "undefined" in outcome.message, (damage.name, outcome)
        else:
            assert all(loaded.untouched for loaded in ranks), (damage.name, outcome)


def _check_loads(template: Path, place: Path, damages: Sequence[Damage], *, dim: int = 0, verify: Any = True) -> None:
    """Nothing that matters is damaged: the load succeeds, with the right values."""
    directories = _damaged(template, place, damages)
    found = run_ranks(_load_each, WORLD, directories, dim, verify, timeout_seconds=120)
    for damage, ranks in zip(damages, zip(*found, strict=True), strict=True):
        assert {loaded.tag for loaded in ranks} == {1}, (damage.name, ranks)


# --- single bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, "full"])
def test_a_flipped_byte_in_any_part_of_a_data_file_is_an_error_on_all_ranks(
    template: Path, place: Path, verify: Any
) -> None:
    damages = []
    for file in (DATA, OWN_DATA):
        content = (template / file).read_bytes()
        positions = [*safetensors_header_positions(content), *data_block_positions(content)]
        damages += flips(file, positions, ("CorruptError",), touches=True)
    _check_refused(template, place, damages, verify=verify)


def test_a_flipped_byte_in_a_block_that_is_read_in_parts_is_found_by_a_full_check(template: Path, place: Path) -> None:
    content = (template / DATA).read_bytes()
    damages = flips(DATA, data_block_positions(content), ("CorruptError",), touches=True)
    _check_refused(template, place, damages, dim=1, verify="full")


def test_a_flipped_byte_in_any_part_of_an_objects_file_is_an_error_before_any_target_is_touched(
    template: Path, place: Path
) -> None:
    damages = []
    for file in (OBJECTS, OWN_OBJECTS):
        damages += flips(file, bytes_file_positions((template / file).read_bytes()), _NOT_SOUND)
    _check_refused(template, place, damages)


def test_a_flipped_byte_in_any_part_of_the_metadata_is_an_error_before_any_target_is_touched(
    template: Path, place: Path
) -> None:
    positions = metadata_positions((template / ".metadata").read_bytes())
    _check_refused(template, place, flips(".metadata", positions, _NOT_SOUND))


def test_every_single_flipped_byte_of_the_metadata_is_found(template: Path, place: Path) -> None:
    content = (template / ".metadata").read_bytes()
    copy_linked(template, place / "copy")
    target = {"step": -1, "model": {"b": np.full(5, -1.0)}, "of": {"rank1": 0}}
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        rewrite(place / "copy" / ".metadata", bytes(changed))
        outcome = outcome_of(load, target, checkpoint_id=place / "copy", adapter=NumpyRankAdapter())
        assert outcome.kind in _NOT_SOUND, (position, outcome)
        assert ".metadata" in outcome.message, (position, outcome)
        assert same(target, {"step": -1, "model": {"b": np.full(5, -1.0)}, "of": {"rank1": 0}}), position


# --- whole files -------------------------------------------------------------------------------------


def test_files_of_another_length_or_missing_are_errors_before_any_target_is_touched(
    template: Path, place: Path
) -> None:
    damages = []
    for file in (DATA, OWN_DATA, OBJECTS, OWN_OBJECTS):
        nbytes = (template / file).stat().st_size
        damages += other_lengths(file, nbytes, ("IncompleteError",))
        damages += no_files(file, ("IncompleteError",))
    nbytes = (template / ".metadata").stat().st_size
    damages += other_lengths(".metadata", nbytes, ("CorruptError",))
    damages += no_files(".metadata", ("NotFoundError",))
    _check_refused(template, place, damages)


def test_files_of_another_save_or_of_another_rank_are_noticed(
    template: Path, other_template: Path, place: Path
) -> None:
    def taken(file: str, source: Path) -> Any:
        return edited(file, lambda content: source.read_bytes())

    def fitted(file: str, source: Path) -> Any:
        return edited(file, lambda content: (source.read_bytes() + content)[: len(content)])

    corrupt = ("CorruptError",)
    damages = [
        Damage(f"{file} of another save", taken(file, other_template / file), corrupt, file, file in (DATA, OWN_DATA))
        for file in (DATA, OWN_DATA, OBJECTS, OWN_OBJECTS)
    ]
    damages += [
        Damage(f"{file} of the other rank", fitted(file, template / source), corrupt, file, file in (DATA, OWN_DATA))
        for file, source in ((DATA, OWN_DATA), (OWN_DATA, DATA), (OWN_OBJECTS, OBJECTS))
    ]
    damages += [
        Damage("metadata of another save", taken(".metadata", other_template / ".metadata"), corrupt, "_rank", False),
        Damage("an objects file as data", taken(DATA, template / OBJECTS), ("IncompleteError",), DATA),
    ]
    _check_refused(template, place, damages)


def test_files_that_belong_to_nobody_do_not_matter(template: Path, other_template: Path, place: Path) -> None:
    def put(name: str, content: bytes) -> Any:
        return lambda directory: (directory / name).write_bytes(content)

    data = (other_template / DATA).read_bytes()
    damages = [
        Damage(name, put(name, content), (), "")
        for name, content in {
            "_rank7_.safetensors": data,
            "_rank0_1_.safetensors": data,
            f"_rank0_.{'a' * 32}.safetensors": data,
            "_rank2_.bytes": b"junk",
            "0.metadata": (other_template / ".metadata").read_bytes(),
            f".metadata.{'a' * 32}.tmp": b"junk",
            f".intent-{'a' * 32}": b"junk",
            "README.txt": b"hello",
        }.items()
    ]
    damages += [
        Damage("a directory", lambda directory: (directory / "_rank9_.safetensors").mkdir(), (), ""),
        Damage("a link for a file", _link_out, (), ""),
    ]
    _check_loads(template, place, damages)


def _link_out(directory: Path) -> None:
    """Put a file elsewhere and a link in its place, as a cache does."""
    (directory / "elsewhere").mkdir()
    (directory / DATA).rename(directory / "elsewhere" / "blob")
    (directory / DATA).symlink_to("elsewhere/blob")


# --- hostile metadata --------------------------------------------------------------------------------


def test_a_metadata_that_is_a_pickle_is_refused_and_runs_nothing(template: Path, place: Path) -> None:
    marker = place / "it ran"
    _check_refused(template, place, hostile.pickles(marker))
    assert not marker.exists()


@pytest.mark.parametrize(
    "make", [hostile.headers, hostile.files, hostile.chunks, hostile.holes, hostile.objects, hostile.tables]
)
def test_a_metadata_full_of_lies_is_refused_in_little_memory_before_any_target_is_touched(
    template: Path, place: Path, make: Callable[[], list[Damage]]
) -> None:
    _check_refused(template, place, make())


def _allocate_much(context: RankContext) -> str:
    _limit_memory(_ROOM_BYTES)
    return outcome_of(bytearray, 2 * _ROOM_BYTES).kind


def test_the_limit_on_memory_is_one() -> None:
    assert run_ranks(_allocate_much, 1) == ["MemoryError"]
