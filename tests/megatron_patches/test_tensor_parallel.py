"""Tensor parallelism on two ranks (gloo): losses independent of it, replicas that do not drift, DeepSpeed on top."""

from __future__ import annotations

import os

import pytest
import torch

from coat_dist.config import ActivationConfig
from tests.support import residuals_apart, run_ranks

INVARIANT = ActivationConfig(tp_invariant=True)


class _MasterAdamW:
    """AdamW over fp32 copies of bf16 parameters."""

    def __init__(self, model: torch.nn.Module, lr: float = 3e-3) -> None:
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, weight_decay=0.1)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.adamw.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


def _whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters put together over tensor-parallel ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    whole = {}
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            whole[name] = parameter.detach().clone()
            continue
        shards = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(shards, parameter.detach(), group=group)
        if "linear_fc1" in name:  # [gate; up] on each rank
            halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
            whole[name] = torch.cat([torch.cat(half) for half in halves])
        else:
            whole[name] = torch.cat(shards, parameter.partition_dim)
    return whole


def _train(tp, sp, steps, settings, hooks=True, **changes):
    """Losses, initial and final whole parameters, and how far replicas are apart."""
    from megatron.core import parallel_state

    from megatron_patches import check_replicas, initialize_model_parallel, install_replicated_grad_hooks, patch_model
    from tests.megatron_patches.tiny import tiny_batch, tiny_gpt, tiny_loss

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    initialize_model_parallel(tp)
    model = tiny_gpt(tensor_model_parallel_size=tp, sequence_parallel=sp, **changes)
    first = _whole(model)
    if settings is not None:
        patch_model(model, settings)
    hooked = install_replicated_grad_hooks(model) if hooks else []
    optimizer = _MasterAdamW(model)
    losses = []
    for step in range(steps):
        loss = tiny_loss(model, tiny_batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, first, _whole(model), check_replicas(model), hooked


def _invariance(rank, world, changes):
    settings = INVARIANT.model_copy(update=changes.pop("coat", {}))
    runs = [_train(tp, sp, 6, settings, **changes) for tp, sp in ((1, False), (2, False), (2, True))]
    (losses, first, last, _, _), *others = runs
    assert losses[-1] < losses[0] - 0.2, losses
    for other_losses, other_first, other_last, replicas, _ in others:
        for name in first:
            assert torch.equal(first[name], other_first[name]), f"initial {name}"
        assert other_losses == losses, [a - b for a, b in zip(losses, other_losses, strict=True)]
        for name in last:
            assert torch.equal(last[name], other_last[name]), f"trained {name}"
        assert not any(replicas.values()), replicas
    return losses


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_layernorm": True, "num_query_groups": 2, "add_qkv_bias": True},
        {"bf16": False, "params_dtype": torch.float32, "qk_layernorm": True},
        {"normalization": "LayerNorm", "affine": False, "gpt": {"share_embeddings_and_output_weights": True}},
        {"coat": {"attention": "fp8"}, "num_query_groups": 2},
        {"coat": {"forward_scales": "tensor"}},
        {"coat": {"forward_scales": "tensor", "attention": "fp8"}, "num_query_groups": 2, "add_qkv_bias": True},
    ],
    ids=[
        "llama",
        "qk_norm_gqa_bias",
        "fp32",
        "olmo_tied",
        "fp8_attention_gqa",
        "tensor_scales",
        "tensor_scales_fp8_attention",
    ],
)
def test_losses_do_not_depend_on_tensor_parallelism(changes):
    """Six optimizer steps at TP 1, TP 2 and TP 2 with SP: losses and all weights are the same to the last bit."""
    for losses in run_ranks(2, _invariance, changes):
        assert len(losses) == 6


