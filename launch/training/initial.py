"""What a run starts with: the model of ``--model``, the weights of ``--init-from``, and whether the two agree."""

from __future__ import annotations

import argparse

from coat_dist import CoatConfigError
from launch.data.blend import DataInfo
from launch.data.tokenizer import tokenizer_digest
from launch.hf.config_out import function_of
from launch.model.config import ModelConfig, described_model, load_model_config
from launch.weights import Weights, open_weights

__all__ = ["initial_weights", "tokenizer_warning"]


def initial_weights(args: argparse.Namespace) -> tuple[ModelConfig, Weights | None]:
    """The model, and the weights that a fresh start begins with.

    Raises:
        CoatConfigError: a model that the weights do not fit; names every key.
        CheckpointError: weights that cannot be used.
    """
    if args.init_from is None:
        return load_model_config(args.model, args.model_override), None
    weights = open_weights(args.init_from)
    if args.model is None:
        model = described_model(weights.model.model_dump(exclude_defaults=True), args.model_override)
    else:
        model = load_model_config(args.model, args.model_override)
        if model.vocab_size is None:
            model = model.with_vocab(weights.model.vocab_size or 0)
    ours, theirs = function_of(model), function_of(weights.model)
    wrong = [
        f"model.{key}: got {ours.get(key)!r}, accepted: {theirs.get(key)!r}, which {args.init_from} (--init-from) has"
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key)
    ]
    window = weights.model.sliding_window
    if window is not None and model.seq_length > window:
        wrong.append(f"model.seq_length: got {model.seq_length}, accepted: at most {window}, the window of --init-from")
    if wrong:
        raise CoatConfigError("\n".join(wrong))
    return model, weights


def tokenizer_warning(weights: Weights | None, prefix: str, info: DataInfo) -> str | None:
    """A line where the data was prepared with another tokenizer.json than the one that came with the weights."""
    file = None if weights is None else weights.travelling().get("tokenizer.json")
    if file is None or info.tokenizer_digest in (None, tokenizer_digest(file, info.eod)):
        return None
    return (
        f"warning: --data: {prefix} was prepared with {info.describe()}, which is not {file} of --init-from: the "
        "weights know that one's ids"
    )
