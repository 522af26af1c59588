"""Out of training and into it: checkpoints of every stage and tensor-parallel size, and
``--init-from``.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

from coat_dist import CoatConfigError
from coat_dist.reference.master import split
from launch.convert.checkpoint_weights import find_checkpoint
from launch.convert.sources import open_weights
from launch.convert.weights import CheckpointError
from launch.data.blend import DataInfo, telling
from launch.data.tokenizer import tokenizer_digest
from launch.model.gpt import load_model_config
from launch.train import pretrain_options
from launch.train.initial import tokenizer_warning
from launch.train.metrics import read_metrics
from launch.train.plan import plan
from tests.launch.convert.hf_folders import SIZES, convert, make, tensors
from tests.launch.convert.hf_folders import config as written_config
from tests.launch.convert.test_fill import joined
from tests.launch.convert.weight_runs import options, whole, without_model
from tests.launch.pretrain_runs import (
    FP32_GRADIENTS,
    configuration,
    make_universal,
    weights_of,
)
from tests.support import equal, run_ranks, slow

pytest.importorskip("transformers")

VOCAB = 250
BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize(
    ("stage", "tp", "coat", "more"),
    [
        (1, 1, False, {}),
        (2, 2, True, {}),
        (3, 1, True, {}),
        slow(1, 2, True, FP32_GRADIENTS),
        slow(2, 1, {"optimizer": {"master_weights": "bf16_remainder"}}, {"bf16": BF16}),
        slow(3, 2, True, {}),
    ],
)
def test_export_is_what_the_engine_held(work, tmp_path, stage, tp, coat, more):
    """Bit for bit; also through a universal checkpoint; and a run that starts from it begins
    with these bits.
    """
    config = configuration(tmp_path, stage, coat, **more)
    parallel = ["--tensor-parallel", tp]
    ends = run_ranks(
        2,
        weights_of,
        options(work, tmp_path / "run", config, *parallel, "--save", tmp_path / "save"),
    )
    assert "finished 2 steps" in ends[0][0], ends[0][0]
    after = {name: joined(name, [end[2][name] for end in ends[:tp]]) for name in ends[0][2]}
    assert equal(whole(tmp_path / "save"), after)
    masters = whole(tmp_path / "save", torch.float32)
    # half-way cases differ.
    held = (lambda master: split(master)[0]) if "bf16" in more else torch.Tensor.bfloat16
    assert equal({name: held(masters[name]) for name in masters}, after)

    convert(tmp_path / "save", tmp_path / "hf", "--verify")
    hf = whole(tmp_path / "hf")
    for name in after:
        rows = VOCAB if "embedding" in name or "output" in name else None
        assert torch.equal(hf[name][:rows], after[name][:rows])

    make_universal(tmp_path / "save", tmp_path / "universal")
    rounded = {name: master.bfloat16() for name, master in masters.items()}
    assert equal(whole(tmp_path / "universal"), rounded)

    again = options(
        work, tmp_path / "again", config, *parallel, "--init-from", tmp_path / "save", steps=1
    )
    begun = run_ranks(2, weights_of, again)
    assert equal([one[1] for one in begun], [one[2] for one in ends])

    cut = next(find_checkpoint(tmp_path / "save").glob("*optim_states.pt"))
    os.truncate(cut, cut.stat().st_size - 1000)
    with pytest.raises(CheckpointError, match=f"{cut}: cannot be read"):
        open_weights(tmp_path / "save")


def refuses_another_model(save, tmp_path, capsys):
    """A description that is not the checkpoint's would mix up its rows, or leave some of them
    out.
    """

    def fails(changes):
        (tmp_path / "model.json").write_text(json.dumps({**known, **changes}))
        convert(save, tmp_path / "another", "--model", tmp_path / "model.json", status=2)
        assert not (tmp_path / "another").exists()
        return capsys.readouterr().err

    manifest = find_checkpoint(save) / "manifest.json"
    content = json.loads(manifest.read_text())
    known = content["run"]["model"]
    assert f"model.rotary_base: got 10000, accepted: 500000, which {manifest.parent} has" in fails(
        {"rotary_base": 10000, "rope_scaling": None}
    )
    (tmp_path / "model.json").write_text(
        json.dumps({**known, "vocab_size": None, "hidden_dropout": 0.1})
    )
    assert (
        open_weights(save, model=load_model_config(tmp_path / "model.json")).model.vocab_size == 300
    )
    manifest.rename(tmp_path / "kept.json")  # a checkpoint of another program
    for changes, name in (
        (
            {"ffn_hidden_size": 48},
            "decoder.layers.0.mlp.linear_fc1.weight: got [192, 64], accepted: [96, 64], by",
        ),
        ({"num_layers": 1}, "decoder.layers.1."),
        ({"num_layers": 3}, "decoder.layers.2."),
        (
            {"tie_embeddings": True},
            "output_layer.weight: got [384, 64], accepted: nothing, by --model",
        ),
        ({"vocab_size": None}, "model.vocab_size: got null"),
    ):
        assert name in fails(changes)
    (tmp_path / "model.json").write_text(json.dumps(known))
    convert(save, tmp_path / "bare", "--model", tmp_path / "model.json")
    one, other = tensors(tmp_path / "bare"), tensors(tmp_path / "out")
    assert equal(one, other)
    (tmp_path / "kept.json").rename(manifest)


def test_a_run_starts_from_hugging_face_and_ends_there(work, tmp_path, capsys):
    """ZeRO-3; --model comes with the weights; tokenizer files travel through the checkpoint, and
    through a restart.
    """
    make("llama3", tmp_path / "hf", dtype=torch.bfloat16, vocab_size=300)
    start, save = whole(tmp_path / "hf"), tmp_path / "save"
    config = configuration(tmp_path, 3)
    argv = ["--init-from", tmp_path / "hf", "--save", save, "--load", "auto", "--keep-last", "1"]
    argv = without_model(options(work, tmp_path / "run", config, *argv))
    (ending, before, _), _ = run_ranks(2, weights_of, [*argv, "--stop-at-step", "1"])
    assert "after step 1" in ending, ending
    assert equal(before, start)
    (ending, before, after), _ = run_ranks(
        2, weights_of, argv
    )  # continues, and does not start again
    assert "finished 2 steps" in ending, ending
    assert not equal(before, start)
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [1, 2]

    convert(save, tmp_path / "out")
    for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    assert written_config(tmp_path / "out") == written_config(tmp_path / "hf")
    assert tensors(tmp_path / "out")["model.embed_tokens.weight"].shape == (
        300,
        SIZES["hidden_size"],
    )
    assert torch.equal(
        tensors(tmp_path / "out")["model.norm.weight"], after["decoder.final_layernorm.weight"]
    )
    refuses_another_model(save, tmp_path, capsys)
    universal = tmp_path / "universal"
    make_universal(save, universal)
    assert (
        open_weights(universal).travelling().keys()
        == open_weights(tmp_path / "hf").travelling().keys()
    )


def planned(work, tmp_path, *more):
    settings = [
        "--deepspeed_config",
        configuration(tmp_path, 2),
        "--data",
        str(work / "data"),
        "--train-steps",
        "1",
    ]
    return plan(pretrain_options.parse([*settings, "--split", "1,0,0", *map(str, more)]), 1)


def test_contradictions_are_named(work, tmp_path):
    for name, vocab_size in (("hf", 300), ("small", 100)):
        make("llama3", tmp_path / name, vocab_size=vocab_size)
    init = ["--init-from", tmp_path / "hf"]
    with pytest.raises(CoatConfigError) as refused:
        planned(work, tmp_path, *init, "--model", "tiny")
    assert f"model.hidden_size: got 256, accepted: 64, which {init[1]} (--init-from) has" in str(
        refused.value
    )
    assert "model.rotary_base: got 10000, accepted: 500000" in str(refused.value)
    with pytest.raises(
        CoatConfigError, match="model.vocab_size: got 100, accepted: at least the 250 ids"
    ):
        planned(work, tmp_path, "--init-from", tmp_path / "small")


def test_sequences_longer_than_the_weights_are_made_for_are_noted(work, tmp_path):
    make("llama3", tmp_path / "hf", vocab_size=300)
    longest = open_weights(tmp_path / "hf").model.seq_length
    for length, noted in ((longest, False), (2 * longest, True)):
        p = planned(
            work,
            tmp_path,
            "--init-from",
            tmp_path / "hf",
            "--model-override",
            f"seq_length={length}",
        )
        line = (
            f"model.seq_length: got {length}, more than the {longest} that {tmp_path / 'hf'} "
            "(--init-from)"
        )
        assert (f"note: {line}" in (p.warning or "")) == noted


def test_trained_weights_at_a_pretraining_rate_without_warm_up_are_noted(work, tmp_path):
    make("llama3", tmp_path / "hf", vocab_size=300)
    argv = ["--init-from", tmp_path / "hf", "--warmup-steps", "0"]
    for more, noted in (([], True), (["--warmup-steps", "1"], False), (["--lr", "1e-4"], False)):
        warning = planned(work, tmp_path, *argv, *more).warning or ""
        assert (
            "note: --warmup-steps: 0 with --init-from and a learning rate of " in warning
        ) == noted


def test_another_tokenizer_is_noted(tmp_path):
    make("llama3", tmp_path / "hf")
    weights, same = (
        open_weights(tmp_path / "hf"),
        tokenizer_digest(tmp_path / "hf" / "tokenizer.json", 2),
    )
    assert tokenizer_warning(weights, "data", DataInfo(100, 2, same)) is None
    assert tokenizer_warning(weights, "data", DataInfo(100, 2, None)) is None  # not known
    # Token files, and prepared data.
    blend = telling(["a", "b"], [DataInfo(100, 2, None), DataInfo(100, 2, "0" * 64)])
    assert "--data: b was prepared with" in tokenizer_warning(weights, *blend)
