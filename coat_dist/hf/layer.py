"""Decoder layers in one piece: norm, queries, keys and values, rotation, attention, projection,
norm, MLP, residuals.

The layer passes its norms to the attention and the MLP, which run them with their first product and
return an alias of their input for the residual connection. Both are still called as modules, so
hooks of transformers and of DeepSpeed run as before. Attention itself stays behind transformers'
interface, with its masks, windows, dropout and caches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .. import flow
from ..flow.function import once_per_tensor
from .modules import (
    CACHES,
    ONE,
    Block,
    Fused,
    bias_of,
    fits,
    inlined,
    norm_of,
    opaque,
)
from .recognize import Attention, LayerNorms, rotation_of


@once_per_tensor
def _table(cos: torch.Tensor, sin: torch.Tensor, rotation: str) -> flow.RopeTable:
    """From ``[1 or b, s, rot]`` of any floating dtype, the angles of pairs and then the same again;
    all layers of a pass share one table.
    """
    cosines, sines = (t.detach().float().transpose(0, 1).contiguous() for t in (cos, sin))
    neighbours = rotation == "neighbours"
    if neighbours:
        pairs = cos.shape[-1] // 2
        cosines, sines = (t[..., :pairs].repeat_interleave(2, -1) for t in (cosines, sines))
    return flow.RopeTable(cosines, sines, neighbours)


@functools.cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's own forward, compiled for all layers of its class and for all lengths. Inside of
    the module's hooks, and of a checkpoint, which torch does not trace where graphs break in it.
    """
    return torch.compile(forward, dynamic=True)


class Sides(NamedTuple):
    """Of a layer that ``layer_norms`` knows: which of its two blocks, attention and MLP, takes its
    norm and the residual connection along.
    """

    norms: LayerNorms
    attention: bool
    mlp: bool
    names: tuple[str, ...]
    """Of the layer's arguments, all but the first."""
    defaults: dict[str, Any]
    """Those that have one."""

    @classmethod
    def of(cls, layer: Any, norms: LayerNorms, attention: bool, mlp: bool) -> Sides:
        _, _, *rest = inspect.signature(type(layer).forward).parameters.values()
        named = [p for p in rest if p.kind is not p.VAR_KEYWORD]
        defaults = {p.name: p.default for p in named if p.default is not p.empty}
        return cls(norms, attention, mlp, tuple(p.name for p in named), defaults)


