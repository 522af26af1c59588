"""Copy whole weights into a built model: each rank takes its slice."""

from __future__ import annotations

from typing import Any

import torch

from coat_dist.deepspeed.zero_init import copy_into
from coat_dist.ranks import attempt
from launch.weights.source import CheckpointError, Weights

__all__ = ["fill"]


def fill(model: Any, weights: Weights) -> None:
    """Copy ``weights`` into a Megatron ``GPTModel``, patched or not, of any tensor- and pipeline-parallel size.

    Collective: call it on every rank, before ``initialize``; ``zero_init`` may have divided the parameters. Values are
    rounded to the parameters' dtype. Where the model's embedding has more or fewer rows of padding than the source's,
    they become zero or are left out.

    Args:
        model: on any device; ``model.module`` is taken where it is a wrapper.
        weights: see :func:`launch.weights.open_weights`.

    Raises:
        CheckpointError: on every rank; a parameter that the source lacks, or has in another shape, or one that the
            model lacks, or cannot be read; names it. The model may be partly filled then.
    """
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    weights.verify()
    _, problems = attempt(lambda: _fill(model, weights))
    if problems:
        raise CheckpointError("\n".join(dict.fromkeys(problems.values())))


@torch.no_grad()
def _fill(model: Any, weights: Weights) -> None:
    whole, modules = _global_names(model), dict(model.named_modules())
    there = set(weights.names())
    wanted = {
        "embedding.word_embeddings.weight"
        if name == "output_layer.weight" and name not in there and model.share_embeddings_and_output_weights
        else name
        for name in whole.values()
    }
    one_stage = model.pre_process and model.post_process
    if missing := [name for name in wanted if name not in there]:
        raise CheckpointError(f"{weights.path}: has no {', '.join(sorted(missing)[:4])}{_more(missing)}")
    if one_stage and (extra := there - wanted):
        raise CheckpointError(
            f"{weights.path}: has {', '.join(sorted(extra)[:4])}{_more(list(extra))}, which the model lacks"
        )
    by_source = {name: p for name, p in model.named_parameters() if name in whole}
    order = {name: i for i, name in enumerate(weights.names())}
    for name in sorted(by_source, key=lambda n: order.get(whole[n], 0)):
        source = whole[name] if whole[name] in there else "embedding.word_embeddings.weight"
        owner = modules[name.rpartition(".")[0]]
        _copy(by_source[name], weights, source, owner)


def _global_names(model: Any) -> dict[str, str]:
    """Names of the whole model by those of this pipeline stage."""
    numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    names = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(numbers[parts[2]])
        names[name] = ".".join(parts)
    return names


def _copy(parameter: Any, weights: Weights, name: str, owner: torch.nn.Module) -> None:
    tensor, dim, parts = weights.read(name), None, 1
    size, rank = _tensor_parallel(owner)
    if size > 1 and getattr(parameter, "tensor_model_parallel", False):
        dim = parameter.partition_dim
        gated = getattr(getattr(owner, "config", None), "gated_linear_unit", False)
        parts = 2 if ".linear_fc1." in name and gated else 1
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensor = _with_rows(tensor, _rows(parameter) * (size if dim is not None else 1), weights.model.vocab_size)
    if dim is not None:
        tensor = torch.cat([part.chunk(size, dim)[rank] for part in tensor.chunk(parts, dim)], dim)
    shape = getattr(parameter, "ds_shape", parameter.shape)
    if tensor.shape != shape:
        raise CheckpointError(
            f"{weights.path}: {name}: got {list(weights.shape(name))}, accepted: what gives {list(shape)} on "
            f"tensor-parallel rank {rank} of {size}"
        )
    copy_into(parameter, tensor)


def _rows(parameter: Any) -> int:
    return getattr(parameter, "ds_shape", parameter.shape)[0]


def _with_rows(tensor: torch.Tensor, rows: int, vocab: int | None) -> torch.Tensor:
    """The embedding with another padding."""
    if tensor.shape[0] == rows or rows < (vocab or 0):
        return tensor  # the caller compares shapes
    if tensor.shape[0] > rows:
        return tensor[:rows]
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def _tensor_parallel(owner: torch.nn.Module) -> tuple[int, int]:
    """Size of the owner's tensor-parallel group, and the rank in it."""
    from megatron_patches import tensor_parallel

    group = tensor_parallel(owner)
    return group.size, group.rank


def _more(names: list[str]) -> str:
    return f" and {len(names) - 4} more" if len(names) > 4 else ""
