"""RMSNorm and LayerNorm around quantized tensors; the definitions are in ``reference/norm.py``."""

from ..reference.norm import NormForward, NormStats, norm_apply, norm_backward, norm_compress, norm_quantize, norm_stats

__all__ = ["NormForward", "NormStats", "norm_apply", "norm_backward", "norm_compress", "norm_quantize", "norm_stats"]
