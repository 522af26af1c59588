"""What a fine-tuning run is: the model and tokenizer, then the conversations, and how many steps
they make.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coat_dist import CoatConfig, CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError, read_manifest
from coat_dist.checkpoint.write.durable import write_text
from coat_dist.ranks import on_first_ranks, on_rank_0
from launch.chat.arguments import LONGEST_DEFAULT, FinetuneOptions
from launch.chat.batches import Sequences, micro_batches
from launch.chat.export import write_beside
from launch.chat.store import Conversations, Reading, find_files, hold_out, prepare
from launch.chat.template import ChatTemplate, ids_of_text, load_tokenizer
from launch.model.gpt import ModelConfig
from launch.prep import DataError
from launch.train.arguments import UNKNOWN_STEPS
from launch.train.checkpoint import require_loadable
from launch.train.data_source import Batch, Progress
from launch.train.folders import sharers
from launch.train.plan import Plan, assemble
from launch.train.settings import MICRO, load_settings
from launch.weights import Weights, open_weights
from launch.weights.source import files_in

__all__ = ["ChatData", "Draft", "FinetunePlan", "draft", "finish"]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What is known before the ranks have met: everything but the data."""

    args: FinetuneOptions
    settings: dict[str, Any]
    coat: CoatConfig | None
    model: ModelConfig
    weights: Weights
    tokenizer: Any
    """Of transformers, with the chat template in use."""
    world: int


@dataclass(frozen=True, kw_only=True)
class FinetunePlan(Plan):
    """A :class:`Plan` over conversations."""

    args: FinetuneOptions  # type: ignore[assignment]
    train: Sequences
    valid: Sequences | None
    tokenizer: Any
    held_out: str | None = None
    """Digest of what is held out of ``--data``; None = nothing is."""

    def describe(self) -> str:
        """A few lines for the log."""
        lines = [super().describe(), self.train.describe("train")]
        if self.valid is not None:
            lines.append(self.valid.describe("held out"))
        steps = self.args.train_steps or 0
        taken = self.train.end or steps * self.batch.total
        lines.append(
            f"{steps} steps: {taken / self.train.per_epoch:.2f} epochs of {self.train.per_epoch:,} "
            "sequences"
        )
        return "\n".join(lines)

    def carried(self, source: Path | None) -> dict[str, bytes]:
        """Tokenizer and chat template are those that are trained with, whatever the model came
        with.
        """
        with tempfile.TemporaryDirectory() as beside:
            write_beside(Path(beside), self.tokenizer, self.weights, self.train.conversations)
            return {name: path.read_bytes() for name, path in files_in(Path(beside)).items()}

    def data_identity(self) -> dict[str, Any]:
        return {
            "train": self.train.conversations.summary["digest"],
            "valid": None if self.valid is None else self.valid.conversations.summary["digest"],
            "valid_share": self.args.valid_share,
            "held_out": self.held_out,
            "packed": not self.args.no_packing,
            "epochs": self.args.epochs,
        }


def draft(args: FinetuneOptions, world: int) -> Draft | Plan:
    """Read and check what needs neither data nor the other ranks; with ``--dry-run`` a plan without
    data.

    Raises:
        CoatConfigError, CheckpointError, DataError: names what cannot be used.
    """
    settings, coat = load_settings(args.deepspeed_config, tp=args.tensor_parallel)
    if "auto" in (args.micro_batch, settings.get(MICRO)):
        raise CoatConfigError(
            f'{MICRO}: got "auto", accepted: an integer >= 1, which sets the number of steps'
        )
    trained = {file.resolve() for file in find_files(args.data, "--data")}
    if both := [
        file for file in find_files(args.valid or [], "--valid") if file.resolve() in trained
    ]:
        raise DataError(
            f"--valid: got {both[0]}, accepted: files that --data does not have, or --valid-share"
        )
    weights = open_weights(args.model, tensors=not args.dry_run)
    seq_length = args.seq_length or min(weights.model.seq_length, LONGEST_DEFAULT)
    if seq_length > weights.model.seq_length:
        raise CoatConfigError(
            f"--seq-length: got {seq_length}, accepted: 2 to the {weights.model.seq_length} that "
            f"{args.model} takes"
        )
    tokenizer = load_tokenizer(args.tokenizer or _tokenizer_folder(weights), args.chat_template)
    model = weights.model.model_copy(update={"seq_length": seq_length}).with_vocab(
        ids_of_text(tokenizer)
    )
    if args.tensor_parallel == 1 and model.padded_vocab > (model.vocab_size or 0):
        # Rows of padding would be part of every softmax, and the loss another than the model's own.
        model = model.model_copy(update={"vocab_multiple": 1})
    elif model.padded_vocab % args.tensor_parallel:  # of such a run, which more ranks continue
        model = model.model_copy(
            update={"vocab_multiple": ModelConfig.model_fields["vocab_multiple"].default}
        )
    if args.dry_run:
        return assemble(_with_steps(args), world, settings, coat, model)
    return Draft(
        args=args,
        settings=settings,
        coat=coat,
        model=model,
        weights=weights,
        tokenizer=tokenizer,
        world=world,
    )


def _with_steps(args: FinetuneOptions) -> FinetuneOptions:
    """A copy from which a plan can be made before the data are read."""
    return replace(
        args,
        train_steps=args.train_steps or UNKNOWN_STEPS,
        eval_interval=args.eval_interval or 0,
        eval_steps=1,
    )


def _tokenizer_folder(weights: Weights) -> str:
    for file in weights.travelling().values():
        if file.name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
            return str(file.parent)
    raise DataError(
        f"--tokenizer: missing, and {weights.path} has none, accepted: a folder with tokenizer.json"
    )


