"""The conformance kit of storages, run on what fsspec reaches: an S3 server, memory, and files behind its rename."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_core.storage.base import Storage
from dcp_core.storage.fsspec_storage import FsspecStorage
from dcp_core.storage.retries import Retries
from dcp_core.testing.conformance.storage import StorageConformance
from tests.core.object_store import BUCKET

pytestmark = pytest.mark.timeout(120)


class TestS3(StorageConformance):
    publish_turns = 5

    @pytest.fixture(autouse=True)
    def _server(self, object_store: object) -> None:
        """Every test has the server."""

    def make_storage(self, place: Path) -> Storage:
        return FsspecStorage(f"s3://{BUCKET}{place}")


class TestMemory(StorageConformance):
    def make_storage(self, place: Path) -> Storage:
        return FsspecStorage(f"memory://{place}")

    def test_what_a_process_wrote_others_read(self, place: Path) -> None:
        pytest.skip("memory:// is seen by one process only")


class TestFilesBehindFsspec(StorageConformance):
    def make_storage(self, place: Path) -> Storage:
        return FsspecStorage(f"local://{place}", retries=Retries(first_pause_seconds=0.001))
