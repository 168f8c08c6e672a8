"""Runs the Python blocks of one page in order, in one process and one namespace: `run_page.py PAGE`, blocks on stdin.

The blocks are the module `__main__`, so that classes defined in them can be found by name. Tracebacks name the page.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    page = sys.argv[1]
    blocks: list[tuple[int, str]] = json.load(sys.stdin)
    namespace = sys.modules["__main__"].__dict__
    for line, code in blocks:
        exec(compile("\n" * (line - 1) + code, page, "exec"), namespace)


if __name__ == "__main__":
    main()
