"""Copy whole weights into a built model: each rank takes its slice."""

from __future__ import annotations

from typing import Any

import torch

from coat_dist.deepspeed.zero_init import copy_into
from coat_dist.ranks import attempt
from launch.weights.grouped import each_expert, grouped
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
    sources, modules = _sources(model), dict(model.named_modules())
    there = set(weights.names())
    wanted = {
        "embedding.word_embeddings.weight"
        if name == "output_layer.weight" and name not in there and model.share_embeddings_and_output_weights
        else name
        for names in sources.values()
        for name in names
    }
    if missing := [name for name in wanted if name not in there]:
        raise CheckpointError(f"{weights.path}: has no {', '.join(sorted(missing)[:4])}")
    whole = model.pre_process and model.post_process and getattr(model.config, "expert_model_parallel_size", 1) == 1
    if whole and (extra := there - wanted):
        raise CheckpointError(f"{weights.path}: has {', '.join(sorted(extra)[:4])}, which the model lacks")
    parameters = {name: p for name, p in model.named_parameters() if name in sources}
    order = {name: i for i, name in enumerate(weights.names())}
    for name in sorted(parameters, key=lambda n: order.get(sources[n][0], 0)):
        names = [one if one in there else "embedding.word_embeddings.weight" for one in sources[name]]
        _copy(parameters[name], name, weights, names, modules[name.rpartition(".")[0]])


def _sources(model: Any) -> dict[str, list[str]]:
    """Names in the whole model of what each parameter of this rank holds: one, or those of grouped experts."""
    found = {}
    for name, of_model in _global_names(model).items():
        parts = name.split(".")
        layer = model.decoder.layers[int(parts[2])] if parts[:2] == ["decoder", "layers"] else None
        found[name] = each_expert(of_model, _experts(layer)) or [of_model]
    return found


def _global_names(model: Any) -> dict[str, str]:
    """Names of the whole model by those of this pipeline stage and this expert-parallel rank."""
    names = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            layer = model.decoder.layers[int(parts[2])]
            parts[2] = str(layer.layer_number - 1)
            if parts[5:6] == ["local_experts"]:
                parts[6] = str(_experts(layer)[int(parts[6])])
        names[name] = ".".join(parts)
    return names


def _experts(layer: Any) -> list[int]:
    """Numbers in the whole model of a layer's experts that this rank holds."""
    return list(getattr(getattr(layer, "mlp", None), "local_expert_indices", ()))


def _copy(parameter: Any, name: str, weights: Weights, sources: list[str], owner: torch.nn.Module) -> None:
    size, rank = _tensor_parallel(owner)
    shape = getattr(parameter, "ds_shape", parameter.shape)  # of one that ZeRO-3 has divided, the whole one's
    of_many = bool(each_expert(name, [0]))
    split = size > 1 and (of_many or getattr(parameter, "tensor_model_parallel", False))
    gated = getattr(getattr(owner, "config", None), "gated_linear_unit", False)
    found = []
    for source in sources:
        tensor = weights.read(source)
        if source in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensor = _with_rows(tensor, shape[0] * (size if split else 1), weights.model.vocab_size)
        if split:
            dim = int(".linear_fc2." in source) if of_many else parameter.partition_dim
            parts = tensor.chunk(2 if ".linear_fc1." in source and gated else 1, dim)
            tensor = torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)
        found.append(tensor)
    if of_many and sum(t.numel() for t in found) == shape.numel():
        found = [grouped(found).view(shape)]
    if found[0].shape != shape:
        raise CheckpointError(
            f"{weights.path}: {sources[0]}: got {list(weights.shape(sources[0]))}, accepted: what gives "
            f"{list(shape)} on tensor-parallel rank {rank} of {size}"
        )
    copy_into(parameter, found[0])


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
