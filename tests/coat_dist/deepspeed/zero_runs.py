"""A small model under each way of ZeRO: its engine, some steps, and every byte of its state."""

import torch

# More than these models have parameters. DeepSpeed's own size is 500 million elements, and where
# torch is told to be deterministic it fills all of them in every step.
BUCKETS = {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}


CASES = {
    "zero-1": {"zero_optimization": {"stage": 1}},
    "zero-1, BF16_Optimizer": {
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
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
    """Sizes that divide by nothing, a frozen layer, and a group so small that a rank's share of
    it is all padding.
    """

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
        return torch.nn.functional.cross_entropy(
            y[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


def drawn(model, config):
    """A module, or what a function makes of always the same random numbers; with ZeRO-3 in
    shards.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not built: gloo does
    torch.manual_seed(0)
    if isinstance(model, torch.nn.Module):
        return model
    divided = config["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=divided):
        return model()


def build(settings, model=Model, **options):
    """An engine around a model whose single-element parameter has a group of its own."""
    import deepspeed

    from coat_dist.optim import CoatAdamW, param_groups

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        **settings,
        "zero_optimization": BUCKETS | settings["zero_optimization"],
    }
    model = drawn(model, config)
    named = list(model.named_parameters())
    groups = param_groups([(n, p) for n, p in named if n != "scale"], 0.1)
    groups += (
        param_groups([(n, p) for n, p in named if n == "scale"], 0.0)
        if hasattr(model, "scale")
        else []
    )
    # DeepSpeed's own function, which `import coat_dist` leads to ours.
    engine, *_ = deepspeed.initialize_without_coat(
        model=model,
        model_parameters=groups,
        optimizer=lambda g: CoatAdamW(g, lr=0.01, **options),
        config=config,
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
    """Every byte of the optimizer's state, in order of creation, of weights and of buffers."""
    state = [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()}
        for s in getattr(engine.optimizer, "optimizer", engine.optimizer).state.values()
    ]
    import deepspeed

    params = list(engine.module.parameters())
    # Shards end in stray padding.
    with deepspeed.zero.GatheredParameters(params, enabled=hasattr(params[0], "ds_id")):
        return state, [p.detach().clone() for p in (*params, *engine.module.buffers())]


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
    return found + [
        f"weight {i}"
        for i, (p, q) in enumerate(zip(a[1], b[1], strict=True))
        if not torch.equal(p, q)
    ]
