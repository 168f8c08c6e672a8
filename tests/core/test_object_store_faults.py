"""Requests to a real S3 server that fail: which are made again, how often, and what is left when they go on failing."""

from __future__ import annotations

import errno
import os
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.box import Box
from dcp_core.errors import ArgumentError, IncompleteError, NotFoundError, StorageError
from dcp_core.execution import read_requests
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.storage import fsspec_storage, fsspec_uploads
from dcp_core.storage.fsspec_storage import HELD_BYTES, FsspecStorage
from dcp_core.storage.fsspec_uploads import PART_BYTES, PARTS_IN_FLIGHT, WHOLE_BYTES
from dcp_core.storage.retries import Retries, is_passing
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.object_store import BUCKET, ObjectStore

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

QUICK = Retries(attempts=4, first_pause_seconds=0.001)
IMPATIENT = {"config_kwargs": {"read_timeout": 1}}
DATA = "_rank0_.0123456789abcdef0123456789abcdef.safetensors"


def content(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name}"


@pytest.fixture
def storage(object_store: ObjectStore, url: str) -> FsspecStorage:
    return FsspecStorage(url, IMPATIENT, retries=QUICK)


# -- what passes ------------------------------------------------------------------------------------------------------

_REQUESTS: dict[str, tuple[str, Callable[[FsspecStorage], Any], Any]] = {
    "put": ("PUT", lambda storage: storage.put("a", b"new", temporary="t"), None),
    "get": ("GET", lambda storage: storage.get("a"), b"old"),
    "look up": ("HEAD", lambda storage: storage.size("a"), 3),
    "list": ("GET", lambda storage: storage.list(), ["a"]),
    "remove": ("DELETE", lambda storage: storage.remove("a"), None),
    "touch": ("PUT", lambda storage: storage.touch("a"), None),
}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in _REQUESTS for fault in ("503", "lost")),
        ("put", "reset"),
        ("get", "reset"),
        ("get", "500"),
    ],
)
def test_a_request_is_made_again_until_it_succeeds(
    object_store: ObjectStore, storage: FsspecStorage, name: str, fault: str
) -> None:
    method, request, expected = _REQUESTS[name]
    storage.put("a", b"old", temporary="t")
    object_store.traffic.clear()
    object_store.traffic.fail(fault, f"^{method} ", times=3)
    assert request(storage) == expected
    assert len(object_store.traffic.of(f"^{method} ")) == 4


def test_a_server_that_does_not_answer_is_asked_again(object_store: ObjectStore, storage: FsspecStorage) -> None:
    storage.put("a", b"old", temporary="t")
    object_store.traffic.fail("stall", "^GET ")
    assert storage.get("a") == b"old"
    assert len(object_store.traffic.of("^GET ")) == 2


@pytest.mark.parametrize("fault", ["500", "reset"])
def test_a_fault_that_stays_is_an_error_after_so_many_attempts(
    object_store: ObjectStore, storage: FsspecStorage, fault: str
) -> None:
    object_store.traffic.fail(fault, "^HEAD ", times=100)
    with pytest.raises(StorageError, match=r"could not look up 'a' in 's3://.*\(.*tried 4 times\)"):
        storage.size("a")
    made = len(object_store.traffic.requests)  # the client sends again by itself what met an old connection's end
    assert QUICK.attempts <= made <= 2 * QUICK.attempts


def test_no_attempt_begins_after_the_total_time(object_store: ObjectStore, url: str) -> None:
    retries = {"attempts": 1000, "first_pause_seconds": 0.01, "longest_pause_seconds": 0.02, "total_seconds": 0.3}
    storage = FsspecStorage(url, {"dcp_retries": retries})
    object_store.traffic.fail("503", "^HEAD ", times=1000)
    with pytest.raises(StorageError, match=r"answered 503.*, tried [0-9]+ times"):
        storage.size("a")
    assert len(object_store.traffic.of("^HEAD ")) <= 0.3 / 0.005 + 1  # no pause is shorter


