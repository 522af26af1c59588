"""Launches with little host time: a thin layer over ``triton.jit``.

For every call Triton binds and specializes the arguments, makes a string of the options, compares
globals, and prepares what a profiler's hook might ask for: some 45 us on the host of an H200
(Triton 3.6), where the kernel itself often takes less. ``@fast_launch`` above ``@triton.jit`` keeps
a dictionary of its own. Call sites stay ``kernel[grid](...)``.

The types of the arguments and the names of the keywords choose a *plan*, a function generated for
that pattern, which knows what is a tensor, a number or None. The plan makes a key of everything
that Triton specializes on; on a hit it calls the compiled kernel as ``JITFunction.run`` does, with
addresses in place of tensors:

=================  ============================================================
argument           in the key
=================  ============================================================
tensor             dtype; whether its address is a multiple of 16; device
int                whether it is 1; whether it is a multiple of 16; which of
                   int32, int64 and uint64 holds it
float, None        nothing: floats are all alike to Triton, and the plan is for this None
constexpr, option  its value
=================  ============================================================

A key finer than Triton's costs a detour; a coarser one would run the wrong kernel. Tests hold it
against Triton's own specialization. Everything else takes Triton's path: the first call of each
key, other types of arguments, hooks of profilers, ``torch.compile``, the interpreter, and versions
of Triton that have not been compared.

All tensors lie on one device. The launch happens there, whichever device is current. Below compute
capability 8.9 Triton does not know E4M3, so it gets such tensors as bytes, which ``fp8.py`` reads
and writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from ..devices import has_fp8

COMPARED = ("3.6.", "3.8.")
"""Versions of Triton whose specialization and launch have been compared with what is done here."""

_WRAPPED: list[FastLaunch] = []

# Exactly: the address of another subclass need not be that of its data.
_TENSORS = (torch.Tensor, torch.nn.Parameter)

# Chains of calls, normally empty.
_ENTER, _LEAVE = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook

# Written out for each pattern and run by exec, as loops over the arguments cost more than all the
# rest: a launch of 26 arguments takes 12.8 us on a hit, 24.3 us by a loop over a table of kinds,
# 21.2 us by a loop a kind (CPython 3.11, one core of a shared and busy server, the compiled kernel
# replaced by an empty function; best of 60 repeats). A layer launches some forty.
_PLAN = """
def key(values):
    {arguments} = values
    {addresses}
    return {key}

def launch(grid, values):
    {arguments} = values
    {addresses}
    kernel = kernels.get({key})
    if kernel is None or current_device() != {device} or (
        runtime.launch_enter_hook is not enter or runtime.launch_exit_hook is not leave
        or enter_calls or leave_calls
        or runtime.debug or runtime.add_stages_inspection_hook is not None or pre_run_hooks
        or compilation.instrumentation_mode
    ):
        return None
    run, function, metadata, compiled = kernel
    x, y, z = grid
    run(x, y, z, current_stream({device}), function, metadata, None, None, None, {passed})
    return compiled
"""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own, made to be called in kernels too, takes microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, a positive number."""
    return 1 << (n - 1).bit_length()


def fast_launch(kernel: Any) -> Any:
    """:class:`FastLaunch` around what ``triton.jit`` made; an interpreted function stays as it
    is.
    """
    if not isinstance(kernel, JITFunction):
        return kernel
    _WRAPPED.append(FastLaunch(kernel))
    return _WRAPPED[-1]


def forget() -> None:
    """Have every kernel's next launch ask Triton: after ``COAT_FP8_ARITHMETIC`` was changed in a
    running program, since a GPU does not change and keys do not hold it.
    """
    for kernel in _WRAPPED:
        kernel._plans.clear()


