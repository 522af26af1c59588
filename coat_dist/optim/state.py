"""The state CoatAdamW keeps for one parameter of n elements: layout, creation, validation.

With ``"moments": "fp8"`` (groups = ceil(n / group_size)):

==========================  ===========================  ==========================================
key                         type                         content
==========================  ===========================  ==========================================
``coat_m_q``, ``coat_v_q``  uint8 [groups, group_size]   codes of the first and second moment
``coat_m_a``, ``coat_v_a``  bfloat16 [groups]            amax, rounded up
``coat_m_k``, ``coat_v_k``  uint8 [groups]               spacing of the codes
``step``                    int                          steps taken; with ``capturable`` a float32
                                                         scalar on the parameter's device
``coat_seed``               int                          unless stochastic rounding is off
==========================  ===========================  ==========================================

With ``"moments": "fp32"``: ``exp_avg``, ``exp_avg_sq`` fp32 of the parameter's shape, ``step``.

With ``"master_weights": "bf16_remainder"`` in either case one tensor more, ``coat_p_low``: int16
[groups, group_size], held as uint8 [groups, 2 * group_size] because neither NCCL nor gloo sends
int16. It is the 16 bits that a bfloat16 parameter lacks to be its fp32 master weight
(``reference/master.py``); zeros before the first step, when the parameter is its own master weight.

Of a DTensor parameter (FSDP2), n counts the elements of this rank's shard and tensors named
``coat_`` are plain; ``exp_avg`` and ``exp_avg_sq`` are DTensors like the parameter. State dicts
hold DTensors only: ``optim/sharded.py``.

Codes and remainders are two-dimensional and under private keys on purpose: DeepSpeed takes any
state tensor of the parameter's shape for an fp32 moment and would hand out or convert raw codes
without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping
from numbers import Real
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ValidationError

from ..config import OptimizerConfig
from ..config_errors import Problem, explain
from ..ops import Moment, MomentCodec
from .groups import listed, parameter_of
from .host import on_host, to_host
from .sharded import local, refusal

WhichMoment = Literal["first", "second"]
"""The one word for each moment: in names, in arguments, in error messages. Keys of a state are
the tables below.
"""
MOMENTS: tuple[WhichMoment, WhichMoment] = ("first", "second")
FP32_KEYS: dict[WhichMoment, str] = {"first": "exp_avg", "second": "exp_avg_sq"}
"""Where a state with fp32 moments has them: torch's keys."""
MOMENT_OF = {key: which for which, key in FP32_KEYS.items()}
_CODE_KEYS: dict[WhichMoment, tuple[str, ...]] = {
    "first": ("coat_m_q", "coat_m_a", "coat_m_k"),
    "second": ("coat_v_q", "coat_v_a", "coat_v_k"),
}
CODE_KEYS = (*_CODE_KEYS["first"], *_CODE_KEYS["second"])
"""What a state with FP8 moments holds of them; of each moment in the order of :class:`Moment`."""
LAYOUT_KEYS = (
    "moments",
    "first_moment",
    "second_moment",
    "expand",
    "normalize",
    "group_size",
    "master_weights",
)
"""Keys of a parameter group that say how its state is stored."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_GETTERS = {which: itemgetter(*keys) for which, keys in _CODE_KEYS.items()}


class Codecs(NamedTuple):
    """How each moment is stored."""

    first: MomentCodec
    second: MomentCodec


@functools.cache
def _codecs(
    first: str, second: str, expand: bool, normalize: bool, size: int, keep_grid: bool
) -> Codecs:
    return Codecs(
        MomentCodec(first, expand, size, over_root=normalize),
        MomentCodec(second, expand, size, keep_nonzero=True, keep_grid=keep_grid),
    )


def codecs(group: Mapping[str, Any]) -> Codecs:
    """How a parameter group stores its first and second moment."""
    # To nearest a grid that stays would keep second moments where they are; one that moves is noise
    # that moves them.
    keep_grid = group.get("stochastic_rounding") is not False
    formats = group["first_moment"], group["second_moment"], group["expand"]
    return _codecs(*formats, group["normalize"], group["group_size"], keep_grid)


def stochastic(group: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a parameter group's first and second moment are rounded stochastically."""
    option = group["stochastic_rounding"]
    if option == "auto":
        # Where codes are equally spaced, as those of int8, rounding to nearest leaves the first few
        # as they are, and small ratios have these (docs/numerics.md).
        return group["first_moment"] == "int8", True
    return option, option


