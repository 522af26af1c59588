"""The precision flow on two tensor-parallel ranks, with and without sequence parallelism,
against one rank.
"""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
import torch.distributed as dist

from coat_dist.config import ActivationConfig
from coat_dist.flow import (
    Norm,
    TensorParallel,
    invariant_linear,
    linear,
    mlp,
    norm,
    norm_linear,
    norm_mlp,
    vocab_parallel_cross_entropy,
)
from tests.support import equal, run_ranks

from .saved_bytes import saved

H, N, F, V, S, B = 64, 96, 128, 80, 8, 3
ONE = TensorParallel()


def parameters(kind, dtype):
    shapes = {
        "gain": (H,),
        "weight": (N, H),
        "bias": (N,),
        "back": (H, N),
        "fc1": (2 * F, H),
        "fc2": (H, F),
        "up": (F, H),
        "up_bias": (F,),
        "down": (H, F),
        "out": (V, H),
    }
    made = {
        name: (torch.randn(shape) * shape[-1] ** -0.5).to(dtype) for name, shape in shapes.items()
    }
    made["gain"] = (torch.rand(H) + 0.5).to(dtype)
    if kind == "layernorm":
        made["shift"] = torch.randn(H).to(dtype)
    return made


def shard(name, t, tp):
    """This rank's part of a parameter, as Megatron splits it."""
    if name in ("weight", "bias", "out", "up", "up_bias"):
        return t.chunk(tp.size)[tp.rank]
    if name in ("back", "fc2", "down"):
        return t.chunk(tp.size, 1)[tp.rank]
    if name == "fc1":
        return torch.cat([half.chunk(tp.size)[tp.rank] for half in t.chunk(2)])
    return t


def rows(t, tp):
    return t.chunk(tp.size)[tp.rank] if tp.sharded else t


def model(kind, x, p, labels, tp, config):
    """Every piece: norm → linear → linear; MLPs gated, with a bias, without norm; final norm,
    output layer, loss.
    """
    one = Norm(kind, 1e-5, p["gain"], p.get("shift"), reduce_grad=tp.sharded)
    middle = norm_linear(x, one, p["weight"], p["bias"], tp, config)
    x = x + linear(middle, p["back"], tp, config)
    y, x = norm_mlp(x, one, p["fc1"], p["fc2"], "swiglu", tp, config, residual=True)
    x = x + y
    x = x + norm_mlp(x, one, p["up"], p["down"], "gelu", tp, config, p["up_bias"])
    x = x + mlp(x, p["fc1"], p["fc2"], "quick_geglu", tp, config)
    logits = invariant_linear(norm(x, one, tp, exact=config.tp_invariant), p["out"], tp)
    return {
        "middle": middle,
        "hidden": x,
        "logits": logits,
        "loss": vocab_parallel_cross_entropy(logits, labels, tp),
    }


def train(kind, x, p, labels, tp, config):
    p = {name: shard(name, t, tp).clone().requires_grad_() for name, t in p.items()}
    x = rows(x, tp).clone().requires_grad_()
    results = model(kind, x, p, labels, tp, config)
    results["loss"].mean().backward()
    return {name: t.detach() for name, t in results.items()}, {"x": x.grad} | {
        name: t.grad for name, t in p.items()
    }


def part(name, t, tp):
    """What rank ``tp.rank`` should hold of a result of one rank."""
    if name in ("hidden", "x"):
        return rows(t, tp)
    if name in ("middle", "logits"):
        return t.chunk(tp.size, -1)[tp.rank]
    return shard(name, t, tp)


def compare(kind, dtype, seed, **changes):
    """{sequence parallel or not: {name: (equal to the bit, relative error)} of every output and
    gradient against one rank}.
    """
    torch.manual_seed(seed)
    x, p = torch.randn(S, B, H).to(dtype), parameters(kind, dtype)
    labels = torch.randint(0, V, (S, B))
    labels[0, 0] = -100
    config = ActivationConfig(**changes)
    alone = train(kind, x, p, labels, ONE, config)
    several = (TensorParallel(dist.group.WORLD, sp) for sp in (False, True))
    return {tp.sharded: errors(alone, train(kind, x, p, labels, tp, config), tp) for tp in several}


def errors(alone, together, tp):
    result = {}
    for prefix, expected, got in zip(("", "d_"), alone, together, strict=True):
        for name in expected:
            want, have = part(name, expected[name], tp), got[name]
            error = (have.double() - want.double()).norm() / want.double().norm()
            result[prefix + name] = (
                torch.equal(have, want) and have.dtype == want.dtype,
                error.item(),
            )
    return result


FORMS = [("e4m3", "bf16", "tensor"), ("e5m2", "e8m0", "tensor"), ("e4m3", "e8m0", "row")]
CASES = list(itertools.product(["exact", "quantized"], FORMS, ["rmsnorm", "layernorm"],
                               [torch.float32, torch.bfloat16], [True, False]))  # fmt: skip


