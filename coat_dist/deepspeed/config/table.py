"""The table of DeepSpeed settings that are refused, each with its reason and what is accepted.

A row stands here where without it a run would train wrongly in silence, lose data or hang; what
DeepSpeed refuses itself is left to it. A reason that helps the user is part of the message; others
stand beside the row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...config import CoatConfig, Problem, look_up, without_comments
from ...config_errors import got
from ...optim import CoatAdamW

__all__ = [
    "EXPERTS",
    "OFFLOAD",
    "RULES",
    "STAGES",
    "TYPES",
    "Facts",
    "Key",
    "as_read",
    "refused",
    "with_remainders",
]

_SIZES = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
_ZERO = "zero_optimization"
OFFLOAD = f"{_ZERO}.offload_optimizer"
_UNSET = ("bf16", "bfloat16", "aio")
"""Keys that may be null, which means to DeepSpeed that they are not given."""
_MODELS = ("zero_optimization", "fp16", "bf16", "tensor_parallel", "compile")
"""Blocks in which DeepSpeed drops what is "auto"."""


def as_read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without comments and what DeepSpeed reads as not given: null of some keys,
    and "auto", which programs on top of it fill in. The block "bfloat16", which DeepSpeed ignores
    beside "bf16", is "bf16".
    """

    def without_auto(value: Any) -> Any:
        return (
            {k: without_auto(v) for k, v in value.items() if v != "auto"}
            if isinstance(value, Mapping)
            else value
        )

    config = without_comments(config)
    given = {key: value for key, value in config.items() if value is not None or key not in _UNSET}
    old = given.pop("bfloat16", None)
    given |= {} if old is None or "bf16" in given else {"bf16": old}
    return given | {key: without_auto(given[key]) for key in _MODELS if key in given}


@dataclass(frozen=True)
class Facts:
    """What a row of the table looks at."""

    config: Mapping[str, Any]  # DeepSpeed's configuration, of `as_read`
    coat: CoatConfig | None = None
    # An object that is given beside the configuration.
    optimizer: torch.optim.Optimizer | None = None
    tp: int = 1
    ep: int = 1  # ranks that divide the experts
    pipeline: bool = False  # the model is a PipelineModule
    frozen: bool = False  # no parameter of the model requires a gradient

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

    @property
    def half(self) -> str | None:
        """The block that turns 16-bit training on."""
        return next((block for block in ("bf16", "fp16") if self[f"{block}.enabled"]), None)

    @property
    def only_evaluates(self) -> bool:
        """Stage 0 with the CoatAdamW that the configuration names: the engine is built without
        it, to be evaluated.
        """
        nothing_to_train = self.half is not None or self.frozen
        return self.compressed and self.optimizer is None and self.stage == 0 and nothing_to_train

    @property
    def hosted(self) -> bool:
        """States are to be kept in host memory."""
        return self.compressed and self[f"{OFFLOAD}.device"] == "cpu"

    @property
    def remainder(self) -> bool:
        """Master weights are going to be bfloat16 weights and remainders."""
        if self.ours is not None:
            # All: step/master_weights.py.
            return self.ours.param_groups[0]["master_weights"] == "bf16_remainder"
        named = self["optimizer.params.master_weights"] or (
            self.coat and self.coat.optimizer.master_weights
        )
        return self.compressed and named == "bf16_remainder"

    def __getitem__(self, key: str) -> Any:
        """The configuration's value at a key of the table."""
        return look_up(self.config, key)


