"""Benchmarks of loads that share reads: what each rank reads, and how long all take together."""
