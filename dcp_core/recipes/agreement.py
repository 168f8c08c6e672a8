"""What the first exchange of a call carries: digests of the arguments that must agree, and offers of known plans.

Everything is small: an agreement takes at most 200 bytes a rank, framing included.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from dcp_core.errors import ArgumentsDifferError, CoordinationError

_HEAD = struct.Struct("<BBB")
_OFFER = struct.Struct("<16sQ")
_ARGUMENT_BYTES = 6
_TEXT_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Offer:
    """A plan that a rank could use again.

    Attributes:
        plan_digest: Digest of the global plan, 16 bytes.
        number: The rank's share in the check that replicated values agree.
    """

    plan_digest: bytes
    number: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """One rank's part of the first exchange.

    Attributes:
        arguments: Digest of each argument that must agree, in a fixed order.
        offers: Plans that it knows for its present structure, the most recent first.
        flag: One bit for the recipe's own use.
    """

    arguments: tuple[bytes, ...]
    offers: tuple[Offer, ...] = ()
    flag: bool = False

    def to_bytes(self) -> bytes:
        """Flatten."""
        head = _HEAD.pack(len(self.arguments), len(self.offers), self.flag)
        offers = b"".join(_OFFER.pack(offer.plan_digest, offer.number) for offer in self.offers)
        return head + b"".join(self.arguments) + offers

    @classmethod
    def from_bytes(cls, raw: bytes) -> Agreement:
        """Undo `to_bytes`.

        Raises:
            CoordinationError: The bytes are no agreement.
        """
        try:
            arguments, offers, flag = _HEAD.unpack_from(raw)
            start = _HEAD.size + arguments * _ARGUMENT_BYTES
            digests = tuple(raw[at : at + _ARGUMENT_BYTES] for at in range(_HEAD.size, start, _ARGUMENT_BYTES))
            found = tuple(Offer(*_OFFER.unpack_from(raw, start + i * _OFFER.size)) for i in range(offers))
        except struct.error as error:
            raise CoordinationError(f"{len(raw)} bytes are no agreement: {error}") from error
        return cls(digests, found, bool(flag))


def argument_digests(arguments: Mapping[str, object]) -> tuple[bytes, ...]:
    """Digest of each argument's text."""
    return tuple(xxhash.xxh3_64_digest(repr(value).encode())[:_ARGUMENT_BYTES] for value in arguments.values())


def check_arguments(agreements: Sequence[Agreement], arguments: Mapping[str, object]) -> None:
    """Check that all ranks passed what the coordinator passed.

    Args:
        agreements: All ranks' parts, in rank order.
        arguments: The coordinator's arguments by name.

    Raises:
        ArgumentsDifferError: Some did not; it names the arguments and the ranks.
    """
    lines = []
    for position, (name, value) in enumerate(arguments.items()):
        expected = agreements[0].arguments[position]
        given = [part.arguments[position : position + 1] for part in agreements]
        others = [rank for rank, digest in enumerate(given) if digest != (expected,)]
        if others:
            shown = ", ".join(map(str, others[:8])) + (" and more" if len(others) > 8 else "")
            text = repr(value)
            text = text if len(text) <= _TEXT_SHOWN else text[: _TEXT_SHOWN - 3] + "..."
            lines.append(f"{name} is {text} on rank 0 and something else on rank {shown}")
    if lines:
        raise ArgumentsDifferError("; ".join(lines) + ": pass the same arguments on all ranks")


def common_plan(agreements: Sequence[Agreement]) -> bytes:
    """The most recent plan that every rank offers and whose replicated values agree; empty if there is none."""
    for offer in agreements[0].offers:
        numbers = [
            next((other.number for other in part.offers if other.plan_digest == offer.plan_digest), None)
            for part in agreements
        ]
        if all(number is not None for number in numbers) and sum(n for n in numbers if n is not None) % (1 << 64) == 0:
            return offer.plan_digest
    return b""
