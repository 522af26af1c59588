"""MLPs in pieces of tokens: the same bits, and fewer bytes at the worst moment."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from coat_dist.flow import norm_mlp
from tests.support import equal

from .common import ONE, Layer, settings

CASES = {
    "trained": ("swiglu", True, "exact"),
    "quantized": ("geglu", True, "quantized"),
    "without a norm or a gate": ("squared_relu", False, "exact"),
    "biased": ("swiglu", True, "exact"),
    "frozen": ("swiglu", False, "exact"),
}


class Alive(TorchDispatchMode):
    """The most bytes of tensors of 8 and 16 bits, which definitions do not compute with."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.itemsize <= 2:
            storage = out.untyped_storage()
            self.live[StorageWeakRef(storage)] = storage.nbytes()
        held = sum(size for storage, size in self.live.items() if not storage.expired())
        self.peak = max(self.peak, held)
        return out


@pytest.mark.parametrize("tiles", [2, 3, 7])
@pytest.mark.parametrize("name", CASES)
def test_pieces_have_the_bits_of_the_whole(name, tiles, tokens=645, h=32, f=112):
    (activation, normed, forward), found, peaks = CASES[name], [], []
    options = {"activation": activation, "biased": name == "biased"}
    layer = Layer.random(h, 48, f, dtype=torch.bfloat16, **options)
    layer.fc1.requires_grad_(name != "frozen")
    x = torch.randn(tokens, 1, h, dtype=torch.bfloat16, requires_grad=True)
    leaves = [t for t in (x, *layer.parameters().values()) if t.requires_grad]
    for n in (1, tiles):
        rest = ONE, settings(tiles=n, forward=forward), layer.fc1_bias, normed
        with Alive() as alive:
            outs = norm_mlp(
                x, layer.norm if normed else None, layer.fc1, layer.fc2, activation, *rest
            )
            outs = outs if normed else (outs,)
            found.append((*outs, *torch.autograd.grad(outs, leaves, outs, allow_unused=True)))
        peaks.append(alive.peak)
    assert equal(*found)
    # Of 9 bytes a token and feature, with a gate, 5 exist for one piece at a time.
    assert name == "biased" or peaks[0] - peaks[1] > 1.5 * f * tokens
