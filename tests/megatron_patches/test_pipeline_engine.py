"""Megatron programs whose pipeline stages ZeRO-1 steps: ``train_batch``, ``eval_batch``, and
what is refused.
"""

from __future__ import annotations

import pytest
import torch

import megatron_patches as mp
from tests.coat_dist.deepspeed.small_engine import settings
from tests.support import run_ranks, slow

from .tiny import SEQ, VOCAB, tiny_batch, tiny_config, tiny_gpt
from .training import start

COUNT = 4
CONFIG = settings(
    1,
    1e-2,
    gradient_accumulation_steps=COUNT,
    gradient_clipping=0.5,
    coat={"optimizer": {"stochastic_rounding": False}},
)


def forward_step(batches, model):
    """As a Megatron program writes it: every stage reads every micro-batch."""
    tokens, labels, positions = next(batches)
    output = model(tokens, positions, None, labels=labels)
    return output, lambda output: (output.mean(), {"lm loss": output.detach().mean()})


def summed(batches, model):
    """The same loss as Megatron's programs give it: a sum, the number of tokens, and what is
    reported.
    """
    output, _ = forward_step(batches, model)
    return output, lambda output: (output.sum(), torch.tensor(output.numel()), {})


def batches():
    return (tiny_batch(i, "cpu") for i in range(100))


def stage_of(whole, stages, stage, part=None, parts=1, **changes):
    """Layers of ``whole`` as one part of a stage."""
    from megatron.core.models.gpt import GPTModel

    from megatron_patches import gpt_layer_spec
    from megatron_patches.parallel.pipeline import whole_names

    virtual = None if part is None else parts
    config = tiny_config(
        **{"num_layers": 4, **changes},
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual,
        overlap_p2p_comm=part is not None,
        batch_p2p_comm=part is None,
    )
    number = (part or 0) * stages + stage
    ends = {"pre_process": number == 0, "post_process": number == stages * parts - 1}
    spec = gpt_layer_spec(config, vp_stage=part)
    model = GPTModel(
        config, spec, VOCAB, SEQ, position_embedding_type="rope", vp_stage=part, **ends
    ).bfloat16()
    values = dict(whole.named_parameters())
    for parameter, source in zip(model.parameters(), whole_names(model).values(), strict=True):
        parameter.data.copy_(values[source].data)
    return model


def build(rank, stages, parts=None, **changes):
    """The whole model, or this rank's stage of it, or the chunks of that; and Megatron's groups
    for it.
    """
    start(pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=parts, seed=1)
    whole = tiny_gpt(num_layers=4, **changes)
    if stages == 1:
        return whole
    if parts is None:
        return stage_of(whole, stages, rank, **changes)
    return [stage_of(whole, stages, rank, part, parts, **changes) for part in range(parts)]


def programs(rank, world, virtual):
    """Losses and the norm of a step, an evaluation and another step, with one stage and with two;
    what every rank hears where stages end elsewhere. What else is refused names the key.
    """
    from coat_dist.config import CoatConfigError

    found = []
    for stages in (1, 2):
        model = build(rank, stages, virtual if stages == 2 else None)
        # With one stage both ranks see the same batches, so that data parallelism changes nothing.
        engine, *_ = mp.initialize(model=model, config=CONFIG, dist_init_required=False)
        read = batches()
        losses = [float(mp.train_batch(engine, read, forward_step))]
        losses.append(float(mp.eval_batch(engine, batches(), forward_step, num_microbatches=2)))
        losses.append(float(mp.train_batch(engine, read, summed if stages == 2 else forward_step)))
        assert engine.was_step_applied() and engine.global_steps == 2
        assert engine.micro_steps == 2 * COUNT
        found.append((losses, float(engine.get_global_grad_norm())))

    def refused(said, call, *arguments, **options):
        with pytest.raises((RuntimeError, CoatConfigError)) as problem:
            call(*arguments, **options)
        assert str(problem.value).startswith(said), problem.value
        return str(problem.value).splitlines()

    part = "called on a pipeline stage, which is a part of a model; accepted: "
    part += "megatron_patches.train_batch"
    refused(f"engine.forward: {part}", engine, *tiny_batch(0, "cpu"))
    refused(f"engine.backward: {part}", engine.backward, torch.ones((), requires_grad=True))
    refused("engine.step: called on a pipeline stage, whose", engine.step)
    config = mp.parallel.pipeline.get_model_config(mp.parallel.pipeline.chunks_of(engine.module)[0])
    config.overlap_p2p_comm = False
    if virtual:
        said = "config.overlap_p2p_comm: got False with two interleaved stages"
        refused(said, mp.train_batch, engine, read, forward_step)
    config.overlap_p2p_comm = config.deallocate_pipeline_outputs = True
    said = "config.deallocate_pipeline_outputs: got True with overlap_p2p_comm"
    refused(said, mp.train_batch, engine, read, forward_step)
    for said, key, value in (
        ("zero_optimization.stage: got 2", "zero_optimization", {"stage": 2}),
        ("zero_optimization.overlap_comm: got true", "zero_optimization", OVERLAPPED),
        ("checkpoint.use_node_local_storage: got true", "checkpoint", LOCAL),
    ):
        refused(f"{said}, accepted: ", mp.initialize, model=model, config={**CONFIG, key: value})
    chunk = model if virtual is None else model[-1]
    chunk.post_process = not chunk.post_process
    ends = refused("", mp.initialize, model=model, config=CONFIG)
    config.pipeline_model_parallel_size = 1
    said = "config.pipeline_model_parallel_size: got 1, accepted: 2"
    refused(said, mp.initialize, model=model, config=CONFIG)
    return found, ends


OVERLAPPED, LOCAL = {"stage": 1, "overlap_comm": True}, {"use_node_local_storage": True}


@pytest.mark.parametrize("virtual", [None, slow(2)])
def test_train_batch_and_eval_batch_over_two_stages(virtual):
    (found, ends), *others = run_ranks(2, programs, virtual)
    assert others == [(found, ends)], "every stage hears of the same loss, and of both ends"
    one, two = found
    assert one == two and one[0][2] != one[0][0]
    where = "" if virtual is None else ", chunk 1"
    for stage, given in enumerate((True, False)):
        said = f"model on pipeline stage {stage}{where}: got post_process={given}, accepted: "
        assert f"{said}{not given}" in ends
