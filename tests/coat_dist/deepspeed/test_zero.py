"""CoatAdamW under DeepSpeed's ZeRO: trains, shards, and resumes to the bit."""

import pytest
import torch

from tests.support import run_ranks

# More than these models have parameters. DeepSpeed's own size is 500 million elements, and where torch is told to be
# deterministic it fills all of them in every step.
BUCKETS = {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
CASES = {
    "zero-1": {"zero_optimization": {"stage": 1}},
    "zero-1, BF16_Optimizer": {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
    "zero-2": {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}},
    "zero-3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "zero-1, round robin": {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
    "zero-2, overlap, scattered, round robin, bf16 sums": {
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": False,
            "round_robin_gradients": True,
        }
    },
    "zero-3, sub-groups": {"zero_optimization": {"stage": 3, "sub_group_size": 1000}},
}


class Model(torch.nn.Module):
    """Sizes that divide by nothing, a frozen layer, and a group so small that a rank's share of it is all padding."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(61, 47)
        self.norm = torch.nn.LayerNorm(47)
        self.frozen = torch.nn.Linear(47, 47).requires_grad_(False)
        self.up = torch.nn.Linear(47, 129)
        self.down = torch.nn.Linear(129, 61, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        y = self.down(torch.nn.functional.gelu(self.up(x + self.frozen(x)))) * self.scale
        return torch.nn.functional.cross_entropy(y[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(settings, model=None, **options):
    """An engine around a model whose single-element parameter has a group of its own."""
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    from coat_dist.optim import CoatAdamW, param_groups

    __compatible_ops__["deepspeed_shm_comm"] = False  # not built: gloo does
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        **settings,
        "zero_optimization": BUCKETS | settings["zero_optimization"],
    }
    if model is None:
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=settings["zero_optimization"]["stage"] == 3):
            model = Model()
    named = list(model.named_parameters())
    groups = param_groups([(n, p) for n, p in named if n != "scale"], 0.1)
    groups += param_groups([(n, p) for n, p in named if n == "scale"], 0.0) if hasattr(model, "scale") else []
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, optimizer=lambda g: CoatAdamW(g, lr=0.01, **options), config=config
    )
    return engine


def run(engine, rank, first, last):
    losses = []
    for step in range(first, last):
        torch.manual_seed(1000 * step + rank)
        start, stride = torch.randint(61, (2, 1)), torch.randint(1, 3, (2, 1))
        loss = engine((start + stride * torch.arange(32)) % 61)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def snapshot(engine):
    """Every byte of the optimizer's state, in order of creation, and of the weights."""
    state = [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()}
        for s in engine.optimizer.optimizer.state.values()
    ]
    import deepspeed

    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=hasattr(params[0], "ds_id")):  # shards end in stray padding
        return state, [p.detach().clone() for p in params]


def differences(a, b):
    """Names of what differs between two snapshots."""

    def same(x, y):
        return torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y

    found = [] if len(a[0]) == len(b[0]) else ["number of states"]
    for i, (one, other) in enumerate(zip(a[0], b[0], strict=False)):
        found += (
            [f"{i}: keys"]
            if one.keys() != other.keys()
            else [f"{i}: {k}" for k, v in one.items() if not same(v, other[k])]
        )
    return found + [f"weight {i}" for i, (p, q) in enumerate(zip(a[1], b[1], strict=True)) if not torch.equal(p, q)]


def straight_and_resumed(rank, world, settings, folder, options):
    torch.use_deterministic_algorithms(True)
    engine = build(settings, **options)
    losses = run(engine, rank, 0, 5)
    engine.save_checkpoint(folder)
    at_save = snapshot(engine)
    losses += run(engine, rank, 5, 10)
    at_end = snapshot(engine)
    frozen = engine.module.frozen.weight
    engine.destroy()

    again = build(settings, **options)
    run(again, rank, 20, 21)  # state that loading has to replace
    again.load_checkpoint(folder)
    loaded = snapshot(again)
    more = run(again, rank, 5, 10)
    return {
        "losses": losses,
        "more": more,
        "loaded": differences(at_save, loaded),
        "end": differences(at_end, snapshot(again)),
        "kinds": sorted({"fp8" if "coat_m_q" in s else "fp32" for s in loaded[0]}),
        "steps": sorted({s["step"] for s in loaded[0]}),
        "frozen": frozen.requires_grad,
    }


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_five_a_restart_and_five(case, tmp_path):
    options = {"stochastic_rounding": case == "zero-2"}
    for rank, r in enumerate(run_ranks(2, straight_and_resumed, CASES[case], str(tmp_path), options)):
        assert r["losses"][5:] == r["more"], rank
        assert r["loaded"] == [] and r["end"] == [], rank
        assert r["kinds"] == ["fp32", "fp8"] and r["steps"] == [5]
        assert r["losses"][-1] < 0.8 * r["losses"][0]


def bytes_per_parameter(rank, world, settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(640, 640, bias=False), torch.nn.Linear(640, 1, bias=False)).bfloat16()
    model.forward = lambda x: torch.nn.Sequential.forward(model, x).float().square().mean()
    engine = build(settings, model)
    engine.backward(engine(torch.randn(2, 640, dtype=torch.bfloat16)))
    engine.step()
    states = engine.optimizer.optimizer.state.values()
    return sum(v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
def test_moments_take_two_bytes_a_parameter_over_all_ranks(case):
    held = run_ranks(2, bytes_per_parameter, CASES[case])
    assert sum(held) / (640 * 640 + 640) <= 2.06


def refused(rank, world, folder):
    """A checkpoint of another group size does not load."""
    engine = build(CASES["zero-1"])
    run(engine, rank, 0, 1)
    engine.save_checkpoint(folder)
    other = build(CASES["zero-1"], group_size=64)
    try:
        other.load_checkpoint(folder)
    except ValueError as error:
        return str(error)


def test_a_checkpoint_with_another_group_size_is_refused(tmp_path):
    for message in run_ranks(2, refused, str(tmp_path)):
        assert message is not None and "group_size: got 128, accepted: 64" in message
