"""Kernels compile for GPUs without FP8 instructions (8.0: A100, 8.6), and then hold none; from
8.9 on they do.
"""

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from coat_dist.formats import E3M4, E4M3, E5M2, INT8  # noqa: E402
from coat_dist.kernels import adamw, adamw_fp32, launch, norm, quantize  # noqa: E402
from coat_dist.reference.adamw import AdamWTensors, FP32Tensors  # noqa: E402
from tests.coat_dist.ops.adamw_problems import NUMBERS, VARIANTS, extras, one_step, problem  # noqa: E402
from tests.support import run_ranks  # noqa: E402

from .ahead_of_time import compiled_for, conversions  # noqa: E402
from .test_recompiles import run_all  # noqa: E402

FEW = ("default", "stochastic, e5m2, large seed", "normalized, stochastic")


def adamw_steps(variants):
    """A step of each variant, one of tensors that share a launch, those that count on the
    device, and fp32 moments.
    """
    for name in variants:
        options = VARIANTS[name]
        tensors, numbers = problem(4096, **options), options.get("numbers", NUMBERS)
        one_step(adamw, *tensors, numbers, options.get("seed"), **extras(4096, **options))
    many = [problem(4096) for _ in range(2)]
    adamw.adamw_steps([AdamWTensors(*x[:4]) for x in many], *many[0][4:], NUMBERS)
    counted = [AdamWTensors(*x[:4], step_count=torch.ones(())) for x in many]
    adamw.adamw_steps(counted, *many[0][4:], NUMBERS)
    adamw.adamw_steps(counted[:1], *many[0][4:], NUMBERS)
    flat, half, low = (
        torch.zeros(129),
        torch.zeros(129).bfloat16(),
        torch.zeros(129, dtype=torch.int16),
    )
    rest = {"low": low, "copy": half}
    on_device = replace(NUMBERS, lr=torch.ones(()), grad_factor=torch.ones(()), maximize=True)
    adamw_fp32.step_contiguous([FP32Tensors(flat[:128], *[flat[:128]] * 3)], NUMBERS)
    adamw_fp32.step_contiguous(
        [FP32Tensors(half, *[flat] * 3, **rest, step_count=torch.ones(()))], on_device
    )


def some_of_the_flow(tokens):
    """Every kind of conversion: into rows, into packets of four rows, by groups and back."""
    x, gain = torch.randn(tokens, 64).bfloat16(), torch.ones(64)
    for fmt, saved in ((E4M3, E3M4), (E5M2, INT8), (E4M3, E4M3), (E5M2, E5M2)):
        quantize.quantize_both(x, fmt, torch.ones(()))
        x8, stats, _ = norm.norm_compress(
            x, "rmsnorm", 1e-5, gain, None, fmt, 32, "e8m0", False, saved
        )
        norm.norm_backward(x, x8, "rmsnorm", stats, gain, bias=False)


def without_fp8(rank, world, capability, variants, whole_flow):
    with compiled_for(capability) as made:
        adamw_steps(variants)
        run_all(20) if whole_flow else some_of_the_flow(20)
    names = {one.name for one in made}
    assert {"_adamw_kernel", "_adamw_table_kernel", "_tensor_kernel"} <= names, names
    assert {"_adamw_fp32_kernel", "_numbers_kernel"} <= names, names
    for one in made:
        assert not conversions(one.ptx), (one.name, conversions(one.ptx)[0])


def with_fp8(rank, world):
    with compiled_for((9, 0)) as made:
        adamw_steps(["default"])
        quantize.quantize_both(torch.zeros(20, 64), E5M2, torch.ones(()))
        some_of_the_flow(20)
    found = {one.name for one in made if conversions(one.ptx)}
    assert {"_adamw_kernel", "_adamw_table_kernel", "_tensor_kernel"} <= found, found


def test_kernels_for_8_0_convert_by_arithmetic():
    run_ranks(1, without_fp8, (8, 0), FEW, False)


def test_kernels_for_9_0_convert_by_instructions():
    run_ranks(1, with_fp8)  # otherwise the test above would find nothing anywhere


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (8, 6)], ids=str)
def test_every_variant_for_gpus_without_fp8(capability):
    run_ranks(1, without_fp8, capability, tuple(VARIANTS), True, timeout=900.0)


def test_e4m3_tensors_are_launched_as_bytes_without_fp8():
    x = torch.randn(8).to(torch.float8_e4m3fn)
    assert launch.as_bytes(x).dtype == torch.uint8 and launch.as_bytes(x).data_ptr() == x.data_ptr()
    for value in (torch.zeros(2), torch.zeros(2).to(torch.float8_e5m2), 3, None, E4M3):
        assert launch.as_bytes(value) is value
