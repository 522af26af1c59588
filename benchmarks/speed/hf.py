"""transformers models end to end, the block beside what their users can put together: tokens/s,
peaks, micro-batches.

    python -m benchmarks.speed.hf  # a Llama of 1.3 B, ZeRO-2, one GPU
    python -m benchmarks.speed.hf --model llama3-8b --ranks 2 --stage 3 \\
        --micro-batches 1 2 3 4 6 8 --sequence 4096

Each variant has processes of its own, one a GPU, which train a model with random weights on random
tokens, one micro-batch after the other until memory ends. Parts of a variant are joined by "+":
``adamw`` (torch's) or ``coat`` (CoatAdamW), then ``flow`` (the block's "activation"), ``attention``
(its FP8 attention), ``remainder`` (16-bit remainders), ``host`` (the optimizer's states in host
memory; ``adamw`` is DeepSpeed's CPUAdam then), ``liger`` (Liger-Kernel), ``ao`` (torchao's float8,
in compiled layers), ``compile``, ``checkpoint`` (recomputed layers). Ratios are to the best variant
without ``flow`` at the same micro-batch. Writes ``speed/hf.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import positive_float, positive_int
from benchmarks.common import (
    ROOT,
    argument_parser,
    options,
    python_path,
    wait_for_ranks,
    write_result,
)
from benchmarks.timing import median
from coat_dist.nodes import free_port

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-1b": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 50304,
            "tie_word_embeddings": True,
        },
    ),
    "llama2-7b": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32000,
        },
    ),
    "llama2-13b": (
        "llama",
        {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "vocab_size": 32000,
        },
    ),
    "llama3-8b": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "qwen3-8b": (
        "qwen3",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
    "tiny": (
        "llama",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 256,
        },
    ),
}
"""Type and shape."""
VARIANTS = [
    "adamw",
    "adamw+liger",
    "coat+liger",
    "coat+ao+liger",
    "coat+flow",
    "coat+flow+attention",
]
PARTS = {
    "adamw",
    "coat",
    "flow",
    "attention",
    "remainder",
    "host",
    "liger",
    "ao",
    "compile",
    "checkpoint",
}
OUT_OF_MEMORY = 7
"""Exit status."""


def settings(parts: set[str], stage: int, accumulation: int = 1) -> dict[str, Any]:
    """The DeepSpeed configuration of a variant."""
    params = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    host = {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if "host" in parts else {}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # of the engine; what it is given may have more
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage} | host,
        "gradient_clipping": 1.0,
    }
    if "coat" not in parts:
        return found | {"optimizer": {"type": "AdamW", "params": params | {"torch_adam": not host}}}
    attention = {"attention": "fp8"} if "attention" in parts else {}
    found |= {
        "optimizer": {"type": "CoatAdamW", "params": params},
        "coat": {"optimizer": {}, "activation": {"enabled": "flow" in parts} | attention},
    }
    if "remainder" in parts:
        found["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        found["coat"]["optimizer"]["master_weights"] = "bf16_remainder"
    elif stage < 3:
        found["data_types"] = {"grad_accum_dtype": "fp32"}
    return found


def untrained(case: dict[str, Any]) -> Callable[[], Any]:
    """What builds a model with the same random weights on every rank. Its code is imported here:
    within DeepSpeed's ``zero.Init`` that fails.
    """
    import transformers

    kind, shape = MODELS[case["model"]]
    shape = shape | case.get("shape", {})
    config = transformers.AutoConfig.for_model(
        kind,
        **shape,
        max_position_embeddings=case["sequence"],
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    cls = getattr(transformers, {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind])
    return partial(cls, config)


def build(parts: set[str], case: dict[str, Any], device: torch.device) -> Any:
    """The engine of a variant."""
    import deepspeed

    if "liger" in parts:
        import liger_kernel.transformers as liger

        getattr(liger, f"apply_liger_kernel_to_{MODELS[case['model']][0]}")()
    ds = settings(parts, case["stage"], case["accumulation"])
    make, zero_init = untrained(case), case["stage"] == 3
    with (
        deepspeed.zero.Init(config_dict_or_path=ds, dtype=torch.bfloat16)
        if zero_init
        else nullcontext()
    ):
        model = make()
    if not zero_init:
        model = model.to(torch.bfloat16).to(device)
    model.train()
    if "checkpoint" in parts:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "ao" in parts:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(
            model, module_filter_fn=lambda module, name: "lm_head" not in name
        )
    if parts & {"ao", "compile"}:
        for layer in model.model.layers:
            layer.compile()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds)[0]


def timed_steps(
    step: Callable[[Any], torch.Tensor],
    batches: Iterable[Any],
    tokens: float,
    warm_up: int,
    device: torch.device,
) -> dict[str, Any]:
    """Median time of ``step``, which takes a batch and returns its loss, tokens/s/GPU with
    ``tokens`` a step and GPU, the largest peak, and the ranks' mean losses. What draws a batch is
    not timed.
    """
    gpu, times, losses = device.type == "cuda", [], []
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        if gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        losses.append(step(batch).detach().float())
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    mean, peak = (
        torch.stack(losses),
        torch.tensor(torch.cuda.max_memory_allocated() if gpu else 0, device=device),
    )
    torch.distributed.all_reduce(mean)
    torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    seconds = median(times[warm_up:] or times)
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_second_per_gpu": tokens / seconds,
        "peak_gib": int(peak) / 2**30,
        "losses": (mean / torch.distributed.get_world_size()).tolist(),
    }


def noisy_text(seed: int, rows: int, length: int, vocabulary: int) -> torch.Tensor:
    """Tokens that a model can learn, down to a loss of log(16): each is the one before plus one
    of 16 numbers.
    """
    generator, kinds = torch.Generator().manual_seed(seed), min(vocabulary, 1024)
    start = torch.randint(kinds, (rows, 1), generator=generator)
    return (start + torch.randint(3, 19, (rows, length), generator=generator).cumsum(1)) % kinds


def measure(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """A record for each micro-batch of a variant."""
    import deepspeed

    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    engine = build(set(case["variant"].split("+")), case, device)
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    vocabulary = MODELS[case["model"]][1]["vocab_size"]

    def step(tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(case["accumulation"]):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        return loss

    for micro_batch in case["micro_batches"]:
        shape = micro_batch, case["sequence"]
        count = case["warm_up"] + case["steps"]
        drawn = (
            torch.randint(0, vocabulary, shape, generator=generator).to(device)
            for _ in range(count)
        )
        tokens = case["accumulation"] * micro_batch * case["sequence"]
        found = timed_steps(step, drawn, tokens, case["warm_up"], device)
        losses = found.pop("losses")
        yield {
            "micro_batch": micro_batch,
            **found,
            "first_loss": losses[0],
            "last_loss": losses[-1],
        }


def as_rank(measure: Callable[[dict[str, Any], torch.device], Iterable[dict[str, Any]]]) -> None:
    """Measure and end this process, if :func:`run` started it: the first rank writes a line of
    JSON for a record.
    """
    if sys.argv[1:2] != ["--rank"]:
        return
    case, status = json.loads(sys.argv[2]), 0
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        if memory := case.get("gpu_memory"):
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, memory * 2**30 / torch.cuda.mem_get_info(device)[1])
            )
    try:
        for record in measure(case, device):
            if os.environ["RANK"] == "0":
                with open(sys.argv[3], "a") as file:
                    file.write(json.dumps(record) + "\n")
    except torch.OutOfMemoryError:
        status = OUT_OF_MEMORY
    sys.stdout.flush()
    if gpu and not status:
        torch.cuda.synchronize()  # another rank may wait for what this one still sends
    for child in multiprocessing.active_children():  # of Megatron's checkpoints
        child.kill()
    os._exit(status)  # Python's own way out may wait for collectives of a rank that has no memory


def run(
    case: dict[str, Any],
    limit: float,
    program: str = "benchmarks.speed.hf",
    path: Sequence[Path] = (),
    **more: str,
) -> dict[str, Any]:
    """Records of a variant's ranks, and how they ended; ``path`` and ``more`` are of their
    environment.
    """
    shared = {
        **os.environ,
        "WORLD_SIZE": str(case["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": python_path(ROOT, *path),
        **more,
    }
    with tempfile.TemporaryDirectory() as folder:
        out, processes = Path(folder) / "steps", []
        for i in range(case["ranks"]):
            line = [sys.executable, "-m", program, "--rank", json.dumps(case), str(out)]
            with (Path(folder) / f"{i}.log").open("w") as log:
                own = {"RANK": str(i), "LOCAL_RANK": str(i)}
                processes.append(
                    subprocess.Popen(line, cwd=ROOT, env=shared | own, stdout=log, stderr=log)
                )
        statuses = wait_for_ranks(processes, limit)
        found: dict[str, Any] = {"variant": case["variant"]}
        found["steps"] = (
            [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []
        )
        if OUT_OF_MEMORY in statuses:
            found["out_of_memory_at"] = case["micro_batches"][len(found["steps"])]
        elif any(statuses):
            first = next(i for i, status in enumerate(statuses) if status)
            found["error"] = (Path(folder) / f"{first}.log").read_text(errors="replace")[-900:]
        elif None in statuses:
            found["cut_after_s"] = limit
        return found


def compare(variants: Sequence[dict[str, Any]]) -> None:
    """Add each step's ratio to the best peer at the same micro-batch, and print all."""
    peers: dict[int, float] = {}
    for one in variants:
        for step in one["steps"] if "flow" not in one["variant"] else ():
            peers[step["micro_batch"]] = max(
                peers.get(step["micro_batch"], 0.0), step["tokens_per_second_per_gpu"]
            )
    for one in variants:
        for step in one["steps"]:
            best = peers.get(step["micro_batch"])
            step["to_best_peer"] = step["tokens_per_second_per_gpu"] / best if best else None
            print(
                f"{one['variant']:<28} micro-batch {step['micro_batch']:>2}  "
                f"{step['step_ms']:8.1f} ms  "
                f"{step['tokens_per_second_per_gpu']:8,.0f} tokens/s/GPU  "
                f"{'' if best is None else format(step['to_best_peer'], '.3f')}  peak "
                f"{step['peak_gib']:5.1f} GiB  "
                f"loss {step['first_loss']:.4f} -> {step['last_loss']:.4f}",
                flush=True,
            )
        ends = {k: v for k, v in one.items() if k not in ("variant", "steps")}
        print(f"{one['variant']:<28} {ends or 'all micro-batches'}", flush=True)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="llama-1b")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, metavar="PARTS")
    parser.add_argument("--ranks", type=positive_int, default=1)
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=2)
    parser.add_argument("--sequence", type=positive_int, default=2048)
    parser.add_argument("--micro-batches", type=positive_int, nargs="+", default=[8])
    parser.add_argument("--accumulation", type=positive_int, default=1)
    parser.add_argument("--warm-up", type=positive_int, default=5)
    parser.add_argument("--steps", type=positive_int, default=11)
    parser.add_argument(
        "--gpu-memory", type=positive_float, default=None, metavar="GIB", help="as on a smaller GPU"
    )
    parser.add_argument(
        "--limit", type=positive_float, default=300.0, metavar="SECONDS", help="of a variant"
    )
    parser.add_argument("--name", default="hf", help="of the JSON result")
    arguments = parser.parse_args(given)
    for variant in arguments.variants:
        if unknown := set(variant.split("+")) - PARTS:
            parser.error(
                f"--variants: got {unknown.pop()!r}, accepted: {', '.join(sorted(PARTS))}, joined "
                "by +"
            )
    return arguments


def main() -> None:
    arguments = parse()
    case = options(arguments, "variants", "limit")
    found = []
    for variant in arguments.variants:
        print(f"== {variant}", flush=True)
        found.append(run(case | {"variant": variant}, arguments.limit))
        compare(found)
        write_result(
            f"speed/{arguments.name}",
            {"settings": options(arguments), "variants": found},
            arguments.output,
        )


if __name__ == "__main__":
    as_rank(measure)
    main()
