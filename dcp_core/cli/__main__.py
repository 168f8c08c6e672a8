"""`python -m dcp_core.cli` is `dcp`."""

from __future__ import annotations

import sys

from dcp_core.cli.main import main

sys.exit(main())
