"""The kernels in Triton's interpreter: in a process of its own, as Triton reads TRITON_INTERPRET on import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["adamw_interpreted", "flow_interpreted"])
def test_in_the_interpreter(module):
    pytest.importorskip("triton")
    here = Path(__file__).parent
    root = here.parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / f"{module}.py")]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout + result.stderr
