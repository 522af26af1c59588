"""Errors of encoded Adam moments of a real training run: COAT's Table 1, our options, rivals, ranges, drift.

    python -m benchmarks.accuracy.moments [--steps 500] [--device cuda] [--output DIR]

Trains `benchmarks/small_gpt.py` with fp32 AdamW on the running Python's standard library, takes m and v, the first and
second moment, of all matrices after 4 %, 20 %, 50 % and 99 % of the steps, and the gradient of the step that follows.
Then, for pairs of encodings,

* ``table1``: mean square error of m / (sqrt(v) + eps), the quantity of COAT's Table 1,
* ``next``: mean square error of the next update, from decoded moments to which the next gradient was added,

over the mean square of the exact value, averaged over the four steps; with and without the embedding, whose rows are
mostly sparse. First moments are encoded by themselves there (``normalize`` off). :func:`drift` is about rounding over
many steps. Prints tables, writes `accuracy/moments.json` and `docs/figures/accuracy-moments-*.png`. Takes ten minutes
on a core, one on a GPU.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from benchmarks.accuracy.encodings import coat, dynamic, flash_first_moment, flash_second_moment, plain_fp8, table
from benchmarks.accuracy.moments_plot import plot_ranges, plot_rivals, plot_table
from benchmarks.accuracy.snapshots import EXACT, Study, capture
from benchmarks.arguments import check_device, one_line
from benchmarks.common import argument_parser, figure_path, write_result
from benchmarks.small_gpt import Shape, prepare_tokens
from coat_dist import CoatAdamW
from coat_dist.optim import export_moments
from coat_dist.reference.moments import MomentCodec

COAT_TABLE_1 = (
    (20.10, 18.08, 25.65, 18.16),
    (15.13, 12.31, 21.96, 12.43),
    (37.02, 35.96, 40.30, 36.00),
    (17.79, 15.48, 23.84, 15.57),
)
"""arXiv 2410.19313, Table 1; rows m, columns v, both in the order of FORMATS."""
FORMATS = {
    "E4M3": ("e4m3", False),
    "E4M3+expand": ("e4m3", True),
    "E5M2": ("e5m2", False),
    "E5M2+expand": ("e5m2", True),
}


def sixteen_cells(study: Study) -> list[list[dict[str, float]]]:
    """Errors of all pairs of FORMATS: rows m, columns v."""
    cells = []
    for m_name, (m_format, m_expand) in FORMATS.items():
        ms = study.decoded("m", coat(m_format, m_expand, second=False), m_name)
        row = []
        for v_name, (v_format, v_expand) in FORMATS.items():
            row.append(study.errors(ms, study.decoded("v", coat(v_format, v_expand, second=True), v_name)))
        cells.append(row)
    return cells


def options_and_rivals(study: Study) -> list[dict[str, Any]]:
    """Our options, code tables that spend no bit on the sign of v, and published encodings."""
    m, v = coat(second=False), coat(second=True)
    int8, log8 = coat("int8", second=False), coat("log8", second=True)
    pair = study.pair
    wide = math.log2(448**2 * 2)
    rows = [
        pair("E4M3+expand (default)", m, v),
        pair("E4M3+expand, R = 2 F^2 for m", coat(second=False, log2_range=wide), v),
        pair("E4M3+expand, stochastic", coat(second=False, seed=1), coat(second=True, seed=2)),
        pair("E4M3+expand, group 64", coat(group_size=64, second=False), coat(group_size=64, second=True)),
        pair("E4M3+expand, group 256", coat(group_size=256, second=False), coat(group_size=256, second=True)),
        pair("E5M2+expand", coat("e5m2", second=False), coat("e5m2", second=True)),
        pair("m E4M3+expand, v UE4M4+expand", m, table("u-e4m4", 16, second=True)),
        pair("m E4M3+expand, v UE5M3+expand", m, table("u-e5m3", 32, second=True)),
        pair("m E4M3+expand, v log8", m, log8),
        pair("m int8+expand, v E4M3+expand", int8, v),
        pair("m int8+expand, v log8", int8, log8),
        pair("m int8+expand, v log8 stochastic", int8, coat("log8", second=True, seed=2)),
        pair(
            "m int8+expand, v log8, group 64",
            coat("int8", group_size=64, second=False),
            coat("log8", group_size=64, second=True),
        ),
        pair("m int8 without expansion, v log8", coat("int8", expand=False, second=False), log8),
        pair("m FlashOptim's, v log8", flash_first_moment(), log8),
        pair("FlashOptim: softsign int8, root uint8", flash_first_moment(), flash_second_moment()),
        pair("dynamic 8-bit, block 256 (AdamW8bit)", dynamic(second=False), dynamic(second=True)),
        pair("E4M3, fp32 scale, block 256 (AdamWFp8)", plain_fp8("e4m3", 256), plain_fp8("e4m3", 256)),
        pair("E4M3, fp32 scale, block 128, v to zero", plain_fp8("e4m3", 128), plain_fp8("e4m3", 128)),
    ]
    rows += [
        pair("m only: E4M3+expand", m, EXACT),
        pair("m only: int8+expand", int8, EXACT),
        pair("m only: int8+expand, group 64", coat("int8", group_size=64, second=False), EXACT),
        pair("m only: FlashOptim", flash_first_moment(), EXACT),
        pair("v only: E4M3+expand", EXACT, v),
        pair("v only: log8", EXACT, log8),
        pair("v only: FlashOptim", EXACT, flash_second_moment()),
    ]
    return rows


def ranges(study: Study) -> dict[str, Any]:
    """Error over R, relative to the package's choice: of both moments in FP8, of the first in int8."""
    out: dict[str, Any] = {}
    steps = (-4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2)
    cases = [(f, second) for f in ("e4m3", "e5m2") for second in (False, True)] + [("int8", False)]
    for format, second in cases:
        codec, which = MomentCodec(format, keep_nonzero=second), "mv"[second]
        chosen = codec.k_numerator / codec.unit
        swept = [chosen + step + (0 if format == "int8" else 2) for step in steps]
        found = study.sweep(which, lambda r, f=format, s=second: coat(f, second=s, log2_range=r), swept)
        found["chosen"] = chosen
        out[f"{which} {format}"] = found
        print(f"R of {which}, {format}: best at {found['best'] - chosen:+.1f} of ours, in octaves", flush=True)
    return out


