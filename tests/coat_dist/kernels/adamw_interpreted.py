"""What test_adamw.py runs with TRITON_INTERPRET=1."""

import pytest
import torch

from tests.coat_dist.kernels import adamw_agreement as agreement
from tests.coat_dist.kernels import adamw_edges, adamw_plain, adamw_problems, adamw_trajectory

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("variant", adamw_problems.VARIANTS)
def test_kernel_agrees_with_the_definition(variant):
    agreement.check(128 * 21 + 1, **adamw_problems.VARIANTS[variant])


@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 1023, 1024, 1025])
def test_lengths_around_groups_and_tiles(n):
    agreement.check(n)


def test_non_finite_gradients():
    adamw_edges.check_non_finite()


def test_extreme_moments_survive():
    adamw_edges.check_extremes()


def test_int8_and_log8_codes_survive():
    adamw_edges.check_codes_survive()


def test_the_smallest_normal_numbers():
    adamw_edges.check_smallest_normals()


@pytest.mark.parametrize(
    "variant",
    [
        *("default", "e5m2", "groups of 64", "maximize", "bf16", "stochastic", "lr tensor", "gradient factor"),
        *("int8, log8", "e4m3, log8, second moment stochastic", "remainder, copy, stochastic", "fp16 copy"),
    ],
)
def test_many_tensors_in_one_launch(variant):
    agreement.check_many(**adamw_problems.VARIANTS[variant])


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
def test_a_remainder_keeps_the_fp32_master_to_the_bit(grad, seed):
    adamw_plain.check_remainder(seed=seed, grad=grad)


def test_every_master_is_divided_as_defined():
    adamw_plain.check_split(every=61)


@pytest.mark.parametrize("first, size, stochastic", adamw_trajectory.VARIANTS)
def test_many_steps_go_where_fp32_adamw_goes(first, size, stochastic):
    adamw_trajectory.check(first, size, stochastic)
