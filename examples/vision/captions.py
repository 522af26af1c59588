"""Texts of pictures and captions as tokens, captions word by word from a model, and how many of
them are right.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from . import shapes


def text_length(features: int, tp: int) -> int:
    """Tokens of a text: <start>, the picture's, the caption's; and a rest, as sequence
    parallelism divides them.
    """
    return -(-(1 + features + shapes.CAPTION) // tp) * tp


def make_batch(
    scenes: torch.Tensor,
    side: int,
    features: int,
    tp: int,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Pictures ``[b, 3, side, side]``, tokens and labels ``[b, s]``, and which labels are words
    of the caption.
    """
    text = torch.full((len(scenes), text_length(features, tp) + 1), shapes.PAD)
    text[:, 0] = shapes.START
    text[:, 1 : 1 + features] = shapes.IMAGE
    text[:, 1 + features : 1 + features + shapes.CAPTION] = shapes.captions(scenes)
    tokens, labels = text[:, :-1], text[:, 1:]
    mask = (labels != shapes.PAD) & (labels != shapes.IMAGE)
    return shapes.draw(scenes, side, generator, device), *(
        t.to(device) for t in (tokens, labels, mask)
    )


@torch.no_grad()
def say(engine: Any, images: torch.Tensor, tokens: torch.Tensor, features: int) -> torch.Tensor:
    """Captions ``[b, CAPTION]``, each word the likeliest behind those before it. Those in
    ``tokens`` are not read.
    """
    first, last = 1 + features, features + shapes.CAPTION
    tokens = tokens.clone()
    tokens[:, first:] = shapes.PAD
    for place in range(first, last + 1):
        logits = gather_from_tensor_model_parallel_region(engine(images, tokens)[:, place - 1])
        tokens[:, place] = logits.argmax(-1)
    return tokens[:, first : last + 1]


def evaluate(
    engine: Any, pictures: int, side: int, features: int, tp: int, held_out: bool, examples: int = 0
) -> dict[str, Any]:
    """Captions of new pictures, of pairs that were held out or of others, in the precision that the
    model trains in.

    Returns:
        ``captions``: the share that is right in every word; ``words``: the share of words;
        ``examples``: some captions, as they should be and as they are.
    """
    engine.eval()
    right, words, shown = 0, 0.0, []
    generator = torch.Generator().manual_seed(999 + held_out)  # no seed of training's
    for start in range(0, pictures, 64):
        scenes = shapes.sample(min(64, pictures - start), generator, held_out)
        images, tokens, *_ = make_batch(scenes, side, features, tp, generator, engine.device)
        said = say(engine, images, tokens, features).cpu()
        wanted = shapes.captions(scenes)
        same = (said == wanted) | (wanted == shapes.PAD)  # what follows <end> is not looked at
        right += int(same.all(1).sum())
        words += float(same[wanted != shapes.PAD].float().mean()) * len(scenes)
        shown += [
            (shapes.sentence(w), shapes.sentence(s)) for w, s in zip(wanted, said, strict=True)
        ]
    engine.train()
    return {"captions": right / pictures, "words": words / pictures, "examples": shown[:examples]}
