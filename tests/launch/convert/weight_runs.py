"""Runs that begin with given weights, and models that are filled with them."""

from __future__ import annotations

import torch

from launch.convert.sources import open_weights
from tests.launch.pretrain_runs import command


def whole(folder, dtype=None):
    """All weights that a folder has."""
    weights = open_weights(folder, dtype)
    return {name: weights.read(name).clone() for name in weights.shapes}


def options(work, run, config, *more, steps=2):
    """A command line without the dropout and with sizes that two ranks can share."""
    return command(work, run, config, "--model-override", "hidden_dropout=0.0", *more, steps=steps)


def without_model(argv):
    at = argv.index("--model")
    return argv[:at] + argv[at + 2 :]


def filled(rank, world, folder, tp, pp):
    """A model of this layout, filled from a folder: this rank's part of every parameter, by its
    global name.
    """
    from launch.convert.fill import fill, global_names
    from launch.convert.sources import open_weights
    from launch.model.gpt import build_model
    from megatron_patches import initialize_model_parallel

    initialize_model_parallel(tp, pipeline_model_parallel_size=pp)
    torch.Tensor.cuda = lambda tensor, *_: tensor  # Megatron's stages move tied embeddings to a GPU
    weights = open_weights(folder)
    built = build_model(weights.model, tp=tp)
    fill(built, weights)
    names = global_names(built)
    return {names[name][0]: p.detach().clone() for name, p in built.named_parameters()}
