"""What `gradients.py` compares: the small GPT's layers in BF16, in the flow, and with some of the flow's roundings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.accuracy.roundings import (
    ALIGNED,
    ALIGNED_ROW,
    EXACT,
    FLOW,
    FORMER,
    FORWARD,
    GEMMS,
    ROW,
    SAVED,
    SAVED_PRE,
    TENSOR,
    Plan,
    Recipe,
    Rounding,
    everywhere,
    rounded_block,
)
from benchmarks.small_gpt import Block
from coat_dist import CoatConfig, flow

__all__ = ["ALL", "PRECISE", "REAL", "SETS", "STRAIGHT", "BlockFunction", "Variant", "exact_block", "variants"]

BlockFunction = Callable[..., torch.Tensor]
"""``(layer, block, x, cos, sin)``, x ``[b, s, h]``."""
REAL, ALL, PRECISE = "flow", "all roundings", "all roundings, fp64 products"
BEFORE = "former flow"
SETS = "flow", "roundings", "products", "candidates"


@dataclass(frozen=True)
class Variant:
    """One way to compute the layers."""

    block: BlockFunction
    bf16: bool = False
    """Weights and activations are BF16 instead of fp32."""
    straight: str | None = None
    """The one of :data:`STRAIGHT` that has this variant's forward pass."""


