"""This project's own functions, with checksums on, off, and full, and with plans made anew at every save."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from benchmarks.cases import Case
from benchmarks.contestant import Contestant

if TYPE_CHECKING:
    from benchmarks.states import State
    from dcp_core.execution.interfaces import Verify


class Ours(Contestant):
    """`dcp_torch.save` and `dcp_torch.load` with their defaults."""

    name = "ours"
    about = "dcp_torch; checksums are written and checked"
    packages = ("hyper-dcp", "xxhash")
    caches_plans: ClassVar[bool] = True

    @property
    def verify(self) -> Verify:
        return self.settings.verify

    def save(self, state: State, directory: str) -> None:
        import dcp_torch

        planner = dcp_torch.StandardSavePlanner(enable_plan_caching=self.caches_plans)
        dcp_torch.save(state.tensors, checkpoint_id=directory, planner=planner, durable=self.settings.durable)

    def load(self, state: State, directory: str) -> None:
        import dcp_torch

        dcp_torch.load(state.tensors, checkpoint_id=directory, verify=self.verify)


class OursReplan(Ours):
    """Every save plans anew, as the first one does."""

    name = "ours-replan"
    about = "dcp_torch; no plan is kept from one save to the next"
    caches_plans = False

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return "loads as ours does" if case.measure in ("load", "cold") else None


class OursUnverified(Ours):
    """Checksums are written, and not checked at load."""

    name = "ours-unverified"
    about = "dcp_torch; checksums are written, not checked"

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return "saves as ours does" if case.measure == "save" else None

    @property
    def verify(self) -> Verify:
        return False


class OursFull(OursUnverified):
    """Every block that is touched is read whole and checked."""

    name = "ours-full"
    about = 'dcp_torch; verify="full"'

    @property
    def verify(self) -> Verify:
        return "full"
