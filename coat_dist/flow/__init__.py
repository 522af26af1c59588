"""The FP8 precision flow as autograd functions: what is saved for backward is FP8, and matrix
products run in FP8.

They need nothing but torch: call them from any model, with ``TensorParallel()`` where there is one
rank. ``docs/flow.md`` says what is saved, what is recomputed and why that is safe.
"""

from ..ops import HeadNorms, Heads, RopeTable, rope_table
from .blocks.attention import attention, sdpa
from .blocks.boundary import checkpoint_codes
from .blocks.dispatch import dispatch_rows
from .blocks.documents import Documents
from .blocks.grouped import grouped_mlp, routed_mlp
from .blocks.linear import heads_again, invariant_linear, linear, norm_linear, norm_qkv
from .blocks.loss import linear_cross_entropy, vocab_parallel_cross_entropy
from .blocks.mlp import mlp, norm_mlp, scale_rows
from .blocks.permute import TokenOrder, permute, token_order, unpermute
from .blocks.sinks import sink_attention
from .blocks.split_norm import split_norm
from .core.adapters import Adapter
from .core.norm import Norm, norm
from .core.weights import invalidate_weights
from .parallel.tensor_parallel import TensorParallel

__all__ = [
    "Adapter",
    "Documents",
    "HeadNorms",
    "Heads",
    "Norm",
    "RopeTable",
    "TensorParallel",
    "TokenOrder",
    "attention",
    "checkpoint_codes",
    "dispatch_rows",
    "grouped_mlp",
    "heads_again",
    "invalidate_weights",
    "invariant_linear",
    "linear",
    "linear_cross_entropy",
    "mlp",
    "norm",
    "norm_linear",
    "norm_mlp",
    "norm_qkv",
    "permute",
    "rope_table",
    "routed_mlp",
    "scale_rows",
    "sdpa",
    "sink_attention",
    "split_norm",
    "token_order",
    "unpermute",
    "vocab_parallel_cross_entropy",
]
