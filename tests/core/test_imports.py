"""What may be imported costs nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FRAMEWORKS = ("torch", "torch_npu", "mindspore")


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "module",
    [
        *("dcp_core", "dcp_core.plugins", "dcp_core.testing", "dcp_core.public"),
        *("dcp_core.cli.main", "dcp_core.cli.convert", "dcp_torch", "dcp_torch.plugin"),
        *("dcp_mindspore", "dcp_mindspore.plugin", "dcp_mindspore.offline_transform"),
    ],
)
def test_importing_it_loads_no_framework(module: str) -> None:
    result = _run(f"import sys, {module}; print([name for name in {_FRAMEWORKS!r} if name in sys.modules])")
    assert result.stdout.strip() == "[]", result.stderr


def test_importing_the_core_loads_no_plugin() -> None:
    result = _run("import sys, dcp_core, dcp_core.plugins; print('dcp_torch' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


def test_importing_the_core_adds_no_log_handler() -> None:
    code = "import logging, os; os.environ['DCP_LOG'] = 'INFO'; import dcp_core.log, dcp_core.plugins; "
    result = _run(code + "print(logging.getLogger('dcp').handlers, logging.getLogger().handlers)")
    assert result.stdout.strip() == "[] []", result.stderr


@pytest.mark.parametrize("package", ["dcp_torch", "dcp_mindspore"])
def test_a_name_of_the_core_needs_no_framework(package: str) -> None:
    code = f"import sys, {package} as p; p.FileSystemWriter, p.PerRank, p.DcpError; print(hasattr(p, 'nonsense'))"
    result = _run(f"{code}; print([name for name in {_FRAMEWORKS!r} if name in sys.modules]); print(*dir(p))")
    lines = result.stdout.splitlines()
    assert lines[:2] == ["False", "[]"], result.stderr
    assert {"save", "load", "async_save", "annotate_shard", "read"} <= set(lines[2].split())
