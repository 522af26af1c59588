"""Whether a block, a model and an optimizer that are given together belong together."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch

from ..config import CoatConfig, CoatConfigError
from ..optim import CoatAdamW
from ..ranks import rank_and_world

__all__ = ["check_foreign", "check_its_parameters", "check_name", "check_patched", "is_patched", "warn_of_no_effect"]


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


def warn_of_no_effect(coat: CoatConfig | None, optimizer: str | None) -> None:
    """Once, where there is a block and nothing is compressed. For the function that ``initialize`` calls."""
    if coat is None or coat.activation.enabled or optimizer in (None, "CoatAdamW") or rank_and_world()[0] != 0:
        return
    warnings.warn(
        f'coat: nothing is compressed, as activation.enabled is false and the optimizer is "{optimizer}"; FP8 '
        'moments need "optimizer": {"type": "CoatAdamW"}',
        stacklevel=4,
    )


def is_patched(model: torch.nn.Module) -> bool:
    """Whether some module of a model runs the flow."""
    return any(getattr(type(m), "coat_patched", False) for m in model.modules())
