"""ZeRO-3 gathers the weights of patched layers as FP8 codes
(``coat.activation.fp8_weight_gather``).

DeepSpeed fetches parameters by a method of each, ``all_gather_coalesced``. Here it leaves the
weights that only the flow reads (``coat_flow_weights`` of a module) to ``gathered.py``; all others
go DeepSpeed's own way. While such a weight is "available", its codes are in its attribute
``coat_gathered`` and its data are NaN, of the right shape and no memory. ``GatheredParameters`` and
exports call ``all_gather``, which brings the values; ``partition`` drops either.

A pass over the model fetches a weight once, if ZeRO-3 keeps it from forward to backward, or more
often. A fetch brings what was used of the fetch of the same number in the pass before; what is
missing is gathered when it is asked for. Ranks run the same modules in the same order, which ZeRO-3
itself relies on, so they agree.

Modules of transformers models (those that have ``coat_runs``) run their own forward in eval mode:
such a pass fetches values, and a module that finds codes there all the same gathers values before
it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...flow.parallel.gathered import GatheredWeight, Shard, gather
from ...flow.parallel.tensor_parallel import Pending
from ...formats import FORMATS, QuantizedTensor


def fetch_for_readers(module: nn.Module) -> None:
    """Let ZeRO-3 fetch weights for the patched modules that read them without calling the modules
    that hold them.

    DeepSpeed finds such readers where they read a weight that is not there. After a pass in eval
    mode, in which every module reads its own, it may be there by chance, and would be missing in
    backward. Adapters need no more: nothing of them is read in backward but copies.
    """
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    reader: Any
    for reader in module.modules():
        if not hasattr(type(reader), "coat_flow_weights"):
            continue
        own = {id(p) for p in reader.parameters(recurse=False)}
        for given in reader.coat_flow_weights():
            for weight in given if isinstance(given, tuple) else (given,):
                if id(weight) not in own and hasattr(weight, "ds_id"):
                    register_external_parameter(reader, weight)


def gather_codes(module: nn.Module) -> None:
    """Replace the three methods on every parameter of an engine's module."""
    passes = _Passes()
    for parameter, (owners, parts) in flow_weights(module).items():
        parameter.coat_fetch = _Fetch(parameter, owners[0], passes, parts)
        passes.weights.append(parameter)
        for owner in owners:
            if hasattr(owner, "coat_runs"):
                owner.register_forward_pre_hook(functools.partial(_bring_values, parameter))
    # Before the hook by which DeepSpeed fetches the first parameters of a pass.
    module.register_forward_pre_hook(passes.begin, prepend=True)
    for parameter in module.parameters():
        parameter.coat_gathered = None  # type: ignore[attr-defined]
        for replacement in (_all_gather_coalesced, _all_gather, _partition):
            original = getattr(parameter, name := replacement.__name__[1:])
            replaced = functools.partial(replacement, parameter, original)
            setattr(parameter, name, functools.wraps(original)(replaced))


def let_go(parameter: Any) -> None:
    """Drop the codes that stand for a parameter, if there are any: it is then as one that is not
    gathered.
    """
    if (gathered := getattr(parameter, "coat_gathered", None)) is None:
        return
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    parameter.coat_fetch.learn(gathered)
    for q8 in gathered.codes.values():
        for t in (q8.codes, q8.scales):
            if t.is_cuda:  # made on the stream of gathers, used on this one
                t.record_stream(torch.cuda.current_stream())
    parameter.coat_gathered = None
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE


@dataclass
class _Passes:
    """Counts passes over the model."""

    number: int = 0
    weights: list[Any] = field(default_factory=list)

    def begin(self, *_: Any) -> None:
        self.number += 1
        for weight in self.weights:
            if weight.coat_gathered is not None and not weight.coat_fetch.wanted:
                # Kept from the last pass: the module was unpatched since, or evaluates.
                let_go(weight)