def with_remainders(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration, with 16-bit remainders where it offloads states and says nothing of master
    weights: only remainders can be in host memory.
    """
    facts, keys = Facts(as_read(config)), ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    named = (
        "optimizer.params.master_weights",
        "coat.optimizer.master_weights",
        *(f"bf16.{key}" for key in keys),
    )
    if not (facts.hosted and facts["bf16.enabled"]) or any(facts[key] is not None for key in named):
        return config
    option = {"master_weights": "bf16_remainder"}
    config = {**config, "bf16": {**facts["bf16"], **dict.fromkeys(keys, True)}}
    if isinstance(block := facts["coat.optimizer"], Mapping):
        return config | {"coat": {**config["coat"], "optimizer": {**block, **option}}}
    optimizer = config["optimizer"]
    return config | {
        "optimizer": {**optimizer, "params": {**(optimizer.get("params") or {}), **option}}
    }


class Key(NamedTuple):
    """One row."""

    name: str
    accepted: str  # what to write instead, and why where that is not plain; facts in braces
    refused: Callable[[Any, Facts], object]  # of the value, which is None where there is none


def refused(rows: Iterable[Key], facts: Facts) -> Iterator[Problem]:
    """The problems of a configuration by these rows."""
    for row in rows:
        if row.refused(value := facts[row.name], facts):
            yield Problem(row.name, got(value), row.accepted.format(f=facts))


def _if(fact: str, test: Callable[[Any], object] = bool) -> Callable[[Any, Facts], object]:
    return lambda v, f: getattr(f, fact) and test(v)


def _on(value: Any, facts: Any = None) -> bool:
    return bool(value)


def _off_gpu(value: Any, facts: Any = None) -> bool:
    return value not in (None, "none")


def _given(value: Any, facts: Any = None) -> bool:
    return value is not None


_ON_DISK = (
    "absent: checkpoints are written by torch.save, with checksums, and are on disk when "
    "save_checkpoint returns"
)
_REMAINDER = 'master_weights "bf16_remainder"'

TYPES = (
    # DeepSpeed takes "3" for 3; other rows compare.
    Key(f"{_ZERO}.stage", "0, 1, 2 or 3", lambda v, f: isinstance(v, str | bool)),
    *(
        Key(name, "an integer >= 1", lambda v, f: v is not None and (type(v) is not int or v < 1))
        for name in _SIZES
    ),
    # DeepSpeed does not clip by what is negative or no number.
    Key(
        "gradient_clipping",
        "a number >= 0",
        lambda v, f: "gradient_clipping" in f.config and not (type(v) in (int, float) and v >= 0),
    ),
    # DeepSpeed reads nothing of a block without a name.
    Key(
        "scheduler.type", "the name of a schedule", lambda v, f: f["scheduler.params"] and v is None
    ),
)
"""Types and ranges, which are looked at first."""

RULES = (
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
    # CoatAdamW has a loader of its own.
    Key(
        "checkpoint.load_universal",
        f"false with {_ZERO}.stage 3 and tensor parallelism {{f.tp}}: DeepSpeed does not slice "
        "universal checkpoints "
        "over TP there; use stage 1 or 2, or CoatAdamW",
        lambda v, f: v and f.stage == 3 and f.tp > 1 and not f.compressed,
    ),
    # Files that are written behind a save's back may be incomplete when it returns.
    Key("checkpoint.writer", _ON_DISK, _given),
    Key("datastates_ckpt", _ON_DISK, lambda v, f: v not in (None, False)),
    Key(
        "checkpoint.use_node_local_storage",
        "false: all ranks save into one folder, which all nodes share",
        _on,
    ),
    *(
        Key(
            f"{_ZERO}.zero_quantized_{what}",
            "false: it would round to INT8 or INT4 what is rounded here already",
            _on,
        )
        for what in ("weights", "nontrainable_weights", "gradients")
    ),
    # DeepSpeed's groups are consecutive ranks, whatever these hold.
    Key(
        f"{_ZERO}.zero_hpz_partition_size",
        "1 with tensor parallelism {f.tp}",
        lambda v, f: f.tp > 1 and (v or 1) > 1,
    ),
    Key(
        f"{_ZERO}.elastic_checkpoint",
        "false with CoatAdamW: it merges raw optimizer state across ranks",
        _if("compressed"),
    ),
    # "cpu" is state_device="cpu"; what else keeps the optimizer's states on the CPU steps there.
    Key(
        f"{OFFLOAD}.device",
        '"cpu" or "none" with CoatAdamW',
        _if("compressed", lambda v: v not in (None, "none", "cpu")),
    ),
    Key(
        f"{OFFLOAD}.device",
        f'"none", or "cpu" with {_REMAINDER}: fp32 master weights stay on the GPU',
        lambda v, f: f.hosted and not f.remainder,
    ),
    Key(f"{OFFLOAD}.ratio", "1 with CoatAdamW", _if("hosted", lambda v: v not in (None, 1))),
    Key("optimizer.params.capturable", f"false with {OFFLOAD}", _if("hosted")),
    Key(
        "optimizer.params.checkpoint",
        '"codes", also of a given CoatAdamW: DeepSpeed reads states as they are kept; '
        "universal checkpoints hold fp32 moments",
        lambda v, f: f.compressed and (v or getattr(f.ours, "checkpoint", "codes")) != "codes",
    ),
    Key(f"{OFFLOAD}.super_offload", "false with CoatAdamW", _if("compressed")),
    Key(
        f"{_ZERO}.cpu_offload", "false with CoatAdamW; offload_optimizer instead", _if("compressed")
    ),
    Key(f"{_ZERO}.zenflow", "absent with CoatAdamW", _if("compressed", _given)),
    Key(
        f"{_ZERO}.stage",
        "1, 2 or 3 with {f.half}.enabled: stage 0 steps on zero gradients while the engine is "
        "built, and with fp16 "
        "hands out states and weights that nothing here was written for",
        lambda v, f: (
            f.compressed
            and (f.ours is not None or f.pipeline)
            and f.stage == 0
            and f.half is not None
        ),
    ),
    # master_weights and DeepSpeed's keys have to say the same: each alone would lose the lower 16
    # bits.
    Key(
        "bf16.bf16_master_weights_and_grads",
        f"false with CoatAdamW, or true with {_REMAINDER}: bfloat16 alone loses small updates",
        lambda v, f: v and f.compressed and not f.remainder,
    ),
    *(
        Key(f"bf16.{name}", f"true with {_REMAINDER}", _if("remainder", operator.not_))
        for name in ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")
    ),
    # Weights and remainders are one master weight, on one device.
    Key(f"{_ZERO}.offload_param.device", f'"none" with {_REMAINDER}', _if("remainder", _off_gpu)),
    *(
        Key(f"{_ZERO}.{name}", f"false with {_REMAINDER}", _if("remainder"))
        for name in ("cpu_offload_param", "cpu_offload_params")
    ),
    Key("fp16.enabled", "false with coat.activation.enabled: the flow runs in bf16", _if("flow")),
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
"""Settings that CoatAdamW or the flow cannot honour."""

_LATE = "(gradients stay on a stage until the last micro-batch, and are reduced then)"
STAGES = (
    Key(f"{_ZERO}.stage", f"1 with pipeline stages {_LATE}", lambda v, f: v != 1),
    Key(f"{_ZERO}.overlap_comm", f"false with pipeline stages {_LATE}", _on),
    Key(f"{OFFLOAD}.device", '"none" with pipeline stages', _off_gpu),
    Key("fp16.enabled", "false with pipeline stages (bf16 needs no loss scaling)", _on),
)
"""Settings that Megatron's pipeline stages cannot honour."""

EXPERTS = (
    Key(f"{_ZERO}.stage", "1 or 2 with expert parallelism", lambda v, f: v not in (1, 2)),
    *(
        Key(f"{_ZERO}.offload_{what}.device", '"none" with expert parallelism', _off_gpu)
        for what in ("optimizer", "param")
    ),
    Key(f"{_ZERO}.round_robin_gradients", "false with expert parallelism", _on),
)
"""Settings that experts divided over ranks cannot honour."""
