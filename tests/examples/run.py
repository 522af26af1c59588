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
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support import Program, free_port, saves_by_dist_checkpointing

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
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    text = ast.get_docstring(tree, clean=False) or ""
    found = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert found, f"examples/{name}.py does not say how it is started"
    return found


def start(
    command: str,
    folder: Path | None = None,
    ranks: bool = False,
    limit: float = 300,
    **environment: str,
) -> str:
    """Run a command, a launcher's with a port of its own; what it printed.

    Args:
        folder: Exists; a launcher, which is no part of the project, is then forked.
        ranks: What the launcher starts is forked, too, and not started from nothing.
        limit: Seconds that it may take.

    Raises:
        AssertionError: it failed.
    """
    name, *line = shlex.split(command)
    if name in MODULES:
        line = ["-m", MODULES[name], "--master_port", str(free_port()), *line]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if name in MODULES and folder is not None:
        program = Program(line, folder, ROOT, ranks=ranks, **environment)
        printed, status = program.communicate(limit)[0], program.returncode
    else:
        done = subprocess.run(
            [sys.executable, *line],
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


def names_of(name: str, *arguments: str) -> dict[str, Any]:
    """Run an example in this process; its global names at the end."""
    program = str(EXAMPLES / f"{name}.py")
    path = [str(EXAMPLES), *sys.path]
    with mock.patch.multiple(sys, argv=[program, *arguments], path=path):
        return runpy.run_path(program, run_name="__main__")


def in_a_rank(rank: int, world: int, name: str, *calls: Sequence[str]) -> list[Any]:
    """Run an example with each list of arguments, one after the other, in a rank that exists;
    results, losses, or the status that it exits with. Without a list, what :func:`check` returns.
    """
    from megatron.core import parallel_state

    os.chdir(ROOT)
    found: list[Any] = []
    # The rank needs its process group once more when the example has ended.
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        saves_by_dist_checkpointing(),
    ):
        if not calls:
            return check(name)
        for arguments in calls:
            try:
                names = names_of(name, *arguments)
            except SystemExit as ended:
                found.append(ended.code)
            else:
                found.append(names.get("results", names.get("losses")))
            parallel_state.destroy_model_parallel()
    return found


def check(name: str) -> list[float]:
    """Run an example in this process, a rank: it learns with what it claims, and uses no other
    rank's GPU.
    """
    names = names_of(name)
    losses, optimizer = names["losses"], names["optimizer"]
    assert len(losses) == STEPS and losses[-1] < losses[0], losses
    if name != "torch_loop":
        optimizer = optimizer.optimizer
    assert any(kind.__name__ == "CoatAdamW" for kind in type(optimizer).__mro__)
    assert any("coat_m_q" in state for state in optimizer.state.values())
    if "megatron" in name:
        assert names["report"].patched and not names["report"].left
    for i in range(torch.cuda.device_count()):
        mine = i == int(os.environ["LOCAL_RANK"])
        assert (torch.cuda.max_memory_reserved(i) > 0) == mine, f"GPU {i}"
    return losses


if __name__ == "__main__":
    name, folder = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(check(name)))
    if dist.is_initialized():
        dist.destroy_process_group()
