"""The AdamW kernel in Triton's interpreter: in a process of its own, as Triton reads TRITON_INTERPRET on import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_in_the_interpreter():
    pytest.importorskip("triton")
    here = Path(__file__).parent
    root = here.parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / "adamw_interpreted.py")]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout + result.stderr
