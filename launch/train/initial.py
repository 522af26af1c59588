"""The model and the weights of a run's start, ``--model`` and ``--init-from``, and whether they
agree.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from coat_dist import CoatConfigError
from launch.common.errors import DataError
from launch.convert.sources import open_weights
from launch.convert.weights import Weights
from launch.data.blend import DataInfo, parse_blend, read_info
from launch.data.tokenizer import tokenizer_digest
from launch.model.model_config import ModelConfig, described_model, load_model_config
from launch.train.pretrain_options import PretrainOptions


def initial_weights(args: PretrainOptions) -> tuple[ModelConfig, Weights | None]:
    """The model, and the weights that a fresh start begins with.

    Raises:
        CoatConfigError: a model that the weights do not fit; names every key.
        CheckpointError: weights that cannot be used.
    """
    if args.init_from is None:
        return load_model_config(str(args.model), args.model_override), None
    weights = open_weights(args.init_from, tensors=not args.dry_run)
    if args.model is None:
        model = described_model(
            weights.model.model_dump(exclude_defaults=True), args.model_override
        )
    else:
        model = load_model_config(args.model, args.model_override)
        if model.vocab_size is None:
            model = model.with_vocab(weights.model.vocab_size or 0)
    wrong = model.different(weights.model, f"{args.init_from} (--init-from)")
    window = weights.model.sliding_window
    if window is not None and model.seq_length > window:
        wrong.append(
            f"model.seq_length: got {model.seq_length}, accepted: at most {window}, the window of "
            "--init-from"
        )
    if wrong:
        raise CoatConfigError("\n".join(wrong))
    return model, weights


def length_note(seq_length: int, weights: Weights | None, option: str) -> str | None:
    """A line where sequences are longer than those that the weights of ``option`` were made for."""
    if weights is None or seq_length <= weights.model.seq_length:
        return None
    return (
        f"note: model.seq_length: got {seq_length}, more than the {weights.model.seq_length} that "
        f"{weights.path} "
        f"({option}) is made for: positions beyond are new to the weights"
    )


def training_data(run: Any) -> tuple[str, DataInfo] | None:
    """Prefix and description of the first data set of a run of ``pretrain.py``; None where it is
    not here.

    Args:
        run: of a checkpoint's manifest, or None.
    """
    with suppress(DataError, KeyError, TypeError):
        prefixes, _ = parse_blend(run["data"]["paths"])
        return prefixes[0], read_info(prefixes[0])
    return None


def tokenizer_warning(weights: Weights | None, prefix: str, info: DataInfo) -> str | None:
    """A line where the tokenizer of the data set ``prefix`` is not the one whose ids the initial
    weights know.

    That is the one of their training data, where these are here, else the tokenizer.json that came
    with the weights.
    """
    if weights is None or info.tokenizer_digest is None:
        return None
    file = weights.travelling().get("tokenizer.json")
    trained = training_data(weights.manifest.get("run"))
    if trained is not None and trained[1].tokenizer_digest is not None:
        same, theirs = (
            trained[1].tokenizer_digest,
            f"{trained[1].describe()} of {trained[0]}, the training data",
        )
    elif file is not None:
        same, theirs = tokenizer_digest(file, info.eod), str(file)
    else:
        return None
    if info.tokenizer_digest == same:
        return None
    return (
        f"warning: --data: {prefix} was prepared with {info.describe()}, which is not {theirs} of "
        "--init-from: the weights know that one's ids"
    )
