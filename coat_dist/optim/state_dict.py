"""State dicts of CoatAdamW: to the byte as a rule, in fp32 where the sharding or the optimizer
changes.

These are hooks that ``CoatAdamW.state_dict`` and ``load_state_dict`` run innermost, so hooks of the
user see plain state dicts.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from .host import on_host, to_host, wait
from .master import export_master
from .moments import export_moments, import_moments, regroup
from .sharded import from_global, is_dtensor, to_global
from .state import (
    FP32_KEYS,
    LAYOUT_KEYS,
    as_count,
    check_group,
    check_state,
    has_remainder,
)

_MOMENTS = tuple(FP32_KEYS.values())
_TORCH_ONLY = (
    "amsgrad",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
)
"""Options of torch's AdamW that say how it computes. All else in a saved group, a scheduler's
keys too, is taken.
"""


@contextmanager
def fp32_state_dict(optimizer: Any) -> Iterator[None]:
    """Inside, ``state_dict`` gives and ``load_state_dict`` takes ``step``, ``exp_avg`` and
    ``exp_avg_sq`` in fp32.

    Where a trainer calls them itself, ``CoatAdamW(..., checkpoint="fp32")`` does so for good. For
    what codes cannot be carried over: another group size or format, shards that cut groups of whole
    rows, and moments of torch's AdamW. Loading encodes the moments anew, within the error bound of
    one encoding; options of the present parameter groups that say how moments are stored stay, the
    others are taken from the saved groups. Exporting takes 8 bytes a parameter while the state dict
    lives.

    With ``master_weights="bf16_remainder"`` there is ``master``, too: the fp32 master weight, 4
    bytes more. Loading takes its lower half from it, and the parameter is to be loaded with the
    model, as always; from a state without one, as of torch's AdamW, the parameter becomes its own
    master weight.

    Args:
        optimizer: a :class:`CoatAdamW`.
    """
    # Fabric's wrapper is a CoatAdamW by class.
    optimizer = getattr(optimizer, "optimizer", optimizer)
    before, optimizer.checkpoint = optimizer.checkpoint, "fp32"
    try:
        yield
    finally:
        optimizer.checkpoint = before


class FP32States(MutableMapping):
    """``optimizer.state`` while state dicts are in fp32: torch looks up there what a state dict to
    be loaded has.

    Reading decodes a state into new tensors, assigning one encodes it, as ZeroRedundancyOptimizer
    does to load.
    """

    def __init__(self, optimizer: Any) -> None:
        self._states, self._groups = optimizer.coded_state, optimizer.param_groups

    def _group(self, p: Any) -> dict[str, Any]:
        return next((group for group in self._groups if any(q is p for q in group["params"])), {})

    def __getitem__(self, p: Any) -> Any:
        state, group = self._states[p], self._group(p)
        if not state or not group:
            return state
        first, second = export_moments(p, state, group)
        rest = {k: x for k, x in state.items() if k == "step" or not isinstance(x, torch.Tensor)}
        master = {"master": export_master(p, state)} if has_remainder(group) else {}
        return {**rest, "exp_avg": first, "exp_avg_sq": second, **master}

    def __setitem__(self, p: Any, state: Any) -> None:
        group = self._group(p)
        if group and isinstance(state, dict) and "exp_avg" in state and "coat_p_low" not in state:
            state = _from_fp32(state, p, group, "CoatAdamW.state")
            state["step"] = as_count(state["step"], p, group)
        self._states[p] = state

    def __delitem__(self, p: Any) -> None:
        del self._states[p]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, p: Any) -> bool:
        return p in self._states


def gather(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Post-hook of ``state_dict``: global tensors for DTensor parameters, in host memory if any
    state is.
    """
    states, groups = dict(state_dict["state"]), optimizer.param_groups
    hosted = any(on_host(p, group) for group in groups for p in group["params"])
    optimizer._shared |= hosted
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        for index, p in zip(saved["params"], group["params"], strict=True):
            if not states.get(index) or not is_dtensor(p):
                continue
            if optimizer.checkpoint != "fp32":
                states[index] = to_global(states[index], p, group)
            if hosted:  # torch loads full state dicts where all tensors are on one device
                states[index] = {
                    k: x.cpu() if isinstance(x, torch.Tensor) else x
                    for k, x in states[index].items()
                }
    return {**state_dict, "state": states}


