"""The settings that are refused. A row stands here where without it a run would train wrongly in
silence, lose data or hang; what DeepSpeed refuses itself is left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .config_errors import Problem, got

ZERO = "zero_optimization"
OFFLOAD = f"{ZERO}.offload_optimizer"


class Row(NamedTuple):
    """One setting that is refused."""

    key: str
    takes: tuple[Any, ...] | Callable[[Any], bool]
    """The accepted values."""
    accepted: str
    """What to write instead, and why where that helps; facts in braces."""
    when: str = "ours"
    """The fact (an attribute of ``Facts``) with which the row applies."""
    absent: Any = None
    """What an absent key counts as."""


def refused(rows: Iterable[Row], facts: Any) -> Iterator[Problem]:
    """The problems that rows find in :class:`coat_dist.settings.Facts`."""
    for row in rows:
        if getattr(facts, row.when):
            value = facts.values.get(row.key, row.absent)
            accepts = row.takes(value) if callable(row.takes) else value in row.takes
            if not accepts:
                yield Problem(row.key, got(value), row.accepted.format(f=facts))


OFF = (None, False)
ON_GPU = (None, "none")
_REMAINDER = 'master_weights "bf16_remainder"'
_CODES = (
    '"codes", also of a given CoatAdamW: DeepSpeed reads states as they are kept; universal '
    "checkpoints hold fp32 moments"
)
_ON_DISK = (
    "absent: checkpoints are written by torch.save, with checksums, and are on disk when "
    "save_checkpoint returns"
)
_LATE = "with pipeline stages (gradients are reduced after the last micro-batch)"

TYPES = (
    # DeepSpeed takes "3" for 3; the rows below compare.
    Row(f"{ZERO}.stage", lambda v: not isinstance(v, str | bool), "0, 1, 2 or 3"),
    # DeepSpeed does not clip by what is negative or no number.
    Row(
        "gradient_clipping",
        lambda v: type(v) in (int, float) and v >= 0,
        "a number >= 0",
        absent=0.0,
    ),
    # DeepSpeed reads nothing of a block without a name.
    Row("scheduler.type", lambda v: v is not None, "the name of a schedule", "schedules"),
)
"""Types and ranges, which are looked at first. Types of other keys: ``known_keys.py``."""

ROWS = (
    Row(
        "optimizer.type",
        (None, "CoatAdamW"),
        '"CoatAdamW" when the block has "coat.optimizer" (remove one of the two)',
        "foreign_type",
    ),
    Row(
        "optimizer.params.adam_w_mode",
        (None, True),
        "true; drop it: CoatAdamW's weight decay is always decoupled",
        "by_name",
    ),
    Row("optimizer.params.capturable", OFF, f"false with {OFFLOAD}", "hosted"),
    Row("optimizer.params.checkpoint", (None, "codes"), _CODES, "compressed"),
    Row("optimizer.params.checkpoint", (), _CODES, "exports"),
    # Files that are written behind a save's back may be incomplete when it returns.
    Row("checkpoint.writer", (None,), _ON_DISK),
    Row("datastates_ckpt", OFF, _ON_DISK),
    Row(
        "checkpoint.use_node_local_storage",
        OFF,
        "false: all ranks save into one folder, which all nodes share",
    ),
    # For CoatAdamW this project loads universal checkpoints itself.
    Row(
        "checkpoint.load_universal",
        OFF,
        f"false with {ZERO}.stage 3 and tensor parallelism {{f.tp}}: DeepSpeed does not slice "
        "universal checkpoints over TP there; use stage 1 or 2, or CoatAdamW",
        "baseline_tp3",
    ),
    Row(
        f"{ZERO}.stage",
        (),
        "1, 2 or 3 with {f.half}.enabled: stage 0 steps on zero gradients while the engine is "
        "built, and with fp16 hands out states and weights that nothing here was written for",
        "trains_at_0",
    ),
    *(
        Row(f"{ZERO}.{key}", OFF, "false: it would round what is rounded here already")
        for key in (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        )
    ),
    # DeepSpeed's groups are consecutive ranks, whatever these hold.
    Row(
        f"{ZERO}.zero_hpz_partition_size",
        (None, 0, 1),
        "1 with tensor parallelism {f.tp}",
        "tensor_parallel",
    ),
    Row(
        f"{ZERO}.elastic_checkpoint",
        OFF,
        "false with CoatAdamW: it merges raw optimizer state across ranks",
        "compressed",
    ),
    # "cpu" is state_device="cpu"; what else keeps the optimizer's states on the CPU steps there.
    Row(f"{OFFLOAD}.device", (*ON_GPU, "cpu"), '"cpu" or "none" with CoatAdamW', "compressed"),
    Row(
        f"{OFFLOAD}.device",
        ON_GPU,
        f'"none", or "cpu" with {_REMAINDER}: fp32 master weights stay on the GPU',
        "fp32_masters",
    ),
    Row(f"{OFFLOAD}.ratio", (None, 1), "1 with CoatAdamW", "hosted"),
    Row(f"{OFFLOAD}.super_offload", OFF, "false with CoatAdamW", "compressed"),
    Row(
        f"{ZERO}.cpu_offload", OFF, "false with CoatAdamW; offload_optimizer instead", "compressed"
    ),
    Row(f"{ZERO}.zenflow", (None,), "absent with CoatAdamW", "compressed"),
    # master_weights and DeepSpeed's keys have to say the same: each alone would lose the lower 16
    # bits.
    Row(
        "bf16.bf16_master_weights_and_grads",
        OFF,
        f"false with CoatAdamW, or true with {_REMAINDER}: bfloat16 alone loses small updates",
        "fp32_masters",
    ),
    *(
        Row(f"bf16.{key}", (True,), f"true with {_REMAINDER}", "remainder")
        for key in ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")
    ),
    # Weights and remainders are one master weight, on one device.
    Row(f"{ZERO}.offload_param.device", ON_GPU, f'"none" with {_REMAINDER}', "remainder"),
    Row(f"{ZERO}.cpu_offload_param", OFF, f"false with {_REMAINDER}", "remainder"),
    Row("fp16.enabled", OFF, "false with coat.activation.enabled: the flow runs in bf16", "flow"),
    Row(
        "expert_parallel.enabled",
        OFF,
        "false with coat.activation.enabled: DeepSpeed's AutoEP replaces experts that run the flow",
        "flow",
    ),
    Row(
        "coat.activation.weights",
        ("on_use",),
        f'"on_use" with {ZERO}.stage 3: a cache would hold whole weights on every rank',
        "flow3",
    ),
    Row(
        "coat.activation.cuda_graphs",
        OFF,
        f"false with {ZERO}.stage 3: graphs read weights where they lie, and these come and go",
        "flow3",
    ),
    Row(
        "coat.activation.frozen_weights",
        ("bf16",),
        f'"bf16" with {ZERO}.stage 3, which divides BF16 weights and no codes over ranks',
        "flow3",
    ),
    Row(
        "coat.activation.compile",
        OFF,
        f"false with {ZERO}.stage 3, whose hooks on every module break the compiler's graphs",
        "flow3",
    ),
    Row(
        "coat.activation.wgrad",
        ("grad",),
        '"grad" under DeepSpeed, whose parameters have no main_grad',
        "flow",
    ),
)
"""What CoatAdamW or the flow cannot honour."""

PARALLEL = (
    Row(f"{ZERO}.stage", (1,), f"1 {_LATE}", "staged"),
    Row(f"{ZERO}.overlap_comm", OFF, f"false {_LATE}", "staged"),
    Row(f"{OFFLOAD}.device", ON_GPU, '"none" with pipeline stages', "staged"),
    Row("fp16.enabled", OFF, "false with pipeline stages (bf16 needs no loss scaling)", "staged"),
    Row(f"{ZERO}.stage", (1, 2), "1 or 2 with expert parallelism", "divided"),
    Row(f"{OFFLOAD}.device", ON_GPU, '"none" with expert parallelism', "divided"),
    Row(f"{ZERO}.offload_param.device", ON_GPU, '"none" with expert parallelism', "divided"),
    Row(f"{ZERO}.round_robin_gradients", OFF, "false with expert parallelism", "divided"),
)
"""What Megatron's pipeline stages, or experts that ranks divide, cannot be trained with."""
