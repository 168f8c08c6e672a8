"""What one call knows of its state that the values alone do not tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcp_core.planning.leaves import LocalTensor


class StateRules:
    """What one call knows of its state that the values alone do not tell. By default, nothing.

    A package of a framework hands an object of a class of its own to `dcp_core.api`. Its methods are called where
    errors of one rank become errors of all.
    """

    def place(
        self, names: Sequence[str], values: Sequence[Any], tensors: Sequence[LocalTensor | None]
    ) -> Sequence[LocalTensor | None]:
        """Say what the tensors of a state are, given their names: as described, or shards of larger tensors.

        Args:
            names: Of all leaves, unique on this rank.
            values: What the user has there.
            tensors: How adapters and describers describe them; None for a leaf that is no tensor.

        Returns:
            The descriptions that count.

        Raises:
            DcpError: A value cannot be what it is said to be. Names its key.
        """
        return tensors

    def state_of(self, value: Any) -> object:
        """The state of a Stateful object: what its `state_dict` returns."""
        return value.state_dict()

    def hand_state(self, value: Any, state: Any) -> None:
        """Give a Stateful object the state that was loaded: call its `load_state_dict`.

        Args:
            value: The object.
            state: What `state_of` returned, with containers copied, its tensors filled in place and its plain values
                replaced.
        """
        value.load_state_dict(state)
