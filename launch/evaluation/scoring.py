"""Negative log-likelihoods of rows, spread over data-parallel ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from coat_dist import CoatConfigError
from coat_dist.ranks import attempt, gather, rank_and_world
from launch.evaluation.rows import Row, batches
from launch.log_level import shows

__all__ = ["score", "score_batch", "token_losses"]

Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``losses(tokens, labels)``: int64 ``[b, s]`` twice, on the CPU, to fp32 ``[b, s]``, nats."""


def token_losses(model: Any, device: torch.device, vocab_size: int | None = None) -> Losses:
    """Per-token losses of a model that :func:`launch.model.gpt.build_model` built, patched or not.

    Ranks of one tensor-parallel group call it together.

    Args:
        vocab_size: the softmax is over this many ids, without the rows that pad the embedding: what transformers
            computes of the model. None = over the padding too, as ``pretrain.py`` trains and evaluates; a model that
            was patched with ``loss: "chunked"`` then computes its losses itself.
    """
    from megatron.core import parallel_state

    from coat_dist.flow import TensorParallel, vocab_parallel_cross_entropy
    from megatron_patches.layers.loss import ChunkedLossGPTModel

    group, rank = TensorParallel(), parallel_state.get_tensor_model_parallel_rank()
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        group = TensorParallel(parallel_state.get_tensor_model_parallel_group())

    @torch.no_grad()
    def losses(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens, labels = tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        if vocab_size is None and isinstance(model, ChunkedLossGPTModel):
            return model(tokens, positions, None, labels=labels)
        logits = model(tokens, positions, None)
        if vocab_size is not None:
            columns = logits.shape[-1]
            logits[..., min(max(vocab_size - rank * columns, 0), columns) :] = -torch.inf
        # A row at a time: the loss makes fp32 copies of what it gets.
        rows = [vocab_parallel_cross_entropy(logits[i : i + 1], labels[i : i + 1], group) for i in range(len(tokens))]
        return torch.cat(rows)

    return losses


def score_batch(losses: Losses, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Losses of the scored tokens of each row, fp64 ``[scored]`` on the CPU.

    Rows are padded on the right with their last token, which no causal layer lets the others see.
    """
    longest = max(len(row.ids) for row in rows)
    padded = torch.from_numpy(
        np.stack([np.pad(np.asarray(r.ids, np.int64), (0, longest - len(r.ids)), "edge") for r in rows])
    )
    values = losses(padded[:, :-1].contiguous(), padded[:, 1:].contiguous()).double().cpu()
    return [v[len(row.ids) - 1 - row.scored : len(row.ids) - 1] for v, row in zip(values, rows, strict=True)]


def score(losses: Losses, rows: Sequence[Row], batch_size: int, what: str, tp: int = 1) -> list[float]:
    """Sum of the losses of each row's scored tokens, in nats; collective.

    Batches are dealt out to the data-parallel ranks. Each row's sum is taken in fp64 by the rank that has it, and all
    ranks get all of them, in order: nothing depends on the number of ranks.

    Raises:
        CoatConfigError: out of memory; says what to make smaller.
        ValueError: on every rank, what one rank raised.
    """
    rank, world = rank_and_world()
    mine = batches(rows, batch_size)[rank // tp :: world // tp]

    def work() -> dict[int, float]:
        sums: dict[int, float] = {}
        silent = rank or os.environ.get("RANK", "0") != "0" or not shows("info")
        hidden = True if silent else None  # None: shown on a terminal
        for batch in tqdm(mine, desc=what, unit="batch", disable=hidden, dynamic_ncols=True, leave=False):
            scored = score_batch(losses, [rows[i] for i in batch])
            sums |= {i: float(one.sum()) for i, one in zip(batch, scored, strict=True)}
        return sums

    found: dict[int, float] = {}
    for part in _everyone(work, batch_size, tp):
        found |= part
    return [found[i] for i in range(len(rows))]


def _everyone(work: Callable[[], dict[int, float]], batch_size: int, tp: int) -> list[dict[int, float]]:
    """What each rank's ``work`` gives. With tensor parallelism ranks wait for each other inside it."""

    def in_memory() -> dict[int, float]:
        try:
            return work()
        except torch.OutOfMemoryError as problem:
            raise CoatConfigError(
                f"--batch-size: got {batch_size}, accepted: a smaller one (or a smaller --window), the GPU's memory "
                f"was not enough: {str(problem).splitlines()[0]}"
            ) from None

    if tp > 1:
        return gather(in_memory())
    parts, errors = attempt(in_memory)
    if errors:
        raise CoatConfigError(next(iter(errors.values())))
    return [part for part in parts if part is not None]
