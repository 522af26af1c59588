"""Cross entropy of a block of logits; the definitions are in ``reference/cross_entropy.py``."""

from ..reference import cross_entropy as reference
from ..reference.cross_entropy import LogitStats, merge, pow2
from .dispatch import operation

__all__ = ["LogitStats", "logit_grad", "logit_stats", "merge", "pow2"]

logit_grad = operation(reference.logit_grad)
logit_stats = operation(reference.logit_stats)
