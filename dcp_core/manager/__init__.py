"""A directory of checkpoints: which one is the newest that is whole, and how many are kept."""
