"""Whether a block, a model and an optimizer that are given together belong together."""

from __future__ import annotations

import json
from typing import Any

import torch

from ..config import CoatConfig, CoatConfigError
from ..optim import CoatAdamW

__all__ = ["check_effect", "check_foreign", "check_its_parameters", "check_name", "check_patched", "is_patched"]


def check_foreign(optimizer: torch.optim.Optimizer, block: bool, compressed: bool) -> None:
    """Refuse an optimizer that DeepSpeed would take in the place of the CoatAdamW that the configuration asks for."""
    if (block or compressed) and not isinstance(optimizer, CoatAdamW):
        key, given = ("coat.optimizer", "a block") if block else ("optimizer.type", '"CoatAdamW"')
        raise CoatConfigError(
            f"{key}: got {given} beside optimizer={type(optimizer).__name__}, accepted: "
            "no optimizer argument, or a CoatAdamW"
        )


def check_name(name: Any) -> None:
    """Refuse an ``optimizer.type`` that is neither DeepSpeed's nor a class of ``torch.optim``: an assertion there."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS as NAMES

    known = isinstance(name, str) and (name == "CoatAdamW" or name.lower() in NAMES or hasattr(torch.optim, name))
    if name is not None and not known:
        raise CoatConfigError(
            f'optimizer.type: got {json.dumps(name)}, accepted: "CoatAdamW", a class of torch.optim by its name, or of '
            f"DeepSpeed's: {', '.join(NAMES)}"
        )


def check_its_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Refuse an optimizer over parameters that the model has not got, such as those of a copy of it."""
    own = {id(p) for p in model.parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if strange := sum(id(p) not in own for p in given):
        raise CoatConfigError(
            f"optimizer: got {type(optimizer).__name__} over {len(given)} parameters of which {strange} are not the "
            "model's, accepted: one that was built over parameters of this model, after it was converted or copied"
        )


def check_patched(model: torch.nn.Module, coat: CoatConfig) -> None:
    """Refuse a block that says another thing than the model does."""
    patched = is_patched(model)
    if coat.activation.enabled and not patched:
        raise CoatConfigError(
            f"coat.activation.enabled: got true, but no module of {type(model).__name__} is patched; accepted: call "
            "megatron_patches.patch_model(model, config) first, or megatron_patches.initialize instead of this, or set "
            "it to false"
        )
    if patched and not coat.activation.enabled:
        raise CoatConfigError(
            "coat.activation.enabled: got false, but the model is patched; accepted: true, or an unpatched model"
        )


def check_effect(coat: CoatConfig | None, optimizer: Any) -> None:
    """Refuse a block beside which nothing is compressed: a training in BF16 that its user takes for another.

    Args:
        optimizer: the optimizer, or its name in the configuration; None where there is none.
    """
    if coat is None or coat.activation.enabled or optimizer in (None, "CoatAdamW") or isinstance(optimizer, CoatAdamW):
        return
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
    raise CoatConfigError(
        f'coat: got a block that compresses nothing (activation.enabled is false, the optimizer is "{name}"), '
        'accepted: "optimizer": {"type": "CoatAdamW"}, activation.enabled true, or no block'
    )


def is_patched(model: torch.nn.Module) -> bool:
    """Whether some module of a model runs the flow."""
    return any(getattr(type(m), "coat_patched", False) for m in model.modules())
