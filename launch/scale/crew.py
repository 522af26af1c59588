"""Measurements on sub-groups of the ranks that a launcher has started, each in a torchrun of its
own.

On every node the process with local rank 0 goes through the same measurements and starts its node's
part of each; the other processes of the launcher end at once. None of them holds a GPU. So a
measurement that fails (out of memory, say) fails alone, and none finds what another has left.
Without a launcher the one process starts all ranks of a machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coat_dist import CoatConfigError
from coat_dist.nodes import free_port
from launch.train.allocator import expandable_segments

__all__ = ["Crew", "sub_groups"]

_CONSEQUENCES = ("Connection", "gloo", "NCCL", "Broken pipe", "timed out", "Timed out")
"""Words of errors that another rank's end causes."""
_LAUNCHERS = (
    "TORCHELASTIC_",
    "GROUP_",
    "ROLE_",
    "PMI_",
    "OMPI_",
    "MASTER_",
    "SLURM_",
    "LOCAL_",
    "CROSS_",
)
_ROOT = str(Path(__file__).resolve().parents[2])


class Crew(NamedTuple):
    """Nodes with equally many ranks, and which one this process is on."""

    nodes: int
    per_node: int
    node: int = 0

    @classmethod
    def of_launcher(cls) -> Crew | None:
        """The ranks that a launcher has started; None without one, or if it has started one
        rank.
        """
        world = int(os.environ.get("WORLD_SIZE", 1))
        if "RANK" not in os.environ or world == 1:
            return None
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world)
        return cls(world // per_node, per_node, int(os.environ["RANK"]) // per_node)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node

    def measure(self, number: int, job: Mapping[str, Any]) -> dict[str, Any]:
        """Run a job; on node 0 what rank 0 found, or why it ``failed``.

        Args:
            number: of the job, the same on all nodes.
            job: with ``nodes``, the first of which take part, and ``a_node``, ranks on each of
                them.
        """
        if self.node >= job["nodes"]:
            return {}
        several = job["nodes"] > 1
        address = os.environ["MASTER_ADDR"] if several else "127.0.0.1"
        port = int(os.environ["MASTER_PORT"]) + 1 + number if several else free_port()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [_ROOT, os.environ.get("PYTHONPATH")])
        )
        environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | environment
        expandable_segments(environment)
        with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
            launcher = [
                "--nnodes",
                job["nodes"],
                "--node-rank",
                self.node,
                "--nproc-per-node",
                job["a_node"],
            ]
            launcher += [
                "--master-addr",
                address,
                "--master-port",
                port,
                "-m",
                "launch.scale.worker",
            ]
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *map(str, launcher),
                json.dumps(job),
                folder,
            ]
            alive, held = os.pipe()
            # Workers end when this process, and so the pipe, does.
            with open(alive, "rb") as stdin, open(held, "wb"):
                done = subprocess.run(
                    command,
                    env=environment,
                    stdin=stdin,
                    capture_output=True,
                    text=True,
                    check=False,
                )
            written = [file.read_text(encoding="utf-8") for file in Path(folder).glob("*.json")]
        # Torchrun may end a rank that begins to write.
        results = [json.loads(text) for text in written if text]
        # The reason is the error that is no consequence of another rank's end.
        failed = [one["failed"] for one in results if "failed" in one]
        failed.sort(key=lambda reason: any(word in reason for word in _CONSEQUENCES))
        if failed or done.returncode:
            status = re.search(r"(rank *: .*)\n *(exitcode *: -?\d+)", done.stderr)
            return {
                "failed": failed[0]
                if failed
                else " ".join(status.groups())
                if status
                else done.stderr[-300:]
            }
        return next((one for one in results if "device" in one), {})


def sub_groups(args: Any, crew: Crew) -> list[int]:
    """Numbers of ranks to measure; those of several nodes are all of these nodes'."""
    tp, world, per_node = args.tensor_parallel, crew.world, crew.per_node
    if world % tp:
        raise CoatConfigError(
            f"--tensor-parallel: got {tp}, accepted: a divisor of the number of ranks ({world})"
        )
    possible = [n for n in range(tp, world + 1, tp) if n <= per_node or n % per_node == 0]
    if args.ranks is None:
        return [n for n in possible if n == world or (n // tp).bit_count() == 1]
    if wrong := [n for n in args.ranks if n not in possible]:
        raise CoatConfigError(
            f"--ranks: got {wrong[0]}, accepted: up to {world}, the ranks that were started, "
            "multiples of "
            f"--tensor-parallel ({tp}), of several nodes all {per_node} ranks"
        )
    return sorted(set(args.ranks))
