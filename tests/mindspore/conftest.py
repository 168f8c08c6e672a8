"""Where MindSpore is not installed, `test_installed.py` says so, and the rest of this directory is left out."""

from __future__ import annotations

import importlib.util
from pathlib import Path

if importlib.util.find_spec("mindspore") is None:
    collect_ignore = [file.name for file in Path(__file__).parent.glob("test_*.py") if file.name != "test_installed.py"]
