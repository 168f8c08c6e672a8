"""Benchmarks of asynchronous saves: what they take from the training, and what their processes need."""
