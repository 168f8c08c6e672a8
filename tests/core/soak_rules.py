"""What may have become of a call of all ranks: the errors that they may raise, and the checkpoint that may be there."""

from __future__ import annotations

from collections.abc import Sequence

from tests.core.fault_jobs import Outcome
from tests.core.soak_events import Event

Found = tuple[int, int]
"""A checkpoint: its step, and the event that saved it."""

_FAULTS = {"StorageError", "RankFailedError", "CoordinationError", "InDoubtError"}
_ALLOWED = {
    "": {""},
    "slow": {""},
    "after": {""},
    "fail": {"", *_FAULTS},
    "interrupt": {"", "RankFailedError", "InDoubtError"},
    "kill": {"", "RankFailedError", "InDoubtError"},
    "cancel": {"", "SaveCancelledError"},
    "late": {"CoordinationTimeoutError", "CoordinationError"},
}
"""The errors that a trouble may end in."""


def possible(event: Event, ended: Sequence[Outcome], new: Found, old: Found | None) -> set[Found | None]:
    """Which checkpoint may be the newest now.

    Raises:
        AssertionError: The ranks do not agree.
    """
    heard = [each for each in ended if each.kind != "KeyboardInterrupt"]
    assert len({each.kind == "" for each in heard}) == 1, ended
    if event.trouble in ("", "slow", "after"):
        assert not heard[0].kind, ended
    if event.trouble == "fail":
        assert len({(each.kind, each.message) for each in heard}) == 1, ended
    if event.trouble == "late":
        assert heard[0].kind, ended
    known = {each.kind for each in heard}
    assert known <= _ALLOWED[event.trouble], ended
    if "InDoubtError" in known:
        return {old, new}
    return {old} if heard[0].kind else {new}
