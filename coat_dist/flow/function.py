"""The base of the flow's autograd functions, and what they do alike; decorators of functions of
tensors.

**Names instead of places.** Autograd knows the arguments of a function, the tensors that forward
saves and the gradients that are wanted by their places alone. A subclass of :class:`Function` names
them once:

* ``saves`` is a tuple of names. Forward ends with ``ctx.save_for_backward(*cls.Saved(...),
  *more)``, and backward begins with ``saved, more = cls.saved(ctx)``.
* ``cls.needs(ctx, name)`` takes the name of forward's argument.

Both cost what a tuple costs: in a layer's forward and backward the host is counted in microseconds.
"""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..config import ActivationConfig

T = TypeVar("T")
_frames = torch._C._dynamo.eval_frame
_Step = TypeVar("_Step", bound=Callable[..., Any])


class Function(torch.autograd.Function):
    """An autograd function of the flow: without autocast inside, and differentiable once.

    The flow decides in which type each operation computes, and backward expects what forward saved
    in these types: autocast, which is on in forward and normally off in backward, would change one
    of them alone.
    """

    saves: tuple[str, ...] = ()
    """Names of the tensors that forward saves first."""
    Saved: Callable[..., Any]
    """Gives them their names, for ``save_for_backward``."""
    saved: Callable[[Any], tuple[Any, tuple[torch.Tensor, ...]]]
    """In backward, of the context: what ``Saved`` made, and the tensors that were saved behind."""
    needs: Callable[[Any, str], Any]
    """Of the context and the name of forward's argument: whether its gradient is wanted; of
    ``*name``, for each of its tensors.
    """

    def __init_subclass__(cls) -> None:
        cls.Saved, cls.saved = _by_name(cls.saves)
        cls.needs = _by_argument(cls.forward)
        cls.forward = staticmethod(_without_autocast(cls.forward))  # type: ignore[method-assign]
        cls.backward = staticmethod(  # type: ignore[method-assign]
            once_differentiable(_without_autocast(cls.backward))
        )


# torch.compile traces calls of static methods of an autograd function, and no other attributes.
def _by_name(names: tuple[str, ...]) -> Any:
    Saved, count = namedtuple("Saved", names), len(names)  # type: ignore[misc]  # noqa: N806

    def save(*tensors: Any, **named: Any) -> Any:
        return Saved(*tensors, **named)

    def saved(ctx: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        tensors = ctx.saved_tensors
        return Saved(*tensors[:count]), tensors[count:]

    return staticmethod(save), staticmethod(saved)


def _by_argument(forward: Callable[..., Any]) -> Any:
    places: dict[str, int | slice] = {}
    for place, argument in enumerate(inspect.signature(forward).parameters.values(), -1):
        several = argument.kind is argument.VAR_POSITIONAL
        places[argument.name] = slice(place, None) if several else place

    def needs(ctx: Any, name: str) -> Any:
        return ctx.needs_input_grad[places[name]]

    return staticmethod(needs)


def _without_autocast(step: _Step) -> _Step:
    """``forward`` or ``backward`` of an autograd function, with autocast switched off inside."""

    @functools.wraps(step)
    def run(ctx: Any, *args: Any) -> Any:
        for given in args:
            if isinstance(given, torch.Tensor):
                if torch.is_autocast_enabled(given.device.type):
                    with torch.autocast(given.device.type, enabled=False):
                        return step(ctx, *args)
                break
        return step(ctx, *args)

    return run  # type: ignore[return-value]


def once_differentiable(backward: _Step) -> _Step:
    """``backward`` of an autograd function, which raises under ``create_graph=True``.

    torch's decorator of this name raises only where the incoming gradient requires grad itself.
    A penalty on a gradient would pass, and change nothing.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # autograd runs backward so exactly under create_graph
            raise RuntimeError(
                "create_graph: got True, accepted: False through functions of the FP8 flow, which "
                "are once_differentiable; for gradients of gradients, "
                '"coat": {"activation": {"enabled": false}}'
            )
        return backward(ctx, *grads)

    return run  # type: ignore[return-value]


def check_settings(settings: Any) -> None:
    """Raises TypeError for a whole block, or a dict, where its ``activation`` belongs."""
    if not isinstance(settings, ActivationConfig):
        raise TypeError(
            f"settings: got {type(settings).__name__}, accepted: ActivationConfig, as "
            f"CoatConfig.parse({{}}).activation"
        )


def leave_out(function: Any, callees: bool) -> None:
    """Let torch.compile run calls of a function as they are where it does not inline them. Unlike
    ``torch.compiler.disable`` this costs a call nothing, and imports no compiler.
    """
    skip, default = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT
    strategy = _frames._FrameExecStrategy(skip, skip if callees else default)
    _frames.set_code_exec_strategy(function.__code__, strategy)


def outside_of_graphs(function: _Step) -> _Step:
    """``function``, which torch.compile does not trace, nor what it calls: a graph break."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    leave_out(function, callees=True)
    return function


def shaped(out: torch.Tensor, *shape: int) -> torch.Tensor:
    """A contiguous result that nobody else holds, with other dimensions for as many elements;
    nothing is copied.

    Autograd refuses to change a view in place that an autograd function returned, as code around
    Megatron's layers does with outputs and losses. ``_unsafe_view``, of which torch's own
    ``matmul`` makes its result, gives a tensor that autograd does not know as a view. It is unsafe
    only where ``out`` is used afterwards. ``torch.compile`` traces it, as it does not ``resize_``.
    It also keeps the gradients of a function whose forward ends in a conversion to the dtype that
    is there already: compiled, torch 2.11 makes them zero without a word.
    """
    assert out.is_contiguous()
    return torch.ops.aten._unsafe_view(out, shape)


class _Made(NamedTuple):
    value: Any
    others: tuple[torch.Tensor, ...]
    """The tensors behind the first one: while they live, no other tensors have their ids."""
    stamp: list[tuple[int, int | None]]
    """Id and count of changes of each tensor."""


def version_of(tensor: torch.Tensor) -> int | None:
    """A tensor's count of changes in place; None for a tensor of inference mode, which has no
    count.
    """
    return None if tensor.is_inference() else tensor._version


def once_per_tensor(make: Callable[..., T]) -> Callable[..., T]:
    """``make(*tensors, **options)``, whose result is kept while the first tensor lives: for tensors
    that every layer of a pass is given, such as cosines.

    It is made again where another tensor is a different one, or any of them was changed in place.
    """
    kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @functools.wraps(make)
    def call(*tensors: torch.Tensor, **options: Hashable) -> T:
        by_options = kept.setdefault(tensors[0], {})
        key, stamp = tuple(options.items()), [(id(t), version_of(t)) for t in tensors]
        found = by_options.get(key)
        if found is None or found.stamp != stamp:
            found = by_options[key] = _Made(make(*tensors, **options), tensors[1:], stamp)
        return found.value

    return call
