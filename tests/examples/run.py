"""Start the programs of examples/ as their first lines say, or run one in a rank that exists
already.

``torchrun -m tests.examples.run NAME FOLDER`` and ``deepspeed --module tests.examples.run NAME
FOLDER`` run an example under a launcher, check it from inside and leave each rank's losses in
FOLDER.
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import Program, free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STEPS = 30
CHECKED = ("torch_loop", "deepspeed_any_model", "megatron_deepspeed", "megatron_loop")
"""What can be checked from inside on any number of ranks."""
MODULES = {"torchrun": "torch.distributed.run", "deepspeed": "deepspeed.launcher.runner"}


def commands(name: str) -> list[str]:
    """The indented lines of an example's docstring: how it is started, from the root of the
    repository.
    """
    text = ast.get_docstring(
        ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")), clean=False
    )
    found = [line.strip() for line in (text or "").splitlines() if line.startswith("    ")]
    assert found, f"examples/{name}.py does not say how it is started"
    return found


def start(
    command: str,
    folder: Path | None = None,
    ranks: bool = False,
    limit: float = 300,
    **environment: str,
) -> str:
    """Run a command with the launcher that stands beside this Python, and a port of its own; what
    it printed.

    Args:
        folder: Exists; the launcher, which is no part of the project, is then forked.
        ranks: What the launcher starts is forked, too, and not started from nothing.
        limit: Seconds that it may take.

    Raises:
        AssertionError: it failed.
    """
    name, *rest = shlex.split(command)
    launcher = ["-m", MODULES[name], "--master_port", str(free_port())] if name in MODULES else []
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if launcher and folder is not None:
        program = Program([*launcher, *rest], folder, ROOT, ranks=ranks, **environment)
        printed, status = program.communicate(limit)[0], program.returncode
    else:
        done = subprocess.run(
            [*_launcher(name), *launcher[2:], *rest],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
        printed, status = done.stdout, done.returncode
    assert status == 0, printed[-8000:]
    return printed


def _launcher(name: str) -> list[str]:
    """``python`` is this Python; a launcher is the script beside it, or the module that the
    script would run.
    """
    script = Path(sys.executable).with_name(name)
    if name == "python":
        return [sys.executable]
    return [str(script)] if script.exists() else [sys.executable, "-m", MODULES[name]]


def check(name: str) -> list[float]:
    """Run an example in this process, a rank: it learns with what it claims, and uses no other
    rank's GPU.
    """
    sys.argv = [f"examples/{name}.py"]
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    losses = names["losses"]
    assert len(losses) == STEPS and losses[-1] < losses[0], losses
    optimizer = names.get("optimizer")
    _has_fp8_moments(optimizer if name == "torch_loop" else optimizer.optimizer)
    if "deepspeed" in name:
        assert names["scheduler"] is None
    if "megatron" in name:
        assert names["report"].patched and not names["report"].left
    for i in range(torch.cuda.device_count()):
        mine = i == int(os.environ["LOCAL_RANK"])
        assert (torch.cuda.max_memory_reserved(i) > 0) == mine, (
            f"rank {os.environ['RANK']} and GPU {i}"
        )
    return losses


def _has_fp8_moments(optimizer: Any) -> None:
    assert any(kind.__name__ == "CoatAdamW" for kind in type(optimizer).__mro__)
    assert any("coat_m_q" in state for state in optimizer.state.values())


if __name__ == "__main__":
    name, folder = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(check(name)))
    if dist.is_initialized():
        dist.destroy_process_group()
