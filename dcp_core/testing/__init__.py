"""Numpy ranks in real processes, fault injection, and suites for plugins."""
