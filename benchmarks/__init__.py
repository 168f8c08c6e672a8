"""Benchmarks: speed and memory, measured against peers on the same input."""
