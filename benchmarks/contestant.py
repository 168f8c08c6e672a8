"""What takes part in a measurement: something that can save a state and load it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from benchmarks.cases import Case, Settings

if TYPE_CHECKING:
    from benchmarks.ranks import Rank
    from benchmarks.states import State


class Contestant(ABC):
    """One way to write a state into a directory and to read it back, on every rank.

    Subclasses import what they need inside their methods: the command reads the class attributes without it.

    Attributes:
        name: What selects it.
        about: One line for the table.
        module: What must be importable; None where nothing is optional.
        packages: The distributions whose versions are reported.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    module: ClassVar[str | None] = None
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: Settings, rank: Rank) -> None:
        self.settings = settings
        self.rank = rank

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        """Why it takes no part in a case, or None."""
        del case
        return None

    @abstractmethod
    def save(self, state: State, directory: str) -> None:
        """Write a state; the directory does not exist yet. Every rank calls."""

    @abstractmethod
    def load(self, state: State, directory: str) -> None:
        """Fill the tensors of a state in place. Every rank calls."""


class ContestantError(Exception):
    """One contestant failed.

    Attributes:
        contestant: Its name.
        reason: What it raised, or what was wrong.
        details: The traceback, if there is one.
    """

    def __init__(self, contestant: str, reason: str, details: str = "") -> None:
        super().__init__(contestant, reason, details)
        self.contestant = contestant
        self.reason = reason
        self.details = details

    def __str__(self) -> str:
        return f"{self.contestant}: {self.reason}"


def is_resharded(case: Case) -> bool:
    """Whether the targets are cut in another way than what was saved."""
    return case.of.load_cut != 0
