"""A tiny Llama with random weights as transformers saves it, with a tokenizer, text and
questions.
"""

import json
import random
from types import SimpleNamespace

import pytest

WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "and",
    "is",
    "the",
    "of",
    "sum",
    "plus",
    "minus",
    "equals",
]


def sentence(rng, words):
    return " ".join(rng.choices(WORDS, k=words))


def tokenizer(folder, begin):
    """A byte-level BPE, whose template puts ``<s>`` before a text if ``begin``."""
    from tokenizers import Tokenizer, processors

    from launch.data.tokenizer import train_bpe

    rng = random.Random(2)
    train_bpe([sentence(rng, 40) for _ in range(40)], 320, folder / "tokenizer.json")
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<s>"])
    if begin:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
        )
    library.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """``hf`` (with a begin token), ``bare`` (without), ``text``, ``jsonl``, ``questions``; and
    transformers' model.
    """
    transformers = pytest.importorskip("transformers")
    import torch

    from tests.launch.hf.folders import SIZES

    folder = tmp_path_factory.mktemp("evaluation")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        **SIZES | {"vocab_size": 330, "intermediate_size": 128, "max_position_embeddings": 64},
        initializer_range=0.2,  # so that choices differ clearly
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    rng = random.Random(1)
    found = SimpleNamespace(folder=folder, model=model)
    for name, begin in (("hf", True), ("bare", False)):
        place = folder / name
        model.save_pretrained(place)
        tokenizer(place, begin)
        setattr(found, name, str(place))
    documents = [sentence(rng, n) for n in (90, 3, 40, 1, 150)] + ["é and 漢字 plus one"]
    (folder / "text.txt").write_text(sentence(rng, 200))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    questions = []
    for number in range(24):
        context = sentence(rng, rng.choice([0, 2, 5, 9]))
        choices = [" " + sentence(rng, rng.choice([1, 2, 4])) for _ in range(rng.choice([2, 3, 4]))]
        if number % 3 == 0 and context:  # white space on the other side
            context, choices = context + " ", [c[1:] for c in choices]
        questions.append(
            {"context": context, "choices": choices, "answer": rng.randrange(len(choices))}
        )
    questions.append(
        {"context": sentence(rng, 150), "choices": [" one", " two three"], "answer": "B"}
    )
    (folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    found.text, found.jsonl = str(folder / "text.txt"), str(folder / "text.jsonl")
    found.questions, found.documents = str(folder / "questions.jsonl"), documents
    return found
