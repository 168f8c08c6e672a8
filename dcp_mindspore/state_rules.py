"""What a call knows of a MindSpore state beyond its values: `layouts=`, and how Cells and optimizers give their state.

In: the layouts that the caller passed; the Cells of the state, as the core asks for their state; then all leaves with
their names. Out: shards in place of the plain tensors that a layout is known for.

A leaf's layout is the one under its printed name, or under its parameter's name. What an optimizer keeps for a
parameter (`moment1.fc.weight` for `fc.weight`) is cut as that parameter is, unless it has a layout of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspore import nn
from mindspore.experimental.optim import Optimizer as GroupedOptimizer

from dcp_core.adapter import StateRules
from dcp_core.errors import ArgumentError, DcpError, UnsupportedValueError
from dcp_core.planning.leaves import LocalTensor
from dcp_core.planning.placed_shards import place_by_chunk, place_by_layout
from dcp_core.planning.strategy_layouts import KnownLayout, known_layout, layouts_of_rank
from dcp_mindspore.annotate import chunk_of
from dcp_mindspore.describers import describe_laid_out, is_laid_out
from dcp_mindspore.optimizer_state import OptimizerState, kept_for

_logger = logging.getLogger("dcp.mindspore")

_NAMES_SHOWN = 20
_warned: set[tuple[str, ...]] = set()


class MindSporeRules(StateRules):
    """`dcp_core.adapter.StateRules` for MindSpore: serves one call.

    Args:
        rank: Tells this process's rank in the job, as layouts name ranks.
        layouts: What the caller passed: layouts by name, or by rank and name; None for none.
    """

    def __init__(self, rank: Callable[[], int], layouts: Any = None) -> None:
        self._rank = rank
        self._given = layouts
        self._in_cells: dict[int, Any] = {}
        self._bases: dict[int, Any] = {}

    def state_of(self, value: Any) -> object:
        """The state of a Stateful object; of an optimizer of `mint` also its groups' learning rates and the like."""
        state = value.state_dict()
        if not isinstance(value, nn.Cell):
            return state
        self._in_cells.update((id(parameter), parameter) for parameter in value.get_parameters())
        for _, cell in value.cells_and_names():
            if isinstance(cell, (nn.Optimizer, GroupedOptimizer)):
                self._bases.update(kept_for(cell))
        return OptimizerState(value).with_groups(state) if isinstance(value, GroupedOptimizer) else state

    def hand_state(self, value: Any, state: Any) -> None:
        """Give a Stateful object its state.

        A Cell's parameters and buffers have been filled in place by now, and stay where they are: its own
        `load_state_dict` would put new memory in their place. So it is called only where a class or a hook has
        something to do there.
        """
        if isinstance(value, GroupedOptimizer):
            state = OptimizerState(value).take_groups(state)
        if not isinstance(value, nn.Cell) or not _loads_plainly(value):
            value.load_state_dict(state)
            return
        for name, cell in value.cells_and_names():
            key = f"{name}.{_EXTRA}" if name else _EXTRA
            if key in state and type(cell).set_extra_state is not nn.Cell.set_extra_state:
                cell.set_extra_state(state[key])

    def place(
        self, names: Sequence[str], values: Sequence[Any], tensors: Sequence[LocalTensor | None]
    ) -> Sequence[LocalTensor | None]:
        """Put shards in the place of plain tensors that a layout is known for.

        Raises:
            ArgumentError: Layouts in no form that is known, or not one that belongs to this state.
            UnsupportedValueError: A tensor that its layout does not fit.
        """
        layouts = _Layouts({} if self._given is None else self._given, self._rank())
        for name, value, tensor in zip(names, values, tensors, strict=True):
            if tensor is not None:
                layouts.look_up(name, value)
        placed = [
            tensor if tensor is None else self._place(name, value, tensor, layouts)
            for name, value, tensor in zip(names, values, tensors, strict=True)
        ]
        if any(tensor is not None for tensor in tensors):
            layouts.check_all_used()
        return placed

    def _place(self, name: str, value: Any, tensor: LocalTensor, layouts: _Layouts) -> LocalTensor:
        try:
            if not tensor.plain:
                # The rank of this call's group counts, which is another than the job's where a group is passed.
                return (describe_laid_out(value, layouts.rank) or tensor) if is_laid_out(value) else tensor
            own = layouts.of(value)
            if own is not None:
                return place_by_layout(tensor, own, layouts.rank)
            if id(value) in self._bases:
                return self._place_kept(tensor, self._bases[id(value)], layouts)
            within = None if id(value) in self._in_cells else layouts.ending(name, tensor.global_shape)
            return tensor if within is None else place_by_layout(tensor, within, layouts.rank)
        except DcpError as error:
            raise type(error)(f"{name!r}: {error}") from error

    def _place_kept(self, tensor: LocalTensor, base: Any, layouts: _Layouts) -> LocalTensor:
        """What an optimizer keeps for a parameter is cut as that is."""
        chunk, known = chunk_of(base), layouts.of(base)
        if (chunk is None and known is None) or tensor.global_shape in ((), (1,)):
            return tensor
        if tensor.global_shape != tuple(base.shape):
            raise UnsupportedValueError(
                f"an optimizer keeps a tensor of shape {tensor.global_shape} for the shard {base.name!r} of shape "
                f"{tuple(base.shape)}: how it is cut is not known; give it a layout of its own in layouts="
            )
        if chunk is not None:
            return place_by_chunk(tensor, chunk)
        assert known is not None
        return place_by_layout(tensor, known, layouts.rank)


