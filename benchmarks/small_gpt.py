"""A small real training run for studies of optimizers: a Llama-shaped GPT on Python sources found on the machine.

Weights, gradients and their sums are fp32; with ``autocast`` matrix products and attention take bf16 inputs. Weights
and batches depend on the seed only, so two runs that differ in their optimizer start from the same weights and see the
same batches in the same order.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import prepare_text
from coat_dist import param_groups

__all__ = [
    "BETAS",
    "BYTES_VOCABULARY",
    "GPT",
    "WEIGHT_DECAY",
    "Shape",
    "fp32_adamw",
    "held_out_loss",
    "prepare_bytes",
    "prepare_tokens",
    "train",
]

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
HELD_OUT = 1 / 32
"""Share of the tokens, the last ones, that training never sees."""
BYTES_VOCABULARY = 264
"""256 bytes and the end of a document, rounded up to a multiple of 8."""


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
        q, k = (_rotate(x, cos, sin).to(v.dtype) for x in (q, k))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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
    return _prepare(Path(folder) / "bpe", ["stdlib"], f"bpe:{vocabulary}", "8M")


def prepare_bytes(folder: str | Path, max_bytes: int) -> torch.Tensor:
    """Bytes of Python's standard library, then of the packages installed beside torch, each folder's files in the order
    of a hash of their paths, at most ``max_bytes`` together: int64 [tokens], ids below BYTES_VOCABULARY.

    Raises:
        subprocess.CalledProcessError: the preparation failed; it has printed why.
    """
    inputs = ["stdlib", str(Path(torch.__file__).parents[1])]
    return _prepare(Path(folder) / "bytes", inputs, "bytes", str(max_bytes))


def _prepare(prefix: Path, inputs: list[str], tokenizer: str, max_bytes: str) -> torch.Tensor:
    prepare_text(prefix, tokenizer, inputs, "--glob", "*.py", "--max-bytes", max_bytes)
    return torch.from_numpy(np.fromfile(f"{prefix}.bin", dtype=np.uint16).astype(np.int64))


def fp32_adamw(model: nn.Module, beta2: float = BETAS[1]) -> torch.optim.AdamW:
    """torch's AdamW with the weight decay of the studies, fused on a GPU: what others are compared with."""
    groups = [{k: g[k] for k in ("params", "weight_decay")} for g in param_groups(model, WEIGHT_DECAY)]
    return torch.optim.AdamW(groups, betas=(BETAS[0], beta2), fused=next(model.parameters()).is_cuda)


def _losses(model: nn.Module, window: torch.Tensor, autocast: bool) -> torch.Tensor:
    """Cross-entropy in nats of each next token, fp32 [batch * sequence]; window [batch, sequence + 1]."""
    with torch.autocast(window.device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
        logits = model(window[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def held_out_loss(
    model: nn.Module, tokens: torch.Tensor, shape: Shape, windows: int = 192, autocast: bool = False
) -> float:
    """Mean loss in nats a token over ``windows`` windows spread evenly over the held-out tokens, summed in fp64."""
    held_out = tokens[-int(len(tokens) * HELD_OUT) :]
    starts = torch.linspace(0, len(held_out) - shape.sequence - 1, windows, dtype=torch.float64).long()
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for batch in starts.to(tokens.device).split(shape.batch):
        total += _losses(model, _windows(held_out, batch, shape), autocast).double().sum()
    return total.item() / (windows * shape.sequence)


def _windows(tokens: torch.Tensor, starts: torch.Tensor, shape: Shape) -> torch.Tensor:
    return tokens[starts[:, None] + torch.arange(shape.sequence + 1, device=tokens.device)]


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
    windows: int = 192,
    autocast: bool = False,
) -> dict[str, Any]:
    """Train for ``steps`` steps: warm-up over a tenth of them, cosine decay to a tenth of ``lr``, gradients clipped to
    a norm of 1.

    Args:
        tokens: int64 [tokens], on the model's device.
        after_step: called with the number of steps done.
        evaluate_at: steps after which the held-out loss is taken, over ``windows`` windows.

    Returns:
        ``loss`` (of every step's batch), ``held_out`` ({step: loss}) and ``seconds``.
    """
    generator = torch.Generator().manual_seed(seed)
    seen = len(tokens) - int(len(tokens) * HELD_OUT)
    starts = torch.randint(seen - shape.sequence - 1, (steps, shape.batch), generator=generator).to(tokens.device)
    losses: list[torch.Tensor] = []
    held_out: dict[int, float] = {}
    evaluate_at = set(evaluate_at)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        warm = min(1.0, step / max(1, steps // 10))
        rate = lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = _losses(model, _windows(tokens, starts[step - 1], shape), autocast).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        after_step(step)
        if step in evaluate_at:
            held_out[step] = held_out_loss(model, tokens, shape, windows, autocast)
    return {
        "loss": torch.stack(losses).tolist(),
        "held_out": held_out,
        "seconds": round(time.perf_counter() - started, 1),
    }
