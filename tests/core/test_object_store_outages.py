"""A store that goes away while ranks save to it or load from it: one error soon, the old checkpoint, a next save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.storage.fsspec_storage import FsspecStorage
from dcp_core.testing import ranks
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.async_jobs import async_outcome
from tests.core.fault_jobs import Outcome, Seat, loaded_tag, outcome_of, poison_of, state_of
from tests.core.object_store import BUCKET, ObjectStore
from tests.core.store_front import StoreFront

ranks.preload("s3fs", "aiobotocore.session", "tests.core.async_jobs", "tests.core.object_store")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

_WORLD = 4
_OPTIONS: dict[str, Any] = {
    "dcp_retries": {"attempts": 2, "longest_pause_seconds": 0.2, "total_seconds": 3.0, "attempt_seconds": 1.5},
    "config_kwargs": {"connect_timeout": 1, "read_timeout": 1},
}
_BOUND_SECONDS = 45.0
"""Much less than the deadline of the ranks, and much more than all attempts take that the options allow."""

_AWAY = pytest.mark.parametrize("how", ["stopped", "killed"])


@pytest.fixture
def front(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreFront]:
    with StoreFront(object_store.endpoint) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


@pytest.fixture
def url(front: StoreFront, request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/outages/{request.node.name}/step"


def _save(context: RankContext, url: str, tag: int) -> Outcome:
    seat = Seat.of(context)
    writer = FileSystemWriter(storage_options=_OPTIONS)
    return outcome_of(
        seat.save, state_of(seat.rank, seat.world, tag), checkpoint_id=url, storage_writer=writer
    )  # fmt: skip


def _load(context: RankContext, url: str) -> Outcome:
    seat = Seat.of(context)
    reader = FileSystemReader(storage_options=_OPTIONS)
    return outcome_of(seat.load, poison_of(seat.rank, seat.world), checkpoint_id=url, storage_reader=reader)


def _save_in_the_background(context: RankContext, url: str, tag: int) -> Outcome:
    seat = Seat.of(context)
    writer = FileSystemWriter(storage_options=_OPTIONS)
    return async_outcome(seat, state_of(seat.rank, seat.world, tag), url, storage_writer=writer)


def _go_on(context: RankContext, url: str, tag: int) -> tuple[int, str, int]:
    """Load what is there, save over it, and load that."""
    seat = Seat.of(context)
    found = loaded_tag(seat, url, 0, own=True)
    seat.share()
    ended = _save(context, url, tag)
    seat.share()
    return found, ended.kind + ended.message, loaded_tag(seat, url, 0, own=True)


def _goes_on(url: str, world: int, old: int, new: int) -> None:
    """The store is back: the old checkpoint is there, the next save is made, and nothing else is left."""
    assert run_ranks(_go_on, world, url, new) == [(old, "", new)] * world
    names = [name for name in FsspecStorage(url).list() if not name.startswith(".mailbox-")]
    assert [name.partition(".")[0] for name in names] == ["", *(f"_rank{n // 2}_" for n in range(2 * world))]


def _check_one_error(ends: list[Outcome], url: str) -> None:
    """All ranks were told the same in bounded time, and it names the place."""
    assert {(end.kind, end.message) for end in ends} == {("StorageError", ends[0].message)}
    assert url in ends[0].message and "tried 2 times" in ends[0].message, ends[0].message
    assert max(end.seconds for end in ends) < _BOUND_SECONDS


@_AWAY
def test_a_store_that_goes_away_during_a_save_and_during_a_load(
    how: str, object_store: ObjectStore, front: StoreFront, url: str
) -> None:
    assert {end.kind for end in run_ranks(_save, _WORLD, url, 1)} == {""}
    object_store.traffic.tell(r"^PUT .*_rank2_.*\.safetensors", lambda: front.leave(how))
    ends = run_ranks(_save, _WORLD, url, 2, timeout_seconds=100)
    _check_one_error(ends, url)
    front.come_back()
    _goes_on(url, _WORLD, 1, 3)

    object_store.traffic.tell(r"^GET .*_rank1_.*\.safetensors", lambda: front.leave(how))
    ends = run_ranks(_load, _WORLD, url, timeout_seconds=100)
    _check_one_error(ends, url)
    front.come_back()
    _goes_on(url, _WORLD, 3, 4)


@_AWAY
def test_a_store_that_goes_away_during_a_save_in_the_background(
    how: str, object_store: ObjectStore, front: StoreFront, url: str
) -> None:
    assert {end.kind for end in run_ranks(_save, 2, url, 1)} == {""}
    object_store.traffic.tell(r"^PUT .*_rank1_.*\.safetensors", lambda: front.leave(how))
    ends = run_ranks(_save_in_the_background, 2, url, 2, timeout_seconds=100)
    for end in ends:  # they talk through the store, so that each can only tell what it saw of it
        assert end.kind in ("StorageError", "CoordinationError", "InDoubtError", "RankFailedError"), end
        assert url in end.message and end.seconds < _BOUND_SECONDS, end
    front.come_back()
    _goes_on(url, 2, 1, 3)
