"""Documents that share a sequence without looking at one another: from lengths to what
Megatron's model takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams


def pack_lengths(lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedSeqParams:
    """``packed_seq_params`` of a sequence ``[1, T]`` that holds documents of these lengths, in this
    order.

    Padding is a document of its own, the last. ``max_seqlen`` is rounded up to a power of two, as
    it may be: Megatron makes its angles for that many positions, and keeps them for each number
    that it sees.

    Args:
        lengths: tokens of each document; their sum is T.
        device: of the tokens.
    """
    return packed_documents(
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device
    )


def packed_documents(
    cu_seqlens: torch.Tensor, device: torch.device | str = "cpu"
) -> PackedSeqParams:
    """:func:`pack_lengths` of what a data loader hands on.

    Args:
        cu_seqlens: int32 ``[documents + 1]`` on the CPU: where each document begins, and the end of
            the last.
    """
    lengths = tuple(cu_seqlens.diff().tolist())
    if torch.device(device).type == "cuda" and not cu_seqlens.is_pinned():
        cu_seqlens = cu_seqlens.pin_memory()  # a copy from other memory would wait for the GPU
    starts, longest = cu_seqlens.to(device, non_blocking=True), 1 << (max(lengths) - 1).bit_length()
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    params.lengths = lengths  # on the host, for checks that need not wait for the GPU
    return params


def document_lengths(tokens: torch.Tensor, eod: int) -> list[int]:
    """Tokens of each document in ``tokens`` ``[b, s]``, row after row: one ends with every
    ``eod`` and every row.
    """
    ends = tokens == eod
    ends[:, -1] = True
    last = ends.flatten().nonzero().flatten()
    return last.diff(prepend=last.new_tensor([-1])).tolist()


def separate_documents(batch: dict[str, torch.Tensor], eod: int) -> dict[str, Any]:
    """A micro-batch as one sequence ``[1, b * s]`` of documents, which end with ``eod``; to be done
    on the CPU.

    Positions begin again with every document. What follows an ``eod`` belongs to another document:
    predicting it is taken out of the loss.

    Args:
        batch: ``tokens``, ``labels``, ``position_ids`` and ``loss_mask``, each ``[b, s]``. They
            become ``[1, b * s]``, and ``cu_seqlens`` joins them, for :func:`packed_documents`.
    """
    lengths = document_lengths(batch["tokens"], eod)
    flat = {name: t.reshape(1, -1) for name, t in batch.items()}
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    count = torch.tensor(lengths)
    positions = torch.arange(int(starts[-1])) - starts[:-1].long().repeat_interleave(count)
    return flat | {
        "position_ids": positions[None],
        "loss_mask": flat["loss_mask"].masked_fill(flat["tokens"] == eod, 0.0),
        "cu_seqlens": starts,
    }
