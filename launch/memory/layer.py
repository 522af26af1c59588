"""What one transformer layer keeps for backward, and what else it holds at the worst moments of its
backward.

Patched layers follow the flow's own functions (docs/flow.md, "What is saved";
`benchmarks/speed/layer_memory.py` has all of its moments, to 0.2 % of an allocator's peak). BF16
layers follow what torch's and Megatron's operations save (`benchmarks/speed/saved_bytes.py`). All
bytes are of one rank, tokens those of the whole sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from coat_dist.config import ActivationConfig
from coat_dist.reference.activation import ACTIVATIONS

from .run import Parameter, Run

_FC2 = ("mlp.linear_fc2", "mlp.down", "mlp.experts.down")  # Megatron's name, and transformers'


class Moment(NamedTuple):
    """One of the largest moments of a layer's backward."""

    name: str
    complete: tuple[str, ...]  # parameters whose gradients are complete before it
    # What the running function holds: weights' gradients that it has made, and all else, less what
    # it has released of what the layer saved.
    bytes: int


def widths(run: Run) -> tuple[int, int, int, int, int]:
    """Widths on one rank: of the residual stream, of queries, of queries, keys and values, of the
    activation's output, of fc1's output.
    """
    m = run.model
    q, kv = (heads * m.head_channels // run.tp for heads in (m.num_attention_heads, m.kv_heads))
    f = m.ffn_hidden_size // run.tp
    return m.hidden_size, q, q + 2 * kv, f, ACTIVATIONS[m.activation].parts * f


def saved(run: Run, patched: bool) -> tuple[float, float, float]:
    """Bytes a token that one layer keeps between forward and backward, as its recompute settings
    say (not "full"): of norm and qkv, of attention, of norm and MLP.
    """
    model, modules = run.model, run.recompute.get("recompute_modules", ())
    h, q, w, f, wide = widths(run)
    kv, heads = (w - q) // 2, model.num_attention_heads // run.tp
    statistics = 8 if model.normalization == "layernorm" else 4
    stream = 2 * h / run.shared
    attention: float = 2 * (q + w)  # q, k, v and the output
    if patched:
        assert run.flow is not None
        # A norm after a block saves the block's output in BF16, one before it codes and rstd.
        after = (2 * h + statistics) / run.shared if model.norm_placement == "post" else 0
        row = 4 if run.flow.forward_scales == "row" and run.shared == 1 else 0
        norm = after + (h + row if after else grouped(h, run.flow) + 4) / run.shared
        mlp = stream + after if "mlp" in modules else norm + grouped(wide, run.flow)
        if run.flow.attention == "fp8" and "core_attn" not in modules:
            attention = grouped(q + w, run.flow)
    else:
        norm = 2 * stream + statistics / run.shared  # its input and output
        # fc1's output and the product; of a gated MLP also the two parts' functions (Megatron adds
        # an offset of 0 to the second).
        inner = 2 * wide + (6 if wide > f else 2) * f
        mlp = norm if "mlp" in modules else norm + inner
        # Queries of several groups are copied out of linear_qkv's output, which stays for the keys
        # that their norm saves.
        if model.qk_norm is True and 1 < heads * kv // q < heads:
            attention += 2 * q
    if model.qk_norm:  # queries and keys as they were, and each norm's statistics
        norms = 2 if model.qk_norm == "full" else heads * (q + kv) // q
        attention += 2 * (q + kv) + norms * statistics
    if "core_attn" not in modules:
        attention += 4 * heads
    # Dropout: a byte an element, after both blocks.
    return norm, attention, mlp + stream * bool(model.hidden_dropout)


def moments(run: Run, patched: bool, own: list[Parameter]) -> list[Moment]:
    """The moments of the backward of a layer with these parameters that can be a whole step's
    largest, in its order.
    """
    h, _, _, f, wide = widths(run)
    fc1, fc2 = 2 * h * wide, 2 * h * f
    if run.frozen:  # gradients of adapters are small
        fc1 = fc2 = 0
    if experts := [p for p in own if p.experts]:
        sizes, chosen = [p.numel for p in experts], run.library.chosen
        fc1, fc2 = 2 * max(sizes), 2 * min(sizes)
        # A token has a row at each of its experts.
        wide, f = (chosen * n // (h * experts[0].experts) for n in (max(sizes), min(sizes)))
        h *= chosen
    gated = wide > f
    rows: list[tuple[str, tuple[str, ...], int, float]]
    if patched:
        rows = [
            # Of the output's gradient codes transposed, for fc2; the gradient of the activation
            # (bf16) becomes codes, of fc1's output in both orders, beside the activation's.
            ("activation backward", (), 0, h + 3 * f + 2 * wide),
            # Codes of both orders, the transposed weight's, dy (bf16).
            ("dgrad of fc1", (), fc2 + h * wide, 2 * wide + 2 * h),
            # Transposed codes, also of y; dx (bf16).
            ("gradient of fc1", (), fc1 + fc2, wide + 3 * h),
        ]
    else:  # autograd's own order, an operation at a time
        gathered = 2 * h if run.shared > 1 else 0
        rows = [
            ("gradient of fc2", (), fc2, 2 * f + 2 * h + gathered),
            # Gradients of the product and of its two factors; its own output is released.
            ("activation backward", _FC2, 0, 4 * f if gated else 2 * f),
            ("gradient of fc1", (), fc1, 2 * h - (6 * f if gated else 2 * f) + gathered),
        ]
    return [Moment(*row[:2], row[2] + round(row[3] * run.tokens)) for row in rows]


def grouped(elements: int, settings: ActivationConfig) -> int:
    """Bytes of so many elements in per-group 8 bits, with their scales."""
    return elements + -(-elements // settings.group_size) * (1 if settings.scale == "e8m0" else 2)
