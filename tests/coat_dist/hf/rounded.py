"""Which weights a model's products read, and the same products with plain E4M3 rounding: what the
flow is compared with, of which it shares no code.
"""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm"}
MATMULS = {torch.matmul, torch.bmm, torch.mm}
MATMULS |= {torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.mm}


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


class Read(TorchDispatchMode):
    """Notes the storages that products read: a weight in FP8 is read by none."""

    def __init__(self):
        super().__init__()
        self.addresses = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.partition("::")[2] in PRODUCTS:
            self.addresses |= {_address(a) for a in args if isinstance(a, torch.Tensor)}
        return func(*args, **(kwargs or {}))

    def weights(self, model):
        """The names of those that belong to parameters."""
        return {n for n, p in model.named_parameters() if _address(p) in self.addresses}


class RoundedProducts(TorchFunctionMode):
    """Rounds both factors of products with some weights, and the gradient of the product."""

    def __init__(self, weights):
        super().__init__()
        self.addresses = set(map(_address, weights))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear and _address(args[1]) in self.addresses:
            bias = [*args[2:], kwargs.get("bias"), None][0]
            y = _Rounded.apply(args[0], args[1])
            return y if bias is None else y + bias
        if func in MATMULS and _address(args[1]) in self.addresses:
            return _Rounded.apply(args[0], args[1].mT)
        return func(*args, **kwargs)


class _Rounded(torch.autograd.Function):
    """x w^T, of matrices or as many of them as experts."""

    @staticmethod
    def forward(ctx, x, weight):
        rows, w8 = _round(x, -1), _round(weight)
        ctx.save_for_backward(rows, w8)
        ctx.dtypes = x.dtype, weight.dtype
        return (rows @ w8.mT).to(x.dtype)

    @staticmethod
    def backward(ctx, dout):
        rows, w8 = ctx.saved_tensors
        d8 = _round(dout)
        of_weight = (d8.flatten(0, -2), rows.flatten(0, -2)) if w8.dim() == 2 else (d8, rows)
        dw = of_weight[0].mT @ of_weight[1]
        return (d8 @ w8).to(ctx.dtypes[0]), dw.to(ctx.dtypes[1])


def _round(tensor, dim=None):
    """To E4M3, with a scale for the tensor, or for each row."""
    tensor = tensor.float()
    top = tensor.abs().amax() if dim is None else tensor.abs().amax(dim, keepdim=True)
    scale = top.clamp(min=1e-30) / 448
    return (tensor / scale).to(torch.float8_e4m3fn).float() * scale
