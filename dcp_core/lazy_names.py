"""Public names of a framework's package that are imported when they are first used.

Plugin discovery imports such a package for its plugin module, and must not load a framework with it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

_PUBLIC = "dcp_core.public"


def lazy_names(package: str, own: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package.

    Args:
        package: Its name.
        own: The module of each name that is not one of `dcp_core.public`; for a module of the package itself, that.
    """

    def find(name: str) -> Any:
        if name == "__all__":
            return public_names()
        home = own.get(name)
        if home is None and (name.startswith("__") or name not in _core_names()):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home or _PUBLIC)
        value = module if home == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def public_names() -> list[str]:
        return sorted({*own, *_core_names()})

    return find, public_names


def _core_names() -> list[str]:
    names: list[str] = importlib.import_module(_PUBLIC).__all__
    return names
