"""Sequence parallelism of a built model, switched off and on by Megatron's own function, on two
ranks (gloo).
"""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from tests.support import equal, run_ranks

from .tiny import SMALL, assert_equal, gradients, tiny_batch, tiny_gpt
from .training import start

CASES = {
    "qk_norm_bias": (
        {},
        {"qk_layernorm": True, "add_bias_linear": True, "normalization": "LayerNorm"},
    ),
    "bf16_layer": ({"bf16_layers": (0,)}, {"num_query_groups": 2}),
    "fp8_attention": ({"attention": "fp8"}, {}),
    "tp_invariant": ({"tp_invariant": True}, {"qk_layernorm": True}),
    "experts": ({}, {"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 64}),
    "unpatched": (None, {"qk_layernorm": True}),
}


def _results(model):
    tokens, labels, positions = tiny_batch(3)
    with torch.no_grad():
        outputs = [model.eval()(tokens, positions, None, labels=given) for given in (labels, None)]
    # Which Megatron refuses to train without sequence parallelism.
    if model.config.num_moe_experts:
        return outputs, (0.0, {})
    return outputs, gradients(model.train(), tiny_batch(4))


def _switched(rank, world):
    """Switched off, a model gives what one built without gives, to the bit; switched on again,
    what it gave before.
    """
    from megatron.core.transformer.utils import set_model_to_sequence_parallel

    from megatron_patches import install_replicated_grad_hooks, patch_model

    alive = []
    for case, (coat, changes) in CASES.items():
        start(2)
        models = {}
        for sp in (True, False):
            models[sp] = tiny_gpt(
                tensor_model_parallel_size=2, sequence_parallel=sp, **SMALL | changes
            )
            if coat is not None:
                patch_model(models[sp], ActivationConfig(**coat))
            install_replicated_grad_hooks(models[sp])
        # Megatron keeps what to switch by id(model), which another model must not get.
        alive.append(models)
        wanted = {sp: _results(model) for sp, model in models.items()}
        for on in (False, True):
            set_model_to_sequence_parallel(models[True], on)
            outputs, trained = _results(models[True])
            assert equal(outputs, wanted[on][0]), case
            assert_equal(trained, wanted[on][1])


@pytest.mark.slow
def test_set_model_to_sequence_parallel_switches_patched_models():
    run_ranks(2, _switched)
