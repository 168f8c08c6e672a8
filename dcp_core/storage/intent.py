"""The intent record of a save: who is writing, whether it still lives.

A save puts `.intent-<id>` into the directory before its first file and removes it after its last deed; a save
of one rank alone puts `.intent-<id>-<rank>`, so that nobody must open thousands of records to find the ones that
concern a rank. The record's time is its heartbeat.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from dcp_core.errors import ArgumentError, DcpError
from dcp_core.file_names import INTENT_PREFIX
from dcp_core.storage.base import Storage

HEARTBEAT_INTERVAL_SECONDS = 30.0
HEARTBEAT_EXPIRY_SECONDS = 900.0

_LOG = logging.getLogger("dcp.storage")
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_INTENT_NAME = re.compile(rf"{re.escape(INTENT_PREFIX)}([0-9a-f]{{32}})(?:-(0|[1-9][0-9]{{0,9}}))?")
_RECORD_LIMIT = 64 * 1024
_STOP_SECONDS = 10.0
# Saves of this process that are over, but whose records the storage did not let us remove.
_ended: set[str] = set()


@dataclass(frozen=True, slots=True)
class Opening:
    """A save that has begun.

    Attributes:
        save_id: 32 hex digits.
        suffix: What its data files carry in their names: "" or "." and the id.
        rank: The rank that saves alone; None for a save of all ranks.
    """

    save_id: str
    suffix: str
    rank: int | None = None

    def __post_init__(self) -> None:
        check_save_id(self.save_id)
        if self.suffix not in ("", f".{self.save_id}"):
            raise ArgumentError(f"suffix {self.suffix!r} does not belong to save {self.save_id}")

    @property
    def intent_name(self) -> str:
        """The name of its record."""
        return intent_name(self.save_id, self.rank)


@dataclass(frozen=True, slots=True)
class Owner:
    """The process behind a save.

    Attributes:
        host: Name of its machine.
        boot: Identifies the machine's present run; "" where unknown.
        namespace: Identifies the space its process id is valid in (containers have their own); "" where unknown.
        pid: Its process id.
        started: When it started, in ticks since boot: tells it from a later process with the same id.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: int

    @staticmethod
    def current() -> Owner:
        """Describe this process."""
        pid = os.getpid()
        return Owner(socket.gethostname(), _boot_id(), _namespace(), pid, _process_start(pid) or 0)

    def is_gone(self) -> bool:
        """Return whether the process is proven gone: only for one that ran here, in this run of the machine."""
        here = Owner.current()
        if not here.boot or not here.namespace or not self.started or self.pid <= 0:
            return False
        if (self.host, self.boot, self.namespace) != (here.host, here.boot, here.namespace):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):  # it belongs to somebody else
            return False
        return _process_start(self.pid) not in (self.started, None)


def check_save_id(save_id: str) -> None:
    """Check that a save's id is 32 hex digits."""
    if not _SAVE_ID.fullmatch(save_id):
        raise ArgumentError(f"{save_id!r} is no save id: expected 32 lower-case hex digits")


def intent_name(save_id: str, rank: int | None) -> str:
    """Name the intent record of a save.

    >>> intent_name("0" * 32, 3)
    '.intent-00000000000000000000000000000000-3'
    """
    return f"{INTENT_PREFIX}{save_id}" + ("" if rank is None else f"-{rank}")


def parse_intent_name(name: str) -> tuple[str, int | None] | None:
    """Undo `intent_name`: (save id, rank); None for another name."""
    match = _INTENT_NAME.fullmatch(name)
    return (match[1], int(match[2]) if match[2] else None) if match else None


def post_intent(storage: Storage, save_id: str, rank: int | None) -> None:
    """Put a save's intent record into the directory, whole or not at all.

    Raises:
        StorageError: If the storage refuses; nothing stays.
    """
    name = intent_name(save_id, rank)
    fields = asdict(Owner.current()) | {"since": time.time(), "rank": rank}
    try:
        storage.put(name, json.dumps(fields).encode(), temporary=f"{name}.tmp", durable=False)
    except BaseException:
        with suppress(DcpError):
            storage.remove(f"{name}.tmp")
        raise


def is_dead(storage: Storage, name: str, now_seconds: float) -> bool:
    """Return whether the save behind an intent record is proven dead.

    Args:
        storage: The directory.
        name: Name of the record.
        now_seconds: The present by the storage's clock.
    """
    parsed = parse_intent_name(name)
    modified = storage.modified_seconds(name)
    if parsed is not None and parsed[0] in _ended:
        return True
    if modified is None or now_seconds - modified > HEARTBEAT_EXPIRY_SECONDS:
        return modified is not None
    owner = _read_owner(storage, name)
    return owner is not None and owner.is_gone()


def retire_intent(storage: Storage, save_id: str, rank: int | None) -> None:
    """Remove the intent record of a save that is over; if the storage refuses, later saves of this process know."""
    try:
        storage.remove(intent_name(save_id, rank))
        _ended.discard(save_id)
    except DcpError as error:
        _ended.add(save_id)
        _LOG.warning("%s", error)


def leave_intent(save_id: str) -> None:
    """Say that a save is over that could not clean up after itself: its record stays, for another save to do so."""
    _ended.add(save_id)


@contextmanager
def heartbeat(
    storage: Storage, opening: Opening, *, interval_seconds: float = HEARTBEAT_INTERVAL_SECONDS
) -> Iterator[None]:
    """Keep a save's intent record fresh while the block runs, from a thread."""
    stopped = threading.Event()

    def beat() -> None:
        while not stopped.wait(interval_seconds):
            try:
                storage.touch(opening.intent_name)
            except DcpError as error:
                _LOG.warning("save %s: no heartbeat: %s", opening.save_id, error)

    thread = threading.Thread(target=beat, name=f"dcp-heartbeat-{opening.save_id[:8]}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(_STOP_SECONDS)


def _read_owner(storage: Storage, name: str) -> Owner | None:
    """Read who is behind a record; None when it cannot be told."""
    try:
        if (storage.size(name) or 0) > _RECORD_LIMIT:
            return None
        fields = json.loads(storage.read(name))
        host, boot, namespace = (str(fields[key]) for key in ("host", "boot", "namespace"))
        return Owner(host, boot, namespace, int(fields["pid"]), int(fields["started"]))
    except (DcpError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _process_start(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; -1 when only its remains are left, None when unknown."""
    try:
        with open(f"/proc/{pid:d}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before may hold anything
        return -1 if fields[0] in (b"Z", b"X", b"x") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
