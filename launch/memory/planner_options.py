"""Options of ``planner.py``; importing them imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launch.common.command_line import ConfiguredOptions, LocalPath, option


@dataclass(kw_only=True)
class PlannerOptions(ConfiguredOptions):
    """What a training run needs of a GPU's memory, whether it fits, the largest micro-batch, and
    which ZeRO stages and states fit beside it. Needs no GPU and no data.
    """

    model: LocalPath = option(group="model", metavar="FILE")
    """a path, a name such as llama2-7b, or a folder: of Hugging Face, or a
    checkpoint
    """
    deepspeed_config: LocalPath = option(
        "zero2", flags=("--deepspeed_config", "--deepspeed-config"), metavar="FILE"
    )
    """DeepSpeed JSON: a path, or a name such as zero2-bf16"""
    library: Literal["megatron", "transformers"] = option("megatron", group="model")
    """what builds the model: Megatron-core, as in pretrain.py, or transformers, as in a
    Trainer's program
    """
    lora: int | None = option(None, group="model", metavar="RANK", least=1)
    """with transformers: adapters of this rank on all linears of the layers, by PEFT;
    all other weights are frozen
    """
    seq_length: int | None = option(None, group="model", metavar="N", least=1)
    """tokens of a sample"""
    json: bool = option(False)
    """print plain values: sizes in bytes"""
