"""The table of DeepSpeed settings that are refused, each with its reason and what is accepted.

A reason that helps the user is part of the message; others stand beside the row. Types of further keys are asked of
DeepSpeed (``schema.py``).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...config import CoatConfig, Problem, look_up, without_comments
from ...config_errors import got
from ...optim import CoatAdamW
from ...ranks import rank_and_world
from .schema import is_dtype, is_number, schedule_class

__all__ = ["EXPERTS", "RULES", "STAGES", "TYPES", "Facts", "Key", "as_read", "refused"]

_UNSET = (
    *("bf16", "bfloat16", "aio", "gradient_accumulation_steps"),
    *("train_batch_size", "train_micro_batch_size_per_gpu"),
)
"""Keys that may be null, which means to DeepSpeed that they are not given."""
_MODELS = ("zero_optimization", "fp16", "bf16", "bfloat16", "tensor_parallel", "compile")
"""Blocks in which DeepSpeed drops what is "auto"."""


def as_read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without comments and what DeepSpeed reads as not given: null of some keys, and "auto", which
    programs on top of it fill in."""

    def without_auto(value: Any) -> Any:
        return {k: without_auto(v) for k, v in value.items() if v != "auto"} if isinstance(value, Mapping) else value

    config = without_comments(config)
    given = {key: value for key, value in config.items() if value is not None or key not in _UNSET}
    return given | {key: without_auto(given[key]) for key in _MODELS if key in given}


@dataclass(frozen=True)
class Facts:
    """What a row of the table looks at."""

    config: Mapping[str, Any]
    """DeepSpeed's configuration, of :func:`as_read`."""
    coat: CoatConfig | None = None
    optimizer: torch.optim.Optimizer | None = None
    """An object that is given beside the configuration."""
    tp: int = 1
    cp: int = 1
    stages: int = 1
    """Megatron's pipeline stages."""
    ep: int = 1
    """Ranks that divide the experts."""

    @property
    def ours(self) -> CoatAdamW | None:
        """The CoatAdamW that is given."""
        return self.optimizer if isinstance(self.optimizer, CoatAdamW) else None

    @property
    def compressed(self) -> bool:
        """The optimizer is a CoatAdamW, given or named in the configuration."""
        return self.ours is not None or self["optimizer.type"] == "CoatAdamW"

    @property
    def block(self) -> bool:
        """The block has options of the optimizer."""
        return self.coat is not None and "optimizer" in self.coat.model_fields_set

    @property
    def flow(self) -> bool:
        """Layers run the FP8 flow."""
        return self.coat is not None and self.coat.activation.enabled

    @property
    def stage(self) -> int:
        return self["zero_optimization.stage"] or 0

    world = property(lambda self: rank_and_world()[1])

    @property
    def bf16(self) -> str:
        """The name of the block that DeepSpeed reads; it passes over the older one beside the newer one."""
        return "bfloat16" if "bfloat16" in self.config and "bf16" not in self.config else "bf16"

    @property
    def half(self) -> str | None:
        """The block that turns 16-bit training on."""
        return next((block for block in (self.bf16, "fp16") if self[block + ".enabled"]), None)

    @property
    def only_evaluates(self) -> bool:
        """Stage 0 with the CoatAdamW that the configuration names: the engine is built without it, to be evaluated."""
        return self.compressed and self.optimizer is None and self.stage == 0 and self.half is not None

    @property
    def remainder(self) -> bool:
        """Master weights are going to be bfloat16 weights and remainders."""
        if self.ours is not None:
            return self.ours.param_groups[0]["master_weights"] == "bf16_remainder"  # all: deepspeed/master_weights.py
        named = self["optimizer.params.master_weights"] or (self.coat and self.coat.optimizer.master_weights)
        return self.compressed and named == "bf16_remainder"

    @property
    def option(self) -> str:
        """What the user calls it."""
        return f'{"CoatAdamW " if self.ours is not None else "coat.optimizer."}master_weights "bf16_remainder"'

    def __getitem__(self, key: str) -> Any:
        """The configuration's value at a key of the table."""
        return look_up(self.config, key.replace("{bf16}", self.bf16))


class Key(NamedTuple):
    """One row."""

    name: str
    """Dotted; ``{bf16}`` is the name of DeepSpeed's block."""
    accepted: str
    """What to write instead, and why where that is not plain; facts in braces."""
    refused: Callable[[Any, Facts], object]
    """Called with the value, which is None where there is none."""


