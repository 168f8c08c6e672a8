"""Every sentence of the page of guarantees names tests, and they are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "explanation" / "guarantees.md"
_PROMISE = re.compile(r"\*\*([A-Z])(\d+)\.\*\* (.+)", re.DOTALL)
_TEST = re.compile(r"`(tests/\S+\.py)::(test_\w+)`")


def _paragraphs() -> list[str]:
    """Of the sections that promise something."""
    text = _PAGE.read_text()
    body = text[text.index("\n## ") : text.index("(not-promised)=")]
    return [part.strip() for part in body.split("\n\n") if part.strip() and not part.strip().startswith("## ")]


@cache
def _tests_in(file: str) -> frozenset[str]:
    tree = ast.parse((_ROOT / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_promise_is_numbered_and_names_tests_that_exist() -> None:
    numbers: dict[str, int] = {}
    for paragraph in _paragraphs():
        sentence, colon, tests = paragraph.partition("\n: ")
        match = _PROMISE.fullmatch(sentence)
        assert match and colon, f"no promise with its tests: {paragraph}"
        letter, number = match[1], int(match[2])
        assert number == numbers.get(letter, 0) + 1, f"{letter}{number} is out of order"
        numbers[letter] = number
        named = _TEST.findall(tests)
        assert named and _TEST.sub("", tests).split() == [], f"{letter}{number}: not a list of tests: {tests}"
        for file, name in named:
            assert name in _tests_in(file), f"{letter}{number}: there is no {name} in {file}"
    assert sum(numbers.values()) > 25
