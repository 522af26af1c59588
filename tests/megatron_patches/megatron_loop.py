"""Training as Megatron does it by itself: DistributedDataParallel and DistributedOptimizer, without DeepSpeed."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model

from .tiny import tiny_batch, tiny_gpt, tiny_loss


def losses(patch: bool, device: str, steps: int = 20, rank: int = 0) -> list[float]:
    """Two micro-batches a step, accumulated in fp32 ``main_grad``; a GPT-2-like layer, with every kind of bias."""
    model = tiny_gpt(activation_func=torch.nn.functional.gelu, gated_linear_unit=False, add_bias_linear=True)
    if patch:
        assert not patch_model(model, ActivationConfig()).left
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    config = OptimizerConfig(
        optimizer="adam", lr=3e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    curve = []
    for step in range(steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        for part in range(2):
            loss = tiny_loss(wrapped, tiny_batch(1000 * rank + 2 * step + part, device))
            loss.backward()
        finalize_model_grads([wrapped])
        assert optimizer.step()[0]
        curve.append(loss.item())
    return curve


def check(plain: list[float], fp8: list[float]) -> None:
    """FP8 learns, and is within 5 % of BF16 in every step."""
    assert fp8 != plain
    assert fp8[-1] < fp8[0] - 0.5, fp8
    assert all(abs(b - a) < 0.05 * a for a, b in zip(plain, fp8, strict=True)), (plain, fp8)
