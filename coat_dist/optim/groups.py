"""Parameter groups: which parameters decay, and which keep fp32 moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

_ORDER = ("decay/fp8/tied", "decay/fp8", "decay/fp32", "no_decay/fp32")


def name_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Give an optimizer's parameters their names in a model, as if it had been built from (name,
    parameter) pairs.

    For programs that build optimizers from bare parameters. To be called before the first step,
    which takes the noise of stochastic rounding from names.

    Raises:
        ValueError: a parameter is not the model's. Nothing has been named then.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"name_parameters model: got one without parameter {j} of group {i}, of shape "
                    f"{list(p.shape)}, "
                    "accepted: the model that the optimizer trains, as it is wrapped now"
                )
    for group in optimizer.param_groups:
        group["param_names"] = [names[id(p)] for p in group["params"]]


def param_groups(
    model_or_named_params: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]],
    weight_decay: float,
    **defaults: Any,
) -> list[dict[str, Any]]:
    """Sort trainable parameters into groups for :class:`CoatAdamW`.

    * Vectors and scalars (biases, normalization weights) do not decay and keep fp32 moments: few
      and sensitive.
    * Matrices that every tensor-parallel rank holds whole (position embeddings, routers) decay and
      keep fp32 moments.
    * All others, embeddings among them, decay and have FP8 moments.

    ZeRO flattens a group into one tensor, and a 128-element group of that tensor that straddled a
    replicated parameter and a sharded one would be scaled by different neighbours on each
    tensor-parallel rank: the copies would drift apart. That is why replicated parameters have
    groups of their own. The rules look at nothing that depends on the tensor-parallel size, so the
    groups are the same at every size.

    For the same reason a weight that two pipeline stages hold (Megatron's ``shared_embedding``) is
    a group of its own, and the first one: its copies then have the same 128-element groups, shards
    and noise.

    Args:
        model_or_named_params: a module, or (name, parameter) pairs. ZeRO-3 parameters are judged by
            ``ds_shape``, the shape before partitioning. Where any parameter has the attribute
            ``tensor_model_parallel`` (Megatron), a parameter without a true one counts as
            replicated.
        weight_decay: of the groups that decay; the others have 0.
        **defaults: further keys for every group.

    Returns:
        Groups in a fixed order, without empty ones; each has ``params``, ``names`` (of the
        parameters, from which :class:`CoatAdamW` derives their noise), ``name``, ``weight_decay``
        and ``moments``.

    Raises:
        ValueError: parameters without names.
    """
    given: Any = model_or_named_params
    named = list(given.named_parameters() if isinstance(given, torch.nn.Module) else given)
    for one in named:
        if not (isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], torch.Tensor)):
            raise ValueError(
                f"param_groups: got a {type(one).__name__}, accepted: a module, or its "
                "named_parameters()"
            )
    tensor_parallel = _tensor_parallel(p for _, p in named)
    members: dict[str, list[tuple[str, torch.nn.Parameter]]] = {key: [] for key in _ORDER}
    for name, p in named:
        if p.requires_grad:
            decay = "no_decay" if _is_vector(p) else "decay"
            key = f"{decay}/{_moments(p, tensor_parallel)}"
            tied = getattr(p, "shared_embedding", False) and f"{key}/tied" in members
            members[f"{key}/tied" if tied else key].append((name, p))
    return [
        {
            "params": [p for _, p in found],
            "names": [name for name, _ in found],
            "name": key,
            "moments": key.split("/")[1],
            "weight_decay": weight_decay if key.startswith("decay") else 0.0,
            **defaults,
        }
        for key, found in members.items()
        if found
    ]


def split_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups that say how the moments of their parameters are kept, by the rules of
    :func:`param_groups`.

    Args:
        groups: parameter groups. One with ``"moments"`` is taken as it is. Of the others, one whose
            parameters are all alike gets ``"moments"``; one that holds both kinds becomes two, at
            its place: first the parameters with FP8 moments, then those with fp32 moments. Both
            halves have all options of the group; its ``"name"``, if it has one, is followed by
            "/fp8" and "/fp32" (not of DeepSpeed's groups of experts, whose name means ranks).

    Returns:
        New groups; the given ones stay as they are.
    """
    read = [{**group, "params": listed(group["params"])} for group in groups]
    tensor_parallel = _tensor_parallel(parameter_of(p) for group in read for p in group["params"])
    result: list[dict[str, Any]] = []
    for group in read:
        if "moments" in group or not group["params"]:
            result.append(group)
            continue
        halves: dict[str, list[Any]] = {"fp8": [], "fp32": []}
        for p in group["params"]:
            halves[_moments(parameter_of(p), tensor_parallel)].append(p)
        renamed = all(halves.values()) and "name" in group and not group.get("moe")
        for moments, params in halves.items():
            if params:
                name = {"name": f"{group['name']}/{moments}"} if renamed else {}
                result.append({**group, **name, "params": params, "moments": moments})
    return result


def listed(params: Any) -> list[Any]:
    """What a new group holds, which torch also takes as one tensor or as an iterator."""
    return [params] if isinstance(params, torch.Tensor) else list(params)


def parameter_of(p: Any) -> Any:
    """A parameter of a group or list, which may stand there with its name."""
    return p[1] if isinstance(p, tuple) else p


def _is_vector(p: torch.Tensor) -> bool:
    return len(getattr(p, "ds_shape", p.shape)) < 2


def _tensor_parallel(params: Iterable[torch.Tensor]) -> bool:
    return any(hasattr(p, "tensor_model_parallel") for p in params)


def _moments(p: torch.Tensor, tensor_parallel: bool) -> str:
    """How the moments of a parameter are kept; ``tensor_parallel``: some parameter is
    Megatron's.
    """
    replicated = tensor_parallel and not getattr(p, "tensor_model_parallel", False)
    return "fp32" if _is_vector(p) or replicated else "fp8"
