"""One pipeline stage of a GPT, with the initial weights that the whole model has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


def pipeline() -> dict[str, Any]:
    """Arguments of Megatron's ``TransformerConfig`` for the pipeline whose groups are set up;
    none for one stage.
    """
    from megatron.core import parallel_state

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages == 1:
        return {}
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    overlapped = virtual is not None
    return {
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": virtual,
        # What a stage has sent is not needed any more, only its place in the graph. With overlapped
        # messages Megatron drops it while it is being sent.
        "deallocate_pipeline_outputs": not overlapped,
        "overlap_p2p_comm": overlapped,
        "batch_p2p_comm": not overlapped,
        "batch_p2p_sync": False,  # waits for the GPU after each message, for an old fault of torch
    }


def build_stage(
    config: Any,
    build: Callable[..., torch.nn.Module],
    layers_of: Callable[[Any], Any],
    vocab: int,
    seq_length: int,
) -> torch.nn.Module:
    """This rank's stage: its model, or the ``ModuleList`` of its parts where stages are
    interleaved.

    Initial weights are drawn in the order of the whole model: what comes before a part is built and
    thrown away, one layer at a time, so that all numbers of stages begin alike. Random states of
    stages differ afterwards, for dropout.

    Args:
        config: Megatron's, with the pipeline's sizes.
        build: builds a part, called with ``vp_stage``, ``pre_process`` and ``post_process``.
        layers_of: the specification of all layers, by a configuration without a pipeline.
    """
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module

    stages, stage = (
        config.pipeline_model_parallel_size,
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    virtual = config.virtual_pipeline_model_parallel_size
    parts = virtual or 1
    each = config.num_layers // (stages * parts)
    whole = copy.copy(config)
    whole.pipeline_model_parallel_size, whole.virtual_pipeline_model_parallel_size = 1, None
    specs = layers_of(whole).submodules.layer_specs
    built, done = [], 0
    for part in range(parts):
        number = part * stages + stage
        first, last = number == 0, number == stages * parts - 1
        if not first and done == 0:
            LanguageModelEmbedding(whole, vocab, seq_length, position_embedding_type="rope")
        for i in range(done, number * each):
            build_module(specs[i], config=whole, layer_number=i + 1)
        built.append(build(None if virtual is None else part, pre_process=first, post_process=last))
        done = (number + 1) * each
    if stage:  # stages drop different elements: their random states have been the same until here
        seed = (torch.initial_seed() + 100 * stage) % 2**31
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
    return built[0] if virtual is None else torch.nn.ModuleList(built)
