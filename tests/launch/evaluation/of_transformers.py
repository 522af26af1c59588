"""Perplexity and multiple choice with transformers alone, one sequence at a time: what
evaluate.py is compared with.
"""

import json
import math
from pathlib import Path

import torch


@torch.no_grad()
def token_losses(model, ids):
    """Loss of each token of ``ids`` but the first, fp64."""
    logits = model(torch.tensor([ids])).logits[0].double()
    return torch.nn.functional.cross_entropy(
        logits[:-1], torch.tensor(ids[1:], dtype=torch.long), reduction="none"
    )


def text_loss(model, tokenizer, text, window, stride):
    """Sum and number of the scored tokens' losses: the recipe of transformers' page on
    perplexity.
    """
    ids = tokenizer(text).input_ids
    total, count, previous = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        scored = token_losses(model, ids[begin:end])[-(end - previous) :]
        total, count, previous = total + float(scored.sum()), count + len(scored), end
        if end == len(ids):
            break
    return total, count


def choice_likelihoods(model, tokenizer, question, window):
    """Log-likelihood of each choice, tokenized as lm-evaluation-harness does."""
    found = []
    for choice in question["choices"]:
        context = question["context"]
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, choice = context[:-spaces], context[-spaces:] + choice
        whole, before = tokenizer(context + choice).input_ids, tokenizer(context).input_ids
        own = whole[len(before) :]
        before = before or [tokenizer.eos_token_id]
        ids = (before + own)[-(window + 1) :]
        found.append(-float(token_losses(model, ids)[-len(own) :].sum()))
    return found


def accuracies(model, tokenizer, file, window):
    """Log-likelihoods of all questions, accuracy by total and by characters."""
    likelihoods, right, right_norm = [], 0, 0
    questions = [json.loads(line) for line in Path(file).read_text().splitlines()]
    for question in questions:
        one = choice_likelihoods(model, tokenizer, question, window)
        answer = (
            question["answer"]
            if isinstance(question["answer"], int)
            else "ABCD".index(question["answer"])
        )
        lengths = [len(c) for c in question["choices"]]
        right += max(range(len(one)), key=lambda i: one[i]) == answer
        right_norm += max(range(len(one)), key=lambda i: one[i] / lengths[i]) == answer
        likelihoods.append(one)
    n = len(questions)
    error = math.sqrt(right / n * (1 - right / n) / (n - 1))
    return likelihoods, right / n, right_norm / n, error
