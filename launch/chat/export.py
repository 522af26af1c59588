"""The trained model as a Hugging Face folder: weights of the last checkpoint, tokenizer and chat
template.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from launch import convert_hf
from launch.chat.arguments import FinetuneOptions
from launch.chat.store import Conversations
from launch.hf.output import Output
from launch.train.checkpoint import require_loadable
from launch.weights import Weights

__all__ = ["check_target", "export", "turn_ends", "write_beside"]

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_LOOKED_AT = 1000
"""Maximum number of conversations that are searched for the ends of turns."""
_OF_A_RANK = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def check_target(args: FinetuneOptions, began_with: Path) -> None:
    """Refuse ``--export-to`` before anything is trained.

    Raises:
        CoatConfigError: the run reads (``began_with`` is its first model) or writes something in
            it; or it is not empty and no earlier export, or one, and the run neither continues nor
            has --overwrite.
    """
    if args.export_to is None:
        return
    target = Path(args.export_to)
    for used in (began_with, args.tokenizer, args.output, *args.data, *(args.valid or ())):
        if used is not None and Path(used).resolve().is_relative_to(target.resolve()):
            raise CoatConfigError(
                f"--export-to: got {target}, which is or holds {used}, accepted: another folder"
            )
    replace = args.overwrite or require_loadable(args.load, args.save) is not None
    try:
        Output("--export-to", target, replace).check(Path(str(args.save)), 0)
    except CheckpointError as problem:
        raise CoatConfigError(f"{problem} or --no-export") from None


def write_beside(
    folder: Path, tokenizer: Any, began_with: Weights, conversations: Conversations
) -> None:
    """Write the files of a Hugging Face folder beside the weights: tokenizer with chat template,
    and the first model's config.json and generation config, the latter with the tokens that end the
    trained turns.
    """
    tokenizer.save_pretrained(folder)
    for name, path in began_with.travelling().items():
        if name in (_CONFIG, _GENERATION):
            shutil.copyfile(path, folder / name)
    _stop_at(folder, turn_ends(conversations, tokenizer))


def turn_ends(conversations: Conversations, tokenizer: Any) -> list[int]:
    """Ids of the special tokens with which trained turns end, the most frequent first.

    A base model's eos_token ends documents, and its chat template may end turns with another token.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    count, ends = min(len(conversations), _LOOKED_AT), Counter[int]()
    for number in range(count):
        ids, learnt = conversations[number]
        # From the end; line breaks may follow.
        said = (int(token) for token in ids[np.flatnonzero(learnt)][::-1])
        ends[next((token for token in said if tokenizer.decode([token]).strip()), -1)] += 1
    # A conversation that was cut ends with anything.
    return [
        token for token, times in ends.most_common() if token in special and 10 * times >= count
    ]


def _stop_at(folder: Path, ends: list[int]) -> None:
    """``generate`` of transformers ends with ``eos_token_id`` of the generation config, not of
    the tokenizer.
    """
    file = folder / _GENERATION
    source = file if file.exists() else folder / _CONFIG  # which stands for one that is absent
    config = json.loads(source.read_text(encoding="utf-8-sig")) if source.exists() else {}
    given = config.get("eos_token_id")
    known = given if isinstance(given, list) else [] if given is None else [given]
    if not (new := [token for token in ends if token not in known]):
        return
    if source is not file:
        config = {
            key: config[key]
            for key in ("bos_token_id", "pad_token_id")
            if config.get(key) is not None
        }
    config.pop("_from_model_config", None)  # with it transformers 4 goes back to config.json
    stops = [*new, *known] if known or new[1:] else new[0]
    file.write_text(
        json.dumps({**config, "eos_token_id": stops}, indent=2) + "\n", encoding="utf-8"
    )


def export(
    checkpoint: Path, target: str, tokenizer: Any, began_with: Weights, conversations: Conversations
) -> None:
    """Write a checkpoint as ``AutoModelForCausalLM`` and ``AutoTokenizer`` load it, with
    :func:`write_beside`'s files.

    Call it on one rank: ``convert_hf.py`` does it in a process of its own, because it works with
    all ranks it finds. An earlier export is replaced when the new one is complete.

    Raises:
        CheckpointError: it cannot be written; an earlier export is as it was.
    """
    with tempfile.TemporaryDirectory() as beside:
        write_beside(Path(beside), tokenizer, began_with, conversations)
        command = [
            sys.executable,
            convert_hf.__file__,
            "--from",
            str(checkpoint),
            "--to",
            target,
            "--overwrite",
        ]
        alone = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_RANK)}
        alone |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(
            [*command, "--like", beside], env=alone, capture_output=True, text=True, check=False
        )
    if done.returncode:
        why = (done.stderr.strip().split("\n") or ["?"])[-1].removeprefix("error: ")
        raise CheckpointError(
            f"--export-to: {target} was not written ({why}); the checkpoint {checkpoint} is whole: "
            f"launch/convert_hf.py --from {checkpoint} --to DIR"
        )