def _drift(rank, world):
    changes = {"qk_layernorm": True}
    found = {}
    for sp in (False, True):
        for hooks in (True, False):
            *_, replicas, hooked = _train(2, sp, 20 if hooks else 4, ActivationConfig(), hooks=hooks, **changes)
            found[sp, hooks] = replicas, hooked
    found["bf16"] = _train(2, True, 20, None, **changes)[-2:]
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
    runs = [_train(2, True, 8, settings, **gelu) for settings in (None, ActivationConfig())]
    *_, loose, _ = _train(2, True, 2, None, hooks=False, **gelu)
    return runs[0][0], runs[1][0], [(replicas, hooked) for *_, replicas, hooked in runs], loose


def test_row_parallel_bias_gets_a_hook():
    for plain, fp8, runs, loose in run_ranks(2, _row_bias):
        for replicas, hooked in runs:
            biases = [n for n in replicas if n.endswith(("linear_proj.bias", "linear_fc2.bias"))]
            assert len(biases) == 4 and set(biases) <= set(hooked)
            assert set(replicas.values()) == {0.0}
        assert all(loose[name] > 0 for name in biases)
        assert fp8 != plain and fp8 == pytest.approx(plain, rel=2e-2)


def _experts(rank, world):
    """Experts split over two ranks: every token to every expert, so that routing cannot differ."""
    experts = {"num_moe_experts": 2, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 64}
    return [_train(tp, tp > 1, 6, settings, **experts)[0::3]
            for tp, settings in ((1, ActivationConfig()), (2, ActivationConfig()), (2, None))]  # fmt: skip


def test_experts_split_over_ranks():
    """Losses at TP 2 with SP are those of one rank but for rounding, in FP8 as in BF16, and replicas do not drift."""
    for (alone, _), (split, replicas), (plain, _) in run_ranks(2, _experts):
        assert split == pytest.approx(alone, rel=1e-2) and split == pytest.approx(plain, rel=1e-2)
        assert split[-1] < split[0] - 0.2, split
        assert set(replicas.values()) == {0.0}, replicas


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


