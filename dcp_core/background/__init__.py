"""Saving in the background: a light process of each rank, the memory that it shares with the trainer, what they say."""
