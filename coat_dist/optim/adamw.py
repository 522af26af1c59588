"""AdamW with moments in FP8: 2.05 bytes a parameter instead of 8."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..ops.adamw import AdamWStep, adamw_fp32_step, adamw_step
from .state import DTYPES, LAYOUT_KEYS, STORED, check_group, check_state, codecs, moment, new_state

__all__ = ["CoatAdamW"]


class CoatAdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay, bias correction) with FP8 moments; see ``reference/moments.py`` for the encoding.

    Takes float32, bfloat16 and float16 parameters and dense gradients of these types; computes in fp32. It knows
    nothing of sharding: what ZeRO hands it, a flat fp32 slice, is a parameter like any other.

    Every argument is also a key of parameter groups, where it overrides the default given here. A group has one key
    more: ``"moments": "fp8"`` (default) or ``"fp32"``, for small tensors; :func:`coat_dist.optim.param_groups` sets it.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups.
        lr: learning rate, a number or a tensor of one element.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        maximize: ascend instead of descend.
        first_moment, second_moment: "e4m3" or "e5m2".
        expand: dynamic range expansion.
        group_size: elements that share one amax and exponent: 64, 128 or 256.
        stochastic_rounding: round codes stochastically instead of to nearest. The noise depends on the order in which
            parameters got their state, the step and the element, so runs are reproducible and resume exactly.
            Needed with ``betas[1]`` above about 0.98: rounding to nearest drops changes of the second moment that are
            smaller than half a code step, and the moment drifts (docs/numerics.md).

    Raises:
        ValueError, TypeError: names the option, what was given and what is accepted.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        first_moment: str = "e4m3",
        second_moment: str = "e4m3",
        expand: bool = True,
        group_size: int = 128,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                maximize=maximize,
                moments="fp8",
                first_moment=first_moment,
                second_moment=second_moment,
                expand=expand,
                group_size=group_size,
                stochastic_rounding=stochastic_rounding,
            ),
        )
        _declare_to_zero(type(self))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it does not give take their defaults."""
        if isinstance(param_group, dict) and "params" in param_group:
            if not isinstance(param_group["params"], torch.Tensor | set):  # torch refuses a set: its order is not fixed
                param_group = {**param_group, "params": list(param_group["params"])}
            check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient. Returns what ``closure`` (run first, with gradients) returns.

        Raises:
            TypeError: a gradient is sparse, complex or float64.
            ValueError: a parameter's state is of another kind than its group says.
                No parameter has been changed in either case.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        todo = [(p, p.grad, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, grad, group in todo:
            if grad.layout is not torch.strided or grad.dtype not in DTYPES:
                raise TypeError(
                    f"CoatAdamW: got a {grad.layout} {grad.dtype} gradient for a parameter of shape "
                    f"{tuple(p.shape)}, accepted: dense float32, bfloat16 or float16"
                )
            state = self.state[p]
            if "step" in state and STORED[group["moments"]] not in state:  # something else put it there
                check_state(state, p, group, f"CoatAdamW: state of a parameter of shape {tuple(p.shape)}")
        for p, grad, group in todo:
            self._update(p, grad, group)
        return loss

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[p]
        if "step" not in state:  # DeepSpeed may have put an empty dict there
            state.update(new_state(p, group))
        if group["stochastic_rounding"] and "coat_seed" not in state:
            state["coat_seed"] = sum("coat_seed" in s for s in self.state.values())
        state["step"] += 1
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):
            lr = lr.reshape(()) if lr.device == p.device and lr.is_cuda else float(lr)
        beta1, beta2 = group["betas"]
        numbers = AdamWStep(lr, beta1, beta2, group["eps"], group["weight_decay"], state["step"], group["maximize"])
        if group["moments"] == "fp32":
            adamw_fp32_step(p, grad, state["exp_avg"], state["exp_avg_sq"], numbers)
            return
        seed = _seed(state["coat_seed"], state["step"]) if group["stochastic_rounding"] else None
        flat = p.reshape(-1)  # a copy where p is not contiguous
        adamw_step(flat, grad.reshape(-1), moment(state, "m"), moment(state, "v"), *codecs(group), numbers, seed)
        if not p.is_contiguous():
            p.copy_(flat.view(p.shape))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state to the byte, on the device of each parameter.

        As with every torch optimizer, the options saved in parameter groups replace the present ones. Those that say
        how moments are stored have to agree.

        Raises:
            ValueError: saved by another optimizer, with other storage options, or from parameters of another shape.
                Nothing has been changed then.
        """
        # torch would cast codes to the parameter's dtype: pass them through it in boxes. This hook is the last to run,
        # so hooks of the user see plain tensors.
        handle = self.register_load_state_dict_pre_hook(_check_and_box)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        for p, values in state["state"].items():
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, _Boxed):
                    values[key] = value.tensor.to(p.device, copy=True)
        super().__setstate__(state)


class _Boxed:
    """Hides a tensor from ``torch.optim.Optimizer.load_state_dict``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _check_and_box(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    sizes, saved_sizes = ([len(g["params"]) for g in gs] for gs in (groups, saved_groups))
    if sizes != saved_sizes:
        raise ValueError(
            f"CoatAdamW.load_state_dict: got parameter groups of {saved_sizes} parameters, accepted: "
            f"{sizes}, as this optimizer was built with; build it with the same parameter groups"
        )
    states = dict(state_dict["state"])
    for i, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        for key in LAYOUT_KEYS:
            if saved.get(key) != group[key]:
                given = repr(saved[key]) if key in saved else "none (saved by another optimizer)"
                raise ValueError(
                    f"CoatAdamW.load_state_dict: group {i}, {key}: got {given}, accepted: {group[key]!r}, as this "
                    "optimizer was built with; build it with the saved setting, or convert the moments with "
                    "coat_dist.optim.export_moments and import_moments"
                )
        for index, p in zip(saved["params"], group["params"], strict=True):
            if states.get(index):
                check_state(states[index], p, group, f"CoatAdamW.load_state_dict: group {i}, parameter {index}")
                states[index] = {k: _Boxed(v) if isinstance(v, torch.Tensor) else v for k, v in states[index].items()}
    return {**state_dict, "state": states}


def _seed(ordinal: int, step: int) -> int:
    """A uint32 that differs between parameters and steps."""
    return (ordinal * 0x9E3779B9 + step) & 0xFFFFFFFF


def _declare_to_zero(cls: type) -> None:
    """Put the class on DeepSpeed's list of optimizers that ZeRO may drive, where DeepSpeed is in use.

    Programs that name it in their JSON then need no ``zero_allow_untested_optimizer``.
    """
    zero = sys.modules.get("deepspeed.runtime.zero.utils")
    tested = getattr(zero, "ZERO_SUPPORTED_OPTIMIZERS", None)
    if isinstance(tested, list) and cls not in tested:
        tested.append(cls)
