"""How far CoatAdamW moves parameters over many steps, beside torch's fp32 AdamW with the same
gradients.

    python -m benchmarks.accuracy.trajectories [--quick] [--device cuda] [--output DIR]

The error of one encoding says little about many steps: what rounding adds to a moment is encoded
again in the next one. So parameters start at zero, both optimizers take the same steps, and over
the elements that a scenario is about (`trajectory_gradients.py`) these are taken:

* ``error``: root mean square of the difference of displacements over the root mean square of those
  of fp32 AdamW,
* ``moved``: mean of displacements, without sign, over that of fp32 AdamW; 1 is right,
* ``nearest``, ``farthest``, where gradients stop: the least and largest displacement of one element
  over fp32 AdamW's,
* ``v``: mean of (second moment / that of fp32 AdamW) - 1, the bias,
* ``v_log2``, ``v_rms``: mean and root mean square of its log2. All three over second moments that
  fp32 holds normally.

Every pair of formats is measured with every rounding and four pairs of betas over 20, 60 and 400
steps; the pairs that docs/numerics.md compares also over 2000, without ``normalize``, and with
other group sizes; the default pair and int8 with log8 also with what is known to be worse: no
expansion, and encodings of `encodings.altered`. Prints a table and writes
`accuracy/trajectories.json` after each configuration, a line for it. Takes ten minutes on a core,
and with ``--quick``, which leaves out the long runs and most pairs, two.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks.accuracy.encodings import altered
from benchmarks.accuracy.trajectory_gradients import ELEMENTS, SCENARIOS, Gradients
from benchmarks.arguments import argument_parser
from benchmarks.common import show, write_result
from coat_dist import CoatAdamW
from coat_dist.optim import export_moments
from coat_dist.reference.moments import FIRST_MOMENT_FORMATS, SECOND_MOMENT_FORMATS

LR = 1e-3
BETAS = ((0.9, 0.95), (0.9, 0.999), (0.95, 0.95), (0.0, 0.99))
SMALLEST = 2.0**-120
"""Smallest fp32 second moment that is compared: a little above the smallest normal number, below
which codes are zero.
"""


class Options(NamedTuple):
    """One configuration of CoatAdamW; the last three as :func:`altered` takes them."""

    first: str = "e4m3"
    second: str = "e4m3"
    betas: tuple[float, float] = (0.9, 0.999)
    rounding: bool | str = "auto"
    normalize: bool = True
    group_size: int = 128
    expand: bool = True
    factor: float | None = None
    fresh_grids: bool = False
    independent_noise: bool = False


FORMER: dict[str, Any] = {"normalize": False, "fresh_grids": True, "independent_noise": True}
"""How moments were stored before first moments were normalized."""


class Trained(NamedTuple):
    """Displacements by CoatAdamW and by fp32 AdamW, and their second moments: each [n]."""

    coded: torch.Tensor
    exact: torch.Tensor
    v: torch.Tensor
    true_v: torch.Tensor


def ratios(coded: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """``moved`` and ``error`` of displacements beside those of fp32 AdamW."""
    return {
        "moved": (coded.abs().mean() / exact.abs().mean()).item(),
        "error": ((coded - exact).square().mean() / exact.square().mean()).sqrt().item(),
    }


def measure(trained: Trained, gradients: Gradients) -> dict[str, float]:
    """What the module's docstring lists, of a scenario's watched elements."""
    coded, exact, v, true_v = (x[gradients.watched].double() for x in trained)
    out = ratios(coded, exact)
    if gradients.stops:
        each = coded / exact
        out |= {"nearest": each.min().item(), "farthest": each.max().item()}
    seen = true_v >= SMALLEST
    if seen.any():
        ratio = v[seen] / true_v[seen]
        logarithm = ratio.clamp(min=2.0**-100).log2()
        out |= {"v": ratio.mean().item() - 1, "v_log2": logarithm.mean().item()}
        out["v_rms"] = logarithm.square().mean().sqrt().item()
    return out


class Joined:
    """Scenarios of equally many steps as columns of one tensor. Each has whole groups of every
    size.
    """

    def __init__(self, scenarios: Mapping[str, Gradients]) -> None:
        self.scenarios = scenarios
        self.steps = torch.cat([one.steps for one in scenarios.values()], 1)

    def compare(self, options: Options, device: str = "cpu") -> dict[str, dict[str, float]]:
        """:func:`measure` of each scenario."""
        trained = train(self.steps, options, device)
        out, first = {}, 0
        for name, one in self.scenarios.items():
            last = first + len(one.watched)
            out[name] = measure(Trained(*(x[first:last] for x in trained)), one)
            first = last
        return out


def train(steps: torch.Tensor, options: Options, device: str = "cpu") -> Trained:
    """Both optimizers' ways after gradients [steps, n]."""
    coded = torch.nn.Parameter(torch.zeros(steps.shape[1], device=device))
    ours = CoatAdamW(
        [coded],
        lr=LR,
        betas=options.betas,
        weight_decay=0.0,
        first_moment=options.first,
        second_moment=options.second,
        expand=options.expand,
        normalize=options.normalize,
        group_size=options.group_size,
        stochastic_rounding=options.rounding,
    )
    with altered(options.factor, options.fresh_grids, options.independent_noise):
        for gradient in steps:
            coded.grad = gradient.to(device)
            ours.step()
    _, v = export_moments(coded, ours.state[coded], ours.param_groups[0])
    exact, true_v = _fp32(steps, options.betas)
    return Trained(coded.detach().cpu(), exact, v.cpu(), true_v)


