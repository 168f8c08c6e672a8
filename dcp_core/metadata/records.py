"""What a description says once: who wrote it, which save it was, how the state was nested."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WriterRecord:
    """Who wrote a checkpoint: library version, framework and its version, ranks of the group."""

    library: str
    framework: str
    framework_version: str
    world_size: int


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """Which save it was.

    Attributes:
        save_id: 32 hex digits.
        suffix: What the data files carry between rank and ending: "" or ".<id>".
        rank: None for a collective save; else the rank whose `{rank}.metadata` this is.
    """

    save_id: str
    suffix: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Nesting:
    """How the state was nested, beyond what the typed paths of its leaves say.

    Attributes:
        containers: (encoded typed path, container kind) of every container that its leaves' paths do not
            determine: empty ones, and kinds other than dict, list and tuple. Sorted.
    """

    containers: tuple[tuple[bytes, str], ...] = ()
