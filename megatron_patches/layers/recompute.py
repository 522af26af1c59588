"""Full recompute that keeps codes of what layers are given."""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel

from coat_dist import flow
from coat_dist.patching.classes import Patched


def keeps_boundaries(config: Any) -> bool:
    """Whether Megatron recomputes from whole inputs of layers. Recomputed from rounded values, some
    tokens would go to other experts than in forward.
    """
    return (
        config.recompute_granularity == "full"
        and not config.distribute_saved_activations
        and config.num_moe_experts is None
    )


class RecomputedBlock(Patched):
    """Megatron's TransformerBlock. Its method looks ``checkpoint`` up in Megatron's package in each
    call, so that name is replaced while the method runs.
    """

    def _checkpointed_forward(self, *args: Any, **kwargs: Any) -> Any:
        plain = tensor_parallel.checkpoint

        def checkpoint(function: Any, distribute: bool, *given: Any) -> Any:
            def inner(function: Any, *given: Any) -> Any:
                return plain(function, distribute, *given)

            return flow.checkpoint_codes(inner, self.coat.settings, function, *given)

        tensor_parallel.checkpoint = checkpoint
        try:
            return super()._checkpointed_forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            tensor_parallel.checkpoint = plain
