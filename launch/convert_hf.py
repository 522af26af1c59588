"""Convert a model between Hugging Face's layout and this program's, whichever of the two the input
is not.

    python launch/convert_hf.py --from Llama-3.1-8B \\
        --to llama3-weights  # a Hugging Face folder: to ours
    python launch/convert_hf.py --from runs/first/checkpoints \\
        --to runs/first/hf  # ours: to a Hugging Face folder

The kind of --from decides the direction, and the first line that is printed says it. Ours is a
training checkpoint of pretrain.py (ZeRO-1, 2 or 3, any number of ranks; a `step*` folder, one whose
`latest` names it, or a universal one), or a folder that this program wrote. One process, no GPU.
Exit status: 0 done, 2 what cannot be converted, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launch.convert.convert_options import ConvertOptions, parser

if __name__ == "__main__":
    parser(__doc__).parse_args()  # a misspelt option is refused before torch is imported

import json
import os
from collections.abc import Sequence
from contextlib import suppress

import torch
from tqdm import tqdm

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from launch.common.errors import DataError
from launch.common.log_level import say, set_log_level, shows
from launch.convert.conversion import MEGATRON, Conversion, plan_hugging_face, plan_megatron
from launch.convert.hugging_face import CONFIG, HuggingFaceWeights, has_tokenizer, travelling_files
from launch.convert.output_folder import Output
from launch.convert.source import DTYPES
from launch.convert.tensor_files import TensorFiles, read_header
from launch.convert.weights import Weights, open_weights
from launch.data.blend import without_suffix
from launch.data.tokenizer import SentencePieceTokenizer, for_data
from launch.model.model_config import load_model_config
from launch.train.initial import training_data

__all__ = ["convert", "main"]


def convert(args: ConvertOptions) -> Path:
    """Do what the command line says.

    Returns:
        The folder that was written.

    Raises:
        CoatConfigError, CheckpointError: an input, or an output folder, that cannot be used;
            nothing is changed then.
    """
    dtype = DTYPES.get(str(args.dtype))
    described = None if args.model is None else load_model_config(args.model)
    weights = open_weights(args.source, dtype, model=described)
    if args.format == MEGATRON or (args.format is None and isinstance(weights, HuggingFaceWeights)):
        conversion, made = plan_megatron(weights, dtype), "weights of this program"
    else:
        conversion = _plan_hugging_face(weights, dtype, args.like, args.family)
        made = f"a Hugging Face folder, {json.loads(conversion.texts[CONFIG])['model_type']}"
    output = Output("--to", Path(args.target), args.overwrite)
    output.check(weights.path, conversion.bytes)
    say(f"{weights.path} ({weights.kind}) -> {output.final} ({made})")
    weights.verify()

    def write(folder: Path) -> None:
        hidden = None if shows("info") else True  # None: shown on a terminal
        with tqdm(
            total=conversion.bytes, unit="B", unit_scale=True, disable=hidden, dynamic_ncols=True
        ) as bar:
            conversion.write(weights, folder, args.max_shard_size, bar.update)
        if args.verify:
            _compare(conversion, weights, folder)
            say(
                f"--verify: {len(conversion.tensors):,} tensors, read once more, are what was "
                "converted"
            )

    output.write(write, {"kind": conversion.kind, "source": str(weights.path.resolve())})
    return output.final


def _plan_hugging_face(
    weights: Weights, dtype: torch.dtype | None, like: str | None, family: str | None
) -> Conversion:
    """The conversion to a Hugging Face folder, with the tokenizer of ``--like``, of the weights,
    or of their data.
    """
    vocab_size = weights.model.vocab_size or 0
    files, end = weights.travelling(), None
    copies: dict[str, Path] = {}
    texts: dict[str, str] = {}
    if like is not None:
        files = travelling_files(Path(like))
        if not files:
            try:
                copies, texts, end = _data_tokenizer(without_suffix(like), vocab_size)
            except DataError as problem:
                accepted = (
                    f"a folder with {CONFIG} or tokenizer files, or the PREFIX of prepared data"
                )
                raise CheckpointError(
                    f"--like: got {like}, accepted: {accepted} ({problem})"
                ) from None
    elif (trained := training_data(weights.manifest.get("run"))) is not None and trained[
        1
    ].vocab_size <= vocab_size:
        end = trained[1].eod
        if not has_tokenizer(files):
            with suppress(DataError):  # made from token files
                copies, texts, end = _data_tokenizer(trained[0], vocab_size)
                for file in copies.values():
                    say(f"tokenizer: {file}, of the data that the run was trained on")
    if not has_tokenizer({**files, **copies}):
        say(
            f"note: no tokenizer is beside {weights.path}; --like DIR takes one's files, --like "
            "PREFIX that of data"
        )
    found = plan_hugging_face(weights, dtype, {**files, **copies}, family, end)
    return found._replace(texts={**found.texts, **texts})


def _data_tokenizer(prefix: str, vocab_size: int) -> tuple[dict[str, Path], dict[str, str], int]:
    """The tokenizer of prepared data: files that are copied, files that are written, and the
    end-of-document id.

    Args:
        prefix: of the data; ``PREFIX.json`` and the tokenizer's file beside it are enough.
        vocab_size: of the model.

    Raises:
        CoatConfigError: a tokenizer with more ids than the model.
        DataError: see :func:`launch.data.tokenizer.for_data`.
    """
    tokenizer = for_data(prefix)
    if (ids := max(tokenizer.ids_of_text(), tokenizer.eod + 1)) > vocab_size:
        raise CoatConfigError(
            f"--like: got {prefix} with {ids} ids, accepted: at most the model's {vocab_size}"
        )
    if tokenizer.file is None:  # bytes
        return {}, {}, tokenizer.eod
    name = "tokenizer.model" if isinstance(tokenizer, SentencePieceTokenizer) else "tokenizer.json"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.token(tokenizer.eod),
        "clean_up_tokenization_spaces": False,
    }
    texts = {"tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
    return {name: tokenizer.file}, texts, tokenizer.eod


def _compare(conversion: Conversion, weights: Weights, folder: Path) -> None:
    """Read the result once more, from the disk, and compare it with the source, tensor by
    tensor.
    """
    headers = [read_header(file) for file in folder.glob("*.safetensors")]
    there = TensorFiles({name: entry for header in headers for name, entry in header.items()})
    read = conversion.reader(weights)
    for name in conversion.tensors:
        written, wanted = there.read(name), read(name)
        if not torch.equal(written.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)):
            raise CheckpointError(f"{there.entries[name].file}: {name} is not what was converted")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    args = ConvertOptions(**vars(parser(__doc__).parse_args(argv)))
    set_log_level(args.log_level)
    if args.tensor_parallel or args.pipeline_parallel:
        say(
            "note: --tensor-parallel and --pipeline-parallel have no effect: the result has whole "
            "tensors",
            "warning",
        )
    try:
        final = convert(args)
    except (CoatConfigError, CheckpointError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"convert_hf: interrupted; {args.target} is what it was before, or complete",
            file=sys.stderr,
        )
        return 130
    loads = (
        "AutoModelForCausalLM.from_pretrained"
        if (final / CONFIG).is_file()
        else "pretrain.py --init-from"
    )
    say(f"{final}: complete; {loads} loads it")
    return 0


if __name__ == "__main__":
    # Or DeepSpeed, whose classes are in checkpoints, looks for GPUs.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.exit(main())
