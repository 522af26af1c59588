"""Models of transformers as the planner sees them, and the configurations of their programs."""

from __future__ import annotations

from typing import Any

from coat_dist import CoatConfigError
from coat_dist.hf.saved import OnPaper
from launch.common.find_config import read_config
from launch.convert.config_json import SIZES
from launch.model.model_config import ModelConfig, described_model


def read_model(path: str, seq_length: int | None) -> tuple[OnPaper, ModelConfig]:
    """The model of ``--model``, and its sizes as far as the planner reads them.

    Raises:
        CoatConfigError: transformers knows no such model.
    """
    try:
        library = OnPaper(path)
    except (OSError, ValueError) as problem:
        accepted = (
            "a folder with the config.json of a causal language model of transformers, or that file"
        )
        raise CoatConfigError(f"--model: got {path}, accepted: {accepted} ({problem})") from None
    names = {**SIZES, "num_key_value_heads": "num_query_groups", "head_dim": "head_size"}
    sizes = {ours: getattr(library.config, theirs, None) for theirs, ours in names.items()}
    experts = (
        getattr(library.config, key, None)
        for key in ("num_local_experts", "num_experts", "n_routed_experts")
    )
    sizes |= {
        "seq_length": seq_length or sizes["seq_length"],
        "num_moe_experts": next(filter(None, experts), None),
    }
    tied = "lm_head.weight" not in library.shapes
    return library, described_model({**sizes, "vocab_multiple": 1, "tie_embeddings": tied})


def read_settings(given: str, hidden_size: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a program, with what the Trainer puts in place of "auto"."""
    filled: dict[str, Any] = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
        "train_micro_batch_size_per_gpu": "auto",  # the planner's own
    }

    def fill(block: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in block.items():
            if isinstance(value, dict):
                found[key] = fill(value)
            elif value != "auto" or key in filled:
                found[key] = filled[key] if value == "auto" else value
        return found

    settings = fill(read_config("--deepspeed_config", given, "deepspeed"))
    settings["bf16"] = {"enabled": True, **settings.get("bf16", {})}
    return {key: value for key, value in settings.items() if key not in ("fp16", "scheduler")}
