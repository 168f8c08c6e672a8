"""Files in a directory: every byte arrives, every refusal names file and remedy, nothing outside is touched."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.errors import ArgumentError, CorruptError, IncompleteError, NotFoundError, StorageError
from dcp_core.storage import local_handles, operations
from dcp_core.storage.base import ReadHandle, Storage, check_name, storage_error
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import BytesLike, FileOperations
from dcp_core.testing.faults import FaultyOperations

_HOSTILE_NAMES = ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\0b", "..\\x", "\ud800"]


class _SparseOperations(FileOperations):
    """Reserves no space, so that a file of many GiB costs nothing."""

    def preallocate(self, descriptor: int, nbytes: int, path: str) -> None:
        os.ftruncate(descriptor, nbytes)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


# --- names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _HOSTILE_NAMES)
def test_no_operation_leaves_the_directory(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "step"
    directory.mkdir()
    (tmp_path / "x").write_bytes(b"outside")
    storage = LocalStorage(directory)
    calls: list[Callable[[], object]] = [
        lambda: storage.size(name),
        lambda: storage.modified_seconds(name),
        lambda: storage.open_read(name),
        lambda: storage.read(name),
        lambda: storage.create(name, 1),
        lambda: storage.write_file(name, b"x"),
        lambda: storage.publish(name, "ok"),
        lambda: storage.publish("ok", name),
        lambda: storage.remove(name),
        lambda: storage.remove_directory(name),
        lambda: storage.touch(name),
        lambda: storage.exists(name),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="is no name of a file"):
            call()
    assert (tmp_path / "x").read_bytes() == b"outside"
    assert list(directory.iterdir()) == []


def test_a_bad_name_out_of_a_file_is_corruption() -> None:
    with pytest.raises(CorruptError):
        check_name("../x", CorruptError)


@pytest.mark.parametrize("name", ["a b", "ä", "名前", "-rf", "a\nb", "..a", "x" * 255, "'; rm *", "~", "$HOME", "%s"])
def test_odd_names_are_fine(storage: LocalStorage, name: str) -> None:
    storage.write_file(name, b"content")
    assert storage.list() == [name]
    assert storage.read(name) == b"content"


def test_a_name_that_is_too_long_is_an_error_of_ours(storage: LocalStorage) -> None:
    with pytest.raises(StorageError) as caught:
        storage.write_file("x" * 256, b"")
    assert caught.value.errno == errno.ENAMETOOLONG


# --- writing -----------------------------------------------------------------------------------------


@given(
    pieces=st.lists(st.binary(max_size=40), max_size=12),
    start=st.integers(0, 20),
    max_io_bytes=st.integers(1, 50),
    max_buffers=st.integers(1, 5),
    max_call=st.integers(1, 60),
)
def test_buffers_land_one_after_another_however_calls_are_cut(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[bytes],
    start: int,
    max_io_bytes: int,
    max_buffers: int,
    max_call: int,
) -> None:
    storage = LocalStorage(tmp_path_factory.mktemp("cut"), FaultyOperations(max_io_bytes=max_io_bytes))
    whole = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_handles, "_MAX_CALL_BUFFERS", max_buffers)
        patch.setattr(local_handles, "_MAX_CALL_BYTES", max_call)
        with storage.create("a", start + len(whole) + 3) as handle:
            handle.write(start, pieces)
        with storage.open_read("a") as reader:
            target = bytearray(reader.nbytes)
            reader.read_into(0, memoryview(target))
    assert bytes(target) == b"\0" * start + whole + b"\0" * 3


def test_more_buffers_than_one_call_takes_are_written(storage: LocalStorage) -> None:
    pieces = [bytes([number % 251]) * (number % 3) for number in range(5000)]
    with storage.create("a", sum(map(len, pieces))) as handle:
        handle.write(0, pieces)
    assert storage.read("a") == b"".join(pieces)


def test_memory_of_any_shape_is_written_as_bytes(storage: LocalStorage) -> None:
    grid = memoryview(bytearray(range(24))).cast("B", (2, 3, 4))
    wide = memoryview(bytearray(16)).cast("q")
    empty = memoryview(b"")
    with storage.create("a", 24 + 16 + 3) as handle:
        handle.write(0, [grid, empty, wide, bytearray(b"abc")])
    assert storage.read("a") == bytes(range(24)) + bytes(16) + b"abc"


def test_writing_beyond_the_size_that_was_announced_is_refused(storage: LocalStorage) -> None:
    with storage.create("a", 4) as handle:
        for offset, content in ((0, b"12345"), (4, b"1"), (-1, b"1")):
            with pytest.raises(ArgumentError, match="outside of 'a', made for 4 bytes"):
                handle.write(offset, [content])
        handle.write(4, [b""])
    with pytest.raises(ArgumentError):
        storage.create("b", -1)


def test_a_file_is_created_exclusively(storage: LocalStorage, tmp_path: Path) -> None:
    storage.write_file("a", b"first")
    with pytest.raises(StorageError, match="another save is writing here") as caught:
        storage.create("a", 3)
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "a").read_bytes() == b"first"


@pytest.mark.parametrize("is_dangling", [True, False])
def test_a_file_is_never_created_through_a_link(tmp_path: Path, is_dangling: bool) -> None:
    outside = tmp_path / "outside"
    if not is_dangling:
        outside.write_bytes(b"mine")
    directory = tmp_path / "step"
    directory.mkdir()
    (directory / "a").symlink_to(outside)
    with pytest.raises(StorageError):
        LocalStorage(directory).create("a", 3)
    assert (outside.read_bytes() if outside.exists() else None) == (None if is_dangling else b"mine")


def test_a_new_file_has_its_full_size_and_its_space_at_once(storage: LocalStorage, tmp_path: Path) -> None:
    with storage.create("a", 1 << 20):
        found = (tmp_path / "a").stat()
    assert found.st_size == 1 << 20
    assert found.st_blocks * 512 >= 1 << 20 or operations._fallocate is None


def test_a_file_follows_the_umask(storage: LocalStorage, tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        storage.write_file("a", b"")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_file_that_cannot_fit_is_refused_before_it_is_written(storage: LocalStorage) -> None:
    with pytest.raises(
        StorageError, match=r"reserve \d+ bytes for 'a'.*bytes needed, \d+ available.*free some"
    ) as caught:
        storage.create("a", 1 << 60)
    assert caught.value.errno == errno.ENOSPC
    assert storage.list() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_what_the_file_system_says_when_space_is_reserved_is_raised(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(operations, "_fallocate", lambda *_: -1)
    monkeypatch.setattr("ctypes.get_errno", lambda: number)
    with pytest.raises(StorageError) as caught:
        storage.create("a", 10)
    assert caught.value.errno == number
    assert storage.list() == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, None])
def test_where_space_cannot_be_reserved_the_file_gets_its_size(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    monkeypatch.setattr(operations, "_fallocate", None if number is None else lambda *_: -1)
    monkeypatch.setattr("ctypes.get_errno", lambda: number)
    storage.create("a", 10).close()
    assert storage.size("a") == 10


def test_a_file_system_that_does_not_know_its_size_is_believed(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "free_bytes", lambda _: None)
    storage.write_file("a", b"x")
    assert storage.read("a") == b"x"


def test_a_write_that_moves_nothing_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    class Stuck(FileOperations):
        def pwritev(self, descriptor: int, buffers: Sequence[BytesLike], offset: int, path: str) -> int:
            return 0

    storage = LocalStorage(tmp_path, Stuck())
    with pytest.raises(StorageError, match="accepted no bytes"):
        storage.write_file("a", b"x")
    assert storage.list() == []


@pytest.mark.parametrize("operation", ["create", "preallocate", "pwritev", "fsync", "close_written"])
def test_a_file_whose_writing_fails_is_removed_and_no_descriptor_stays(tmp_path: Path, operation: str) -> None:
    before = os.listdir("/proc/self/fd")
    storage = LocalStorage(tmp_path, FaultyOperations(fail_at=1, operations=[operation], error_number=errno.EIO))
    with pytest.raises(StorageError, match="EIO"):
        storage.write_file("a", b"x")
    assert storage.list() == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_first_error_of_a_write_hides_the_one_of_its_close(tmp_path: Path) -> None:
    faulty = FaultyOperations(
        fail_at=1, forever=True, error_number=errno.ENOSPC, operations=["pwritev", "close_written"]
    )
    with (
        pytest.raises(StorageError, match="could not write 'a'"),
        LocalStorage(tmp_path, faulty).create("a", 1) as handle,
    ):
        handle.write(0, [b"x"])


def test_closing_twice_is_fine(storage: LocalStorage) -> None:
    handle = storage.create("a", 0)
    handle.close()
    handle.close()
    reader = storage.open_read("a")
    reader.close()
    reader.close()


# --- reading -----------------------------------------------------------------------------------------


def test_a_part_of_a_file_is_read(storage: LocalStorage) -> None:
    storage.write_file("a", b"0123456789")
    assert storage.read("a", 3, 4) == b"3456"
    assert storage.read("a", 8) == b"89"
    assert storage.read("a", 10) == b""


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 11), (11, 0), (-1, 2), (3, 1 << 60), (3, -1)])
def test_bytes_that_are_not_there_are_refused_before_memory_is_taken(
    storage: LocalStorage, offset: int, nbytes: int
) -> None:
    storage.write_file("a", b"0123456789")
    with pytest.raises(IncompleteError, match="'a' in .* holds 10 bytes"):
        storage.read("a", offset, nbytes)


def test_a_file_that_is_cut_short_while_it_is_read_is_incomplete(storage: LocalStorage, tmp_path: Path) -> None:
    storage.write_file("a", b"0123456789")
    with storage.open_read("a") as handle:
        os.truncate(tmp_path / "a", 6)
        with pytest.raises(IncompleteError, match="'a' in .* ends at byte 6: expected bytes up to 10"):
            handle.read_into(2, memoryview(bytearray(8)))


def test_reading_lands_in_memory_of_any_shape(storage: LocalStorage) -> None:
    storage.write_file("a", bytes(range(24)))
    target = bytearray(24)
    with storage.open_read("a") as handle:
        handle.read_into(0, memoryview(target).cast("B", (2, 3, 4)))
        handle.read_into(0, memoryview(bytearray()))
    assert target == bytes(range(24))


class PlainHandle(ReadHandle):
    """A handle of a storage that fills one place at a time."""

    def __init__(self, content: bytes) -> None:
        self.name, self.nbytes, self._content = "a", len(content), content
        self.calls = 0

    def read_into(self, offset: int, target: memoryview) -> None:
        self.calls += 1
        target[:] = self._content[offset : offset + len(target)]

    def close(self) -> None:
        return


@pytest.mark.parametrize("most", [None, 1, 3, 7, 1000])
@pytest.mark.parametrize("lengths", [[], [0], [5], [0, 3, 0, 0, 4, 1, 0], [1] * 2500, [700, 1, 0, 299]], ids=len)
def test_one_read_fills_many_places_however_many_bytes_a_call_brings(
    lengths: list[int], most: int | None, tmp_path: Path
) -> None:
    content = os.urandom(3000)
    storage = LocalStorage(tmp_path, FaultyOperations(max_io_bytes=most))
    storage.write_file("a", content)
    plain = PlainHandle(content)
    with storage.open_read("a") as handle:
        for reader in (handle, plain):
            parts = [bytearray(length) for length in lengths]
            reader.read_scattered(100, [memoryview(part) for part in parts])
            assert b"".join(parts) == content[100 : 100 + sum(lengths)]
    assert plain.calls == 1


def test_a_read_of_many_places_beyond_the_end_is_incomplete(storage: LocalStorage) -> None:
    storage.write_file("a", b"0123456789")
    parts = [memoryview(bytearray(4)) for _ in range(3)]
    with storage.open_read("a") as handle:
        with pytest.raises(IncompleteError, match="'a' in .* ends at byte 10: expected bytes up to 14"):
            handle.read_scattered(2, parts)
        with pytest.raises(IncompleteError, match="ends at byte 10: expected bytes up to 22"):
            handle.read_scattered(10, parts)


def test_several_threads_read_from_one_handle(storage: LocalStorage) -> None:
    content = os.urandom(1 << 18)
    storage.write_file("a", content)
    parts = [bytearray(1 << 16) for _ in range(4)]
    with storage.open_read("a") as handle:
        threads = [
            threading.Thread(target=handle.read_into, args=(number << 16, memoryview(part)))
            for number, part in enumerate(parts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert b"".join(parts) == content


def test_a_missing_file_is_not_found(storage: LocalStorage) -> None:
    assert storage.size("a") is None
    assert not storage.exists("a")
    assert storage.modified_seconds("a") is None
    for call in (storage.open_read, storage.read, storage.touch):
        with pytest.raises(NotFoundError, match="there is no 'a' in"):
            call("a")
    storage.remove("a")
    storage.remove_directory("a")


def test_what_is_no_regular_file_is_never_opened_and_waited_for(storage: LocalStorage, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "directory", "device"):
        with pytest.raises(CorruptError, match="is no regular file"):
            storage.open_read(name)
        with pytest.raises(CorruptError, match="is no regular file"):
            storage.size(name)


def test_links_are_followed_for_reading(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"content")
    directory = tmp_path / "snapshot"
    directory.mkdir()
    (directory / "model.safetensors").symlink_to("../blob")
    storage = LocalStorage(directory)
    assert storage.size("model.safetensors") == 7
    assert storage.read("model.safetensors") == b"content"
    storage.remove("model.safetensors")
    assert (tmp_path / "blob").exists()


# --- directories -------------------------------------------------------------------------------------


def test_the_directory_and_those_above_are_made_and_synced(tmp_path: Path) -> None:
    faulty = FaultyOperations()
    storage = LocalStorage(tmp_path / "a b" / "ü" / "step", faulty)
    storage.prepare()
    storage.prepare()
    storage.sync()
    storage.sync()
    assert [(record.operation, record.name) for record in faulty.log] == [
        ("mkdir", "a b"),
        ("mkdir", "ü"),
        ("mkdir", "step"),
        ("fsync_directory", "step"),
        ("fsync_directory", "ü"),
        ("fsync_directory", "a b"),
        ("fsync_directory", tmp_path.name),
        ("fsync_directory", "step"),
    ]


def test_a_directory_that_another_process_makes_at_the_same_time_is_fine(tmp_path: Path) -> None:
    class Raced(FileOperations):
        def mkdir(self, path: str) -> None:
            os.mkdir(path)
            super().mkdir(path)

    LocalStorage(tmp_path / "a" / "b", Raced()).prepare()
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("kind", ["file", "dangling link", "below a file"])
def test_a_path_that_cannot_be_a_directory_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "step"
    if kind == "dangling link":
        path.symlink_to("/proc/nowhere")
    else:
        path.write_bytes(b"")
    with pytest.raises(StorageError, match="could not make the directory") as caught:
        LocalStorage(path / "inner" if kind == "below a file" else path).prepare()
    assert str(path) in str(caught.value)


def test_a_directory_that_is_missing_cannot_be_listed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "step")
    with pytest.raises(NotFoundError, match=r"no directory .*/step"):
        storage.list()
    assert storage.size(".metadata") is None
    storage.remove("a")
    with pytest.raises(StorageError, match="the directory is gone, or is not on a file system"):
        storage.create("a", 1)


def test_a_link_to_the_directory_is_resolved_once(tmp_path: Path) -> None:
    for name in ("step_1", "step_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    link = tmp_path / "latest"
    link.symlink_to("step_1")
    storage = LocalStorage(link)
    link.unlink()
    link.symlink_to("step_2")
    assert storage.read("a") == b"step_1"
    assert LocalStorage(link).read("a") == b"step_2"
    assert storage.describe() == repr(str(link))


def test_a_relative_path_is_not_moved_by_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("step")
    monkeypatch.chdir("/")
    storage.prepare()
    assert (tmp_path / "step").is_dir()


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_is_none_is_a_bad_argument(path: str) -> None:
    with pytest.raises(ArgumentError):
        LocalStorage(path)


def test_a_directory_inside_is_removed_without_following_links(storage: LocalStorage, tmp_path: Path) -> None:
    inner = tmp_path / "mailbox"
    (inner / "deep").mkdir(parents=True)
    (inner / "deep" / "message").write_bytes(b"x")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"mine")
    (inner / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "mailbox2").symlink_to(tmp_path / "kept")
    storage.remove_directory("mailbox")
    assert not inner.exists()
    storage.remove_directory("mailbox2")
    assert not (tmp_path / "mailbox2").is_symlink()
    assert (tmp_path / "kept" / "file").exists()


def test_publishing_replaces_in_one_step_and_a_link_is_replaced_not_followed(
    storage: LocalStorage, tmp_path: Path
) -> None:
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / ".metadata").symlink_to("target")
    storage.write_file("new", b"new")
    storage.publish("new", ".metadata")
    assert storage.list() == [".metadata", "target"]
    assert storage.read(".metadata") == b"new"
    assert storage.read("target") == b"mine"
    with pytest.raises(StorageError, match="could not rename 'gone' to '.metadata'"):
        storage.publish("gone", ".metadata")


def test_touching_moves_the_time_to_now(storage: LocalStorage, tmp_path: Path) -> None:
    storage.write_file("a", b"x")
    os.utime(tmp_path / "a", (1, 1))
    assert storage.modified_seconds("a") == 1
    storage.touch("a")
    storage.write_file("b", b"x")
    touched, written = storage.modified_seconds("a"), storage.modified_seconds("b")
    assert touched is not None
    assert written is not None
    assert abs(touched - written) < 60


# --- errors ------------------------------------------------------------------------------------------


def test_an_error_names_operation_file_place_reason_and_remedy(storage: LocalStorage, tmp_path: Path) -> None:
    cause = OSError(errno.EROFS, os.strerror(errno.EROFS))
    error = storage_error("create", "a", storage.describe(), cause)
    assert str(error) == (
        f"could not create 'a' in {str(tmp_path)!r}: Read-only file system [EROFS]; "
        "the file system is mounted read-only"
    )
    assert error.errno == errno.EROFS
    assert isinstance(error, OSError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_storage_is_a_few_primitives_with_defaults_over_them() -> None:
    assert len(Storage.__abstractmethods__) == 11


# --- beyond 4 GiB ------------------------------------------------------------------------------------


def _is_sparse(directory: Path) -> bool:
    probe = directory / "probe"
    with open(probe, "wb") as file:
        file.truncate(64 << 20)
    blocks = probe.stat().st_blocks
    probe.unlink()
    return blocks * 512 < 1 << 20


def test_a_file_beyond_4_gib_is_written_and_read_at_any_offset(tmp_path: Path) -> None:
    if not _is_sparse(tmp_path):
        pytest.skip("the file system has no sparse files")
    storage = LocalStorage(tmp_path, _SparseOperations())
    nbytes = (5 << 30) + 7
    places = (0, (2 << 30) - 3, (4 << 30) - 3, nbytes - 6)
    with storage.create("a", nbytes) as handle:
        for place in places:
            handle.write(place, [b"abc", b"def"])
    assert storage.size("a") == nbytes
    for place in places:
        assert storage.read("a", place, 6) == b"abcdef"
    assert storage.read("a", (3 << 30), 4) == b"\0" * 4


def test_memory_beyond_one_call_is_moved_in_several(tmp_path: Path) -> None:
    class Counted(_SparseOperations):
        calls: list[tuple[int, int]]

        def pwritev(self, descriptor: int, buffers: Sequence[BytesLike], offset: int, path: str) -> int:
            self.calls.append((offset, sum(len(buffer) for buffer in buffers)))
            return self.calls[-1][1]  # a file of 5 GiB is not worth the disk

        def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
            self.calls.append((offset, sum(len(buffer) for buffer in buffers)))
            return self.calls[-1][1]

    if sys.maxsize < 1 << 40 or not _is_sparse(tmp_path):
        pytest.skip("needs 64 bits and sparse files")
    counted = Counted()
    counted.calls = []
    limit = local_handles._MAX_CALL_BYTES
    nbytes = 2 * limit + 10
    storage = LocalStorage(tmp_path, counted)
    with mmap.mmap(-1, nbytes) as untouched, memoryview(untouched) as view:
        with storage.create("a", nbytes) as handle:
            handle.write(0, [view[:20], view[20:]])
        assert counted.calls == [(0, limit), (limit, limit), (2 * limit, 10)]
        counted.calls.clear()
        with storage.open_read("a") as reader:
            reader.read_into(0, view)
        assert counted.calls == [(0, limit), (limit, limit), (2 * limit, 10)]
