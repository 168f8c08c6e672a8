"""Finds the blocks of a Markdown page: Python that runs, and files of a package that the page builds up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,}|:{3,})(?P<language>.*)$")
_PYTHON = re.compile(r"(python|py|python3|pycon|\{code(-block|-cell)?\} *(python|py|pycon|ipython3?))\b")
_NOT_RUN = re.compile(r"<!--\s*not run:(?P<reason>.*?)-->", re.DOTALL)
_A_FILE = re.compile(r"<!--\s*file:\s*(?P<name>[\w./-]*)\s*-->")


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


def package_files(page: Path) -> dict[str, str]:
    """The files that a page has its reader write, by their names: blocks of any language under `<!-- file: name -->`.

    Raises:
        ValueError: A file without a name, or two of one name.
    """
    lines = page.read_text().splitlines()
    found: dict[str, str] = {}
    for at, line in enumerate(lines):
        name, fence = _file_name(lines, at, page), _FENCE.match(line)
        if name is None or fence is None:
            continue
        if name in found:
            raise ValueError(f"{page}:{at + 1}: {name} stands on the page already")
        end = _end_of_block(lines, at, fence["ticks"], page)
        found[name] = "\n".join([*lines[at + 1 : end], ""])
    return found


def _file_name(lines: list[str], fence: int, page: Path) -> str | None:
    """The name in the comment right above a line."""
    above = next((line for line in reversed(lines[:fence]) if line.strip()), "")
    named = _A_FILE.fullmatch(above.strip())
    if named is not None and not named["name"]:
        raise ValueError(f"{page}:{fence + 1}: a file needs a name: <!-- file: name -->")
    return named["name"] if named is not None else None


def _end_of_block(lines: list[str], start: int, ticks: str, page: Path) -> int:
    for at in range(start + 1, len(lines)):
        closing = lines[at].strip()
        if closing.startswith(ticks) and not closing.strip(ticks[0]):
            return at
    raise ValueError(f"{page}:{start + 1}: a block that never closes")


def _reason(lines: list[str], fence: int, page: Path) -> str | None:
    """Why a block is not run: a comment right above it says so, or that it is a file; None for one that is run."""
    name = _file_name(lines, fence, page)
    if name is not None:
        return f"it is the file {name}"
    before = "\n".join(lines[:fence]).rstrip()
    start = before.rfind("<!--")
    comment = _NOT_RUN.fullmatch(before[start:]) if start >= 0 and before.endswith("-->") else None
    if comment is None:
        return None
    reason = comment["reason"].strip()
    if not reason:
        raise ValueError(f"{page}:{fence + 1}: a block that is not run needs a reason: <!-- not run: reason -->")
    return reason