def exact_block(layer: int, block: Block, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The block as it is."""
    return block(x, cos, sin)


def flow_block(
    changes: dict[str, Any], layer: int, block: Block, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """The block by functions of `coat_dist.flow`, whose layout is ``[s, b, h]`` and whose projection goes by heads."""
    settings, one = CoatConfig.parse({"activation": changes}).activation, flow.TensorParallel()
    h, n = x.shape[-1], block.heads
    table = flow.RopeTable(torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None])
    norm1, norm2 = (flow.Norm("rmsnorm", 1e-5, m.weight) for m in (block.norm1, block.norm2))
    by_heads = block.qkv.weight.view(3, n, h // n, h).transpose(0, 1).reshape(3 * h, h)
    x = x.transpose(0, 1).contiguous()
    q, k, v = flow.norm_qkv(x, norm1, by_heads, None, flow.Heads(n, 1, h // n), table, one, settings)
    out, compressed = flow.attention(q, k, v, settings) if settings.attention == "fp8" else (flow.sdpa(q, k, v), None)
    x = x + flow.linear(out, block.proj.weight, one, settings, compressed)
    x = x + flow.norm_mlp(x, norm2, block.fc1.weight, block.fc2.weight, "swiglu", one, settings)
    return x.transpose(0, 1)


def _straight(forward_x: Rounding, forward_w: Rounding) -> Variant:
    recipe = Recipe(forward_x, forward_w, wgrad_x=FORWARD, dgrad_w=FORWARD)
    return Variant(functools.partial(rounded_block, everywhere(recipe)))


STRAIGHT = {
    "row scales": _straight(ALIGNED_ROW, ALIGNED_ROW),
    "tensor scales": _straight(ALIGNED, ALIGNED),
    "former row scales": _straight(ROW, ROW),
}
"""Forward in FP8, and of its loss the gradient without further errors, by the scales of forward."""


def _real(straight: str | None = "row scales", bf16: bool = False, **changes: Any) -> Variant:
    return Variant(functools.partial(flow_block, changes), bf16, straight)


def _plan(plan: Plan, straight: str | None = None) -> Variant:
    return Variant(functools.partial(rounded_block, plan), straight=straight)


def _alone(**roundings: Any) -> Variant:
    return _plan(everywhere(Recipe(**roundings)))


def _flow_but(**changes: Any) -> Variant:
    return _plan(everywhere(replace(FLOW, **changes)), "row scales")


def _former_but(straight: str = "former row scales", **changes: Any) -> Variant:
    return _plan(everywhere(replace(FORMER, **changes)), straight)


def _only(gemm: str) -> Plan:
    return lambda layer, here: FLOW if here == gemm else EXACT


def _all_but_layer(left_out: int) -> Plan:
    return lambda layer, gemm: EXACT if layer == left_out else FORMER


def _saved_in(fmt: str) -> dict[str, Any]:
    return {"saved_x": Rounding("group", fmt), "saved_pre": Rounding("group", fmt)}


def _saved_codes(layer: int, gemm: str) -> Recipe:
    """Where a norm comes before: what differs between saved codes and y is a factor of each row and of each column."""
    return replace(FORMER, saved_x=ROW, wgrad_x=None) if gemm in ("qkv", "fc1") else FORMER


def variants(sets: Sequence[str], layers: int) -> dict[str, Variant]:
    """The variants of some of :data:`SETS`, by name; always :data:`ALL`."""
    found = {ALL: _flow_but()}
    if "flow" in sets:
        found |= {
            REAL: _real(),
            "BF16": Variant(exact_block, bf16=True),
            "flow, BF16 activations": _real(bf16=True),
            'flow, forward_scales "tensor"': _real("tensor scales", forward_scales="tensor"),
            'flow, forward "quantized"': _real(None, forward="quantized"),
            'flow, grad_format "e5m2"': _real(grad_format="e5m2"),
            'flow, attention "fp8"': _real(None, attention="fp8"),
        }
    if "roundings" in sets:
        found |= {
            "forward x": _alone(forward_x=ALIGNED_ROW),
            "forward w": _alone(forward_w=ALIGNED_ROW),
            "forward x and w, straight through": STRAIGHT["row scales"],
            "saved x": _alone(saved_x=SAVED),
            "saved gate, up": _alone(saved_pre=SAVED_PRE),
            "x for wgrad": _alone(wgrad_x=ALIGNED),
            "dY for wgrad": _alone(wgrad_dy=TENSOR),
            "dY for dgrad": _alone(dgrad_dy=TENSOR),
            "w for dgrad": _alone(dgrad_w=ALIGNED),
        }
    if "check" in sets:
        found |= {REAL: _real(), PRECISE: _flow_but(precise=True)}
    if "products" in sets:
        found |= {f"all around {gemm}": _plan(_only(gemm)) for gemm in GEMMS}
    if "candidates" in sets:
        found |= _candidates(layers)
    return found


def _candidates(layers: int) -> dict[str, Variant]:
    """Changes of the former flow, from which its successor was chosen."""
    noisy, noisy_group, column = Rounding(stochastic=True), Rounding("group", stochastic=True), Rounding("column")
    e3m4, e2m5, int8 = map(_saved_in, ("e3m4", "e2m5", "int8"))
    powers: dict[str, Any] = {"forward_x": ALIGNED_ROW, "forward_w": ALIGNED_ROW, "wgrad_x": ALIGNED}
    powers |= {"dgrad_w": ALIGNED, "straight": "row scales"}
    return {
        BEFORE: _former_but(),
        "x, gate, up saved without rounding": _former_but(saved_x=None, saved_pre=None),
        "saved in E3M4": _former_but(**e3m4),
        "saved in E2M5": _former_but(**e2m5),
        "saved in INT8": _former_but(**int8),
        "stochastic saved x, gate, up": _former_but(saved_x=noisy_group, saved_pre=noisy_group),
        "x for wgrad: the saved codes": _plan(_saved_codes, "former row scales"),
        "x for wgrad: forward's values": _former_but(wgrad_x=FORWARD),
        "x for wgrad: headroom 2": _former_but(wgrad_x=Rounding(headroom=2.0)),
        "w for dgrad: forward's values": _former_but(dgrad_w=FORWARD),
        "w for dgrad: scales of columns": _former_but(dgrad_w=column),
        "dY for dgrad: scales of rows": _former_but(dgrad_dy=ROW),
        "dY for dgrad: scales of 128 in a row": _former_but(dgrad_dy=Rounding("group", group=128)),
        "dY for wgrad: scales of columns": _former_but(wgrad_dy=column),
        "dY for wgrad: scales of 128 tokens": _former_but(wgrad_dy=Rounding("tokens", group=128)),
        "dY and x for wgrad: scales of columns": _former_but(wgrad_dy=column, wgrad_x=column),
        "stochastic dY": _former_but(dgrad_dy=noisy, wgrad_dy=noisy),
        "powers of two: dY": _former_but(dgrad_dy=ALIGNED, wgrad_dy=ALIGNED),
        "powers of two: x, w": _former_but(**powers),
        "powers of two: x, w; E2M5": _former_but(**powers, **e2m5),
        "powers of two: x, w; INT8": _former_but(**powers, **int8),
        "powers of two: x, w; INT8; dY by rows": _former_but(**powers, **int8, dgrad_dy=ROW),
        "first layer exact": _plan(_all_but_layer(0)),
        "last layer exact": _plan(_all_but_layer(layers - 1)),
    }
