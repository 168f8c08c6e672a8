"""What of two checkpoints is compared, and how closely. Pure.

In: names, ranks and options. Out: which tensors and values are compared with each other, and which numbers count as
equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.errors import ArgumentError
from dcp_core.formats.key_map import KeyMap, map_keys
from dcp_core.metadata import EVERY_RANK

Key = tuple[str, int]
"""Name, and rank or `EVERY_RANK`."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart numbers may be that count as equal: `absolute + relative * |b|`. NaN is like NaN then.

    Attributes:
        relative: Share of the second number.
        absolute: Added to that.

    Raises:
        ArgumentError: One of them is negative or no number.
    """

    relative: float = 0.0
    absolute: float = 0.0

    def __post_init__(self) -> None:
        if not (self.relative >= 0 and self.absolute >= 0):
            raise ArgumentError(f"a tolerance is 0 or more, found {self.relative} and {self.absolute}")

    @property
    def is_exact(self) -> bool:
        """Whether bits are compared."""
        return self.relative == self.absolute == 0

    def exceeded(self, one: npt.NDArray[Any], two: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Where numbers are further apart."""
        with np.errstate(all="ignore"):
            near = (np.abs(one - two) <= self.absolute + self.relative * np.abs(two)) & np.isfinite(two)
        same: npt.NDArray[np.bool_] = near | (one == two) | (np.isnan(one) & np.isnan(two))
        return ~same


@dataclass(frozen=True, slots=True)
class Scope:
    """What is compared.

    Attributes:
        wanted: Says of a name whether it is compared, as the second checkpoint has it; None: all are.
        prefix: Of the first checkpoint, only names under this are compared, without it.
        rename: From names of the first checkpoint (without the prefix) to names of the second.
        rank: Compare what this rank would load: its own values where ranks have their own, and everybody's; where ranks
            saved alone, what it saved. None: the values of all ranks, each with each.
        only_common: Leave out what only one of the two has.
        values: Whether to compare values, too, which reads both.
        types: Whether tensors of different types differ, even if their values are the same.
        tolerance: Which numbers count as equal.
    """

    wanted: Callable[[str], bool] | None = None
    prefix: str = ""
    rename: KeyMap | None = None
    rank: int | None = None
    only_common: bool = False
    values: bool = True
    types: bool = True
    tolerance: Tolerance = Tolerance()

    def new_names(self, names: Iterable[str]) -> dict[str, str]:
        """What the names of the first checkpoint become, for those that are compared.

        Raises:
            ArgumentError: Two of them become one; or the prefix is that of none.
        """
        start = f"{self.prefix}." if self.prefix and not self.prefix.endswith(".") else self.prefix
        all_names = list(dict.fromkeys(names))
        inside = [name for name in all_names if name.startswith(start)]
        if start and not inside:
            some = sorted({name.partition(".")[0] for name in all_names})[:8]
            raise ArgumentError(f"no name in the first checkpoint begins with {start!r}; names there begin with {some}")
        if self.rename is None:
            found = {name: name[len(start) :] for name in inside}
        else:
            found = {
                start + old: new for new, old in map_keys(self.rename, [name[len(start) :] for name in inside]).items()
            }
        return {old: new for old, new in found.items() if self.wanted is None or self.wanted(new)}

    def chosen(self, names: Sequence[str], ranks: Sequence[int], new_names: dict[str, str]) -> dict[Key, int]:
        """The rows of one side that are compared, by what they are called there; with a rank, nothing is a rank's own.

        Args:
            names: All names of a kind. Length N.
            ranks: Whose own values these are, or `EVERY_RANK`. Length N.
            new_names: What names are called; those that are missing are not compared.
        """
        found: dict[Key, int] = {}
        for row, (name, rank) in enumerate(zip(names, ranks, strict=True)):
            new = new_names.get(name)
            if new is None:
                continue
            if self.rank is None:
                found[new, rank] = row
            elif rank in (EVERY_RANK, self.rank):
                found[new, EVERY_RANK] = row
        return found
