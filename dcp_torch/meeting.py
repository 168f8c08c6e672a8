"""Where the members of one group of a load meet: names in the job's store, and what a backend of torch leaves there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch lists no exports

from dcp_core.coordination import meeting


class Meeting(meeting.Meeting):
    """What one rank does and sees there.

    Args:
        store: The job's, on a connection that nobody waits on.
        load: Prefix of the load.
        device: What type of device the group is for.
        ranks: Global ranks of the members.
        rank: Global rank of this one.

    Attributes:
        store: For what the backend of the group keeps there.
    """

    def __init__(self, store: Any, load: str, device: str, ranks: Sequence[int], rank: int) -> None:
        super().__init__(store, load, device, ranks, rank)
        self.store = PrefixStore(f"{self.name}/backend", store)

    def remove(self) -> None:
        """Remove what this rank left, once every member has ended the load.

        Raises:
            RuntimeError: The store failed.
        """
        super().remove()
        if self.has_gathered:
            own = self.ranks.index(self.rank)
            self.store.delete_key(f"0/{own}")  # of gloo: where it listens
            if own == 0:
                self.store.delete_key("0")  # of NCCL and its like: the id of the communicator
