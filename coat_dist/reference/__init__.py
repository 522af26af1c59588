"""The definition of every operation, in a few lines of torch: what runs on a CPU, and what kernels
are tested against.

Where codes are decoded: those of moments in ``moment_formats.py`` (``read``) for ``decode`` of
``moments.py``, those of activations, weights and gradients in ``dequantize`` of ``quantize.py``.
"""
