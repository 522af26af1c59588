"""The flow's kernels on a GPU, against their definitions on the same GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs compute capability 8.9: FP8 conversion", allow_module_level=True)

from tests.coat_dist.kernels import flow_agreement as agreement


def test_quantize():
    agreement.check_quantize("cuda", shapes=((3, 70), (257, 1040), (2, 130, 4096), (2, 131, 200)))


# Each combination compiles kernels of its own, which is what takes the time here.
@pytest.mark.parametrize("rows, sizes", [(130, (200, 5120)), (65, (4096,))])
def test_norm(rows, sizes):
    """Two times 130 rows are transposed by packets, two times 65 are not."""
    agreement.check_norm("cuda", sizes=sizes, rows=rows)


def test_norm_of_no_rows():
    agreement.check_norm_of_no_rows("cuda")


def test_activation():
    agreement.check_activation("cuda", sizes=(2752,), rows=260, variants=1)


def test_activation_without_packets():
    agreement.check_activation("cuda", sizes=(176,), rows=257, activations=("swiglu", "gelu"), variants=3)


def test_activation_of_bad_values():
    agreement.check_activation_of_bad_values("cuda")
