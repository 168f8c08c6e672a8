"""Finds the Python blocks of a Markdown page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,}|:{3,})(?P<language>.*)$")
_PYTHON = re.compile(r"(python|py|python3|pycon|\{code(-block|-cell)?\} *(python|py|pycon|ipython3?))\b")
_NOT_RUN = re.compile(r"<!--\s*not run:(?P<reason>.*?)-->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One Python block.

    Attributes:
        line: Line of the page where its first line of code is, from 1.
        code: Its text.
        reason: Why it is not run; None for one that is.
    """

    line: int
    code: str
    reason: str | None = None


def python_blocks(page: Path) -> tuple[Block, ...]:
    """The Python blocks of a page, in order.

    Raises:
        ValueError: A block that never closes, is spelled so that it would not run, or is not run without a reason.
    """
    lines = page.read_text().splitlines()
    blocks: list[Block] = []
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        end = _end_of_block(lines, at, fence["ticks"], page)
        language = fence["language"].strip()
        if _PYTHON.match(language):
            if language != "python":
                raise ValueError(f"{page}:{at + 1}: write ```python, not {language!r}: only that is run")
            indent = len(fence["indent"])
            code = "\n".join(line[indent:] for line in lines[at + 1 : end])
            blocks.append(Block(at + 2, code, _reason(lines, at, page)))
        at = end + 1
    return tuple(blocks)


def _end_of_block(lines: list[str], start: int, ticks: str, page: Path) -> int:
    for at in range(start + 1, len(lines)):
        closing = lines[at].strip()
        if closing.startswith(ticks) and not closing.strip(ticks[0]):
            return at
    raise ValueError(f"{page}:{start + 1}: a block that never closes")


def _reason(lines: list[str], fence: int, page: Path) -> str | None:
    """The reason in the comment right above a block; None without such a comment."""
    before = "\n".join(lines[:fence]).rstrip()
    start = before.rfind("<!--")
    comment = _NOT_RUN.fullmatch(before[start:]) if start >= 0 and before.endswith("-->") else None
    if comment is None:
        return None
    reason = comment["reason"].strip()
    if not reason:
        raise ValueError(f"{page}:{fence + 1}: a block that is not run needs a reason: <!-- not run: reason -->")
    return reason
