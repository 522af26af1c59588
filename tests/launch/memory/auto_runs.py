"""Runs of ``pretrain`` on ranks that run out of memory where a test wants them to."""

import torch

from tests.launch.pretrain_runs import rank_main


def limited(rank, world, argv, at=None):
    """``pretrain.train``; how it ended, or the error.

    Args:
        at: "build", "save", or the number of the forward pass that is out of memory.
    """
    from launch.train import checkpoint, exhausted, training_engine

    inner_loss, inner_engine, passes = (
        training_engine.language_model_loss,
        training_engine.build_engine,
        [0],
    )
    inner_save = checkpoint.save

    def fail():
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full. And more."
        )

    def language_model_loss(*args):
        inner = inner_loss(*args)

        def loss(engine, batch):
            passes[0] += 1
            if passes[0] == at:
                fail()
            return inner(engine, batch)

        return loss

    def build_engine(*args, **kwargs):
        if at == "build":
            fail()
        return inner_engine(*args, **kwargs)

    def save(*args, **kwargs):
        if at == "save":
            fail()
        return inner_save(*args, **kwargs)

    training_engine.language_model_loss, training_engine.build_engine, checkpoint.save = (
        language_model_loss,
        build_engine,
        save,
    )
    try:
        return rank_main(rank, world, argv)
    except exhausted.OutOfMemory as problem:
        return f"OutOfMemory: {problem}"
    finally:
        training_engine.language_model_loss, training_engine.build_engine, checkpoint.save = (
            inner_loss,
            inner_engine,
            inner_save,
        )
