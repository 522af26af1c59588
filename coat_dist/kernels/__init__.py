"""Triton kernels: the fast form of the operations that ``coat_dist/reference`` defines, in files of
the same names.

What several of them share: ``fp8.py`` (codes and scales inside a kernel), ``approximations.py``
(exp2, log2), ``moment_formats.py`` (how the code of a moment is written and read back),
``launch.py`` (how kernels are started), ``table.py`` (many tensors in one call). ``gemm.py`` calls
products of torch.

``tests/coat_dist/ops`` compares each kernel with its definition, on a GPU or in Triton's
interpreter.
"""
