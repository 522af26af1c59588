"""A small Llama with random weights and a tokenizer for it, in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

SIZES = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "300m": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
}
# What the assistant says stands between {% generation %} and {% endgeneration %}: that is what will
# be trained.
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- (message.content or '') + '<|end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""


def spoken(message: dict[str, Any]) -> str:
    """A message as :data:`TEMPLATE` writes it, without its borders: what a tokenizer is trained
    on.
    """
    calls = (
        f"<tool_call>{json.dumps(call['function'])}</tool_call>"
        for call in message.get("tool_calls", [])
    )
    return "".join(calls) + message.get("content", "")


def make(folder: Path, texts: Iterable[str], size: str, seed: int) -> None:
    """Train a byte-level BPE on ``texts`` and write it with a model beside it.

    Every digit is one token. Text between digits may become one token, however many words it has:
    conversations repeat a few phrases around their numbers.
    """
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers
    library.pre_tokenizer = split.Sequence(
        [
            split.Digits(individual_digits=True),
            split.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]
    library.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=split.ByteLevel.alphabet(),
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=special[2:],
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        # A few ids more than there are tokens, as larger models have.
        vocab_size=-(-len(tokenizer) // 128) * 128,
        max_position_embeddings=256 if size == "tiny" else 1024,
        num_key_value_heads=SIZES[size]["num_attention_heads"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **SIZES[size],
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
