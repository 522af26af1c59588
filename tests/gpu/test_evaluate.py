"""evaluate.py on a GPU: rows of any length in BF16 and FP8, beside transformers in fp32 on the
CPU.
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.launch.evaluation import of_transformers
from tests.launch.evaluation.conftest import tiny  # noqa: F401
from tests.launch.evaluation.runs import rank_main
from tests.support import run_ranks


@pytest.mark.parametrize(("forward", "bound"), [("bf16", 0.01), ("fp8", 0.05)])
def test_loss_is_near_that_of_fp32(tiny, forward, bound):  # noqa: F811
    from transformers import AutoTokenizer

    # Batches of three rows: numbers of tokens that no tile of a product divides.
    argv = [
        "--load",
        tiny.hf,
        "--forward",
        forward,
        "--text",
        tiny.jsonl,
        "--choices",
        tiny.questions,
        "--batch-size",
        3,
    ]
    (result,) = run_ranks(1, rank_main, [str(a) for a in argv], backend="nccl")
    tokenizer = AutoTokenizer.from_pretrained(tiny.hf)
    pairs = [of_transformers.text_loss(tiny.model, tokenizer, d, 64, 32) for d in tiny.documents]
    total, count = map(sum, zip(*pairs, strict=True))
    assert result["text"][0]["tokens_scored"] == count
    assert abs(result["text"][0]["loss"] / (total / count) - 1) < bound
    likelihoods, *_ = of_transformers.accuracies(tiny.model, tokenizer, tiny.questions, 64)
    for one, expected in zip(result["choices"][0]["details"], likelihoods, strict=True):
        assert one["loglikelihoods"] == pytest.approx(expected, rel=10 * bound)
