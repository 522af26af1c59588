"""Models of transformers as the planner sees them, and the configurations of their programs."""

from __future__ import annotations

from math import prod
from typing import Any

from coat_dist import CoatConfigError
from launch.common.find_config import read_config
from launch.model.model_config import ModelConfig, described_model

from .paper import OnPaper


def read_model(
    path: str, seq_length: int | None, lora: int | None = None
) -> tuple[OnPaper, ModelConfig, str | None]:
    """The model of ``--model``, its sizes as far as the planner reads them, and a line about what
    is not counted.

    Raises:
        CoatConfigError: transformers knows no such model; ``lora`` for one with experts.
    """
    try:
        library = OnPaper(path, lora)
    except (OSError, ValueError) as problem:
        accepted = (
            "a folder with the config.json of a model of transformers that reads tokens, or that "
            "file"
        )
        why = str(problem).partition("\n")[0]
        raise CoatConfigError(f"--model: got {path}, accepted: {accepted} ({why})") from None
    config, text = library.config, library.text
    hidden, heads = text.hidden_size, _number(text, "num_attention_heads") or 1
    shapes = {name: s for name, s in library.all_shapes.items() if ".layers." in name}
    if lora and any(len(s) > 2 for s in shapes.values()):
        raise CoatConfigError(f"--lora: got {lora}, accepted: it for models without experts")
    widest = max(prod(s) for s in shapes.values() if len(s) < 3)
    sizes = {
        "num_layers": library.layers,
        "hidden_size": hidden,
        "ffn_hidden_size": _number(text, "intermediate_size") or widest // hidden,
        "num_attention_heads": heads,
        "head_size": _number(text, "head_dim") or hidden // heads,
        "vocab_size": text.vocab_size,
        "seq_length": seq_length or _number(text, "max_position_embeddings"),
    }
    note = None
    if config.get_text_config() is not config and len(config.sub_configs) > 1:
        note = (
            "samples are planned as texts: what images and sounds of a sample take is not counted"
        )
    model = described_model({**sizes, "vocab_multiple": 1, "tie_embeddings": library.tied})
    return library, model, note


def _number(config: Any, key: str) -> int | None:
    """A size that is one for all layers."""
    found = getattr(config, key, None)
    return found if isinstance(found, int) else None


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
            if key == "coat":  # whose "auto" is its own
                found[key] = value
            elif isinstance(value, dict):
                found[key] = fill(value)
            elif value != "auto" or key in filled:
                found[key] = filled[key] if value == "auto" else value
        return found

    settings = fill(read_config("--deepspeed_config", given, "deepspeed"))
    settings["bf16"] = {"enabled": True, **settings.get("bf16", {})}
    return {key: value for key, value in settings.items() if key not in ("fp16", "scheduler")}
