"""The model that is evaluated, with weights from anywhere, patched or not, and its losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from coat_dist import CoatConfig, CoatConfigError
from launch.find_config import read_config
from launch.log_level import say
from launch.model.gpt import build_model
from launch.weights import Weights, fill
from launch.weights.checkpoint import CheckpointWeights

__all__ = ["Coat", "Losses", "build", "choose_coat", "read_run", "token_losses"]

Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``losses(tokens, labels)``: int64 ``[b, s]`` twice, on the CPU, to fp32 ``[b, s]``, nats."""


def read_run(weights: Weights) -> tuple[dict[str, Any], int | None]:
    """Description of the run that saved a checkpoint, and after how many steps; empty of other
    weights.
    """
    manifest = weights.manifest if isinstance(weights, CheckpointWeights) else {}
    return manifest.get("run") or {}, (manifest.get("progress") or {}).get("step")


class Coat(NamedTuple):
    """The block of an FP8 forward pass, and where it is from, for the reader."""

    config: CoatConfig
    source: str


def choose_coat(deepspeed_config: str | None, run: Mapping[str, Any]) -> Coat:
    """The ``"coat"`` block of ``--deepspeed_config``, else the checkpoint's own, else the defaults.

    ``activation.enabled`` is taken as true: who asks for an FP8 forward pass gets one.

    Raises:
        CoatConfigError: the configuration has no block, or a wrong one.
    """
    own = (run.get("deepspeed") or {}).get("coat")
    if deepspeed_config is not None:
        block = CoatConfig.from_deepspeed(
            read_config("--deepspeed_config", deepspeed_config, "deepspeed")
        )
        if block is None:
            raise CoatConfigError(
                f'--deepspeed_config: got {deepspeed_config}, accepted: one with a "coat" block'
            )
        source = deepspeed_config
    elif own is not None:
        block, source = CoatConfig.parse(own), "the checkpoint's own"
    else:
        block, source = CoatConfig(), 'defaults (the checkpoint has no "coat" block)'
    if not block.activation.enabled:
        block = CoatConfig.parse({"activation": {**block.activation.model_dump(), "enabled": True}})
        source += ", with activation.enabled true"
    return Coat(block, source)


def build(
    weights: Weights, *, forward: str, coat: Coat | None, tp: int, device: torch.device
) -> Any:
    """A ``GPTModel`` in evaluation mode with the weights in it. Megatron's groups are set up
    before.

    Args:
        forward: "bf16", "fp8" or "fp32". Weights are rounded to bf16 but for "fp32".
        coat: with "fp8".

    Raises:
        CoatConfigError, CheckpointError: names what cannot be built, read or patched.
    """
    weights.model.check_parallel(tp, False)
    model = build_model(
        weights.model, tp=tp, dtype=torch.float32 if forward == "fp32" else torch.bfloat16
    )
    fill(model, weights)
    if coat is not None:
        from megatron_patches import patch_model

        say(str(patch_model(model, coat.config)))
    return model.to(device).eval()


def token_losses(model: Any, device: torch.device, vocab_size: int | None = None) -> Losses:
    """Per-token losses of a model that :func:`launch.model.gpt.build_model` built, patched or not.

    Ranks of one tensor-parallel group call it together.

    Args:
        vocab_size: the softmax is over this many ids, without the rows that pad the embedding, as
            in transformers. None = over the padding too, as ``pretrain.py`` trains and evaluates; a
            model that was patched with ``loss: "chunked"`` then computes its losses itself.
    """
    from megatron.core import parallel_state

    from coat_dist.flow import TensorParallel, vocab_parallel_cross_entropy
    from megatron_patches.layers.loss import ChunkedLossGPTModel

    group, rank = TensorParallel(), parallel_state.get_tensor_model_parallel_rank()
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        group = TensorParallel(parallel_state.get_tensor_model_parallel_group())

    @torch.no_grad()
    def losses(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens, labels = tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        if vocab_size is None and isinstance(model, ChunkedLossGPTModel):
            return model(tokens, positions, None, labels=labels)
        logits = model(tokens, positions, None)
        if vocab_size is not None:
            columns = logits.shape[-1]
            logits[..., min(max(vocab_size - rank * columns, 0), columns) :] = -torch.inf
        # A row at a time: the loss makes fp32 copies of what it gets.
        rows = [
            vocab_parallel_cross_entropy(logits[i : i + 1], labels[i : i + 1], group)
            for i in range(len(tokens))
        ]
        return torch.cat(rows)

    return losses
