"""The framework-free core of DCP, the distributed-checkpoint library."""
