"""What strangers put into a directory of checkpoints, beside the files that are loaded: records of saves, messages in
mailboxes, names and links. Nothing is taken for ours that we did not make, and nothing raises what is no error of ours.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.background.joining import Meeting, join_without_channel
from dcp_core.background.mailbox import Mailbox
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.coordination.exchange import Exchange, forget
from dcp_core.coordination.frames import FRAME_BYTES, Frame, FrameKind, encode_frame
from dcp_core.errors import DcpError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.execution.object_mailbox import ObjectMailbox
from dcp_core.file_names import (
    data_file_name,
    parse_data_file_name,
    parse_rank_metadata_name,
    rank_metadata_name,
)
from dcp_core.formats.metadata_file import file_names
from dcp_core.manager.latest import latest_checkpoint
from dcp_core.manager.survey import step_of
from dcp_core.storage.commit import begin
from dcp_core.storage.fsspec_storage import FsspecStorage
from dcp_core.storage.intent import (
    HEARTBEAT_EXPIRY_SECONDS,
    Owner,
    intent_name,
    is_dead,
    parse_intent_name,
    retire_intent,
)
from dcp_core.storage.leftovers import parse_mailbox_name, parse_temporary_name, temporary_name
from dcp_core.storage.local import LocalStorage
from tests.core.fault_jobs import memory_directory

pytestmark = pytest.mark.timeout(170)

SAVE_ID = "b" * 32
QUICK = settings(max_examples=40)
_STAGE = "meet"
_PIECES = st.sampled_from(
    [
        "_rank", "_", ".", "-", "0", "1", "00", "9" * 10, "9" * 11, "\u0661", "a" * 32, "A" * 32,
        "safetensors", "bytes",
        ".metadata", ".intent-", ".mailbox-", ".tmp", "join",
        "\n", " ", "\0", "/", "..", "\udcff", "hello", "welcome",
    ]
)  # fmt: skip
NAMES = st.lists(_PIECES, min_size=1, max_size=8).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
FIELDS = ("host", "boot", "namespace", "pid", "started", "since", "rank")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


# --- records of saves --------------------------------------------------------------------------------


def _is_dead(place: Path, content: bytes) -> bool:
    name = intent_name(SAVE_ID, None)
    (place / name).write_bytes(content)
    storage = LocalStorage(place)
    return is_dead(storage, name, storage.modified_seconds(name) or 0.0)


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES) | VALUES)
def test_a_fresh_record_of_a_stranger_is_never_taken_for_a_dead_one(place: Path, value: Any) -> None:
    assert not _is_dead(place, json.dumps(value).encode("utf-8", "surrogatepass"))


@given(st.binary(max_size=200))
def test_a_fresh_record_of_junk_is_never_taken_for_a_dead_one(place: Path, junk: bytes) -> None:
    assert not _is_dead(place, junk)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 60_000,
        b'{"host": "", "boot": "", "namespace": "", "pid": 1e400, "started": 1}',
        b'{"host": "", "boot": "", "namespace": "", "pid": NaN, "started": 1}',
        b'{"host": "", "boot": "", "namespace": "", "pid": ' + b"9" * 5000 + b', "started": 1}',
        b'{"host": "", "boot": "", "namespace": "", "pid": [1], "started": {}}',
        b'{"pid": 1}',
        b"[1, 2]",
        b"null",
        b"\xff\xfe\x00",
        b"",
    ],
)
def test_a_fresh_record_that_makes_no_sense_is_never_taken_for_a_dead_one(place: Path, content: bytes) -> None:
    assert not _is_dead(place, content)


_PIDS = st.sampled_from((0, -1, -4, 1, os.getpid(), 2**22 + 9, 2**31 - 1, 2**31, 2**63, 10**30))


def _fields_of(pid: int, **others: Any) -> dict[str, Any]:
    """A record of a process of this machine, in this run of it."""
    here = Owner.current()
    return {"host": here.host, "boot": here.boot, "namespace": here.namespace, "pid": pid, "started": 1, **others}


@given(_PIDS | VALUES, st.dictionaries(st.sampled_from(("started", "since", "rank")), VALUES))
def test_a_record_that_claims_to_be_of_this_machine_harms_no_process(
    place: Path, pid: Any, changes: dict[str, Any]
) -> None:
    fields = _fields_of(os.getpid())
    heard: list[int] = []
    kill = os.kill

    def hear(pid: int, number: int) -> None:
        heard.append(number)
        kill(pid, number)

    with mock.patch.object(os, "kill", hear):
        assert _is_dead(place, json.dumps(fields | changes | {"pid": pid}).encode()) in (True, False)
    assert set(heard) <= {0}


@pytest.mark.parametrize("pid", [0, -1, -(2**22) - 9, 2**31, 2**63, 10**30])
def test_a_record_of_what_can_be_no_process_proves_no_death(place: Path, pid: int) -> None:
    assert not _is_dead(place, json.dumps(_fields_of(pid)).encode())


@pytest.mark.parametrize("changes", [{"host": "another"}, {"boot": "another"}, {"namespace": "pid:[1]"}])
def test_a_process_of_elsewhere_is_not_looked_for_here(place: Path, changes: dict[str, str]) -> None:
    assert _is_dead(place, json.dumps(_fields_of(_ended_pid())).encode())
    assert not _is_dead(place, json.dumps(_fields_of(_ended_pid()) | changes).encode())


def _ended_pid() -> int:
    """The id of a process that was there a moment ago."""
    with subprocess.Popen(["true"]) as child:
        return child.pid


@QUICK
@given(st.lists(st.tuples(NAMES, st.binary(max_size=30)), max_size=6))
def test_a_save_into_a_directory_of_a_strangers_files_removes_none_that_it_does_not_own(
    place: Path, files: list[tuple[str, bytes]]
) -> None:
    directory = place / uuid.uuid4().hex
    directory.mkdir()
    kept = set()
    for name, content in files:
        with suppress(OSError, ValueError):
            (directory / name.replace("/", "-")).write_bytes(content)
            kept.add(name.replace("/", "-"))
    made = {name for name in kept if _may_go(name)}
    assert kept - made <= _swept(directory)


_NEARLY = (
    f".intent-{SAVE_ID}-01", f".intent-{SAVE_ID}x", f".intent-{SAVE_ID}.old", f".intent-{SAVE_ID[1:]}",
    f"x.intent-{SAVE_ID}", ".intent-", f".Intent-{SAVE_ID}", ".intent-notes.tmp", f".intent-{SAVE_ID[1:]}.tmp",
    f".intent-{SAVE_ID}.tmp.old",
    f".metadata.{SAVE_ID}.tmp.old", f"x.metadata.{SAVE_ID}.tmp", f".metadata.{SAVE_ID[1:]}.tmp", ".metadata.tmp",
    "_rank0_.safetensors.old", f"_rank0_.{SAVE_ID}.safetensors.old", "_rank0_.bin", "_rank00_.safetensors",
    "x_rank0_.safetensors", f"_rank0_.{SAVE_ID[1:]}.bytes", "_rank0_0_.bytes", "_rank_.bytes", "rank0.bytes",
    "00.metadata", "x0.metadata", "0.metadata.old",
)  # fmt: skip
"""What is nearly called as a file of a save."""

_NEARLY_MAILBOXES = (f".mailbox-{SAVE_ID}x", f".mailbox-{SAVE_ID[1:]}", ".mailbox-joint", ".mailbox-", "x.mailbox-join")


def _swept(directory: Path) -> set[str]:
    """What is left once a save into the directory has begun, and ended."""
    storage = LocalStorage(directory)
    retire_intent(storage, begin(storage, "c" * 32, rank=None, files_of=file_names).save_id, None)
    return set(os.listdir(directory))


def test_names_that_are_nearly_ours_stay_however_old_and_though_they_tell_of_a_dead_process(tmp_path: Path) -> None:
    record = json.dumps(_fields_of(_ended_pid())).encode()
    for name in _NEARLY:
        (tmp_path / name).write_bytes(record)
    for name in _NEARLY_MAILBOXES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "message").write_bytes(b"mine")
    made = set(os.listdir(tmp_path))
    assert len(made) == len(_NEARLY) + len(_NEARLY_MAILBOXES)
    assert _swept(tmp_path) == made
    for name in made:
        os.utime(tmp_path / name, (0, 0))
    assert _swept(tmp_path) == made
    assert all((tmp_path / name / "message").exists() for name in _NEARLY_MAILBOXES)


def test_what_may_be_of_a_save_that_lives_stays(tmp_path: Path) -> None:
    """Fresh: a record whose process nobody knows, half a record, a mailbox before its record, files of all of them."""
    foreign = json.dumps(_fields_of(_ended_pid(), host="another")).encode()
    (tmp_path / intent_name(SAVE_ID, None)).write_bytes(foreign)
    (tmp_path / f"{intent_name('a' * 32, None)}.tmp").write_bytes(b"{")
    for name in (data_file_name(0, 0, 0, f".{SAVE_ID}"), data_file_name(3, 0, 1, ""), f".metadata.{SAVE_ID}.tmp"):
        (tmp_path / name).write_bytes(b"its own")
    for mailbox in (SAVE_ID, "d" * 32, "join"):
        (tmp_path / f".mailbox-{mailbox}").mkdir()
    made = set(os.listdir(tmp_path))
    assert _swept(tmp_path) == made


@pytest.mark.parametrize("name", [".metadata", "3.metadata"])
def test_where_a_description_cannot_be_read_every_data_file_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"of a program that nobody knows")
    for file in (data_file_name(0, 0, 0, f".{SAVE_ID}"), data_file_name(3, 0, 1, "")):
        (tmp_path / file).write_bytes(b"named there, perhaps")
    made = set(os.listdir(tmp_path))
    for old in made:
        os.utime(tmp_path / old, (0, 0))
    assert _swept(tmp_path) == made


def test_a_record_that_cannot_be_removed_does_not_keep_what_other_dead_saves_left(tmp_path: Path) -> None:
    long_ago = time.time() - 2 * HEARTBEAT_EXPIRY_SECONDS
    (tmp_path / intent_name("a" * 32, None)).mkdir()
    (tmp_path / intent_name(SAVE_ID, None)).write_bytes(b"{}")
    kept, gone = (data_file_name(0, 0, 0, f".{save_id}") for save_id in ("a" * 32, SAVE_ID))
    for name in (kept, gone):
        (tmp_path / name).write_bytes(b"x")
    for name in os.listdir(tmp_path):
        os.utime(tmp_path / name, (long_ago, long_ago))
    assert sorted(_swept(tmp_path)) == [intent_name("a" * 32, None), kept]


def _may_go(name: str) -> bool:
    """Whether a dead save may have left it."""
    return any(parse(name) is not None for parse in (parse_data_file_name, parse_temporary_name, parse_intent_name))


@given(NAMES)
def test_names_are_read_only_as_they_are_written(name: str) -> None:
    found = parse_data_file_name(name)
    assert found is None or data_file_name(*found) == name
    rank = parse_rank_metadata_name(name)
    assert rank is None or rank_metadata_name(rank) == name
    intent = parse_intent_name(name)
    assert intent is None or intent_name(*intent) == name
    temporary = parse_temporary_name(name)
    assert (
        temporary is None
        or temporary_name(f"{'' if temporary[0] is None else temporary[0]}.metadata", temporary[1]) == name
    )
    mailbox = parse_mailbox_name(name)
    assert mailbox is None or (f".mailbox-{mailbox}" == name and re.fullmatch("[0-9a-f]{32}|join", mailbox))
    assert (step_of(name) or 0) >= 0


# --- messages ----------------------------------------------------------------------------------------

_BODIES = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(
        st.sampled_from(("kind", "message", "causes")),
        VALUES | st.lists(st.dictionaries(st.sampled_from(("rank", "kind", "message", "detail")), VALUES), max_size=3),
    ).map(lambda fields: json.dumps(fields).encode("utf-8", "surrogatepass")),
)
_FRAMES = st.builds(
    lambda kind, label, body: encode_frame(Frame(kind, label, body)),
    st.sampled_from(FrameKind), st.sampled_from(("", _STAGE, "other")), _BODIES,
)  # fmt: skip
MESSAGES = st.one_of(st.binary(max_size=FRAME_BYTES * 2), _FRAMES)


def _meet(channel: Any, rank: int, *, key: str = "k") -> None:
    """Meet the other of two ranks; only an error of ours may come of it."""
    forget(key, rank)
    side = Exchange(rank, 2, channel, key=key, timeout_seconds=0.002)
    with suppress(DcpError):
        side.run(_STAGE, b"mine", compute=lambda payloads: payloads[1])


@QUICK
@given(MESSAGES, st.sampled_from((0, 1)))
def test_what_a_stranger_puts_into_a_mailbox_of_files_is_an_error_of_ours(place: Path, raw: bytes, rank: int) -> None:
    directory = place / "mailbox"
    directory.mkdir(exist_ok=True)
    for name in ("k.0.1", "k.0.answers", "k.0.1.answer"):
        (directory / name).write_bytes(raw)
    _meet(DirectoryChannel(directory), rank)


@QUICK
@given(MESSAGES, MESSAGES, st.sampled_from((0, 1)))
def test_what_a_stranger_puts_into_the_mailbox_of_a_save_is_an_error_of_ours(
    place: Path, raw: bytes, abort: bytes, rank: int
) -> None:
    folder = FileSystemWriter(place / "saved").open_mailbox(SAVE_ID)
    assert folder is not None
    (place / "saved" / f".mailbox-{SAVE_ID}").mkdir(parents=True, exist_ok=True)
    for name, content in (
        (f"{SAVE_ID}.0.1", raw),
        (f"{SAVE_ID}.0.answers", raw),
        (f"{SAVE_ID}.abort.{1 - rank}", abort),
    ):
        folder.put(name, content)
    _meet(Mailbox(folder, rank, 2, key=SAVE_ID, is_committed=lambda: False), rank, key=SAVE_ID)


@QUICK
@given(MESSAGES, st.sampled_from((0, 1)))
def test_what_a_stranger_puts_into_a_mailbox_of_objects_is_an_error_of_ours(raw: bytes, rank: int) -> None:
    storage = FsspecStorage(f"memory://hostile-{os.getpid()}")
    mailbox = ObjectMailbox(storage, f".mailbox-{SAVE_ID}")
    mailbox.prepare()
    objects = storage.folder(f".mailbox-{SAVE_ID}")
    for name in ("k.0.1", "k.0.answers", "k.0.1.answer"):
        objects.put(name, raw or b"\0", temporary=f".{name}.tmp")  # as it is: without the byte that ours begin with
    _meet(mailbox, rank)
    mailbox.remove()


@QUICK
@given(st.lists(NAMES, max_size=8), st.binary(max_size=40))
def test_names_in_the_place_where_ranks_meet_are_answered_only_if_they_are_of_the_meeting(
    place: Path, names: list[str], content: bytes
) -> None:
    writer = FileSystemWriter(place / "met")
    directory = place / "met" / ".mailbox-join"
    directory.mkdir(parents=True, exist_ok=True)
    meeting = Meeting(0, 3, "the group", 1)
    hello = meeting.name("hello", 1, "0" * 32)
    wrong = [meeting.name("hello", 7, "1" * 32), meeting.name("hello", 0, "2" * 32), f"hello.{'0' * 16}.1.1.{'3' * 32}"]
    strangers = [name.replace("/", "-") for name in names]
    for name in (*strangers, *wrong, hello):
        with suppress(OSError, ValueError):
            (directory / name).write_bytes(content)
    mailbox = join_without_channel(
        writer.open_mailbox, meeting, is_committed=lambda save_id: False, timeout_seconds=1.0
    )
    before = set(os.listdir(directory))
    reception: Any = mailbox._reception
    reception.attend()
    made = set(os.listdir(directory)) - before
    assert made == {meeting.name("welcome", 1, "0" * 32)}
    reception.close()
    kept = {name for name in strangers if not name.startswith(("hello", "welcome"))} & before
    assert kept <= set(os.listdir(directory))
    shutil.rmtree(place / "met")


def test_a_pipe_in_the_place_of_a_message_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "name")
    channel = DirectoryChannel(tmp_path)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(OSError, match="no regular file"):
            channel.wait("name", 0.1)
        ended.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert ended.wait(60)
    thread.join()


def test_what_is_no_message_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    channel = DirectoryChannel(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(IsADirectoryError):
            channel.wait("name", 0.0)
        with pytest.raises(OSError, match="symbolic links"):
            channel.wait("link", 0.0)
    assert len(os.listdir("/proc/self/fd")) == before


# --- directories of checkpoints ----------------------------------------------------------------------


@QUICK
@given(
    st.lists(st.tuples(NAMES, NAMES, st.binary(max_size=40)), max_size=5),
    st.sampled_from(("..", "/", "latest", "step_1/../..", "\u0661", "nowhere", "step_\n9")),
)
def test_a_root_full_of_a_strangers_directories_gives_no_checkpoint_and_no_other_error(
    place: Path, made: list[tuple[str, str, bytes]], target: str
) -> None:
    root = place / uuid.uuid4().hex
    root.mkdir()
    (root / "latest").symlink_to(target)
    (root / "step_99999999999999999999").mkdir()
    for directory, name, content in made:
        with suppress(OSError, ValueError):
            (root / directory.replace("/", "-")).mkdir(exist_ok=True)
            (root / directory.replace("/", "-") / name.replace("/", "-")).write_bytes(content)
    with suppress(DcpError):
        assert latest_checkpoint(root, no_dist=True) is None
