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

from .tiny import SMALL, tiny_batch, tiny_gpt, tiny_loss
from .training import train


def test_missing_sums_are_refused_with_both_ways_out():
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


def test_one_rank_needs_no_hooks():
    model = tiny_gpt(qk_layernorm=True)
    assert install_replicated_grad_hooks(model) == []
    assert not any(check_replicas(model).values())


def _drift(rank, world):
    changes, found = SMALL | {"qk_layernorm": True}, {}
    for sp in (False, True):
        for hooks in (True, False):
            *_, replicas, hooked = train(
                2, sp, 20 if hooks else 4, ActivationConfig(), hooks=hooks, **changes
            )
            found[sp, hooks] = replicas, hooked
    # A bias that is added after the reduce-scatter: a replicated parameter that is no norm.
    gelu = {
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "activation_func": torch.nn.functional.gelu,
    }
    biased = [train(2, True, 8, settings, **gelu) for settings in (None, ActivationConfig())]
    *_, loose, _ = train(2, True, 2, None, hooks=False, **gelu)
    return found, biased, loose


def test_replicas_do_not_drift():
    """20 steps with hooks leave replicas equal to the bit; without hooks they drift, so the test
    can fail.
    """
    head_norms = {
        f"decoder.layers.{i}.self_attention.{n}_layernorm.weight" for i in range(2) for n in "qk"
    }
    norms = {
        f"decoder.layers.{i}.{n}_layernorm.weight" for i in range(2) for n in ("input", "pre_mlp")
    }
    norms |= {"decoder.final_layernorm.weight"}
    for found, biased, loose in run_ranks(2, _drift):
        for (sp, hooks), (replicas, hooked) in found.items():
            concerned = head_norms | norms if sp else head_norms
            assert (
                set(hooked) == (concerned if hooks else set())
                and set(replicas) >= head_norms | norms
            )
            drifted = {n for n, d in replicas.items() if d > 0}
            assert not drifted if hooks else drifted >= concerned, (sp, hooks, drifted)
        for *_, replicas, hooked in biased:
            biases = [n for n in replicas if n.endswith(("linear_proj.bias", "linear_fc2.bias"))]
            assert (
                len(biases) == 4 and set(biases) <= set(hooked) and set(replicas.values()) == {0.0}
            )
            assert all(loose[name] > 0 for name in biases)
        (plain, *_), (fp8, *_) = biased
        assert fp8 != plain and fp8 == pytest.approx(plain, rel=2e-2)


def _driven_by_megatron(rank, world):
    """Gradients with our hooks, and those that Megatron's own loop arrives at; what installing
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
    held, messages = tiny_gpt(**parallel), []
    next(held.parameters())._hp_mapping = None
    for model in (
        wrapped,
        hooked,
        held,
        tiny_gpt(tensor_model_parallel_size=2, perform_initialization=False),
    ):
        with pytest.raises((RuntimeError, ValueError)) as problem:
            install_replicated_grad_hooks(model)
        messages.append(str(problem.value))
    wrapped.zero_grad_buffer()
    tiny_loss(wrapped, tiny_batch(0)).backward()
    finalize_model_grads([wrapped])
    both = {
        n: (p.grad.float(), q.main_grad.float(), hasattr(p, "coat_replicated_grad"))
        for (n, p), q in zip(hooked.named_parameters(), driven.parameters(), strict=True)
    }
    torch.nn.init.constant_(held.decoder.final_layernorm.weight, 1.0 + rank)
    return both, messages, check_replicas(held)["decoder.final_layernorm.weight"]


def test_hooks_sum_what_megatrons_own_loop_sums():
    for gradients, messages, difference in run_ranks(2, _driven_by_megatron):
        assert any(replicated for *_, replicated in gradients.values()) and difference == 1.0
        for name, (ours, theirs, replicated) in gradients.items():
            if replicated:  # summed before rounding to bf16 here, after it there
                torch.testing.assert_close(
                    ours, theirs, rtol=2e-2, atol=1e-2 * float(theirs.abs().max()), msg=name
                )
            else:
                assert torch.equal(ours, theirs), name
        refused = (
            "reduces these gradients itself",
            "installed already",
            "DeepSpeed already holds",
            "perform_initializ",
        )
        assert all(said in message for message, said in zip(messages, refused, strict=True)), (
            messages
        )
