"""Saves and loads on threads that are not the main one, several at once, and in children of a process that saved."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dcp_core.box import Box
from dcp_core.dtype import BY_NAME
from dcp_core.testing.numpy_ranks import even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import memory_directory
from tests.core.io_probes import FailingOperations, TornOperations, calls_of, reader_over, refusal, writer_over
from tests.core.io_samples import MEBIBYTE, Sample, Shards
from tests.core.rank_jobs import load, save

pytestmark = pytest.mark.timeout(120)

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "large": ("float32", (1100, 900)),
    "bytes": ("uint8", (MEBIBYTE + 1,)),
    **{f"small.{number}": ("int64", (4, 50 + number)) for number in range(100)},
}


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def state_of(tag: int) -> dict[str, Any]:
    rng, state = Random(tag), {}
    for number, (name, (dtype, shape)) in enumerate(SHAPES.items()):
        sample = Sample(name, BY_NAME[dtype], shape, 1000 * tag + number)
        state[name] = Shards.cut(sample, [Box.whole(shape)], rng).value
    return state | {"step": tag}


def load_and_check(tag: int, directory: Path, part: int = 0, parts: int = 1, **options: Any) -> None:
    """Load one part of every tensor into a target of one's own."""
    shards = []
    for number, (name, (dtype, shape)) in enumerate(SHAPES.items()):
        sample = Sample(name, BY_NAME[dtype], shape, 1000 * tag + number)
        boxes = even_boxes(shape, parts, part, len(shape) - 1)
        shards.append(Shards.cut(sample, boxes, Random(part), poisoned=True))
    state: dict[str, Any] = {part.sample.name: part.value for part in shards} | {"step": -1}
    load(state, str(directory), **options)
    assert state["step"] == tag
    for part_of in shards:
        part_of.check()


def all_at_once(actions: Sequence[Callable[[], None]]) -> list[BaseException | None]:
    """Run each action on a thread of its own, all from the same moment on; gives what each raised."""
    start = threading.Barrier(len(actions))
    raised: list[BaseException | None] = [None] * len(actions)

    def run(number: int) -> None:
        start.wait()
        try:
            actions[number]()
        except BaseException as error:
            raised[number] = error

    before = set(threading.enumerate())
    threads = [threading.Thread(target=run, args=(number,), name=f"caller {number}") for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(threading.enumerate()) <= before
    return raised


def test_a_thread_that_is_not_the_main_one_saves_and_loads(directory: Path) -> None:
    def run() -> None:
        save(state_of(1), str(directory / "step"))
        load_and_check(1, directory / "step")

    assert all_at_once([run]) == [None]
    load_and_check(1, directory / "step")


@pytest.mark.parametrize("torn", [False, True], ids=["", "torn"])
def test_several_threads_load_from_one_checkpoint_at_once(torn: bool, directory: Path) -> None:
    save(state_of(1), str(directory))

    def loading(part: int) -> Callable[[], None]:
        def run() -> None:
            for turn in range(3):
                options = {"storage_reader": reader_over(TornOperations(part))} if torn else {}
                load_and_check(1, directory, part, 4, verify=(True, "full", False)[turn], **options)

        return run

    assert all_at_once([loading(part) for part in range(4)]) == [None] * 4


def test_threads_that_save_into_directories_of_their_own_do_not_disturb_each_other(directory: Path) -> None:
    """The states have one structure, so the threads share what is remembered of the plan."""

    def saving(number: int) -> Callable[[], None]:
        def run() -> None:
            for turn in range(3):
                place, tag = directory / str(number), 10 * number + turn
                operations = TornOperations(number) if number % 2 else FailingOperations("pwritev")
                save(state_of(tag), str(place), storage_writer=writer_over(operations))
                load_and_check(tag, place)

        return run

    assert all_at_once([saving(number) for number in range(4)]) == [None] * 4
    for number in range(4):
        load_and_check(10 * number + 2, directory / str(number))


def test_an_error_on_one_thread_is_no_concern_of_the_others(directory: Path) -> None:
    save(state_of(1), str(directory / "one"))
    reads = calls_of("preadv", lambda probe: load_and_check(1, directory / "one", storage_reader=reader_over(probe)))
    writes = calls_of("pwritev", lambda probe: save(state_of(2), str(directory), storage_writer=writer_over(probe)))

    def failing() -> None:
        for number in range(5):
            reader = reader_over(FailingOperations("preadv", 1 + number % reads, refusal(errno.EIO)))
            with pytest.raises(OSError, match="could not read"):
                load_and_check(1, directory / "one", storage_reader=reader)
            writer = writer_over(FailingOperations("pwritev", 1 + number % writes, refusal(errno.ENOSPC)))
            with pytest.raises(OSError, match="could not write"):
                save(state_of(2), str(directory / "broken"), storage_writer=writer)

    def loading() -> None:
        for _ in range(5):
            load_and_check(1, directory / "one")

    def saving() -> None:
        for _ in range(3):
            save(state_of(3), str(directory / "three"))

    assert all_at_once([failing, loading, saving]) == [None] * 3
    load_and_check(3, directory / "three")
    assert not (directory / "broken").exists()


def fork_after_saving(context: RankContext, directory: str) -> int:
    """Save and load; a child of this process, in which none of its threads run, does the same; then both again."""
    place = Path(directory)
    save(state_of(1), directory + "/parent")
    load_and_check(1, place / "parent")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            load_and_check(1, place / "parent")
            save(state_of(2), directory + "/child")
            load_and_check(2, place / "child")
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    load_and_check(2, place / "child")
    save(state_of(3), directory + "/parent")
    load_and_check(3, place / "parent")
    return os.waitstatus_to_exitcode(status)


def test_a_child_of_a_process_that_saved_and_loaded_does_so_too(directory: Path) -> None:
    assert run_ranks(fork_after_saving, 1, str(directory), timeout_seconds=40) == [0]
