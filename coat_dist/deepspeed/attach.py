"""What ``coat_dist.initialize`` changes on a DeepSpeed engine, but for the step; a second time it changes nothing."""

from __future__ import annotations

from typing import Any

from ..checkpoint.native_load import check_native_loads
from ..checkpoint.universal_load import enable_universal_load
from ..checkpoint.zero_partitions import is_zero
from ..optim.adamw import CoatAdamW
from .coat_accessors import register
from .deepspeed_accessors import answer_deepspeeds_accessors
from .master_weights import check_master_weights, enable_remainders
from .round_robin import relink

__all__ = ["attach"]


def attach(engine: Any) -> None:
    """Correct and extend an engine, by what its optimizer is, wherever that came from (JSON, an object, a callable).

    Of any optimizer: links of parameters under ``round_robin_gradients``. Of torch's Adam and AdamW, where universal
    loading is configured, and of CoatAdamW: loading of universal checkpoints. All else is for CoatAdamW only.

    Raises:
        ValueError: the optimizer's options do not fit what ZeRO hands it.
    """
    zero = engine.optimizer
    relink(zero)
    register(zero)
    ours = isinstance(getattr(zero, "optimizer", None), CoatAdamW) and is_zero(zero)
    if ours:
        check_master_weights(zero)
        enable_remainders(zero)
        answer_deepspeeds_accessors(zero)
        check_native_loads(engine)
    if is_zero(zero) and (ours or engine.load_universal_checkpoint()):
        enable_universal_load(engine)
