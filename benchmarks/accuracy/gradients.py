"""Bias and noise of the FP8 flow's gradients, rounding by rounding, on a trained small GPT.

    python -m benchmarks.accuracy.gradients [--model small] [--batches 64] [--sets flow roundings products candidates]
    python -m benchmarks.accuracy.gradients --tiny

A Llama-shaped GPT is trained in fp32 on Python sources (bytes), its weights are rounded to BF16 and stay as they are.
For every batch the gradient of each variant (`gradient_variants.py`) is compared with two references: "exact", the
gradient of the same batch in fp32, and "straight through", the fp32 gradient of the loss as the variant's FP8 forward
computes it, where each rounding counts as the identity. The second says what backward's roundings do by themselves; the
first includes that forward computes with other weights and activations. Differences are split into bias and noise
(`bias_noise.py`), by kind of weight.

Single roundings are switched in a simulation (`roundings.py`). First it has to have the gradients of the real flow's
definitions: the program stops if they differ by more than :data:`LIMIT` of the flow's error. On a GPU variants called
"flow" run its kernels. ``--budget`` ends a run after a whole block of batches.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.accuracy.bias_noise import Totals, estimates
from benchmarks.accuracy.gradient_variants import PRECISE, REAL, SETS, STRAIGHT, Variant, exact_block, variants
from benchmarks.accuracy.gradients_report import KINDS, REFERENCES, records, show
from benchmarks.arguments import check_device, one_line, positive_float, positive_int
from benchmarks.common import argument_parser, options, write_result
from benchmarks.small_gpt import BYTES_VOCABULARY, GPT, HELD_OUT, Shape, fp32_adamw, prepare_bytes, train

MODELS = {
    "tiny": Shape(BYTES_VOCABULARY, hidden=64, layers=2, heads=2, ffn=192, sequence=32, batch=2),
    "small": Shape(BYTES_VOCABULARY, hidden=192, layers=4, heads=6, ffn=512, sequence=128, batch=4),
    "medium": Shape(BYTES_VOCABULARY, hidden=512, layers=8, heads=8, ffn=1408, sequence=512, batch=8),
}
"""0.1, 1.9 and 26 M parameters."""
DEFAULTS = {"tiny": (10, 4, 2, 2**19), "small": (600, 64, 8, 2**23), "medium": (800, 64, 8, 2**24)}
"""Steps of training, batches, batches of a block, bytes of text."""
LIMIT = 0.05
"""Largest distance of the simulation to the flow, as a part of the flow's distance to the exact gradient."""
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
        self.size = end

    def __call__(self, variant: Variant, window: torch.Tensor) -> torch.Tensor:
        """fp32 ``[parameters]``; window ``[batch, sequence + 1]``."""
        model = self.models[variant.bf16]
        x = model.embedding(window[:, :-1])
        tables = [table[: x.shape[1]] for _, table in model.named_buffers()]  # cosines and sines
        for layer, block in enumerate(model.blocks):
            x = variant.block(layer, block, x, *tables)
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


def check(model: GPT, window: torch.Tensor) -> dict[str, float]:
    """Distance of the simulation to the flow, by kind, in parts of the flow's distance to the exact gradient.

    On the CPU, and with products as exact as the definition's: a difference in the last bit of fp32 changes a few codes
    of what follows, these change more, and four layers later most of the error is another one of the same size.

    Raises:
        RuntimeError: one is above :data:`LIMIT`.
    """
    gradients, window = Gradients(copy.deepcopy(model).cpu()), window.cpu()
    known = variants(["check"], layers=len(model.blocks))
    with definitions():
        exact, real, simulated = (
            gradients(v, window) for v in (Variant(exact_block), known[REAL], known[PRECISE])
        )  # fmt: skip
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


def results(
    differences: Differences, own: Totals, size: int, device: str
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A flat record for each reference and variant, and squares of the exact gradient's norms; four digits."""
    rows: list[dict[str, Any]] = []
    norms: dict[str, float] = {}
    own.sums = [s.to(device) for s in own.sums]  # every variant is multiplied with them
    gg = own.grams(own, device)
    for (reference, name), found in differences.items():
        record: dict[str, Any] = {"variant": name, "reference": reference}
        for kind, one in estimates(found, own, size, device, gg).items():
            values = one._asdict()
            norms |= {f"{kind} {key}": _short(values.pop(key)) for key in ("mean2", "spread2")}
            record |= {f"{kind} {key}": _short(value) for key, value in values.items()}
        rows.append(record)
    return rows, norms


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="small", choices=list(MODELS))
    parser.add_argument("--tiny", action="store_true", help="a model of 0.1 M parameters, few steps and batches")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS, help="variants to measure")
    parser.add_argument("--steps", type=positive_int, help="of training")
    parser.add_argument("--batches", type=positive_int, help="a multiple of blocks of 8 (--tiny: of 2), 2 at least")
    parser.add_argument("--budget", type=positive_float, help="seconds after which no further block of batches begins")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
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
    with one_line():
        check_device(arguments.device)
    shape, (_, _, size, max_bytes) = MODELS[arguments.model], DEFAULTS[arguments.model]
    with tempfile.TemporaryDirectory() as folder:
        tokens = prepare_bytes(folder, max_bytes).to(arguments.device)
    model, loss = trained(shape, tokens, arguments.steps)
    gradients = Gradients(model)
    print(f"{gradients.size / 1e6:.1f} M parameters, loss {loss:.3f} after {arguments.steps} steps")
    distances = check(model, tokens[: min(shape.sequence, 128) + 1][None])
    print("distance of the simulation to the flow:", {k: round(v, 4) for k, v in distances.items()}, flush=True)
    chosen = variants(arguments.sets, shape.layers)
    differences, own, n = measure(
        gradients, chosen, tokens, shape, arguments.batches // size, size, arguments.budget
    )  # fmt: skip
    rows, norms = results(differences, own, size, arguments.device)
    data = {
        "settings": options(arguments), "shape": asdict(shape), "loss": loss, "batches": n,
        "simulation_to_flow": distances, "exact": norms, "rows": rows,
    }  # fmt: skip
    show(records(data))
    name = f"accuracy/{arguments.name}" + "-tiny" * arguments.tiny
    print("wrote", write_result(name, data, arguments.output))


if __name__ == "__main__":
    main()
