"""All contestants by name, and which of them are here."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from benchmarks.cases import Case, Settings
from benchmarks.contestant import Contestant
from benchmarks.open_weights import OursOpenWeights, TorchOpenWeights
from benchmarks.ours import Ours, OursFull, OursReplan, OursUnverified
from benchmarks.plain import Plain, PlainHashed
from benchmarks.pypi_peers import Orbax, TorchCheckpointing, TorchSnapshot
from benchmarks.ranks import Rank
from benchmarks.torch_peers import Safetensors, TorchDcp, TorchHuggingFace

CONTESTANTS: dict[str, type[Contestant]] = {
    contestant.name: contestant
    for contestant in (
        Ours, OursUnverified, OursFull, OursReplan, TorchDcp, TorchHuggingFace, Safetensors, Plain, PlainHashed,
        TorchSnapshot, Orbax, TorchCheckpointing, OursOpenWeights, TorchOpenWeights,
    )
}  # fmt: skip


def make(name: str, settings: Settings, rank: Rank) -> Contestant:
    """A contestant for one job."""
    return CONTESTANTS[name](settings, rank)


def optional_ones() -> tuple[str, ...]:
    """Names of those that may be missing."""
    return tuple(name for name, contestant in CONTESTANTS.items() if contestant.module is not None)


def why_not_installed(name: str) -> str | None:
    """Why a contestant can't take part in any case here, or None; imports nothing of it."""
    module = CONTESTANTS[name].module
    try:
        if module is None or importlib.util.find_spec(module) is not None:
            return None
    except ModuleNotFoundError:
        pass
    return f"not installed: there is no module {module!r}"


def packages_of(names: Sequence[str]) -> list[str]:
    """The distributions behind contestants."""
    return sorted({package for name in names for package in CONTESTANTS[name].packages})


def taking_part(case: Case, wanted: Sequence[str], left_out: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Who runs in a case, and who does not, with the reason.

    Args:
        case: The case.
        wanted: Names that were asked for; those that the case's workload does not have are left out silently.
        left_out: Who can't run at all here, and why.
    """
    reasons = {}
    for name in (name for name in case.of.contestants if name in wanted):
        reason = left_out.get(name) or CONTESTANTS[name].refuses(case)
        if reason is not None:
            reasons[name] = reason
    running = [name for name in case.of.contestants if name in wanted and name not in reasons]
    return running, reasons
