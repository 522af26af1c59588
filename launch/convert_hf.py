"""Convert a model to a Hugging Face folder, which any other tool loads.

    python launch/convert_hf.py --from runs/first/checkpoints --to runs/first/hf

The input is a training checkpoint of pretrain.py (ZeRO-1, 2 or 3, any number of ranks; a `step*`
folder, one whose `latest` names it, or a universal one), or another Hugging Face folder, to round
its tensors or to divide them into other files. One process, no GPU. The other direction needs no
program: `pretrain.py --init-from` reads Hugging Face folders. Exit status: 0 done, 2 what cannot be
converted, 130 interrupted.
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

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from launch.common.errors import DataError
from launch.common.log_level import say, set_log_level
from launch.common.progress import Progress
from launch.convert.conversion import Conversion, plan_conversion
from launch.convert.hugging_face import CONFIG, has_tokenizer
from launch.convert.output_folder import OutputFolder
from launch.convert.sources import open_weights
from launch.convert.tensor_files import TensorFiles, read_header
from launch.convert.weights import DTYPES, Weights
from launch.data.tokenizer import SentencePieceTokenizer, for_data
from launch.model.model_config import load_model_config
from launch.train.initial import training_data


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
    conversion = _plan(weights, dtype, args.family)
    output = OutputFolder("--to", Path(args.target), args.overwrite)
    output.check(weights.path, conversion.bytes)
    family = json.loads(conversion.texts[CONFIG])["model_type"]
    say(f"{weights.path} ({weights.kind}) -> {output.final} (a Hugging Face folder, {family})")
    weights.verify()

    def write(folder: Path) -> None:
        with Progress(conversion.bytes, "convert", unit="B") as bar:
            conversion.write(weights, folder, args.max_shard_size, bar.update)
        if args.verify:
            _compare(conversion, weights, folder)
            say(
                f"--verify: {len(conversion.tensors):,} tensors, read once more, are what was "
                "converted"
            )

    output.write(write, {"kind": "hugging-face", "source": str(weights.path.resolve())})
    return output.final


def _plan(weights: Weights, dtype: torch.dtype | None, family: str | None) -> Conversion:
    """The conversion, with the tokenizer that came with the weights, or else that of the data on
    which a run of ``pretrain.py`` trained them.
    """
    files, end = weights.travelling(), None
    texts: dict[str, str] = {}
    trained = training_data(weights.manifest.get("run"))
    if trained is not None and trained[1].vocab_size <= (weights.model.vocab_size or 0):
        prefix, info = trained
        end = info.eod
        if not has_tokenizer(files):
            with suppress(DataError):  # token files have none
                more, texts = _data_tokenizer(prefix)
                files |= more
    if not has_tokenizer(files):
        say(f"note: no tokenizer is beside {weights.path}: copy its files into the result")
    return plan_conversion(weights, dtype, files, texts, family, end)


def _data_tokenizer(prefix: str) -> tuple[dict[str, Path], dict[str, str]]:
    """Files of a tokenizer of prepared data that are copied, and those that are written.

    Raises:
        DataError: see :func:`launch.data.tokenizer.for_data`.
    """
    tokenizer = for_data(prefix)
    if tokenizer.file is None:  # bytes
        return {}, {}
    say(f"tokenizer: {tokenizer.file}, of the data that the run was trained on")
    name = "tokenizer.model" if isinstance(tokenizer, SentencePieceTokenizer) else "tokenizer.json"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.token(tokenizer.eod),
        "clean_up_tokenization_spaces": False,
    }
    texts = {"tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
    return {name: tokenizer.file}, texts


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
    say(f"{final}: complete; AutoModelForCausalLM.from_pretrained loads it")
    return 0


if __name__ == "__main__":
    # Or DeepSpeed, whose classes are in checkpoints, looks for GPUs.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.exit(main())
