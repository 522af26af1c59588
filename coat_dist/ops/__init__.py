"""All operations on one page. The rest of the project calls these, and neither ``kernels`` nor
``reference``.

An operation is a function of plain tensors, without autograd. ``operation(definition)`` runs the
definition, or on a GPU the kernel: ``reference/norm.py`` defines ``norm_forward``, and
``kernels/norm.py`` has its kernel under the same name with the same arguments, which are documented
and typed at the definition. What has no kernel is imported as it is. ``dispatch.py`` decides which
of the two runs; ``COAT_REFERENCE=1`` in the environment takes definitions everywhere.
"""

from ..kernels.gemm import apart, one_by_one
from ..reference import (
    activation,
    adamw,
    cross_entropy,
    gemm,
    grouped,
    norm,
    quantize,
    rope,
    routing,
)
from ..reference.activation import (
    ACTIVATIONS,
    activation_apply,
    check_activation,
)
from ..reference.adamw import AdamWStep, AdamWTensors, FP32Tensors
from ..reference.adamw_batch import Batch
from ..reference.cross_entropy import LogitStats, merge, pow2
from ..reference.gemm import code_products, exact_mm, scale_and_round
from ..reference.grouped import ExpertRows, expert_rows
from ..reference.master import join, split
from ..reference.moments import (
    Moment,
    MomentCodec,
    decode,
    encode,
)
from ..reference.norm import NormStats, norm_apply
from ..reference.quantize import SMALLEST_SCALE, requantize_rows
from ..reference.rope import HeadNorms, Heads, RopeTable, rope_table
from .dispatch import operation

# Quantization
# ----------------------------------------
amax = operation(quantize.amax)  # largest magnitude of a tensor
tensor_scale = operation(quantize.tensor_scale)  # amax -> per-tensor scale
# FP8 codes with a given per-tensor scale, also transposed.
quantize_tensor = operation(quantize.quantize_tensor)
quantize_both = operation(quantize.quantize_both)  # the same, row-major and transposed in one pass
quantize_rows = operation(quantize.quantize_rows)  # FP8 codes with a scale per row
quantize_groups = operation(quantize.quantize_groups)  # FP8 codes with a scale per group
dequantize = operation(quantize.dequantize)  # codes -> values
transpose = operation(quantize.transpose)  # per-tensor codes, transposed
# without a kernel: requantize_rows, for scales that ranks share

# Matrix products
# ----------------------------------------
scaled_mm = operation(gemm.scaled_mm)  # FP8 product
grouped_mm = operation(gemm.grouped_mm)  # FP8 products of all experts
grouped_wgrad = operation(gemm.grouped_wgrad)
# without a kernel: exact_mm in fp64; code_products and scale_and_round, whose sums over ranks are
# exact; apart and one_by_one, what the products of experts take and which way is faster

# Norms: RMSNorm and LayerNorm
# ----------------------------------------
norm_forward = operation(norm.norm_forward)  # y and the row statistics, no FP8
norm_compress = operation(norm.norm_compress)  # x in 8 bits by groups, statistics, amax of y
# x in 8 bits by groups, statistics, y in FP8 by rows
norm_compress_rows = operation(norm.norm_compress_rows)
# y in per-tensor FP8, from x or from its FP8, also transposed
norm_quantize = operation(norm.norm_quantize)
norm_backward = operation(norm.norm_backward)  # gradients of x, weight and bias
# without a kernel: norm_apply, y from x and the statistics

# Activations: SwiGLU and its kin, of a pre-activation [rows, parts, f]
# ----------------------------------------
# The pre-activation in 8 bits by groups, amax of the activation.
activation_compress = operation(activation.activation_compress)
# The same, and the activation in FP8 by rows.
activation_compress_rows = operation(activation.activation_compress_rows)
# The activation in per-tensor FP8, also transposed.
activation_quantize = operation(activation.activation_quantize)
# Backward, pass 1: amax of the pre-activation's gradient.
activation_grad_amax = operation(activation.activation_grad_amax)
# Pass 1 where rows have factors: the gradient of these too.
activation_factor_grad = operation(activation.activation_factor_grad)
# Pass 2: the pre-activation's gradient and the activation, in FP8.
activation_backward = operation(activation.activation_backward)
# without a kernel: activation_apply, the activation itself

# Experts side by side (reference/grouped.py), with a scale an expert
# ----------------------------------------
take_rows = operation(grouped.take_rows)  # rows in another order, or zeros, times a factor a row
scale_rows_backward = operation(grouped.scale_rows_backward)  # gradients of rows and factors
sum_rows = operation(grouped.sum_rows)  # sums of rows, each times a factor
largest_rows = operation(grouped.largest_rows)  # the largest row scale of each expert
# Weights with a scale an expert, also transposed.
quantize_experts = operation(grouped.quantize_experts)
# Weights transposed, FP8 codes with a scale per row.
quantize_columns = operation(grouped.quantize_columns)
# Rows of tokens sorted by a router's choices (reference/routing.py)
route = operation(routing.route)
take_codes = operation(routing.take_codes)  # FP8 codes of tokens in the rows of experts
take_codes_transposed = operation(routing.take_codes_transposed)  # the same, transposed
# without a kernel: expert_rows

# Attention: heads and rotary position embedding
# ----------------------------------------
split_rope = operation(rope.split_rope)  # qkv -> q, k, v, the first two normalized and rotated
split_rope_backward = operation(rope.split_rope_backward)  # gradients, and the amax of qkv's
# without a kernel: rope_table, cosines and sines

# Cross entropy of a block of logits
# ----------------------------------------
# Per row: exponent, sum of exponentials, the label's logit.
logit_stats = operation(cross_entropy.logit_stats)
logit_grad = operation(cross_entropy.logit_grad)  # gradient of logits, in place if asked for
# without a kernel: merge (statistics of blocks), pow2

# AdamW
# ----------------------------------------
# A step on tensors with FP8 moments: decode, update, encode.
adamw_steps = operation(adamw.adamw_steps)
adamw_fp32_steps = operation(adamw.adamw_fp32_steps)  # a step on tensors with fp32 moments
# without a kernel, for checkpoints: encode and decode (moments), split and join (master weights); a
# step has its own
