"""Answers of a store that are late, slow, torn, or of another length than asked for: right data or a clear error."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.errors import DcpError, IncompleteError, StorageError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.storage.fsspec_reads import SHORT_READS
from dcp_core.storage.fsspec_storage import FsspecStorage
from tests.core.object_store import BUCKET, ObjectStore

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

_OPTIONS: dict[str, Any] = {
    "dcp_retries": {"attempts": 3, "first_pause_seconds": 0.01, "longest_pause_seconds": 0.02},
    "config_kwargs": {"read_timeout": 20},
}
_DATA = "_rank0_." + "a" * 32 + ".safetensors"
_CONTENT = np.random.default_rng(7).bytes(40_000)
_SOON_SECONDS = 60.0


@pytest.fixture
def url(object_store: ObjectStore, request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/answers/{request.node.name}"


@pytest.fixture
def storage(url: str) -> FsspecStorage:
    made = FsspecStorage(url, _OPTIONS)
    made.write_file(_DATA, _CONTENT)
    return made


def part_of(storage: FsspecStorage) -> bytes:
    return storage.read(_DATA, 100, 30_000)


@pytest.mark.parametrize(
    ("fault", "times", "most_requests"),
    [("slow", 1, 1), ("trickle", 1, 1), ("torn", 2, 3), ("short", 2, 3), ("long", 2, 3)],
)
def test_a_range_is_right_however_its_answer_came(
    fault: str, times: int, most_requests: int, object_store: ObjectStore, storage: FsspecStorage
) -> None:
    object_store.traffic.fail(fault, r"^GET .*\.safetensors", times=times)
    assert part_of(storage) == _CONTENT[100:30_100]
    assert len(object_store.traffic.of(r"^GET .*\.safetensors")) <= most_requests
    assert not any(rule.times for rule in object_store.traffic.rules)


@pytest.mark.parametrize(
    ("fault", "error", "text", "requests"),
    [
        ("torn", StorageError, "tried 3 times", 3),
        ("short", IncompleteError, "gives 15000 bytes from byte 100", SHORT_READS),
        ("long", IncompleteError, "gives 30023 bytes from byte 100", SHORT_READS),
    ],
)
def test_a_range_whose_answers_stay_wrong_is_an_error_after_few_requests(
    fault: str, error: type[DcpError], text: str, requests: int, object_store: ObjectStore, storage: FsspecStorage
) -> None:
    object_store.traffic.fail(fault, r"^GET .*\.safetensors", times=1000)
    with pytest.raises(error, match=text) as caught:
        part_of(storage)
    assert _DATA in str(caught.value) and storage.url in str(caught.value)
    assert len(object_store.traffic.of(r"^GET .*\.safetensors")) == requests


def test_an_answer_that_trickles_for_ever_ends(object_store: ObjectStore, url: str, storage: FsspecStorage) -> None:
    limits = {"attempts": 2, "attempt_seconds": 0.5, "first_pause_seconds": 0.01}
    impatient = FsspecStorage(url, {**_OPTIONS, "dcp_retries": limits})
    object_store.traffic.fail("drip", r"^GET .*\.safetensors", times=2)
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"no answer in time \(tried 2 times\)"):
        part_of(impatient)
    assert time.monotonic() - began < _SOON_SECONDS
    assert part_of(impatient) == _CONTENT[100:30_100]


def test_a_put_that_is_taken_in_silence_ends(object_store: ObjectStore, url: str) -> None:
    limits = {"attempts": 2, "attempt_seconds": 0.5, "first_pause_seconds": 0.01}
    impatient = FsspecStorage(url, {**_OPTIONS, "dcp_retries": limits})
    object_store.traffic.stall_seconds = 5.0
    object_store.traffic.fail("stall", "^PUT", times=2)
    with pytest.raises(StorageError, match=r"could not write 'a' in .*tried 2 times"):
        impatient.put("a", b"content", temporary="t")
    object_store.traffic.stall_seconds = 2.0


# -- checkpoints ------------------------------------------------------------------------------------------------------


def state(value: float) -> dict[str, Any]:
    return {"weight": np.full((60, 50), value), "step": int(value), "name": "run"}


def loaded(url: str) -> int:
    target = state(0.0)
    api.load(target, checkpoint_id=url, storage_reader=FileSystemReader(storage_options=_OPTIONS))
    assert (target["weight"] == target["step"]).all()
    step: int = target["step"]
    return step


@pytest.mark.parametrize("fault", ["slow", "trickle", "torn", "short", "long"])
def test_a_load_is_right_whichever_answer_came_so(fault: str, object_store: ObjectStore, url: str) -> None:
    api.save(state(3.0), checkpoint_id=url)
    for pattern in (r"^GET .*\.metadata", r"^GET .*\.bytes", r"^GET .*\.safetensors"):
        object_store.traffic.fail(fault, pattern)
    assert loaded(url) == 3
    assert not any(rule.times for rule in object_store.traffic.rules)


@pytest.mark.parametrize("fault", ["torn", "short", "long"])
@pytest.mark.parametrize("name", [r"\.metadata", r"\.bytes", r"\.safetensors"])
def test_a_load_whose_answers_stay_wrong_is_an_error_and_no_wrong_data(
    fault: str, name: str, object_store: ObjectStore, url: str
) -> None:
    api.save(state(3.0), checkpoint_id=url)
    object_store.traffic.clear()
    object_store.traffic.fail(fault, f"^GET .*{name}", times=1000)
    target = state(0.0)
    with pytest.raises(DcpError) as caught:
        api.load(target, checkpoint_id=url, storage_reader=FileSystemReader(storage_options=_OPTIONS))
    assert name.replace("\\", "") in str(caught.value)
    assert (target["weight"] == 0.0).all() or (target["weight"] == 3.0).all()
    assert len(object_store.traffic.of(f"^GET .*{name}")) <= 12
