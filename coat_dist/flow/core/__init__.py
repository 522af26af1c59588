"""What the flow's functions are made of: norms, inputs of blocks, weights and FP8 products.

Below the functions of ``blocks``, above the collectives of ``parallel``.
"""
