"""Gradients of parameters that tensor-parallel ranks replicate: summed once, so that replicas do not drift."""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig, CoatConfigError
from coat_dist.deepspeed.build.replicated_grads import check_replicated_grads
from megatron_patches import check_replicas, install_replicated_grad_hooks, tensor_parallel
from tests.support import run_ranks

from .tiny import SMALL, tiny_batch, tiny_gpt, tiny_loss
from .training import train


def test_sums_that_nobody_makes_are_refused_with_both_ways_out():
    model = torch.nn.Linear(4, 4)
    model.bias.sequence_parallel = True
    with pytest.raises(CoatConfigError) as error:
        check_replicated_grads(model, mpu=object(), tp=2)
    said = str(error.value)
    assert said.startswith("model: got 1 parameters (bias) that the 2 tensor-parallel ranks each hold")
    assert "install_replicated_grad_hooks(model)" in said and "parameter.coat_replicated_grad = True" in said
    model.bias.coat_replicated_grad = True
    check_replicated_grads(model, mpu=object(), tp=2)


def test_one_rank_needs_no_hooks(device):
    model = tiny_gpt(qk_layernorm=True)
    assert install_replicated_grad_hooks(model) == []
    assert tensor_parallel(model.output_layer).size == 1
    tiny_loss(model, tiny_batch(0, device)).backward()
    assert not any(check_replicas(model).values())


def _drift(rank, world):
    changes = SMALL | {"qk_layernorm": True}
    found = {}
    for sp in (False, True):
        for hooks in (True, False):
            *_, replicas, hooked = train(2, sp, 20 if hooks else 4, ActivationConfig(), hooks=hooks, **changes)
            found[sp, hooks] = replicas, hooked
    found["bf16"] = train(2, True, 20, None, **changes)[-2:]
    return found


def test_replicas_do_not_drift():
    """20 steps with hooks leave replicas equal to the bit; without hooks they drift, so the test can fail."""
    for found in run_ranks(2, _drift):
        head_norms = {f"decoder.layers.{i}.self_attention.{n}_layernorm.weight" for i in range(2) for n in "qk"}
        norms = {f"decoder.layers.{i}.{n}_layernorm.weight" for i in range(2) for n in ("input", "pre_mlp")}
        norms |= {"decoder.final_layernorm.weight"}
        for key, (replicas, hooked) in found.items():
            if key == (False, False) or key == (True, False):
                expected = head_norms | norms if key[0] else head_norms
                assert not hooked
                assert {n for n, d in replicas.items() if d > 0} >= expected, key
            else:
                assert set(replicas) >= head_norms | norms
                assert set(replicas.values()) == {0.0}, (key, replicas)
                assert set(hooked) == (head_norms if key == (False, True) else head_norms | norms)


def _row_bias(rank, world):
    """A bias that is added after the reduce-scatter: a replicated parameter that is no norm."""
    gelu = {"add_bias_linear": True, "gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}
    runs = [train(2, True, 8, settings, **gelu) for settings in (None, ActivationConfig())]
    *_, loose, _ = train(2, True, 2, None, hooks=False, **gelu)
    return runs[0][0], runs[1][0], [(replicas, hooked) for *_, replicas, hooked in runs], loose


def test_row_parallel_bias_gets_a_hook():
    for plain, fp8, runs, loose in run_ranks(2, _row_bias):
        for replicas, hooked in runs:
            biases = [n for n in replicas if n.endswith(("linear_proj.bias", "linear_fc2.bias"))]
            assert len(biases) == 4 and set(biases) <= set(hooked)
            assert set(replicas.values()) == {0.0}
        assert all(loose[name] > 0 for name in biases)
        assert fp8 != plain and fp8 == pytest.approx(plain, rel=2e-2)


def _driven_by_megatron(rank, world):
    """Gradients with our hooks, and those that Megatron's own loop arrives at."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from megatron_patches import initialize_model_parallel, install_replicated_grad_hooks, patch_model
    from tests.megatron_patches.tiny import tiny_batch, tiny_gpt, tiny_loss

    initialize_model_parallel(2)
    models = []
    for _ in range(2):
        model = tiny_gpt(tensor_model_parallel_size=2, sequence_parallel=True, qk_layernorm=True, add_bias_linear=True)
        patch_model(model, ActivationConfig())
        models.append(model)
    hooked, driven = models
    install_replicated_grad_hooks(hooked)
    tiny_loss(hooked, tiny_batch(0)).backward()
    wrapped = DistributedDataParallel(driven.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), driven)
    with pytest.raises(RuntimeError, match="reduces these gradients itself"):
        install_replicated_grad_hooks(wrapped)
    wrapped.zero_grad_buffer()
    tiny_loss(wrapped, tiny_batch(0)).backward()
    finalize_model_grads([wrapped])
    return {
        n: (p.grad.float(), q.main_grad.float(), hasattr(p, "coat_replicated_grad"))
        for (n, p), q in zip(hooked.named_parameters(), driven.parameters(), strict=True)
    }


def test_hooks_sum_what_megatrons_own_loop_sums():
    for gradients in run_ranks(2, _driven_by_megatron):
        assert any(replicated for *_, replicated in gradients.values())
        for name, (ours, theirs, replicated) in gradients.items():
            if replicated:  # summed before rounding to bf16 here, after it there
                torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-2 * float(theirs.abs().max()), msg=name)
            else:
                assert torch.equal(ours, theirs), name


def _hook_errors(rank, world):
    from megatron_patches import check_replicas, initialize_model_parallel, install_replicated_grad_hooks
    from tests.megatron_patches.tiny import tiny_gpt

    messages = []

    def refused(model):
        try:
            install_replicated_grad_hooks(model)
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))

    initialize_model_parallel(2)
    model = tiny_gpt(tensor_model_parallel_size=2, sequence_parallel=True)
    install_replicated_grad_hooks(model)
    refused(model)
    refused(tiny_gpt(tensor_model_parallel_size=2, perform_initialization=False))
    held = tiny_gpt(tensor_model_parallel_size=2, sequence_parallel=True)
    next(held.parameters())._hp_mapping = None
    refused(held)
    torch.nn.init.constant_(model.decoder.final_layernorm.weight, 1.0 + rank)
    return messages, check_replicas(model)["decoder.final_layernorm.weight"]


def test_hooks_refuse_to_be_installed_wrongly():
    for messages, difference in run_ranks(2, _hook_errors):
        assert [m.split()[0] for m in messages] == [
            "replicated-gradient",
            "embedding.word_embeddings.weight:",
            "DeepSpeed",
        ]
        assert "installed already" in messages[0] and "perform_initialization" in messages[1]
        assert difference == 1.0
