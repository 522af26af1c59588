"""Bias and noise of the FP8 flow's gradients, rounding by rounding, on a trained small GPT.

    python -m benchmarks.accuracy.gradients [--model small] [--batches 64] [--sets flow roundings products candidates]
    python -m benchmarks.accuracy.gradients --tiny

A Llama-shaped GPT is trained in fp32 on Python sources (bytes), its weights are rounded to BF16 and stay as they are.
For every batch the gradient of each variant (`gradient_variants.py`) is compared with two references: "exact", the
gradient of the same batch in fp32, and "straight through", the fp32 gradient of the loss as the variant's FP8 forward
computes it, where each rounding counts as the identity. The second says what backward's roundings do by themselves; the
first includes that forward computes with other weights and activations. Differences are split into bias and noise
(`bias_noise.py`), by kind of weight.

Single roundings are switched in a simulation (`roundings.py`). First it has to have the real flow's gradients, both
with definitions (``COAT_REFERENCE=1``): the program stops if they differ by more than :data:`LIMIT` of the flow's
error. On a GPU variants called "flow" run its kernels. ``--budget`` ends a run after a whole block of batches.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.accuracy.bias_noise import Estimate, Totals, estimate
from benchmarks.accuracy.gradient_variants import ALL, REAL, SETS, STRAIGHT, Variant, exact_block, variants
from benchmarks.common import argument_parser, options, write_result
from benchmarks.small_gpt import BYTES_VOCABULARY, GPT, HELD_OUT, Shape, fp32_adamw, prepare_bytes, train

MODELS = {
    "tiny": Shape(BYTES_VOCABULARY, hidden=64, layers=2, heads=2, ffn=192, sequence=32, batch=2),
    "small": Shape(BYTES_VOCABULARY, hidden=192, layers=4, heads=6, ffn=512, sequence=128, batch=4),
    "medium": Shape(BYTES_VOCABULARY, hidden=768, layers=9, heads=12, ffn=2048, sequence=1024, batch=8),
}
"""0.1, 2.0 and 64 M parameters; the last is the model of `convergence/flow.py`."""
DEFAULTS = {"tiny": (10, 4, 2, 2**19), "small": (600, 64, 8, 2**23), "medium": (800, 64, 8, 2**25)}
"""Steps of training, batches, batches of a block, bytes of text."""
LIMIT = 0.1
"""Largest distance of the simulation to the flow, as a part of the flow's distance to the exact gradient."""
KINDS = "qkv", "proj", "fc1", "fc2", "norms", "embedding", "output"
REFERENCES = "exact", "straight through"
Differences = dict[tuple[str, str], Totals]
"""By reference and variant."""


def kind_of(name: str) -> str:
    """One of :data:`KINDS` for a parameter of the GPT."""
    part = name.split(".")[-2]
    return "norms" if part.startswith("norm") else {"head": "output"}.get(part, part)


