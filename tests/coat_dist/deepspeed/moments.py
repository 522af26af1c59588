"""What accessors give as moments after one step, and what they leave in states when they set
one.
"""

import torch

from tests.coat_dist.checkpoint.universal_runs import build


def moments_of_one_step(rank, world, settings):
    """Moments after the first step, beside what AdamW's are: (1 - beta) times the gradient, or
    its square.
    """
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