def moment(state: Mapping[str, Any], which: WhichMoment) -> Moment:
    """One moment of a state with FP8 moments, sharing memory with it."""
    return Moment(*_GETTERS[which](state))


def has_remainder(group: Mapping[str, Any]) -> bool:
    """Whether states of a parameter group hold the lower halves of master weights."""
    return group.get("master_weights") == "bf16_remainder"


def remainder(state: Mapping[str, Any], n: int) -> torch.Tensor | None:
    """The lower halves of n master weights: int16 [n], sharing memory with the state; None where
    it has none.
    """
    low = state.get("coat_p_low")
    return None if low is None else low.view(torch.int16).view(-1)[:n]


def new_state(param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state before the first step, where it is kept: zero moments, and the parameter as
    master weight.
    """
    hosted = on_host(param, group)
    device = "meta" if hosted else param.device
    tensors: dict[str, torch.Tensor] = {}
    for key, shape, dtype in state_layout(group, local(param).numel(), param.shape):
        if key.startswith("coat_"):
            tensors[key] = torch.zeros(shape, dtype=dtype, device=device)
        else:  # distributed as the parameter is
            tensors[key] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
    if hosted:
        tensors = to_host(tensors, param.is_cuda)
    if group["moments"] == "fp8":
        for which, codec in zip(MOMENTS, codecs(group), strict=True):
            moment(tensors, which).k.fill_(codec.k_of_zeros)
    return {"step": as_count(0, param, group), **tensors}


def state_layout(
    group: Mapping[str, Any], n: int, shape: torch.Size
) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    """Key, shape and dtype of every tensor in the state of a parameter of n elements and this
    shape.
    """
    fp8 = group["moments"] == "fp8"
    return _state_layout(
        fp8, has_remainder(group), group["group_size"], n, () if fp8 else tuple(shape)
    )


@functools.lru_cache(1 << 14)
def _state_layout(fp8: bool, low: bool, size: int, n: int, shape: tuple[int, ...]) -> tuple:
    groups, byte, bf16 = -(-n // size), torch.uint8, torch.bfloat16
    found: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    if fp8:
        for codes, amax, exponents in _CODE_KEYS.values():
            found += [
                (codes, (groups, size), byte),
                (amax, (groups,), bf16),
                (exponents, (groups,), byte),
            ]
    else:
        found += [(key, shape, torch.float32) for key in FP32_KEYS.values()]
    return (*found, *([("coat_p_low", (groups, 2 * size), byte)] if low else []))


def ensure_state(
    states: MutableMapping[torch.Tensor, Any], param: torch.Tensor, group: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of a parameter in an optimizer's ``state``, created where there is none yet."""
    state = states.setdefault(param, {})
    if "step" not in state:  # DeepSpeed may have put an empty dict there
        state.update(new_state(param, group))
    # The option was changed.
    elif isinstance(state["step"], torch.Tensor) != bool(group.get("capturable")):
        state["step"] = as_count(state["step"], param, group)
    return state


def as_count(
    steps: int | torch.Tensor, param: torch.Tensor, group: Mapping[str, Any]
) -> int | torch.Tensor:
    """A number of steps as the group says: an int, or with ``capturable`` an fp32 scalar on the
    parameter's device.

    Waits for the device only where a tensor becomes an int.
    """
    if not group.get("capturable"):
        return int(steps) if isinstance(steps, torch.Tensor) else steps
    if isinstance(steps, torch.Tensor):
        return steps.to(param.device, torch.float32).reshape(())
    return torch.full((), float(steps), dtype=torch.float32, device=param.device)


def check_group(group: Mapping[str, Any], what: str = "CoatAdamW ") -> None:
    """Check the options and parameters of a group with all its defaults filled in.

    Args:
        what: stands before an option's name in an error.

    Raises:
        ValueError: of a ``Problem``: the option, what was given and what is accepted.
        TypeError: names the parameter.
    """

    def require(key: str, accepted: str, ok: bool) -> None:
        if not ok:
            raise ValueError(Problem(f"{what}{key}", f"got {group[key]!r}", accepted))

    def number(value: Any) -> bool:
        return (
            isinstance(value, Real)
            and not isinstance(value, bool)
            and 0 <= float(value) < float("inf")
        )

    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, torch.Tensor) and lr.numel() == 1 and lr.is_floating_point():
        lr = 0.0 if lr.is_cuda else lr.item()  # a value on a GPU would cost a wait
    require("lr", "a number >= 0, or a floating-point tensor of one element >= 0", number(lr))
    require(
        "betas",
        "two numbers in [0, 1)",
        isinstance(betas, tuple | list)
        and len(betas) == 2
        and all(number(b) and b < 1 for b in betas),
    )
    for key in ("eps", "weight_decay"):
        require(key, "a number >= 0", number(group[key]))
    for key in ("maximize", "capturable"):
        require(key, "True or False", isinstance(group[key], bool))
    rounding = group["stochastic_rounding"]  # 0 and 1 are neither False nor True where it is asked
    accepted = "True, False or 'auto'"
    require("stochastic_rounding", accepted, isinstance(rounding, bool) or rounding == "auto")
    require("moments", "'fp8' or 'fp32'", group["moments"] in ("fp8", "fp32"))
    try:
        OptimizerConfig.model_validate(
            {k: group[k] for k in OptimizerConfig.model_fields if k in group}
        )
    except ValidationError as error:
        problem = explain("", OptimizerConfig, error.errors()[0])
        assert isinstance(problem, Problem)
        raise ValueError(problem._replace(key=what + problem.key.removeprefix("."))) from None
    on_cpu = group.get("state_device") == "cpu"
    require("capturable", "False with state_device='cpu'", not (group["capturable"] and on_cpu))
    if group.get("amsgrad"):
        require("amsgrad", "False, this optimizer does not have it", False)
    for p in map(parameter_of, listed(group["params"])):
        if isinstance(p, torch.Tensor):  # torch itself refuses what is not
            check_parameter(p, group)


