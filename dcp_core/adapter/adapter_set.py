"""The adapters and describers of a process, asked in turn what a value is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dcp_core.adapter.protocols import Adapter, Describer
from dcp_core.errors import AdapterError, DcpError
from dcp_core.planning.description_checks import description_problem
from dcp_core.planning.leaves import LocalTensor
from dcp_core.type_names import type_name


class AdapterSet:
    """The adapters that are active in this process, asked in turn.

    Args:
        adapters: The adapters.
        describers: Those of `dcp_core.plugin_claims`, asked before: they check themselves what they say.
        declined: Tells why a value that nobody describes must not pass for a plain value, or gives None.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        describers: Sequence[Describer] = (),
        declined: Callable[[Any], str | None] | None = None,
    ) -> None:
        self.adapters = tuple(adapters)
        self.describers = tuple(describers)
        self.declined = declined

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a tensor leaf by the first describer or adapter that claims it; None for any other value.

        Raises:
            AdapterError: What a describer or an adapter said is wrong, or it raised what is no error of DCP. Names it.
            UnsupportedValueError: The value cannot be stored as it is.
        """
        for describer in self.describers:
            found = describer.describe(value)
            if found is not None:
                return found
        for adapter in self.adapters:
            try:
                found = adapter.describe(value)
            except DcpError:
                raise
            except Exception as error:
                raise _described_wrongly(adapter, value, f"raised {type(error).__name__}: {error}") from error
            if found is not None:
                problem = description_problem(found)
                if problem is not None:
                    raise _described_wrongly(adapter, value, problem)
                return found
        problem = None if self.declined is None else self.declined(value)
        if problem is not None:
            raise AdapterError(problem)
        return None


def _described_wrongly(adapter: Adapter, value: Any, problem: str) -> AdapterError:
    kind = type_name(value)
    return AdapterError(
        f"{type(adapter).__qualname__}.describe {problem}; this is the adapter {adapter.name!r}, asked about a value "
        f"of type {kind}: repair the adapter, or take such values out of the state"
    )
