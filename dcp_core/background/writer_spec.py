"""How a storage writer gets into another process: by the name of its class, and plain arguments.

In: a writer. Out: what makes an equal one, without pickle, where no framework is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dcp_core.errors import CoordinationError
from dcp_core.execution.interfaces import StorageWriter
from dcp_core.formats.objects import needs_pickle

_FRAMEWORKS = frozenset({"torch", "torch_npu", "mindspore"})


@dataclass(frozen=True, slots=True)
class WriterSpec:
    """What makes a writer.

    Attributes:
        module: Where its class is.
        qualname: Name of the class there.
        arguments: What it is called with.
        search_path: Where the module's top-level package is found, should the process not know.
    """

    module: str
    qualname: str
    arguments: Mapping[str, Any]
    search_path: str = ""

    @classmethod
    def of(cls, writer: StorageWriter) -> WriterSpec | None:
        """Describe a writer; None for one that exists in its own process only."""
        kind = type(writer)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            return None
        arguments = writer.rebuild_arguments()
        if arguments is None or needs_pickle(dict(arguments)):
            return None
        return cls(kind.__module__, kind.__qualname__, dict(arguments), _search_path(kind.__module__))

    @property
    def class_name(self) -> str:
        """The class, for messages and comparisons."""
        return f"{self.module}.{self.qualname}"

    def make(self) -> StorageWriter:
        """Make the writer.

        Raises:
            CoordinationError: Its class cannot be had here, or not without a framework.
        """
        before = _FRAMEWORKS & sys.modules.keys()
        if self.search_path and self.search_path not in sys.path:
            sys.path.append(self.search_path)
        try:
            found: Any = importlib.import_module(self.module)
            for name in self.qualname.split("."):
                found = getattr(found, name)
            writer = found(**self.arguments)
        except Exception as error:
            raise CoordinationError(
                f"{self.class_name} cannot be made here: {type(error).__name__}: {error}"
            ) from error
        imported = (_FRAMEWORKS & sys.modules.keys()) - before
        if imported:
            raise CoordinationError(f"the module of {self.class_name} imports {', '.join(sorted(imported))}")
        if not isinstance(writer, StorageWriter):
            raise CoordinationError(f"{self.class_name} gives a {type(writer).__name__}, expected a StorageWriter")
        return writer

    def to_plain(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "module": self.module, "qualname": self.qualname, "arguments": dict(self.arguments),
            "search_path": self.search_path,
        }  # fmt: skip

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> WriterSpec:
        """Undo `to_plain`."""
        return cls(**fields)


def _search_path(module: str) -> str:
    """The directory that the module's top-level package lies in; empty where that cannot be told."""
    package: ModuleType | None = sys.modules.get(module.partition(".")[0])
    folders: list[str] = list(getattr(package, "__path__", []))
    file: str | None = getattr(package, "__file__", None)
    if folders:
        return os.path.dirname(os.path.abspath(folders[0]))
    return os.path.dirname(os.path.abspath(file)) if file else ""
