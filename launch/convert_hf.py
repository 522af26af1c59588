"""Convert a model between Hugging Face's layout and this program's, whichever of the two the input is not.

    python launch/convert_hf.py --from Llama-3.1-8B --to llama3-weights          # a Hugging Face folder: to ours
    python launch/convert_hf.py --from runs/first/checkpoints --to runs/first/hf  # ours: to a Hugging Face folder

What --from is decides the direction, and the first line that is printed says it. Ours is a training checkpoint of
pretrain.py (ZeRO-1, 2 or 3, any number of ranks; a `step*` folder, one whose `latest` names it, or a universal one), or
a folder that this program wrote. One process, no GPU. Exit status: 0 done, 2 what cannot be converted, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import argparse
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from tqdm import tqdm

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from launch.data.blend import without_suffix
from launch.data.tokenizer import SentencePieceTokenizer, Tokenizer, for_data, load
from launch.hf.arguments import parse, without_effect
from launch.hf.convert import HUGGING_FACE, MEGATRON, Conversion, plan_hugging_face, plan_megatron
from launch.hf.folder import CONFIG, HuggingFaceWeights, has_tokenizer, travelling_files
from launch.hf.output import Output
from launch.log_level import say, set_log_level, shows
from launch.model.gpt import load_model_config
from launch.prep import DataError
from launch.train.initial import training_data
from launch.weights import Weights, open_weights
from launch.weights.checkpoint import CheckpointWeights
from launch.weights.source import DTYPES

__all__ = ["convert", "main"]


def convert(args: argparse.Namespace) -> Path:
    """Do what the command line says.

    Returns:
        The folder that was written.

    Raises:
        CoatConfigError, CheckpointError: an input, or an output folder, that cannot be used; nothing is changed then.
    """
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    described = None if args.model is None else load_model_config(args.model)
    weights = open_weights(args.source, dtype, model=described)
    if described is not None and not isinstance(weights, CheckpointWeights):
        raise CoatConfigError(f"--model: got {args.model}, accepted: absent, as {weights.kind} says what model it is")
    form = args.format or (MEGATRON if isinstance(weights, HuggingFaceWeights) else HUGGING_FACE)
    conversion = _plan(weights, form, dtype, args)
    output = Output("--to", Path(args.target), args.overwrite)
    output.check(weights.path, conversion.bytes)
    made = "weights of this program"
    if form == HUGGING_FACE:
        made = f"a Hugging Face folder, {json.loads(conversion.texts[CONFIG])['model_type']}"
    say(f"{weights.path} ({weights.kind}) -> {output.final} ({made})")
    if conversion.kind == HUGGING_FACE and not has_tokenizer(conversion.copies):
        say(
            f"note: no tokenizer is beside {weights.path}; --like DIR takes one's files along, --like PREFIX that of "
            "prepared data"
        )
    for name in conversion.copies.keys() - weights.travelling().keys():
        if args.like is None and has_tokenizer([name]):
            say(f"tokenizer: {conversion.copies[name]}, of the data that the run was trained on")
    weights.verify()
    manifest = {"kind": conversion.kind, "source": str(weights.path.resolve())}

    def write(folder: Path):
        hidden = None if shows("info") else True  # None: shown on a terminal
        with tqdm(total=conversion.bytes, unit="B", unit_scale=True, disable=hidden, dynamic_ncols=True) as bar:
            written = conversion.write(weights, folder, args.max_shard_size, bar.update)
        if args.verify:
            _compare(conversion, weights, folder)
            say(f"--verify: {len(conversion.tensors):,} tensors, read once more, are what was converted")
        return written

    output.write(weights.path, conversion.bytes, write, manifest)
    return output.final


class DataTokenizer(NamedTuple):
    """Tokenizer files for a Hugging Face folder, from prepared data."""

    copies: dict[str, Path]
    """Files that are copied, by name; none for bytes."""
    texts: dict[str, str]
    """Files that are written anew."""
    end: int
    """End-of-document id."""
    ids: int
    """Ids that a model needs for text and the end of documents."""


def _tokenizer_of(prefix: str) -> DataTokenizer:
    """The tokenizer of prepared data.

    Args:
        prefix: of the data; ``PREFIX.json`` and the tokenizer's file beside it are enough.

    Raises:
        DataError: see :func:`launch.data.tokenizer.for_data`.
    """
    tokenizer = for_data(prefix)
    end, ids = tokenizer.eod, max(tokenizer.ids_of_text(), tokenizer.eod + 1)
    if tokenizer.file is None:
        return DataTokenizer({}, {}, end, ids)
    name = "tokenizer.model" if isinstance(tokenizer, SentencePieceTokenizer) else "tokenizer.json"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.token(end),
        "clean_up_tokenization_spaces": False,
    }
    texts = {"tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
    return DataTokenizer({name: tokenizer.file}, texts, end, ids)


def _plan(weights: Weights, form: str, dtype: torch.dtype | None, args: argparse.Namespace) -> Conversion:
    if form == MEGATRON:
        for option in ("like", "family"):
            if getattr(args, option) is not None:
                raise CoatConfigError(f"--{option}: got {getattr(args, option)}, accepted: absent in this direction")
        return plan_megatron(weights, dtype)
    vocab_size = weights.model.vocab_size or 0
    trained = training_data(weights.manifest.get("run")) if isinstance(weights, CheckpointWeights) else None
    if trained is not None and trained[1].vocab_size > vocab_size:
        trained = None  # prepared again since the run, with another tokenizer
    end = None if trained is None else trained[1].eod
    travelling = weights.travelling() if args.like is None else travelling_files(Path(args.like))
    taken: DataTokenizer | None = None
    if args.like is not None and travelling:
        _check_ids(args.like, travelling, vocab_size)
    elif args.like is not None:
        taken = _tokenizer_of_prefix(args.like, vocab_size)
        end = taken.end
    elif trained is not None and not has_tokenizer(travelling):
        with suppress(DataError):  # made from token files
            taken = _tokenizer_of(trained[0])
    if taken is None:
        return plan_hugging_face(weights, dtype, travelling, args.family, end)
    found = plan_hugging_face(weights, dtype, {**travelling, **taken.copies}, args.family, end)
    return found._replace(texts={**found.texts, **taken.texts})


def _tokenizer_of_prefix(like: str, vocab_size: int) -> DataTokenizer:
    try:
        taken = _tokenizer_of(without_suffix(like))
    except DataError as problem:
        why = f" ({problem})" if Path(f"{without_suffix(like)}.json").exists() else ""
        raise CheckpointError(
            f"--like: got {like}, accepted: a folder with {CONFIG} or tokenizer files, or the PREFIX of prepared "
            f"data{why}"
        ) from None
    if taken.ids > vocab_size:
        raise CoatConfigError(
            f"--like: got {like}, whose tokenizer makes {taken.ids} ids, accepted: that of the model, which has "
            f"{vocab_size}"
        )
    return taken


def _check_ids(like: str, travelling: Mapping[str, Path], vocab_size: int) -> None:
    """Refuse a tokenizer that makes more ids of text than the model has; kinds that are not known here go along."""
    for name, kind in (("tokenizer.json", "hf"), ("tokenizer.model", "sentencepiece")):
        if name not in travelling:
            continue
        try:
            tokenizer: Tokenizer = load(f"{kind}:{travelling[name]}", eod=0)  # which token ends documents matters not
        except DataError:
            continue
        if (ids := tokenizer.ids_of_text()) > vocab_size:
            raise CoatConfigError(
                f"--like: got {like}, whose {name} makes {ids} ids of text, accepted: that of the model, which has "
                f"{vocab_size}"
            )
        return


def _compare(conversion: Conversion, weights: Weights, folder: Path) -> None:
    """Read what was written once more, from the disk, and compare it with the source, tensor by tensor."""
    from launch.weights.tensor_files import TensorFiles, read_header

    headers = [read_header(file) for file in folder.glob("*.safetensors")]
    there = TensorFiles({name: entry for header in headers for name, entry in header.items()})
    read = conversion.reader(weights)
    for tensor in conversion.tensors:
        written, wanted = there.read(tensor.name), read(tensor)
        if not torch.equal(written.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)):
            raise CheckpointError(f"{there.entries[tensor.name].file}: {tensor.name} is not what was converted")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    args = parse(argv, __doc__)
    set_log_level(args.log_level)
    for line in without_effect(args):
        say(line, "warning")
    try:
        final = convert(args)
    except (CoatConfigError, CheckpointError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"convert_hf: interrupted; {str(interrupt) or 'nothing was changed'}", file=sys.stderr)
        return 130
    size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
    how = (
        f"AutoModelForCausalLM.from_pretrained({str(final)!r}) loads it"
        if (final / CONFIG).is_file()
        else f"pretrain.py --init-from {final} starts from it"
    )
    say(f"{final}: {size:,} bytes; {how}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, whose classes are in checkpoints, looks for GPUs
    sys.exit(main())
