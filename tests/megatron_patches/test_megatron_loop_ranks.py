"""Plain Megatron-core training without DeepSpeed: its DistributedDataParallel, optimizers and
gradient accumulation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coat_dist.config import ActivationConfig
from tests.support import equal, run_ranks, slow

from .tiny import SMALL, tiny_batch, tiny_gpt, tiny_loss
from .training import start

STEPS, ACCUMULATION = 3, 2


def _train(
    rank, world, tp, distributed, fusion, weights="on_use", dtype=torch.bfloat16, **changes: Any
):
    """Losses, main_grads of this rank after the first micro-batch and the first two, weights
    that were used stale.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from coat_dist.flow.core import weights as flow_weights
    from megatron_patches import patch_model

    start(tp)
    bf16 = dtype == torch.bfloat16
    sizes = SMALL | {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1}
    model = tiny_gpt(**sizes, bf16=bf16, params_dtype=dtype, **changes)
    model.config.gradient_accumulation_fusion = fusion  # after construction, which asks for Apex
    report = patch_model(model, ActivationConfig(weights=weights))
    assert any("main_grad" in note for note in report.notes) == fusion
    both = {"use_distributed_optimizer": distributed, "overlap_param_gather": distributed}
    config = DistributedDataParallelConfig(  # every parameter is gathered on its own
        grad_reduce_in_fp32=True, overlap_grad_reduce=distributed, bucket_size=1, **both
    )
    ddp = DistributedDataParallel(model.config, config, model)
    options = OptimizerConfig(
        optimizer="adam", lr=3e-3, bf16=bf16, params_dtype=dtype, clip_grad=1.0, **both
    )
    optimizer = get_megatron_optimizer(options, [ddp])

    params = dict(model.named_parameters())
    names = {id(p): n for n, p in params.items()}
    losses, gradients, stale, used, gathers, original = (
        [],
        [],
        [],
        [],
        [],
        flow_weights.quantize_input,
    )

    def quantize_input(w, *rest):
        used.append((w, w.detach().clone()))
        if distributed and ".linear_fc1." in (name := names[id(w)]):
            gathers.append(
                ddp.param_to_bucket_group[params[name.replace("fc1", "fc2")]].param_gather_handle
            )
        return original(w, *rest)

    flow_weights.quantize_input = quantize_input
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        for micro in range(ACCUMULATION):
            last = micro == ACCUMULATION - 1
            loss = tiny_loss(ddp, tiny_batch(100 * step + 10 * micro + (rank if tp == 1 else 0)))
            with torch.no_grad():
                losses.append(tiny_loss(ddp, tiny_batch(999)).item())
            if last:
                loss.backward()
            else:
                with ddp.no_sync():
                    loss.backward()
            losses.append(loss.item())
            in_flow = [
                p for n, p in model.named_parameters() if ".linear_" in n and n.endswith(".weight")
            ]
            assert not fusion or not any(p.coat_zeroed for p in in_flow)
            # Overlapped, the reduction over ranks is under way.
            if step == 0 and not (last and distributed):
                gradients.append({n: p.main_grad.clone() for n, p in model.named_parameters()})
            stale += [names[id(w)] for w, at_use in used if not torch.equal(w, at_use)]
            used.clear()
        finalize_model_grads([ddp])
        optimizer.step()
    flow_weights.quantize_input = original
    if not changes:
        assert any(gathers) == distributed  # fc2's weight is under way while fc1 works
    return losses, gradients, stale


def _in_loop(rank, world, tp, distributed):
    """Losses and main_grads with and without fusion."""
    for dtype in (torch.bfloat16,) if distributed else (torch.float32, torch.bfloat16):
        separate, fused = (
            _train(rank, world, tp, distributed, fusion, dtype=dtype) for fusion in (False, True)
        )
        for losses, _, stale in (separate, fused):
            assert not stale and len(set(losses)) == STEPS * (ACCUMULATION + 1)
        if dtype == torch.float32:  # in fp32 sums it does not matter who adds
            assert fused[0] == separate[0] and equal(fused[1], separate[1])
            continue
        assert fused[0] == pytest.approx(separate[0], rel=0.02)
        for name, rounded in separate[1][0].items():
            exact = fused[1][0][name]
            patched = ".linear_" in name and name.endswith(".weight")
            assert torch.equal(exact.bfloat16().float() if patched else exact, rounded), name
            assert torch.equal(exact, rounded) != patched, name


@pytest.mark.parametrize(
    ("tp", "distributed"),
    [slow(1, False), (1, True), (2, False)],
    ids=["DP", "ZeRO", "TP and SP"],
)
def test_main_grad_in_megatrons_loop(tp, distributed):
    run_ranks(2, _in_loop, tp, distributed)


def _with_experts(rank, world):
    """Codes of experts' weights made on every use, and kept: nothing else differs."""
    from .test_grouped import EXPERTS, GROUPED_GEMM

    (losses, gradients, _), (kept, with_kept, _) = (
        _train(rank, world, 1, True, True, weights, **EXPERTS | GROUPED_GEMM)
        for weights in ("on_use", "cached")
    )
    assert kept == losses and len(set(losses)) == STEPS * (ACCUMULATION + 1)
    assert equal(with_kept, gradients)


def test_kept_codes_of_experts_in_megatrons_loop():
    run_ranks(2, _with_experts)
