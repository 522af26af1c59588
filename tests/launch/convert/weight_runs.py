"""Runs of pretrain.py on ranks that say which weights their engine holds."""

from __future__ import annotations

import torch

from tests.launch.pretrain_runs import command


def held(engine) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter, without what ZeRO-3 does to them."""
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: p.detach().clone() for name, p in parameters.items()}


def train(rank, world, argv):
    """``pretrain.train``; how it ended, the weights before the first step and after the last."""
    from launch import pretrain
    from launch.train import pretrain_options, runtime

    seen = {}

    def interfere(loop):
        seen["loop"], seen["before"] = loop, held(loop.engine)

    try:
        device = runtime.start(rank)
        p = pretrain.plan(pretrain_options.parse(argv), world)
        ending = pretrain.train(p, device, interfere=interfere)
    except pretrain.USER_ERRORS as problem:
        return str(problem), {}, {}
    return ending, seen["before"], held(seen["loop"].engine)


def options(work, run, config, *more, steps=2):
    """A command line without the dropout and with sizes that two ranks can share."""
    return command(work, run, config, "--model-override", "hidden_dropout=0.0", *more, steps=steps)


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