def drift(
    steps: int = 2000,
    zeros: int = 200,
    elements: int = 128 * 64,
    beta2s: Sequence[float] = (0.95, 0.98, 0.99, 0.999),
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """What rounding does over many steps, per beta2, formats and ``stochastic_rounding`` (both; "auto" is true):
    CoatAdamW beside fp32 moments that see the same gradients, of constant deviation for ``steps`` steps, then ``zeros``
    times zero, while v decays.

    ``v``: mean of log2(encoded / fp32); ``v_rms``: its root mean square; ``update``: relative mean square error of
    m / sqrt(v); ``v_after_zeros``: ``v`` at the end.
    """
    rows = []
    formats = (("e4m3", "e4m3"), ("int8", "log8"))
    for beta2, (first, second), rounding in product(beta2s, formats, (False, True)):
        generator = torch.Generator().manual_seed(0)
        deviation = torch.exp(torch.randn(elements, generator=generator))
        coded, exact = (torch.nn.Parameter(torch.zeros(elements, device=device)) for _ in range(2))
        groups = [{"params": [coded]}, {"params": [exact], "moments": "fp32"}]
        options: dict[str, Any] = {"first_moment": first, "second_moment": second, "stochastic_rounding": rounding}
        optimizer = CoatAdamW(groups, lr=0.0, betas=(0.9, beta2), **options)
        row: dict[str, Any] = {"beta2": beta2, "formats": f"{first}, {second}", "rounding": rounding}
        for scale, count in ((1.0, steps), (0.0, zeros)):
            for _ in range(count):
                gradient = scale * deviation * torch.randn(elements, generator=generator)
                coded.grad = exact.grad = gradient.to(device)
                optimizer.step()
            m, v = export_moments(coded, optimizer.state[coded], optimizer.param_groups[0])
            true_m, true_v = (optimizer.state[exact][key] for key in ("exp_avg", "exp_avg_sq"))
            ratio = (v / true_v).log2().double()
            if scale:
                wanted = true_m / true_v.sqrt()
                error = (m / v.sqrt() - wanted).double().square().mean() / wanted.double().square().mean()
                row |= {"v": ratio.mean().item(), "v_rms": ratio.square().mean().sqrt().item(), "update": error.item()}
            else:
                row |= {"v_after_zeros": ratio.mean().item(), "fp32_falls_by": -count * math.log2(beta2)}
        print(row, flush=True)
        rows.append(row)
    return rows


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=500, help="of training; at least 8")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args(given)
    if arguments.steps < 8:
        parser.error(f"--steps: got {arguments.steps}, accepted: an integer >= 8")
    return arguments


def main() -> None:
    arguments = parse()
    with one_line():
        check_device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        tokens = prepare_tokens(folder, Shape().vocabulary).to(arguments.device)
    study = Study(capture(arguments.steps, tokens))
    cells = sixteen_cells(study)
    ours = [[cell["table1"] / cells[0][0]["table1"] for cell in row] for row in cells]
    published = [[cell / COAT_TABLE_1[0][0] for cell in row] for row in COAT_TABLE_1]
    for name, mine, theirs in zip(FORMATS, ours, published, strict=True):
        print(f"m {name:<12}" + "".join(f"  {a:6.3f} ({b:.3f})" for a, b in zip(mine, theirs, strict=True)))
    result: dict[str, Any] = {
        "settings": {
            "device": arguments.device,
            "steps": sorted(study.snapshots),
            "elements": study.snapshots[min(study.snapshots)].bounds[-1],
        },
        "formats": list(FORMATS),
        "cells": cells,
        "ratio_to_plain_e4m3": ours,
        "coat_ratio_to_plain_e4m3": published,
        "pairs": options_and_rivals(study),
        "ranges": ranges(study),
        "drift": drift(device=arguments.device),
    }
    print("wrote", write_result("accuracy/moments", result, arguments.output))
    table1, range_, rivals = (
        figure_path(f"accuracy-moments-{name}", arguments.output) for name in ("table1", "range", "rivals")
    )
    plot_table(ours, published, list(FORMATS), table1)
    plot_ranges(result["ranges"], range_)
    plot_rivals([r for r in result["pairs"] if "only" not in r["name"]], rivals)


if __name__ == "__main__":
    main()