class DecoderLayer(Block):
    """A layer. Where one of its blocks takes a norm and the residual connection along (``Sides``),
    the layer gives it the norm; else it runs its own code around blocks in the flow.

    All layers of one class get one patched class, so that FSDP policies which wrap by class find
    each of them.
    """

    @inlined
    def coat_forward(self: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = second = False
        if self.coat.kind:
            first, second = self.coat_sides(*args[:1], **kwargs)
        if not (first and second):
            if torch.compiler.is_compiling():
                first = second = False
            elif self.coat.settings.compile:
                return _compiled(plain)(self, *args, **kwargs)
        if first or second:
            return self.coat_fused(first, second, *args, **kwargs)
        return plain(self, *args, **kwargs)

    @opaque
    def coat_sides(self: Any, hidden_states: Any, **_: Any) -> tuple[bool, bool]:
        """Which of the two blocks takes its norm along now."""
        if not (fits(hidden_states) and self.coat_ready()):
            return False, False
        sides = self.coat.kind
        return (
            sides.attention and _takes_norm(self.self_attn),
            sides.mlp and _takes_norm(self.mlp),
        )

    @opaque
    def coat_fused(
        self: Any, first: bool, second: bool, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """The layer with one of its norms, or both, in the block behind it."""
        sides, x = self.coat.kind, hidden_states
        kwargs = sides.defaults | dict(zip(sides.names, args, strict=False)) | kwargs
        before_attention, before_mlp = map(self.get_submodule, sides.norms.before)
        after = [self.get_submodule(name) for name in sides.norms.after]
        if first:
            # By position: ZeRO-3 lets an attention's weights go in backward where its first
            # argument has a gradient.
            y, _, x = self.self_attn(x, coat_norm=before_attention, **kwargs)
        else:
            y, _ = self.self_attn(hidden_states=before_attention(x), **kwargs)
        x = x + (after[0](y) if after else y)
        if second:
            y, x = self.mlp(x, norm=before_mlp)
        else:
            y = self.mlp(before_mlp(x))
        return x + (after[1](y) if after else y)

    @inlined
    def coat_own_forward(self: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = Block.coat_own_forward(self, plain, *args, **kwargs)
        report, first = self.coat.report, out[0] if isinstance(out, tuple) else out
        if report is not None and isinstance(first, torch.Tensor) and first.requires_grad:
            why = _NO_TRAINING if not self.training else _WITH_CACHE
            if why not in report.notes and not torch.compiler.is_compiling():
                first.register_hook(lambda _: report.warn(why))
        return out


def _takes_norm(block: Any) -> bool:
    return not gathers_itself(block.__class__) and block.coat_runs()


@functools.cache
def gathers_itself(cls: Any) -> bool:
    """Whether ``fully_shard`` made a block's class: weights are there only once it is called."""
    return any(base.__name__ == "FSDPModule" for base in cls.__mro__)


_NO_TRAINING = (
    "gradients reach layers in eval mode, which run the model's own code in BF16: call "
    "model.train() before training, "
    'or set "coat": {"activation": {"evaluation": "flow"}}'
)
_WITH_CACHE = (
    "gradients reach a call with a cache of keys and values: in such calls layers run "
    "the model's own code in BF16"
)


class AttentionKind(NamedTuple):
    """What a fused attention computes, found when it is patched."""

    heads: flow.Heads
    form: Attention
    rotation: str | None
    """Pairs that the flow rotates in queries and keys; None where ``rotate`` does it."""
    rotate: Callable[..., Any]
    """transformers' ``apply_rotary_pos_emb`` of the family."""
    scale: Callable[..., Any] | None
    """``get_llama_4_attn_scale`` of the family."""
    eager: Callable[..., Any]
    """The family's attention by plain operations."""

    @classmethod
    def of(cls, attention: Any, form: Attention) -> AttentionKind:
        scope = inspect.unwrap(type(attention).forward).__globals__
        rows = sum(getattr(attention, name).out_features for name in form.projections)
        size, per_group = attention.head_dim, attention.num_key_value_groups
        heads = flow.Heads(
            rows // size // (per_group + 2), per_group, size, blocks=True, batch_first=True
        )
        return cls(
            heads,
            form,
            rotation_of(attention),
            scope["apply_rotary_pos_emb"],
            scope.get("get_llama_4_attn_scale"),
            scope["eager_attention_forward"],
        )


class FusedAttention(Fused):
    """Attention; with ``coat_norm`` the norm before it as well, and the alias of its input for
    the residual.
    """

    @opaque
    def coat_forward(
        self: Any,
        plain: Callable[..., Any],
        hidden_states: torch.Tensor,
        *args: Any,
        coat_norm: nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        x = hidden_states
        # With a norm, the layer has looked. Layers that are known pass the rest by keyword.
        if args or coat_norm is None and not (fits(x) and self.coat_ready()):
            return plain(self, x, *args, **kwargs)
        *linears, last = self.coat.linears
        adapters, last_adapters = self.coat_adapters()
        kind, settings = self.coat.kind, self.coat.settings
        form = kind.form
        cos, sin = kwargs.pop("position_embeddings")
        mask = kwargs.pop("attention_mask", None)
        cache = next((kwargs.pop(name) for name in CACHES if name in kwargs), None)
        kwargs.pop("cache_position", None)  # of transformers before 5.4
        biases = None if linears[0].bias is None else [m.bias for m in linears]
        head_norms = None
        if form.norms:
            norms = [norm_of(getattr(self, name)) for name in form.norms]
            gains: list[Any] = [norm.weight for norm in norms]
            head_norms = flow.HeadNorms(torch.stack(gains), tuple(norm.eps for norm in norms))
        table = None if kind.rotation is None else _table(cos, sin, rotation=kind.rotation)
        q, k, v, *alias = flow.norm_qkv(
            x,
            None if coat_norm is None else norm_of(coat_norm),
            [m.weight for m in linears],
            biases,
            kind.heads,
            table,
            ONE,
            settings,
            residual=coat_norm is not None,
            head_norms=head_norms,
            adapters=adapters,
        )
        attend = _interface(self.config._attn_implementation, kind.eager)
        # Another library may compute attention under this name: over ranks, as DeepSpeed's
        # Ulysses, or its own. Kernels of the hub are partial functions.
        package, _, _ = getattr(attend, "func", attend).__module__.partition(".")
        known = package in ("transformers", "coat_dist")
        kept: Any = nullcontext()
        copies = attend is kind.eager  # keeps no queries and keys, but copies
        if (
            head_norms is not None
            and table is not None
            and q.requires_grad
            and known
            and not copies
        ):
            kept = flow.heads_again(q, k, v, kind.heads, table, head_norms)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if kind.rotation is None:
            q, k = kind.rotate(q, k, cos, sin)
        if form.scaled:
            rope = self.config.rope_parameters
            limits = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
            q = q * kind.scale(kwargs["position_ids"], *limits).to(q.dtype)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if form.window == "self":
            kwargs["sliding_window"] = self.sliding_window
        elif form.window == "config":
            kwargs["sliding_window"] = getattr(self.config, "sliding_window", None)
        documents = None
        if settings.attention == "fp8" and known:
            documents = _compressed(self, q, k, mask, kwargs)
        weights, o8 = None, None
        if documents is not None:
            q, k, v = (t.permute(2, 0, 1, 3) for t in (q, k, v))
            out, o8 = flow.attention(q, k, v, settings, scale=self.scaling, documents=documents[0])
        else:
            dropout = self.attention_dropout if self.training else 0.0
            with kept:
                out, weights = attend(
                    self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs
                )
            out = out.reshape(*x.shape[:-1], -1)
        y = flow.linear(out, last.weight, ONE, settings, o8, last_adapters)
        return bias_of(y if o8 is None else y.transpose(0, 1), last), weights, *alias


def _compressed(
    module: Any, q: torch.Tensor, k: torch.Tensor, mask: Any, given: dict[str, Any]
) -> tuple[flow.Documents | None] | None:
    """Whether attention may keep its tensors in FP8, and the documents of the sequence, if there
    are several.

    Not with masks, windows, dropout, earlier keys or attention weights on request: those are
    transformers'.
    """
    window = given.get("sliding_window")
    if (
        mask is not None
        or q.shape[2] != k.shape[2]
        or (window is not None and window < k.shape[2])
        or (module.training and module.attention_dropout)
        or given.get("output_attentions")
        or not getattr(module, "is_causal", True)
        or not given.get("is_causal", True)
        or module.config._attn_implementation == "eager"
    ):
        return None
    starts, longest, positions = (
        given.get(name) for name in ("cu_seq_lens_q", "max_length_q", "position_ids")
    )
    if (
        starts is None
        and positions is not None
        and q.shape[0] == 1
        and "flash" in module.config._attn_implementation
    ):
        return (_documents_in(positions),)
    if starts is None:
        return (None,)
    return None if q.shape[0] != 1 or longest is None else (flow.Documents(starts, int(longest)),)


@once_per_tensor
def _documents_in(positions: torch.Tensor) -> flow.Documents | None:
    """Documents that ``[1, s]`` positions begin, as transformers' flash attention reads them; None
    where there is one.

    A document begins where the position is the smallest of the row: skipped positions are no
    border. Found once a pass, since it waits for the GPU.
    """
    row = positions[0]
    begins = (row == row.min()).index_fill(0, row.new_zeros(1), True)
    starts = F.pad(begins.nonzero().flatten(), (0, 1), value=len(row)).int()
    return flow.Documents(starts, int(starts.diff().max())) if len(starts) > 2 else None


def _interface(name: str, eager: Callable[..., Any]) -> Callable[..., Any]:
    """The attention that a configuration names."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
        return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