class Gradients:
    """Gradients of one model by variants of its layers, as vectors that are ordered by kind."""

    def __init__(self, model: GPT) -> None:
        self.models = {False: model, True: copy.deepcopy(model).bfloat16()}
        for name, buffer in model.named_buffers():
            setattr(self.models[True], name, buffer)  # cosines and sines stay fp32
        names = [name for name, _ in model.named_parameters()]
        self.order = sorted(range(len(names)), key=lambda i: KINDS.index(kind_of(names[i])))
        self.slices: dict[str, slice] = {}
        end, sizes = 0, [p.numel() for p in model.parameters()]
        for kind in KINDS:
            start = end
            end += sum(n for n, name in zip(sizes, names, strict=True) if kind_of(name) == kind)
            self.slices[kind] = slice(start, end)
        self.slices["all"] = slice(0, end)

    def __call__(self, variant: Variant, window: torch.Tensor) -> torch.Tensor:
        """fp32 ``[parameters]``; window ``[batch, sequence + 1]``."""
        model = self.models[variant.bf16]
        x = model.embedding(window[:, :-1])
        for layer, block in enumerate(model.blocks):
            x = variant.block(layer, block, x, model.cos, model.sin)
        logits = model.head(model.norm(x)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([grads[i].reshape(-1).float() for i in self.order])


def trained(shape: Shape, tokens: torch.Tensor, steps: int) -> tuple[GPT, float]:
    """A GPT with weights that BF16 holds, and the mean of its last losses."""
    model = GPT(shape, seed=0).to(tokens.device)
    done = train(
        model, fp32_adamw(model), tokens, shape, steps=steps, seed=0, lr=1e-3, autocast=tokens.is_cuda
    )  # fmt: skip
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    last = done["loss"][-max(1, steps // 10) :]
    return model, sum(last) / len(last)


@contextmanager
def definitions() -> Iterator[None]:
    """The flow runs its definitions, on every device."""
    before = os.environ.get("COAT_REFERENCE")
    os.environ["COAT_REFERENCE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["COAT_REFERENCE"]
        else:
            os.environ["COAT_REFERENCE"] = before


def check(gradients: Gradients, window: torch.Tensor) -> dict[str, float]:
    """Distance of the simulation to the flow, by kind, in parts of the flow's distance to the exact gradient.

    Raises:
        RuntimeError: one is above :data:`LIMIT`.
    """
    known = variants(["flow"], layers=len(gradients.models[False].blocks))
    exact, simulated = gradients(Variant(exact_block), window), gradients(known[ALL], window)
    with definitions():
        real = gradients(known[REAL], window)
    found = {
        kind: ((simulated[s] - real[s]).norm() / (real[s] - exact[s]).norm()).item()
        for kind, s in gradients.slices.items()
    }
    wrong = {kind: round(value, 3) for kind, value in found.items() if not value <= LIMIT}
    if wrong:
        raise RuntimeError(f"the simulation is not the flow: distances {wrong}, accepted: at most {LIMIT}")
    return found


def measure(
    gradients: Gradients,
    chosen: dict[str, Variant],
    tokens: torch.Tensor,
    shape: Shape,
    blocks: int,
    size: int,
    budget: float | None,
) -> tuple[Differences, Totals, int]:
    """Sums of differences, those of the exact gradient, and how many batches were seen."""
    start = time.monotonic()
    own, differences = Totals(gradients.slices), {}
    for name, variant in chosen.items():
        for reference in REFERENCES if variant.straight else REFERENCES[:1]:
            differences[reference, name] = Totals(gradients.slices)
    needed = {v.straight for v in chosen.values() if v.straight}
    generator, n = torch.Generator().manual_seed(1), 0
    seen = len(tokens) - int(len(tokens) * HELD_OUT)
    offsets = torch.arange(shape.sequence + 1, device=tokens.device)
    for block in range(blocks):
        for _ in range(size):
            starts = torch.randint(seen - shape.sequence - 1, (shape.batch,), generator=generator)
            window = tokens[starts.to(tokens.device)[:, None] + offsets]
            exact = gradients(Variant(exact_block), window)
            straight = {name: gradients(STRAIGHT[name], window) for name in needed}
            own.add(exact, exact)
            torch.manual_seed(n)
            for name, variant in chosen.items():
                found = gradients(variant, window)
                differences["exact", name].add(found - exact, exact)
                if variant.straight:
                    differences["straight through", name].add(found - straight[variant.straight], exact)
            n += 1
        for one in (own, *differences.values()):
            one.close_block()
        used = time.monotonic() - start
        print(f"{n} batches, {used:.0f} s", flush=True)
        if budget is not None and block and used * (block + 2) / (block + 1) > budget:
            break
    return differences, own, n


def row(found: Estimate) -> dict[str, float]:
    """Squares relative to those of the mean exact gradient (bias) and of a batch's (noise)."""
    batch2 = found.mean2 + found.spread2
    return {
        "bias2": found.bias2 / found.mean2,
        "bias2_error": found.bias2_error / found.mean2,
        "bias2_of_batch": found.bias2 / batch2,
        "noise2": found.noise2 / batch2,
        "noise2_of_spread": found.noise2 / found.spread2,
        "gain": found.gain,
        "gain_error": found.gain_error,
    }


def results(differences: Differences, own: Totals, size: int) -> list[dict[str, Any]]:
    """A flat record for each reference and variant, with four digits."""
    rows = []
    for (reference, name), found in differences.items():
        record: dict[str, Any] = {"variant": name, "reference": reference}
        for kind in found.kinds:
            values = row(estimate(found, own, kind, size))
            record |= {f"{kind} {key}": float(f"{value:.4g}") for key, value in values.items()}
        rows.append(record)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Bias and noise in percent; a bias below twice its standard error is given as a bound."""
    kinds = [*KINDS, "all"]
    for reference in REFERENCES:
        for value in ("bias", "noise"):
            print(f"== {value}, %, against {reference}\n{'':<38}" + "".join(f"{kind:>13}" for kind in kinds))
            for r in (r for r in rows if r["reference"] == reference):
                cells = [bias_text(r, k) if value == "bias" else noise_text(r, k) for k in kinds]
                print(f"{r['variant']:<38}" + "".join(f"{cell:>13}" for cell in cells), flush=True)


def bias_text(record: dict[str, Any], kind: str) -> str:
    """``bias ± standard error`` in percent of the mean exact gradient, or ``< bound``."""
    square, error = record[f"{kind} bias2"], record[f"{kind} bias2_error"]
    if square <= 2 * error:
        return f"<{100 * max(square + 2 * error, 0) ** 0.5:.2f}"
    return f"{100 * square**0.5:.2f}±{100 * error / (2 * square**0.5):.2f}"


def noise_text(record: dict[str, Any], kind: str) -> str:
    """Noise in percent of the root mean square of a batch's gradient."""
    return f"{100 * record[f'{kind} noise2'] ** 0.5:.2f}"


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="small", choices=list(MODELS))
    parser.add_argument("--tiny", action="store_true", help="a model of 0.1 M parameters, few steps and batches")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS, help="variants to measure")
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--batches", type=int, help="a multiple of a block of 8 (--tiny: of 2), at least 2 blocks")
    parser.add_argument("--budget", type=float, help="seconds after which no further block of batches begins")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--plot", action="store_true", help="draw docs/figures/accuracy-gradients.png")
    parser.add_argument("--name", default="gradients", help="of the JSON result")
    arguments = parser.parse_args(given)
    model = "tiny" if arguments.tiny else arguments.model
    steps, batches, size, _ = DEFAULTS[model]
    arguments.model, arguments.steps = model, arguments.steps or steps
    arguments.batches = arguments.batches or batches
    if arguments.batches % size or arguments.batches < 2 * size:
        parser.error(f"--batches: got {arguments.batches}, accepted: a multiple of {size}, at least {2 * size}")
    return arguments


def main() -> None:
    arguments = parse()
    shape, (_, _, size, max_bytes) = MODELS[arguments.model], DEFAULTS[arguments.model]
    with tempfile.TemporaryDirectory() as folder:
        tokens = prepare_bytes(folder, max_bytes).to(arguments.device)
    model, loss = trained(shape, tokens, arguments.steps)
    gradients = Gradients(model)
    print(f"{gradients.slices['all'].stop / 1e6:.1f} M parameters, loss {loss:.3f} after {arguments.steps} steps")
    short = replace(shape, batch=1)
    distances = check(gradients, tokens[: short.sequence + 1][None])
    print("distance of the simulation to the flow:", {k: round(v, 4) for k, v in distances.items()}, flush=True)
    chosen = variants(arguments.sets, shape.layers)
    differences, own, n = measure(
        gradients, chosen, tokens, shape, arguments.batches // size, size, arguments.budget
    )  # fmt: skip
    rows = results(differences, own, size)
    show(rows)
    data = {
        "settings": options(arguments, "plot"), "shape": asdict(shape), "loss": loss, "batches": n,
        "simulation_to_flow": distances, "rows": rows,
    }  # fmt: skip
    name = f"accuracy/{arguments.name}" + "-tiny" * arguments.tiny
    print("wrote", write_result(name, data, arguments.output))


if __name__ == "__main__":
    main()
