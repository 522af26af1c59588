"""Error of forward with one scale a tensor and with one a row, where some tokens are larger than others.

    python -m benchmarks.accuracy.row_scales [--tokens 512] [--format e4m3] [--output DIR]

Normal random activations and weights; every 64th token is multiplied by a factor. A token's error is that of its output
relative to its length, against fp32; the table has the mean over ordinary tokens, in percent. Functions of
`coat_dist.flow` in the default forward mode, by their definitions on the CPU: some ten seconds of a core. Prints the
table of docs/flow.md and writes `accuracy/row-scales.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from benchmarks.arguments import positive_int
from benchmarks.common import argument_parser, options, write_result
from coat_dist.config import ActivationConfig
from coat_dist.flow import Norm, TensorParallel, linear, mlp, norm_mlp

HIDDEN, FFN = 1024, 2816
EVERY = 64
FACTORS = (1.0, 1e2, 1e4, 1e6)
ONE, NORM = TensorParallel(), Norm("rmsnorm", 1e-5)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=positive_int, default=512)
    parser.add_argument("--format", default="e4m3", choices=["e4m3", "e5m2"])
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    torch.manual_seed(0)
    scales = [ActivationConfig(forward_scales=s, format=arguments.format) for s in ("tensor", "row")]
    weight, fc1 = (torch.randn(n, HIDDEN) * HIDDEN**-0.5 for n in (HIDDEN, 2 * FFN))
    fc2 = torch.randn(HIDDEN, FFN) * FFN**-0.5

    def swiglu(x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ fc1.t()).chunk(2, -1)
        return (F.silu(gate) * up) @ fc2.t()

    pairs: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
        "linear": (lambda x, s: linear(x, weight, ONE, s), lambda x: x @ weight.t()),
        "norm_mlp": (
            lambda x, s: norm_mlp(x, NORM, fc1, fc2, "swiglu", ONE, s),
            lambda x: swiglu(F.rms_norm(x, (HIDDEN,), None, NORM.eps)),
        ),
        "mlp": (lambda x, s: mlp(x, fc1, fc2, "swiglu", ONE, s), swiglu),
    }
    ordinary = torch.arange(arguments.tokens) % EVERY != 0
    rows = []
    print(f"| | {' | '.join(f'× {f:g}, tensor | row' for f in FACTORS)} |")
    for name, (flow, exact) in pairs.items():
        errors = []
        for factor in FACTORS:
            x = torch.randn(arguments.tokens, HIDDEN)
            x[~ordinary] *= factor
            wanted = exact(x)
            for setting in scales:
                wrong = (flow(x, setting) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
                errors.append(wrong[ordinary].mean().item())
        rows.append({"function": name, "factors": FACTORS, "tensor": errors[::2], "row": errors[1::2]})
        print(f"| `{name}` | {' | '.join(f'{100 * e:.1f}' for e in errors)} |", flush=True)
    found = {"settings": options(arguments), "rows": rows}
    print("wrote", write_result("accuracy/row-scales", found, arguments.output))


if __name__ == "__main__":
    main()
