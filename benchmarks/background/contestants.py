"""What takes part: ways to save in the background, and the copy that every one of them has to make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.background.cases import AsyncCase, AsyncSettings
from benchmarks.ranks import Rank

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from benchmarks.states import State


class AsyncContestant(ABC):
    """One way to bring a state to safety and to go on. Every rank makes one, in the same order, and calls it.

    Attributes:
        name: What selects it.
        about: One line for the table.
        saves: Whether there is a checkpoint afterwards.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    saves: ClassVar[bool] = True

    def __init__(self, case: AsyncCase, settings: AsyncSettings, rank: Rank) -> None:
        self.case = case
        self.settings = settings
        self.rank = rank

    @classmethod
    def refuses(cls, case: AsyncCase) -> str | None:
        """Why it takes no part in a case, or None."""
        del case
        return None

    @abstractmethod
    def begin(self, state: State, directory: str) -> Future[Any]:
        """Return when the state may change; the future is done when the checkpoint is committed."""

    @abstractmethod
    def load(self, state: State, directory: str) -> None:
        """Fill the state from what was saved."""


class OursMailbox(AsyncContestant):
    """`dcp_torch.async_save` with its defaults."""

    name = "ours"
    about = "dcp_torch.async_save; ranks agree through files"
    options: ClassVar[Mapping[str, Any]] = {}

    def begin(self, state: State, directory: str) -> Future[Any]:
        import dcp_torch

        response = dcp_torch.async_save(
            state.tensors, checkpoint_id=directory, durable=self.settings.durable, **self.options
        )
        return response.persist_completion

    def load(self, state: State, directory: str) -> None:
        import dcp_torch

        dcp_torch.load(state.tensors, checkpoint_id=directory)


class OursGloo(OursMailbox):
    """Background processes that load torch and talk through the job's store."""

    name = "ours-gloo"
    about = "the same with use_gloo=True: background processes talk through the job's store"
    options: ClassVar[Mapping[str, Any]] = {"use_gloo": True}

    @classmethod
    def refuses(cls, case: AsyncCase) -> str | None:
        return "one rank has nobody to talk to" if case.world_size == 1 else None


class OursAlone(OursMailbox):
    """Ranks that do not agree, so that no plan is kept from one save to the next."""

    name = "ours-alone"
    about = "the same with use_collectives=False: every rank by itself, plans made anew"
    options: ClassVar[Mapping[str, Any]] = {"use_collectives": False}

    def load(self, state: State, directory: str) -> None:
        import dcp_torch

        dcp_torch.load(state.tensors, checkpoint_id=directory, use_collectives=False)


class TorchThread(AsyncContestant):
    """torch DCP's, in a process group of its own: on the trainer's it would meet the trainer's own collectives."""

    name = "torch-thread"
    about = "torch DCP async_save, saved by a thread, in a process group of its own"
    kind: ClassVar[str] = "THREAD"

    def __init__(self, case: AsyncCase, settings: AsyncSettings, rank: Rank) -> None:
        import torch.distributed as dist

        super().__init__(case, settings, rank)
        self._group: ProcessGroup | None = dist.new_group(backend="gloo")

    def begin(self, state: State, directory: str) -> Future[Any]:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        found = async_save(
            state.tensors,
            storage_writer=FileSystemWriter(directory, sync_files=self.settings.durable),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType[self.kind],
        )
        if not isinstance(found, Future):
            raise TypeError(f"torch's async_save returned {type(found).__name__}")
        return found

    def load(self, state: State, directory: str) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        load(state.tensors, storage_reader=FileSystemReader(directory))


class TorchProcess(TorchThread):
    """torch DCP's with a process."""

    name = "torch-process"
    about = "torch DCP async_save, saved by a process"
    kind = "PROCESS"


class Copy(AsyncContestant):
    """The floor: what a rank has to stage is copied into memory that was touched before, with torch's threads."""

    name = "copy"
    about = "torch's copy_ of what a rank has to stage into touched memory: the floor"
    saves = False

    def __init__(self, case: AsyncCase, settings: AsyncSettings, rank: Rank) -> None:
        super().__init__(case, settings, rank)
        self._targets: list[Tensor] = []

    def begin(self, state: State, directory: str) -> Future[Any]:
        del directory
        sources = self._share(state)
        if not self._targets:
            self._targets = [source.clone() for source in sources]
        for target, source in zip(self._targets, sources, strict=True):
            self._copy(target, source)
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def load(self, state: State, directory: str) -> None:
        raise NotImplementedError("nothing was saved")

    def _share(self, state: State) -> list[Tensor]:
        """All that this rank holds, or its part of what all hold."""
        flat = [tensor.view(-1) for tensor in state.locals.values()]
        if not self.case.of.is_replicated:
            return flat
        return [tensor.tensor_split(self.rank.world_size)[self.rank.rank] for tensor in flat]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


class CopyByOne(Copy):
    """The same copy by one thread."""

    name = "copy-1"
    about = "the same by one thread of numpy"

    @classmethod
    def refuses(cls, case: AsyncCase) -> str | None:
        return "as copy: every rank has one core" if case.world_size > 1 else None

    def _copy(self, target: Tensor, source: Tensor) -> None:
        import numpy as np

        np.copyto(target.numpy(), source.numpy())


NOTHING = "none"
"""Training without saves; no contestant, as nothing is called."""

ASYNC_CONTESTANTS: dict[str, type[AsyncContestant]] = {
    contestant.name: contestant
    for contestant in (
        OursMailbox, OursGloo, OursAlone, TorchThread, TorchProcess, Copy, CopyByOne,
    )
}  # fmt: skip


def make(names: Sequence[str], case: AsyncCase, settings: AsyncSettings, rank: Rank) -> dict[str, AsyncContestant]:
    """Contestants for one job."""
    return {name: ASYNC_CONTESTANTS[name](case, settings, rank) for name in names if name != NOTHING}


def taking_part(case: AsyncCase, wanted: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Who runs in a case, and who of those that were asked for does not, with the reason."""
    named = [name for name in case.contestants if name in wanted or name == NOTHING]
    asked = {name: ASYNC_CONTESTANTS[name].refuses(case) for name in named if name != NOTHING}
    reasons = {name: reason for name, reason in asked.items() if reason is not None}
    return [name for name in named if name not in reasons], reasons
