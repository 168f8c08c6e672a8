"""Packages that pages build up file by file: installed into a fresh environment as they stand, their tests pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.conftest import FreshEnvironment
from tests.docs.pages import package_files, python_blocks
from tests.docs.test_code_blocks import PAGES, ROOT

_WITH_PACKAGE = [page for page in PAGES if package_files(page)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in _WITH_PACKAGE])
def test_what_a_reader_writes_installs_and_passes_its_tests(
    page: Path, fresh_environment: FreshEnvironment, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    project = tmp_path / page.stem
    for name, text in package_files(page).items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    fresh_environment.install(project)
    assert " passed" in fresh_environment.run_tests(project, tmp_path)


def test_a_block_that_is_a_file_is_not_run_on_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`a.py`:\n\n<!-- file: b/a.py -->\n\n```python\n1 / 0\n```\n\n```python\npass\n```\n")
    assert package_files(page) == {"b/a.py": "1 / 0\n"}
    assert [block.reason for block in python_blocks(page)] == ["it is the file b/a.py", None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- file: -->\n\n```toml\n```\n", "needs a name"),
        ("<!-- file: a -->\n```toml\n```\n\n<!-- file: a -->\n```toml\n```\n", "on the page already"),
    ],
)
def test_files_without_a_name_of_their_own_are_refused(tmp_path: Path, text: str, message: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=message):
        package_files(page)
