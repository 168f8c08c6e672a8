"""A file system of fsspec, in memory, that opens for those alone who give the right option."""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec  # type: ignore[import-untyped]  # has no types
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

TOKEN = "guarded-token-value"
OPTIONS = {"token": TOKEN}
SCHEME = "guarded"


class GuardedFileSystem(MemoryFileSystem):  # type: ignore[misc]  # has no types
    """Memory behind a token. What lies there is its own, not that of ``memory://``."""

    protocol = SCHEME
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def __init__(self, token: str | None = None, **options: Any) -> None:
        if token != TOKEN:
            raise PermissionError("the token is wrong")
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace(f"{SCHEME}://", "memory://")))


def names_in_store() -> set[str]:
    """The paths of all files that lie there."""
    return set(GuardedFileSystem.store)


fsspec.register_implementation(SCHEME, GuardedFileSystem, clobber=True)
