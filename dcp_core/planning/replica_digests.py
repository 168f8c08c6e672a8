"""Which ranks hold other bits than the rest, of what a save takes for copies.

In: for each rank the checksums of all that it holds, each under a key that is equal for copies. Out: the keys whose
checksums differ. To keep what travels small, ranks that hold the same boxes with the same bits, as the replicas of data
parallel training do, are told apart by 32 bytes, and one of them speaks for all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from dcp_core.errors import CoordinationError
from dcp_core.metadata import UInt64
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.write_items import WrittenRegions

DIFFERENCES_NAMED = 64
"""Of so many differing regions at most ranks say what they are."""

_LINES_SHOWN = 8
_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaDigests:
    """What one rank holds.

    Attributes:
        key: Equal for regions that a save takes for copies: of one path, dtype, global shape, place and extent.
            Ascending. Shape (N,).
        digest: Checksum of each region's bits. Shape (N,).
    """

    key: UInt64
    digest: UInt64

    def summary(self) -> bytes:
        """32 bytes that are equal for ranks that hold the same regions with the same bits."""
        return xxhash.xxh3_128_digest(self.key.tobytes()) + xxhash.xxh3_128_digest(self.digest.tobytes())

    def to_bytes(self) -> bytes:
        """Flatten."""
        return self.key.astype("<u8").tobytes() + self.digest.astype("<u8").tobytes()

    @classmethod
    def from_bytes(cls, raw: bytes) -> ReplicaDigests:
        """Undo `to_bytes`.

        Raises:
            CoordinationError: The bytes are no such columns.
        """
        if len(raw) % 16:
            raise CoordinationError(f"{len(raw)} bytes are no checksums of replicas; do all ranks run one version?")
        words = np.frombuffer(raw, "<u8").astype(np.uint64)
        return cls(words[: len(words) // 2], words[len(words) // 2 :])


def region_keys(plan: SavePlan) -> UInt64:
    """A key for each region that a plan writes; see `ReplicaDigests`. Shape (W,)."""
    table, writes = plan.table, plan.writes
    regions = WrittenRegions(table, writes, plan.names)
    identity = np.concatenate([table.shape[writes.leaf], regions.offsets, writes.sizes], axis=1).astype("<i8")
    kinds = [bytes(pair) for pair in zip(regions.dtype.tolist(), regions.ndim.tolist(), strict=True)]
    ndim, width = regions.ndim.tolist(), table.width
    keys = np.zeros(len(regions), np.uint64)
    for row, leaf in enumerate(writes.leaf.tolist()):  # padding depends on what else the rank holds, and is left out
        columns = identity[row].reshape(3, width)[:, : ndim[row]] if width else identity[row]
        keys[row] = xxhash.xxh3_64_intdigest(table.paths[leaf] + kinds[row] + columns.tobytes())
    return keys


def in_order(keys: UInt64, checksums: UInt64) -> ReplicaDigests:
    """Sort what a rank holds by key."""
    order = np.argsort(keys, kind="stable")
    return ReplicaDigests(keys[order], checksums[order])


def speakers(summaries: Sequence[bytes]) -> list[int]:
    """For each rank, the lowest one with the same summary, which speaks for it."""
    first: dict[bytes, int] = {}
    return [first.setdefault(summary, rank) for rank, summary in enumerate(summaries)]


def differing_keys(held: Iterable[ReplicaDigests]) -> UInt64:
    """Find the keys whose checksums are not the same wherever they are held; ascending.

    Args:
        held: What the speakers hold.
    """
    parts = list(held)
    key = np.concatenate([part.key for part in parts]) if parts else np.zeros(0, np.uint64)
    digest = np.concatenate([part.digest for part in parts]) if parts else key
    order = np.argsort(key, kind="stable")
    key, digest = key[order], digest[order]
    differs = (key[1:] == key[:-1]) & (digest[1:] != digest[:-1])
    found: UInt64 = np.unique(key[1:][differs])
    return found


def told_of(plan: SavePlan, keys: UInt64, held: ReplicaDigests, asked: UInt64) -> bytes:
    """What a rank says of regions that differ somewhere: their names, places and checksums.

    Args:
        plan: What it holds.
        keys: Of each region of the plan. Shape (W,).
        held: The same, with checksums.
        asked: The keys that differ, ascending.
    """
    regions = WrittenRegions(plan.table, plan.writes, plan.names)
    said = []
    for row in np.flatnonzero(np.isin(keys, asked)).tolist():
        ndim = int(regions.ndim[row])
        digest = int(held.digest[np.searchsorted(held.key, keys[row])])
        place = regions.offsets[row, :ndim].tolist(), plan.writes.sizes[row, :ndim].tolist()
        said.append([regions.names[row], *place, digest])
    return json.dumps(said).encode()


def describe_differences(said: Sequence[bytes], total: int) -> str:
    """Say which regions differ, between which ranks, and who is alone with what it holds.

    Args:
        said: What each rank says of the regions, from `told_of`.
        total: How many regions differ in all.

    Returns:
        The text; empty where nothing differs after all.
    """
    ranks_of: dict[tuple[str, tuple[int, ...], tuple[int, ...]], dict[int, list[int]]] = {}
    for rank, text in enumerate(said):
        for name, offsets, sizes, digest in json.loads(text):
            ranks_of.setdefault((name, tuple(offsets), tuple(sizes)), {}).setdefault(digest, []).append(rank)
    differing = {region: groups for region, groups in sorted(ranks_of.items()) if len(groups) > 1}
    if not differing:
        return ""
    lines = [
        f"{name!r} at offsets {offsets}, sizes {sizes}: {_groups_in_words(groups)}"
        for (name, offsets, sizes), groups in list(differing.items())[:_LINES_SHOWN]
    ]
    if total > len(lines):
        lines.append(f"and {total - len(lines)} more")
    return "; ".join(lines) + _suspects_in_words(differing.values())


def _groups_in_words(groups: Mapping[int, Sequence[int]]) -> str:
    most = _majority(groups)
    others = sorted(list(ranks) for digest, ranks in groups.items() if digest != most)
    if most is None:
        return " against ".join(_ranks_in_words(ranks) for ranks in others) + ": no majority"
    alike = _ranks_in_words(groups[most])
    return ", ".join(f"{_ranks_in_words(ranks)} differ{'s' if len(ranks) == 1 else ''}" for ranks in others) + (
        f" from {alike}, which agree"
    )


def _majority(groups: Mapping[int, Sequence[int]]) -> int | None:
    """The checksum that most holders have; None where two are as frequent."""
    by_size = sorted(groups, key=lambda digest: -len(groups[digest]))
    return None if len(groups[by_size[0]]) == len(groups[by_size[1]]) else by_size[0]


def _suspects_in_words(every: Iterable[Mapping[int, Sequence[int]]]) -> str:
    """Which ranks disagree with most holders, and how often."""
    alone: Counter[int] = Counter()
    regions = 0
    for groups in every:
        most = _majority(groups)
        regions += 1
        if most is not None:
            alone.update(rank for digest, ranks in groups.items() if digest != most for rank in ranks)
    if not alone:
        return ""
    shown = [f"rank {rank} in {count} of {regions}" for rank, count in alone.most_common(_RANKS_SHOWN)]
    more = f" and {len(alone) - len(shown)} more ranks" if len(alone) > len(shown) else ""
    return f". Against the majority: {', '.join(shown)}{more}"


def _ranks_in_words(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + shown + more
