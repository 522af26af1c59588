"""Trained tokens a second of fine-tuning, packed against padded: forward and backward of a model, BF16 and patched.

python -m benchmarks.speed.packing [--model llama3-8b] [--layers 4] [--seq-length 4096] [--micro 4] [--output DIR]

Conversations have log-normal lengths (median --median tokens, sigma 0.9, up to the sequence's), of which the last
three fifths are trained. Both ways draw from the same conversations: packed micro-batches hold several a sequence,
without attention across them; padded ones hold one a row, padded to the longest of the micro-batch. There is no
optimizer, whose time a step is the same for both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.arguments import int_from_0, positive_float, positive_int
from benchmarks.common import argument_parser, options, write_result
from coat_dist.config import ActivationConfig
from launch.chat.batches import Layout, micro_batches
from launch.chat.packing import Sequences
from launch.model.gpt import ModelConfig, build_model, load_model_config
from launch.training.build import language_model_loss
from megatron_patches import initialize_model_parallel, patched

TRAINED = 0.6


class Drawn:
    """Conversations of random tokens, with what :class:`launch.chat.store.Conversations` has."""

    def __init__(self, count: int, median: float, longest: int, vocabulary: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = np.clip(rng.lognormal(np.log(median), 0.9, count).astype(np.int64), 4, longest)
        self.trained = (self.lengths * TRAINED).astype(np.int64)
        self._vocabulary = vocabulary

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        length = int(self.lengths[number])
        learnt = np.arange(length) >= length - int(self.trained[number])
        return np.random.default_rng(number).integers(0, self._vocabulary, length), learnt


class Alone:
    """What the loss asks of an engine, without one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, *arguments: Any, **more: Any) -> torch.Tensor:
        return self.module(*arguments, **more)


def batches(conversations: Drawn, packed: bool, arguments: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches as ``finetune.py`` makes them for one rank."""
    sequences = Sequences(
        conversations.lengths,
        conversations.trained,
        np.arange(len(conversations.lengths)),
        capacity=arguments.seq_length,
        packed=packed,
        seed=0,
    )
    layout = Layout(
        micro=arguments.micro,
        accumulation=1,
        dp_rank=0,
        dp_size=1,
        seq_length=arguments.seq_length,
        packed=packed,
        pad=0,
    )
    return micro_batches(conversations, sequences, layout)  # type: ignore[arg-type]


def measure(model: torch.nn.Module, source: Iterator[dict[str, torch.Tensor]], repeat: int) -> dict[str, Any]:
    """Forward and backward of ``repeat`` micro-batches, after three to warm up."""
    device = next(model.parameters()).device
    loss_of, engine = language_model_loss(1, device), Alone(model)
    made = [next(source) for _ in range(repeat + 3)]
    began = trained = given = used = 0.0
    for index, batch in enumerate(made):
        if index == 3:
            wait(device)
            began = time.perf_counter()
        loss_of(engine, batch).backward()
        for parameter in model.parameters():
            parameter.grad = None
        if index >= 3:
            trained += float(batch["loss_mask"].sum())
            given += batch["tokens"].numel()
            used += int((batch["tokens"] != 0).sum())
    wait(device)
    seconds = time.perf_counter() - began
    return {
        "trained_tokens_per_second": trained / seconds,
        "tokens_per_second": given / seconds,
        "filled": used / given,
        "ms": 1e3 * seconds / repeat,
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(config: ModelConfig, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """BF16 and patched, padded and packed."""
    model = build_model(config)
    conversations = Drawn(arguments.conversations, arguments.median, arguments.seq_length, config.vocab_size or 2)
    rows: list[dict[str, Any]] = []

    def both(block: str) -> None:
        for packed in (False, True):
            found = measure(model, batches(conversations, packed, arguments), arguments.repeat)
            rows.append({"layers": block, "way": "packed" if packed else "padded", **found})
            row = rows[-1]
            print(
                f"{block:<5} {row['way']:<7} {row['trained_tokens_per_second']:12,.0f} trained tokens/s  "
                f"{row['tokens_per_second']:12,.0f} tokens/s  {row['filled']:6.1%} filled  {row['ms']:9.1f} ms",
                flush=True,
            )
        gain = rows[-1]["trained_tokens_per_second"] / rows[-2]["trained_tokens_per_second"]
        rows[-1]["gain"] = gain
        print(f"{block:<5} packed is {gain:.2f} x padded", flush=True)

    both("bf16")
    with patched(model, ActivationConfig()):
        both("coat")
    return rows


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="llama3-8b", help="a name in configs/models, or a path")
    parser.add_argument("--layers", type=int_from_0, default=4, help="of the model; 0 = all")
    parser.add_argument("--seq-length", type=positive_int, default=4096)
    parser.add_argument("--micro", type=positive_int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--median", type=positive_float, default=350.0, help="tokens of a conversation")
    parser.add_argument("--conversations", type=positive_int, default=4000)
    parser.add_argument("--repeat", type=positive_int, default=20, help="micro-batches that are timed")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize_model_parallel(1)
    torch.manual_seed(0)
    overrides = [
        f"seq_length={arguments.seq_length}",
        *([f"num_layers={arguments.layers}"] if arguments.layers else []),
    ]
    config = load_model_config(arguments.model, overrides)
    config = config if config.vocab_size else config.with_vocab(32000)
    found = {"settings": options(arguments), "results": compare(config, arguments)}
    print("wrote", write_result("speed/packing", found, arguments.output))


if __name__ == "__main__":
    main()
