"""The FP8 precision flow as autograd functions: what is saved for backward is FP8, and matrix products run in FP8.

They need nothing but torch: call them from any model, with ``TensorParallel()`` where there is one rank.
``docs/flow.md`` says what is saved, what is recomputed and why that is safe.
"""

from .linear import invariant_linear, linear
from .loss import linear_cross_entropy, vocab_parallel_cross_entropy
from .mlp import norm_mlp
from .norm import Norm, norm
from .norm_linear import norm_linear
from .scaling import TensorParallel

__all__ = [
    "Norm",
    "TensorParallel",
    "invariant_linear",
    "linear",
    "linear_cross_entropy",
    "norm",
    "norm_linear",
    "norm_mlp",
    "vocab_parallel_cross_entropy",
]
