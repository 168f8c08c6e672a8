"""Tools that look into checkpoints: is it whole, what is in it, who holds what, and in what do two of them differ.

Goes in: where a checkpoint is. Comes out: frozen values that the command line prints. Nothing here writes to a
checkpoint, and nothing runs code that lies in one.
"""
