"""One branch of `benchmarks/convergence/branches.py`, which starts it: a run of
`launch/pretrain.py`, watched.

    torchrun --nproc_per_node 1 benchmarks/convergence/branch_run.py --result FILE -- ARGUMENTS

ARGUMENTS are those of `launch/pretrain.py`. FILE gets what :meth:`Watch.after_training` returns, as
JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import torch

from launch.pretrain import train
from launch.train import pretrain_options, runtime
from launch.train.loop import Loop
from launch.train.plan import plan
from megatron_patches import unpatch_model

__all__ = ["Watch", "main"]


class Watch:
    """What is seen of a run from outside: a digest of the weights that it begins with, and the
    held-out loss of its last weights in BF16 layers.
    """

    def __call__(self, loop: Loop) -> None:
        """Begin; the loop has loaded its checkpoint."""
        self.loop = loop
        digest = hashlib.sha256()
        for weight in loop.engine.module.parameters():
            content = weight.detach().cpu().contiguous().view(torch.uint8)
            digest.update(content.numpy().tobytes())
        self.digest = digest.hexdigest()[:12]

    def after_training(self) -> dict[str, Any]:
        """The held-out loss in nats; the model's layers are BF16 afterwards."""
        if self.loop.engine.coat_patch_report is not None:
            unpatch_model(self.loop.engine.module)
        return {"bf16_held_out_loss": self.loop.evaluate("valid"), "trunk": self.digest}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, required=True, metavar="FILE")
    parser.add_argument("pretrain", nargs=argparse.REMAINDER)
    own = parser.parse_args(argv)
    args = pretrain_options.parse(
        [word for i, word in enumerate(own.pretrain) if i or word != "--"]
    )
    p = plan(args, int(os.environ.get("WORLD_SIZE", 1)))
    watch = Watch()
    print(train(p, runtime.start(args.local_rank), interfere=watch), flush=True)
    found = json.dumps(watch.after_training())
    own.result.write_text(found)
    print(found, flush=True)


if __name__ == "__main__":
    main()
    runtime.finish()
