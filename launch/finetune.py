"""Fine-tune a model on conversations with DeepSpeed and Megatron-core; with a "coat" block, in FP8.

    deepspeed launch/finetune.py --deepspeed_config configs/deepspeed/zero2.json \\
        --model HF_DIR --data chats.jsonl --valid-share 0.05 --epochs 3 --lr 1e-5 --output runs/chat

It trains on what the assistant says, and ends with the model in Hugging Face's layout, in
--export-to. Exit status: that of pretrain.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would
# find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.train.allocator import expandable_segments

if __name__ == "__main__":
    expandable_segments()  # read when torch's allocator begins

import os
from collections.abc import Callable, Sequence

from launch import pretrain  # first: it sets what torch reads when it is imported

import torch  # isort: skip

from coat_dist.ranks import on_rank_0
from launch.chat import arguments, export, plan
from launch.train import runtime
from launch.train.loop import Loop

__all__ = ["main", "train"]


def train(
    draft: plan.Draft,
    device: torch.device,
    stop: runtime.StopSignal | None = None,
    interfere: Callable[[Loop], None] | None = None,
) -> str:
    """Read the conversations, train as ``pretrain.py`` does, export. torch.distributed is
    initialized before.

    Returns:
        How it ended, a sentence.

    Raises:
        pretrain.USER_ERRORS, BadSteps: see :func:`pretrain.main`.
    """
    a = draft.args
    on_rank_0(lambda: export.check_target(a, draft.weights.path))
    p = plan.finish(draft, pretrain.say)
    ending = pretrain.start(p, device, plan.ChatData, stop, interfere)
    if a.export_to is None or not ending.finished or ending.checkpoint is None:
        return ending.text
    last, target, said = ending.checkpoint, a.export_to, p.train.conversations
    on_rank_0(lambda: export.export(last, target, p.tokenizer, draft.weights, said), patient=True)
    return f"{ending.text}; exported to {a.export_to}"


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    return pretrain.run(lambda: arguments.parse(argv), plan.draft, train)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if status:
        # No waiting for ranks that will not come: the launcher ends them when this one is gone.
        os._exit(status)
