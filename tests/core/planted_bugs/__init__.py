"""Deliberately wrong adapters, broadcasts, carriers, describers and storages: what the conformance kit must find.

Each module holds the wrong classes of one kind, in a table that names the test of the kit that finds each, and makes
a suite of each. Pytest does not collect them by itself: `tests.core.test_planted_bugs` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plant(module: dict[str, Any], base: type, found_by: Mapping[type, str]) -> None:
    """Put a suite for each wrong class into a module: `Test` and its name, with the class as `wrong`.

    Args:
        module: The namespace of the module.
        base: The suite, which uses `wrong`.
        found_by: The name of a test for each wrong class.
    """
    for wrong, test in found_by.items():
        assert hasattr(base, test), f"there is no {test}"
        name = f"Test{wrong.__name__}"
        module[name] = type(name, (base,), {"wrong": wrong, "__module__": module["__name__"]})