@functools.lru_cache(8)
def _fp32(steps: torch.Tensor, betas: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Displacements and second moments of torch's AdamW."""
    exact = torch.nn.Parameter(torch.zeros(steps.shape[1]))
    theirs = torch.optim.AdamW([exact], lr=LR, betas=betas, weight_decay=0.0)
    for gradient in steps:
        exact.grad = gradient.clone()
        theirs.step()
    return exact.detach(), theirs.state[exact]["exp_avg_sq"]


PAIRS = (("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "log8"), ("int8", "log8"))
"""Pairs of formats that are measured over 2000 steps and with all group sizes."""
MAIN = (PAIRS[0], PAIRS[-1])
ALTERED: dict[str, dict[str, Any]] = {
    "fresh grids": {"fresh_grids": True},
    "independent noise": {"independent_noise": True},
    "R = 2 F^2": {"factor": 2.0},
    "expand off": {"expand": False},
    "former": FORMER,
    "former, to nearest": FORMER | {"rounding": False},
    "former, R = 2 F^2, to nearest": FORMER | {"rounding": False, "factor": 2.0},
}


def configurations() -> Iterator[tuple[bool, str, Options]]:
    """Whether the longest scenarios are measured, too; the name of what is altered; and the
    configuration.
    """
    common, formats = BETAS[:2], list(product(FIRST_MOMENT_FORMATS, SECOND_MOMENT_FORMATS))
    for betas, pair in product(BETAS, PAIRS):
        yield betas in common, "", Options(pair[0], pair[1], betas)
    for pair, betas, (name, changes) in product(MAIN, common, ALTERED.items()):
        if pair == MAIN[0] or ("R =" not in name and name != "expand off"):
            yield (
                betas == common[1] and len(changes) == 1,
                name,
                Options(pair[0], pair[1], betas)._replace(**changes),
            )
    for pair, betas in product(MAIN, ((0.9, 0.9), (0.9, 0.99))):
        yield True, "", Options(pair[0], pair[1], betas)
    for pair, betas, size in product(PAIRS, common, (64, 256)):
        yield False, "", Options(pair[0], pair[1], betas, group_size=size)
    for betas, pair, rounding in product(BETAS, PAIRS, (True, False)):
        yield False, "", Options(pair[0], pair[1], betas, rounding)
    for pair, betas, rounding in product(PAIRS, common, ("auto", False)):
        yield False, "", Options(pair[0], pair[1], betas, rounding, normalize=False)
    for betas, pair, rounding in product(BETAS, formats, ("auto", True, False)):
        if pair not in PAIRS:
            yield False, "", Options(pair[0], pair[1], betas, rounding)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__, quick=False)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: by the kernel"
    )
    return parser.parse_args(given)


def main() -> None:
    given = parse()
    joined = {
        n: Joined({name: make() for name, make in found.items()}) for n, found in SCENARIOS.items()
    }
    settings = {"lr": LR, "elements": ELEMENTS, "quick": given.quick, "device": given.device}
    rows: list[dict[str, Any]] = []
    for long, what, options in configurations():
        if given.quick and (options.first, options.second) not in MAIN:
            continue
        if what and given.device == "cuda" and options.fresh_grids | options.independent_noise:
            continue  # the definition alone can be altered so
        row: dict[str, Any] = {"altered": what, **options._asdict()}
        row["betas"] = "{}, {}".format(*options.betas)
        row = {key: row[key] for key in ("altered", *Options._fields[:7])}
        for n, one in joined.items():
            if n == max(joined) and (given.quick or not long):
                continue
            for name, found in one.compare(options, given.device).items():
                row |= {f"{name} {n} {key}": float(f"{value:.4g}") for key, value in found.items()}
        rows.append(row)
        print_row(row)
        path = write_result(
            "accuracy/trajectories", {"settings": settings, "rows": rows}, given.output
        )
    print("wrote", path)


def print_row(row: Mapping[str, Any]) -> None:
    """A configuration, and errors and extremes of its scenarios."""
    title = [row["first"], row["second"], row["betas"], row["group_size"], row["rounding"]]
    if not row["normalize"]:
        title.append("not normalized")
    print(*title, row["altered"], sep=", ")
    measures = dict.fromkeys(("error", "nearest", "farthest", "v", "v_rms"), "+.3g")
    for name in dict.fromkeys(key.rpartition(" ")[0] for key in row if key.endswith(" error")):
        show(f"  {name}", {key: row.get(f"{name} {key}") for key in measures}, **measures)


if __name__ == "__main__":
    main()
