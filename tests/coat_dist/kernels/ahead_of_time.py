"""Kernels compiled for a GPU that is not there: what a call would launch, down to machine code
by Triton's ptxas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime import jit as runtime

from coat_dist.devices import FP8_CAPABILITY
from coat_dist.kernels import fp8, launch


class Compiled(NamedTuple):
    name: str
    ptx: str


@contextmanager
def compiled_for(capability: tuple[int, int]) -> Iterator[list[Compiled]]:
    """Kernels that are launched inside, on CPU tensors, are compiled for a GPU of this capability
    and noted; nothing runs. Arguments are those that such a GPU's launches have. Not where kernels
    are interpreted.
    """
    number, native = 10 * capability[0] + capability[1], capability >= FP8_CAPABILITY
    backend, made = CUDABackend(GPUTarget("cuda", number, 32)), []

    def there(value: Any) -> Any:
        if isinstance(value, fp8.Format):
            name = {2: "e5m2", 3: "e4m3", 4: "e3m4", 7: "int8"}[value.mantissa_bits]
            return fp8._CONSTANTS[name, True, native]._replace(e8m0=value.e8m0)
        if isinstance(value, torch.Tensor):
            return value if native else launch.as_bytes(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(there, value))
        return value

    def compile_it(self: launch.FastLaunch, grid: tuple, *args: Any, **kwargs: Any) -> None:
        args, kwargs = (
            tuple(map(there, args)),
            {name: there(value) for name, value in kwargs.items()},
        )
        if "FAST" in kwargs:
            kwargs["FAST"] = True
        params = self.jit.params
        binder = runtime.create_function_from_signature(self.jit.signature, params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        signature = {p.name: kind for p, (kind, _) in zip(params, specialization, strict=True)}
        constants = {name: bound[name] for name, kind in signature.items() if kind == "constexpr"}
        attributes = {
            (i,): backend.parse_attr(what)
            for i, (kind, what) in enumerate(specialization)
            if kind != "constexpr" and isinstance(what, str)
        }
        source = ASTSource(self.jit, signature, constants, attributes)
        done = triton.compile(source, target=GPUTarget("cuda", number, 32), options=dict(options))
        assert done.asm["cubin"]
        made.append(Compiled(self.jit.__name__, done.asm["ptx"]))

    with mock.patch.object(launch.FastLaunch, "_launch", compile_it):
        yield made


def conversions(ptx: str) -> list[str]:
    """Instructions that convert to or from FP8."""
    return [
        line.strip()
        for line in ptx.splitlines()
        if "cvt" in line and ("e4m3" in line or "e5m2" in line)
    ]
