"""Whether a model was built for the pipeline stages whose groups are set up."""

from __future__ import annotations

from megatron.core import parallel_state
from torch import nn

from coat_dist.config import CoatConfigError
from coat_dist.ranks import gather

from ..parallel.pipeline import chunks_of
from .blocks import language_models

__all__ = ["check_stage"]


def check_stage(model: nn.Module) -> None:
    """Refuse a model that was not built for the pipeline whose groups are set up; collective where there is one.

    Raises:
        CoatConfigError: on every rank; names the field of the configuration, or the argument of the model.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    problems = [
        f"config.{key}: got {given!r}, accepted: {accepted!r}, with which initialize_model_parallel was called"
        for config in {id(one.config): one.config for _, one in language_models(model)}.values()
        for key, given, accepted in (
            ("pipeline_model_parallel_size", config.pipeline_model_parallel_size, stages),
            ("virtual_pipeline_model_parallel_size", config.virtual_pipeline_model_parallel_size, virtual),
        )
        if (given or 1) != (accepted or 1)
    ]
    if stages == 1:
        if problems:
            raise CoatConfigError("\n".join(problems))
        return
    stage, chunks = parallel_state.get_pipeline_model_parallel_rank(), chunks_of(model)
    for i, chunk in enumerate(chunks):
        ends = {
            "pre_process": stage == 0 and i == 0,
            "post_process": stage == stages - 1 and i == len(chunks) - 1,
        }
        where = f"on pipeline stage {stage}" + (f", chunk {i}" if len(chunks) > 1 else "")
        for _, one in language_models(chunk):
            problems += [
                f"model {where}: got {key}={getattr(one, key)}, accepted: {wanted}"
                for key, wanted in ends.items()
                if getattr(one, key, wanted) != wanted
            ]
    found = list(dict.fromkeys(line for lines in gather(problems) for line in lines))
    if found:
        raise CoatConfigError("\n".join(found))
