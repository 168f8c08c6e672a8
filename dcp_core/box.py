from __future__ import annotations
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
