"""A store of named values that the processes of a job share, as frameworks bring one along (c10d's, MindSpore's).

What channels, meetings and broadcasts of adapters are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Store(Protocol):
    """Values and counters by key. A key holds one or the other; what fails raises a `RuntimeError`."""

    def set(self, key: str, value: str | bytes, /) -> Any:
        """Set a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which is 0 before; returns what it comes to."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether values were set under all keys. Never waits."""
        ...

    def delete_key(self, key: str, /) -> Any:
        """Remove a value or a counter; one that is not there is no error."""
        ...


class PrefixedStore:
    """A store all of whose keys get a prefix.

    Args:
        prefix: Goes before every key, with a slash.
        store: The store.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self._prefix = prefix
        self._store = store

    def set(self, key: str, value: str | bytes, /) -> None:
        """Set a value."""
        self._store.set(self._named(key), value)

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""
        return self._store.get(self._named(key))

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter; returns what it comes to."""
        return self._store.add(self._named(key), amount)

    def check(self, keys: Sequence[str], /) -> bool:
        """Whether values were set under all keys."""
        return self._store.check([self._named(key) for key in keys])

    def delete_key(self, key: str, /) -> None:
        """Remove a value or a counter."""
        self._store.delete_key(self._named(key))

    def _named(self, key: str) -> str:
        return f"{self._prefix}/{key}"
