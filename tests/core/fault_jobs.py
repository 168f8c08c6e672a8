"""What the end-to-end fault tests share: states that tell which save they are, and ranks that meet and report."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dcp_core import api
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.coordination.exchange import Exchange
from dcp_core.coordination.frames import pack, unpack
from dcp_core.formats.metadata_file import file_names
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext

PATIENT_SECONDS = 60.0
"""A deadline that no test reaches: who waits for it is much later than `SOON_SECONDS`."""

SOON_SECONDS = 10.0
"""An error of one rank reaches the others faster than this."""

_MEETING_SECONDS = 60.0
_SHAPE = (12, 10)


@dataclass(frozen=True)
class Seat:
    """One rank of one of several jobs that share the processes of a `run_ranks`.

    The processes are dealt out in order: with `world` 2, job 0 has processes 0 and 1, job 1 has 2 and 3. These are
    numpy ranks; a subclass makes ranks of another framework of them, and takes the same states.
    """

    adapter: ClassVar[type[Any]] = NumpyRankAdapter

    context: RankContext
    job: int
    rank: int
    world: int
    members: tuple[int, ...]

    @classmethod
    def of(cls, context: RankContext, world: int | None = None) -> Seat:
        size = context.world_size if world is None else world
        job, rank = divmod(context.rank, size)
        return cls(context, job, rank, size, tuple(range(job * size, (job + 1) * size)))

    def share(self, payload: bytes = b"") -> list[bytes]:
        """Wait for the other ranks of the job, and see what each of them says."""
        channel = DirectoryChannel(self.context.channel_directory)
        meeting = Exchange(self.rank, self.world, channel, key=f"meet-{self.job}", timeout_seconds=_MEETING_SECONDS)
        return unpack(meeting.run("meet", payload, compute=lambda payloads: pack(*payloads)))

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Be a rank of the job for a while."""
        yield

    def save(self, state: Mapping[str, Any], **arguments: Any) -> None:
        api.save(state, **self._given() | arguments)

    def load(self, state: Mapping[str, Any], **arguments: Any) -> None:
        api.load(state, **self._given() | arguments)

    def async_save(self, state: Mapping[str, Any], **arguments: Any) -> api.AsyncSaveResponse:
        return api.async_save(state, **self._given() | arguments)

    def _given(self) -> dict[str, Any]:
        return {"adapter": self.adapter(), "process_group": self.members, "timeout_seconds": PATIENT_SECONDS}


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank.

    Attributes:
        kind: Class of what it raised; empty where it returned.
        message: Its text.
        seconds: How long the call took.
        blamed: The ranks that its causes name.
    """

    kind: str
    message: str
    seconds: float
    blamed: tuple[int, ...] = ()


def outcome_of(call: Callable[..., object], *args: Any, **kwargs: Any) -> Outcome:
    """Make a call and report, whatever it raises."""
    started = time.monotonic()
    try:
        call(*args, **kwargs)
    except BaseException as error:  # also what is no Exception: interrupts are part of the tests
        blamed = tuple(cause.rank for cause in getattr(error, "causes", ()))
        return Outcome(type(error).__name__, str(error), time.monotonic() - started, blamed)
    return Outcome("", "", time.monotonic() - started)


def matrix(tag: int) -> npt.NDArray[np.float32]:
    """The sharded matrix of a save."""
    return np.random.default_rng(tag).standard_normal(_SHAPE).astype(np.float32)


def state_of(rank: int, world: int, tag: int, dim: int = 0) -> dict[str, Any]:
    """What a rank saves: two sharded tensors, a replicated one, common values, and values of its own."""
    ragged = np.arange(7, dtype=np.uint8) + np.uint8(tag % 200)
    return {
        "model": {
            "w": ShardedArray.cut(matrix(tag), even_boxes(_SHAPE, world, rank, dim), "float32"),
            "odd": ShardedArray.cut(ragged, even_boxes((7,), world, rank), "uint8"),
            "b": np.arange(5.0) * tag,
        },
        "step": tag,
        "notes": ["run", tag],
        "of": {f"rank{rank}": (rank, tag)},
    }


def poison_of(rank: int, world: int, dim: int = 0, *, own: bool = True) -> dict[str, Any]:
    """A target of the same structure in which every value is one that no save holds."""
    state = state_of(rank, world, 0, dim)
    for part in state["model"]["w"].arrays:
        part[...] = np.nan
    for part in state["model"]["odd"].arrays:
        part[...] = 255
    state["model"]["b"][...] = -1.0
    state |= {"step": -1, "notes": ["poison"], "of": {f"rank{rank}": (-1, -1)} if own else {}}
    if not own:
        del state["of"]
    return state


def as_tensors(value: Any, tensor: Callable[[Any], Any], annotate: Callable[..., Any]) -> Any:
    """A state of numpy ranks as that of another framework, in the same memory.

    Args:
        value: The state, or a part of it.
        tensor: Makes a tensor over an array.
        annotate: Notes on a tensor which part of a global one it is.
    """
    if isinstance(value, dict):
        return {key: as_tensors(part, tensor, annotate) for key, part in value.items()}
    if isinstance(value, ShardedArray):
        (box,), (array,) = value.boxes, value.arrays
        return annotate(tensor(array), offsets=box.offsets, global_shape=value.global_shape)
    return tensor(value) if isinstance(value, np.ndarray) else value


def take_values(state: Any, loaded: Any) -> None:
    """Take over what is no memory from a state that `as_tensors` made and a load filled."""
    for key, value in state.items():
        if isinstance(value, dict):
            take_values(value, loaded[key])
        elif not isinstance(value, (ShardedArray, np.ndarray)):
            state[key] = loaded[key]


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal to the last bit, containers and types included."""
    if isinstance(left, ShardedArray) and isinstance(right, ShardedArray):
        return left.boxes == right.boxes and same(list(left.arrays), list(right.arrays))
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def is_untouched(target: Mapping[str, Any], rank: int, world: int, dim: int = 0, *, own: bool = True) -> bool:
    """Whether a target still holds nothing but poison."""
    return same(target, poison_of(rank, world, dim, own=own))


def whole_tag(target: Mapping[str, Any], rank: int, world: int, dim: int = 0) -> int:
    """Which save a loaded target holds.

    Raises:
        AssertionError: It holds a mixture, or something that nobody saved.
    """
    tag = target["step"]
    expected = {key: value for key, value in state_of(rank, world, tag, dim).items() if key in target}
    assert same(dict(target), expected), f"rank {rank} loaded something else than save {tag}: {target}"
    assert isinstance(tag, int)
    return tag


def loaded_tag(seat: Seat, directory: str | os.PathLike[str], dim: int = 1, *, own: bool = True) -> int:
    """Load on all ranks of the job into poisoned targets, and say which save it was."""
    target = poison_of(seat.rank, seat.world, dim, own=own)
    seat.load(target, checkpoint_id=directory)
    return whole_tag(target, seat.rank, seat.world, dim)


def names_in(directory: str | os.PathLike[str]) -> list[str]:
    """The names in a directory; none for one that does not exist."""
    return sorted(os.listdir(directory)) if os.path.isdir(directory) else []


def checkpoint_names(directory: Path) -> list[str]:
    """The names that the complete checkpoint in a directory consists of."""
    return sorted([".metadata", *file_names((directory / ".metadata").read_bytes())])


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in memory where there is one: the tests sync thousands of times."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="dcp faults ") as path:
        yield Path(path)