_EXTRA = "_extra_state"


def _loads_plainly(cell: Any) -> bool:
    """Whether nothing in a Cell takes part in `load_state_dict` in a way of its own."""
    for _, part in cell.cells_and_names():
        kind = type(part)
        if kind.load_state_dict is not nn.Cell.load_state_dict or kind.state_dict is not nn.Cell.state_dict:
            return False
        if kind._load_from_state_dict is not nn.Cell._load_from_state_dict:
            return False
        if part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks:
            return False
    return True


class _Layouts:
    """The layouts of one call, read when they are asked for."""

    def __init__(self, given: Any, rank: int) -> None:
        self.rank = rank
        self._given: Mapping[str, Any] = layouts_of_rank(given, rank)
        self._known: dict[str, KnownLayout] = {}
        self._of_values: dict[int, KnownLayout] = {}

    def look_up(self, name: str, value: Any) -> None:
        """Learn the layout of a tensor, under its key in the state or its parameter's name.

        One tensor may lie under several keys: it has one layout.
        """
        for known in (name, getattr(value, "name", None)):
            if isinstance(known, str) and known in self._given:
                self._of_values[id(value)] = self._read(known)
                return

    def of(self, value: Any) -> KnownLayout | None:
        """The layout of a tensor of the state, or of a parameter that an optimizer trains."""
        name = getattr(value, "name", None)
        if id(value) not in self._of_values and isinstance(name, str) and name in self._given:
            return self._read(name)
        return self._of_values.get(id(value))

    def ending(self, name: str, local_shape: tuple[int, ...]) -> KnownLayout | None:
        """The layout under the longest name that a leaf's name ends with, for a leaf of as many dimensions.

        For tensors that no Cell of the state tells about: a dict of parameters, or of an optimizer's state.
        """
        at = name.find(".")
        while at >= 0:
            rest = name[at + 1 :]
            if rest in self._given:
                known = self._read(rest)
                fits = len(known.layout.tensor_map) in (0, len(local_shape))
                return known if fits and local_shape not in ((), (1,)) else None
            at = name.find(".", at + 1)
        return None

    def check_all_used(self) -> None:
        """See that the layouts are for this state.

        Raises:
            ArgumentError: Not one is.
        """
        unused = [name for name in self._given if name not in self._known]
        if unused and not self._known:
            raise ArgumentError(
                f"layouts= names {_some(unused)}, and no tensor of the state is called so; they are looked up by a "
                "tensor's key in the state, joined by dots, and by its parameter's name"
            )
        if unused and tuple(unused) not in _warned:
            _warned.add(tuple(unused))
            _logger.warning("layouts= names %s, and no tensor of this rank's state is called so", _some(unused))

    def _read(self, name: str) -> KnownLayout:
        if name not in self._known:
            try:
                self._known[name] = known_layout(self._given[name], self.rank)
            except DcpError as error:
                raise type(error)(f"layouts[{name!r}]: {error}") from error
        return self._known[name]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def state_rules(rank: Callable[[], int], layouts: Any = None) -> MindSporeRules:
    """What one call knows of its state.

    Args:
        rank: Tells this process's rank in the job.
        layouts: What the caller passed as `layouts=`.
    """
    return MindSporeRules(rank, layouts)
