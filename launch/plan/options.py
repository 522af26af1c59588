"""Options of ``planner.py``; importing them imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from launch.command_line import LocalPath, RunOptions, option, whole_number

__all__ = ["ConfiguredOptions", "PlannerOptions"]

_settings = partial(option, None, group="in place of the configuration's")


@dataclass(kw_only=True)
class ConfiguredOptions(RunOptions):
    """Options of programs that plan or measure."""

    model_override: list[str] = option([], group="model", metavar="KEY=VALUE", action="extend")
    """replace values of the description"""
    deepspeed_config: LocalPath = option(
        "zero2",
        flags=("--deepspeed_config", "--deepspeed-config"),
        metavar="FILE",
        meant="config ds-config",
    )
    """DeepSpeed JSON: a path, or a name such as zero2-bf16"""
    vocab_size: int | None = option(None, group="model", metavar="N", least=1)
    """where the model names none"""
    accumulation: int | None = option(None, metavar="N", least=1)
    """forward passes of a step, in place of the configuration's"""
    log_level: Literal["debug", "info", "warning", "error"] = option("info")
    """how much the program and libraries print"""


@dataclass(kw_only=True)
class PlannerOptions(ConfiguredOptions):
    """What a training run needs of a GPU's memory, whether it fits, the largest micro-batch, with
    the "coat" block and without, and how long a step takes. Needs no GPU and no data.
    """

    model: LocalPath = option(group="model", metavar="FILE", meant="model-config")
    """a path, a name such as llama2-7b, or a folder: of Hugging Face, of convert_hf.py, a
    checkpoint
    """
    library: Literal["megatron", "transformers"] = option("megatron", group="model")
    """what builds the model: Megatron-core, as in pretrain.py, or transformers, as in a
    Trainer's program
    """
    seq_length: int | None = option(None, group="model", metavar="N", least=1)
    """tokens of a sample"""
    zero_stage: int | None = _settings(type=whole_number, choices=[1, 2, 3], meant="stage zero")
    """ZeRO stage"""
    attention: Literal["bf16", "fp8"] | None = _settings(meant="attention-backend")
    """what attention keeps"""
    loss: Literal["chunked", "kept", "plain"] | None = _settings()
    """whether all logits are held"""
    json: bool = option(False)
    """print plain values: sizes in bytes, times in seconds"""
