"""What the commands have in common."""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Iterable, Iterator
from typing import NoReturn


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGTERM end the command as Ctrl-C does, so that directories and processes go away."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt


def some_of(names: Iterable[str]) -> str:
    """The help of an option that takes some of these names."""
    return f"some of: {', '.join(names)}"


class Preset(argparse.Action):
    """An option without a value (`nargs=0`) that sets others to those in `const`; later options may change them."""

    def __call__(self, parser: object, namespace: argparse.Namespace, *_: object) -> None:
        """Set them."""
        vars(namespace).update(self.const)
