"""DeepSpeed's monitors over a patched model: they replace functions and hook modules, and must
not change a bit.
"""

import torch
import torch.nn.functional as F

from tests.coat_dist.deepspeed.small_engine import quiet_deepspeed, settings
from tests.support import run_ranks

MONITORS = {
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "comms_logger": {"enabled": True, "prof_all": True},
    "flops_profiler": {"enabled": True, "profile_step": 1, "detailed": True},
}
MODELS = {
    "swiglu": {},
    "gelu": {"activation_func": F.gelu, "gated_linear_unit": False, "add_bias_linear": True},
    "experts": {
        "num_moe_experts": 2,
        "moe_router_topk": 2,
        "moe_shared_expert_intermediate_size": 64,
    },
}


def train(folder, name, monitored, patched=True):
    import coat_dist
    from megatron_patches import MPUAdapter, patch_model
    from tests.megatron_patches.tiny import SMALL, tiny_batch, tiny_gpt, tiny_loss

    model, config = tiny_gpt(**SMALL | MODELS[name]), settings()
    if patched:
        config["coat"] = {}
        patch_model(model, config)
    if monitored:
        output = {"output_file": f"{folder}/{name}-{patched}.txt"}
        config |= MONITORS | {"flops_profiler": MONITORS["flops_profiler"] | output}
    engine, *_ = coat_dist.initialize(model=model, config=config, mpu=MPUAdapter())
    losses = []
    for step in range(2):
        loss = tiny_loss(engine, tiny_batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, weights, engine.flops_profiler.flops if monitored else None


def monitored(rank, world, folder):
    from megatron_patches import initialize_model_parallel

    quiet_deepspeed()
    initialize_model_parallel(1)
    functions = F.silu, F.gelu, F.linear, torch.matmul
    plain = train(folder, "swiglu", True, patched=False)[2]
    for name in MODELS:
        losses, weights, _ = train(folder, name, False)
        watched, same, flops = train(folder, name, True)
        assert watched == losses and torch.equal(same, weights) and flops > 0, name
        if name == "swiglu":
            assert 0.5 * plain < flops < 2 * plain, (flops, plain)
    assert (F.silu, F.gelu, F.linear, torch.matmul) == functions


def test_deepspeeds_monitors_change_no_bit(tmp_path):
    run_ranks(1, monitored, str(tmp_path))
    for name in ("swiglu-False", *(f"{name}-True" for name in MODELS)):
        assert "Profile Summary at step" in (tmp_path / f"{name}.txt").read_text(), name