def refused(rows: Iterable[Key], facts: Facts) -> Iterator[Problem]:
    """The problems of a configuration by these rows."""
    for row in rows:
        if row.refused(value := facts[row.name], facts):
            yield Problem(row.name.format(bf16=facts.bf16), got(value), row.accepted.format(f=facts, bf16=facts.bf16))


def _on(value: Any, facts: Facts) -> bool:
    return bool(value)


def _given(value: Any, facts: Facts) -> bool:
    return value is not None


def _elsewhere(value: Any, facts: Facts) -> bool:
    return value not in (None, "none")


def _with(fact: str, test: Callable[[Any, Facts], object]) -> Callable[[Any, Facts], object]:
    return lambda v, f: getattr(f, fact) and test(v, f)


def _no_integer(least: int) -> Callable[[Any, Facts], object]:
    return lambda v, f: v is not None and (type(v) is not int or v < least)


def _no_object(value: Any, facts: Facts) -> bool:
    return value is not None and not isinstance(value, Mapping)


_ZERO = "zero_optimization"
_HPZ = f"{_ZERO}.zero_hpz_partition_size"
_CPU = ("cpu_offload_param", "cpu_offload_params")
_ON_DISK = "absent: checkpoints are written by torch.save, with checksums, and are on disk when save_checkpoint returns"

_PACKAGES = (
    ("tensorboard", "tensorboard", "tensorboard"),
    ("wandb", "wandb", "wandb"),
    ("comet", "comet_ml", "'comet_ml>=3.41.0'"),
)
"""DeepSpeed's monitors, the modules that it imports on rank 0 while the other ranks wait, and what pip calls them."""


def _without(module: str) -> Callable[[Any, Facts], object]:
    """Turned on without this module. A folder of that name without code, such as runs leave, is none."""

    def is_missing(value: Any, facts: Facts) -> bool:
        loaded = sys.modules.get(module)
        spec = importlib.util.find_spec(module) if loaded is None else loaded.__spec__
        return value is True and (loaded is None if spec is None else spec.origin is None)

    return is_missing


