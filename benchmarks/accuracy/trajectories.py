"""How far CoatAdamW moves parameters, and torch's fp32 AdamW with the same gradients, in groups of unlike elements.

    python -m benchmarks.accuracy.trajectories [--output DIR]

The error of one encoding says little about many steps: what rounding adds to a moment is encoded again in the next one.
So parameters start at zero, both optimizers take the same steps, and two ratios are taken over the elements that a
scenario is about:

* ``moved``: mean of displacements, without sign, over that of fp32 AdamW; 1 is right,
* ``error``: root mean square of the difference of displacements over the root mean square of those of fp32 AdamW,

and ``v``, the mean of log2(second moment / that of fp32 AdamW) at the end. Scenarios:

* ``stopped``: a tenth of the elements has five gradients of 1e-4 and then none, beside neighbours of deviation 1;
* ``stopped at 1e-7``: the same with gradients of 1e-7;
* ``beside constants``: the first, with neighbours whose gradient is always 1, so that amaxes hardly move;
* ``sparse``: each element has a gradient in 2 % of the steps;
* ``decaying``: gradients of half of the elements shrink by a fifth in each step.

FP8 formats are measured with two ranges R of the first moment: F**2 / 2, the package's, and 2 F**2, its former one.
Prints a table and writes `accuracy/trajectories.json`. Takes two minutes on a core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks.accuracy.encodings import first_moment_range
from benchmarks.common import argument_parser, write_result
from coat_dist import CoatAdamW
from coat_dist.optim import export_moments

__all__ = ["SCENARIOS", "Gradients", "Options", "compare", "decaying", "main", "ratios", "sparse", "stopped", "train"]

LR, BETA1 = 1e-3, 0.9
ELEMENTS = 4096


class Gradients(NamedTuple):
    """``steps``: fp32 [number of steps, n]; ``watched``: bool [n], the elements whose displacement is measured."""

    steps: torch.Tensor
    watched: torch.Tensor


class Options(NamedTuple):
    """One configuration of CoatAdamW. ``factor``: R of the first moment over F**2, the package's if None."""

    first: str = "e4m3"
    second: str = "e4m3"
    expand: bool = True
    factor: float | None = None
    group_size: int = 128
    rounding: bool | str = "auto"
    beta2: float = 0.999


def stopped(
    n: int = ELEMENTS, small: float = 1e-4, constant: bool = False, steps: int = 60, share: float = 0.1, seed: int = 0
) -> Gradients:
    """A ``share`` of the elements has five gradients of ``small`` and then none; others are normal, or always 1."""
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(steps, n, generator=generator)
    if constant:
        gradients.fill_(1.0)
    watched = torch.rand(n, generator=generator) < share
    gradients[:, watched] = 0.0
    gradients[:5, watched] = small
    return Gradients(gradients, watched)


def sparse(n: int = ELEMENTS, density: float = 0.02, steps: int = 200, seed: int = 0) -> Gradients:
    """Each element has a normal gradient in a share of the steps, and none in the others."""
    generator = torch.Generator().manual_seed(seed)
    present = torch.rand(steps, n, generator=generator) < density
    return Gradients(torch.randn(steps, n, generator=generator) * present, torch.ones(n, dtype=torch.bool))


def decaying(n: int = ELEMENTS, factor: float = 0.8, steps: int = 150, seed: int = 0) -> Gradients:
    """Half of the elements have normal gradients that shrink by ``factor`` in each step."""
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(steps, n, generator=generator)
    watched = torch.rand(n, generator=generator) < 0.5
    gradients *= torch.where(watched, factor ** torch.arange(steps)[:, None], 1.0)
    return Gradients(gradients, watched)


SCENARIOS: dict[str, Callable[[], Gradients]] = {
    "stopped": stopped,
    "stopped at 1e-7": lambda: stopped(small=1e-7),
    "beside constants": lambda: stopped(constant=True),
    "sparse": sparse,
    "decaying": decaying,
}