def check_parameter(param: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Raise TypeError where a parameter cannot be trained, or cannot be the upper half of its
    master weight, as its group says it is.
    """
    if param.dtype not in DTYPES or param.layout is not torch.strided:
        raise TypeError(
            f"CoatAdamW params: got a {param.layout} {param.dtype} parameter of shape "
            f"{tuple(param.shape)}, accepted: dense float32, bfloat16 or float16"
        )
    if reason := refusal(param):
        raise TypeError(f"CoatAdamW params: got {reason}")
    if has_remainder(group) and param.dtype != torch.bfloat16:
        raise TypeError(
            f"CoatAdamW master_weights: got 'bf16_remainder' for a {param.dtype} parameter of "
            f"shape {tuple(param.shape)}, accepted: bfloat16 parameters, or "
            "master_weights='parameter'; DeepSpeed hands over bfloat16 with \"bf16\": "
            '{"bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}'
        )


def check_state(
    saved: Mapping[str, Any], param: torch.Tensor, group: Mapping[str, Any], what: str
) -> None:
    """Check that a saved state fits a parameter and its group's storage options.

    Raises:
        ValueError: names ``what``, the key at fault, and what to do.
    """
    layout = state_layout(group, local(param).numel(), param.shape)
    expected = {"step", *(key for key, _, _ in layout)}
    found = set(saved) - {"coat_seed"}
    if found != expected:
        raise ValueError(
            f"{what}: got {', '.join(sorted(found))}, accepted with moments={group['moments']!r}, "
            f"master_weights={group.get('master_weights', 'parameter')!r}: "
            f"{', '.join(sorted(expected))}. Moments of another optimizer or setting are converted "
            "with coat_dist.optim.export_moments and import_moments; to start with empty ones, do "
            "not load optimizer states"
        )
    for key, shape, dtype in layout:
        value = saved[key]
        given = type(value).__name__
        if isinstance(value, torch.Tensor):
            if (value.shape, value.dtype) == (shape, dtype):
                continue
            given = f"{value.dtype} {list(value.shape)}"
        raise ValueError(
            f"{what}, {key}: got {given}, accepted: {dtype} {list(shape)} for {param.numel()} "
            "elements; saved from a parameter of another shape or sharding"
        )
