"""Several documents in one sequence: Megatron's ``PackedSeqParams`` as self-attention here takes
them.

Megatron's own way (``qkv_format="thd"``) rotates queries and keys document by document, with
lengths that it fetches from the GPU in every layer. Here a sequence stays ``[T, 1, ...]``; angles
are gathered by position once for all layers; and core attention gets a :class:`Packed`, which
Megatron's ``Attention.forward``, asking for "thd", passes by.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from coat_dist import flow
from coat_dist.flow.function import version_of


class Packed:
    """The documents of one batch and what its layers share. Stands where Megatron has its
    ``PackedSeqParams``.
    """

    qkv_format = "documents"

    def __init__(self, params: PackedSeqParams, tokens: int) -> None:
        self.tokens = tokens
        self.documents = _documents(params, tokens)
        self._made_of = _contents(params)
        self._positions: torch.Tensor | None = None
        self._angles: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def fits(self, params: PackedSeqParams, tokens: int) -> bool:
        """Whether it was made of these, and they are unchanged."""
        pairs = zip(self._made_of, _contents(params), strict=False)
        same = all(a is b if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
        return same and tokens == self.tokens

    def angles(self, freqs: Any) -> Any:
        """``[max_seqlen, 1, 1, rot]``, by position in a document, or a pair of these → ``[T, 1,
        1, rot]``, by token.
        """
        if freqs is None:
            return None
        if isinstance(freqs, tuple):
            return tuple(self.angles(f) for f in freqs)
        # Not by the object: recomputation hands each layer a new one of the same memory, which is
        # kept here meanwhile.
        key = freqs.data_ptr(), freqs.shape, freqs.stride(), freqs.dtype, version_of(freqs)
        if key not in self._angles:
            with torch.inference_mode(False), torch.no_grad():  # training may come after evaluation
                if self._positions is None:
                    self._positions = self.documents.positions(self.tokens)
                self._angles[key] = freqs, freqs.index_select(0, self._positions)
        return self._angles[key][1]


def packed(params: PackedSeqParams, tokens: int, batch: int) -> Packed:
    """``params``, checked, for a sequence of ``tokens``; made once and kept on ``params``.

    Values on a GPU are not looked at, as that would wait for it, unless ``params.lengths`` (of
    ``launch.data.packed``) has them on the host.

    Raises:
        ValueError: names the field, what was given and what is accepted.
    """
    if not isinstance(params, PackedSeqParams):
        accepted = 'None or Megatron\'s PackedSeqParams (also with activation.attention "fp8")'
        raise ValueError(f"packed_seq_params: got {type(params).__name__}, accepted: {accepted}")
    if batch != 1:
        raise ValueError(
            f"packed_seq_params: got {batch} sequences of {tokens} tokens, accepted: tokens [1, T]"
        )
    found = vars(params).get("coat_packed")
    if found is None or not found.fits(params, tokens):
        found = params.coat_packed = Packed(params, tokens)
    return found


def _contents(params: PackedSeqParams) -> tuple[Any, ...]:
    """What documents are made of; a tensor also by its count of changes in place, where it has
    one.
    """
    starts = params.cu_seqlens_q, params.cu_seqlens_kv
    versions = [version_of(t) for t in starts if isinstance(t, torch.Tensor)]
    return *starts, params.max_seqlen_q, params.max_seqlen_kv, params.qkv_format, *versions


def _documents(params: PackedSeqParams, tokens: int) -> flow.Documents:
    def require(name: str, good: bool, accepted: str) -> None:
        if not good:
            given = getattr(params, name)
            shown = (
                f"a tensor {list(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
            )
            raise ValueError(f"packed_seq_params.{name}: got {shown}, accepted: {accepted}")

    require("qkv_format", params.qkv_format == "thd", '"thd"')
    for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        require(
            name, getattr(params, name, None) is None, "None (padding as a document of its own)"
        )
    starts, others = params.cu_seqlens_q, params.cu_seqlens_kv
    on_host = starts.device.type == others.device.type == "cpu"
    same = starts is others or (
        starts.shape == others.shape and (not on_host or torch.equal(starts, others))
    )
    require("cu_seqlens_kv", same, "cu_seqlens_q: self-attention has one set of documents")
    documents = flow.Documents(
        starts.clone()
        if starts.is_inference() and not torch.is_inference_mode_enabled()
        else starts,
        max(params.max_seqlen_q, params.max_seqlen_kv),
        None if starts.device.type == "cpu" else getattr(params, "lengths", None),
    )
    try:
        documents.check(tokens)
    except ValueError as problem:
        raise ValueError(f"packed_seq_params.{problem}") from None
    return documents
