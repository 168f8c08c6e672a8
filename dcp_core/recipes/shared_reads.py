"""Reading together: what a rank offers, what the coordinator makes of all offers, and the groups that it travels in."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np

from dcp_core.adapter import BroadcastGroup, Broadcasts
from dcp_core.errors import CoordinationError, DcpError, PlanningError
from dcp_core.execution.broadcast import BroadcastWalker
from dcp_core.execution.interfaces import StorageReader
from dcp_core.planning.leaves import TensorAccess
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.own_reads import plan_own_reads
from dcp_core.planning.planners import LoadPlanner
from dcp_core.planning.rank_groups import GroupKey, Origin, SharedGroup
from dcp_core.planning.read_sources import SharingOptions, assign_sources
from dcp_core.planning.schedule import ScheduleLimits, make_schedule
from dcp_core.planning.shared_offers import HeldGroup, Offer, encode_offer, find_buffers
from dcp_core.planning.sharing import Sharing
from dcp_core.planning.source_answers import decode_sources
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.target_memory import overlapping
from dcp_core.recipes.job import Job

OpenGroups = Callable[[], Mapping[GroupKey, BroadcastGroup]]
"""Opens groups; they are opened once."""

LEAST_PROBED_BYTES = 64 << 20
"""With "auto", a rank that could share so much reads a few MiB first, to see how fast storage is."""

_HOST_DEVICE = "cpu"
_log = logging.getLogger("dcp.recipes")


class SharedReads:
    """One rank's part in reading together, for one load.

    Args:
        job: Who loads.
        groups: What the caller gave.
        batch_bytes: Buffers below this are sent together.
        mode: True, False or "auto".
        timeout_seconds: How long to wait for others in a group.
    """

    def __init__(
        self,
        job: Job,
        groups: Mapping[tuple[int, ...], Any] | None,
        batch_bytes: int,
        mode: bool | str,
        timeout_seconds: float,
    ) -> None:
        self._job = job
        self._batch_bytes = batch_bytes
        self._is_auto = mode == "auto"
        self._timeout_seconds = timeout_seconds
        self._broadcasts: Broadcasts | None = job.group.broadcasts if mode is not False else None
        self._given: Mapping[tuple[int, ...], Any] = {}
        if self._broadcasts is not None and groups:
            self._given = self._broadcasts.given_groups(groups)
        self._offer: Offer | None = None
        self._device_of: dict[str, str] = {}

    def offer(self, plan: LoadPlan, planner: LoadPlanner, reader: StorageReader) -> bytes:
        """What this rank would share, for exchange 2.

        Args:
            plan: What it wants.
            planner: Made the plan.
            reader: Will carry it out.
        """
        kinds: list[str | None] = [None] * len(plan.wanted)
        groups: tuple[HeldGroup, ...] = ()
        broadcasts = self._broadcasts
        is_standard = isinstance(planner, StandardLoadPlanner) and planner.can_share
        if broadcasts is not None and reader.shares_reads and is_standard:
            assert isinstance(planner, StandardLoadPlanner), "just seen"
            targets, devices = [planner.target_of(row) for row in range(len(kinds))], planner.devices()
            kinds = self._kinds_of(broadcasts, targets, devices)
            if planner.targets_meet:
                arrays = [
                    access.host_array(view) if device == _HOST_DEVICE else None
                    for (view, access), device in zip(targets, devices, strict=True)
                ]
                for row in np.flatnonzero(overlapping(arrays)).tolist():
                    kinds[row] = None
            groups = self._held_groups(broadcasts, planner)
        buffers, alone_nbytes = find_buffers(plan, kinds)
        host = f"{socket.gethostname()} {_boot_id()}"
        same_rate = own_rate = 0.0
        if self._is_auto and int(buffers.nbytes.sum()) >= LEAST_PROBED_BYTES:
            same_rate, own_rate = self._probe(plan, reader)
        self._offer = Offer(self._job.group.global_rank, host, buffers, alone_nbytes, groups, same_rate, own_rate)
        return encode_offer(self._offer)

    def _probe(self, plan: LoadPlan, reader: StorageReader) -> tuple[float, float]:
        """How fast storage gives what all ranks read, and what nobody else reads."""
        group = self._job.group
        with suppress(DcpError):  # if it cannot be read, the load will say so
            same = reader.probe_rate(plan, 0.0)
            return same, reader.probe_rate(plan, (group.rank + 1) / (group.world_size + 1))
        return 0.0, 0.0

    def _kinds_of(
        self, broadcasts: Broadcasts, targets: Sequence[tuple[Any, TensorAccess]], devices: Sequence[str]
    ) -> list[str | None]:
        """What carries each wanted box; None where its rank reads it by itself."""
        kind_on = {device: broadcasts.kind(device) for device in dict.fromkeys(devices)}
        kinds = [kind_on[device] for device in devices]
        for row, device in enumerate(devices):
            if device != _HOST_DEVICE and kinds[row] is not None and not broadcasts.carries(targets[row][0]):
                kinds[row] = None
        for device, kind in zip(devices, kinds, strict=True):
            if kind is not None:
                self._device_of.setdefault(kind, device)
        return kinds

    def _held_groups(self, broadcasts: Broadcasts, planner: StandardLoadPlanner) -> tuple[HeldGroup, ...]:
        found = [HeldGroup(GroupKey(ranks, kind)) for ranks in self._given for kind in self._device_of]
        existing = broadcasts.existing_groups(planner.state.values)
        found += [
            HeldGroup(GroupKey(ranks, kind), name) for ranks, name in existing.items() for kind in self._device_of
        ]
        return tuple(found)

    def answers(self, offers: Sequence[bytes]) -> tuple[Sequence[bytes], bytes]:
        """On the coordinator: who reads what, an answer for each rank; and a token of this load if it shares anything.

        Args:
            offers: Of all ranks.
        """
        sources = assign_sources(offers, SharingOptions(self._batch_bytes, auto=self._is_auto))
        if self._is_auto or any(sources.answers):
            _log.info("shared reads: %s", sources.reason)
        return sources.answers, secrets.token_hex(8).encode() if any(sources.answers) else b""

    def shared_plan(self, plan: LoadPlan, answer: bytes) -> LoadPlan:
        """The plan after readers have been chosen.

        Args:
            plan: What this rank wants.
            answer: From the coordinator.
        """
        assert self._offer is not None, "offered before"
        shared = decode_sources(answer, self._offer)
        if not len(shared):
            return plan
        on_host = all(self._device_of[group.key.kind] == _HOST_DEVICE for group in shared.groups)
        limits = ScheduleLimits(self._batch_bytes, one_group_at_a_time=not on_host)
        schedule = make_schedule(plan, shared, limits)
        rank = self._job.group.global_rank
        own = plan_own_reads(plan, schedule, rank)
        own.plan.sharing = Sharing(rank, schedule, own)
        return own.plan

    @contextmanager
    def taking_part(self, plan: LoadPlan, planner: LoadPlanner, token: str) -> Iterator[OpenGroups]:
        """Take part in what a plan shares, from the moment on at which others count on this rank.

        Gives what opens the groups of the plan's schedule, in their order; they are closed in it, error or not. A rank
        on which something goes wrong before it has begun to broadcast goes through its schedule all the same, with
        whatever is there: the final exchange tells the others of its error.

        Args:
            plan: With readers chosen.
            planner: Holds the targets.
            token: Of this load.
        """
        groups: dict[GroupKey, BroadcastGroup] = {}
        sharing, broadcasts = plan.sharing, self._broadcasts
        if sharing is None or broadcasts is None:
            yield lambda: groups
            return

        tried: list[bool] = []  # whoever could not open them would wait in vain once more

        def open_groups() -> Mapping[GroupKey, BroadcastGroup]:
            if not tried:
                tried.append(True)
                self._open_groups(sharing.schedule.groups, broadcasts, token, groups)
            return groups

        try:
            yield open_groups
            _check_shared(sharing)
        except Exception as error:
            can_walk = not sharing.is_begun and (not tried or len(groups) == len(sharing.schedule.groups))
            if can_walk and isinstance(planner, StandardLoadPlanner):
                with suppress(Exception):
                    BroadcastWalker(sharing, plan.wanted, open_groups(), planner.target_of).finish()
            self._leave(sharing, broadcasts, token, groups, error)
            raise
        except BaseException as error:
            self._leave(sharing, broadcasts, token, groups, error)
            raise
        finally:
            for group in groups.values():
                with suppress(Exception):
                    group.close()

    def _open_groups(
        self, wanted: Sequence[SharedGroup], broadcasts: Broadcasts, token: str, groups: dict[GroupKey, BroadcastGroup]
    ) -> None:
        for shared in wanted:
            key = shared.key
            given = {Origin.GIVEN: self._given.get(key.ranks), Origin.EXISTING: shared.name}.get(shared.origin)
            groups[key] = broadcasts.open(
                key.ranks, given, self._timeout_seconds, token=token, device=self._device_of[key.kind]
            )

    def _leave(
        self,
        sharing: Sharing,
        broadcasts: Broadcasts,
        token: str,
        groups: Mapping[GroupKey, BroadcastGroup],
        error: BaseException,
    ) -> None:
        """Tell the members of all groups that this rank broadcasts no more, unless it has done all it should."""
        if sharing.is_done:
            return
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        for shared in sharing.schedule.groups:
            key = shared.key
            with suppress(Exception):
                if key in groups:
                    groups[key].fail(CoordinationError(reason))
                else:
                    text = f"rank {self._job.group.global_rank} had failed before: {reason}"
                    broadcasts.give_up(key.ranks, text, token=token, device=self._device_of[key.kind])


def _check_shared(sharing: Sharing) -> None:
    """See that a reader that came back without an error has sent what others wait for.

    Raises:
        PlanningError: It has not.
    """
    remedy = "let the reader say `shares_reads = False`: then every rank reads for itself"
    if not sharing.is_done:
        raise PlanningError(
            f"execute_read did not carry out the plan's `sharing`, so others wait for its reads; {remedy}"
        )
    if sharing.is_spoiled:
        raise PlanningError(
            "execute_read went on after a read had failed, but others have got what was in the targets then; raise the "
            f"error, or {remedy}"
        )


@cache
def _boot_id() -> str:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return str(os.getppid())
