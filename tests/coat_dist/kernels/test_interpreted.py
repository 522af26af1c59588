"""The kernels in Triton's interpreter: in a process of its own, as Triton reads TRITON_INTERPRET on import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = [
    "adamw_interpreted",
    "attention_interpreted",
    "cross_entropy_interpreted",
    "flow_interpreted",
    "layouts_interpreted",
    "rows_interpreted",
]


@pytest.mark.parametrize("module", INTERPRETED)
def test_in_the_interpreter(module):
    pytest.importorskip("triton")
    here = Path(__file__).parent
    root = here.parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / f"{module}.py")]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("param, grad", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")])
def test_fp32_moments_of_many_tensors_are_those_of_the_definition(param, grad, maximize):
    pytest.importorskip("triton")
    from tests.coat_dist.kernels import adamw_plain

    adamw_plain.check_fp32_steps(param=getattr(torch, param), grad=getattr(torch, grad), maximize=maximize)


@pytest.mark.parametrize(("param", "low"), [("float32", False), ("bfloat16", True)])
def test_fp32_moments_with_remainders_and_copies(param, low):
    pytest.importorskip("triton")
    from tests.coat_dist.kernels import adamw_plain

    adamw_plain.check_fp32_steps(param=getattr(torch, param), low=low, copy=torch.bfloat16)


def test_fp32_moments_of_many_tensors_need_few_calls(monkeypatch):
    """Two hundred small tensors of two dtypes: two batches, whatever their number."""
    from coat_dist.kernels import adamw_fp32
    from coat_dist.reference.adamw import AdamWStep, FP32Tensors

    batches = []
    real = adamw_fp32._step
    monkeypatch.setattr(adamw_fp32, "_step", lambda params, *rest: (batches.append(len(params)), real(params, *rest)))
    kinds = [torch.float32] * 150 + [torch.bfloat16] * 50
    many = [FP32Tensors(torch.ones(8, dtype=t), torch.ones(8, dtype=t), torch.zeros(8), torch.zeros(8)) for t in kinds]
    adamw_fp32.adamw_fp32_steps(many, AdamWStep(0.1, 0.9, 0.99, 1e-8, 0.0, 1))
    assert batches == [150, 50]
    assert all(torch.allclose(x.param.float(), torch.tensor(0.9), rtol=1e-2) for x in many)
