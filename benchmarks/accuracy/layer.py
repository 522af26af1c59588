"""Errors of one transformer layer in FP8, its output and every gradient, against fp64: the flow beside its peers.

    python -m benchmarks.accuracy.layer [--tokens 2048] [--peers DIR]
    python -m benchmarks.accuracy.layer --device cpu --tiny

The truth is :func:`plain`, torch operations in fp64. BF16 is the same function in BF16. The flow's variants are its
autograd functions with the default settings but for what their name says. Transformer Engine (``--peers``: a folder
with it, as in ``benchmarks.speed.layer``) runs its own layer in another process, `transformer_engine.py`, in BF16, with
current scaling and with delayed scaling whose scales come from earlier passes over the same tensors. All get the same
BF16 weights, input and gradient of the output. Transformer Engine's BF16 layer has to agree with the truth as BF16
does: a weight in another layout than ours would stop the program there.

Weights are those of an initialized model; cases are in :func:`cases`. For each tensor: relative error
``|found - truth| / |truth|`` and cosine, norms over the whole tensor. "branches" is the output less the input, and
"x branches" the gradient of x less that of the output: what the layer adds to the residual stream, on which FP8 acts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.arguments import check_device, check_peers, one_line, positive_int
from benchmarks.common import ROOT, argument_parser, python_path, write_result
from coat_dist import CoatConfig, flow

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "saved in e4m3": {"saved_format": "e4m3"},
    "tensor scales": {"forward_scales": "tensor"},
    "quantized": {"forward": "quantized"},
    "e5m2 gradients": {"grad_format": "e5m2"},
    "fp8 attention": {"attention": "fp8"},
}
"""The "activation" blocks to measure, by name."""
DEFAULT = "default"
BOUNDS = {"stream": (0.05, 0.999), "branch": (0.15, 0.99), "norm": (0.2, 0.98)}
"""Largest relative error and smallest cosine of the default: of the output and the gradient of x, which hold the
residual stream; of everything else; and of norms' weights, whose gradients are sums over all tokens in which most
terms cancel. A product of two E4M3 tensors has a relative error of 4 %, a gradient is behind two to four of them and
an activation."""
PEERS = "TE current", "TE current, e4m3 gradients"
"""Transformer Engine's recipes that the flow is compared with: the gradients of the first are E5M2, of the second, as
in the flow's default, E4M3."""
BF16_LIMIT = 5.0
"""Transformer Engine in BF16 may have so many times the error of plain BF16, or 1 %; more is another function."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    tokens: int = 2048
    hidden: int = 4096
    ffn: int = 11008
    heads: int = 32
    eps: float = 1e-5


TINY = Shape(tokens=96, hidden=128, ffn=352, heads=4)


def weights(shape: Shape, device: str) -> Tensors:
    """BF16 parameters: linears with the deviation 1.28 / sqrt(hidden), 0.02 for Llama-2-7B, of which those that write
    to the residual stream have an eighth (32 layers); gains around 1."""
    h, f, deviation = shape.hidden, shape.ffn, 1.28 * shape.hidden**-0.5
    shapes = {"qkv": (3 * h, h), "proj": (h, h), "fc1": (2 * f, h), "fc2": (h, f)}
    found = {k: torch.randn(s, device=device) * deviation / (8 if s[0] == h else 1) for k, s in shapes.items()}
    found |= {k: 1 + 0.1 * torch.randn(h, device=device) for k in ("norm1", "norm2")}
    return {k: t.bfloat16() for k, t in found.items()}


def cases(shape: Shape, device: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """BF16 input and gradient of the output ``[s, 1, h]``, by name.

    * "normal": standard normal both.
    * "outlier channels": one channel of 512 is 30 times as large, in every token, in the input.
    * "outlier tokens": one token of 256 has 1000 in two channels (massive activations: Sun et al., arXiv 2402.17762),
      and tokens of the gradient have norms that spread log-normally, with deviation 1.5.
    """
    s, h = shape.tokens, shape.hidden

    def normal() -> torch.Tensor:
        return torch.randn(s, 1, h, device=device)

    channels, tokens, found = normal(), normal(), {"normal": (normal(), normal())}
    channels[..., torch.randperm(h, device=device)[: max(1, h // 512)]] *= 30
    rows, columns = torch.randperm(s, device=device)[: max(1, s // 256)], torch.randperm(h, device=device)[:2]
    tokens[rows[:, None], :, columns] = 1000.0
    found["outlier channels"] = channels, normal()
    found["outlier tokens"] = tokens, normal() * torch.exp(1.5 * torch.randn(s, 1, 1, device=device))
    return {name: (x.bfloat16(), dout.bfloat16()) for name, (x, dout) in found.items()}


def angles(shape: Shape, device: str) -> torch.Tensor:
    """Of the rotary embedding, fp32 ``[s, 1, 1, d]``; both elements of a pair ``(i, i + d/2)`` have theirs."""
    d = shape.hidden // shape.heads
    rates = 10000.0 ** -(torch.arange(0, d, 2, device=device).float() / d)
    turned = torch.arange(shape.tokens, device=device).float()[:, None] * rates
    return torch.cat([turned, turned], -1)[:, None, None]


def plain(x: torch.Tensor, w: Tensors, freqs: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The layer in the dtype of its arguments; norms and rotations at least in fp32. x ``[s, b, h]``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    (s, b, h), n = x.shape, shape.heads

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        value = x.to(wide)
        return (value * (value.square().mean(-1, keepdim=True) + shape.eps).rsqrt() * gain.to(wide)).to(x.dtype)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        (first, second), angle = x.to(wide).chunk(2, -1), freqs.to(wide)
        return (x.to(wide) * angle.cos() + torch.cat([-second, first], -1) * angle.sin()).to(x.dtype)

    q, k, v = F.linear(norm(x, w["norm1"]), w["qkv"]).view(s, b, n, 3, h // n).unbind(3)  # of each head q, k, v
    q, k, v = (t.permute(1, 2, 0, 3) for t in (rotate(q), rotate(k), v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(o.permute(2, 0, 1, 3).reshape(s, b, h), w["proj"])
    gate, up = F.linear(norm(x, w["norm2"]), w["fc1"]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w["fc2"])


def coat(x: torch.Tensor, w: Tensors, freqs: torch.Tensor, shape: Shape, changes: dict[str, Any]) -> torch.Tensor:
    """The layer of the flow, with the defaults of the "activation" block but for ``changes``."""
    settings, one = CoatConfig.parse({"activation": changes}).activation, flow.TensorParallel()
    heads, table = flow.Heads(shape.heads, 1, shape.hidden // shape.heads), flow.rope_table(freqs)
    norm1, norm2 = (flow.Norm("rmsnorm", shape.eps, w[k]) for k in ("norm1", "norm2"))
    q, k, v = flow.norm_qkv(x, norm1, w["qkv"], None, heads, table, one, settings)
    if settings.attention == "fp8":
        out, compressed = flow.attention(q, k, v, settings)
    else:
        out, compressed = flow.sdpa(q, k, v), None
    x = x + flow.linear(out, w["proj"], one, settings, compressed)
    return x + flow.norm_mlp(x, norm2, w["fc1"], w["fc2"], "swiglu", one, settings)


def run(layer: Callable[..., torch.Tensor], x: torch.Tensor, dout: torch.Tensor, w: Tensors, *rest: Any) -> Tensors:
    """Output and gradients, by the names of x and the weights."""
    leaves = {k: t.detach().clone().requires_grad_() for k, t in {"x": x, **w}.items()}
    y = layer(leaves["x"], {k: leaves[k] for k in w}, *rest)
    y.backward(dout)
    return {"output": y.detach(), **{k: t.grad for k, t in leaves.items() if t.grad is not None}}


def errors(found: Tensors, truth: Tensors, x: torch.Tensor, dout: torch.Tensor) -> dict[str, dict[str, float]]:
    """Relative error and cosine of each tensor, and of the branches' part of the output and of x's gradient."""
    pairs = {k: (found[k].double(), t) for k, t in truth.items()}
    for name, of, less in (("branches", "output", x), ("x branches", "x", dout)):
        pairs[name] = pairs[of][0] - less.double(), truth[of] - less.double()
    rows = {}
    for name, (a, b) in pairs.items():
        if not a.isfinite().all():
            raise RuntimeError(f"{name}: not finite")
        dot = (a * b).sum() / (a.norm() * b.norm())
        rows[name] = {"relative_error": ((a - b).norm() / b.norm()).item(), "cosine": dot.item()}
    return rows


@contextmanager
def transformer_engine(folder: str, given: dict[str, Any]) -> Iterator[Callable[[str], dict[str, Tensors]]]:
    """Start `transformer_engine.py` with the packages in ``folder`` and wait for it.

    Gives a function from a case to the tensors that Transformer Engine computed, by recipe; valid inside the ``with``.

    Raises:
        RuntimeError: the program failed; the message has the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        torch.save(given, Path(temporary) / "layer.pt")
        where = Path(folder).resolve()
        environment = {**os.environ, "PYTHONPATH": python_path(where, where / "deps"), "UB_SKIPMC": "1"}
        command = [sys.executable, "-m", "benchmarks.accuracy.transformer_engine", temporary]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
        if result.returncode:
            raise RuntimeError(f"--peers: {' '.join(command)}\n{result.stdout[-2000:]}{result.stderr[-4000:]}")

        def of(case: str) -> dict[str, Tensors]:
            files = sorted(Path(temporary).glob(f"{case}--*.pt"))
            return {f.stem.partition("--")[2]: torch.load(f, map_location=given["device"]) for f in files}

        yield of


