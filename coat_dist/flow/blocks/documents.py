"""Several documents in one sequence: where each begins, and attention that stays within each.

A sequence of T tokens holds n documents one after the other. ``cu_seqlens`` (``[n + 1]``, from 0 to
T) has the places where they begin, the format that flash attention and Megatron's
``PackedSeqParams`` share. A query sees the keys of its own document alone. Tokens that no document
needs, padding at the end, are a document of their own.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one sequence. One object serves all layers; its tensor must not change
    meanwhile.

    Only :attr:`bounds` waits for a GPU, and only where ``lengths`` are not given and ``cu_seqlens``
    is on the GPU.
    """

    cu_seqlens: torch.Tensor
    """int32 ``[documents + 1]`` on the device of the tokens: 0, the sums of the lengths, the
    number of all tokens.
    """
    max_seqlen: int
    """Tokens of the longest document, or more: kernels need a bound."""
    lengths: tuple[int, ...] | None = None
    """Tokens of each document, where the host knows them."""

    @property
    def count(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def check(self, tokens: int) -> None:
        """Raises ValueError for what does not fit a sequence of ``tokens``; values only where
        the host knows them.
        """
        if self.__dict__.get("_fits") == tokens:
            return
        cu = self.cu_seqlens
        if cu.dim() != 1 or cu.shape[0] < 2 or cu.dtype != torch.int32:
            accepted = "torch.int32 [documents + 1], at least one document"
            raise ValueError(f"cu_seqlens: got {cu.dtype} {list(cu.shape)}, accepted: {accepted}")
        longest = 1
        if self.lengths is not None or cu.device.type == "cpu":
            ends = self.bounds
            lengths = [b - a for a, b in itertools.pairwise(ends)]
            if ends[0] != 0 or min(lengths) < 0 or ends[-1] != tokens or len(lengths) != self.count:
                raise ValueError(
                    f"cu_seqlens: got {ends}, accepted: from 0 up to the number of tokens, {tokens}"
                )
            longest = max(lengths)
        if not isinstance(self.max_seqlen, int) or self.max_seqlen < longest:
            raise ValueError(
                f"max_seqlen: got {self.max_seqlen!r}, accepted: an int, {longest} or more, the "
                "tokens of the longest document"
            )
        self.__dict__["_fits"] = tokens

    @functools.cached_property
    def bounds(self) -> list[int]:
        """:attr:`cu_seqlens` on the host. Waits for the GPU where it is there and
        :attr:`lengths` are not given.
        """
        if self.lengths is None:
            return self.cu_seqlens.tolist()
        return [0, *itertools.accumulate(self.lengths)]

    def positions(self, tokens: int) -> torch.Tensor:
        """The place of every token in its document, int64 ``[tokens]``, without waiting for the
        device.
        """
        at = torch.arange(tokens, device=self.cu_seqlens.device)
        begins = self.cu_seqlens.long()
        return at - begins[torch.searchsorted(begins, at, right=True) - 1]


def why_no_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why :func:`flash_documents` cannot take these tensors (``[..., d]``), or None."""
    if q.device.type != "cuda" or not _has_flash(q.device):
        return "no GPU that PyTorch has flash attention for"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(q.dtype).removeprefix('torch.')} tensors"
    if q.shape[-1] % 8 or q.shape[-1] > _largest_head(q.device) or v.shape[-1] != q.shape[-1]:
        return f"heads of {q.shape[-1]} elements"
    return None if torch.backends.cuda.flash_sdp_enabled() else "flash attention is switched off"


@functools.cache
def _has_flash(device: torch.device) -> bool:
    # 8.0: what PyTorch's flash attention 2 is compiled for. ROCm has other kernels behind the same
    # name: not tried.
    built = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _largest_head(device: torch.device) -> int:
    # Backward of larger ones needs the shared memory of these.
    return 256 if torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0)) else 192


def flash_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    *,
    causal: bool,
    scale: float | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention within each document by PyTorch's flash attention, which reads the bounds on the
    device.

    Called as PyTorch's own operator: ``torch.nn.attention.varlen`` wraps the same one in Python,
    with arguments that differ between torch 2.11 and 2.13. cuDNN is faster on Hopper without
    documents, but its form with cumulative lengths is switched off in that wrapper, and a version
    of PyTorch's ``MHA.cpp`` that was read keeps no execution plans for it: every call makes one.
    ``benchmarks/speed/documents.py`` of commit 8e70c61 measured all of them.

    Args:
        q: ``[T, heads, d]``, k and v: ``[T, groups, d]``.

    Returns:
        ``[T, heads, d]``. For backward autograd keeps q, k, v, this, and 4 bytes a token and head.
    """
    starts, longest = documents.cu_seqlens, documents.max_seqlen
    return torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, dropout, causal, False, scale=scale
    )[0]
