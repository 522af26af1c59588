"""Supported versions of megatron-core, and the CPU in the place of the GPU."""

from __future__ import annotations

import pytest
import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import attention_mask_func

from megatron_patches import check_version, compat, prepare_cpu


@pytest.mark.parametrize("version", ["0.14.0", "0.14.0rc5", "0.16.99+cu12", "0.13.1", "0.17.0rc0"])
def test_supported_versions(version, monkeypatch):
    monkeypatch.setattr(compat.metadata, "version", lambda package: version)
    if version.startswith(("0.14", "0.16")):
        assert check_version() == version
    else:
        with pytest.raises(
            ImportError, match=rf"megatron-core: got {version}, accepted: >=0.14,<0.17"
        ):
            check_version()


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced on a machine with a GPU")
def test_prepare_cpu_stands_in_for_the_gpu(caplog):
    assert prepare_cpu()
    replaced = torch.cuda.current_device
    assert prepare_cpu() and torch.cuda.current_device is replaced
    assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(7)
    drawn = torch.rand(3)
    torch.cuda.set_rng_state(state)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), drawn)
    with get_cuda_rng_tracker().fork():
        torch.rand(3)
    assert not caplog.records


@pytest.mark.skipif(torch.cuda.is_available(), reason="the mask is on the GPU")
def test_prepare_cpu_keeps_the_mask_of_unpatched_attention_on_the_cpu():
    """Also outside of Megatron's own loop, which finds the CPU as a whole: a BF16 baseline under
    DeepSpeed.
    """
    softmax = FusedScaleMaskSoftmax(
        False, True, AttnMaskType.causal, False, attention_mask_func, True, None
    )
    prepare_cpu()
    probabilities = softmax.forward_torch_softmax(torch.randn(1, 2, 6, 6).bfloat16(), None)
    seen = (probabilities > 1e-3)[0, 0]
    assert not seen.triu(1).any() and seen.diagonal().all()
