"""evaluate.py beside transformers, on several ranks, in BF16 and FP8, on a training checkpoint
and its export.
"""

import json
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launch.evaluation import arguments
from launch.train.metrics import read_metrics
from tests.launch import pretrain_runs
from tests.launch.evaluation import of_transformers
from tests.launch.evaluation.conftest import sentence
from tests.launch.evaluation.runs import evaluated
from tests.support import run_ranks

ROOT = Path(__file__).parents[3]


def inputs_of(tiny):
    return (
        "--text",
        tiny.text,
        tiny.jsonl,
        "--choices",
        tiny.questions,
        "--window",
        32,
        "--stride",
        12,
    )


@pytest.fixture(scope="module")
def in_fp32(tiny):
    return evaluated("--load", tiny.hf, "--forward", "fp32", *inputs_of(tiny))


@pytest.fixture(scope="module")
def theirs(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny.hf)


def test_text_has_the_loss_of_the_recipe(tiny, theirs, in_fp32):
    with open(tiny.text) as file:
        sums = {tiny.text: [of_transformers.text_loss(tiny.model, theirs, file.read(), 32, 12)]}
    sums[tiny.jsonl] = [
        of_transformers.text_loss(tiny.model, theirs, d, 32, 12) for d in tiny.documents
    ]
    assert [one["name"] for one in in_fp32["text"]] == [tiny.text, tiny.jsonl]
    for one in in_fp32["text"]:
        total, count = map(sum, zip(*sums[one["name"]], strict=True))
        # With a begin token every token is scored.
        assert one["tokens_scored"] == count == one["tokens"]
        assert abs(one["loss"] - total / count) < 1e-5
        assert math.isclose(one["perplexity"], math.exp(one["loss"]))
        assert math.isclose(one["bits_per_byte"], one["loss"] * count / math.log(2) / one["bytes"])
        assert one["loss_stderr"] > 0
    assert in_fp32["text"][1]["bytes"] == sum(len(d.encode()) for d in tiny.documents)
    assert in_fp32["text"][1]["documents"] == len(tiny.documents)


def test_choices_have_the_likelihoods_and_accuracies_of_transformers(tiny, theirs, in_fp32):
    likelihoods, acc, acc_norm, error = of_transformers.accuracies(
        tiny.model, theirs, tiny.questions, 32
    )
    one = in_fp32["choices"][0]
    for details, expected in zip(one["details"], likelihoods, strict=True):
        assert details["loglikelihoods"] == pytest.approx(expected, abs=1e-4)
    assert (one["acc"], one["acc_norm"]) == (acc, acc_norm)
    assert math.isclose(one["acc_stderr"], error)
    assert (one["questions"], one["truncated"]) == (25, 1)
    assert (
        one["details"][24]["question"] == f"{tiny.questions}:25"
        and one["details"][24]["answer"] == 1
    )


def test_without_a_begin_token_a_documents_first_token_is_not_scored(tiny):
    from transformers import AutoTokenizer

    inputs = ("--forward", "fp32", "--text", tiny.jsonl, "--choices", tiny.questions)
    bare = evaluated("--load", tiny.bare, *inputs)
    tokenizer = AutoTokenizer.from_pretrained(tiny.bare)
    pairs = [of_transformers.text_loss(tiny.model, tokenizer, d, 64, 32) for d in tiny.documents]
    total, count = map(sum, zip(*pairs, strict=True))
    assert bare["settings"]["begin_ids"] == [] and bare["settings"]["stride"] == 32
    assert (
        bare["text"][0]["tokens_scored"] == count == bare["text"][0]["tokens"] - len(tiny.documents)
    )
    assert abs(bare["text"][0]["loss"] - total / count) < 1e-5
    likelihoods, acc, *_ = of_transformers.accuracies(tiny.model, tokenizer, tiny.questions, 64)
    assert bare["choices"][0]["acc"] == acc
    assert bare["choices"][0]["details"][0]["loglikelihoods"] == pytest.approx(
        likelihoods[0], abs=1e-4
    )