class FastLaunch:
    """A kernel launched as a ``JITFunction`` is, ``kernel[grid](...)``; other attributes are
    those of ``jit``.
    """

    def __init__(self, jit: JITFunction) -> None:
        self.jit = jit
        # Reads and writes of these dicts are single operations: threads at worst do the same work
        # twice.
        self._plans: dict[tuple, Plan] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "jit":  # not set yet: while this object is being copied
            raise AttributeError(name)
        return getattr(self.jit, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        # torch.compile puts Triton's own object into its graph.
        if torch.compiler.is_compiling() or callable(grid):
            return self.jit[grid]
        return functools.partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        pattern: tuple[Any, ...] = (*map(type, values), *kwargs)
        plan = self._plans.get(pattern)
        if plan is None:
            plan = self._plans[pattern] = Plan(self.jit, pattern[: len(values)], tuple(kwargs))
        return plan.launch(grid, values) or self._launch_by_triton(plan, grid, values, args, kwargs)

    def _launch_by_triton(
        self, plan: Plan, grid: tuple[int, ...], values: tuple, args: tuple, kwargs: dict
    ) -> Any:
        device = -1 if plan.tensor is None else values[plan.tensor].get_device()
        if plan.tensor is not None and not has_fp8(values[plan.tensor]):
            args, kwargs = (
                tuple(map(as_bytes, args)),
                {name: as_bytes(value) for name, value in kwargs.items()},
            )
        with torch.cuda.device(device):  # nothing happens for -1, the CPU's
            compiled = self.jit.run(*args, grid=grid, warmup=False, **kwargs)
            if plan.supported and type(compiled) is CompiledKernel:
                plan.kernels[plan.key(values)] = (
                    compiled.run,
                    compiled.function,
                    compiled.packed_metadata,
                    compiled,
                )
        return compiled


def as_bytes(value: Any) -> Any:
    """E4M3 tensors as bytes, all else as it is: what kernels take on GPUs where Triton does not
    know that type. Keys hold E4M3 all the same: a compiled kernel is called with addresses.
    """
    is_e4m3 = isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn
    return value.view(torch.uint8) if is_e4m3 else value


class Plan:
    """How one pattern of argument types is launched.

    Attributes:
        launch: ``(grid, values)`` -> the compiled kernel that was launched, or None where Triton
            has to do it.
        key: ``values`` -> what stands for them in ``kernels``.
        supported: whether ``launch`` ever does it.
        tensor: position of the first tensor in ``values``, if there is one.
    """

    def __init__(
        self, jit: JITFunction, types: tuple[type, ...], keywords: tuple[str, ...]
    ) -> None:
        """``types`` of positional arguments and then of those that ``keywords`` names, options
        included.
        """
        self.kernels: dict[Any, tuple] = {}
        self.launch: Callable[..., Any]
        self.key: Callable[[tuple], Any]
        positional = [p.name for p in jit.params[: len(types) - len(keywords)]]
        places = {name: i for i, name in enumerate((*positional, *keywords))}
        tensors = [i for i, t in enumerate(types) if t in _TENSORS]
        self.tensor = tensors[0] if tensors else None
        constexprs = {p.name for p in jit.params if p.is_constexpr} | (
            places.keys() - {p.name for p in jit.params}
        )
        parts = [_specialization(i, types[i], name in constexprs) for name, i in places.items()]
        self.supported = (
            triton.__version__.startswith(COMPARED)
            and self.tensor is not None
            and all(p.name in places for p in jit.params)
            and None not in parts
        )
        if not self.supported:
            self.launch = self.key = lambda *_: None
            return
        code = _PLAN.format(
            arguments="".join(f"a{i}, " for i in range(len(types))),
            addresses="; ".join(
                f"p{i}, d{i} = a{i}.data_ptr(), a{i}.get_device()" for i in tensors
            ),
            key=f"({', '.join(p for p in parts if p)},)",
            device=f"d{self.tensor}",
            passed=", ".join(
                f"{'p' if types[i] in _TENSORS else 'a'}{i}"
                for i in (places[p.name] for p in jit.params)
            ),
        )
        scope = dict(
            kernels=self.kernels,
            runtime=knobs.runtime,
            enter=_ENTER,
            leave=_LEAVE,
            enter_calls=getattr(_ENTER, "calls", True),
            leave_calls=getattr(_LEAVE, "calls", True),
            compilation=knobs.compilation,
            pre_run_hooks=jit.pre_run_hooks,
            # torch's own functions without Python around them. A build without CUDA gets no hits,
            # and calls neither.
            current_device=getattr(torch._C, "_cuda_getDevice", None),
            current_stream=getattr(torch._C, "_cuda_getCurrentRawStream", None),
        )
        exec(code, scope)
        self.launch, self.key = scope["launch"], scope["key"]


def _specialization(i: int, kind: type, constexpr: bool) -> str | None:
    """What stands in the key for argument i, as code; None for types that are not known here."""
    if constexpr:
        return f"a{i}"
    if kind in _TENSORS:
        return f"a{i}.dtype, p{i} % 16 == 0, d{i}"
    if kind is int:
        return (
            f"a{i} == 1, a{i} % 16 == 0, -0x80000000 <= a{i} <= 0x7FFFFFFF, a{i} <= "
            "0x7FFFFFFFFFFFFFFF"
        )
    return "" if kind in (float, NoneType) else None
