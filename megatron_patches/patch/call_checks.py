"""What calls of this package refuse before they begin, beside what their own files check. Nothing here computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from torch import nn

from coat_dist.config import CoatConfigError, OptimizerConfig

__all__ = ["check_count", "check_tied"]


def check_tied(model_chunks: Sequence[nn.Module], moments: OptimizerConfig) -> None:
    """Refuse FP8 moments in Megatron's distributed optimizer where copies of a tied embedding would drift apart.

    The first and the last stage have one each, with the same gradients. But they draw other noise, and lie elsewhere
    in their stage's buffer, so that shards of data-parallel ranks cut them into other groups of moments. One rank's
    groups are the same.

    Raises:
        CoatConfigError: on every stage.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return
    shares = "share_embeddings_and_output_weights"
    if not any(getattr(module, shares, False) for chunk in model_chunks for module in chunk.modules()):
        return
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if moments.stochastic_rounding is not False or ranks > 1:
        raise CoatConfigError(
            f"{shares}: got True with pipeline stages and FP8 moments on {ranks} data-parallel rank"
            f"{'s' * (ranks > 1)}, so that the copies of the embedding on the first and the last stage would drift "
            'apart; accepted: False; or one data-parallel rank with "stochastic_rounding": false; or '
            "megatron_patches.initialize and train_batch (DeepSpeed's ZeRO-1), which keep them equal"
        )


def check_count(name: str, value: Any) -> None:
    """Refuse a number of micro-batches that is none.

    Raises:
        CoatConfigError: names the argument.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise CoatConfigError(f"{name}: got {value!r}, accepted: a whole number from 1, or None")
