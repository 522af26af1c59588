"""What an exported model has beside its weights: above all, where generation stops."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from launch.chat.export import turn_ends, write_beside
from tests.launch.chat.support import chat, make_tokenizer, prepared

# Turns end with another token than documents, and a line break behind it is trained, as many
# templates have it.
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|system|>\n' }}{% "
    "endgeneration %}"
    "{% else %}{{ m.content + '<|system|>\n' }}{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer():
    return make_tokenizer(TEMPLATE)


def test_turns_end_with_special_tokens(tmp_path, tokenizer):
    end, document = (tokenizer.convert_tokens_to_ids(token) for token in ("<|system|>", "<|end|>"))
    turns = [chat("user: q", f"assistant: {n}") for n in range(5)]
    assert turn_ends(prepared(tmp_path, tokenizer, *turns), tokenizer) == [end]
    cut = chat("user: q", "assistant: " + "word " * 40)
    pair = json.dumps({"prompt": "q", "completion": "a"})
    both = prepared(tmp_path, tokenizer, *turns, cut, pair, seq_length=24, too_long="truncate")
    assert turn_ends(both, tokenizer) == [end, document]


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (
            {
                "generation_config.json": {
                    "eos_token_id": 7,
                    "top_p": 0.5,
                    "_from_model_config": True,
                }
            },
            [5, 7],
        ),
        (
            {
                "generation_config.json": {"eos_token_id": [7, 8]},
                "config.json": {"eos_token_id": 5},
            },
            [5, 7, 8],
        ),
        ({"generation_config.json": {"eos_token_id": [7, 5]}}, [7, 5]),
        ({"generation_config.json": {}}, 5),
        ({"config.json": {"eos_token_id": 7, "bos_token_id": 9, "vocab_size": 300}}, [5, 7]),
        ({"config.json": {"eos_token_id": 5}}, None),
        ({}, 5),
    ],
)
def test_generation_stops_there(tmp_path, tokenizer, files, wanted):
    assert tokenizer.convert_tokens_to_ids("<|system|>") == 5
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    for name, content in files.items():
        (model / name).write_text(json.dumps(content))
    began_with = SimpleNamespace(
        path=model, travelling=lambda: {name: model / name for name in files}
    )
    write_beside(
        out, tokenizer, began_with, prepared(tmp_path, tokenizer, chat("user: q", "assistant: a"))
    )
    made = out / "generation_config.json"
    assert made.exists() == (wanted is not None)
    if wanted is not None:
        config = json.loads(made.read_text())
        assert config.pop("eos_token_id") == wanted and "_from_model_config" not in config
        assert config == {
            k: v for f in files.values() for k, v in f.items() if k in ("top_p", "bos_token_id")
        }
    if "config.json" in files:
        assert json.loads((out / "config.json").read_text()) == files["config.json"]
