"""`verify`: whole checkpoints are whole, and of damaged ones everything that is wrong is listed, by name and place."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings

from dcp_core import api
from dcp_core.box import Box, slices
from dcp_core.errors import ArgumentError, CorruptError, IncompleteError, NewerVersionError, NotFoundError
from dcp_core.formats.bytes_file import PREAMBLE_NBYTES
from dcp_core.formats.checksums import BLOCK_BYTES
from dcp_core.formats.metadata_blocks import encode_files
from dcp_core.formats.metadata_file import open_bytes
from dcp_core.inspection import description
from dcp_core.inspection import verify as verification
from dcp_core.inspection.report import VerifyReport
from dcp_core.metadata import EVERY_RANK
from dcp_core.state_path import PerRank
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core import hostile
from tests.core.damage import (
    Damage,
    bytes_file_positions,
    copy_linked,
    data_block_positions,
    flipped,
    metadata_positions,
    no_files,
    other_lengths,
    rewrite,
    safetensors_header_positions,
)
from tests.core.metadata_samples import Checkpoint, Tensor, checkpoints, grid_cells, replaced
from tests.core.peak_memory import need_peak_counter, peak_rise

WORLD = 2
DATA, OWN_DATA = "_rank0_.safetensors", "_rank1_.safetensors"
OBJECTS, OWN_OBJECTS = "_rank0_.bytes", "_rank1_.bytes"
FILES = (DATA, OWN_DATA, OBJECTS, OWN_OBJECTS)
_LARGE = (1200, 512)


class Tripwire:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch it-ran",)


def state_of(rank: int, tag: int) -> dict[str, Any]:
    large = np.arange(np.prod(_LARGE), dtype=np.float64).reshape(_LARGE) * tag
    return {
        "large": ShardedArray.cut(large, even_boxes(_LARGE, WORLD, rank), "float64"),
        "bits": ShardedArray.cut(np.arange(11, dtype=np.uint8), even_boxes((11,), WORLD, rank), "uint8"),
        "b": np.arange(5.0) * tag,
        "scalar": np.array(tag, np.float32),
        "step": tag,
        "seed": PerRank([rank, tag]),
        "notes": {"a": [1, 2.5, "x"], "b": None},
    }


def save_one(context: RankContext, directory: Path, tag: int, use_collectives: bool = True) -> None:
    api.save(
        state_of(context.rank, tag),
        checkpoint_id=directory,
        adapter=NumpyRankAdapter(),
        use_collectives=use_collectives,
        durable=False,
    )


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verify") / "template"
    run_ranks(save_one, WORLD, directory, 1)
    return directory


@pytest.fixture(scope="module")
def other_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another save of the same structure: its files have the same names and sizes."""
    directory = tmp_path_factory.mktemp("verify") / "other"
    run_ranks(save_one, WORLD, directory, 2)
    return directory


@pytest.fixture
def place(tmp_path: Path, template: Path) -> Path:
    copy_linked(template, tmp_path / "copy")
    return tmp_path / "copy"


def damaged(template: Path, root: Path, damages: Sequence[Damage]) -> Iterator[tuple[Damage, Path]]:
    for number, damage in enumerate(damages):
        directory = root / f"{number} {re.sub('[^a-z0-9]+', '-', damage.name)}"
        copy_linked(template, directory)
        damage.change(directory)
        yield damage, directory
        shutil.rmtree(directory)


def kinds(report: VerifyReport) -> list[tuple[str, str]]:
    return [(problem.kind, problem.file) for problem in report.problems]


