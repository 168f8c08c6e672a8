"""A soak: call after call by all ranks of a job, with faults; after each, a look at what is there.

Whatever happens, all ranks succeed or all fail, and the newest complete checkpoint loads with the values of its save.
The framework is a `Stage`; the events come from `soak_events`.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

from dcp_core.storage.commit import HEARTBEAT_EXPIRY_SECONDS
from tests.core.async_jobs import RESULT_SECONDS
from tests.core.fault_jobs import Outcome, Seat, checkpoint_names, names_in, outcome_of
from tests.core.soak_events import QUIET, Event, Verb
from tests.core.soak_faults import Fate, Fateful, reader_of
from tests.core.soak_rules import Found, possible
from tests.core.soak_vitals import Vitals

SHORT_SECONDS = 2.5
"""How long others wait for a rank that does not come."""

KEEP, KEEP_EVERY = 2, 25
_OUT_OF_STEP = ("late", "interrupt")
_AT_LOOKS = 10**6


class Target(Protocol):
    """What is loaded into, and what must be in it then."""

    @property
    def state(self) -> Mapping[Any, Any]:
        """What a load fills; nothing in it is right before."""
        ...

    def check(self) -> None:
        """See that every value is that of the save, to the last bit."""
        ...


class Stage(Protocol):
    """What a framework brings."""

    @property
    def manager(self) -> Fateful:
        """Saves and finds."""
        ...

    def state(self, event: Event) -> dict[Any, Any]:
        """What this rank saves."""
        ...

    def spoil(self, state: dict[Any, Any]) -> None:
        """Change everything in a state."""
        ...

    def target(self, number: int, salt: str) -> Target:
        """What this rank loads of the save that an event made, in a layout that follows from `salt`."""
        ...

    def load(self, state: Mapping[Any, Any], **arguments: Any) -> None:
        """Load on all ranks."""
        ...

    def number_in(self, path: str) -> int:
        """Which event saved a checkpoint."""
        ...


@dataclass
class Soak:
    """One rank of a soak.

    Args:
        seat: Which.
        stage: Of which framework.
        root: The directory of checkpoints.
    """

    seat: Seat
    stage: Stage
    root: Path
    newest: set[Found | None] = field(default_factory=lambda: {None})
    last_step: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    vitals: list[Vitals] = field(default_factory=list)

    def run(self, events: Iterable[Event], look_at_use: Callable[[int], bool]) -> None:
        """Let the events happen."""
        for event in events:
            try:
                self._happen(event)
            except BaseException as error:
                error.args = (f"{event}: {error.args[0] if error.args else error!r}", *error.args[1:])
                raise
            if look_at_use(event.number):
                self._happen(_quiet(_AT_LOOKS + event.number, "async save"))  # so that background processes are there
                self.vitals.append(Vitals.of(self.seat, event.number, self.vitals[0] if self.vitals else None))
        self._end(event.number)

    def _happen(self, event: Event) -> None:
        if event.trouble == "flip":
            return self._find_a_flipped_byte(event)
        ended = self._load(event) if event.verb == "load" else self._save(event)
        kind = next((outcome.kind for outcome in ended if outcome.kind), "fine")
        name = f"{event.verb}, {event.trouble or 'no fault'}: {kind}"
        self.counts[name] = self.counts.get(name, 0) + 1
        if event.trouble in _OUT_OF_STEP:
            self._get_in_step()
        self._look(event)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _say(self, outcome: Outcome) -> list[Outcome]:
        """What all ranks have to say."""
        return [pickle.loads(said) for said in self.seat.share(pickle.dumps(outcome))]

    def _call(self, event: Event, call: Callable[[Mapping[str, Any]], object]) -> list[Outcome]:
        """Make a call on all ranks; the victim may come when the others have given up."""
        is_late = event.trouble == "late"
        options = {"timeout_seconds": SHORT_SECONDS} if is_late else {}
        if is_late and event.victim == self.seat.rank:
            self.seat.share()
        outcome = outcome_of(call, options)
        if is_late and event.victim != self.seat.rank:
            self.seat.share()
        return self._say(outcome)

    def _save(self, event: Event) -> list[Outcome]:
        known = next(iter(self.newest))
        over = known if event.over else None
        self.last_step += 1
        step = over[0] if over else self.last_step
        manager, rank = self.stage.manager, self.seat.rank
        manager.fate = event.fate(rank) if event.has_fate else None
        manager.fate_after = event.fate_after(rank)
        state = self.stage.state(event)

        def save(options: Mapping[str, Any]) -> None:
            if event.verb == "save":
                manager.save(step, state, **options)
            else:
                self._save_in_the_background(event, step, state, over is None, options)

        ended = self._call(event, save)
        manager.fate, manager.fate_after = None, Fate()
        self.newest = possible(event, ended, (step, event.number), known)
        if ended == [ended[0]] * len(ended) and not ended[0].kind and self.seat.rank == 0:
            place = self.root / f"step_{step}"
            assert names_in(place) == checkpoint_names(place)
        return ended

    def _save_in_the_background(
        self, event: Event, step: int, state: dict[Any, Any], is_new: bool, options: Mapping[str, Any]
    ) -> None:
        """Begin, change everything, load another checkpoint meanwhile, and wait; the victim may cancel."""
        response = self.stage.manager.async_save(step, state, **options)
        self.stage.spoil(state)
        known = next(iter(self.newest))
        if event.trouble == "cancel" and event.victim == self.seat.rank:
            time.sleep(0.004 * (event.at - 1))
            response.cancel()
        elif event.trouble == "" and is_new and known is not None:
            target = self.stage.target(known[1], f"meanwhile {event.number}")
            self.stage.load(target.state, checkpoint_id=self.root / f"step_{known[0]}")
            target.check()
        response.get_result(RESULT_SECONDS)

    def _load(self, event: Event) -> list[Outcome]:
        known = next(iter(self.newest))
        if known is None:
            return []
        target = self.stage.target(known[1], f"load {event.number}")
        reader = reader_of(self.root / f"step_{known[0]}", event.fate(self.seat.rank))
        ended = self._call(event, lambda options: self.stage.load(target.state, storage_reader=reader, **options))
        if not ended[self.seat.rank].kind:
            target.check()
        possible(event, ended, known, known)
        return ended

    # -- what must be -----------------------------------------------------------------------------------------------

    def _get_in_step(self) -> None:
        """One call that may fail; after it no other does."""
        outcome_of(self.stage.manager.latest)
        self.seat.share()

    def _look(self, event: Event) -> None:
        """The newest checkpoint is one that may be, and loads, in another layout each time."""
        rng = Random(f"{event.number} look")
        path = self.stage.manager.latest()
        self.seat.share()
        found = None if path is None else (int(path.rpartition("_")[2]), self.stage.number_in(path))
        assert found in self.newest, (path, found, self.newest)
        self.newest = {found}
        self._resume(found, f"resume {event.number}", verify=rng.random() < 0.3)

    def _resume(self, found: Found | None, salt: str, *, verify: bool) -> None:
        rng = Random(salt)
        options: dict[str, Any] = {
            "broadcast_replicated_tensors": rng.choice((True, True, False, "auto")),
            "broadcast_batch_bytes": rng.choice((0, 1000, 6 << 20)),
        }
        if found is None:
            assert self.stage.manager.resume({}, verify=verify) is None
        else:
            target = self.stage.target(found[1], salt)
            assert self.stage.manager.resume(target.state, verify=verify, **options) == found[0]
            target.check()
        self.seat.share()

    # -- damage -----------------------------------------------------------------------------------------------------

    def _find_a_flipped_byte(self, event: Event) -> None:
        """A byte turns in the newest checkpoint: all ranks say so, or none needs it; and the one before is loaded."""
        [known] = self.newest
        if known is None:
            return
        rng = Random(f"flip {event.number}")
        place = self.root / f"step_{known[0]}"
        file = place / rng.choice(names_in(place))
        position = rng.randrange(file.stat().st_size)
        before = self._checkpoints_before(known[0])
        self.seat.share()
        if self.seat.rank == 0:
            _flip(file, position)
        self.seat.share()
        target = self.stage.target(known[1], f"flip {event.number}")
        ended = self._say(outcome_of(self.stage.load, target.state, checkpoint_id=place, verify="full"))
        assert len({(each.kind, each.message) for each in ended}) == 1, (file, position, ended)
        assert ended[0].kind in ("", "CorruptError", "IncompleteError", "NewerVersionError"), (file, position, ended)
        assert not ended[0].kind or file.name in ended[0].message, (file, position, ended)
        if not ended[0].kind:
            target.check()
        if ended[0].kind != "NewerVersionError":
            self._resume(before, f"before {event.number}", verify=True)
        name = f"flip: {ended[0].kind or 'not read'}"
        self.counts[name] = self.counts.get(name, 0) + 1
        if self.seat.rank == 0:
            _flip(file, position)
        self.seat.share()
        self._look(event)

    def _checkpoints_before(self, step: int) -> Found | None:
        """The newest complete checkpoint before a step."""
        steps = [int(name.partition("_")[2]) for name in names_in(self.root) if name.startswith("step_")]
        whole = [each for each in steps if each < step and (self.root / f"step_{each}" / ".metadata").exists()]
        if not whole:
            return None
        return max(whole), self.stage.number_in(str(self.root / f"step_{max(whole)}"))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _end(self, number: int) -> None:
        """Two saves that nothing happens to leave nothing behind but checkpoints."""
        for more, (verb, _) in enumerate(QUIET, 1):
            self._expire_half_records()
            self._happen(_quiet(number + more, verb))
        if self.seat.rank == 0:
            for name in names_in(self.root):
                place = self.root / name
                assert names_in(place) == checkpoint_names(place), (name, names_in(place))
            steps = [int(name.partition("_")[2]) for name in names_in(self.root) if name != "latest"]
            young = [step for step in steps if step % KEEP_EVERY]
            assert len(young) <= KEEP and os.readlink(self.root / "latest") == f"step_{max(steps)}", names_in(self.root)
        self.seat.share()

    def _expire_half_records(self) -> None:
        """A record that its process did not finish says nothing about it: only time tells that it is dead."""
        past = time.time() - HEARTBEAT_EXPIRY_SECONDS - 1
        for path in self.root.glob("*/.intent-*.tmp"):
            with suppress(FileNotFoundError):
                os.utime(path, (past, past))
        self.seat.share()


def _quiet(number: int, verb: Verb) -> Event:
    """A save that nothing happens to."""
    return Event(number, verb, "", 0, 1, 0, 0, False)


def _flip(file: Path, position: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)
        opened.seek(position)
        opened.write(bytes([byte[0] ^ 0x10]))
