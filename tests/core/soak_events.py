"""What happens in a soak, one event after the other: all of it follows from a seed, so all ranks know it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from tests.core.soak_faults import ERROR_NUMBERS, Fate, FateKind

SEED_VARIABLE = "DCP_SOAK_SEED"
EVENTS_VARIABLE = "DCP_SOAK_EVENTS"

Verb = Literal["save", "async save", "load"]

DECK: tuple[tuple[Verb, str], ...] = (
    *(("save", trouble) for trouble in ("", "fail", "slow", "interrupt", "late", "after")),
    *(("async save", trouble) for trouble in ("", "", "fail", "kill", "cancel", "late")),
    *(("load", trouble) for trouble in ("", "fail", "slow", "interrupt", "late", "flip", "flip")),
)  # fmt: skip
"""One of each: a call, and what goes wrong with it.

`late`: a rank comes when the others have given up. `after`: the disk fails once the save is committed. `flip`: a byte
turns in a file.
"""

_AT_OPERATIONS: tuple[FateKind, ...] = ("fail", "slow", "interrupt", "kill")

QUIET: tuple[tuple[Verb, str], ...] = (("save", ""), ("async save", ""))
FAULTS = sum(trouble != "" for _, trouble in DECK)


@dataclass(frozen=True)
class Event:
    """One call of all ranks, and what goes wrong with it.

    Attributes:
        number: From 1.
        verb: What is called.
        trouble: What goes wrong; empty: nothing.
        victim: On which rank.
        at: At which operation of the disk.
        error_number: How that fails.
        layout: Number from which the cuts follow.
        over: Whether the save replaces the newest checkpoint.
    """

    number: int
    verb: Verb
    trouble: str
    victim: int
    at: int
    error_number: int
    layout: int
    over: bool

    def fate(self, rank: int) -> Fate:
        """What befalls the operations of a rank."""
        for kind in _AT_OPERATIONS:
            if kind == self.trouble and rank == self.victim:
                return Fate(kind, self.at, self.error_number, os.getpid())
        return Fate()

    @property
    def has_fate(self) -> bool:
        """Whether something befalls the operations of a rank."""
        return self.trouble in _AT_OPERATIONS

    def fate_after(self, rank: int) -> Fate:
        """What befalls a rank when a save is committed."""
        return Fate("fail", self.at, self.error_number) if self.trouble == "after" and rank == 0 else Fate()


def events(seed: int, count: int, world: int, *, layouts: int = 3) -> Iterator[Event]:
    """The events of a soak: first some saves that nothing happens to, then decks of everything, shuffled.

    Args:
        seed: All follows from it.
        count: How many.
        world: How many ranks.
        layouts: How many ways to cut states for saves.
    """
    rng = Random(seed)
    deck: list[tuple[Verb, str]] = []
    for number in range(1, count + 1):
        if number <= len(QUIET):
            verb, trouble = QUIET[number - 1]
        else:
            deck = deck or rng.sample(DECK, len(DECK))
            verb, trouble = deck.pop()
        yield Event(
            number,
            verb,
            trouble,
            rng.randrange(world),
            rng.randint(1, 3) if verb == "load" else rng.randint(1, 10),
            rng.choice(ERROR_NUMBERS),
            rng.randrange(layouts),
            number > len(QUIET) and rng.random() < 0.3,
        )


def chosen_seed(default: int) -> int:
    """The seed: `DCP_SOAK_SEED` where that is set."""
    return int(os.environ.get(SEED_VARIABLE, default))


def chosen_count(default: int) -> int:
    """How many events: `DCP_SOAK_EVENTS` where that is set."""
    return int(os.environ.get(EVENTS_VARIABLE, default))
