"""CoatAdamW whose state is on another device than its parameters."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs compute capability 8.9: FP8 conversion", allow_module_level=True)

from coat_dist.optim import CoatAdamW


@pytest.mark.parametrize("moments", ["fp8", "fp32"])
@pytest.mark.parametrize("n", [256, 257])
def test_a_state_follows_its_parameter(n, moments):
    """As after ``model.cuda()`` between steps: a kernel would take the address for one of its
    own device.
    """
    params = [torch.nn.Parameter(torch.ones(n)) for _ in range(2)]
    optimizer = CoatAdamW([{"params": params, "moments": moments}])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in params:
        p.grad = None
        p.data = p.data.cuda()
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(params, before, strict=True))
    assert all(
        t.is_cuda
        for state in optimizer.state.values()
        for t in state.values()
        if torch.is_tensor(t)
    )
