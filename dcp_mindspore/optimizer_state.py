"""What optimizers keep beside the parameters that they train.

`nn` optimizers hold everything as parameters: moments, steps, learning rate. Those of `mint.optim` and
`experimental.optim` hold the hyper-parameters of their groups outside of them, and tensors of some groups too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore

from dcp_core.errors import UnsupportedValueError

GROUPS = "param_groups"
_PARAMETERS = "params"


def kept_for(optimizer: Any) -> dict[int, Any]:
    """For which of the parameters that it trains an optimizer keeps each of its own.

    MindSpore names what is kept for `fc.weight` after it: `moment1.fc.weight`.

    Returns:
        The trained parameter, by the id of what is kept for it.
    """
    trained = {parameter.name: parameter for parameter in optimizer.parameters}
    own = {id(parameter) for parameter in trained.values()}
    found = {}
    for kept in (*optimizer.get_parameters(), *_in_groups(optimizer)):
        base = trained.get(kept.name.partition(".")[2])
        if base is not None and id(kept) not in own:
            found[id(kept)] = base
    return found


def _in_groups(optimizer: Any) -> list[Any]:
    """The parameters that only the groups of an optimizer hold, its trained ones among them."""
    entries = [entry for group in getattr(optimizer, GROUPS, ()) for entry in group.values()]
    rows = [entry if isinstance(entry, (list, tuple)) else (entry,) for entry in entries]
    return [entry for row in rows for entry in row if isinstance(entry, mindspore.Parameter)]


class OptimizerState:
    """The state of an optimizer with parameter groups.

    Args:
        optimizer: Of `mindspore.experimental.optim`, which those of `mint.optim` are too.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def with_groups(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What `state_dict` returns, and under `param_groups` what each group has beside its parameters."""
        groups = [
            {key: _plain(entry) for key, entry in group.items() if key != _PARAMETERS}
            for group in self._optimizer.param_groups
        ]
        return {**state, GROUPS: groups}

    def take_groups(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Put the plain values of loaded groups into the optimizer; its tensors have been filled in place.

        Returns:
            What is left: the state as the optimizer's own `state_dict` gives it.

        Raises:
            UnsupportedValueError: Another number of groups.
        """
        loaded, groups = state.get(GROUPS, ()), self._optimizer.param_groups
        if len(loaded) != len(groups):
            raise UnsupportedValueError(
                f"the state has {len(loaded)} parameter groups and the optimizer {len(groups)}; make it with the same"
            )
        for group, values in zip(groups, loaded, strict=True):
            for key, value in values.items():
                if not _holds_tensors(group.get(key)):
                    group[key] = value
        return {key: value for key, value in state.items() if key != GROUPS}


def _plain(entry: Any) -> Any:
    """A `ParameterTuple` as a plain tuple."""
    return tuple(entry) if isinstance(entry, tuple) else entry


def _holds_tensors(entry: Any) -> bool:
    return isinstance(entry, mindspore.Tensor) or (
        isinstance(entry, tuple) and any(isinstance(item, mindspore.Tensor) for item in entry)
    )
