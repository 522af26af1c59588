"""Elementary functions inside a kernel: with ``FAST`` the GPU's approximations, which err by some
2**-22; without, exact functions, for the interpreter.

lg2(0) = -inf, ex2(-inf) = 0 and rcp(inf) = 0, so zeros and overflow need no branches. Subnormal
numbers count as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def exp2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def square_root(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sqrt(x)


@triton.jit
def inverse_root(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / tl.sqrt(x)


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    return reciprocal(1.0 + exp2(x * -1.4426950408889634, FAST), FAST)
