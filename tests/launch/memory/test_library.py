"""The planner on models that transformers builds, against the models themselves and a GPU."""

import json
from itertools import product

import pytest
import torch
from transformers import AutoConfig

from coat_dist.config import ActivationConfig
from coat_dist.flow.saved import saved_for_backward
from coat_dist.hf import patch_model
from launch import planner
from launch.memory.paper import OnPaper
from launch.memory.peak import activations, peak_of
from launch.memory.run import Run, parameters
from tests.coat_dist.hf.families import toy
from tests.coat_dist.hf.tiny import SIZES, tiny


def planned(argv):
    """The planner's run of a command line."""
    return Run.of_plan(*planner.parse(argv))


BLOCK = {"activation": {"enabled": True}}
WIDTHS = {"hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 6, "head_dim": 8}
"""Wide beside a head, whose tables of the rotation are there once, not for every sequence."""


def options(folder, coat, config=None, **more):
    """Of the planner, for a model of transformers and a block."""
    AutoConfig.for_model(
        **({"model_type": "llama", **SIZES} if config is None else config)
    ).save_pretrained(folder)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW" if coat is None else "CoatAdamW", "params": {"lr": 1e-3}},
        **({} if coat is None else {"coat": coat}),
        **more,
    }
    (folder / "ds.json").write_text(json.dumps(settings))
    return [
        "--library",
        "transformers",
        "--model",
        str(folder),
        "--deepspeed_config",
        str(folder / "ds.json"),
    ]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *product(
            ["llama", "qwen3", "olmo2", "gemma2"], [None, {}, {"bf16_layers": [0]}, "checkpointing"]
        ),
        *product(["llama", "qwen3"], [{"attention": "fp8"}]),  # fused attention
        *product(["llama", "olmo2"], [{"boundaries": "fp8", "recompute": 4}]),
    ],
    ids=str,
)
def test_what_a_model_saves(tmp_path, name, more) -> None:
    """Fused, with norms on queries and keys, generic, and with an eager attention."""
    given = {**SIZES, **WIDTHS, "model_type": name, "use_cache": False}
    block = (
        None
        if more is None
        else {"activation": {"enabled": True, **(more if isinstance(more, dict) else {})}}
    )
    checkpointing = more == "checkpointing"
    again = ["--recompute-granularity", "full"] if checkpointing else []
    given = [*options(tmp_path, block, given), "--seq-length", "48", *again]
    run = planned(given)
    model = tiny(name, torch.bfloat16, **WIDTHS, use_cache=False)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    if run.flow is not None:
        patch_model(model, run.flow)
    with saved_for_backward(model) as found:
        model.base_model(input_ids=torch.zeros(2, 48, dtype=torch.long))
    # And lm_head's input.
    stream = 2 * run.model.hidden_size * run.tokens
    assert activations(run) - stream == pytest.approx(sum(found.values()), rel=0.02)


FAMILIES = (
    "deepseek_v3",
    "gpt_oss",
    "gemma3:ImageTextToText",
    "t5:Seq2SeqLM",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            *("qwen3_moe", "mixtral", "gemma4", "phi3", "glm4", "ministral3", "lfm2", "nemotron_h"),
            *("qwen3_5", "qwen3_next", "qwen2_5_vl:ImageTextToText", "llava:ImageTextToText"),
            *("bert:SequenceClassification", "bart:Seq2SeqLM", "gpt2"),
        )
    ),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("flow", [None, ActivationConfig(enabled="auto")], ids=["bf16", "flow"])
def test_what_a_family_saves(tmp_path, flow, family) -> None:
    """Experts, towers, layers that differ, encoders; attention counts as on paper."""
    model, _ = toy(family, 4)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    library = OnPaper(tmp_path)
    on_paper = library.saved(flow, 64)
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", "eager") != "eager":
            config._attn_implementation = "coat_on_paper"
    if flow is not None:
        patch_model(model, flow)
    ids = torch.randint(10, 200, (1, 64))
    labels = ids[:, 0] * 0 if family.endswith("Classification") else ids
    with saved_for_backward(model) as found:
        if on_paper.chunked:
            model.base_model(input_ids=ids)
        else:
            model(input_ids=ids, labels=labels)
    # A GPU has rows for any choice of the router, a CPU for this one.
    padded = 0.12 if library.chosen > 1 and flow is not None else 1e-4
    predicted = sum(on_paper.layers) + on_paper.rest + on_paper.loss
    assert predicted == pytest.approx(sum(found.values()), rel=padded)


