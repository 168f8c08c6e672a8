"""Values that differ between ranks under one key, and how a later save notices without a plan.

A save that hits the plan cache sends one number a rank, not a digest a value, although ranks hold different keys.
Each holder multiplies the digest of each of its values by a coefficient; the coefficients of one value's holders add
up to zero. The sum over all ranks is then zero when all holders agree, and (but for a chance of about 2**-60) not
zero when some do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from dcp_core.metadata import Int64, UInt64
from dcp_core.planning.global_table import GlobalTable
from dcp_core.planning.local_table import OBJECT, TENSOR

Mask = npt.NDArray[np.bool_]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """Which entries differ.

    Attributes:
        entry: True for entries whose holders' values differ. Shape (T,).
        compared: True for entries whose values are expected to be equal, and are. Shape (T,).
        lowest: Row in `holdings` of each entry's lowest holder, -1 for entries without holdings. Shape (T,).
    """

    entry: Mask
    compared: Mask
    lowest: Int64


def find_divergence(table: GlobalTable) -> Divergence:
    """Compare the digests of values that ranks hold under one key."""
    held, count = table.holdings, len(table.names)
    lowest = np.full(count, -1, dtype=np.int64)
    lowest[held.entry[::-1]] = np.arange(len(held.entry))[::-1]
    differs = (held.digest != held.digest[lowest[held.entry]]).any(axis=1)
    comparable = (table.kind == OBJECT) | (table.kind == TENSOR)
    divergent = np.zeros(count, dtype=bool)
    divergent[held.entry[differs]] = True
    divergent &= comparable
    compared = np.zeros(count, dtype=bool)
    compared[held.entry] = True
    compared &= comparable & ~divergent
    return Divergence(divergent, compared, lowest)


def path_keys(paths: tuple[bytes, ...]) -> UInt64:
    """A 64-bit key for each encoded path."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, paths), dtype=np.uint64, count=len(paths))


def coefficients(keys: UInt64, rank: UInt64 | int) -> UInt64:
    """The coefficient that a holder other than the lowest uses: odd, and different for every key and rank.

    Source: the finaliser of splitmix64.
    """
    with np.errstate(over="ignore"):
        mixed = keys + np.asarray(rank, dtype=np.uint64) * _GOLDEN + _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


def lowest_coefficients(table: GlobalTable, found: Divergence) -> dict[int, tuple[Int64, UInt64]]:
    """For each rank that is the lowest holder of compared values: its leaves, and their coefficients.

    Returns:
        {rank: (leaves, coefficients)}; a coefficient is minus the sum of the other holders'.
    """
    held = table.holdings
    others = np.flatnonzero(found.compared[held.entry] & (found.lowest[held.entry] != np.arange(len(held.entry))))
    total = np.zeros(len(table.names), dtype=np.uint64)
    entry = held.entry[others]
    keys = path_keys(table.paths) if len(others) else np.zeros(0, dtype=np.uint64)
    with np.errstate(over="ignore"):
        np.add.at(total, entry, coefficients(keys[entry], held.rank[others].astype(np.uint64)))
        total = np.uint64(0) - total
    result: dict[int, tuple[Int64, UInt64]] = {}
    rows = found.lowest[np.flatnonzero(found.compared)]
    for rank in np.unique(held.rank[rows]).tolist():
        mine = rows[held.rank[rows] == rank]
        order = np.argsort(held.leaf[mine], kind="stable")
        result[rank] = (held.leaf[mine][order], total[held.entry[mine]][order])
    return result


def agreement_number(values: UInt64, factors: UInt64) -> int:
    """What one rank sends: the sum of digest times coefficient, modulo 2**64.

    Args:
        values: Digests of the compared values, two words each. Shape (K, 2).
        factors: The coefficients. Shape (K,).
    """
    with np.errstate(over="ignore"):
        folded = values[:, 0] ^ (values[:, 1] * _MIX_1)
        return int((folded * factors).sum(dtype=np.uint64))
