"""What one transformer layer keeps for backward, and what else it holds at the worst moments of its
backward.

Patched layers follow the flow's own functions (docs/flow.md, "What is saved"): the allocator's peak
of a stack of layers is this sum to 0.2 % (`benchmarks/speed/layer_memory.py`). BF16 layers follow
what torch's and Megatron's operations save (`benchmarks/speed/saved_bytes.py`). All bytes are of
one rank, tokens those of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coat_dist.config import ActivationConfig
from coat_dist.reference.activation import ACTIVATIONS
from launch.model.gpt import ModelConfig

from .run import Run

__all__ = [
    "Moment",
    "Sizes",
    "backward_moments",
    "bf16_moments",
    "bf16_saved",
    "coat_moments",
    "coat_saved",
    "saved",
]


@dataclass(frozen=True)
class Sizes:
    """Widths of a layer on one rank."""

    h: int  # of the residual stream
    q: int  # queries
    w: int  # queries, keys and values
    f: int  # the activation's output
    wide: int  # fc1's output
    heads: int
    share: int = 1  # ranks that share the residual stream

    @classmethod
    def of(cls, model: ModelConfig, tp: int = 1, share: int = 1) -> Sizes:
        q, kv = (
            model.num_attention_heads * model.head_channels // tp,
            model.kv_heads * model.head_channels // tp,
        )
        f = model.ffn_hidden_size // tp
        parts = ACTIVATIONS[model.activation].parts
        return cls(
            model.hidden_size, q, q + 2 * kv, f, parts * f, model.num_attention_heads // tp, share
        )


@dataclass(frozen=True)
class Moment:
    """One of the largest moments of a layer's backward."""

    name: str
    released: int  # bytes of what the layer saved that are released by then
    # Bytes of weights' gradients of this layer that exist by then, with the one that is being made.
    gradients: int
    own: int  # those of them that the running function has made and not yet handed over
    made: int  # bytes of everything else that the running function holds


def coat_saved(
    model: ModelConfig, settings: ActivationConfig, sizes: Sizes
) -> tuple[float, int, float]:
    """Bytes a token that a patched layer saves: of norm and qkv, of attention, of norm and MLP."""
    heads = 2 * sizes.q + sizes.w - sizes.q  # q, k, v and the output
    # Codes with one scale; the norm of the block's output stays BF16.
    if model.norm_placement == "post":
        norm = (sizes.h + _post_norm(model, sizes)) / sizes.share
    else:
        norm = (_grouped(sizes.h, settings) + 4) / sizes.share  # and rstd
    attention = _grouped(heads, settings) if settings.attention == "fp8" else 2 * heads
    return (
        norm,
        attention + 4 * sizes.heads + _unnormed(model, sizes),
        norm + _grouped(sizes.wide, settings),
    )


def _post_norm(model: ModelConfig, sizes: Sizes) -> int:
    """Bytes a token that a norm after a block saves: its input and statistics."""
    return 2 * sizes.h + (8 if model.normalization == "layernorm" else 4)


def _unnormed(model: ModelConfig, sizes: Sizes) -> int:
    """Bytes a token that norms on queries and keys save: these as they were, and statistics."""
    if not model.qk_norm:
        return 0
    both = sizes.q + (sizes.w - sizes.q) // 2
    norms = 2 if model.qk_norm == "full" else sizes.heads * both // sizes.q  # of a token
    return 2 * both + norms * (8 if model.normalization == "layernorm" else 4)


def bf16_saved(model: ModelConfig, sizes: Sizes) -> tuple[float, int, float]:
    """The same of a layer that is not patched."""
    statistics = 8 if model.normalization == "layernorm" else 4
    norm = (4 * sizes.h + statistics) / sizes.share  # its input and output
    heads = 2 * sizes.q + sizes.w - sizes.q
    # Of a gated MLP: fc1's output, its two parts' functions (Megatron adds an offset of 0 to the
    # second), the product.
    inner = 2 * sizes.wide + (6 * sizes.f if sizes.wide > sizes.f else 2 * sizes.f)
    # Queries of several groups are copied out of linear_qkv's output, which stays for the keys that
    # their norm saves.
    groups = sizes.heads * (sizes.w - sizes.q) // (2 * sizes.q)
    whole = 2 * sizes.q if model.qk_norm is True and 1 < groups < sizes.heads else 0
    return norm, 2 * heads + 4 * sizes.heads + _unnormed(model, sizes) + whole, norm + inner


def saved(run: Run, patched: bool) -> tuple[float, float, float]:
    """Bytes a token that one layer keeps between forward and backward, as its recompute settings
    say (not "full").
    """
    sizes = Sizes.of(run.model, run.tp, run.shared)
    stream = 2 * sizes.h / sizes.share
    modules = run.recompute.get("recompute_modules", ()) if run.recompute else ()
    # A byte an element, after both blocks.
    dropout = 2 * sizes.h / sizes.share if run.model.hidden_dropout else 0
    if patched:
        assert run.flow is not None
        settings = run.flow
        if "core_attn" in modules and settings.attention == "fp8":
            settings = settings.model_copy(update={"attention": "bf16"})
        qkv, attention, mlp = coat_saved(run.model, settings, sizes)
        if "mlp" in modules:
            mlp = stream + (
                _post_norm(run.model, sizes) / sizes.share
                if run.model.norm_placement == "post"
                else 0
            )
    else:
        qkv, attention, mlp = bf16_saved(run.model, sizes)
        if "layernorm" in modules:
            qkv, mlp = qkv - stream, mlp - stream
        if "mlp" in modules:
            mlp = 2 * stream + (8 if run.model.normalization == "layernorm" else 4) / sizes.share
    if "core_attn" in modules:
        attention -= 4 * sizes.heads  # q, k, v and the output stay
    return qkv, attention, mlp + dropout


