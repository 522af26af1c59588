"""Cached codes of weights: none may survive a change of the weights."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from coat_dist.flow import invalidate_weights, weights

from .common import plain_linear

pytestmark = pytest.mark.usefixtures("empty_cache")


def quietly(function, *arguments):
    with torch.no_grad():
        function(*arguments)


def optimizer_step(p, new):
    p.grad = new
    torch.optim.SGD([p], lr=0.5).step()


def step_elsewhere(p, new):
    """As ZeRO does it: an optimizer steps on something else, then the parameter's storage is
    written.
    """
    master = torch.nn.Parameter(p.detach().clone())
    optimizer_step(master, new)
    p.data.copy_(master.detach())


def averaged(p, new):
    average = torch.optim.swa_utils.AveragedModel(torch.nn.ParameterList([p]))
    average.update_parameters(torch.nn.ParameterList([torch.nn.Parameter(new)]))
    quietly(torch._foreach_copy_, [p], list(average.parameters()))


WRITES = {
    "copy_": (lambda p, new: quietly(p.copy_, new), True),
    "data =": (lambda p, new: setattr(p, "data", new), True),
    "detach().copy_": (lambda p, new: p.detach().copy_(new), True),
    "load_state_dict": (
        lambda p, new: torch.nn.ParameterList([p]).load_state_dict({"0": new}),
        True,
    ),
    "nn.init": (lambda p, new: torch.nn.init.normal_(p), True),
    "vector_to_parameters": (
        lambda p, new: torch.nn.utils.vector_to_parameters(new.view(-1), [p]),
        True,
    ),
    "averaged weights": (averaged, True),
    "an optimizer's step": (optimizer_step, True),
    "an optimizer's step on a master": (step_elsewhere, True),
    # As torch's DistributedDataParallel makes its ranks equal.
    "_broadcast_coalesced": (
        lambda p, new: dist._broadcast_coalesced(dist.group.WORLD, [p.detach()], 2**20, 0),
        True,
    ),
    "broadcast": (lambda p, new: dist.broadcast(p, 0), False),
    "broadcast of data": (lambda p, new: dist.broadcast(p.data, 0), False),
    "all_reduce": (lambda p, new: dist.all_reduce(p.detach()), False),
    "data.copy_": (lambda p, new: p.data.copy_(new), False),
    "foreach on data": (lambda p, new: quietly(torch._foreach_mul_, [p.data], 2.0), False),
}
"""{name: (a write to p, whether the cache sees it)}; what it does not see is documented."""


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_which_writes_are_seen_and_which_need_a_call(one_rank, quantized):
    """By whether codes are made anew: a collective of one rank writes what was there."""
    for name, (write, seen) in WRITES.items():
        p, x = torch.nn.Parameter(torch.randn(64, 48)), torch.randn(20, 48)
        plain_linear(p, x)
        quantized.clear()
        write(p, torch.randn(64, 48))
        after = plain_linear(p, x)
        assert quantized == [(64, 48)] * seen, name
        if not seen:
            invalidate_weights()
            after = plain_linear(p, x)
        assert torch.equal(after, plain_linear(p, x, "on_use")), name


def test_new_storage_at_an_old_address_is_seen():
    """An allocator gives a freed address again, and assigning ``data`` raises no version."""
    memory, x = bytearray(torch.randn(64 * 48).numpy().tobytes()), torch.randn(20, 48)
    p = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(64, 48))
    plain_linear(p, x)
    address, version = p.data_ptr(), p._version
    p.data = torch.randn(64, 48)
    memory[:] = torch.randn(64 * 48).numpy().tobytes()
    p.data = torch.frombuffer(memory, dtype=torch.float32).view(64, 48)
    assert (p.data_ptr(), p._version) == (address, version)
    assert torch.equal(plain_linear(p, x), plain_linear(p, x, "on_use"))


def test_methods_that_write_weights_can_be_named():
    class Owner:
        def load(self, path, fails=False):
            """Load."""
            if fails:
                raise OSError(path)
            return path

    owner, (x, p) = Owner(), (torch.randn(20, 48), torch.nn.Parameter(torch.randn(64, 48)))
    weights.invalidate_after(owner, "load", "save")  # what it does not have is left out
    assert owner.load.__doc__ == "Load." and not hasattr(owner, "save")
    for fails in (False, True):
        plain_linear(p, x)
        assert weights._cache
        with pytest.raises(OSError, match="here") if fails else contextlib.nullcontext():
            assert owner.load("here", fails=fails) == "here"
        assert not weights._cache
