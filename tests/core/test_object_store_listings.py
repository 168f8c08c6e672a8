"""Stores with more names than one page of a listing has, and buckets that keep old versions of what was removed."""

from __future__ import annotations

from typing import Any

import boto3  # type: ignore[import-untyped]  # has no types
import numpy as np
import pytest

from dcp_core import api
from dcp_core.inspection.verify import verify
from dcp_core.manager.latest import latest_checkpoint
from dcp_core.manager.manager import CheckpointManager
from dcp_core.storage.fsspec_client import FsspecClient
from dcp_core.storage.fsspec_storage import FsspecStorage
from dcp_core.storage.retries import Retries
from tests.core.object_store import BUCKET, ENVIRONMENT, ObjectStore

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

_PAGE = 100
_MANY = 110
_VERSIONED = "versioned"


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(5, float(step)), "step": step}


def backend() -> Any:
    """What the server keeps; it runs in this process, which spares thousands of requests."""
    from moto.s3.models import s3_backends  # type: ignore[import-untyped,unused-ignore]

    (of_account,) = (found for found in s3_backends.values() if BUCKET in found["aws"].buckets)
    return of_account["aws"]


def put_many(keys: list[str], content: bytes = b"x") -> None:
    store = backend()
    for key in keys:
        store.put_object(BUCKET, key, content)


def client(object_store: ObjectStore) -> Any:
    return boto3.client(
        "s3", endpoint_url=object_store.direct, region_name="us-east-1",
        aws_access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"], aws_secret_access_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip


@pytest.fixture
def place(request: pytest.FixtureRequest, object_store: ObjectStore) -> str:
    return f"listings/{request.node.name}"


@pytest.fixture
def _short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server give pages of a hundred names, where a thousand is what it gives by itself."""
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", str(_PAGE))


def test_more_names_and_more_directories_than_a_thousand_are_listed(place: str, object_store: ObjectStore) -> None:
    put_many([f"{place}/step_{number:04}/.metadata" for number in range(1_100)])
    put_many([f"{place}/{number:04}.txt" for number in range(1_100)])
    storage = FsspecStorage(f"s3://{BUCKET}/{place}")
    assert len(storage.list()) == 2_200
    assert storage.list_directories() == [f"step_{number:04}" for number in range(1_100)]
    assert len(object_store.traffic.of("list-type")) == 2 * 3


@pytest.mark.usefixtures("_short_pages")
def test_the_newest_of_more_steps_than_a_page_has_is_found(place: str, object_store: ObjectStore) -> None:
    root = f"s3://{BUCKET}/{place}"
    api.save(state(1), checkpoint_id=f"{root}/step_0")
    names = FsspecStorage(f"{root}/step_0").list()
    contents = {name: FsspecStorage(f"{root}/step_0").read(name) for name in names}
    for name, content in contents.items():
        put_many([f"{place}/step_{step}" + f"/{name}" for step in range(1, _MANY)], content)
    assert len(FsspecStorage(root).list_directories()) == _MANY
    assert latest_checkpoint(root) == f"{root}/step_{_MANY - 1}"


@pytest.mark.usefixtures("_short_pages")
def test_a_manager_sees_its_steps_beyond_the_first_page(place: str, object_store: ObjectStore) -> None:
    root = f"s3://{BUCKET}/{place}"
    put_many([f"{place}/other_{number:04}/notes.txt" for number in range(_MANY)])
    manager = CheckpointManager(root, keep=2)
    for step in (1, 2, 3, 4):
        manager.save(step, state(step))
    found = FsspecStorage(root).list_directories()
    assert len(found) == _MANY + 2 and found[_MANY:] == ["step_3", "step_4"]
    assert manager.latest() == f"{root}/step_4"
    target = state(0)
    assert manager.resume(target) == 4 and (target["w"] == 4.0).all()


@pytest.mark.usefixtures("_short_pages")
def test_strays_beyond_the_first_page_are_seen_and_what_dead_saves_left_there_is_removed(
    place: str, object_store: ObjectStore
) -> None:
    url = f"s3://{BUCKET}/{place}"
    api.save(state(1), checkpoint_id=url)
    put_many([f"{place}/{number:04}.txt" for number in range(_MANY)])
    left = "_rank0_." + "f" * 32 + ".safetensors"
    put_many([f"{place}/{left}"])
    report = verify(url, quick=True)
    assert report.is_whole and report.strays is not None
    assert len(report.strays) == _MANY + 1 and left in {stray.name for stray in report.strays}
    api.save(state(2), checkpoint_id=url)
    names = FsspecStorage(url).list()
    assert left not in names and len(names) == _MANY + 3


def test_all_unfinished_files_are_found_and_removed(
    place: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/{place}"
    names = [f"_rank{rank}_." + "e" * 32 + ".safetensors" for rank in range(3)]
    s3 = client(object_store)
    for name in names:
        s3.create_multipart_upload(Bucket=BUCKET, Key=f"{place}/{name}")
    files = FsspecClient(url, {}, Retries())
    call = type(files._file_system()[0]).call_s3
    asked: list[dict[str, Any]] = []

    def one_at_a_time(self: Any, method: str, **arguments: Any) -> Any:
        """The server tells of all at once; a page of one is what another would give."""
        answer = call(self, method, **arguments)
        if method == "list_multipart_uploads":
            asked.append(arguments)
            known = [(each["Key"], each["UploadId"]) for each in answer.get("Uploads", ())]
            after = arguments.get("KeyMarker"), arguments.get("UploadIdMarker")
            if not known:
                return answer
            at = known.index(after) + 1 if after in known else 0
            shown = answer["Uploads"][at : at + 1]
            following = dict(zip(("NextKeyMarker", "NextUploadIdMarker"), known[at], strict=True))
            return {**answer, "Uploads": shown, "IsTruncated": at + 1 < len(known), **following}
        return answer

    monkeypatch.setattr(type(files._file_system()[0]), "call_s3", one_at_a_time)
    assert [name for name, _ in files.unfinished()] == names
    assert len(asked) == 3
    api.save(state(1), checkpoint_id=url)
    assert files.unfinished() == []


def test_a_versioned_bucket_is_like_any_other(object_store: ObjectStore, place: str) -> None:
    s3 = client(object_store)
    s3.create_bucket(Bucket=_VERSIONED)
    s3.put_bucket_versioning(Bucket=_VERSIONED, VersioningConfiguration={"Status": "Enabled"})
    root = f"s3://{_VERSIONED}/{place}"
    for value in (1, 2):
        api.save(state(value), checkpoint_id=f"{root}/over")
        target = state(0)
        api.load(target, checkpoint_id=f"{root}/over")
        assert target["step"] == value and (target["w"] == value).all()
    assert len(FsspecStorage(f"{root}/over").list()) == 3
    assert verify(f"{root}/over").strays == ()

    manager = CheckpointManager(f"{root}/run", keep=1)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    assert [FsspecStorage(f"{root}/run/step_{step}").list() for step in (1, 2)] == [[], []]
    assert latest_checkpoint(f"{root}/run") == f"{root}/run/step_3"
    s3.delete_object(Bucket=_VERSIONED, Key=f"{place}/run/step_3/.metadata")  # a marker hides it, and it is no more
    assert latest_checkpoint(f"{root}/run") is None
    versions = s3.list_object_versions(Bucket=_VERSIONED, Prefix=f"{place}/run/step_3/.metadata")
    (marker,) = versions["DeleteMarkers"]
    s3.delete_object(Bucket=_VERSIONED, Key=marker["Key"], VersionId=marker["VersionId"])  # undeleted
    assert manager.resume(state(0)) == 3
