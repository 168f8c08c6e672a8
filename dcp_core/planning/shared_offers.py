"""What a rank offers to share: the identities of the buffers that it wants filled, and the bytes they travel in.

In: a rank's load plan, and which communicator serves each of its buffers. Out: an `Offer`, and on the coordinator an
`OfferFrame` of each. Ranks that want the same send the same bytes after the head, so the coordinator decodes each
distinct list once.

Two ranks can share a buffer when its stored tensor, box, element type and communicator are equal. That is what the
digest of a buffer stands for; of equal buffers of one rank, the first is the same as the first of another rank.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from dcp_core.dtype import ITEMSIZE
from dcp_core.errors import CoordinationError
from dcp_core.metadata import Int64, UInt8, UInt64
from dcp_core.planning.int_columns import decode_column, encode_column
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.rank_groups import GroupKey, encode_group
from dcp_core.planning.slabs import find_slabs

_MAGIC = b"OFR1"
_HEAD = struct.Struct("<4sI16sQddII")
_GROUP = struct.Struct("<I16s")
_WANTS = struct.Struct("<II")

NOT_NAMED = bytes(16)
"""In the place of a group's name: the caller gave the group."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Buffers that a rank would share, in the order that all ranks walk shared buffers in.

    The order is by stored name, offsets and sizes; what is equal in these is ordered by the rest of its identity.

    Attributes:
        row: Index of each among the rank's wanted boxes; empty on the coordinator. Shape (B,).
        digest: Its identity. Shape (B, 2).
        nbytes: Bytes to read, as stored. Shape (B,).
        slabs: Into how many slabs it can be cut. Shape (B,).
        kind: Its communicator, as an index into `kinds`. Shape (B,).
        kinds: Names of communicators, ascending.
    """

    row: Int64
    digest: UInt64
    nbytes: Int64
    slabs: Int64
    kind: UInt8
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.digest)


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A group that exists on this rank.

    Attributes:
        key: Its communicator and ranks.
        name: What the framework calls it, the same on all its ranks; "" for a group that the caller gave.
    """

    key: GroupKey
    name: str = ""

    @property
    def name_digest(self) -> bytes:
        """What stands for the name between ranks."""
        return xxhash.xxh3_128_digest(self.name.encode()) if self.name else NOT_NAMED


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What one rank tells the coordinator.

    Attributes:
        rank: Its number in the job, which groups are made of.
        host: Equal for ranks on the same host.
        buffers: What it would share.
        alone_nbytes: Bytes that it reads for itself besides.
        groups: Groups that exist here; those without this rank are left out.
        same_rate: Bytes a second that this rank read where all read the same; 0: not known.
        own_rate: Bytes a second that it read where nobody else did; 0: not known.
    """

    rank: int
    host: str
    buffers: Buffers
    alone_nbytes: int = 0
    groups: tuple[HeldGroup, ...] = ()
    same_rate: float = 0.0
    own_rate: float = 0.0


def find_buffers(plan: LoadPlan, kinds: Sequence[str | None]) -> tuple[Buffers, int]:
    """Find what a rank could share.

    Args:
        plan: Its load plan.
        kinds: For each wanted box the communicator that serves its memory; None where it cannot be shared.

    Returns:
        The buffers, and the bytes of everything else. Nothing is shared of a plan whose targets share memory, nor
        boxes without elements, nor boxes that the plan does not fill.
    """
    boxes = plan.wanted
    numel = np.prod(boxes.sizes, axis=1, dtype=np.int64)
    filled = np.zeros(len(boxes), dtype=np.int64)
    np.add.at(filled, plan.reads.wanted, np.prod(plan.reads.sizes, axis=1, dtype=np.int64))
    used = sorted({kind for kind in kinds if kind is not None})
    number: dict[str | None, int] = {None: -1}
    number.update({kind: index for index, kind in enumerate(used)})
    served = np.fromiter(map(number.__getitem__, kinds), dtype=np.int64, count=len(boxes))
    rows = np.flatnonzero((served >= 0) & (numel > 0) & (filled == numel) & (not plan.share_memory))
    names, kind = _only_used(used, served[rows])
    order, traits = _in_global_order(plan, rows, kind)
    rows, kind = rows[order], kind[order]
    itemsize = ITEMSIZE[boxes.stored_dtype]
    slabs = find_slabs(plan, rows).count
    nbytes = numel[rows] * itemsize[rows]
    length = traits.shape[1] - 2 * (boxes.offsets.shape[1] - boxes.ndim[rows])  # without padding
    digest = _digests(traits, length, [boxes.stored_names[row] for row in rows.tolist()], kind.tolist(), names)
    return Buffers(rows, digest, nbytes, slabs, kind, names), int((filled * itemsize).sum() - nbytes.sum())


def _only_used(kinds: Sequence[str], kind: Int64) -> tuple[tuple[str, ...], UInt8]:
    """Leave out communicators of which nothing is left."""
    used, index = np.unique(kind, return_inverse=True)
    return tuple([kinds[number] for number in used.tolist()]), index.reshape(-1).astype(np.uint8)


def _in_global_order(plan: LoadPlan, rows: Int64, kind: UInt8) -> tuple[Int64, Int64]:
    """Order wanted boxes as all ranks do; also return, in that order, all numbers of their identities.

    A stored tensor is told from others of its name (those of other ranks) by where its first chunk lies.
    """
    boxes = plan.wanted
    names = [boxes.stored_names[row] for row in rows.tolist()]
    position = {name: index for index, name in enumerate(sorted(set(names)))}
    name = np.fromiter(map(position.__getitem__, names), dtype=np.int64, count=len(names))
    first = boxes.chunk_rows(rows, np.zeros(len(rows), dtype=np.int64))
    offsets, sizes = boxes.offsets[rows], boxes.sizes[rows]
    rest = (first.file, first.byte_offset, boxes.ndim[rows], boxes.dtype[rows], boxes.stored_dtype[rows])
    columns = [name, *offsets.T, *sizes.T, *rest, kind]
    order = np.lexsort(columns[::-1])
    same = np.ones(max(len(rows) - 1, 0), dtype=np.bool_)
    for column in columns:
        same &= column[order[1:]] == column[order[:-1]]
    start = np.flatnonzero(np.concatenate([np.ones(min(len(rows), 1), dtype=np.bool_), ~same]))
    occurrence = np.arange(len(rows)) - np.repeat(start, np.diff(np.append(start, len(rows))))
    extents = np.stack([offsets, sizes], axis=2).reshape(len(rows), 2 * offsets.shape[1])[order]
    return order, np.column_stack([*(column[order] for column in rest), occurrence, extents]).astype("<i8")


def _digests(traits: Int64, length: Int64, names: list[str], kind: list[int], kinds: tuple[str, ...]) -> UInt64:
    """Digests of identities: of the first numbers of each, then the communicator and the name."""
    width = traits.shape[1] * 8
    raw = memoryview(np.ascontiguousarray(traits).tobytes())
    prefixes = [name.encode() + b"\0" for name in kinds]
    digests = []
    for row, (name, count, number) in enumerate(zip(names, length.tolist(), kind, strict=True)):
        start = row * width
        text = prefixes[number] + name.encode("utf-8", "surrogatepass")
        digests.append(xxhash.xxh3_128_digest(b"".join((raw[start : start + 8 * count], text))))
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64).reshape(-1, 2)


def encode_offer(offer: Offer) -> bytes:
    """Flatten an offer: at most 24 bytes a buffer below 4 GiB, besides the head and the groups."""
    held = {
        _GROUP.pack(len(blob := encode_group(group.key)), group.name_digest) + blob
        for group in offer.groups
        if offer.rank in group.key.ranks
    }
    groups, host = b"".join(sorted(held)), xxhash.xxh3_128_digest(offer.host.encode())
    rates = offer.same_rate, offer.own_rate
    head = _HEAD.pack(_MAGIC, offer.rank, host, offer.alone_nbytes, *rates, len(held), len(groups))
    buffers = offer.buffers
    kinds = "\0".join(buffers.kinds).encode()
    columns = [encode_column(column) for column in (buffers.nbytes, buffers.slabs, buffers.kind)]
    digests = buffers.digest.astype("<u8").tobytes()
    return b"".join((head, groups, _WANTS.pack(len(buffers), len(kinds)), kinds, digests, *columns))


@dataclass(frozen=True, slots=True)
class OfferFrame:
    """An offer as it arrived.

    Attributes:
        rank, alone_nbytes, same_rate, own_rate: See `Offer`.
        host: Digest of the host.
        groups: Encoded key and name digest of each group that exists on the rank.
        wants: The buffers, not decoded; equal bytes for ranks that want the same.
    """

    rank: int
    host: bytes
    alone_nbytes: int
    same_rate: float
    own_rate: float
    groups: tuple[tuple[bytes, bytes], ...]
    wants: bytes


def parse_offer(payload: bytes) -> OfferFrame:
    """Read the head of an offer.

    Raises:
        CoordinationError: The bytes are no offer.
    """
    try:
        magic, rank, host, alone, same, own, count, groups_nbytes = _HEAD.unpack_from(payload, 0)
        at = _HEAD.size
        end = at + groups_nbytes
        groups = []
        for _ in range(count):
            nbytes, name = _GROUP.unpack_from(payload, at)
            at += _GROUP.size + nbytes
            groups.append((payload[at - nbytes : at], name))
    except struct.error as error:
        raise CoordinationError(f"what a rank offers to share is cut short: {error}") from error
    if magic != _MAGIC or at != end:
        raise CoordinationError(
            "what a rank offers to share has another format: do all ranks run the same version of dcp_core?"
        )
    return OfferFrame(rank, host, alone, same, own, tuple(groups), payload[end:])


def decode_wants(wants: bytes) -> Buffers:
    """Read the buffers of an offer.

    Raises:
        CoordinationError: The bytes are no buffers.
    """
    try:
        count, kinds_nbytes = _WANTS.unpack_from(wants, 0)
        at = _WANTS.size + kinds_nbytes
        kinds = tuple(wants[_WANTS.size : at].decode().split("\0"))
        digest = np.frombuffer(wants, dtype="<u8", count=2 * count, offset=at).reshape(count, 2)
        nbytes, at = decode_column(wants, at + 16 * count)
        slabs, at = decode_column(wants, at)
        kind, at = decode_column(wants, at)
    except (struct.error, ValueError) as error:
        raise CoordinationError(f"what a rank offers to share cannot be read: {error}") from error
    if any(len(column) != count for column in (nbytes, slabs, kind)):
        raise CoordinationError("what a rank offers to share contradicts itself")
    row = np.zeros(0, dtype=np.int64)
    return Buffers(row, digest, nbytes.astype(np.int64), slabs.astype(np.int64), kind.astype(np.uint8), kinds)
