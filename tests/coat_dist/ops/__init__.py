"""One file for each operation: ``test_X.py`` tests the definition, and the kernel on a GPU or in
Triton's interpreter.

``X_agreement.py`` says how kernel and definition must agree.
"""
