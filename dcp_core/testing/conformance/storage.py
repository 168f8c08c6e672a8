"""The suite of a storage: what is written is read, names are exclusive, a publish is one step."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.errors import ArgumentError, IncompleteError, NotFoundError, StorageError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.storage.base import Storage
from dcp_core.testing.conformance.suite import RankedSuite
from dcp_core.testing.ranks import RankContext

_OUTSIDE = ("", ".", "..", "../x", "a/b", "/dcp-conformance/x", "a\\b", "a\0b")
_ODD = ("a b", "ä", "名前", "-rf", "..a", "%s", ".metadata", "_rank0_.0f3a.safetensors", "x" * 120)
_SIZES = (0, 1, 4096, 100_001)


def _content(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def _check(found: bytes | bytearray, expected: bytes) -> None:
    """Compare contents, and say where they differ; pytest would look for all differences, for minutes."""
    if found == expected:
        return
    first = next((at for at, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), "the end")
    pytest.fail(f"{len(found)} bytes, expected {len(expected)}; the first difference is at {first}")


class StorageConformance(RankedSuite):
    """Tests of a `Storage`. Derive from it and say how one is made.

    `make_storage` is called several times with one place, in several processes too: all see the same files.

    Attributes:
        patience_seconds: How long something may take that should happen at once.
        publish_turns: How often a name gets a new content while others look at it.
    """

    patience_seconds = 20.0
    publish_turns = 60

    def make_storage(self, place: Path) -> Storage:
        """Make a storage object.

        Args:
            place: A local directory that exists, to use or to derive a bucket's name from. A test uses its own.
        """
        raise NotImplementedError

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """Where a test stores; what lies above it is the test's own too."""
        inner = tmp_path / "place"
        inner.mkdir()
        return inner

    @pytest.fixture
    def storage(self, place: Path) -> Storage:
        """A storage whose directory is there."""
        made = self.make_storage(place)
        made.prepare()
        return made

    # -- content ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_what_is_written_is_read(self, storage: Storage, nbytes: int) -> None:
        """Whole, and by pieces from any place."""
        content = _content(nbytes)
        storage.write_file("a", content)
        assert storage.size("a") == nbytes
        assert storage.exists("a")
        _check(storage.read("a"), content)
        for offset, wanted in ((0, nbytes), (nbytes, 0), (nbytes // 3, nbytes // 2)):
            _check(storage.read("a", offset, wanted), content[offset : offset + wanted])

    def test_buffers_of_any_kind_land_one_after_another(self, storage: Storage) -> None:
        """`write` takes what numpy and torch have: memory of any format and shape, empty buffers among it."""
        grid = memoryview(bytearray(range(24))).cast("B", (2, 3, 4))
        wide = memoryview(bytearray(b"12345678")).cast("q")
        with storage.create("a", 24 + 8 + 3) as handle:
            handle.write(0, [grid, b"", wide, bytearray(b"abc")])
        assert storage.read("a") == bytes(range(24)) + b"12345678abc"

    def test_pieces_are_written_in_any_order(self, storage: Storage) -> None:
        """Files grow from several places at a time."""
        content = _content(1000)
        with storage.create("a", 1000) as handle:
            for start, middle, end in ((600, 750, 900), (0, 1, 300), (900, 1000, 1000), (300, 300, 600)):
                handle.write(start, [content[start:middle], content[middle:end]])
            handle.sync()
        _check(storage.read("a"), content)

    def test_a_file_is_written_and_read_by_several_threads(self, storage: Storage) -> None:
        """Handles are shared by threads, each at its own place."""
        content = _content(64 * 500)
        pieces = range(0, len(content), 500)
        with storage.create("a", len(content)) as handle, ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda at: handle.write(at, [content[at : at + 500]]), pieces))
        with storage.open_read("a") as reader, ThreadPoolExecutor(8) as pool:

            def read(at: int) -> bytes:
                target = bytearray(500)
                reader.read_into(at, memoryview(target))
                return bytes(target)

            _check(b"".join(pool.map(read, pieces)), content)

    def test_a_read_fills_its_whole_target(self, storage: Storage) -> None:
        """However few bytes one request of the storage gives."""
        content = _content(3 << 20)
        storage.write_file("a", content)
        target = bytearray(len(content) - 5)
        with storage.open_read("a") as reader:
            assert reader.nbytes == len(content)
            reader.read_into(5, memoryview(target))
        _check(target, content[5:])

    def test_a_read_fills_several_targets_in_order(self, storage: Storage) -> None:
        """`read_scattered`, also into empty ones."""
        content = _content(1 << 20)
        storage.write_file("a", content)
        targets = [bytearray(size) for size in (0, 1, 70_000, 0, 500_000, 17)]
        with storage.open_read("a") as reader:
            reader.read_scattered(11, [memoryview(target) for target in targets])
        _check(b"".join(targets), content[11 : 11 + sum(map(len, targets))])

    def test_a_read_past_the_end_is_incomplete(self, storage: Storage) -> None:
        """A file that was cut short is found out, never filled up with zeros."""
        storage.write_file("a", _content(100))
        with storage.open_read("a") as reader:
            for offset, wanted in ((0, 101), (60, 41), (100, 1), (500, 10)):
                with pytest.raises(IncompleteError):
                    reader.read_into(offset, memoryview(bytearray(wanted)))
                with pytest.raises(IncompleteError):
                    reader.read_scattered(offset, [memoryview(bytearray(wanted - 1)), memoryview(bytearray(1))])
        with pytest.raises(IncompleteError):
            storage.read("a", 60, 41)

    def test_writing_beyond_the_announced_size_is_refused(self, storage: Storage) -> None:
        """`nbytes` of `create` is a promise."""
        with storage.create("a", 4) as handle:
            for offset, content in ((0, b"12345"), (4, b"1")):
                with pytest.raises((ArgumentError, StorageError)):
                    handle.write(offset, [content])
            handle.write(0, [b"1234"])
        assert storage.read("a") == b"1234"

    def test_handles_may_be_closed_twice(self, storage: Storage) -> None:
        """Whoever cleans up need not know who was there before."""
        writer = storage.create("a", 1)
        writer.write(0, [b"x"])
        writer.close()
        writer.close()
        reader = storage.open_read("a")
        reader.close()
        reader.close()

    # -- names -----------------------------------------------------------------------------------------------------

    def test_a_name_is_created_exclusively(self, storage: Storage, place: Path) -> None:
        """Two saves never write one file; what is there stays."""
        storage.write_file("a", b"first")
        for other in (storage, self.make_storage(place)):
            with pytest.raises(StorageError) as caught:
                other.create("a", 6)
            assert caught.value.errno == errno.EEXIST
            assert storage.read("a") == b"first"

    def test_of_many_that_create_a_name_at_once_one_succeeds(self, place: Path) -> None:
        """Exclusive also when nobody was first; not for an object store, where data files have unique names."""
        storages = [self.make_storage(place) for _ in range(8)]
        storages[0].prepare()
        if storages[0].is_object_store:
            pytest.skip("an object store has no exclusive creation: is_object_store says so")
        for turn in range(5):
            together = threading.Barrier(len(storages), timeout=self.patience_seconds)

            def create(number: int, name: str = f"name {turn}", together: threading.Barrier = together) -> bool:
                together.wait()
                with suppress(StorageError):
                    storages[number].write_file(name, bytes([number]), durable=False)
                    return True
                return False

            with ThreadPoolExecutor(len(storages)) as pool:
                won = list(pool.map(create, range(len(storages))))
            assert won.count(True) == 1
            assert storages[0].read(f"name {turn}") == bytes([won.index(True)])

    def test_names_are_listed_sorted_and_as_they_are_now(self, storage: Storage, place: Path) -> None:
        """What was made, removed or renamed a moment ago, also by somebody else, is seen."""
        other = self.make_storage(place)
        assert storage.list() == other.list() == []
        for name in ("b", "a", "c"):
            other.write_file(name, b"")
        assert storage.list() == other.list() == ["a", "b", "c"]
        storage.remove("b")
        other.publish("c", "d")
        assert storage.list() == other.list() == ["a", "d"]
        assert other.size("b") is None
        assert storage.size("c") is None

    @pytest.mark.parametrize("name", _ODD)
    def test_names_come_back_as_they_are(self, storage: Storage, name: str) -> None:
        """Names that the checkpoint uses, and names that users' tools may put there."""
        storage.write_file(name, b"content")
        assert storage.list() == [name]
        assert storage.read(name) == b"content"

    @pytest.mark.parametrize("name", _OUTSIDE)
    def test_a_name_that_leaves_the_directory_is_refused(self, storage: Storage, name: str) -> None:
        """Names may come out of a file that a stranger wrote."""
        calls: list[Callable[[], Any]] = [
            lambda: storage.size(name),
            lambda: storage.open_read(name),
            lambda: storage.create(name, 1),
            lambda: storage.publish(name, "a"),
            lambda: storage.publish("a", name),
            lambda: storage.remove(name),
            lambda: storage.touch(name),
        ]
        for call in calls:
            with pytest.raises(ArgumentError):
                call()
        assert storage.list() == []

    def test_what_is_not_there_is_told_so(self, storage: Storage) -> None:
        """None where that is an answer, `NotFoundError` where not; removing it is fine."""
        assert storage.size("a") is None
        assert storage.modified_seconds("a") is None
        assert not storage.exists("a")
        storage.remove("a")
        storage.remove_directory("a")
        for call in (storage.open_read, storage.touch, storage.read):
            with pytest.raises(NotFoundError):
                call("a")

    def test_a_removed_name_may_be_used_again(self, storage: Storage) -> None:
        """And has its new content."""
        storage.write_file("a", b"old content")
        storage.remove("a")
        storage.write_file("a", b"new")
        assert (storage.size("a"), storage.read("a")) == (3, b"new")

    def test_a_directory_is_made_once_and_missing_before(self, place: Path) -> None:
        """`prepare` may come twice; before it, there is nothing to list. An object store may know no directories."""
        missing = place / "step 1"
        storage = self.make_storage(missing)
        with suppress(NotFoundError):
            assert storage.list() == [] and storage.is_object_store
        storage.prepare()
        storage.prepare()
        assert self.make_storage(missing).list() == []
        storage.sync()

    def test_it_says_where_it_is(self, storage: Storage) -> None:
        """Errors name the place."""
        assert isinstance(storage.describe(), str) and storage.describe()

    def test_touching_a_file_makes_it_younger(self, storage: Storage) -> None:
        """That a save lives is told by the age of its record, by the storage's clock."""
        storage.write_file("a", b"beat")
        before = storage.modified_seconds("a")
        assert before is not None
        deadline = time.monotonic() + self.patience_seconds
        while storage.modified_seconds("a") == before:
            assert time.monotonic() < deadline, "touching does not change the time"
            storage.touch("a")
            time.sleep(0.01)
        assert (storage.modified_seconds("a") or 0.0) > before
        assert storage.read("a") == b"beat"

    # -- commit ----------------------------------------------------------------------------------------------------

    def test_a_publish_replaces_what_has_the_name(self, storage: Storage) -> None:
        """The temporary name is gone then."""
        storage.write_file("name", b"old")
        storage.write_file("temporary", b"new content")
        storage.publish("temporary", "name")
        assert (storage.list(), storage.read("name")) == (["name"], b"new content")

    def test_a_publish_of_nothing_leaves_what_is_there(self, storage: Storage) -> None:
        """It is an error, and the checkpoint stays."""
        storage.write_file("name", b"old")
        with pytest.raises((StorageError, NotFoundError)):
            storage.publish("temporary", "name")
        assert storage.read("name") == b"old"

    def test_a_put_replaces_what_has_the_name(self, storage: Storage) -> None:
        """`ready` comes before the step, and what it raises prevents it."""
        storage.put("name", b"old", temporary="temporary")
        seen: list[bytes] = []
        storage.put("name", b"new", temporary="temporary", ready=lambda: seen.append(storage.read("name")))
        assert (storage.list(), storage.read("name"), seen) == (["name"], b"new", [b"old"])

        def refuse() -> None:
            raise ArgumentError("not now")

        with pytest.raises(ArgumentError, match="not now"):
            storage.put("name", b"newest", temporary="other", durable=False, ready=refuse)
        assert storage.read("name") == b"new"

    def test_sizes_are_told_in_order(self, storage: Storage) -> None:
        """Of many files at once, missing ones among them."""
        for number in range(20):
            storage.write_file(f"{number}", bytes(number))
        names = [f"{number}" for number in (7, 99, 0, 19, 3)]
        assert list(storage.sizes(names)) == [7, None, 0, 19, 3]
        assert list(storage.sizes([])) == []

    def test_a_publish_is_one_step(self, storage: Storage, place: Path) -> None:
        """Whoever looks meanwhile sees the old content or the new, whole; never nothing, never a mix."""
        contents = [bytes([number]) * (50_000 + number) for number in range(2)]
        storage.write_file("name", contents[0])
        ended = threading.Event()

        def look() -> list[bytes]:
            """Collect what should not be."""
            other, wrong = self.make_storage(place), []
            while not ended.is_set():
                try:
                    seen = other.read("name")
                except (NotFoundError, IncompleteError, StorageError) as error:
                    seen = repr(error).encode()
                if seen not in contents:
                    wrong.append(seen[:100])
            return wrong

        with ThreadPoolExecutor(2) as pool:
            looks = [pool.submit(look) for _ in range(2)]
            try:
                for turn in range(self.publish_turns):
                    storage.write_file("temporary", contents[turn % 2], durable=False)
                    storage.publish("temporary", "name")
            finally:
                ended.set()
            assert [found.result() for found in looks] == [[], []]

    def test_checkpoints_are_saved_loaded_and_replaced(self, place: Path) -> None:
        """The whole way: two saves into one place, the second one is loaded, and nothing of the first is left."""
        files = []
        for value in (1.0, 2.0):
            state = {"weight": np.full((50, 40), value), "step": int(value), "name": "run"}
            api.save(state, storage_writer=FileSystemWriter(storage=self.make_storage(place)))
            target: dict[str, Any] = {"weight": np.zeros((50, 40)), "step": 0, "name": ""}
            api.load(target, storage_reader=FileSystemReader(storage=self.make_storage(place)))
            assert (target["step"], target["name"]) == (int(value), "run")
            assert (target["weight"] == value).all()
            files.append(self.make_storage(place).list())
        assert len(files[0]) == len(files[1]) == 3

    def test_what_a_process_wrote_others_read(self, place: Path) -> None:
        """Ranks on other hosts have storage objects of their own."""
        self.make_storage(place).prepare()
        self.run_in_ranks(self._write_own, 3, str(place))
        found = self.run_in_ranks(self._read_all, 2, str(place))
        assert found == [[_content(5000, rank) for rank in range(3)]] * 2

    def _write_own(self, context: RankContext, given: Any, place: str) -> None:
        """A job: write one file."""
        storage = self.make_storage(Path(place))
        storage.prepare()
        storage.write_file(f"rank{context.rank}", _content(5000, context.rank))
        storage.sync()

    def _read_all(self, context: RankContext, given: Any, place: str) -> list[bytes]:
        """A job: read what all ranks of the other one wrote."""
        storage = self.make_storage(Path(place))
        return [storage.read(name) for name in storage.list()]