TYPES = (
    *(
        Key(name, "an object with its settings", _no_object)
        for name in ("optimizer.params", f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param")
    ),
    Key(f"{_ZERO}.stage", "0, 1, 2 or 3", lambda v, f: isinstance(v, bool) or v not in (None, 0, 1, 2, 3)),
    *(Key(name, "an integer >= 1", _no_integer(1)) for name in _UNSET[3:]),
    Key("tensor_parallel.autotp_size", "an integer >= 0", _no_integer(0)),
    Key(
        "gradient_clipping",
        "a number >= 0",
        lambda v, f: "gradient_clipping" in f.config and (not is_number(v) or not v >= 0),
    ),
    # Infinity, as Accelerate has it, is never.
    Key("steps_per_print", "a number but 0, or null", lambda v, f: v is not None and (not is_number(v) or v == 0)),
    Key("wall_clock_breakdown", "true or false", lambda v, f: v is None and "wall_clock_breakdown" in f.config),
    Key(
        "communication_data_type",
        '"fp16", "bf16", "fp32"',
        lambda v, f: v is not None and str(v).lower() not in ("fp16", "bf16", "fp32"),
    ),
    Key(
        "checkpoint.tag_validation",
        '"Ignore", "Warn", "Fail"',
        lambda v, f: v is not None and str(v).lower() not in ("ignore", "warn", "fail"),
    ),
    Key(
        "data_types.grad_accum_dtype",
        '"fp32", "fp16" or "bf16"',
        lambda v, f: v is not None and not is_dtype(v),
    ),
    # DeepSpeed reads nothing of a block without a name.
    Key(
        "scheduler.type",
        "one of DeepSpeed's schedules, or without ZeRO one of torch's; others as the argument lr_scheduler",
        lambda v, f: f["scheduler"] and (schedule_class(v, f.stage) is None if v else "type" not in f["scheduler"]),
    ),
    Key(
        "scheduler.params",
        "an object with the schedule's parameters, or {{}} for its defaults",
        lambda v, f: schedule_class(f["scheduler.type"], f.stage) and not isinstance(v, Mapping),
    ),
    Key("datastates_ckpt", _ON_DISK, lambda v, f: v not in (None, False)),
)
"""Types and ranges, looked at first: the other rows rely on them."""

_SETTINGS = (
    Key(
        "optimizer.type",
        '"CoatAdamW" when the block has "coat.optimizer" (remove one of the two)',
        lambda v, f: f.block and v not in (None, "CoatAdamW") and f.ours is None,
    ),
    Key(
        "optimizer.params.adam_w_mode",
        "true; drop it: CoatAdamW's weight decay is always decoupled",
        lambda v, f: f.compressed and f.optimizer is None and v not in (None, True),
    ),
    Key("fp16.enabled", "false beside {bf16}.enabled true", lambda v, f: v and f["{bf16}.enabled"] and not f.flow),
    # Both would split the same weights.
    Key(
        "tensor_parallel.autotp_size",
        "0 or 1 with Megatron tensor parallelism {f.tp}",
        lambda v, f: (v or 0) > 1 and f.tp > 1,
    ),
    # CoatAdamW has a loader of its own.
    Key(
        "checkpoint.load_universal",
        f"false with {_ZERO}.stage 3 and tensor parallelism {{f.tp}}: DeepSpeed does not slice universal checkpoints "
        "over TP there; use stage 1 or 2, or CoatAdamW",
        lambda v, f: v and f.stage == 3 and f.tp > 1 and not f.compressed,
    ),
    *(
        Key(f"{name}.enabled", f"false, or first: pip install {package}", _without(module))
        for name, module, package in _PACKAGES
    ),
    # Files that are written behind a save's back may be incomplete when it returns.
    Key("checkpoint.writer", _ON_DISK, _given),
    Key(
        "checkpoint.use_node_local_storage",
        "false with tensor parallelism {f.tp}: DeepSpeed then writes the model states of each node's first rank alone",
        lambda v, f: v and f.tp > 1,
    ),
)

# ZeRO++. Its formats round what is rounded here already, by kernels compiled on first use.
_ZERO_PLUS_PLUS = (
    Key(
        f"{_ZERO}.zero_quantized_weights",
        "false: weights would be rounded to INT8, by way of FP16, before they are used; coat.activation."
        "fp8_weight_gather gathers as many bytes and changes no result",
        _on,
    ),
    Key(
        f"{_ZERO}.zero_quantized_nontrainable_weights",
        "false: frozen weights would be kept in INT8, and checkpoints would have no others",
        _on,
    ),
    Key(
        f"{_ZERO}.zero_quantized_gradients",
        "false: gradients would be rounded to INT4 within a node and INT8 between nodes before they are summed",
        _on,
    ),
    Key(
        _HPZ,
        f"1, or {_ZERO}.stage 3: other stages divide no weights",
        lambda v, f: (v or 1) > 1 and f.stage != 3,
    ),
    # DeepSpeed's groups are consecutive ranks, whatever they hold.
    Key(
        _HPZ,
        "1 with tensor parallelism {f.tp}, whose ranks hold other parts of the model",
        lambda v, f: (v or 1) > 1 and f.stage == 3 and f.tp > 1,
    ),
    Key(
        _HPZ,
        "1, or a divisor of the number of ranks ({f.world})",
        lambda v, f: (v or 1) > 1 and f.stage == 3 and f.tp == 1 and f.world % min(v, f.world) != 0,
    ),
)

_COAT_ADAMW = (
    Key(
        f"{_ZERO}.elastic_checkpoint",
        "false with CoatAdamW: it merges raw optimizer state across ranks",
        _with("compressed", _on),
    ),
    # The other three keep the optimizer's states on the CPU as well.
    Key(
        f"{_ZERO}.offload_optimizer.device",
        '"none" with CoatAdamW: compressed moments are small enough to stay on the GPU',
        _with("compressed", _elsewhere),
    ),
    Key(f"{_ZERO}.offload_optimizer.super_offload", "false with CoatAdamW", _with("compressed", _on)),
    Key(f"{_ZERO}.cpu_offload", "false with CoatAdamW", _with("compressed", _on)),
    Key(f"{_ZERO}.zenflow", "absent with CoatAdamW", _with("compressed", _given)),
    Key(
        f"{_ZERO}.stage",
        "1, 2 or 3 with {f.half}.enabled: stage 0 steps on zero gradients while the engine is built, and with fp16 "
        "hands out states and weights that nothing here was written for",
        lambda v, f: f.ours is not None and f.stage == 0 and f.half is not None,
    ),
)

# ``master_weights`` and DeepSpeed's keys have to say the same: each alone would lose the lower 16 bits.
_MASTER_WEIGHTS = (
    Key(
        "{bf16}.bf16_master_weights_and_grads",
        "false with CoatAdamW, or true with {f.option}: bfloat16 alone loses small updates",
        lambda v, f: v and f.compressed and not f.remainder,
    ),
    *(
        Key(f"{{bf16}}.{name}", "true with {f.option}", lambda v, f: f.remainder and not v)
        for name in ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")
    ),
    Key(
        "data_types.grad_accum_dtype",
        f'"bf16" with {{f.option}} at {_ZERO}.stage 1, where fp32 sums mean fp32 weights (BF16_Optimizer); or '
        "stage 2 or 3",
        lambda v, f: f.remainder and f.stage == 1 and v in ("fp32", "float32", "float", "torch.float32"),
    ),
    Key(
        f"{_ZERO}.offload_param.device",
        '"none" with {f.option}: weights and remainders are one master weight, on one device',
        _with("remainder", _elsewhere),
    ),
    *(Key(f"{_ZERO}.{name}", "false with {f.option}", _with("remainder", _on)) for name in _CPU),
)

_FLOW = (
    Key("fp16.enabled", "false with coat.activation.enabled: the flow runs in bf16", _with("flow", _on)),
    Key(
        "coat.activation.weights",
        f'"on_use" with {_ZERO}.stage 3: a cache would hold whole weights on every rank',
        lambda v, f: f.flow and v == "cached" and f.stage == 3,
    ),
    Key(
        "coat.activation.cuda_graphs",
        f"false with {_ZERO}.stage 3: graphs read weights where they lie, and these come and go",
        lambda v, f: f.flow and v and f.stage == 3,
    ),
    Key(
        "coat.activation.wgrad",
        '"grad" under DeepSpeed, whose parameters have no main_grad',
        lambda v, f: f.flow and v == "main_grad",
    ),
)

RULES = (*_SETTINGS, *_ZERO_PLUS_PLUS, *_COAT_ADAMW, *_MASTER_WEIGHTS, *_FLOW)
"""Settings that CoatAdamW or the flow cannot honour."""

_ONCE = "(gradients stay on a stage until the last micro-batch, and are reduced then)"
STAGES = (
    Key(f"{_ZERO}.stage", f"1 with pipeline stages {_ONCE}", lambda v, f: v != 1),
    Key(f"{_ZERO}.overlap_comm", f"false with pipeline stages {_ONCE}", lambda v, f: v is True),
    Key(f"{_ZERO}.cpu_offload", "false with pipeline stages", _on),
    Key(f"{_ZERO}.offload_optimizer.device", '"none" with pipeline stages', _elsewhere),
    Key(f"{_ZERO}.zenflow", "absent with pipeline stages", _given),
    Key("fp16.enabled", "false with pipeline stages (bf16 needs no loss scaling)", lambda v, f: v is True),
    Key(
        "managed_gradient_accumulation",
        "true (its default) with pipeline stages: a step is gradient_accumulation_steps micro-batches",
        lambda v, f: v is False,
    ),
    Key("torch_autocast.enabled", "false with pipeline stages", lambda v, f: v is True),
    Key(
        "checkpoint.use_node_local_storage",
        "false with pipeline stages (DeepSpeed would write the model states of each node's first rank alone)",
        lambda v, f: v is True,
    ),
    Key(
        "flops_profiler.enabled",
        "false with pipeline stages (it watches the engine's forward, which does not run)",
        lambda v, f: v is True,
    ),
)
"""Settings that Megatron's pipeline stages cannot honour."""

EXPERTS = (
    Key(f"{_ZERO}.stage", "1 or 2 with expert parallelism", lambda v, f: v not in (1, 2)),
    *(
        Key(f"{_ZERO}.{name}", "true with expert parallelism", lambda v, f: v not in (None, True))
        for name in ("reduce_scatter", "contiguous_gradients")
    ),
    *(
        Key(f"{_ZERO}.{name}.device", '"none" with expert parallelism', _elsewhere)
        for name in ("offload_optimizer", "offload_param")
    ),
    Key(f"{_ZERO}.round_robin_gradients", "false with expert parallelism", _on),
)
"""Settings that experts divided over ranks cannot honour."""
