"""One file for each operation: ``test_X.py`` tests the definition. ``test_kernels.py`` runs the
kernels, on a GPU or in Triton's interpreter, against the definitions: the rows are in
``agreement``.
"""
