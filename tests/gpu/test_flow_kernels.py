"""The flow's kernels on a GPU, against their definitions on the same GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs compute capability 8.9: FP8 conversion", allow_module_level=True)

from tests.coat_dist.kernels import flow_agreement as agreement


def test_quantize():
    agreement.check_quantize("cuda", shapes=((3, 70), (257, 1040), (2, 130, 4096)))


def test_norm():
    agreement.check_norm("cuda", sizes=(200, 4096, 5120), rows=130)


def test_activation():
    agreement.check_activation("cuda", sizes=(176, 2752), rows=257)
