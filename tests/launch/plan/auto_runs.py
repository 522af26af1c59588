"""Runs of ``pretrain`` on ranks that run out of memory where a test wants them to."""

from unittest import mock

import torch

from tests.launch.pretrain_runs import rank_main


def limited(rank, world, argv, most=None, at=None):
    """``pretrain.train``; how it ended, or the error.

    Args:
        most: forward passes with more samples than this are out of memory.
        at: "build", "save", or the number of the forward pass that is out of memory.
    """
    from launch.train import build, checkpoint, exhausted

    real_loss, passes = build.language_model_loss, [0]
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full. And more.")

    def language_model_loss(*args):
        inner = real_loss(*args)

        def loss(engine, batch):
            passes[0] += 1
            if passes[0] == at or (most is not None and len(batch["tokens"]) > most):
                raise full
            return inner(engine, batch)

        return loss

    def failing(module, name):
        wraps = getattr(module, name)
        return mock.patch.object(module, name, side_effect=full if at == name.split("_")[0] else None, wraps=wraps)

    with (
        mock.patch.object(build, "language_model_loss", language_model_loss),
        failing(build, "build_engine"),
        failing(checkpoint, "save"),
    ):
        try:
            return rank_main(rank, world, argv)
        except exhausted.OutOfMemory as problem:
            return f"OutOfMemory: {problem}"
