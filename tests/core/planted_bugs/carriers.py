"""Wrong coordination carriers."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from dcp_core.adapter import KeyValueChannel
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.testing.conformance.carrier import CarrierConformance
from tests.core.planted_bugs import plant

_MIB = 1 << 20


class _Board(DirectoryChannel):
    def __init__(self, place: Path, rank: int) -> None:
        super().__init__(place)
        self.rank = rank


class CutsLargeMessages(_Board):
    def put(self, name: str, payload: bytes) -> None:
        super().put(name, payload[: 8 * _MIB])


class FlipsABit(_Board):
    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        message = super().wait(name, timeout_seconds)
        return bytes([message[0] ^ 1]) + message[1:] if message else message


class GivesMemory(_Board):
    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        message = super().wait(name, timeout_seconds)
        return message if message is None else bytearray(message)  # type: ignore[return-value]  # wrong on purpose


class DeliversOnce(_Board):
    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        message = super().wait(name, timeout_seconds)
        self.delete(name)
        return message


class LooksOnce(_Board):
    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        message = super().wait(name, 0.0)
        if message is None:
            time.sleep(timeout_seconds)
        return message


class LooksOnlyWhenItHasTime(_Board):
    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        return super().wait(name, timeout_seconds) if timeout_seconds > 0 else None


class IgnoresCase(_Board):
    def put(self, name: str, payload: bytes) -> None:
        super().put(name.lower(), payload)

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        return super().wait(name.lower(), timeout_seconds)


class ShortensNames(_Board):
    def put(self, name: str, payload: bytes) -> None:
        super().put(name[:64], payload)

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        return super().wait(name[:64], timeout_seconds)


class WaitsPastItsDeadline(_Board):
    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        return super().wait(name, timeout_seconds + (1.0 if timeout_seconds else 0.0))


class GivesUpEarly(_Board):
    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        return super().wait(name, timeout_seconds / 4)


class TalksOrListens(_Board):
    lock = threading.Lock()

    def put(self, name: str, payload: bytes) -> None:
        with self.lock:
            super().put(name, payload)

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        with self.lock:
            return super().wait(name, timeout_seconds)


class RemovesItsOwnOnly(_Board):
    def __init__(self, place: Path, rank: int) -> None:
        super().__init__(place, rank)
        self.posted: set[str] = set()

    def put(self, name: str, payload: bytes) -> None:
        self.posted.add(name)
        super().put(name, payload)

    def delete(self, name: str) -> None:
        if name in self.posted:
            super().delete(name)


class CannotRemoveTwice(_Board):
    def delete(self, name: str) -> None:
        os.unlink(os.path.join(self.path, name))


class DeliversWhatItReadBefore(_Board):
    def __init__(self, place: Path, rank: int) -> None:
        super().__init__(place, rank)
        self.read: dict[str, bytes] = {}

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        message = super().wait(name, timeout_seconds)
        return message if message is None else self.read.setdefault(name, message)


class HasOneBoard(_Board):
    def __init__(self, place: Path, rank: int) -> None:
        super().__init__(place.parent / "board", rank)


class LosesMessages(_Board):
    def put(self, name: str, payload: bytes) -> None:
        if not name.endswith("17"):
            super().put(name, payload)


class TearsMessages(_Board):
    def put(self, name: str, payload: bytes) -> None:
        with open(os.path.join(self.path, name), "wb", buffering=0) as file:
            for start in range(0, len(payload), _MIB):
                file.write(payload[start : start + _MIB])
                time.sleep(0.001)


class LosesWhatTheCoordinatorSays(_Board):
    def put(self, name: str, payload: bytes) -> None:
        if self.rank:
            super().put(name, payload)


class LosesTheSecondRanksErrors(_Board):
    def put(self, name: str, payload: bytes) -> None:
        super().put(name, payload.replace(b"full", b"fine"))


class DrainsForLong(_Board):
    def drain(self, timeout_seconds: float) -> None:
        time.sleep(1.0)


class HearsTheMissing(_Board):
    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        message = super().wait(name, timeout_seconds)
        return b"" if message is None and timeout_seconds else message


FOUND_BY: dict[type, str] = {
    CutsLargeMessages: "test_a_message_comes_as_it_was_posted",
    FlipsABit: "test_a_message_comes_as_it_was_posted",
    GivesMemory: "test_a_message_comes_as_it_was_posted",
    DeliversOnce: "test_a_message_is_read_by_everybody_and_again",
    LooksOnce: "test_a_reader_that_waits_already_gets_what_comes",
    LooksOnlyWhenItHasTime: "test_a_message_that_is_there_takes_no_time",
    IgnoresCase: "test_names_are_not_mixed_up",
    ShortensNames: "test_names_are_not_mixed_up",
    WaitsPastItsDeadline: "test_what_does_not_come_is_none_when_the_time_is_up",
    GivesUpEarly: "test_what_does_not_come_is_none_when_the_time_is_up",
    TalksOrListens: "test_several_threads_wait_and_post_at_a_time",
    RemovesItsOwnOnly: "test_a_removed_message_is_gone",
    CannotRemoveTwice: "test_removing_what_is_not_there_is_fine",
    DeliversWhatItReadBefore: "test_a_name_that_is_used_again_has_its_new_content",
    HasOneBoard: "test_boards_of_different_places_are_apart",
    LosesMessages: "test_no_message_between_processes_is_lost_or_torn",
    TearsMessages: "test_a_message_is_seen_whole_or_not_at_all",
    LosesWhatTheCoordinatorSays: "test_exchanges_run_over_it",
    LosesTheSecondRanksErrors: "test_an_error_of_one_rank_reaches_all",
    HearsTheMissing: "test_a_rank_that_does_not_come_is_named_in_time",
    DrainsForLong: "test_leaving_takes_bounded_time",
}


class CarrierSuite(CarrierConformance):
    """The kit on a board of files."""

    wrong: type = _Board

    def open_channel(self, place: Path, rank: int, world_size: int) -> KeyValueChannel:
        made: KeyValueChannel = self.wrong(place, rank)
        return made

    @property
    def patience_seconds(self) -> float:  # type: ignore[override]  # what is wrong need not be waited for
        return CarrierConformance.patience_seconds if self.wrong is _Board else 0.2


class TestRightCarrier(CarrierSuite):
    pass


plant(globals(), CarrierSuite, FOUND_BY)
