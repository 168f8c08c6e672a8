"""How DCP saves and loads what `toy_parallel` makes.

A package of its own: finding plugins imports it, and `import toy_parallel` imports torch.
"""
