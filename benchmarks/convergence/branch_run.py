"""One branch of `benchmarks/convergence/branches.py`, which starts it: a run of
`launch/pretrain.py`, watched.

    torchrun --nproc_per_node 1 benchmarks/convergence/branch_run.py --average 200 \\
        --result FILE -- ARGUMENTS

ARGUMENTS are those of `launch/pretrain.py`. FILE gets what :func:`after_training` returns, by
`torch.save`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.arguments import positive_int
from coat_dist.flow import invalidate_weights
from launch.pretrain import train
from launch.train import pretrain_options, runtime
from launch.train.loop import Loop
from launch.train.plan import plan

__all__ = ["Watch", "main"]

EVERY = 64
"""Of so many weights one is kept to say how far runs are apart."""


class Watch:
    """What is seen of a run from outside: the weights it begins with, and the mean of those
    after the last steps.
    """

    def __init__(self, average: int) -> None:
        self.average = average
        """Last steps whose weights are averaged."""
        self.averaged = 0
        """Steps whose weights are in the mean so far."""

    def __call__(self, loop: Loop) -> None:
        """Begin; the loop has loaded its checkpoint."""
        self.loop = loop
        self.began = self.sampled()
        digest = hashlib.sha256()
        for weight in self.weights:
            digest.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self.digest = digest.hexdigest()[:12]
        self.mean = [torch.zeros_like(w, dtype=torch.float32) for w in self.weights]
        log = loop.reporters.step

        def step(record: Mapping[str, Any]) -> None:
            log(record)
            if record["step"] > loop.options.train_steps - self.average:
                self.averaged += 1
                torch._foreach_lerp_(
                    self.mean, [w.float() for w in self.weights], 1 / self.averaged
                )

        loop.reporters.step = step  # type: ignore[method-assign]  # each step ends with it

    @property
    def weights(self) -> list[torch.Tensor]:
        """The model's parameters as they are, BF16."""
        return [p.detach() for p in self.loop.engine.module.parameters()]

    def sampled(self) -> torch.Tensor:
        """Some of the weights: fp32 [parameters / EVERY, rounded up for each tensor], on the
        CPU.
        """
        return torch.cat([w.flatten()[::EVERY].float() for w in self.weights]).cpu()

    def after_training(self) -> dict[str, Any]:
        """Held-out losses in nats of the last and of the averaged weights, each as trained and in
        BF16; where it began.

        The model holds the last weights in BF16 layers afterwards.
        """
        from megatron_patches import unpatch_model

        module, evaluate = self.loop.engine.module, self.loop.evaluate
        patched = self.loop.engine.coat_patch_report is not None
        last, movement = [w.clone() for w in self.weights], self.sampled() - self.began
        self._write(self.mean)
        found: dict[str, Any] = {"averaged_held_out_loss": evaluate("valid")}
        if patched:
            unpatch_model(module)
        found["averaged_bf16_held_out_loss"] = (
            evaluate("valid") if patched else found["averaged_held_out_loss"]
        )
        self._write(last)
        found["bf16_held_out_loss"] = evaluate("valid")
        return {
            **found,
            "averaged_steps": self.averaged,
            "trunk": self.digest,
            "movement": movement,
        }

    def _write(self, values: Sequence[torch.Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)
        invalidate_weights()


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--average", type=positive_int, required=True, metavar="STEPS")
    parser.add_argument("--result", type=Path, required=True, metavar="FILE")
    parser.add_argument("pretrain", nargs=argparse.REMAINDER)
    own = parser.parse_args(argv)
    args = pretrain_options.parse(
        [word for i, word in enumerate(own.pretrain) if i or word != "--"]
    )
    p = plan(args, int(os.environ.get("WORLD_SIZE", 1)))
    watch = Watch(own.average)
    print(train(p, runtime.start(args.local_rank), interfere=watch), flush=True)
    found = watch.after_training()
    torch.save(found, own.result)
    print({key: value for key, value in found.items() if key != "movement"}, flush=True)


if __name__ == "__main__":
    main()
    runtime.finish()