def compare(gradients: Gradients, options: Options) -> dict[str, float]:
    """``moved``, ``error`` and ``v`` as above, and ``fp32``, the mean displacement of fp32 AdamW."""
    coded, exact, v, true_v = (x[gradients.watched].double() for x in train(gradients.steps, options))
    seen = true_v > 0
    return {
        **ratios(coded, exact),
        "v": (v[seen] / true_v[seen]).log2().mean().item(),
        "fp32": exact.abs().mean().item(),
    }


def ratios(coded: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """``moved`` and ``error`` of displacements beside those of fp32 AdamW."""
    return {
        "moved": (coded.abs().mean() / exact.abs().mean()).item(),
        "error": ((coded - exact).square().mean() / exact.square().mean()).sqrt().item(),
    }


def train(steps: torch.Tensor, options: Options) -> tuple[torch.Tensor, ...]:
    """Displacements by CoatAdamW and by fp32 AdamW after gradients [steps, n], and their second moments: each [n]."""
    coded, exact = (torch.nn.Parameter(torch.zeros(steps.shape[1])) for _ in range(2))
    common: dict[str, Any] = {"lr": LR, "betas": (BETA1, options.beta2), "weight_decay": 0.0}
    ours = CoatAdamW(
        [coded],
        first_moment=options.first,
        second_moment=options.second,
        expand=options.expand,
        group_size=options.group_size,
        stochastic_rounding=options.rounding,
        **common,
    )
    theirs = torch.optim.AdamW([exact], **common)
    with first_moment_range(options.factor):
        for gradient in steps:
            coded.grad, exact.grad = gradient.clone(), gradient.clone()
            ours.step()
            theirs.step()
    _, v = export_moments(coded, ours.state[coded], ours.param_groups[0])
    return coded.detach(), exact.detach(), v, theirs.state[exact]["exp_avg_sq"]


def configurations() -> list[Options]:
    """Formats and ranges with every rounding, group size and both common beta2; other formats with groups of 128."""
    kinds = [
        Options(factor=2.0),
        Options(),
        Options("e5m2", "e5m2", factor=2.0),
        Options("e5m2", "e5m2"),
        Options("int8", "log8"),
        Options(expand=False),
        Options("int8", expand=False),
    ]
    out = []
    roundings: tuple[bool | str, ...] = (False, "auto", True)
    for kind, beta2, rounding in product(kinds, (0.999, 0.95), roundings):
        if (beta2, rounding) == (0.95, "auto"):  # is False
            continue
        sizes = (64, 128, 256) if beta2 == 0.999 and kind.expand else (128,)
        out += [kind._replace(group_size=size, rounding=rounding, beta2=beta2) for size in sizes]
    return out


def _label(options: Options) -> str:
    """Formats, and R where there is one to tell."""
    if not options.expand:
        return f"{options.first}, {options.second}, expand off"
    fp8 = options.first != "int8"
    return f"{options.first}, {options.second}" + (", R = 2 F^2" if options.factor else ", R = F^2/2" if fp8 else "")


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    return argument_parser(__doc__).parse_args(given)


def main() -> None:
    output = parse().output
    rows: list[dict[str, Any]] = []
    for name, make in SCENARIOS.items():
        gradients = make()
        for options in configurations():
            row: dict[str, Any] = {"scenario": name, "formats": _label(options)}
            row |= {k: getattr(options, k) for k in ("beta2", "rounding", "group_size")}
            rows.append(row | compare(gradients, options))
            numbers = rows[-1]
            print(
                f"{name:<17} {numbers['formats']:<24} beta2 {options.beta2:<6} {options.rounding!s:<6}"
                f" groups of {options.group_size:<4} moved {numbers['moved']:9.3f}  error {numbers['error']:9.3f}"
                f"  log2 v {numbers['v']:+.3f}",
                flush=True,
            )
    worst = {
        label: max(abs(math.log(r["moved"])) for r in rows if r["formats"] == label)
        for label in dict.fromkeys(str(r["formats"]) for r in rows)
    }
    for label, value in worst.items():
        print(f"{label:<24} displacement at most {math.exp(value):.2f} times too large or too small")
    settings = {"lr": LR, "beta1": BETA1, "elements": ELEMENTS}
    print("wrote", write_result("accuracy/trajectories", {"settings": settings, "rows": rows}, output))


if __name__ == "__main__":
    main()
