"""Every Python block of the README and of the docs runs, and prints no warning."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import Block, python_blocks

ROOT = Path(__file__).parents[2]
_RUNNER = Path(__file__).with_name("run_page.py")
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]
_SECONDS_A_PAGE = 120
_FRAMEWORKS = {"import torch": "torch", "import mindspore": "mindspore"}


def _missing(page: Path) -> list[str]:
    """Frameworks that the blocks of a page import and that are not installed."""
    code = "\n".join(block.code for block in python_blocks(page) if block.reason is None)
    return [name for line, name in _FRAMEWORKS.items() if line in code and importlib.util.find_spec(name) is None]


def _run(page: Path, blocks: tuple[Block, ...], directory: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", str(_RUNNER), str(page)],
        input=json.dumps([(block.line, block.code) for block in blocks if block.reason is None]),
        capture_output=True,
        text=True,
        timeout=_SECONDS_A_PAGE,
        cwd=directory,
        env=environment,
    )


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    if missing := _missing(page):
        pytest.skip(f"the page needs {', '.join(missing)}, which is not installed; the session for it runs this")
    result = _run(page, python_blocks(page), tmp_path)
    assert result.returncode == 0, result.stderr


def _page(directory: Path, text: str) -> Path:
    page = directory / "page.md"
    page.write_text(text)
    return page


def test_blocks_of_one_page_share_a_namespace_and_errors_name_the_line(tmp_path: Path) -> None:
    page = _page(
        tmp_path, "# A\n\n```python\nx = 1\n```\n\n```sh\nexit 1\n```\n\n- b\n\n  ```python\n  y = x / 0\n  ```\n"
    )
    result = _run(page, python_blocks(page), tmp_path)
    assert result.returncode == 1
    assert f'"{page}", line 14' in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_a_warning_in_a_block_fails_it(tmp_path: Path) -> None:
    page = _page(tmp_path, "```python\nimport warnings\nwarnings.warn('old')\n```\n")
    assert "UserWarning: old" in _run(page, python_blocks(page), tmp_path).stderr


def test_a_class_of_a_page_can_be_pickled(tmp_path: Path) -> None:
    code = "import pickle\nclass A: pass\nassert type(pickle.loads(pickle.dumps(A()))) is A"
    page = _page(tmp_path, f"```python\n{code}\n```\n")
    assert _run(page, python_blocks(page), tmp_path).returncode == 0


def test_a_block_is_left_out_only_for_a_reason(tmp_path: Path) -> None:
    page = _page(tmp_path, "<!-- not run: needs 8 cards -->\n\n```python\n1 / 0\n```\n\n```python\npass\n```\n")
    assert [block.reason for block in python_blocks(page)] == ["needs 8 cards", None]
    assert _run(page, python_blocks(page), tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- not run: -->\n```python\n1\n```\n", "needs a reason"),
        ("```py\n1\n```\n", "only that is run"),
        ("```{code-block} python\n1\n```\n", "only that is run"),
        ("```pycon\n>>> 1\n```\n", "only that is run"),
        ("```python\n1\n", "never closes"),
    ],
)
def test_a_block_that_would_silently_not_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        python_blocks(_page(tmp_path, text))
