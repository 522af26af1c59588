"""DeepSpeed's own mixture of experts (``deepspeed.moe``) with CoatAdamW, experts divided over
two ranks.
"""

import torch

from tests.coat_dist.deepspeed.small_engine import FP32, quiet_deepspeed, settings
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.coat_dist.deepspeed.zero_runs import run, snapshot
from tests.support import run_ranks

CASES = {
    "zero-1, groups handed over": (1, {}, True),
    "zero-2": (2, FP32, False),
    "zero-1, BF16_Optimizer": (1, FP32, False),
}


def model():
    from deepspeed.moe.layer import MoE

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(61, 48)
            expert = torch.nn.Sequential(
                torch.nn.Linear(48, 96), torch.nn.GELU(), torch.nn.Linear(96, 48)
            )
            self.moe = MoE(48, expert, num_experts=4, ep_size=2, min_capacity=64, use_rts=False)
            self.out = torch.nn.Linear(48, 61)

        def forward(self, tokens):
            x = self.embed(tokens)
            y = self.out(x + self.moe(x)[0])
            return torch.nn.functional.cross_entropy(
                y[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
            )

    return Experts()


def build(rank, stage, sums, listed):
    """``listed``: groups are handed over, without names; otherwise they are ours."""
    import coat_dist

    quiet_deepspeed()
    torch.manual_seed(rank)  # other experts on each rank; the rest is broadcast
    net = model()
    groups = [{"params": list(net.parameters()), "weight_decay": 0.1}]
    # As torch's optimizers take them, too.
    handed = [{**group, "params": iter(group["params"])} for group in groups]
    config = settings(stage, 0.01, gradient_clipping=1.0, **sums)
    engine = coat_dist.initialize(
        model=net, model_parameters=handed if listed else None, config=config
    )[0]
    assert len(groups) == len(handed) == 1  # what is handed over stays as it is
    return engine


def experts(rank, world, folder):
    """By case: a resumed run is the one that went on, and a step with NaN in one rank's expert
    changes nothing.
    """
    for name, case in CASES.items():
        where = f"{folder}/{name}"
        engine = build(rank, *case)
        run(engine, rank, 0, 3)
        engine.save_checkpoint(where, tag="x")
        run(engine, rank, 3, 5)
        went_on = snapshot(engine)
        engine.destroy()
        engine = build(rank, *case)
        run(engine, rank, 7, 8)
        engine.load_checkpoint(where, tag="x")
        run(engine, rank, 3, 5)
        resumed = snapshot(engine)
        assert changes(went_on, resumed) == [], name
        weight = next(
            p for n, p in engine.module.named_parameters() if "experts" in n and p.ndim == 2
        )
        weight.register_hook(lambda g: torch.full_like(g, torch.nan) if rank else g)
        run(engine, rank, 5, 6)
        assert changes(resumed, snapshot(engine)) == [], name
        groups = engine.basic_optimizer.param_groups
        kinds = [g["moments"] for g in groups if g.get("moe") and g["name"] == "ep_size_2"]
        assert sorted(kinds) == ["fp32", "fp8"], groups
        engine.destroy()


def test_divided_experts_train_resume_and_skip_nan(tmp_path):
    run_ranks(2, experts, str(tmp_path))
