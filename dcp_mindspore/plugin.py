"""The entry point of `dcp_mindspore`. It registers nothing yet: this release has no MindSpore support.

Imports nothing heavy; see `dcp_core.hookspecs`.
"""

from __future__ import annotations
