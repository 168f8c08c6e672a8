"""Making many small values at once, for lists of plan items as long as a state has tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import fields
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Value = TypeVar("Value")


def made_of_columns(kind: type[Value], count: int, **columns: Iterable[Any]) -> list[Value]:
    """Make values of a frozen dataclass with slots, column by column: about three times as fast as one by one.

    Args:
        kind: The class. Its `__post_init__` is not called: the values are sound already.
        count: How many.
        columns: For each field an iterable of at least `count` values.

    >>> from dcp_core.box import Box
    >>> made_of_columns(Box, 2, offsets=[(0,), (4,)], sizes=[(4,), (4,)])
    [Box(offsets=(0,), sizes=(4,)), Box(offsets=(4,), sizes=(4,))]
    """
    made = list(map(object.__new__, repeat(kind, count)))
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass, which no bound can say
        deque(map(getattr(kind, field.name).__set__, made, columns[field.name]), maxlen=0)
    return made


def tuples_of(rows: npt.NDArray[np.int64], ndim: npt.NDArray[Any]) -> list[tuple[int, ...]]:
    """The rows of a padded column as tuples, each as long as its number of dimensions.

    Args:
        rows: Shape (N, D).
        ndim: Shape (N,).
    """
    if rows.shape[1] == 0:
        return [()] * len(rows)
    if bool((ndim == rows.shape[1]).all()):
        return list(zip(*[rows[:, dim].tolist() for dim in range(rows.shape[1])], strict=True))
    return [tuple(row[:length]) for row, length in zip(rows.tolist(), ndim.tolist(), strict=True)]
