"""What the tests of several programs are given: data and a model to train, Megatron's groups, a
tokenizer.
"""

import io
import json
import random

import pytest
import sentencepiece
import torch

from launch.common import log_level
from tests.launch.pretrain_runs import MODEL
from tests.launch.tiny_data import make
from tests.support import megatron_on_one_rank


@pytest.fixture(autouse=True)
def nothing_is_hidden(monkeypatch):
    """A program that is called with --log-level or --quiet leaves its choice to the process."""
    monkeypatch.setattr(log_level, "_level", "info")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with random-token data and a model description."""
    folder = tmp_path_factory.mktemp("pretrain")
    seed = int(torch.randint(10**6, ()))
    make(folder / "data", seed=seed, vocab=250, vocab_size=250, tokenizer_digest=None)
    (folder / "model.json").write_text(json.dumps(MODEL))
    return folder


@pytest.fixture
def one_rank():
    with megatron_on_one_rank():
        yield


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory):
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    rng = random.Random(3)
    lines = [" ".join(rng.choices(words, k=12)) for _ in range(200)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=28,
        minloglevel=2,
        num_threads=1,
    )
    file = tmp_path_factory.mktemp("spm") / "words.model"
    file.write_bytes(model.getvalue())
    return file
