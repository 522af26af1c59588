"""Which tokens are trained: the assistant's and their end of turn, with marks in the template
and without.
"""

import json

import pytest

pytest.importorskip("transformers")

from launch.chat.records import Malformed, parse
from launch.chat.template import PLAIN_TEMPLATE, ChatTemplate, ids_of_text, load_tokenizer
from launch.prep import DataError
from tests.launch.chat.support import MARKED, UNMARKED, chat, make_tokenizer, spoken

LINE = chat(
    "system: S", "user: one", "assistant: two", "tool: three", "assistant: four", "user: five"
)
SPOKEN = [
    (False, "<|system|>S<|end|>\n<|user|>one<|end|>\n<|assistant|>"),
    (True, "two<|end|>"),
    (False, "\n<|tool|>three<|end|>\n<|assistant|>"),
    (True, "four<|end|>"),
    (False, "\n<|user|>five<|end|>\n"),
]


@pytest.mark.parametrize("text", [MARKED, UNMARKED])
def test_only_the_assistant_is_trained(text):
    template = ChatTemplate(make_tokenizer(text, ["one two three four five"] * 9))
    assert spoken(template, LINE) == SPOKEN and template.in_pieces == 0
    messages = json.loads(LINE)["messages"]
    messages[2]["weight"] = 0
    found = spoken(template, json.dumps({"messages": messages}))
    assert [piece for learnt, piece in found if learnt] == ["four<|end|>"]


def test_marks_give_what_transformers_gives():
    tokenizer = make_tokenizer()
    wanted = tokenizer.apply_chat_template(
        json.loads(LINE)["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    assert ChatTemplate(tokenizer).encode(parse(LINE)) == (
        wanted["input_ids"],
        list(map(bool, wanted["assistant_masks"])),
    )


def test_tool_calls_are_trained_and_results_are_not():
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "s"},
    ]
    for text in (MARKED, UNMARKED):
        found = spoken(ChatTemplate(make_tokenizer(text)), json.dumps({"messages": messages}))
        trained = [piece for learnt, piece in found if learnt]
        assert trained == ['<call>{"name": "f", "arguments": {"a": 1}}</call><|end|>', "s<|end|>"]


def test_a_message_without_words_has_no_text_to_train():
    """The end of a turn lies outside of the marks: a message without words has an empty one."""
    text = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content is defined %}{% generation %}{{ m.reasoning_content }}{% "
        "endgeneration %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif "
        "%}<|end|>{% endfor %}"
    )
    template = ChatTemplate(make_tokenizer(text))
    for silent, wanted in (("assistant: ", ["yes"]), ("assistant: no", ["no", "yes"])):
        found = spoken(template, chat("user: a", silent, "user: b", "assistant: yes"))
        assert [piece for learnt, piece in found if learnt] == wanted

    thinking = {"role": "assistant", "reasoning_content": "why"}
    messages = [
        {**thinking, "content": "one"},
        {**thinking, "content": "", "reasoning_content": ""},
    ]
    # Which of them is untrained is unknown.
    with pytest.raises(Malformed, match="marks 4 texts of 2 messages"):
        template.encode(parse(json.dumps({"messages": messages})))


def test_plain_template():
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    found = spoken(ChatTemplate(tokenizer), chat("user: one", "assistant: two"))
    assert found == [
        (False, "### User:\none\n\n### Assistant:\n"),
        (True, "two<|end|>"),
        (False, "\n\n"),
    ]
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "one"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == found[0][1]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    # Null beside a call, as OpenAI has it.
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "one"}, message], tokenize=False
    )
    assert text == asked + '<tool_call>{"name": "f", "arguments": {}}</tool_call><|end|>\n\n'


