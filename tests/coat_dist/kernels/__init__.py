"""How kernels are started and compiled. What each of them computes is tested in
``tests/coat_dist/ops``.
"""