def coat_moments(
    model: ModelConfig, tokens: int, settings: ActivationConfig, sizes: Sizes
) -> Iterator[Moment]:
    """The largest moments of a patched layer's backward, in its order."""
    h, q, w, f, wide = sizes.h, sizes.q, sizes.w, sizes.f, sizes.wide
    _, attention_saved, mlp_saved = (round(tokens * n) for n in coat_saved(model, settings, sizes))
    # Q, k, v and the output read back to bf16.
    rounded = 2 * (q + w) if settings.attention == "fp8" else 0
    fc2, fc1, proj, qkv = 2 * h * f, 2 * h * wide, 2 * h * q, 2 * h * w
    mlp = fc1 + fc2

    # Of the output's gradient codes transposed, for fc2; the gradient of the activation (bf16)
    # becomes codes, of fc1's output in both orders, beside the activation's, transposed.
    yield Moment("activation backward", 0, 0, 0, tokens * (h + 2 * f + 2 * wide + f))
    # The same but for the activation's gradient; fc2's is made.
    yield Moment("gradient of fc2", 0, fc2, fc2, tokens * (h + 2 * wide + f))
    # Codes of both orders, the transposed weight's, dy (bf16).
    yield Moment("dgrad of fc1", 0, fc2, fc2, tokens * (2 * wide + 2 * h) + h * wide)
    # Transposed codes; dy and dx (bf16).
    yield Moment("norm backward", 0, fc2, fc2, tokens * (wide + 4 * h))
    # Transposed codes, also of y; dx (bf16).
    yield Moment("gradient of fc1", 0, mlp, mlp, tokens * (wide + h + 2 * h))
    # Transposed codes, also of the input; dx (bf16).
    yield Moment(
        "gradient of proj",
        mlp_saved,
        mlp + proj,
        proj,
        tokens * (h + q + 2 * q + (2 * q if rounded else 0)),
    )
    # Gradients of the output, of q, k and v (bf16); cuDNN sums the gradient of q in fp32.
    yield Moment(
        "attention backward", mlp_saved, mlp + proj, 0, tokens * (2 * q + 2 * w + 4 * q + rounded)
    )
    # Gradients of q, k and v, which autograd holds until the function returns, and put together
    # (bf16); codes of both orders.
    released = mlp_saved + attention_saved
    yield Moment("quantization for qkv", released, mlp + proj, 0, tokens * (2 * w + 2 * w + 2 * w))
    # Those gradients; transposed codes, also of y; dx (bf16).
    yield Moment(
        "gradient of qkv", released, mlp + proj + qkv, qkv, tokens * (2 * w + w + h + 2 * h)
    )


def bf16_moments(model: ModelConfig, tokens: int, sizes: Sizes) -> Iterator[Moment]:
    """The same of a layer that is not patched: autograd's own order, an operation at a time."""
    h, q, w, f, wide = sizes.h, sizes.q, sizes.w, sizes.f, sizes.wide
    _, attention_saved, mlp_saved = (round(tokens * n) for n in bf16_saved(model, sizes))
    fc2, fc1, proj, qkv = 2 * h * f, 2 * h * wide, 2 * h * q, 2 * h * w
    gathered = 2 * h if sizes.share > 1 else 0
    # The residual's gradient is the one that counts outside; the branch's is a tensor of its own.
    yield Moment("gradient of fc2", 0, fc2, fc2, tokens * (2 * f + 2 * h + gathered))
    if wide > f:
        # Gradients of the product and of its two factors; the activation's output is released.
        yield Moment("activation backward", tokens * 2 * f, fc2, 0, tokens * 6 * f)
        yield Moment(
            "fc1's output put together", tokens * 6 * f, fc2, 0, tokens * (4 * f + 2 * wide)
        )
    else:
        yield Moment("activation backward", tokens * 2 * f, fc2, 0, tokens * 4 * f)
    inner = tokens * (2 * wide + (6 * f if wide > f else 2 * f))
    yield Moment("gradient of fc1", inner, fc1 + fc2, fc1, tokens * (2 * wide + 2 * h + gathered))
    yield Moment("norm backward", inner, fc1 + fc2, 0, tokens * 6 * h)
    yield Moment(
        "gradient of proj", mlp_saved, fc1 + fc2 + proj, proj, tokens * (2 * q + 2 * h + gathered)
    )
    yield Moment(
        "attention backward", mlp_saved, fc1 + fc2 + proj, 0, tokens * (2 * q + 2 * w + 4 * q)
    )
    released = mlp_saved + attention_saved
    yield Moment("gradients of q, k, v put together", released, fc1 + fc2 + proj, 0, tokens * 4 * w)
    yield Moment(
        "gradient of qkv",
        released,
        fc1 + fc2 + proj + qkv,
        qkv,
        tokens * (2 * w + 2 * h + gathered),
    )


def backward_moments(run: Run, patched: bool) -> list[Moment]:
    """The moments of one layer of ``run``."""
    sizes = Sizes.of(run.model, run.tp, run.shared)
    if not patched:
        return list(bf16_moments(run.model, run.tokens, sizes))
    assert run.flow is not None
    return list(coat_moments(run.model, run.tokens, run.flow, sizes))


def _grouped(elements: int, settings: ActivationConfig) -> int:
    """Bytes of so many elements in per-group 8 bits, with their scales."""
    return elements + -(-elements // settings.group_size) * (1 if settings.scale == "e8m0" else 2)
