"""Gradients of parameters that tensor-parallel ranks replicate: summed once, so that replicas do
not drift.
"""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig, CoatConfigError
from coat_dist.deepspeed.parallel.replicated_grads import check_replicated_grads
from megatron_patches import check_replicas, install_replicated_grad_hooks
from tests.support import run_ranks

from .tiny import OLMO2, SMALL, tiny_batch, tiny_gpt, tiny_loss
from .training import train


def test_check_replicated_grads_refuses_missing_sums():
    model = torch.nn.Linear(4, 4)
    model.bias.sequence_parallel = True
    with pytest.raises(CoatConfigError) as error:
        check_replicated_grads(model, mpu=object(), tp=2)
    said = str(error.value)
    assert said.startswith(
        "model: got 1 parameters (bias) that the 2 tensor-parallel ranks each hold"
    )
    assert (
        "install_replicated_grad_hooks(model)" in said
        and "parameter.coat_replicated_grad = True" in said
    )
    model.bias.coat_replicated_grad = True
    check_replicated_grads(model, mpu=object(), tp=2)


def test_install_replicated_grad_hooks_of_one_rank():
    model = tiny_gpt(qk_layernorm=True)
    assert install_replicated_grad_hooks(model) == []
    assert not any(check_replicas(model).values())


def _layers(*names):
    return {f"decoder.layers.{i}.{name}" for i in range(2) for name in names}


FINAL = {"decoder.final_layernorm.weight"}
HEADS = _layers(*(f"self_attention.{n}_layernorm.weight" for n in "qk"))
NORMS = FINAL | _layers("input_layernorm.weight", "pre_mlp_layernorm.weight")
AFTER = FINAL | _layers("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
BIASES = _layers("self_attention.linear_proj.bias", "mlp.linear_fc2.bias")
QK_NORM = SMALL | {"qk_layernorm": True}
UNGATED = {
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
}
DRIFTING = {
    "norms of heads": (QK_NORM, False, HEADS),
    "norms": (QK_NORM, True, HEADS | NORMS),
    # Added after the reduce-scatter: replicated parameters that are no norms.
    "biases": (UNGATED, True, BIASES | NORMS),
    # Each rank has its own part of norms over all heads.
    "olmo2": (OLMO2 | {"num_query_groups": 2}, True, AFTER),
    "olmo2 without sequence parallelism": (OLMO2, False, set()),
}
"""Model, whether sequence parallelism is on, and the parameters that drift without hooks."""


def _drift(rank, world):
    """20 steps with hooks leave replicas equal to the bit; without hooks they drift, so the test
    can fail.
    """
    for name, (changes, sp, concerned) in DRIFTING.items():
        for hooks in (True, False):
            steps = 20 if hooks else 3
            *_, replicas, hooked = train(2, sp, steps, ActivationConfig(), hooks=hooks, **changes)
            drifted = {n for n, difference in replicas.items() if difference > 0}
            if hooks:
                assert set(hooked) == concerned and not drifted, (name, drifted)
            else:
                assert not hooked and drifted >= concerned, (name, drifted)
            assert "olmo2" not in name or not HEADS & set(replicas)
    # In Megatron's distributed checkpoints.
    divided = tiny_gpt(tensor_model_parallel_size=2, **DRIFTING["olmo2"][0]).sharded_state_dict()
    for name in HEADS:
        width = 256 if "q_layernorm" in name else 128
        assert divided[name].global_shape[1:] == (width,)
        assert divided[name].local_shape == (width // 2,)


def test_replicated_grad_hooks_keep_replicas_equal():
    run_ranks(2, _drift)


def _driven_by_megatron(rank, world):
    """Gradients with our hooks are those that Megatron's own loop arrives at; what installing
    them refuses.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from megatron_patches import initialize_model_parallel, patch_model

    initialize_model_parallel(2)
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    hooked, driven = (
        tiny_gpt(**parallel, qk_layernorm=True, add_bias_linear=True) for _ in range(2)
    )
    for model in (hooked, driven):
        patch_model(model, ActivationConfig())
    install_replicated_grad_hooks(hooked)
    tiny_loss(hooked, tiny_batch(0)).backward()
    wrapped = DistributedDataParallel(
        driven.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), driven
    )
    held = tiny_gpt(**parallel)
    next(held.parameters())._hp_mapping = None
    undrawn = tiny_gpt(tensor_model_parallel_size=2, perform_initialization=False)
    for model, said in (
        (wrapped, "reduces these gradients itself"),
        (hooked, "installed already"),
        (held, "DeepSpeed already holds"),
        (undrawn, "perform_initializ"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=said):
            install_replicated_grad_hooks(model)
    wrapped.zero_grad_buffer()
    tiny_loss(wrapped, tiny_batch(0)).backward()
    finalize_model_grads([wrapped])
    for (name, p), q in zip(hooked.named_parameters(), driven.parameters(), strict=True):
        ours, theirs = p.grad.float(), q.main_grad.float()
        if hasattr(
            p, "coat_replicated_grad"
        ):  # summed before rounding to bf16 here, after it there
            torch.testing.assert_close(
                ours, theirs, rtol=2e-2, atol=1e-2 * float(theirs.abs().max()), msg=name
            )
        else:
            assert torch.equal(ours, theirs), name
    assert any(hasattr(p, "coat_replicated_grad") for p in hooked.parameters())
    torch.nn.init.constant_(held.decoder.final_layernorm.weight, 1.0 + rank)
    assert check_replicas(held)["decoder.final_layernorm.weight"] == 1.0


def test_replicated_grad_hooks_sum_what_megatrons_loop_sums():
    run_ranks(2, _driven_by_megatron)