def test_any_number_of_ranks_gives_the_same_numbers_to_the_bit(tiny, in_fp32):
    two = evaluated("--load", tiny.hf, "--forward", "fp32", *inputs_of(tiny), ranks=2)
    assert {k: two[k] for k in ("text", "choices")} == {k: in_fp32[k] for k in ("text", "choices")}
    assert (two["ranks"], in_fp32["ranks"]) == (2, 1)
    shared = evaluated(
        "--load", tiny.hf, "--forward", "fp32", *inputs_of(tiny), "--tensor-parallel", 2, ranks=2
    )
    assert abs(shared["text"][0]["loss"] - in_fp32["text"][0]["loss"]) < 1e-6
    assert shared["choices"][0]["correct"] == in_fp32["choices"][0]["correct"]


SIZES = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 2,
    "seq_length": 32,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of pretrain.py on text of its own, two ranks of ZeRO-2 in FP8; ``valid_loss`` of its
    last step.
    """
    from launch.prepare_data import main as prepare

    folder = tmp_path_factory.mktemp("trained")
    rng = random.Random(4)
    lines = "".join(json.dumps({"text": sentence(rng, 60)}) + "\n" for _ in range(150))
    (folder / "text.jsonl").write_text(lines)
    prepared = [
        "--input",
        str(folder / "text.jsonl"),
        "--output",
        str(folder / "data"),
        "--tokenizer",
        "bpe:300",
    ]
    assert prepare([*prepared, "--quiet", "--workers", "1"]) == 0
    (folder / "model.json").write_text(json.dumps({**SIZES, "vocab_size": None}))
    argv = pretrain_runs.command(
        folder,
        folder / "run",
        pretrain_runs.configuration(folder, 2),
        "--save",
        folder / "saved",
        steps=6,
    )
    argv += ["--eval-interval", "6", "--eval-steps", "3"]
    endings = run_ranks(2, pretrain_runs.rank_main, argv)
    assert all("finished 6 steps" in ending for ending in endings), endings
    valid = read_metrics(folder / "run")[-1]["valid_loss"]
    return SimpleNamespace(
        folder=folder, saved=folder / "saved", data=folder / "data", valid_loss=valid
    )


def test_prepared_data_has_the_valid_loss_of_training(trained):
    """Three micro-batches of two samples on two ranks; the checkpoint says which split and seed."""
    inputs = ("--load", trained.saved, "--data", trained.data, "--samples", 12, "--batch-size", 2)
    fp8 = evaluated(*inputs, "--forward", "fp8")
    assert fp8["data"][0]["tokens_scored"] == 12 * 32
    assert fp8["coat"]["source"] == "the checkpoint's own" and fp8["checkpoint"]["step"] == 6
    assert abs(fp8["data"][0]["loss"] - trained.valid_loss) < 1e-6
    bf16 = evaluated(*inputs)
    assert 0 < abs(bf16["data"][0]["loss"] - trained.valid_loss) < 0.05
    assert bf16["data"][0]["digest"] == fp8["data"][0]["digest"]
    assert evaluated(*inputs, ranks=2)["data"] == bf16["data"]


def test_the_tokenizer_of_a_training_checkpoint_is_its_datas(trained):
    result = evaluated(
        "--load", trained.saved, "--text", trained.folder / "text.jsonl", "--limit", 3
    )
    assert result["settings"]["tokenizer"] == f"tokenizer: {trained.data}.json (300 ids)"
    assert result["text"][0]["documents"] == 3


def test_another_tokenizer_than_that_of_training_is_a_warning(trained, tiny):
    from launch.evaluation.inputs import read_inputs
    from launch.evaluation.model import read_run
    from launch.weights import open_weights

    for suffix in ("bin", "idx"):
        shutil.copy(f"{trained.data}.{suffix}", trained.folder / f"other.{suffix}")
    summary = json.loads(Path(f"{trained.data}.json").read_text())
    (trained.folder / "other.json").write_text(
        json.dumps({**summary, "tokenizer_digest": "0" * 64})
    )

    def told(load, *inputs):
        weights = open_weights(load)
        args = arguments.parse(
            ["--load", str(load), *map(str, inputs), "--samples", "2", "--window", "16"]
        )
        return read_inputs(args, weights, read_run(weights)[0]).notes

    assert (
        told(trained.saved, "--data", trained.data, "--text", trained.folder / "text.jsonl") == []
    )
    (line,) = told(trained.saved, "--data", trained.folder / "other")
    assert line.startswith(
        f"warning: --data: {trained.folder}/other was prepared with bpe:300 (vocabulary 300, "
    )
    assert (
        f" of {trained.data}, the training data of --load: the weights know that one's ids" in line
    )
    (line,) = told(trained.saved, "--text", trained.folder / "text.jsonl", "--tokenizer", "bytes")
    assert line.startswith("warning: --tokenizer: bytes is not that of the training data, bpe:300")
    (line,) = told(tiny.hf, "--data", trained.data)
    assert f"which is not {tiny.hf}/tokenizer.json of --load" in line


def test_an_export_has_the_tokenizer_of_the_runs_data(trained, tiny, tmp_path):
    """So that it is evaluated like the checkpoint, and generates up to the end of a document."""
    from transformers import AutoTokenizer, GenerationConfig

    from launch.convert_hf import main as convert_hf
    from launch.data.tokenizer import for_data

    assert convert_hf(["--from", str(trained.saved), "--to", str(tmp_path / "hf")]) == 0
    inputs = [
        "--text",
        trained.folder / "text.jsonl",
        "--limit",
        4,
        "--choices",
        tiny.questions,
        "--bos",
        "eod",
    ]
    ours, theirs = (
        evaluated("--load", trained.saved, *inputs),
        evaluated("--load", tmp_path / "hf", *inputs),
    )
    assert [theirs[kind] for kind in ("text", "choices")] == [
        ours[kind] for kind in ("text", "choices")
    ]
    assert theirs["settings"]["tokenizer_digest"] == ours["settings"]["tokenizer_digest"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    end = json.loads(Path(f"{trained.data}.json").read_text())["eod"]
    assert tokenizer("one two").input_ids == for_data(trained.data).encode("one two")
    assert (
        tokenizer.eos_token_id
        == GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id
        == end
    )
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == end


def test_the_same_weights_give_the_same_numbers_in_every_kind_of_folder(trained, tiny):
    """A training checkpoint, its universal form, its export to Hugging Face, and what is made of
    that again.
    """
    from launch.convert_hf import main as convert_hf
    from launch.to_universal import main as to_universal

    places = {name: str(trained.folder / name) for name in ("universal", "hf", "converted")}
    assert to_universal(["--load", str(trained.saved), "--output", places["universal"]]) == 0
    assert convert_hf(["--from", str(trained.saved), "--to", places["hf"]]) == 0
    assert convert_hf(["--from", places["hf"], "--to", places["converted"]]) == 0
    inputs = ["--text", trained.folder / "text.jsonl", "--limit", 4, "--choices", tiny.questions]
    inputs += ["--tokenizer", f"{trained.data}.tokenizer.json"]
    first = evaluated("--load", trained.saved, *inputs)
    for place in places.values():
        other = evaluated("--load", place, *inputs)
        assert [other[kind] for kind in ("text", "choices")] == [
            first[kind] for kind in ("text", "choices")
        ], place
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{trained.data}.tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(places["hf"], dtype=torch.float32).eval()
    lines = (trained.folder / "text.jsonl").read_text().splitlines()[:4]
    pairs = [
        of_transformers.text_loss(model, tokenizer, json.loads(line)["text"], 32, 16)
        for line in lines
    ]
    total, count = map(sum, zip(*pairs, strict=True))
    in_fp32 = evaluated("--load", trained.saved, *inputs, "--forward", "fp32")["text"][0]
    assert in_fp32["tokens_scored"] == count and abs(in_fp32["loss"] - total / count) < 1e-5
