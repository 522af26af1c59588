"""The block: every wrong key or value is one problem, and files that cannot be read are named."""

import base64
import json
from pathlib import Path

import pytest

from coat_dist.config import CoatConfig, CoatConfigError, load_json
from coat_dist.deepspeed.config.validate import check_deepspeed
from coat_dist.patching.settings import REFUSED
from tests.coat_dist.configurations import BASE


def test_the_documented_block_is_accepted():
    coat = check_deepspeed(BASE, tp=2)
    assert coat.optimizer.first_moment == "e4m3" and coat.activation.bf16_layers == (0, -1)
    assert CoatConfig.parse(coat) is coat is CoatConfig.from_deepspeed({**BASE, "coat": coat})


def test_defaults_are_those_of_the_documented_block():
    assert CoatConfig.parse({}) == CoatConfig.parse(
        {**BASE["coat"], "activation": {**BASE["coat"]["activation"], "bf16_layers": []}}
    )


OPTIMIZER = {"second_moment": "log8", "expand": False}


@pytest.mark.parametrize(
    ("block", "key", "given", "accepted"),
    [
        (3, "", "got 3", "optimizer, activation"),
        (None, "", "got null", "or no such key"),
        (
            {"optimiser": {}},
            ".optimiser",
            "unknown key (did you mean 'optimizer'?)",
            "optimizer, activation",
        ),
        ({"first_moment": "int8"}, ".first_moment", "unknown key", "optimizer, activation"),
        ({"optimizer": 3}, ".optimizer", "got 3", "an object with keys first_moment"),
        (
            {"optimizer": {"expend": 1}},
            ".optimizer.expend",
            "unknown key (did you mean 'expand'?)",
            "second_moment",
        ),
        (
            {"optimizer": OPTIMIZER},
            ".optimizer.expand",
            'got false with second_moment "log8"',
            "true",
        ),
        *(
            ({part: {key: value}}, f".{part}.{key}", f"got {json.dumps(value)}", accepted)
            for part, key, value, accepted in (
                ("optimizer", "group_size", 100, "64, 128 or 256"),
                ("optimizer", "expand", "yes", "true or false"),
                ("optimizer", "second_moment", "int8", "'log8'"),
                ("optimizer", "first_moment", "log8", "'int8'"),
                ("optimizer", "stochastic_rounding", "on", "true, false"),
                ("activation", "forward", "fast", "'exact' or 'quantized'"),
                ("activation", "saved_format", "fp8", "'mixed', 'e3m4', 'int8', 'e4m3' or 'e5m2'"),
                ("activation", "attention", "fp16", "'bf16' or 'fp8'"),
                *(
                    ("activation", "z_loss", value, "")
                    for value in (-1e-4, float("nan"), "small", True)
                ),
            )
        ),
        (
            {"activation": {"z_loss": 1, "loss": "plain"}},
            ".activation.z_loss",
            'got 1.0 with loss "plain"',
            "0",
        ),
        (
            {"activation": {"z_loss": 1, "enabled": False}},
            ".activation.z_loss",
            "got 1.0 with enabled false",
            "0",
        ),
        (
            {"activation": {"bf16_layers": ["first"]}},
            ".activation.bf16_layers.0",
            'got "first"',
            "an integer",
        ),
        (
            {"activation": {"bf16_layers": [0, 2, 0]}},
            ".activation.bf16_layers",
            "got [0, 2, 0]",
            "each layer once",
        ),
        *(
            (
                {"activation": {"cuda_graphs": True, key: value}},
                ".activation.cuda_graphs",
                f"got true with {key}",
                key,
            )
            for key, value in (
                ("weights", "cached"),
                ("wgrad", "main_grad"),
                ("tp_invariant", True),
            )
        ),
        (
            {"activation": {"tp_invariant": True, "fp8_gather": False}},
            ".activation.tp_invariant",
            "got true",
            "true",
        ),
    ],
)
def test_wrong_block(block, key, given, accepted):
    with pytest.raises(CoatConfigError) as error:
        CoatConfig.from_deepspeed({"coat": block})
    (problem,) = error.value.problems
    assert (
        problem.key == f"coat{key}"
        and problem.got.startswith(given)
        and accepted in problem.accepted
    )


def test_config_sources(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BASE))
    encoded = base64.urlsafe_b64encode(json.dumps(BASE).encode()).decode()
    commented = base64.urlsafe_b64encode(f"{{ # HJSON\n{json.dumps(BASE)[1:]}".encode()).decode()
    assert (
        load_json(path)
        == load_json(str(path))
        == load_json(BASE)
        == load_json(encoded)
        == load_json(commented)
    )
    copied = load_json(BASE)
    copied["coat"]["optimizer"]["expand"] = False
    assert BASE["coat"]["optimizer"]["expand"] is True


BROKEN = [("{", "not JSON"), ("", "holds nothing"), ("# a\n", "holds nothing"), ("[]", "list")]
BROKEN += [('{"a": 1, "a": 2}', "twice")]


@pytest.mark.parametrize(("text", "word"), [*BROKEN, (b"\xff\xfe{}", "not JSON: 'utf-8' codec")])
def test_broken_files(tmp_path, text, word):
    path = tmp_path / "ds.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CoatConfigError, match=word):
        load_json(path)


def test_missing_file():
    with pytest.raises(CoatConfigError, match="cannot read 'nowhere.json'"):
        load_json("nowhere.json")
    with pytest.raises(CoatConfigError, match="got int"):
        load_json(3)


def test_the_page_lists_every_key_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    for name, block in CoatConfig.model_fields.items():
        for key, field in block.annotation.model_fields.items():
            default = json.dumps(
                list(field.default) if isinstance(field.default, tuple) else field.default
            )
            (row,) = (
                line.split(" | ")
                for line in page.splitlines()
                if line.startswith(f"| `{name}.{key}` |")
            )
            assert row[1] == f"`{default}`", f"{name}.{key}"
            # Which way to train honours it, or has nothing to honour.
            if name == "activation" and key != "enabled":
                ways = {"T": "transformers", "M": "Megatron"}
                assert {w for w in ways if w in " ".join(row[2:-1])} == {
                    w for w in ways if key not in REFUSED[ways[w]]
                }