def header_of(content: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header.pop("__metadata__")
    return header


# --- whole checkpoints -------------------------------------------------------------------------------


def test_a_whole_checkpoint_is_whole_and_every_byte_of_its_files_was_compared(template: Path) -> None:
    report = api.verify(template)
    assert report.is_whole
    assert (report.problems, report.strays, report.notes) == ((), (), ())
    sizes = [(template / name).stat().st_size for name in FILES]
    assert (report.files, report.nbytes, report.checked_nbytes) == (4, sum(sizes), sum(sizes))
    assert (report.format, report.tensors, report.chunks, report.objects) == ("dcp", 4, 6, 5)
    report.raise_problems()


def test_a_quick_look_reads_no_data(place: Path) -> None:
    content = (place / DATA).read_bytes()
    for position in data_block_positions(content):
        flipped(DATA, position)(place)
    report = api.verify(place, quick=True)
    assert (report.is_whole, report.checked_nbytes, report.is_quick) == (True, 0, True)
    assert not api.verify(place).is_whole


def test_a_checkpoint_without_any_tensor_or_value_is_whole(tmp_path: Path) -> None:
    api.save({}, checkpoint_id=tmp_path / "c")
    assert api.verify(tmp_path / "c").is_whole


def test_what_was_saved_over_another_checkpoint_is_whole_and_nothing_is_left_over(tmp_path: Path) -> None:
    run_ranks(save_one, WORLD, tmp_path / "c", 1)
    run_ranks(save_one, WORLD, tmp_path / "c", 2)
    report = api.verify(tmp_path / "c")
    assert (report.is_whole, report.strays) == (True, ())


def test_what_ranks_saved_alone_is_verified_without_a_claim_about_coverage(tmp_path: Path) -> None:
    run_ranks(save_one, WORLD, tmp_path / "c", 1, False)
    report = api.verify(tmp_path / "c")
    assert (report.is_whole, len(report.save_ids), report.strays) == (True, 2, ())
    assert "2 of 2 ranks saved alone" in report.notes[-1]
    (own,) = (tmp_path / "c").glob("_rank1_*.safetensors")
    flipped(own.name, -1)(tmp_path / "c")
    assert kinds(api.verify(tmp_path / "c")) == [("damaged data", own.name)]


def test_progress_is_told_up_to_the_end(template: Path) -> None:
    told: list[tuple[int, int]] = []
    report = api.verify(template, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (report.nbytes, report.nbytes)


def test_memory_stays_small_however_large_a_tensor_is(tmp_path: Path) -> None:
    need_peak_counter()
    api.save({"x": np.zeros(96 << 20, np.uint8)}, checkpoint_id=tmp_path / "c", durable=False)
    assert peak_rise(lambda: api.verify(tmp_path / "c")) < 40


# --- damage ------------------------------------------------------------------------------------------


def test_a_flipped_byte_of_data_is_found_with_its_file_block_and_key(template: Path, tmp_path: Path) -> None:
    for file in (DATA, OWN_DATA):
        content = (template / file).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for position in data_block_positions(content):
            copy_linked(template, tmp_path / "copy")
            flipped(file, position)(tmp_path / "copy")
            (problem,) = api.verify(tmp_path / "copy").problems
            shutil.rmtree(tmp_path / "copy")
            (key,) = (
                key for key, entry in header_of(content).items()
                if entry["data_offsets"][0] <= position - start < entry["data_offsets"][1]
            )  # fmt: skip
            assert (problem.kind, problem.file, problem.keys) == ("damaged data", file, (key.split("@")[0],))
            assert problem.byte_offset is not None and problem.nbytes is not None
            assert problem.byte_offset <= position < problem.byte_offset + problem.nbytes
            assert problem.nbytes <= BLOCK_BYTES


def test_a_flipped_byte_anywhere_else_is_found_with_its_file(template: Path, tmp_path: Path) -> None:
    places = {DATA: safetensors_header_positions, OBJECTS: bytes_file_positions, OWN_OBJECTS: bytes_file_positions}
    places[".metadata"] = metadata_positions
    for file, positions in places.items():
        for position in positions((template / file).read_bytes()):
            copy_linked(template, tmp_path / "copy")
            flipped(file, position, 1 << position % 7)(tmp_path / "copy")
            report = api.verify(tmp_path / "copy")
            shutil.rmtree(tmp_path / "copy")
            assert {problem.file for problem in report.problems} == {file}, (file, position, report)


def test_every_single_flipped_byte_of_the_description_is_found(place: Path) -> None:
    content = (place / ".metadata").read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        rewrite(place / ".metadata", bytes(changed))
        report = api.verify(place, quick=True)
        assert {problem.kind for problem in report.problems} <= {"damaged description", "newer version"}, position
        assert not report.is_whole, position


def test_files_of_another_length_and_what_is_no_file_are_found(template: Path, tmp_path: Path) -> None:
    damages: list[Damage] = []
    for file in FILES:
        damages += other_lengths(file, (template / file).stat().st_size, ()) + no_files(file, ())
    for quick in (False, True):
        for damage, directory in damaged(template, tmp_path, damages):
            report = api.verify(directory, quick=quick)
            assert [problem.file for problem in report.problems] == [damage.text], (damage.name, report)
            assert report.problems[0].kind != "damaged data"


def test_a_short_file_names_the_keys_behind_its_end(place: Path) -> None:
    content = (place / DATA).read_bytes()
    rewrite(place / DATA, content[:-1])
    (problem,) = api.verify(place).problems
    last = max(header_of(content).items(), key=lambda entry: entry[1]["data_offsets"][1])[0]
    assert (problem.kind, problem.keys) == ("wrong size", (last.split("@")[0],))
    assert (problem.expected, problem.found) == (f"{len(content)} bytes", f"{len(content) - 1} bytes")


def test_a_missing_file_names_all_its_keys(place: Path) -> None:
    (place / OWN_OBJECTS).unlink()
    (place / OWN_DATA).unlink()
    problems = {problem.file: problem for problem in api.verify(place).problems}
    assert problems[OWN_DATA].keys == ("bits", "large")
    assert problems[OWN_OBJECTS].keys == ("seed",)
    assert {problem.kind for problem in problems.values()} == {"missing file"}


@pytest.mark.parametrize("quick", [False, True])
def test_files_of_another_save_are_found_even_by_a_quick_look(place: Path, other_template: Path, quick: bool) -> None:
    rewrite(place / DATA, (other_template / DATA).read_bytes())
    assert kinds(api.verify(place, quick=quick)) == [("another save's file", DATA)]


def test_swapped_files_are_found(place: Path) -> None:
    sizes = {(place / name).stat().st_size for name in (DATA, OWN_DATA)}
    ours, theirs = (place / DATA).read_bytes(), (place / OWN_DATA).read_bytes()
    rewrite(place / DATA, theirs)
    rewrite(place / OWN_DATA, ours)
    report = api.verify(place)
    expected = "wrong size" if len(sizes) == 2 else "damaged header"
    assert kinds(report) == [(expected, DATA), (expected, OWN_DATA)]


def test_swapped_files_of_one_size_are_found(tmp_path: Path) -> None:
    run_ranks(_save_even, WORLD, tmp_path / "c")
    first, second = (tmp_path / "c" / name for name in (DATA, OWN_DATA))
    content = first.read_bytes()
    assert len(content) == second.stat().st_size
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert kinds(api.verify(tmp_path / "c")) == [("damaged header", DATA), ("damaged header", OWN_DATA)]


def _save_even(context: RankContext, directory: Path) -> None:
    whole = np.arange(64.0).reshape(8, 8)
    state = {"x": ShardedArray.cut(whole, even_boxes((8, 8), WORLD, context.rank), "float64")}
    api.save(state, checkpoint_id=directory, adapter=NumpyRankAdapter(), durable=False)


def test_all_that_is_wrong_is_listed_at_once(place: Path) -> None:
    content = (place / DATA).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    flipped(DATA, start - 1)(place)  # a blank of its header
    flipped(DATA, start + 3)(place)
    flipped(DATA, start + 2 * BLOCK_BYTES + 3)(place)
    rewrite(place / OWN_DATA, (place / OWN_DATA).read_bytes() + b"more")
    flipped(OBJECTS, -1)(place)
    (place / OWN_OBJECTS).unlink()
    found = [(problem.kind, problem.file) for problem in api.verify(place).problems]
    assert sorted(found) == sorted(
        [
            ("damaged header", DATA),
            ("damaged data", DATA),
            ("damaged data", DATA),
            ("wrong size", OWN_DATA),
            ("damaged object", OBJECTS),
            ("missing file", OWN_OBJECTS),
        ]
    )


def test_neighbouring_damaged_blocks_of_a_tensor_are_one_problem(place: Path) -> None:
    content = (place / DATA).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little") + header_of(content)["large"]["data_offsets"][0]
    for block in range(2):
        flipped(DATA, start + block * BLOCK_BYTES + 1000)(place)
    (problem,) = api.verify(place).problems
    assert (problem.byte_offset, problem.nbytes, problem.keys) == (start, 2 * BLOCK_BYTES, ("large",))


def test_where_a_part_of_the_description_is_damaged_the_files_are_still_checked(place: Path) -> None:
    blob = (place / ".metadata").read_bytes()
    flipped(".metadata", metadata_positions(blob)[-1])(place)  # in the last block
    flipped(DATA, -1)(place)
    report = api.verify(place)
    files = {problem.file for problem in report.problems}
    assert files <= {".metadata", DATA} and ".metadata" in files
    assert all(problem.byte_offset is not None for problem in report.problems)


def test_a_damaged_object_is_named_with_its_bytes(place: Path) -> None:
    content = (place / OBJECTS).read_bytes()
    flipped(OBJECTS, -1)(place)
    (problem,) = api.verify(place).problems
    assert problem.kind == "damaged object"
    assert len(problem.keys) == 1
    assert problem.byte_offset is not None and problem.nbytes is not None
    assert problem.byte_offset + problem.nbytes == len(content)


def test_a_newer_version_says_to_upgrade(place: Path) -> None:
    rewrite(place / ".metadata", replaced((place / ".metadata").read_bytes(), {}, {"version": "2"}))
    report = api.verify(place)
    assert kinds(report) == [("newer version", ".metadata")]
    with pytest.raises(NewerVersionError, match="as new as"):
        report.raise_problems()


def test_problems_become_an_error_by_the_first_of_them(place: Path) -> None:
    flipped(DATA, -1)(place)
    with pytest.raises(CorruptError, match=rf"(?s)not whole.*{DATA}.*restore"):
        api.verify(place).raise_problems()
    (place / DATA).unlink()
    with pytest.raises(IncompleteError, match="missing"):
        api.verify(place).raise_problems()


def test_only_so_many_problems_are_kept_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    api.save({f"k{n}": np.full(3, n + 1) for n in range(20)}, checkpoint_id=tmp_path / "c", durable=False)
    (data,) = (tmp_path / "c").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[8 + int.from_bytes(content[:8], "little") :] = bytes(20 * 24)
    data.write_bytes(content)
    assert len(api.verify(tmp_path / "c").problems) == 20
    monkeypatch.setattr(verification, "MAX_PROBLEMS", 7)
    report = api.verify(tmp_path / "c")
    assert (len(report.problems), report.more_problems) == (7, 13)


# --- what is no checkpoint ---------------------------------------------------------------------------


def test_nothing_and_what_no_save_left_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README").write_text("hello")
    for name in ("nowhere", "empty", "other"):
        with pytest.raises(NotFoundError, match=name):
            api.verify(tmp_path / name)


@pytest.mark.parametrize("wrong", [None, 3, "", "a\0b", "nix://somewhere/else"])
def test_what_is_no_path_is_a_bad_argument(wrong: Any) -> None:
    with pytest.raises(ArgumentError):
        api.verify(wrong)


def test_a_save_that_was_not_completed_is_a_problem_that_lists_what_is_there(place: Path) -> None:
    (place / ".metadata").unlink()
    (place / f".intent-{'a' * 32}").write_text("{}")
    report = api.verify(place)
    assert (report.format, kinds(report)) == ("none", [("no checkpoint", "")])
    assert report.strays is not None
    assert {stray.name for stray in report.strays} == {*FILES, f".intent-{'a' * 32}"}
    with pytest.raises(IncompleteError, match="no save has been completed"):
        report.raise_problems()


def test_what_torch_wrote_is_not_opened(place: Path) -> None:
    marker = place / "it ran"
    for damage in hostile.pickles(marker):
        damage.change(place)
        with contextlib.suppress(ArgumentError):  # of what starts as a pickle of torch DCP does
            assert not api.verify(place).is_whole
    assert not marker.exists()


# --- strays ------------------------------------------------------------------------------------------


def test_left_overs_and_foreign_names_are_listed_and_no_problem(place: Path, other_template: Path) -> None:
    other = "b" * 32
    names = {
        "_rank7_.safetensors": "data file",
        f"_rank0_.{other}.safetensors": "data file",
        f"_rank1_1_.{other}.bytes": "data file",
        "3.metadata": "description",
        f".metadata.{other}.tmp": "description",
        f".intent-{other}": "intent record",
        f".intent-{other}.tmp": "intent record",
        "README.txt": "other",
        "_rank01_.bytes": "other",
    }
    for name in names:
        (place / name).write_bytes(b"junk")
    (place / f".mailbox-{other}").mkdir()
    (place / ".mailbox-join").mkdir()
    (place / "folder").mkdir()
    os.mkfifo(place / "pipe")
    names |= {f".mailbox-{other}": "mailbox", ".mailbox-join": "mailbox", "folder": "other", "pipe": "other"}
    report = api.verify(place)
    assert report.is_whole
    assert report.strays is not None
    assert {stray.name: stray.kind for stray in report.strays} == names
    assert {stray.nbytes for stray in report.strays} == {4, None}
    assert all(other in stray.text for stray in report.strays if other in stray.name and "tmp" not in stray.name)


def test_what_is_elsewhere_behind_a_link_is_noted(place: Path, tmp_path: Path) -> None:
    (place / DATA).rename(tmp_path / "blob")
    (place / DATA).symlink_to(tmp_path / "blob")
    report = api.verify(place)
    assert report.is_whole
    assert str(tmp_path / "blob") in report.notes[0]
    (tmp_path / "latest").symlink_to(place)
    assert api.verify(tmp_path / "latest").is_whole
    (tmp_path / "blob").unlink()
    assert kinds(api.verify(place)) == [("missing file", DATA)]


def test_a_link_inside_the_directory_is_not_worth_a_note(place: Path) -> None:
    (place / DATA).rename(place / "blob")
    (place / DATA).symlink_to("blob")
    assert api.verify(place).notes == ()


# --- strangers ---------------------------------------------------------------------------------------


def test_pickled_objects_are_named_and_never_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    api.save({"odd": [1, Tripwire()], "fine": 1}, checkpoint_id=tmp_path / "c", durable=False)
    api.allow_pickled()
    report = api.verify(tmp_path / "c")
    assert report.is_whole
    assert "system" in report.notes[0]
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    "make", [hostile.headers, hostile.files, hostile.chunks, hostile.holes, hostile.objects, hostile.tables]
)
def test_lies_in_a_description_are_problems_and_need_little_memory(
    template: Path, tmp_path: Path, make: Callable[[], list[Damage]]
) -> None:
    found = run_ranks(_verify_in_little_memory, 1, template, tmp_path, [damage.name for damage in make()], make)
    assert all(found[0]), found


def _verify_in_little_memory(
    context: RankContext, template: Path, root: Path, names: list[str], make: Callable[[], list[Damage]]
) -> list[str]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answers: list[str] = []
    for _, directory in damaged(template, root, make()):
        for quick in (True, False):
            report = api.verify(directory, quick=quick)
        answers.append("" if report.is_whole else report.problems[0].kind)
    return answers


def test_an_object_with_the_right_checksum_that_is_no_value_is_a_problem(tmp_path: Path) -> None:
    api.save({"x": b"A" * 40}, checkpoint_id=tmp_path / "c", durable=False)
    (objects,) = (tmp_path / "c").glob("*.bytes")
    content = bytearray(objects.read_bytes())
    content[-42] = ord("?")  # the tag
    _reseal(tmp_path / "c", objects, bytes(content))
    (problem,) = api.verify(tmp_path / "c").problems
    assert (problem.kind, problem.keys) == ("damaged object", ("x",))
    assert "no value" in problem.text


def _reseal(directory: Path, file: Path, content: bytes) -> None:
    """Make all digests right again, as a stranger would."""
    index = content[PREAMBLE_NBYTES : PREAMBLE_NBYTES + 8] + xxhash.xxh3_64_intdigest(
        content[PREAMBLE_NBYTES + 16 :]
    ).to_bytes(8, "little")
    file.write_bytes(content[:PREAMBLE_NBYTES] + index + content[PREAMBLE_NBYTES + 16 :])
    blob = (directory / ".metadata").read_bytes()
    files = open_bytes(blob).files
    digest = xxhash.xxh3_128_intdigest(index)
    words = np.array([[digest & (1 << 64) - 1, digest >> 64]], np.uint64)
    block = encode_files(dataclasses.replace(files, digest=words))
    (directory / ".metadata").write_bytes(replaced(blob, {"files": block}))


# --- coverage ----------------------------------------------------------------------------------------


def described(directory: Path, made: Checkpoint) -> VerifyReport:
    directory.mkdir(exist_ok=True)
    made.save = type(made.save)(made.save.save_id, made.save.suffix, None)
    (directory / ".metadata").write_bytes(made.blob())
    return api.verify(directory, quick=True)


def coverage_of(tensor: Tensor) -> set[str]:
    """By counting elements: what is wrong with the boxes of a tensor, each counted once."""
    held: npt.NDArray[np.int64] = np.zeros(tensor.shape, np.int64)
    for offsets, sizes in set(tensor.boxes):
        where: Any = (*slices(Box(offsets, sizes)), ...)
        held[where] += 1
    return {kind for kind, found in (("hole", (held == 0).any()), ("overlap", (held > 1).any())) if found}


@given(made=checkpoints())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_holes_and_overlaps_are_those_that_counting_elements_finds(made: Checkpoint, tmp_path: Path) -> None:
    report = described(tmp_path / "c", made)
    expected = {tensor.name for tensor in made.tensors if coverage_of(tensor)}
    found = [problem for problem in report.problems if problem.kind in ("hole", "overlap")]
    assert {key for problem in found for key in problem.keys} == expected
    by_name: dict[str, set[str]] = {}
    for tensor in made.tensors:
        by_name.setdefault(tensor.name, set()).update(coverage_of(tensor))
    assert all(problem.kind in by_name[problem.keys[0]] for problem in found)
    assert {problem.kind for problem in report.problems} <= {"hole", "overlap", "missing file"}


def test_a_hole_says_which_elements_and_a_copy_is_no_overlap(tmp_path: Path) -> None:
    cells = grid_cells((4, 6), [[2], [3]], copies=2)
    tensors = [
        Tensor("copies", (4, 6), cells, files=[0, 1] * 4),
        Tensor("holed", (4, 6), [cell for cell in cells[::2] if cell[0] != (2, 0)], files=[0, 1, 0], rank=EVERY_RANK),
    ]
    made = Checkpoint(tensors, [], 2)
    made.place()
    report = described(tmp_path / "c", made)
    (problem,) = (each for each in report.problems if each.kind != "missing file")
    assert (problem.kind, problem.keys, problem.box) == ("hole", ("holed",), Box((2, 0), (2, 3)))


# --- saves meanwhile ---------------------------------------------------------------------------------


def test_a_checkpoint_that_is_replaced_meanwhile_is_looked_at_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    read = description.read_description
    saved: list[str] = []

    def read_and_save_over(*args: Any) -> Any:
        found = read(*args)
        if not saved:
            saved.append(api.save({"y": np.ones(3)}, checkpoint_id=place, durable=False).save_id)
        return found

    monkeypatch.setattr(verification, "read_description", read_and_save_over)
    report = api.verify(place)
    assert (report.is_whole, report.save_ids, report.strays) == (True, tuple(saved), ())


def test_a_storage_that_refuses_is_a_problem_and_the_rest_is_still_checked(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FileOperations.preadv

    def failing(self: FileOperations, descriptor: int, buffers: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(OWN_DATA):
            raise OSError(5, "Input/output error")
        return whole(self, descriptor, buffers, offset)

    monkeypatch.setattr(FileOperations, "preadv", failing)
    flipped(DATA, -1)(place)
    assert kinds(api.verify(place)) == [("damaged data", DATA), ("unreadable", OWN_DATA)]