def test_options_say_how_often_and_the_default_bears_a_server_that_restarts(url: str) -> None:
    options = {"use_listings_cache": False, "dcp_retries": {"attempts": 2}}
    storage = FsspecStorage(url, options)
    assert storage.retries == Retries(attempts=2) and storage.options == options
    assert storage.folder("x").retries == storage.retries
    writer = FileSystemWriter(url, storage_options=options)
    assert (writer.rebuild_arguments() or {})["storage_options"] == options  # so a background process knows it
    usual = Retries()
    pauses = [usual.pause_seconds(attempt) for attempt in range(1, usual.attempts)]
    assert 10 < sum(pauses) < 30 < usual.total_seconds
    for wrong in (
        5, {"attempts": 0}, {"attempts": True}, {"attempts": 1.5}, {"tries": 3}, {"total_seconds": -1},
        {"first_pause_seconds": "1"}, {"total_seconds": float("inf")}, {"longest_pause_seconds": float("nan")},
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=r"dcp_retries|attempts|_seconds"):
            FsspecStorage(url, {"dcp_retries": wrong})


def test_what_is_forbidden_or_not_there_is_not_asked_for_again(
    object_store: ObjectStore, storage: FsspecStorage
) -> None:
    object_store.traffic.fail("403", "^GET ")
    with pytest.raises(StorageError, match="PermissionError") as caught:
        storage.get("a")
    assert "tried" not in str(caught.value)
    assert storage.get("a") is None
    assert storage.size("a") is None
    with pytest.raises(NotFoundError):
        storage.open_read("a")
    assert [request.method for request in object_store.traffic.requests] == ["GET", "GET", "HEAD", "HEAD"]


def test_pauses_grow_up_to_a_limit_and_spread() -> None:
    retries = Retries(attempts=10, first_pause_seconds=1.0, longest_pause_seconds=6.0)
    for attempt, longest in enumerate((1.0, 2.0, 4.0, 6.0, 6.0), 1):
        pauses = {retries.pause_seconds(attempt) for _ in range(50)}
        assert len(pauses) > 1
        assert all(longest / 2 <= pause <= longest for pause in pauses)


