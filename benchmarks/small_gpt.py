"""A small real training run for studies on a CPU: a Llama-shaped GPT on the running Python's standard library.

Everything is fp32 and depends on the seed only, so two runs that differ in their optimizer start from the same weights
and see the same batches in the same order.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["GPT", "Shape", "held_out_loss", "prepare_tokens", "train"]

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = 1 / 32
"""Share of the tokens, the last ones, that training never sees."""


@dataclass(frozen=True)
class Shape:
    """The model and a batch."""

    vocabulary: int = 2048
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    ffn: int = 512
    sequence: int = 128
    batch: int = 8


class Block(nn.Module):
    """Pre-norm attention with rotary positions, then SwiGLU; linear layers without biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, f = shape.hidden, shape.ffn
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(h, eps=1e-5), nn.RMSNorm(h, eps=1e-5)
        self.qkv, self.proj = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        self.fc1, self.fc2 = nn.Linear(h, 2 * f, bias=False), nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + self.proj(o.transpose(1, 2).reshape(b, s, h))
        gate, up = self.fc1(self.norm2(x)).chunk(2, -1)
        return x + self.fc2(F.silu(gate) * up)


class GPT(nn.Module):
    """Token ids [batch, sequence] to logits [batch, sequence, vocabulary], fp32; embeddings are not tied.

    Matrices start from a normal distribution of deviation 0.02, those that write into the residual stream from one
    smaller by the root of twice the number of layers (GPT-2).
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("proj.weight", "fc2.weight"))
                p.data.normal_(0, 0.02 / (math.sqrt(2 * shape.layers) if residual else 1.0), generator=generator)
        channels = shape.hidden // shape.heads
        angle = torch.outer(torch.arange(shape.sequence), 10000.0 ** -(torch.arange(0, channels, 2) / channels))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def prepare_tokens(folder: str | Path, vocabulary: int) -> torch.Tensor:
    """Token ids of the standard library, int64 [tokens], by ``launch.prepare_data`` with a BPE of ``vocabulary``.

    Raises:
        subprocess.CalledProcessError: the preparation failed; it has printed why.
    """
    prefix = Path(folder) / f"stdlib-{vocabulary}"
    command = [sys.executable, "-m", "launch.prepare_data", "--input", "stdlib", "--tokenizer", f"bpe:{vocabulary}"]
    command += ["--max-bytes", "8M", "--output", str(prefix), "--quiet"]
    subprocess.run(command, check=True, cwd=ROOT)
    return torch.from_numpy(np.fromfile(f"{prefix}.bin", dtype=np.uint16).astype(np.int64))


def _loss(model: nn.Module, window: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of the next token; window [batch, sequence + 1]."""
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, tokens: torch.Tensor, shape: Shape, windows: int = 192) -> float:
    """Mean loss in nats a token over ``windows`` windows spread evenly over the held-out tokens."""
    held_out = tokens[-int(len(tokens) * HELD_OUT) :]
    starts = torch.linspace(0, len(held_out) - shape.sequence - 1, windows).long()
    batches = (starts[:, None] + torch.arange(shape.sequence + 1)).split(16)
    return math.fsum(_loss(model, held_out[b]).item() * len(b) for b in batches) / windows


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    shape: Shape,
    *,
    steps: int,
    seed: int,
    lr: float,
    after_step: Callable[[int], Any] = lambda step: None,
    evaluate_at: Iterable[int] = (),
) -> dict[str, Any]:
    """Train for ``steps`` steps: warm-up over a tenth of them, cosine decay to a tenth of ``lr``, gradients clipped to
    a norm of 1.

    Args:
        after_step: called with the number of steps done.
        evaluate_at: steps after which the held-out loss is taken.

    Returns:
        ``loss`` (of every step's batch), ``held_out`` ({step: loss}) and ``seconds``.
    """
    generator = torch.Generator().manual_seed(seed)
    seen = len(tokens) - int(len(tokens) * HELD_OUT)
    losses: list[float] = []
    held_out: dict[int, float] = {}
    evaluate_at = set(evaluate_at)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        warm = min(1.0, step / max(1, steps // 10))
        rate = lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(seen - shape.sequence - 1, (shape.batch,), generator=generator)
        loss = _loss(model, tokens[starts[:, None] + torch.arange(shape.sequence + 1)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        after_step(step)
        if step in evaluate_at:
            held_out[step] = held_out_loss(model, tokens, shape)
    return {"loss": losses, "held_out": held_out, "seconds": round(time.perf_counter() - started, 1)}