class _Fetch:
    """How one weight is fetched."""

    def __init__(self, parameter: Any, owner: Any, passes: _Passes, parts: tuple[Any, ...]) -> None:
        self._parameter, self._owner, self._passes = parameter, owner, passes
        self._beside = [p for p in parts if p is not parameter]  # weights of the same product
        self.format = FORMATS[owner.coat.settings.format]
        # By the number of the fetch in its pass.
        self._layouts: dict[int, list[str]] = {0: [owner.coat.settings.forward_scales]}
        self._pass, self._fetched = 0, -1

    def count(self) -> list[str]:
        """Another fetch; the layouts that it is to bring."""
        if self._pass != self._passes.number:
            self._pass, self._fetched = self._passes.number, -1
        self._fetched += 1
        return self._layouts.get(self._fetched, ["tensor"])

    def learn(self, gathered: GatheredWeight) -> None:
        """What was used of the last fetch, the next of its number brings."""
        if gathered.used:
            self._layouts[self._fetched] = sorted(gathered.used)

    @property
    def wanted(self) -> bool:
        """Whether the module that uses the weight runs the flow in this pass."""
        owner = self._owner
        if not hasattr(type(owner), "coat_flow_weights"):
            return False
        return not hasattr(owner, "coat_runs") or owner.coat_runs()

    @property
    def possible(self) -> bool:
        """Whether codes will do now: the flow reads them, and shards are where codes are made."""
        p = self._parameter
        if not self.wanted or p.ds_persist or hasattr(p, "comm_dtype"):  # of autocast
            return False
        shards = [(shard, world) for shard, _, world in map(_shard_of, (p, *self._beside))]
        return all(
            shard is not None and world > 1 and shard.device == p.device for shard, world in shards
        )

    def shards(self, layouts: Iterable[str]) -> list[Shard]:
        """This rank's, one a layout."""
        p = self._parameter
        beside = tuple(_values_of(other)[0] for other in self._beside)
        return [Shard(*_values_of(p), p.ds_shape, layout, beside) for layout in layouts]

    def bring(self, layout: str) -> QuantizedTensor:
        """Gather at once what the fetch has not brought."""
        return gather(self.shards([layout]), self.format, _shard_of(self._parameter)[1]).wait()[0]


def _shard_of(p: Any) -> tuple[Any, Any, int]:
    """What this rank has of a parameter, and the ranks that have the rest: with hpZ's second shards
    those of the node, and None before there are any, since DeepSpeed makes them of gathered values.
    """
    if p.ds_zero_param_process_group is None:
        return p.ds_tensor, p.ds_process_group, p.ds_zero_partition_world_size
    return p.ds_secondary_tensor, p.ds_zero_param_process_group, p.ds_secondary_tensor_group_size


def _values_of(p: Any) -> tuple[torch.Tensor, int, int]:
    """This rank's elements of a parameter, where they begin, and how many each rank has, padding
    included.
    """
    tensor, group, _ = _shard_of(p)
    room = tensor.numel()
    first = min(room * dist.get_rank(group), p.ds_numel)
    return tensor.data[: max(0, min(room, p.ds_numel - first))], first, room


class _Handle:
    """What DeepSpeed waits for."""

    def __init__(self, params: list[Any], layouts: list[list[str]], pending: Pending) -> None:
        self._params, self._layouts, self._pending = params, layouts, pending
        self._complete = False

    def wait(self, handle_dependency: bool = True) -> None:
        if self._complete:
            return
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        found = iter(self._pending.wait())
        for p, layouts in zip(self._params, self._layouts, strict=True):
            p.coat_gathered = GatheredWeight(
                {layout: next(found) for layout in layouts}, p.coat_fetch.bring
            )
            p.data = _not_a_number(p.dtype, p.device).expand(p.ds_shape)
            p.ds_status = ZeroParamStatus.AVAILABLE
        self._complete = True


@functools.cache
def _not_a_number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device)


# What takes the place of three methods of a parameter; they hand on how DeepSpeed called them.