class ServerError(Exception):
    """As clients of HTTP have them."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (OSError(errno.EBUSY, "slow down"), True),
        (ServerError(500), True),
        (ServerError(429), True),
        (ServerError(403), False),
        (ServerError(404), False),
        (ServerError(501), False),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (OSError(errno.ENOSPC, "full"), False),
        (ValueError("a bug"), False),
    ],
)
def test_what_passes_is_told_from_what_does_not(error: Exception, passes: bool) -> None:
    assert is_passing(error) is passes
    wrapped = OSError("the client says more or less")
    wrapped.__cause__ = error
    assert is_passing(wrapped) is passes


@pytest.mark.parametrize("kind", [FileNotFoundError, PermissionError, FileExistsError, NotImplementedError])
def test_an_answer_that_follows_a_fault_is_an_answer(kind: type[Exception]) -> None:
    refused = kind()
    refused.__context__ = ConnectionResetError()
    assert not is_passing(refused)


# -- large files ------------------------------------------------------------------------------------------------------


def write(storage: FsspecStorage, name: str, data: bytes) -> None:
    """As the engine does: the data in order, the header last, then wait for it."""
    header = 1000
    with storage.create(name, len(data)) as handle:
        for at in range(header, len(data), 3 << 20):
            handle.write(at, [data[at : at + 100_000], data[at + 100_000 : at + (3 << 20)]])
        assert storage.size(name) is None
        handle.write(0, [data[:header]])
        handle.sync()
        assert storage.size(name) == len(data)


def give_up(storage: FsspecStorage, nbytes: int) -> None:
    """Fail after a part of a file is written."""
    handle = storage.create(DATA, nbytes)
    handle.write(nbytes - 10, [bytes(10)])
    handle.close()


def test_the_parts_of_a_large_file_travel_side_by_side_both_ways(
    object_store: ObjectStore, storage: FsspecStorage
) -> None:
    data = content(4 * PART_BYTES + 12_345)
    object_store.traffic.slow_seconds = 0.1
    for fault, pattern in (("500", "partNumber=2"), ("reset", "partNumber=3"), ("lost", "partNumber=5")):
        object_store.traffic.fail(fault, pattern)
    write(storage, DATA, data)
    parts = object_store.traffic.of("^PUT .*partNumber")
    assert len(parts) == 5 + 3
    assert 1 < object_store.traffic.most_in_flight <= PARTS_IN_FLIGHT

    object_store.traffic.clear()
    object_store.traffic.slow_seconds = 0.1
    target = bytearray(len(data) - 10)
    with storage.open_read(DATA) as reader:
        reader.read_into(7, memoryview(target))
    assert target == data[7:-3]
    assert object_store.traffic.most_in_flight > 1
    assert {request.range[:6] for request in object_store.traffic.of("^GET ")} == {"bytes="}


@pytest.mark.parametrize("fault", ["lost", "500"])
def test_the_completion_of_a_large_file_is_made_again(
    object_store: ObjectStore, storage: FsspecStorage, fault: str
) -> None:
    data = content(WHOLE_BYTES + 5)
    object_store.traffic.fail(fault, r"^POST .*\?uploadId")
    write(storage, DATA, data)
    assert storage.read(DATA, 0, 100) == data[:100]


@pytest.mark.parametrize("nbytes", [100, WHOLE_BYTES + 5])
def test_a_file_that_is_given_up_leaves_nothing(object_store: ObjectStore, storage: FsspecStorage, nbytes: int) -> None:
    give_up(storage, nbytes)
    assert storage.size(DATA) is None
    assert len(object_store.traffic.of("^DELETE .*uploadId")) == (nbytes > WHOLE_BYTES)


def test_a_part_that_fails_for_good_ends_the_file(object_store: ObjectStore, storage: FsspecStorage) -> None:
    object_store.traffic.fail("403", "partNumber=2")
    with pytest.raises(StorageError, match="could not upload part"):
        write(storage, DATA, content(2 * PART_BYTES + 5))
    assert storage.size(DATA) is None
    assert len(object_store.traffic.of("^DELETE .*uploadId")) == 1


_SMALL_PART_BYTES = 2 << 20


def _peak_of_an_upload(context: RankContext, url: str, parts: int) -> int:
    """Bytes that Python allocates at most while a file of so many parts is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsspec_storage, "PARTS_IN_FLIGHT", 2)
        patch.setattr(fsspec_uploads, "PART_BYTES", _SMALL_PART_BYTES)
        patch.setattr(fsspec_uploads, "WHOLE_BYTES", _SMALL_PART_BYTES)
        storage = FsspecStorage(url)
        storage.put("warm", b"x", temporary="t")
        piece = content(_SMALL_PART_BYTES // 4)
        tracemalloc.start()
        with storage.create(DATA, parts * _SMALL_PART_BYTES) as handle:
            for at in range(0, parts * _SMALL_PART_BYTES, len(piece)):
                handle.write(at, [piece])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_file(
    object_store: ObjectStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", _SMALL_PART_BYTES)
    object_store.traffic.slow_seconds = 0.1
    (peak,) = run_ranks(_peak_of_an_upload, 1, url, 10)
    assert 2 * _SMALL_PART_BYTES < peak < (2 * 2 + 3) * _SMALL_PART_BYTES


def test_a_large_file_waits_on_disk_for_a_store_that_takes_a_stream(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(fsspec_uploads, "WHOLE_BYTES", 1000)
    storage = FsspecStorage(url.replace("s3:", "memory:"))
    storage.prepare()
    data = content(7 << 20)
    write(storage, DATA, data)
    assert storage.read(DATA) == data
    storage.remove(DATA)
    give_up(storage, 2000)
    assert storage.list() == []


# -- reads ------------------------------------------------------------------------------------------------------------


def test_only_what_is_wanted_is_read(object_store: ObjectStore, storage: FsspecStorage) -> None:
    data = content(300_000)
    storage.write_file(DATA, data)
    object_store.traffic.clear()
    assert storage.read(DATA, 1000, 50) == data[1000:1050]
    assert [request.range for request in object_store.traffic.of("^GET ")] == ["bytes=1000-1049"]


@pytest.mark.parametrize(("rows", "width", "most_requests"), [(32, 1 << 15, 2), (4, 1 << 19, 4)])
def test_columns_of_a_matrix_take_few_requests_where_gaps_are_small_and_no_bytes_in_vain_where_they_are_wide(
    object_store: ObjectStore, url: str, rows: int, width: int, most_requests: int
) -> None:
    matrix = np.arange(rows * width, dtype=np.float64).reshape(rows, width)
    api.save({"matrix": matrix}, checkpoint_id=url)
    half = Box((0, 0), (rows, width // 2))
    object_store.traffic.clear()
    assert np.array_equal(api.read(url, "matrix", half), matrix[:, : width // 2])
    ranges = [request.range[6:].split("-") for request in object_store.traffic.of(r"^GET .*\.safetensors")]
    sizes = [int(last) + 1 - int(first) for first, last in ranges if int(first)]
    assert len(sizes) <= most_requests
    gap = width // 2 * 8
    is_read_over = gap <= fsspec_storage.GAP_BYTES
    assert sum(sizes) <= matrix.nbytes // 2 + (gap * (rows - 1) if is_read_over else 0) + 4096
    assert max(sizes) <= read_requests.JOINED_BYTES


def test_an_open_description_stays_what_it_was(storage: FsspecStorage) -> None:
    storage.put(".metadata", b"first", temporary="t")
    with storage.open_read(".metadata") as handle:
        storage.put(".metadata", b"other", temporary="t")
        target = bytearray(5)
        handle.read_into(0, memoryview(target))
    assert target == b"first"
    assert HELD_BYTES >= 10 << 20  # what a very large job's description has


def test_a_file_that_became_shorter_is_incomplete(object_store: ObjectStore, storage: FsspecStorage) -> None:
    storage.write_file(DATA, content(1000))
    with storage.open_read(DATA) as handle:
        storage.put(DATA, content(500), temporary="t")
        with pytest.raises(IncompleteError, match="gives 100 bytes from byte 400"):
            handle.read_into(400, memoryview(bytearray(200)))
        storage.remove(DATA)
        with pytest.raises(IncompleteError, match="is gone"):
            handle.read_into(0, memoryview(bytearray(10)))


def _read_on_both_sides_of_a_fork(context: RankContext, url: str) -> list[int]:
    storage = FsspecStorage(url)
    assert storage.get("a") == b"old"
    child = os.fork()
    if child == 0:
        os._exit(7 if storage.get("a") == b"old" else 1)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), storage.size("a") or 0]


def test_a_storage_goes_on_in_a_forked_process(storage: FsspecStorage, url: str) -> None:
    storage.put("a", b"old", temporary="t")
    assert run_ranks(_read_on_both_sides_of_a_fork, 1, url, timeout_seconds=30) == [[7, 3]]


# -- saves ------------------------------------------------------------------------------------------------------------


def state(value: float) -> dict[str, Any]:
    return {"weight": np.full((50, 40), value), "step": int(value), "name": "run"}


def save(url: str, value: float) -> None:
    writer = FileSystemWriter(storage=FsspecStorage(url, IMPATIENT, retries=QUICK))
    api.save(state(value), storage_writer=writer)


def loaded(url: str) -> int:
    target = state(0.0)
    api.load(target, storage_reader=FileSystemReader(storage=FsspecStorage(url, IMPATIENT, retries=QUICK)))
    assert (target["weight"] == target["step"]).all()
    step: int = target["step"]
    return step


def test_the_description_is_put_last_and_by_one_put(object_store: ObjectStore, url: str) -> None:
    save(url, 1.0)
    object_store.traffic.clear()
    save(url, 2.0)
    puts = [request.name for request in object_store.traffic.of("^PUT ") if not request.name.startswith(".intent-")]
    assert [name.rpartition(".")[2] for name in puts] == ["bytes", "safetensors", "metadata"]
    assert puts[-1] == ".metadata"
    assert all(len(name.split(".")[1]) == 32 for name in puts[:-1])
    at = [request.name for request in object_store.traffic.requests].index
    removed = [request.name for request in object_store.traffic.of("^DELETE ") if request.name.startswith("_rank")]
    assert len(removed) == 2
    last_put = max(number for number, r in enumerate(object_store.traffic.requests) if r.method == "PUT")
    assert object_store.traffic.requests[last_put].name == ".metadata" or at(".metadata") < at(removed[0])
    assert loaded(url) == 2


def test_nothing_needs_a_listing(object_store: ObjectStore, url: str) -> None:
    object_store.traffic.fail("403", r"list-type", times=1000)
    for value in (1.0, 2.0):
        save(url, value)
        assert loaded(url) == value
    assert (api.read(url, "weight") == 2.0).all()
    object_store.traffic.clear()
    assert len(FsspecStorage(url).list()) == 3  # what the second save replaced is known by name


def test_a_save_that_fails_at_any_put_leaves_the_old_checkpoint_alone(object_store: ObjectStore, url: str) -> None:
    save(url, 1.0)
    before = FsspecStorage(url).list()
    for pattern in (r"\.intent-", r"\.bytes", r"\.safetensors", r"\.metadata"):
        object_store.traffic.fail("403", f"^PUT .*{pattern}")
        with pytest.raises(StorageError, match="PermissionError"):
            save(url, 2.0)
        assert FsspecStorage(url).list() == before
        assert loaded(url) == 1
    save(url, 3.0)
    assert loaded(url) == 3
    assert len(FsspecStorage(url).list()) == 3


def test_a_commit_whose_answers_are_lost_is_a_commit(object_store: ObjectStore, url: str) -> None:
    save(url, 1.0)
    object_store.traffic.fail("lost", r"^PUT .*\.metadata", times=1000)
    save(url, 2.0)
    object_store.traffic.rules.clear()
    assert loaded(url) == 2


def test_a_save_and_a_load_go_on_through_many_faults(object_store: ObjectStore, url: str) -> None:
    for fault, pattern in (("500", "^PUT"), ("reset", "^GET"), ("503", "^HEAD"), ("lost", "^DELETE"), ("lost", "^PUT")):
        object_store.traffic.fail(fault, pattern, times=2)
    save(url, 1.0)
    save(url, 2.0)
    for fault, pattern in (("500", "^GET"), ("reset", "^HEAD"), ("stall", "^GET")):
        object_store.traffic.fail(fault, pattern)
    assert loaded(url) == 2


def test_damage_is_found_as_in_files(object_store: ObjectStore, url: str) -> None:
    save(url, 1.0)
    storage = FsspecStorage(url)
    name = next(name for name in storage.list() if name.endswith(".safetensors"))
    damaged = bytearray(storage.read(name))
    damaged[-1] ^= 1
    storage.put(name, damaged, temporary="t")
    with pytest.raises(ValueError, match="checksum") as caught:
        loaded(url)
    assert name in str(caught.value)
    storage.put(name, damaged[:-1], temporary="t")
    with pytest.raises(IncompleteError, match="expected"):
        loaded(url)
