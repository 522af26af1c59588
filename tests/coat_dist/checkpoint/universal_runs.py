"""Engines that save and load universal checkpoints, and how what they hold is compared."""

import functools

import torch

from coat_dist.optim.state import FP32_KEYS
from tests.coat_dist.deepspeed.zero_runs import Model, drawn, run


class WithBuffer(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def build(settings, universal=False, model=WithBuffer, **more):
    """An engine of ``coat_dist.initialize``, with a group of one element and its own learning
    rate.
    """
    import coat_dist

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 0.01}},
        **({"checkpoint": {"load_universal": True}} if universal else {}),
        **settings,
        **more,
    }
    model = drawn(model, config)
    named = list(model.named_parameters())
    groups = coat_dist.param_groups([(n, p) for n, p in named if n != "scale"], 0.1)
    groups += [{"params": [model.scale], "moments": "fp32", "weight_decay": 0.0, "lr": 0.005}]
    return coat_dist.initialize(model=model, model_parameters=groups, config=config)[0]


def contents(engine):
    """fp32 weights, moments (trained parameters), 16-bit weights and steps, whole, on every
    rank.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    import coat_dist

    trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    everything = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(everything, enabled=hasattr(everything[0], "ds_id")):
        weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    weights["seen"] = engine.module.seen.clone()
    moment = coat_dist.safe_get_full_moment
    if not isinstance(engine.optimizer.optimizer, coat_dist.CoatAdamW):
        moment = functools.partial(moment_of_adamw, engine)
    return {
        "fp32": {n: safe_get_full_fp32_param(p).clone() for n, p in trained.items()},
        "first": {n: moment(p, "first") for n, p in trained.items()},
        "second": {n: moment(p, "second") for n, p in trained.items()},
        "weights": weights,
        "steps": sorted({int(s["step"]) for s in engine.optimizer.optimizer.state.values()}),
        "groups": [
            (g["lr"], g["weight_decay"], g.get("moments")) for g in engine.optimizer.param_groups
        ],
    }


def moment_of_adamw(engine, p, which):
    """A moment of torch's AdamW, put together from every rank's partitions."""
    from coat_dist.checkpoint.zero_partitions import partitions

    whole = torch.zeros(getattr(p, "ds_shape", p.shape))
    for part in partitions(engine.optimizer):
        held = engine.optimizer.optimizer.state[part.flat][FP32_KEYS[which]]
        for f in part.fragments:
            if f.param is p:
                mine = held[f.start : f.start + f.numel]
                whole.view(-1)[f.first : f.first + f.numel] = mine
    torch.distributed.all_reduce(whole)
    return whole


def train_and_save(rank, world, settings, folder):
    """Five steps, saved."""
    import deepspeed

    engine = build(settings)
    frozen = engine.module.frozen.weight
    with deepspeed.zero.GatheredParameters(
        [frozen], modifier_rank=0, enabled=hasattr(frozen, "ds_id")
    ):
        frozen.data.add_(0.25)  # not what a new model has
    engine.module.seen.add_(torch.tensor([1, 2, 3]))
    run(engine, rank, 0, 5)
    engine.save_checkpoint(folder, tag="plain")
    return contents(engine)


def load_and_compare(rank, world, settings, folder, saved):
    """What differs from ``saved`` after loading."""
    engine = build(settings, universal=True)
    run(engine, rank, 20, 21)  # state that loading has to replace
    engine.load_checkpoint(folder, tag="universal")
    return differences(contents(engine), saved) + wrong_codes(engine, saved)


def differences(loaded, saved):
    """Names of what must be equal and is not: all but FP8 moments."""
    found = [k for k in ("steps", "groups") if loaded[k] != saved[k]]
    for kind in ("fp32", "weights", "first", "second"):
        for name, value in saved[kind].items():
            if kind in ("fp32", "weights") or value.ndim < 2:
                found += [] if torch.equal(loaded[kind][name], value) else [f"{kind} {name}"]
    return found


def wrong_codes(engine, saved):
    """FP8 groups that neither decode to the saved moments nor are, to the byte, their encoding;
    elements beyond the stated error.
    """
    from coat_dist.checkpoint.zero_partitions import partitions
    from coat_dist.optim.moments import encode_moments
    from coat_dist.optim.state import codecs, moment
    from coat_dist.reference.moments import decode, divisor

    found = []
    for part in partitions(engine.optimizer):
        if part.group["moments"] == "fp32":
            continue
        codec_m, codec_v = codecs(part.group)
        stored = [
            moment(engine.optimizer.optimizer.state[part.flat], kind)
            for kind in ("first", "second")
        ]
        got_v = decode(stored[1], codec_v)
        flat = {kind: torch.zeros(part.flat.numel()) for kind in ("first", "second")}
        for f in part.fragments:
            for kind in flat:
                full = saved[kind][engine.param_names[f.param]].flatten()
                flat[kind][f.start : f.start + f.numel] = full[f.first : f.first + f.numel]
        expected = encode_moments(part.group, flat["first"], flat["second"])
        for kind, codec, held, wanted in zip(
            flat, (codec_m, codec_v), stored, expected, strict=True
        ):
            ratio = kind == "first" and codec.over_root
            got = decode(held, codec, second=got_v if ratio else None)
            padded = torch.nn.functional.pad(flat[kind], (0, got.numel() - flat[kind].numel()))
            kept = (got == padded).view(-1, codec.group_size).all(1)
            again = torch.stack(
                [(getattr(held, n) == getattr(wanted, n)).view(len(kept), -1).all(1) for n in "qak"]
            )
            again = again.all(0)
            found += (
                [] if (kept | again).all() else [f"{kind}: {int((~(kept | again)).sum())} groups"]
            )
            a, k = held.a.float(), held.k.float() / 16
            a, k = (t.repeat_interleave(codec.group_size) for t in (a, k))
            y = codec.kind.fp8.max * ((padded / divisor(got_v) if ratio else padded).abs() / a) ** k
            d = torch.maximum(
                torch.tensor(2.0 ** -(codec.kind.fp8.mantissa_bits + 1)),
                codec.kind.fp8.smallest / (2 * y),
            )
            # Of the others, ratios below half a code may become zero.
            some = (padded != 0) & (d < 1)
            error, limit = (got / padded).log2().abs()[some], (-torch.log2(1 - d) / k)[some]
            far = not (error <= limit * 1.001 + 1e-5).all() or bool(got[~some].any())
            found += [f"{kind} error"] if far or not ratio and (d >= 1)[padded != 0].any() else []
    return found