def _all_gather_coalesced(
    _: Any, original: Any, params: Iterable[Any], *more: Any, **options: Any
) -> Any:
    from deepspeed.runtime.zero.partition_parameters import (
        MultipleAllGatherHandles,
        ZeroParamStatus,
    )

    params = list(params)
    wanted = {p: p.coat_fetch.count() for p in params if hasattr(p, "coat_fetch")}
    ours = [p for p in wanted if p.coat_fetch.possible]
    if not ours:
        return original(params, *more, **options)
    chosen = {id(p) for p in ours}
    others = [p for p in params if id(p) not in chosen]
    handles = [original(others, *more, **options)] if others else []
    groups: dict[tuple[Any, str], list[Any]] = {}
    for p in sorted(ours, key=lambda p: p.ds_id):  # sets have another order on every rank
        p.ds_status = ZeroParamStatus.INFLIGHT
        groups.setdefault((_shard_of(p)[1], p.coat_fetch.format.name), []).append(p)
    for (group, name), together in groups.items():
        layouts = [wanted[p] for p in together]
        shards = [
            s for p, ls in zip(together, layouts, strict=True) for s in p.coat_fetch.shards(ls)
        ]
        handles.append(_Handle(together, layouts, gather(shards, FORMATS[name], group)))
    return MultipleAllGatherHandles(handles)


def _all_gather(
    parameter: Any, original: Any, param_list: Any = None, *more: Any, **options: Any
) -> Any:
    params = [parameter] if param_list is None else list(param_list)
    for p in params:
        let_go(p)  # codes will not do: the caller wants values
        if hasattr(p, "coat_fetch"):
            p.coat_fetch.count()
    return original(params, *more, **options)


def _bring_values(parameter: Any, owner: Any, *_: Any) -> None:
    """Before a forward that is not the flow's, which codes were fetched for all the same."""
    if parameter.coat_gathered is not None and not (
        hasattr(owner, "coat_runs") and owner.coat_runs()
    ):
        parameter.all_gather()


def _partition(
    parameter: Any, original: Any, param_list: Any = None, *more: Any, **options: Any
) -> None:
    params = [parameter] if param_list is None else list(param_list)
    for p in params:
        let_go(p)
    original(params, *more, **options)


def flow_weights(model: nn.Module) -> dict[Any, tuple[list[Any], tuple[Any, ...]]]:
    """Weights that nothing but the flow reads, each with the modules that say so and all weights
    of its product.
    """
    claims: dict[Any, list[tuple[Any, tuple[Any, ...]]]] = {}
    module: Any
    for module in model.modules():
        settings = getattr(getattr(module, "coat", None), "settings", None)
        if not hasattr(type(module), "coat_flow_weights") or settings is None:
            continue
        if settings.fp8_weight_gather and not settings.tp_invariant:
            for given in module.coat_flow_weights():
                parts = given if isinstance(given, tuple) else (given,)
                for parameter in parts:
                    claims.setdefault(parameter, []).append((module, parts))
    readers, found = _readers(model), {}
    for p, claimed in claims.items():
        owners = [owner for owner, _ in claimed]
        kinds = {
            (o.coat.settings.format, o.coat.settings.forward_scales, *map(id, parts))
            for o, parts in claimed
        }
        read = all(any(reader is owner for owner in owners) for reader in readers(p))
        if hasattr(p, "ds_id") and len(kinds) == 1 and read:
            found[p] = owners, claimed[0][1]
    return {
        p: (owners, parts)
        for p, (owners, parts) in found.items()
        if all(part in found for part in parts)
    }


def _readers(model: nn.Module) -> Callable[[Any], Iterator[nn.Module]]:
    """By parameter: the modules that may read it: its holder and adapters around that, or the
    modules that hold the holder, where it does not say itself what the flow reads."""
    holders: dict[Any, list[nn.Module]] = {}
    parents: dict[nn.Module, list[nn.Module]] = {}
    for module in model.modules():
        for child in module.children():
            parents.setdefault(child, []).append(module)
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(module)

    def of(parameter: Any) -> Iterator[nn.Module]:
        for holder in holders.get(parameter, []):
            if hasattr(type(holder), "coat_flow_weights"):
                yield holder
                yield from filter(_reads_base_layer, parents.get(holder, []))
            else:
                for parent in parents.get(holder, []):
                    adapts = hasattr(parent, "base_layer") and not _reads_base_layer(parent)
                    yield from parents[parent] if adapts else [parent]

    return of


def _reads_base_layer(module: Any) -> bool:
    """Whether an adapter of PEFT may read the weight that it adapts: not plain LoRA, but DoRA,
    which takes its norm."""
    plain_lora = not getattr(module, "lora_variant", True)
    return hasattr(module, "base_layer") and not plain_lora