@pytest.mark.parametrize("marked", [True, False])
def test_a_prompt_that_ends_with_white_space_is_the_one_that_generation_has(marked):
    """Behind "Assistant: " a joined token of space and word would be learnt, and generation
    begins behind the space.
    """
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Assistant: ' }}{% generation %}"
        "{{ m.content + '<|end|>' }}{% endgeneration %}{% else %}{{ 'User: ' + m.content + '\n' "
        "}}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
    )
    text = (
        text if marked else text.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    )
    tokenizer = make_tokenizer(text, texts=["Assistant: hello there hello"] * 50, vocab=330)
    assert len(tokenizer.tokenize(" hello")) == 1, "there is such a token"
    template = ChatTemplate(tokenizer)
    ids, learnt = template.encode(parse(chat("user: hello", "assistant: hello there")))
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_dict=True
    )
    assert ids[: learnt.index(True)] == asked["input_ids"] and template.in_pieces == 1
    assert (
        tokenizer.decode([i for i, trained in zip(ids, learnt, strict=True) if trained])
        == "hello there<|end|>"
    )


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_pieces_gain_no_space_of_tokenizers_that_put_one_before_a_text(scheme):
    import tokenizers
    import transformers

    words = ["Q:", "A:", "x", "yes", "bc"]
    vocabulary = {
        t: i
        for i, t in enumerate(
            ["<unk>", "<|end|>", "▁", *sorted({c for w in words for c in w}), "bc"]
        )
    }
    merges = [("b", "c")]
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme, split=False)
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A:b' }}{% generation %}{{ "
        "m.content }}"
    )
    text += "{% endgeneration %}{% else %}{{ 'Q:' + m.content }}{% endif %}{% endfor %}"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="<|end|>", chat_template=text
    )
    template = ChatTemplate(tokenizer)
    ids, learnt = template.encode(parse(chat("user: x", "assistant: cyes")))
    assert template.in_pieces == 1, "b and c are one token"
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens.count("▁") == 1 and tokens[0] == "▁", tokens
    assert [t for t, trained in zip(tokens, learnt, strict=True) if trained] == ["c", "y", "e", "s"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        # Written otherwise when it is the last one: prefixes show nothing.
        (
            UNMARKED.replace(
                "{{ m.content + '<|end|>' }}", "{{ ('!' if loop.last else '') + m.content }}"
            ),
            "messages.2.: ",
        ),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            + MARKED,
            "no system",
        ),
        ("{% if %}", "the chat template does not take it: TemplateSyntaxError"),
    ],
)
def test_templates_that_cannot_be_used(text, why):
    with pytest.raises(Malformed, match=why):
        ChatTemplate(make_tokenizer(text)).encode(parse(LINE))


def test_prompt_and_completion():
    template = ChatTemplate(make_tokenizer(texts=["= 4"] * 20))
    pair = json.dumps({"prompt": "2 + 2 =", "completion": " 4"})
    assert spoken(template, pair) == [(False, "2 + 2 ="), (True, " 4<|end|>")]
    joined = ChatTemplate(make_tokenizer(texts=["bc"] * 50))  # "bc" is one token of "abc"
    assert spoken(joined, json.dumps({"prompt": "ab", "completion": "c"})) == [
        (False, "ab"),
        (True, "c<|end|>"),
    ]


def test_tokenizer_folders_and_templates(tmp_path):
    make_tokenizer(template=None).save_pretrained(tmp_path / "bare")
    make_tokenizer().save_pretrained(tmp_path / "own")
    # As editors on Windows write it.
    (tmp_path / "marked.jinja").write_text(MARKED, encoding="utf-8-sig")
    bare, own = str(tmp_path / "bare"), str(tmp_path / "own")
    assert load_tokenizer(bare).chat_template == PLAIN_TEMPLATE
    assert load_tokenizer(bare, str(tmp_path / "marked.jinja")).chat_template == MARKED
    assert load_tokenizer(own).chat_template == MARKED
    assert load_tokenizer(own, "plain").chat_template == PLAIN_TEMPLATE
    for arguments in ((str(tmp_path / "none"),), (str(tmp_path),), (own, str(tmp_path / "none"))):
        with pytest.raises(DataError, match="^--(tokenizer|chat-template): got "):
            load_tokenizer(*arguments)


def test_calls_that_a_template_ignores_are_refused_and_tools_counted():
    """A model would learn to say nothing where it should call."""
    text = "{% for m in messages %}{{ m.role + ': ' + (m.content or '') + '<|end|>' }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = {"function": {"name": "f", "arguments": {}}}
    asked = {"role": "user", "content": "q"}
    called = json.dumps(
        {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    )
    template = ChatTemplate(make_tokenizer(text))
    with pytest.raises(Malformed, match="tool_calls: the chat template ignores them"):
        template.encode(parse(called))
    template.encode(parse(chat("user: q", "assistant: a", tools=tools)))
    assert template.without_tools == 1
    plain = ChatTemplate(make_tokenizer(PLAIN_TEMPLATE))
    plain.encode(parse(json.dumps({**json.loads(called), "tools": tools})))
    assert plain.without_tools == 0


@pytest.mark.parametrize(
    "line",
    [
        chat("user: q", "assistant: a", tools=[{"name": "\ud83d"}]),
        chat("user: \ud83d", "assistant: a"),
        json.dumps({"prompt": "q", "completion": "\ud83d"}),
    ],
)
def test_half_a_surrogate_pair_is_malformed(line):
    with pytest.raises(Malformed):
        ChatTemplate(make_tokenizer(PLAIN_TEMPLATE)).encode(parse(line))


def test_added_tokens_may_lie_beyond_the_model():
    """A padding token that was added to a tokenizer, and no row to the model, is no reason to
    refuse either.
    """
    tokenizer = make_tokenizer()
    vocab = len(tokenizer)
    assert ids_of_text(tokenizer) == vocab
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert ids_of_text(tokenizer) == vocab and tokenizer.pad_token_id == vocab
    template = ChatTemplate(tokenizer, vocab)
    assert spoken(template, chat("user: q", "assistant: a"))[1] == (True, "a<|end|>")
    with pytest.raises(
        Malformed, match=f"'<pad>' with the id {vocab}, accepted: ids below the model's {vocab}"
    ):
        template.encode(parse(chat("user: q", "assistant: <pad>")))
