"""What the optimizer does to ``tp_invariant``: with it, losses may still depend on the tensor-parallel size."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from coat_dist import CoatAdamW
from coat_dist.optim.state import stochastic

__all__ = ["what_varies"]


def what_varies(model: nn.Module, optimizer: CoatAdamW, tp: int) -> Iterator[str]:
    """Notes for a ``tp_invariant`` model on ``tp`` tensor-parallel ranks, none where nothing speaks against the same
    losses on others. Of clipping nothing is said: its norm differs in the last bit only.

    Noise and groups of FP8 moments go by places in a rank's shard. Groups hold the same elements at every size where
    each rank has whole ones of a weight's rows (divided by columns) or of the weight (divided by rows).
    """
    groups = [group for group in optimizer.param_groups if group["moments"] == "fp8"]
    if not groups or tp == 1:
        return
    if any(any(stochastic(group)) for group in groups):
        yield "tp_invariant: optimizer.stochastic_rounding draws noise by the place in a rank's shard; false does not"
    size = max(group["group_size"] for group in groups)
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3: before partitioning
        if len(shape) < 2 or not getattr(parameter, "tensor_model_parallel", False):
            continue
        by_columns = bool(parameter.partition_dim)  # type: ignore[attr-defined]
        part = shape[-1] if by_columns else shape.numel()
        if part % size:
            yield (
                f"tp_invariant: {part} elements of {'a row of ' if by_columns else ''}{name} on a rank are no whole "
                f"groups of optimizer.group_size {size}, so FP8 moments, and losses, depend on the tensor-parallel size"
            )
            return
