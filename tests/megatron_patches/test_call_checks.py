"""A tied embedding over pipeline stages in Megatron's distributed optimizer; numbers of micro-batches."""

import torch

from coat_dist.config import CoatConfigError
from tests.support import run_ranks

from .tiny import SEQ, VOCAB, tiny_config

OPTIONS = {"optimizer": "adam", "lr": 1e-3, "bf16": True, "params_dtype": torch.bfloat16}


def optimizers(rank, world):
    """What came of an optimizer for each combination, on this stage."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig

    import megatron_patches as mp

    mp.initialize_model_parallel(1, pipeline_model_parallel_size=2)
    config, found = tiny_config(num_layers=2, pipeline_model_parallel_size=2, bf16=True), {}
    ends = {"pre_process": rank == 0, "post_process": rank == 1}
    for tied in (True, False):
        for stochastic in ("auto", False):
            model = GPTModel(
                config,
                mp.gpt_layer_spec(config),
                VOCAB,
                SEQ,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=tied,
                **ends,
            ).bfloat16()
            block = {"coat": {"activation": {"enabled": False}, "optimizer": {"stochastic_rounding": stochastic}}}
            settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
            wrapped = DistributedDataParallel(config, settings, model)
            options = OptimizerConfig(**OPTIONS, use_distributed_optimizer=True)
            try:
                mp.get_megatron_optimizer(options, [wrapped], coat=block)
                found[tied, stochastic] = "built"
            except CoatConfigError as error:
                found[tied, stochastic] = str(error)
    return found


def test_a_tied_embedding_over_stages_needs_rounding_to_nearest():
    for found in run_ranks(2, optimizers):
        said = found.pop((True, "auto"))
        assert said.startswith("share_embeddings_and_output_weights: got True with pipeline stages and FP8 moments on")
        assert set(found.values()) == {"built"}
