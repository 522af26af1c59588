"""Runs of ``pretrain`` on ranks that run out of memory where a test wants them to."""

import pytest
import torch

from tests.launch.pretrain_runs import rank_main


def limited(rank, world, argv, at=None):
    """How a run ended, or the error.

    Args:
        at: "build_engine", "save", or the number of the forward pass that is out of memory.
    """
    from launch.train import checkpoint, exhausted, training_engine

    inner_loss, passes = training_engine.language_model_loss, []

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full. And more."
        )

    def language_model_loss(*args):
        inner = inner_loss(*args)

        def loss(engine, batch):
            passes.append(batch)
            return fail() if len(passes) == at else inner(engine, batch)

        return loss

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(training_engine, "language_model_loss", language_model_loss)
        if isinstance(at, str):
            patches.setattr(checkpoint if at == "save" else training_engine, at, fail)
        try:
            return rank_main(rank, world, argv)
        except exhausted.OutOfMemory as problem:
            return f"OutOfMemory: {problem}"
