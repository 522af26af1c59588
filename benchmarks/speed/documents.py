"""Attention within each of several documents of a sequence, against causal attention over the same tokens: every way.

python -m benchmarks.speed.documents [--tokens 16384] [--heads 32] [--groups 32 8] [--size 128] [--output DIR]

Ways: ``flow`` is what patched and built models run (``coat_dist.flow.sdpa``), ``flow, fp8`` keeps FP8. The others are
what PyTorch has: its wrapper of flash attention, cuDNN with cumulative lengths, and the documents padded to the longest
as a batch. Each is compared with one SDPA a document before it is timed. ``host_ms`` is the host's time for forward and
backward of a call whose plans and kernels exist: a way that makes a plan in every call shows there.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.arguments import positive_int
from benchmarks.common import argument_parser, options, write_result
from benchmarks.timing import median, timed, wall_ms
from coat_dist.config import ActivationConfig
from coat_dist.flow import Documents, attention, sdpa

DEVICE = "cuda"
FP8 = ActivationConfig(attention="fp8")
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def lengths(kind: str, tokens: int) -> list[int]:
    """Tokens of documents that fill ``tokens``: "one", "4 equal", ..., or "mixed", log-normal with a median of 400."""
    if kind == "one":
        return [tokens]
    if kind != "mixed":
        count = int(kind.split()[0])
        return [tokens // count] * count
    generator = torch.Generator().manual_seed(1)
    found: list[int] = []
    while sum(found) < tokens:
        drawn = torch.randn((), generator=generator).mul(1.2).add(6.0).exp().ceil()
        found.append(min(int(drawn), tokens - sum(found)))
    return found


def documents_of(given: Sequence[int]) -> Documents:
    starts = torch.tensor([0, *itertools.accumulate(given)], dtype=torch.int32, device=DEVICE)
    return Documents(starts, 1 << (max(given) - 1).bit_length(), tuple(given))


def each_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> torch.Tensor:
    """One SDPA a document, the definition."""
    parts = [slice(a, b) for a, b in itertools.pairwise(documents.bounds)]
    return torch.cat([sdpa(*(t[part] for t in (q, k, v))) for part in parts])


def wrapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> torch.Tensor:
    """``torch.nn.attention.varlen``, causal. Grouped queries are an argument of newer versions."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = documents.cu_seqlens, documents.max_seqlen
    more: dict[str, Any] = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    arguments: list[Any] = [*(t.squeeze(1) for t in (q, k, v)), starts, starts, longest, longest]
    out: Any = varlen_attn(*arguments, window_size=(-1, 0), **more)
    return out.flatten(1).unsqueeze(1)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> torch.Tensor:
    """cuDNN with cumulative lengths, by PyTorch's operator."""
    starts, longest = documents.cu_seqlens, documents.max_seqlen
    out = torch.ops.aten._cudnn_attention_forward(
        *(t.squeeze(1) for t in (q, k, v)), None, starts, starts, longest, longest, True, 0.0, True, False
    )[0]
    return out.flatten(1).unsqueeze(1)


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> torch.Tensor:
    """A batch of documents, padded to the longest at their ends, where a causal query does not look."""
    ends = documents.bounds
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    place = torch.arange(max(sizes), device=q.device)[:, None] + torch.tensor(ends[:-1], device=q.device)
    inside = torch.arange(max(sizes), device=q.device)[:, None] < torch.tensor(sizes, device=q.device)
    batch = (t.squeeze(1)[place.clamp(max=q.shape[0] - 1)] for t in (q, k, v))
    out = sdpa(*batch)
    return out.transpose(0, 1)[inside.T].unsqueeze(1)


def ways(documents: Documents, most_padding: int) -> dict[str, Way]:
    """By name. Padding to more than ``most_padding`` tokens is left out."""
    found: dict[str, Way] = {
        "causal over all": lambda q, k, v: sdpa(q, k, v),
        "flow": lambda q, k, v: sdpa(q, k, v, documents=documents),
        "causal over all, fp8": lambda q, k, v: attention(q, k, v, FP8)[0],
        "flow, fp8": lambda q, k, v: attention(q, k, v, FP8, documents=documents)[0],
        "torch varlen_attn": lambda q, k, v: wrapped(q, k, v, documents),
        "cudnn, cumulative lengths": lambda q, k, v: cudnn(q, k, v, documents),
    }
    ends = documents.bounds
    longest = max(b - a for a, b in itertools.pairwise(ends))
    if documents.count * longest <= most_padding:
        found["padded"] = lambda q, k, v: padded(q, k, v, documents)
    return found


def measure(name: str, way: Way, inputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Times of a way, and its relative error against ``wanted``, output and gradients; or why it does not run."""
    dout = torch.ones_like(wanted[0])

    def step() -> tuple[torch.Tensor, ...]:
        out = way(*inputs)
        return out, *torch.autograd.grad(out, list(inputs), dout)

    try:
        first = wall_ms(step, synchronize=True)
        got = step()
        with torch.no_grad():
            forward = timed(lambda: way(*inputs), 10)
        both = timed(step, 10)
        host = []
        for _ in range(5):
            torch.cuda.synchronize()
            host.append(wall_ms(step, synchronize=False))
    except Exception as problem:
        return {"way": name, "problem": f"{type(problem).__name__}: {problem}".splitlines()[0][:300]}
    row: dict[str, Any] = {"way": name, "forward_ms": forward, "ms": both, "host_ms": median(host), "first_ms": first}
    if not name.startswith("causal"):
        errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, wanted, strict=True)]
        row |= dict(zip(("error_out", "error_dq", "error_dk", "error_dv"), errors, strict=True))
    return row


def one(kind: str, tokens: int, heads: int, groups: int, size: int) -> dict[str, Any]:
    """All ways for documents of one kind."""
    given = lengths(kind, tokens)
    documents = documents_of(given)
    shapes = (heads, groups, groups)
    inputs = [torch.randn(tokens, 1, n, size, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for n in shapes]
    q, k, v = inputs
    alone = each_alone(q, k, v, documents)
    wanted = alone.detach(), *torch.autograd.grad(alone, inputs, torch.ones_like(alone))
    print(f"{kind}: {len(given)} documents, the longest {max(given)}; {heads} heads, {groups} groups", flush=True)
    rows = [measure(name, way, inputs, wanted) for name, way in ways(documents, 4 * tokens).items()]
    base = next((r for r in rows if r["way"] == "causal over all"), {})
    for row in rows:
        if "ms" in row and "ms" in base:
            row["forward_of_causal"], row["of_causal"] = row["forward_ms"] / base["forward_ms"], row["ms"] / base["ms"]
        print("  " + "  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
    shape = {"documents": len(given), "longest": max(given), "heads": heads, "groups": groups}
    return {"kind": kind, **shape, "ways": rows}


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=positive_int, default=16384)
    parser.add_argument("--heads", type=positive_int, default=32)
    parser.add_argument("--groups", nargs="+", type=positive_int, default=[32, 8])
    parser.add_argument("--size", type=positive_int, default=128, help="elements of a head")
    parser.add_argument("--kinds", nargs="+", default=["one", "4 equal", "32 equal", "mixed"])
    return parser.parse_args(given)


def main() -> None:
    a = parse()
    results = [one(kind, a.tokens, a.heads, groups, a.size) for groups in a.groups for kind in a.kinds]
    found = {"settings": options(a), "torch_cudnn": torch.backends.cudnn.version(), "results": results}
    # Some ways have gradients that are NaN, and that is what was found.
    print("wrote", write_result("speed/documents", found, a.output, nan=True))


if __name__ == "__main__":
    main()
