"""The amax of a gradient, handed from the kernel that wrote the gradient to the function that quantizes it.

The gradient of a residual stream is written by the backward of one norm and quantized by the linear before it. Autograd
hands the very tensor on, as an addition's gradient is its output's, and a live tensor keeps its Python object: so the
amax travels as an attribute of that object, with the object's identity and the version counter that the tensor had.
What is another object, like a sum, a copy or what a hook returns, has no attribute or one of another object; what was
changed in place has another version. Both are looked through as if nothing had come. So is what is used on another
stream: the allocator does not know that the amax is read there.

Some writes do not raise the counter: through ``.data``, by kernels that are not torch's, and by collectives. Megatron
does sum gradients over tensor-parallel ranks in place, so only functions on one such rank take what comes.
"""

from __future__ import annotations

import torch

from .tensor_parallel import TensorParallel

__all__ = ["known_amax", "with_amax"]

_ATTRIBUTE = "coat_amax"


def with_amax(dx: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    """dx, a gradient that is returned to autograd, with its amax (fp32 scalar) if that was found."""
    if amax is not None and not torch.compiler.is_compiling():
        setattr(dx, _ATTRIBUTE, (amax, _state(dx)))
    return dx


def known_amax(dy: torch.Tensor, tp: TensorParallel) -> torch.Tensor | None:
    """The amax that came with dy, as autograd gave it, if it still holds."""
    if tp.size > 1 or torch.compiler.is_compiling():
        return None
    amax, state = getattr(dy, _ATTRIBUTE, (None, None))
    return amax if state == _state(dy) else None


def _state(t: torch.Tensor) -> tuple[int, int, int]:
    """Object, version of its values, stream."""
    return id(t), t._version, torch._C._cuda_getCurrentRawStream(t.device.index) if t.is_cuda else 0