def finish(d: Draft, say: Callable[[str], None]) -> FinetunePlan:
    """Encode the conversations, on one rank of those that share a cache, and plan the run over
    them; collective.

    Raises:
        CoatConfigError, DataError: on every rank; names argument or line.
    """
    a = d.args
    train = _conversations(d, a.data, "--data", say)
    step, consumed, earlier = on_rank_0(lambda: _continued(a))
    # On one rank: all that the conversations hold is read for it.
    held_out, digest = on_rank_0(lambda: hold_out(train, a.valid_share, a.seed), patient=True)
    if digest is not None and earlier and earlier.get("held_out") != digest:
        raise CheckpointError(
            f"--valid-share: got {a.valid_share}, which holds out other conversations than the run "
            "before did, that "
            "may have trained on some of them, accepted: --valid FILE, --valid-share 0, or the "
            "same --data, "
            "--tokenizer, --chat-template, --seq-length, --valid-share and --seed"
        )
    chosen = np.setdiff1d(np.arange(len(train)), held_out)
    valid = train
    if a.valid is not None:
        valid = _conversations(d, a.valid, "--valid", say)
        held_out = np.arange(len(valid))
    args, sequences = (
        _with_steps(a),
        partial(Sequences, capacity=d.model.seq_length, packed=not a.no_packing),
    )
    training = sequences(train, chosen, seed=a.seed, epochs=a.epochs)
    validation = sequences(valid, held_out, epochs=1) if len(held_out) else None
    known = (args, d.world, d.settings, d.coat, d.model)
    batch = assemble(*known, Plan).batch
    if training.end is not None:
        # Of a run that is continued, whose batch size may have been another one, what is left.
        args.train_steps = step + math.ceil(max(training.end - consumed, 0) / batch.total)
    if validation is not None:
        args.eval_steps = a.eval_steps or math.ceil(
            validation.per_epoch * batch.accumulation / batch.total
        )
        if a.eval_interval is None:  # about once an epoch
            args.eval_interval = max(1, math.ceil(training.per_epoch / batch.total))
    args.check()
    parts: dict[str, Any] = {
        "weights": d.weights,
        "train": training,
        "valid": validation,
        "tokenizer": d.tokenizer,
    }
    return assemble(*known, FinetunePlan, held_out=digest, **parts)


def _conversations(
    d: Draft, given: list[str], option: str, say: Callable[[str], None]
) -> Conversations:
    reading = Reading(
        seq_length=d.model.seq_length, too_long=d.args.too_long, skip_bad=d.args.skip_bad
    )
    cache, files = (
        Path(d.args.data_cache or Path(d.args.output, "prepared")),
        find_files(given, option),
    )

    def work() -> Path:
        try:
            return prepare(files, ChatTemplate(d.tokenizer, d.model.vocab_size), reading, cache)
        except OSError as problem:
            raise DataError(
                f"{option}: got {' '.join(given)}, with --data-cache {cache}: {problem}"
            ) from problem

    found = Conversations(on_first_ranks(sharers(cache, "--data-cache"), work), files)
    s = found.summary
    left = ", ".join(
        f"{count:,} {what}" for what, count in sorted(s["counts"].items()) if what != "kept"
    )
    text = (
        f"{' '.join(given)}: {s['counts']['kept']:,} conversations, {s['tokens']:,} tokens, "
        f"{s['trained']:,} of them "
        f"trained; {left or 'nothing left out'}"
    )
    if s["in_pieces"]:
        text += f"; {s['in_pieces']:,} encoded in pieces, where a token would have joined two turns"
    if s["without_tools"]:
        text += f"; {s['without_tools']:,} with tools that the chat template ignores"
    say(text + ("; listed in dropped.jsonl" if left else ""))
    return found


def _continued(args: FinetuneOptions) -> tuple[int, int, dict[str, Any]]:
    """Steps done, sequences consumed and data of the run that ``--load`` continues.

    Raises:
        CheckpointError: another program wrote it, whose samples are no conversations.
    """
    source = require_loadable(args.load, args.save)
    if source is None:
        return 0, 0, {}
    manifest = read_manifest(source)
    data, done = manifest["run"].get("data", {}), manifest["progress"]
    if "packed" not in data:
        raise CheckpointError(
            f"--load: got {source}, which finetune.py has not written, accepted: --model {source}, "
            "to start from it"
        )
    return done["step"], done["consumed_samples"], data


class ChatData:
    """Conversations as the batches of a run. Rank 0 writes the list of what was left out.

    Args:
        begun: changes nothing: the order of the sequences has its end in it, or none.
        dp_rank: this data-parallel rank.
    """

    def __init__(self, p: FinetunePlan, begun: Progress, dp_rank: int) -> None:
        self._plan, self._dp_rank, self.samples = p, dp_rank, p.train.end
        both = [p.train, *([] if p.valid is None else [p.valid])]
        # Both may be parts of the same files.
        lists = dict.fromkeys(one.conversations.dropped() for one in both)
        on_rank_0(lambda: write_text(Path(p.args.output, "dropped.jsonl"), "".join(lists)))

    def tokens(self, start: int, stop: int) -> int:
        return self._plan.train.tokens(start, stop)

    def batches(self, split: str, consumed: int = 0) -> Iterator[Batch] | None:
        p = self._plan
        sequences = {"train": p.train, "valid": p.valid}.get(split)
        if sequences is None:
            return None
        pad = p.tokenizer.pad_token_id
        return micro_batches(
            sequences,
            micro=p.batch.micro,
            # An evaluation is one step of --eval-steps micro-batches.
            accumulation=p.batch.accumulation if split == "train" else p.args.eval_steps or 1,
            dp_rank=self._dp_rank,
            dp_size=p.dp,
            pad=pad if pad is not None and pad < (p.model.vocab_size or 0) else 0,
            consumed=consumed,
        )