ANCHOR = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("coat", "gib"),
    [
        (None, 52.9),
        (BLOCK, 20.2),
        ({"activation": {"enabled": True, "attention": "fp8"}}, 19.0),
    ],
)
def test_a_gpu(tmp_path, coat, gib) -> None:
    """Figures of one H100, docs/hugging-face.md."""
    sums = {"data_types": {"grad_accum_dtype": "fp32"}, "train_micro_batch_size_per_gpu": 8}
    run = planned(options(tmp_path, coat, ANCHOR, **sums))
    assert sum(p.numel for p in parameters(run)) == 1_176_832_000
    assert peak_of(run).allocated / 2**30 == pytest.approx(gib, rel=0.03)


def test_adapters_on_a_gpu(tmp_path) -> None:
    """A figure of one H200, benchmarks/results/speed/lora.json."""
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    llama |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    block = {"activation": {"frozen_weights": "fp8"}}
    given = options(tmp_path, block, ANCHOR | llama | {"tie_word_embeddings": False})
    run = planned([*given, "--lora", "16", "--seq-length", "2048", "--micro-batch", "4"])
    assert peak_of(run).allocated / 2**30 == pytest.approx(24.2, rel=0.05)


def test_what_is_not_counted_is_said(tmp_path, capsys) -> None:
    auto = {"activation": {"enabled": "auto"}}
    assert planner.main(options(tmp_path, auto, {"model_type": "gpt2", "n_layer": 2})) == 0
    assert not capsys.readouterr().err
    text = {**SIZES, "model_type": "gemma3_text", "rope_parameters": None}
    assert planner.main(options(tmp_path, auto, {"model_type": "gemma3", "text_config": text})) == 0
    assert "images" in capsys.readouterr().err
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    differ = {"model_type": "gemma4_text", "hidden_size": 256, "intermediate_size": 256, **heads}
    assert planner.main(options(tmp_path, auto, differ)) == 0
    assert planner.main(options(tmp_path, {"activation": {"frozen_weights": "fp8"}})) == 2
    assert 'frozen_weights: got "fp8", accepted: "bf16"' in capsys.readouterr().err


def test_values_that_the_trainer_fills_in(tmp_path, capsys) -> None:
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
        },
        "optimizer": {"type": "CoatAdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    }
    h = SIZES["hidden_size"]
    plain = {
        "stage": 3,
        "reduce_bucket_size": h * h,
        "stage3_prefetch_bucket_size": int(0.9 * h * h),
    }
    said = []
    for given in (auto, {"zero_optimization": plain}):
        assert (
            planner.main([*options(tmp_path, BLOCK, **given), "--micro-batch", "4", "--json"]) == 0
        )
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1] and said[0]["micro_batch"] == 4
    assert planner.main(options(tmp_path, BLOCK, **auto)) == 0
    largest = "micro-batch {largest_micro_batch}, ".format(**said[0])
    assert largest in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "config", "said"),
    [
        (
            ["--tensor-parallel", "2"],
            None,
            "--tensor-parallel: got 2, accepted: 1 with --library transformers",
        ),
        (
            ["--model", "llama2-7b"],
            None,
            "--model: got llama2-7b, accepted: a folder with the config.json",
        ),
        (
            [],
            {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
            "that reads tokens, or that file (ViTForImageClassification reads pixel_values)",
        ),
        (
            [],
            {"model_type": "jetmoe", "num_hidden_layers": 2},
            "--model: got a jetmoe, accepted: a model whose forward runs on tokens alone",
        ),
    ],
)
def test_what_is_refused(tmp_path, capsys, argv, config, said) -> None:
    assert planner.main([*options(tmp_path, BLOCK, config), *argv]) == 2
    assert said in capsys.readouterr().err