def _deepspeed(rank, world, stage, tp, sp, steps, settings):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from megatron.core import parallel_state

    from megatron_patches import (
        MPUAdapter,
        check_replicas,
        initialize_model_parallel,
        install_replicated_grad_hooks,
        patch_model,
    )
    from tests.megatron_patches.tiny import tiny_batch, tiny_gpt, tiny_loss

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    initialize_model_parallel(tp)
    model = tiny_gpt(tensor_model_parallel_size=tp, sequence_parallel=sp)
    if settings is not None:
        patch_model(model, settings)
    install_replicated_grad_hooks(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=config, mpu=MPUAdapter(), optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3)
    )
    shape = None
    losses = []
    for step in range(steps):
        batch = tiny_batch(step if tp > 1 else world * step + rank)
        loss = tiny_loss(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torch.no_grad():
        shape = list(engine(*tiny_batch(0)[::2], None).shape)
    groups = [parallel_state.get_data_parallel_world_size(), engine.mpu.get_model_parallel_world_size()]
    return losses, shape, groups, (check_replicas(model) if stage < 3 else {}), float(engine.get_global_grad_norm())


def test_zero2_with_tensor_and_sequence_parallelism():
    """DeepSpeed drives TP 2 + SP through the mpu adapter: it learns, ranks agree and replicas stay equal."""
    results = run_ranks(2, _deepspeed, 2, 2, True, 20, ActivationConfig())
    for losses, shape, groups, replicas, norm in results:
        assert losses == results[0][0] and norm == results[0][-1]
        assert losses[-1] < 0.75 * losses[0]
        assert shape == [2, 32, 256]
        assert groups == [1, 2]
        assert set(replicas.values()) == {0.0}


def test_zero2_norm_of_gradients_counts_replicas_once():
    """The same model and data at TP 1 and TP 2: the gradient norms that DeepSpeed reports agree."""
    runs = [run_ranks(n, _deepspeed, 2, n, n > 1, 1, None) for n in (1, 2)]
    norms = [result[-1] for run in runs for result in run]
    assert norms[1] == norms[2]
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


def _apart(*arguments):
    with residuals_apart():
        return _deepspeed(*arguments)


def test_zero3_gathers_the_weights_that_patched_modules_reach_for():
    """ZeRO-3 gathers a module's own weights; fc1, fc2 and folded norms belong to modules that are not called.

    Its hooks also wrap what modules return: with FP8 attention, the tensors that attention hands to linear_proj. And
    what modules take, so that autograd adds the residual's gradient, as it is made to do in the run to compare with.
    """
    settings = ActivationConfig(attention="fp8")
    runs = [run_ranks(2, run, stage, 1, False, 6, settings) for stage, run in ((3, _deepspeed), (2, _apart))]
    for (losses, *_), (reference, *_) in zip(*runs, strict=True):
        assert losses == pytest.approx(reference, rel=2e-3)


def _recompute_under_sp(rank, world):
    plain = _train(2, True, 3, ActivationConfig())[0]
    full = _train(
        2, True, 3, ActivationConfig(), recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )[0]
    return plain, full


def test_full_recompute_under_sequence_parallelism_changes_nothing():
    for plain, full in run_ranks(2, _recompute_under_sp):
        assert plain == full


def _evaluate(model, labels=True):
    from tests.megatron_patches.tiny import tiny_batch

    tokens, targets, positions = tiny_batch(3)
    with torch.no_grad():
        return model.eval()(tokens, positions, None, labels=targets if labels else None)


def _switched(rank, world, cases):
    """By case: outputs and gradients with sequence parallelism on, off, on, by Megatron's function; built without."""
    from megatron.core import parallel_state
    from megatron.core.transformer.utils import set_model_to_sequence_parallel

    from megatron_patches import initialize_model_parallel, install_replicated_grad_hooks, patch_model
    from tests.megatron_patches.tiny import gradients, tiny_batch, tiny_gpt

    def results(model):
        outputs = [_evaluate(model, labels) for labels in (True, False)]
        if model.config.num_moe_experts:  # which Megatron refuses to train without sequence parallelism
            return outputs, (0.0, {})
        return outputs, gradients(model.train(), tiny_batch(4))

    found, alive = {}, []
    for case, (coat, changes) in cases.items():
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        initialize_model_parallel(2)
        models = {}
        for sp in (True, False):
            models[sp] = tiny_gpt(tensor_model_parallel_size=2, sequence_parallel=sp, **changes)
            if coat is not None:
                patch_model(models[sp], ActivationConfig(**coat))
            install_replicated_grad_hooks(models[sp])
        alive.append(models)  # Megatron keeps what to switch by id(model), which another model must not get
        first = results(models[True])
        set_model_to_sequence_parallel(models[True], False)
        off = results(models[True])
        set_model_to_sequence_parallel(models[True], True)
        found[case] = {"on": first, "off": off, "on again": results(models[True]), "never": results(models[False])}
    return found


_SWITCHED = {
    "llama": ({}, {}),
    "qk_norm_bias": ({}, {"qk_layernorm": True, "add_bias_linear": True, "normalization": "LayerNorm"}),
    "bf16_layer": ({"bf16_layers": (0,)}, {"num_query_groups": 2}),
    "fp8_attention": ({"attention": "fp8"}, {}),
    "tp_invariant": ({"tp_invariant": True}, {"qk_layernorm": True}),
    "experts": ({}, {"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 64}),
    "unpatched": (None, {"qk_layernorm": True}),
}


def test_sequence_parallelism_is_switched_by_megatrons_own_function():
    """Off, a model gives what one built without gives, to the bit; on again, what it gave before."""
    for rank in run_ranks(2, _switched, _SWITCHED):
        for case, found in rank.items():
            for one, other in (("off", "never"), ("on again", "on")):
                (outputs, (loss, gradients)), (others, (other_loss, other_gradients)) = found[one], found[other]
                assert all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True)), (case, one)
                assert loss == other_loss, (case, one)
                for name in gradients:
                    assert torch.equal(gradients[name], other_gradients[name]), (case, one, name)