def check_same_layer(case: str, found: dict[str, dict[str, float]], plain_bf16: dict[str, dict[str, float]]) -> None:
    """Raises RuntimeError where Transformer Engine's BF16 layer differs from the truth by more than BF16 does."""
    for name, row in found.items():
        limit = max(0.01, BF16_LIMIT * plain_bf16[name]["relative_error"])
        if not row["relative_error"] <= limit:
            raise RuntimeError(
                f"--peers: Transformer Engine's BF16 layer is another function: {case}, {name}: relative error "
                f"{row['relative_error']:.3g}, accepted: at most {limit:.3g}. Are weights "
                "laid out as transformer_engine.py says?"
            )


def measure(shape: Shape, device: str, folder: str | None) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Errors by case, implementation and tensor; prints a case as soon as it is done."""
    torch.manual_seed(0)
    w, freqs, inputs = weights(shape, device), angles(shape, device), cases(shape, device)
    given = {"device": device, "shape": asdict(shape), "weights": w, "freqs": freqs, "cases": inputs}
    wide = {k: t.double() for k, t in w.items()}
    results = {}
    start: Any = transformer_engine(folder, given) if folder else nullcontext(lambda case: {})
    with start as theirs:
        for case, (x, dout) in inputs.items():
            truth = run(plain, x.double(), dout.double(), wide, freqs, shape)
            found = {"bf16": errors(run(plain, x, dout, w, freqs, shape), truth, x, dout)}
            found |= {f"TE {name}": errors(tensors, truth, x, dout) for name, tensors in theirs(case).items()}
            if folder:
                check_same_layer(case, found["TE bf16"], found["bf16"])
            for name, changes in VARIANTS.items():
                found[name] = errors(run(coat, x, dout, w, freqs, shape, changes), truth, x, dout)
            show(case, found)
            results[case] = found
    return results


def outside(results: dict[str, Any]) -> list[str]:
    """What of the default is outside of :data:`BOUNDS`, a line each."""
    lines = []
    for case, found in results.items():
        for tensor, row in found[DEFAULT].items():
            kind = "stream" if tensor in ("output", "x") else "norm" if tensor.startswith("norm") else "branch"
            error, cosine = BOUNDS[kind]
            if row["relative_error"] > error or row["cosine"] < cosine:
                lines.append(
                    f"{case}, {tensor}: relative error {row['relative_error']:.4f}, cosine {row['cosine']:.5f}"
                )
    return lines


def show(case: str, found: dict[str, dict[str, dict[str, float]]]) -> None:
    """A table of relative errors in percent, one of 1 - cosine, and the largest ratio to each of
    :data:`PEERS`."""
    tensors = list(found["bf16"])
    print(f"== {case}\n{'relative error, %':<26}" + "".join(f"{t:>11}" for t in tensors))
    for name, rows in found.items():
        line = f"{name:<26}" + "".join(f"{100 * rows[t]['relative_error']:11.3f}" for t in tensors)
        for peer in PEERS:
            if peer in found and name in VARIANTS:
                ratio, worst = max((rows[t]["relative_error"] / found[peer][t]["relative_error"], t) for t in tensors)
                line += f"   at most {ratio:.3f} x {peer} ({worst})"
        print(line)
    print(f"{'1 - cosine, 1e-6':<26}" + "".join(f"{t:>11}" for t in tensors))
    for name, rows in found.items():
        print(f"{name:<26}" + "".join(f"{1e6 * (1 - rows[t]['cosine']):11.1f}" for t in tensors), flush=True)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--tokens", type=positive_int, default=None, help="of a sequence (default: 2048, with --tiny 96)"
    )
    parser.add_argument("--tiny", action="store_true", help="a layer of 0.2 M parameters instead of Llama-2-7B's")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--peers", help="folder with Transformer Engine (GPU only)")
    parser.add_argument("--name", default="layer", help="of the JSON result")
    arguments = parser.parse_args(given)
    if arguments.peers and arguments.device == "cpu":
        parser.error("--peers: Transformer Engine needs --device cuda")
    return arguments


def main() -> None:
    arguments = parse()
    with one_line():
        if arguments.peers is not None:
            check_peers(arguments.peers)
        check_device(arguments.device)
    shape = TINY if arguments.tiny else Shape()
    if arguments.tokens:
        shape = Shape(**{**asdict(shape), "tokens": arguments.tokens})
    results = measure(shape, arguments.device, arguments.peers)
    wrong = outside(results)
    print(f"{DEFAULT}: " + ("within" if not wrong else "OUTSIDE") + f" the bounds {BOUNDS}", *wrong, sep="\n  ")
    data = {"shape": asdict(shape), "variants": VARIANTS, "bounds": BOUNDS, "outside": wrong, "errors": results}
    name = f"accuracy/{arguments.name}" + "-tiny" * arguments.tiny  # does not replace the measured result
    print("wrote", write_result(name, data, arguments.output))


if __name__ == "__main__":
    main()
