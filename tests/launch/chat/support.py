"""A tokenizer with a chat template, and a small Llama, made here: nothing is downloaded."""

import json

# Every turn ends with a token; what the assistant says is marked.
MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + (c.function | tojson) + '</call>' }}{% endfor "
    "%}"
    "{{ m.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
SPECIAL = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]


def make_tokenizer(template=MARKED, texts=(), vocab=300):
    """Byte-level BPE of ``transformers``."""
    import tokenizers
    import transformers

    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator(iter(texts), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="<|end|>", pad_token="<|pad|>", chat_template=template
    )


def make_llama(folder, tokenizer, vocab=None, **more):
    """A small Llama with random weights in Hugging Face's layout, beside its tokenizer, with its
    ids or more.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
    }
    config = transformers.LlamaConfig(vocab_size=vocab or len(tokenizer), **{**sizes, **more})
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepared(folder, tokenizer, *lines, **reading):
    """The conversations of these lines."""
    from launch.chat.store import Conversations, Reading, prepare
    from launch.chat.template import ChatTemplate

    file = folder / "chats.jsonl"
    file.write_text("\n".join(lines))
    made = prepare(
        [file], ChatTemplate(tokenizer), Reading(**{"seq_length": 64, **reading}), folder / "cache"
    )
    return Conversations(made, [file])


def chat(*turns, **more):
    """A line of a chat file: "user: hello" is a turn."""
    messages = [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]
    return json.dumps({"messages": messages, **more})


def spoken(template, line):
    """What a line becomes: pieces of text, each with whether it is trained."""
    from launch.chat.records import parse

    ids, learnt = template.encode(parse(line))
    pieces = []
    for token, trained in zip(ids, learnt, strict=True):
        if not pieces or pieces[-1][0] != trained:
            pieces.append((trained, []))
        pieces[-1][1].append(token)
    return [(trained, template.tokenizer.decode(tokens)) for trained, tokens in pieces]
