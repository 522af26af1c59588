"""The program whose runs are disturbed. It trains with DeepSpeed's API and knows nothing about what is saved, or how.

A run is a list of actions, such as ``["load", FOLDER], ["train", 2], ["save", FOLDER]``. After each of them one line of
JSON is appended to the rank's report, so that of a rank that was killed is known how far it came.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import disk

__all__ = ["COAT", "DEEPSPEED", "Run", "rank_main"]

COAT, DEEPSPEED = "coat_dist", "plain DeepSpeed"

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    "zero_optimization": {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    COAT: {
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "coat": {"optimizer": {"group_size": 128}, "activation": {"enabled": False}},
    },
    DEEPSPEED: {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "torch_adam": True}},
    },
}


class Run:
    """One program on some ranks, as plain values: what a case asks for."""

    def __init__(
        self,
        program: str,
        stage: int,
        actions: Sequence[Sequence[Any]],
        world: int = 2,
        width: int = 64,
        groups: int = 1,
        changes: dict[str, Any] | None = None,
        of_rank: dict[int, dict[str, Any]] | None = None,
        timeout: float = 60.0,
    ) -> None:
        """``changes`` of the configuration, and ``of_rank``: other arguments of this call on some ranks."""
        self.program, self.stage, self.actions, self.world = program, stage, actions, world
        self.width, self.groups, self.changes, self.timeout = width, groups, changes or {}, timeout
        self.of_rank = of_rank or {}

    def on(self, rank: int) -> Run:
        """What this rank believes to run."""
        values = {k: v for k, v in vars(self).items() if k != "of_rank"}
        return Run(**{**values, **self.of_rank.get(rank, {})})

    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        own = merged(merged(CONFIG, OPTIMIZERS[self.program]), {"zero_optimization": {"stage": self.stage}})
        return merged(own, self.changes)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``, key by key; None takes a key away."""
    out = dict(base)
    for key, value in changes.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merged(out.get(key, {}), value) if isinstance(value, dict) else value
    return out


def rank_main(run: Run, rank: int, port: int, folder: Path) -> None:
    """Run the actions; the report is ``RANK.jsonl`` in ``folder``. Ends the process."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.world), LOCAL_SIZE=str(run.world))
    os.environ.update(LOCAL_WORLD_SIZE=str(run.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    screen = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    with (folder / f"{rank}.jsonl").open("a", encoding="utf-8") as report:

        def tell(**values: Any) -> None:
            report.write(json.dumps({"time": time.monotonic(), **values}) + "\n")
            report.flush()

        try:
            _Program(run.on(rank), rank, folder, tell).go()
        except Exception as problem:
            tell(error=f"{type(problem).__name__}: {problem}")
            print(f"{type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
            os._exit(1)
    os._exit(0)


class _Program:
    def __init__(self, run: Run, rank: int, folder: Path, tell: Any) -> None:
        self.run, self.rank, self.folder, self.tell = run, rank, folder, tell

    def go(self) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a compiler 40 s; gloo does
        deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=self.run.timeout), verbose=False)
        self.tell(did="init")
        initialize = deepspeed.initialize
        if self.run.program == COAT:
            import coat_dist

            if not hasattr(initialize, "__wrapped__"):  # a coat_dist that leaves deepspeed.initialize as it is
                initialize = coat_dist.initialize
        torch.manual_seed(0)
        config = self.run.config()
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=self.run.stage == 3):
            model = _model(self.run.width)
        arguments: dict[str, Any] = {"model": model, "config": config}
        if self.run.groups > 1 or self.run.program != COAT:
            arguments["model_parameters"] = _groups(model, self.run.groups)
        self.engine = initialize(**arguments)[0]
        self.tell(did="initialize")
        for name, *values in self.run.actions:
            try:
                result = getattr(self, name)(*values)
            except Exception as problem:
                if name not in ("load", "save", "load_apart", "save_apart"):
                    raise
                # What a program may do with an error: say it, and go on. The state that it goes on with is compared.
                result = {"error": f"{type(problem).__name__}: {problem}"}
            self.tell(did=name, result=result)

    def train(self, steps: int) -> None:
        """What a rank sees in a step depends on the number of the step, as a sampler's data would."""
        for _ in range(steps):
            torch.manual_seed(1000 * self.engine.global_steps + self.rank)
            x = torch.randn(2, self.engine.module[0].in_features, dtype=torch.bfloat16)
            loss = (self.engine(x) - x.roll(1, -1)).float().square().mean()
            self.engine.backward(loss)
            self.engine.step()

    def save(self, folder: str, tag: str | None = None) -> None:
        self.engine.save_checkpoint(folder, tag=tag)

    def load(self, folder: str, tag: str | None = None) -> dict[str, Any]:
        path, _ = self.engine.load_checkpoint(folder, tag=tag)
        return {"path": None if path is None else str(path)}

    def digest(self) -> str:
        """Of every byte of parameters, master weights, optimizer states and counters of this rank."""
        return digest(self.engine)

    def save_apart(self, folder: str) -> None:
        """Save under another tag on each rank."""
        self.save(folder, f"of-rank-{self.rank}")

    def load_apart(self, *folders: str) -> dict[str, Any]:
        """Load another folder on each rank."""
        return self.load(folders[self.rank])

    def arm(self, folder: str, what: dict[str, list[Any]]) -> None:
        """From now on ``what`` of this rank, a kind of :class:`disk.Fault` and the number of an event, is lurking."""
        kind, at = what.get(str(self.rank), (disk.LOG, 0))
        disk.arm(folder, kind, at, self.folder / f"{self.rank}.events")

    def disarm(self) -> None:
        disk.disarm()

    def end(self, rank: int, how: str) -> None:
        """Have one rank end, or stop, in the middle of a step of all."""
        if rank == self.rank:
            self.tell(did=how)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def _model(width: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(width, 2 * width),
        torch.nn.GELU(),
        torch.nn.LayerNorm(2 * width),
        torch.nn.Linear(2 * width, width),
    ).bfloat16()


def _groups(model: torch.nn.Module, groups: int) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    decay = {"weight_decay": 0.1}
    if groups == 1:
        return [{"params": parameters, **decay}]
    return [{"params": parameters[:2], **decay}, {"params": parameters[2:], **decay}]


def digest(engine: Any) -> str:
    """SHA-256 of everything on this rank that training goes on with."""
    zero = engine.optimizer
    masters = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            add((str(value.dtype), tuple(value.shape)))
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                add(one)
        else:
            found.update(repr(value).encode())

    for parameter in engine.module.parameters():
        add(getattr(parameter, "ds_tensor", parameter))
    for master in masters:
        add(master)
        add(dict(zero.optimizer.state.get(master, {})))
    for group in zero.optimizer.param_groups:
        # torch adds `differentiable` to groups that it loads.
        add({key: value for key, value in group.items() if key not in ("params", "differentiable")})
    add((engine.global_steps, engine.global_samples, engine.lr_scheduler.state_dict()))
    return found.hexdigest()[:16]