def all_cases(rank, world, seed):
    warnings.simplefilter("ignore")
    out = {}
    for forward, (fmt, scale, scales), kind, dtype, invariant in CASES:
        found = compare(
            kind,
            dtype,
            seed,
            forward=forward,
            format=fmt,
            grad_format=fmt,
            scale=scale,
            forward_scales=scales,
            tp_invariant=invariant,
        )
        for sp, result in found.items():
            out[
                f"{forward} {fmt} {scale} {kind} {dtype} sp={sp} {scales} invariant={invariant}"
            ] = result
    return out, {
        f"{name}, {scales}": fact
        for scales in ("tensor", "row")
        for name, fact in scale_edges(rank, scales).items()
    }


def scale_edges(rank, scales):
    """The small statements that need two ranks."""
    tp, sp = TensorParallel(dist.group.WORLD), TensorParallel(dist.group.WORLD, True)
    config, facts = ActivationConfig(forward_scales=scales), {}
    try:
        sp.reduce_scatter_rows(torch.ones(3, 2))
        facts["odd rows"] = False
    except ValueError as error:
        facts["odd rows"] = "got 3 rows, accepted: a multiple of 2" in str(error)

    # FP8 or BF16 on the wire: the same numbers where nothing is rounded between the norm and the
    # gather.
    p = parameters("rmsnorm", torch.float32)
    x = torch.randn(S // 2, B, H, requires_grad=True)
    one, runs = Norm("rmsnorm", 1e-5, p["gain"].requires_grad_()), []
    for fp8 in (True, False):
        setting = ActivationConfig(fp8_gather=fp8, forward_scales=scales)
        out = norm_mlp(
            x,
            one,
            p["fc1"].chunk(2)[rank].requires_grad_(),
            p["fc2"].chunk(2, 1)[rank],
            "swiglu",
            sp,
            setting,
        )
        out = out + mlp(
            x,
            p["up"].chunk(2)[rank].requires_grad_(),
            p["down"].chunk(2, 1)[rank],
            "gelu",
            sp,
            setting,
        )
        runs.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, p["gain"]])])
    facts["bf16 gather"] = equal(*runs)

    # Small values of a row are subnormal with the scale of all rows, and rounded twice on any
    # number of ranks.
    wide, weights = torch.randn(S, B, H) * torch.randint(0, 16, (S, B, H)).neg().exp2(), []
    for ranks in (ONE, sp):
        setting = ActivationConfig(forward_scales=scales, scale="e8m0", tp_invariant=True)
        up = shard("up", p["up"], ranks).clone().requires_grad_()
        down = shard("down", p["down"], ranks)
        mlp(rows(wide, ranks), up, down, "gelu", ranks, setting).sum().backward()
        weights.append(up.grad)
    facts["subnormal"] = torch.equal(shard("up", weights[0], sp), weights[1])

    # With sequence parallelism only this rank's tokens are kept.
    weight = p["weight"].chunk(2)[rank].requires_grad_()
    kept = saved(lambda: norm_linear(x, one, weight, None, sp, config), weight, p["gain"])
    facts["saved"] = sum(kept.values()) == S // 2 * B * (H + H // 32 + 4) + 8

    # One rank's NaN is everybody's: through the shared scale in every token, by rows in this token
    # alone. Gradients of weights, which sum over tokens, are NaN everywhere in both.
    bad = x.detach().clone()
    if rank == 1:
        bad[0, 0, 0] = torch.nan
    lost = norm_linear(bad, one, weight, None, sp, config)
    expected = torch.ones(S, B, dtype=torch.bool)
    if scales == "row":
        expected.zero_()[S // 2, 0] = True
    facts["nan"] = torch.equal(lost.isnan().all(-1), expected) and torch.equal(
        lost.isnan().any(-1), expected
    )
    facts["nan in wgrad"] = bool(torch.autograd.grad(lost.sum(), weight)[0].isnan().all())
    bad = torch.randn(S, B, N // 2)
    for invariant, value in itertools.product((False, True), (torch.nan, torch.inf)):
        if rank == 1:
            bad[2, 1, 3] = value
        both = ActivationConfig(forward_scales=scales, tp_invariant=invariant)
        lost = linear(bad, p["back"].chunk(2, 1)[rank], tp, both).isnan()
        facts[f"{value} in a part of a row, {invariant}"] = bool(lost[2, 1].all()) and (
            scales == "tensor" or int(lost.sum()) == H
        )
    return facts


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, all_cases, random.randrange(2**31))


def flat(ranks, invariant):
    for results, _ in ranks:
        for key, values in results.items():
            if key.endswith(f"invariant={invariant}"):
                for name, value in values.items():
                    yield key, name, *value


def test_tp_invariant_has_the_same_bits_on_any_number_of_ranks(ranks):
    wrong = [(key, name, error) for key, name, equal, error in flat(ranks, True) if not equal]
    assert not wrong, wrong[:10]


def test_tensor_parallel_results_are_close(ranks):
    """Each rank scales its own shards: the same rounding errors in size, not in detail."""
    checked = list(flat(ranks, False))
    for key, name, _, error in checked:
        # Largest of five runs with other seeds: 0.41 and 0.24.
        assert error < (0.55 if "e5m2" in key else 0.35), (key, name, error)
    assert not all(equal for _, _, equal, _ in checked)


def test_tensor_parallel_edges(ranks):
    for _, facts in ranks:
        assert all(facts.values()), facts
