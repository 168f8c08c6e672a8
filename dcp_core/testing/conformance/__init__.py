"""The conformance kit: pytest suites that a plugin runs against its own classes.

Each suite is a base class of tests. A plugin's test module derives from it, says how its things are made, and pytest
runs the rest::

    from dcp_core.testing.conformance.adapter import AdapterConformance

    class TestToyAdapter(AdapterConformance):
        def make_adapter(self): ...
        def make_tensor(self, bits, dtype): ...
        def bits_of(self, tensor): ...

This package needs pytest; nothing else of `dcp_core` does.
"""

from __future__ import annotations

import pytest

_SUITES = ("adapter", "broadcasts", "carrier", "describer", "groups", "storage")
_PARTS = ("comparing", "described", "registered", "samples", "suite")

pytest.register_assert_rewrite(
    *[f"{__name__}.{suite}" for suite in (*_SUITES, *_PARTS)]
)  # so that failures show values
