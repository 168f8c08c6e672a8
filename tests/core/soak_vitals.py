"""What a rank of a soak uses, by and by; and whether that stays flat."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from tests.background_processes import children_of
from tests.core.fault_jobs import Seat
from tests.core.process_use import Use, give_memory_back, open_in, settled_use

MOST_GROWTH_NBYTES = 8 << 20
LOG_PREFIX = "dcp-background-"


@dataclass(frozen=True)
class Vitals:
    """What one rank uses at one moment.

    Attributes:
        event: After which event.
        own: Its process.
        children: Its background processes.
        messages: Files through which the ranks talk.
        temporary: Names among the temporary files of the job.
        open_files: Files in memory-backed directories, where the checkpoints are, that are open or mapped; the logs of
            background processes apart.
    """

    event: int
    own: Use
    children: tuple[Use, ...]
    messages: int
    temporary: tuple[str, ...]
    open_files: tuple[str, ...]

    @property
    def uses(self) -> tuple[Use, ...]:
        """Of its process, then of its background processes."""
        return (self.own, *self.children)

    @classmethod
    def of(cls, seat: Seat, event: int, first: Vitals | None) -> Vitals:
        """Look, while no rank does anything else; what is more than at the first look may go yet."""
        seat.share()
        give_memory_back()
        pids = [os.getpid(), *children_of(os.getpid())]
        usual = [None] * len(pids) if first is None else [first.own, *first.children]
        uses = [settled_use(pid, before) for pid, before in zip(pids, usual, strict=False)]
        found = cls(
            event,
            uses[0],
            tuple(uses[1:]),
            len(os.listdir(seat.context.channel_directory)),
            tuple(sorted(os.listdir(tempfile.gettempdir()))),
            tuple(name for pid in pids for name in open_in(pid, "/dev/shm") if LOG_PREFIX not in name),
        )
        seat.share()
        return found


def check_flat(ranks: Sequence[Sequence[Vitals]], most_growth_nbytes: int = MOST_GROWTH_NBYTES) -> None:
    """See that the last look finds no more than the first; and of memory, than the one halfway.

    What is used once for all (an arena of the allocator, a module) comes at any time early on; what leaks comes in the
    second half as well.

    Args:
        ranks: The looks of each rank.
        most_growth_nbytes: How much more memory may be in use than halfway; and four times as much as at first.
    """
    for rank, looks in enumerate(ranks):
        first, halfway, last = looks[0], looks[(len(looks) - 1) // 2], looks[-1]
        text = f"rank {rank}:\n" + "\n".join(map(str, looks))
        assert len(last.children) == 1, text
        for before, between, after in zip(first.uses, halfway.uses, last.uses, strict=True):
            assert after.threads <= before.threads, text
            assert after.descriptors <= before.descriptors, text
            assert after.resident_nbytes <= between.resident_nbytes + most_growth_nbytes, text
            assert after.resident_nbytes <= before.resident_nbytes + 4 * most_growth_nbytes, text
        assert last.messages <= first.messages + len(ranks), text
        assert set(last.temporary) <= set(first.temporary), text
        assert not last.open_files, text


def table_of(ranks: Sequence[Sequence[Vitals]]) -> str:
    """The looks as text: memory in MiB of each rank and of its background process."""
    lines = ["event | ranks, MiB | background, MiB | threads | descriptors | background descriptors | messages"]
    for looks in zip(*ranks, strict=True):
        own = [look.own for look in looks]
        behind = [use for look in looks for use in look.children]
        cells = [
            str(looks[0].event),
            " ".join(f"{use.resident_nbytes / 2**20:.1f}" for use in own),
            " ".join(f"{use.resident_nbytes / 2**20:.1f}" for use in behind),
            " ".join(str(use.threads) for use in own),
            " ".join(str(use.descriptors) for use in own),
            " ".join(str(use.descriptors) for use in behind),
            str(looks[0].messages),
        ]
        lines.append(" | ".join(cells))
    return "\n".join(lines)
