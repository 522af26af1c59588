"""Options of evaluate.py that make no sense, inputs that do not fit the model, its page's
options.
"""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from launch import evaluate as program
from launch.evaluation import arguments
from launch.evaluation.model import choose_coat

ROOT = Path(__file__).parents[3]


ONE = ("--stride", "--batch-size", "--limit", "--samples", "--tensor-parallel")


@contextmanager
def one_process():
    """torch.distributed over this process alone, without Megatron's groups."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "--load: missing, accepted: the folder of a checkpoint"),
        (["--load", "x"], "--text: missing, accepted: one or more of --text, --data and --choices"),
        (
            ["--load", "x", "--text", "a", "--window", "1"],
            "--window: got 1, accepted: an integer >= 2",
        ),
        (
            ["--load", "x", "--text", "a", "--deepspeed_config", "zero2"],
            "accepted: only with --forward fp8",
        ),
        (["--load", "x", "--text", "a", "--details"], "--details: accepted: only with --output"),
        *(
            (
                ["--load", "x", "--text", "y", option, "0"],
                f"{option}: got 0, accepted: an integer >= 1",
            )
            for option in ONE
        ),
    ],
)
def test_arguments_that_make_no_sense(argv, problem):
    with pytest.raises(program.CoatConfigError) as caught:
        arguments.parse(argv)
    assert problem in str(caught.value)


def test_the_pages_options_exist(capsys):
    with pytest.raises(SystemExit):
        arguments.parse(["--help"])
    known = set(re.findall(r"--[a-z_-]+", capsys.readouterr().out))
    text = (ROOT / "docs" / "evaluation.md").read_text()
    named = set(re.findall(r"(?<!-)--[a-z][a-z_-]*", text)) - {
        "--help",
        "--eval-steps",
        "--nproc_per_node",
        "--separate-documents",
    }
    assert named <= known, named - known


def test_the_block_of_an_fp8_forward_pass_and_where_it_is_from():
    own = {
        "deepspeed": {
            "coat": {"activation": {"enabled": False, "bf16_layers": [0, -1], "format": "e5m2"}}
        }
    }
    config, source = choose_coat(None, own)
    assert source == "the checkpoint's own, with activation.enabled true"
    activation = config.activation
    assert (activation.enabled, activation.bf16_layers, activation.format) == (
        True,
        (0, -1),
        "e5m2",
    )
    assert choose_coat("zero2", own).source == "zero2"
    assert choose_coat(None, {}).source.startswith("defaults")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (
            ["--load", "{hf}", "--text", "{folder}/missing.txt"],
            "got {folder}/missing.txt, which does not exist",
        ),
        (
            ["--load", "{hf}", "--text", "{text}", "--window", "65"],
            "--window: got 65, accepted: 2 to the model's",
        ),
        (
            ["--load", "{hf}", "--text", "{text}", "--stride", "65"],
            "--stride: got 65, accepted: 1 to the window (64)",
        ),
        (
            ["--load", "{hf}", "--text", "{text}", "--bos", "<no>"],
            "--bos: got '<no>', accepted: auto, none, eod",
        ),
        (
            ["--load", "{hf}", "--text", "{questions}"],
            "questions.jsonl:1: no key 'text' ('context', 'choices'",
        ),
        (["--load", "{hf}", "--choices", "{jsonl}"], "text.jsonl:1: context: Field required"),
        (
            ["--load", "{hf}", "--text", "{text}", "--tensor-parallel", "2"],
            "--tensor-parallel: got 2, accepted: a",
        ),
        (
            ["--load", "{hf}", "--text", "{text}", "--tokenizer", "{large}"],
            "--tokenizer: got {large} of 500 ids, accepted: at most 330",
        ),
        (  # a token that was added to the tokenizer alone
            ["--load", "{hf}", "--text", "{text}", "--tokenizer", "{added}", "--bos", "<pad>"],
            "{text}: got a token with the id 330, or as begin or end token (--bos, --eod), "
            "accepted: ",
        ),
        (
            ["--load", "{hf}", "--text", "{text}", "--baseline", "{text}"],
            "--baseline: got {text}, accepted: an evaluation.json",
        ),
        (
            [
                "--load",
                "{hf}",
                "--text",
                "{text}",
                "--forward",
                "fp8",
                "--deepspeed_config",
                "zero2-bf16",
            ],
            '--deepspeed_config: got zero2-bf16, accepted: one with a "coat" block',
        ),
    ],
)
def test_what_cannot_be_used_is_named_before_a_model_is_built(tiny, argv, problem, monkeypatch):
    from tokenizers import Tokenizer, models

    large = tiny.folder / "large.json"
    vocabulary = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, 500)}}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w1")).save(str(large))
    added = tiny.folder / "added.json"
    library = Tokenizer.from_file(f"{tiny.hf}/tokenizer.json")
    library.add_special_tokens(
        [f"<extra{n}>" for n in range(330 - library.get_vocab_size())] + ["<pad>"]
    )
    library.save(str(added))
    names = {**vars(tiny), "large": str(large), "added": str(added)}
    monkeypatch.setattr(program.model, "build", None)
    args = arguments.parse([a.format(**names) for a in argv])
    with one_process(), pytest.raises(program.USER_ERRORS) as caught:
        program.evaluate(args, torch.device("cpu"))
    assert problem.format(**names) in str(caught.value)
