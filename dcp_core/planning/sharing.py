"""What a load plan carries where reads are shared: who sends what to whom, and what this rank reads itself."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_core.planning.own_reads import OwnReads
from dcp_core.planning.schedule import Schedule


@dataclass(slots=True, eq=False)
class Sharing:
    """One rank's part of reading together.

    Attributes:
        rank: Its number in the job.
        schedule: What it sends and receives.
        own: What it reads itself.
        is_begun: Whether it is on its way through its schedule.
        is_done: Whether it has been through, successful or not: nobody waits for it any more.
        is_spoiled: Whether it has sent what it had failed to read.
    """

    rank: int
    schedule: Schedule
    own: OwnReads
    is_begun: bool = False
    is_done: bool = False
    is_spoiled: bool = False
