"""The framework-free core of DCP, the distributed-checkpoint library."""

__version__ = "0.1.0"
