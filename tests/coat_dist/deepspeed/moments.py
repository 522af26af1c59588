"""What accessors give as moments after one step, and what they leave in states when they set one."""

import torch

from coat_dist.checkpoint.zero_partitions import partitions
from coat_dist.optim.state import FP32_KEYS, MOMENTS, codecs, moment
from coat_dist.reference.moments import Moment, decode, divisor
from tests.coat_dist.checkpoint.universal_runs import build
from tests.coat_dist.ops.moment_groups import assert_metadata, assert_within_bound, assert_zeros


def moments_of_one_step(rank, world, settings):
    """Moments after the first step, beside what AdamW's are: (1 - beta) times the gradient, or its square."""
    from deepspeed.utils import safe_get_full_grad

    import coat_dist

    engine = build(settings, gradient_clipping=0.0)
    trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    before = {n: coat_dist.safe_get_full_moment(p, "second") for n, p in trained.items()}
    torch.manual_seed(rank)
    for _ in range(engine.gradient_accumulation_steps() - 1):
        engine.backward(engine(torch.randint(61, (2, 32))))
        engine.step()
    engine.backward(engine(torch.randint(61, (2, 32))))
    grads = {n: safe_get_full_grad(p).float().clone() for n, p in trained.items()}
    engine.step()
    problems = []
    for name, p in trained.items():
        shape = getattr(p, "ds_shape", p.shape)
        for which, exact in (("first", 0.1 * grads[name]), ("second", 0.001 * grads[name] ** 2)):
            got = coat_dist.safe_get_full_moment(p, which)
            if got.shape != shape or got.dtype != torch.float32 or before[name].any():
                problems.append(f"{name} {which}: {got.dtype} {got.shape}")
            error = ((got - exact).norm() / exact.norm().clamp(min=1e-12)).item()
            # at this beta2 the second moment is rounded stochastically, which errs twice as much
            if error > (1e-5 if exact.ndim < 2 else 0.03 if which == "first" else 0.06):
                problems.append(f"{name} {which}: off by {error}")
    return problems


def copied_states(engine):
    """This rank's states, flat tensor by flat tensor."""
    states = [engine.optimizer.optimizer.state[part.flat] for part in partitions(engine.optimizer)]
    return [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for s in states]


def check_states(engine, before, param, which, value, written=None):
    """That setting a moment of ``param`` did to this rank's states what the format promises, to each element.

    Groups without any of it keep their bytes. In the others, what was set and what their neighbours decoded to is
    encoded to nearest, by a and k that fit it; first moments as their ratio to the root of what v's codes mean now.
    ``written``: the first moment that the parameter was given before, since the last step.

    Returns:
        What this rank now holds of the moment, flat, zeros elsewhere, and how many elements.
    """
    mine, count = torch.zeros(value.numel()), 0
    for part, old in zip(partitions(engine.optimizer), before, strict=True):
        state = engine.optimizer.optimizer.state[part.flat]
        f = next((f for f in part.fragments if f.param is param and f.numel), None)
        start, end = (f.start, f.start + f.numel) if f else (0, 0)
        given = value.flatten()[f.first : f.first + f.numel] if f else torch.zeros(0)
        if part.group["moments"] == "fp32":
            wanted = {w: old[key].flatten() for w, key in FP32_KEYS.items()}
            wanted[which][start:end] = given
            now = {w: state[key].flatten() for w, key in FP32_KEYS.items()}
            assert all(torch.equal(now[w], wanted[w]) for w in MOMENTS)
        else:
            codec, size = codecs(part.group), part.group["group_size"]
            assert codec.first.over_root
            rows = slice(start // size, -(-end // size))
            was, held = ({w: moment(s, w) for w in MOMENTS} for s in (old, state))
            changing = MOMENTS if which == "second" else ("first",)
            for w in MOMENTS:
                for one, other in zip(held[w], was[w], strict=True):
                    same = (one == other).view(len(one), -1).all(1)
                    same[rows] |= w in changing
                    assert same.all(), f"{w}: bytes of other groups"
            wanted = {"second": decode(was["second"], codec.second)}
            wanted["first"] = decode(was["first"], codec.first, second=wanted["second"])
            if written is not None and f:
                wanted["first"][start:end] = written.flatten()[f.first : f.first + f.numel]
            wanted[which][start:end] = given
            second = decode(held["second"], codec.second)
            now = {"second": second, "first": decode(held["first"], codec.first, second=second)}
            wanted["first"] = wanted["first"] / divisor(second)
            for w in changing if f else ():
                x = wanted[w].view(-1, size)[rows].flatten()
                groups, how = Moment(*(t[rows] for t in held[w])), getattr(codec, w)
                assert_metadata(x, groups, how)
                assert_within_bound(x, groups, how)
                assert_zeros(x, groups, how)
                assert (decode(groups, how, x.numel()) * x >= 0).all(), "signs"
        if f:
            mine[f.first : f.first + f.numel] = now[which][start:end]
            count += f.numel
    return mine, count