class Boxed:
    """Hides a tensor from ``Optimizer.load_state_dict``, which would cast codes to the
    parameter's dtype.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def unbox(loaded: dict[str, Any]) -> None:
    """Put copies of boxed tensors in place, where the groups of their parameters keep states."""
    groups = {p: group for group in loaded.get("param_groups", ()) for p in group["params"]}
    wait()  # for steps after the state dict was made, which shares memory with the states
    for p, values in loaded["state"].items():
        if not isinstance(values, dict):
            continue
        boxed = {key: box.tensor for key, box in values.items() if isinstance(box, Boxed)}
        if boxed and on_host(p, groups[p]):
            values.update(to_host(boxed, p.is_cuda))
        for key, value in values.items():
            if isinstance(value, Boxed):
                # codes are rows of bytes to a kernel; an fp32 moment may have the parameter's
                # strides
                layout = (
                    torch.contiguous_format if key.startswith("coat_") else torch.preserve_format
                )
                values[key] = value.tensor.to(p.device, copy=True, memory_format=layout)


def check_and_box(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Pre-hook of ``load_state_dict``: check everything, convert where asked for, box tensors.

    Raises:
        ValueError: as :meth:`CoatAdamW.load_state_dict` says.
    """
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    states, new_groups = dict(state_dict["state"]), []
    # torch refuses another number of groups or parameters, after this hook.
    for i, (saved, group) in enumerate(zip(saved_groups, groups, strict=False)):
        stateless = not any(states.get(index) for index in saved["params"])
        fp32 = optimizer.checkpoint == "fp32"
        new = _own_layout(saved, group, i) if fp32 else _same_layout(saved, group, i, stateless)
        new_groups.append(new)
        options = {**new, "params": group["params"]}
        check_group(options, f"CoatAdamW.load_state_dict: group {i}: CoatAdamW ")
        for index, p in zip(saved["params"], group["params"], strict=False):
            if states.get(index):
                what = f"CoatAdamW.load_state_dict: group {i}, parameter {index}"
                if fp32:
                    state = _from_fp32(states[index], p, group, what)
                else:
                    state, each = from_global(states[index], p, group, what)
                    state = regroup(state, p, group) if each else state
                check_state(state, p, group, what)
                state["step"] = as_count(state["step"], p, new)
                states[index] = {
                    k: Boxed(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()
                }
    new_groups += saved_groups[len(groups) :]
    return {**state_dict, "state": states, "param_groups": new_groups}


def _same_layout(
    saved: dict[str, Any], group: dict[str, Any], i: int, stateless: bool
) -> dict[str, Any]:
    """The saved group, with options that it lacks taken from the present one; ``stateless``: no
    states come with it, whose storage would have to be known.
    """
    for key in LAYOUT_KEYS:
        if key not in saved and stateless:
            continue
        if saved.get(key) != group[key]:
            given = repr(saved[key]) if key in saved else "none"
            raise ValueError(
                f"CoatAdamW.load_state_dict: group {i}, {key}: got {given}, accepted: "
                f"{group[key]!r}, as this optimizer was built with; build it with the saved "
                "setting, or convert the moments, also another optimizer's, with "
                "coat_dist.optim.fp32_state_dict, or export_moments and import_moments"
            )
    present = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    return {**present, **saved, **{k: v for k, v in present.items() if k == "state_device"}}


def _own_layout(saved: dict[str, Any], group: dict[str, Any], i: int) -> dict[str, Any]:
    if saved.get("decoupled_weight_decay") is False and saved.get("weight_decay"):
        raise ValueError(
            f"CoatAdamW.load_state_dict: group {i}, decoupled_weight_decay: got False with "
            "weight_decay "
            f"{saved['weight_decay']!r}, as of torch's Adam; accepted: True, as of AdamW, or "
            "weight_decay 0"
        )
    taken = {k: v for k, v in saved.items() if k in group or k not in _TORCH_ONLY}
    kept = {k: group[k] for k in (*LAYOUT_KEYS, "capturable", "state_device") if k in group}
    return {**group, **taken, **kept}  # params too are the saved ones: indices


def _from_fp32(
    saved: dict[str, Any], p: torch.Tensor, group: dict[str, Any], what: str
) -> dict[str, Any]:
    """The state that ``group`` asks for, from fp32 moments of this optimizer or of torch's
    AdamW.
    """
    found, accepted = set(saved) - {"coat_seed"}, {"step", *_MOMENTS}
    if found - {"master"} != accepted:
        raise ValueError(
            f"{what}: got {', '.join(sorted(map(str, found)))}, accepted under fp32_state_dict: "
            f"{', '.join(sorted(accepted))}; save it under fp32_state_dict, too"
        )
    tensors = {k: saved[k] for k in (*_MOMENTS, "master") if k in saved}
    for key, value in tensors.items():
        if value.shape != p.shape:
            raise ValueError(
                f"{what}, {key}: got {value.dtype} {list(value.shape)}, accepted: floating point "
                f"{list(p.shape)}"
            )
    from_global(tensors, p, group, what)
    state = import_moments(p, group, **tensors, step=0)
    return state | {key: saved[key] for key in ("step", "coat_seed") if key in saved}
