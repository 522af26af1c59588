"""Reading a configuration: its forms, files that cannot be read, and the block's documented keys.

Wrong keys and values: ``tests/contracts/test_refusals.py``.
"""

import base64
import json
from pathlib import Path

import pytest
import torch

from coat_dist.config import CoatConfig, CoatConfigError, load_json
from coat_dist.deepspeed.request import validate
from coat_dist.deepspeed.zero_init import zero_init
from coat_dist.patching.settings import REFUSED, coat_block
from coat_dist.settings import Settings
from tests.coat_dist.configurations import BASE


def test_check_accepts_the_documented_block():
    coat = Settings.read(BASE).check(tp=2).coat
    assert coat.optimizer.first_moment == "e4m3" and coat.activation.bf16_layers == (0, -1)
    assert CoatConfig.parse(coat) is coat is CoatConfig.from_deepspeed({**BASE, "coat": coat})


def test_parse_defaults_are_those_of_the_documented_block():
    assert CoatConfig.parse({}) == CoatConfig.parse(
        {**BASE["coat"], "activation": {**BASE["coat"]["activation"], "bf16_layers": []}}
    )


def test_load_json_reads_every_form(tmp_path):
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
def test_load_json_names_broken_files(tmp_path, text, word):
    path = tmp_path / "ds.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CoatConfigError, match=word):
        load_json(path)


def test_load_json_names_what_it_cannot_read():
    with pytest.raises(CoatConfigError, match="cannot read 'nowhere.json'"):
        load_json("nowhere.json")
    with pytest.raises(CoatConfigError, match="got int"):
        load_json(3)


def test_docs_config_lists_every_key_with_its_default():
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


def test_settings_are_read_once_and_accepted_everywhere(tmp_path, monkeypatch):
    given = {**BASE, "_comment": "", "coat": {"activation": {"enabled": False}}}
    (tmp_path / "ds.json").write_text(json.dumps(given))
    parsed, parse = [], CoatConfig.model_validate
    monkeypatch.setattr(
        CoatConfig, "model_validate", lambda block: parsed.append(block) or parse(block)
    )
    settings = Settings.read(tmp_path / "ds.json")
    monkeypatch.setattr("coat_dist.settings.load_json", None)
    assert Settings.read(settings) is settings
    assert coat_block(settings) is settings.coat
    with zero_init(settings) as divided:
        assert not divided
    request = validate({"model": torch.nn.Linear(3, 3), "config": settings}, explicit=True)
    assert request.error is None and request.facts.coat is settings.coat and len(parsed) == 1
    engines = settings.for_deepspeed(request.facts)
    engines["optimizer"]["params"]["lr"] = 1.0
    assert settings.values["optimizer.params.lr"] == 3e-4, "the engine has a copy"
    assert "coat" not in engines and "_comment" not in engines
