"""What ranks are forked with: the server process imports this module once, before it forks any."""

import contextlib
import gc
import importlib

# The last ones are imported where an engine or a model is built, which would cost every rank about
# a second.
for name in (
    "distutils.ccompiler",
    "pytest",
    "torch.distributed",
    "torch.utils.serialization",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt.gpt_layer_specs",
    "coat_dist.deepspeed.engine",
    "launch.pretrain",
    "megatron_patches",
    "sentencepiece",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

# Starts a compiler where it is first asked for, in every rank otherwise.
with contextlib.suppress(ImportError):
    importlib.import_module("deepspeed.ops").__compatible_ops__  # noqa: B018

# DeepSpeed collects garbage many times while it builds an engine. What is imported never is
# garbage: a rank that looked at it again each time would copy all memory that it shares with the
# server.
gc.collect()
gc.freeze()
