"""What a stranger puts in the place of a rank's message is an error of ours where it is read, or does no harm."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_core import errors
from dcp_core.adapter import KeyValueChannel, ProcessGroup
from dcp_core.api import load, save
from dcp_core.coordination.frames import FRAME_BYTES
from dcp_core.coordination.verdict import decode_failure
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import Outcome, Seat, memory_directory, outcome_of, poison_of, state_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(170)]

WORLD = 2
ROUNDS = 30
PATIENCE_SECONDS = 1.0
OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.DcpError)}


class Garbling:
    """A channel that changes one of the messages that are put into it."""

    def __init__(self, channel: KeyValueChannel, number: int, chance: random.Random) -> None:
        self._channel = channel
        self._left = number
        self._chance = chance

    def put(self, name: str, payload: bytes) -> None:
        self._left -= 1
        self._channel.put(name, _garbled(payload, self._chance) if self._left == 0 else payload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class RoundAdapter(NumpyRankAdapter):
    """Ranks whose group is another one in each round, so that nobody is out of step after an error.

    Args:
        number: The round.
        message: Which message this rank garbles, from 1; 0: none.
    """

    def __init__(self, number: int, message: int) -> None:
        super().__init__()
        self._number, self._message = number, message

    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        found = super().process_group(group)
        assert found.channel is not None
        channel: Any = Garbling(found.channel, self._message, random.Random(self._number))
        return replace(found, channel=channel, key=f"round-{self._number}")


def test_an_error_that_is_nested_without_end_is_an_error_of_ours() -> None:
    assert isinstance(decode_failure(b"[" * 100_000), errors.CoordinationError)


def _garbled(payload: bytes, chance: random.Random) -> bytes:
    """Other bytes: most of them begin as they should."""
    head = payload[: chance.choice((0, 2, min(FRAME_BYTES, len(payload) // 2), len(payload) // 2))]
    kind = chance.randrange(7)
    if kind == 0:
        changed = bytearray(payload)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed)
    if kind == 1:
        return payload[: chance.randrange(len(payload))]
    if kind == 2:
        return payload + chance.randbytes(chance.randrange(1, 40))
    if kind == 3:
        return head + chance.randbytes(chance.randrange(80))
    if kind == 4:
        return head + zlib.compress(bytes(50 << 20))
    if kind == 5:
        return head + b"[" * 100_000
    return bytes([2]) + payload[1:2] + payload[2 : 2 + payload[1]] + json.dumps({"kind": "X", "causes": 3}).encode()


def _go_wrong(context: RankContext, root: Path, seed: int) -> list[tuple[str, Outcome]]:
    """Save and load, many times; each time one message of one rank is another."""
    seat = Seat.of(context)
    seat.save(state_of(seat.rank, WORLD, 1), checkpoint_id=root / "good")
    chance = random.Random(seed)
    outcomes = []
    for number in range(ROUNDS):
        culprit, message, verb = chance.randrange(WORLD), chance.randrange(1, 5), chance.choice(("save", "load"))
        adapter = RoundAdapter(number, message if seat.rank == culprit else 0)
        given = {"adapter": adapter, "process_group": seat.members, "timeout_seconds": PATIENCE_SECONDS}
        if verb == "save":
            state = state_of(seat.rank, WORLD, 2)
            outcome = outcome_of(save, state, checkpoint_id=root / str(number), durable=False, **given)
        else:
            outcome = outcome_of(load, poison_of(seat.rank, WORLD), checkpoint_id=root / "good", **given)
        outcomes.append((f"{verb}, message {message} of rank {culprit}", outcome))
        seat.share()
    return outcomes


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.mark.parametrize("seed", [1, 2])
def test_other_messages_than_ranks_sent_are_errors_of_ours_or_make_no_difference(root: Path, seed: int) -> None:
    found = run_ranks(_go_wrong, WORLD, root, seed, timeout_seconds=150)
    wrong = 0
    for ranks in zip(*found, strict=True):
        for what, outcome in ranks:
            assert outcome.kind == "" or outcome.kind in OURS, (what, outcome)
            assert outcome.seconds < 5 * PATIENCE_SECONDS, (what, outcome)
            wrong += outcome.kind != ""
    assert wrong > ROUNDS // 4
