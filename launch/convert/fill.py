"""Copy whole weights into a built model: each rank takes its slice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from coat_dist.checkpoint.zero_partitions import copy_into
from coat_dist.ranks import attempt
from launch.convert.weights import CheckpointError, Weights

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_GROUPED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.weight(?P<fc>[12])")


def fill(model: Any, weights: Weights) -> None:
    """Copy ``weights`` into a Megatron ``GPTModel``, patched or not, of any tensor- and
    pipeline-parallel size.

    Collective: call it on every rank, before ``initialize``; ``zero_init`` may have divided the
    parameters. Values are rounded to the parameters' dtype. Where the model's embedding has more or
    fewer rows of padding than the source's, they become zero or are left out.

    Args:
        model: on any device; ``model.module`` is taken where it is a wrapper.
        weights: see :func:`launch.convert.sources.open_weights`.

    Raises:
        CheckpointError: on every rank; a parameter that only the model or only the source has, or
            one of another shape, or a file that is damaged; names it. The model may be partly
            filled then.
    """
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    weights.verify()
    _, problems = attempt(lambda: _fill(model, weights))
    if problems:
        raise CheckpointError("\n".join(dict.fromkeys(problems.values())))


@torch.no_grad()
def _fill(model: Any, weights: Weights) -> None:
    order = {name: i for i, name in enumerate(weights.shapes)}
    sources = global_names(model)
    # The last stage has a copy.
    if model.share_embeddings_and_output_weights and _OUTPUT not in order:
        sources = {
            p: [_EMBEDDING if name == _OUTPUT else name for name in names]
            for p, names in sources.items()
        }
    wanted = {name for names in sources.values() for name in names}
    whole = (
        model.pre_process
        and model.post_process
        and getattr(model.config, "expert_model_parallel_size", 1) == 1
    )
    if lacking := wanted - order.keys():
        name = min(lacking)
        raise CheckpointError(f"{weights.path}: {name}: the model has it, the source does not")
    if whole and (surplus := order.keys() - wanted):
        name = min(surplus)
        raise CheckpointError(f"{weights.path}: {name}: the source has it, the model does not")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name in sorted(sources, key=lambda one: order[sources[one][0]]):
        _copy(parameters[name], name, weights, sources[name], modules[name.rpartition(".")[0]])


def global_names(model: Any) -> dict[str, list[str]]:
    """Names in the whole model of the tensors in each parameter of this rank: one, or those of
    grouped experts.
    """
    found = {}
    for name, _ in model.named_parameters():
        parts, experts = name.split("."), []
        if parts[:2] == ["decoder", "layers"]:
            layer = model.decoder.layers[int(parts[2])]
            experts = list(getattr(layer.mlp, "local_expert_indices", ()))
            parts[2] = str(layer.layer_number - 1)
            if parts[5:6] == ["local_experts"]:
                parts[6] = str(experts[int(parts[6])])
        whole = ".".join(parts)
        found[name] = each_expert(whole, experts) or [whole]
    return found


def _copy(
    parameter: Any, name: str, weights: Weights, sources: list[str], owner: torch.nn.Module
) -> None:
    from megatron_patches import tensor_parallel

    group = tensor_parallel(owner)
    # Of one that ZeRO-3 has divided, the whole one's.
    shape = getattr(parameter, "ds_shape", parameter.shape)
    of_many = bool(each_expert(name, [0]))
    split = group.size > 1 and (of_many or getattr(parameter, "tensor_model_parallel", False))
    gated = getattr(getattr(owner, "config", None), "gated_linear_unit", False)
    found = []
    for source in sources:
        tensor = weights.read(source)
        if source in (_EMBEDDING, _OUTPUT):
            tensor = _with_rows(
                tensor, shape[0] * (group.size if split else 1), weights.model.vocab_size or 0
            )
        if split:
            dim = int(".linear_fc2." in source) if of_many else parameter.partition_dim
            parts = tensor.chunk(2 if ".linear_fc1." in source and gated else 1, dim)
            tensor = torch.cat([part.chunk(group.size, dim)[group.rank] for part in parts], dim)
        found.append(tensor)
    if of_many and sum(t.numel() for t in found) == shape.numel():
        found = [grouped(found).view(shape)]
    if found[0].shape != shape:
        raise CheckpointError(
            f"{weights.path}: {sources[0]}: got {list(found[0].shape)} on tensor-parallel rank "
            f"{group.rank} of "
            f"{group.size}, accepted: {list(shape)}"
        )
    copy_into(parameter, found[0])


def _with_rows(tensor: torch.Tensor, rows: int, vocab: int) -> torch.Tensor:
    """The embedding with another padding."""
    if rows < vocab:
        return tensor  # the caller compares shapes
    return torch.cat(
        [tensor[:rows], tensor.new_zeros(max(0, rows - len(tensor)), *tensor.shape[1:])]
    )


def each_expert(name: str, experts: Iterable[int]) -> list[str]:
    """Names of the weights that a parameter of Megatron's ``GroupedMLP`` holds, by the experts'
    numbers; none of any other parameter.
    """
    if (found := _GROUPED.fullmatch(name)) is None:
        return []
    return [f"{found['experts']}.local_experts.{e}.linear_fc{found['fc']}.weight" for e in experts]


def grouped(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The memory of such a parameter, ``[experts, in, out]``, of the weights ``[out, in]`` of its
    experts.

    Megatron declares ``weight1`` as ``[h, experts * n]`` and ``weight2`` as ``[experts * f, h]``,
    and reads both so.
    """
    return torch.stack([weight.t() for weight in weights])
