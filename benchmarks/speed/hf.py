"""transformers models end to end, the block beside what their users can put together: tokens/s,
peaks, micro-batches.

    python -m benchmarks.speed.hf  # a Llama of 1.3 B, ZeRO-2, one GPU
    python -m benchmarks.speed.hf --model llama3-8b --ranks 2 --stage 3 \\
        --micro-batches 1 2 3 4 6 8 --sequence 4096

Each variant has processes of its own, one a GPU, which train a model with random weights on random
tokens, one micro-batch and ``--sequence`` after the other until memory ends. Parts of a variant are
joined by "+": ``adamw`` (torch's) or ``coat`` (CoatAdamW), then ``flow`` (the block's
"activation"), ``attention`` (its FP8 attention), ``remainder`` (16-bit remainders), ``host`` (the
optimizer's states in host memory; ``adamw`` is DeepSpeed's CPUAdam then), ``liger``
(Liger-Kernel), ``ao`` (torchao's float8, in compiled layers), ``compile``, ``checkpoint``
(recomputed layers), of ``flow`` also with 8-bit ``boundaries``, on the ``boundaries-cpu``, or of
the first 8 layers alone (``recompute=8``), with MLPs in 4 pieces (``tiles=4``). Ratios are to the
best variant without ``flow`` at the same micro-batch and length. With ``--sp-size 2`` two ranks
share each sequence (DeepSpeed's Ulysses). Writes ``speed/hf.json``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.arguments import argument_parser, int_from_0, positive_float
from benchmarks.common import options, show, write_result
from benchmarks.ranks import as_rank, run_variant
from benchmarks.timing import median


def shape(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    """The sizes of a model, as transformers' configurations call them."""
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **more,
    }


MODELS = {
    "llama-1b": ("llama", shape(2048, 8192, 16, 16, 16, 50304, tie_word_embeddings=True)),
    "llama2-7b": ("llama", shape(4096, 11008, 32, 32, 32, 32000)),
    "llama2-13b": ("llama", shape(5120, 13824, 40, 40, 40, 32000)),
    "llama3-8b": ("llama", shape(4096, 14336, 32, 32, 8, 128256)),
    "qwen3-4b": (
        "qwen3",
        shape(2560, 9728, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
    ),
    "qwen3-8b": ("qwen3", shape(4096, 12288, 36, 32, 8, 151936, head_dim=128)),
    "llama3-70b": ("llama", shape(8192, 28672, 80, 64, 8, 128256)),
    "qwen3-32b": ("qwen3", shape(5120, 25600, 64, 64, 8, 151936, head_dim=128)),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        shape(
            2048,
            6144,
            48,
            32,
            4,
            151936,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
    ),
    "tiny": ("llama", shape(256, 512, 2, 2, 2, 256)),
    "tiny-moe": (
        "qwen3_moe",
        shape(256, 512, 2, 2, 2, 256, moe_intermediate_size=128, num_experts=8),
    ),
}
"""Type and shape."""
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
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
    "boundaries",
    "boundaries-cpu",
    "recompute",
    "tiles",
}


def activation(parts: set[str]) -> dict[str, Any]:
    """The "activation" of a variant's block."""
    found: dict[str, Any] = {"enabled": "flow" in parts}
    if "attention" in parts:
        found["attention"] = "fp8"
    if parts & {"boundaries", "boundaries-cpu"}:
        found["boundaries"] = "fp8"
    if "boundaries-cpu" in parts:
        found["boundaries_device"] = "cpu"
    for part in parts:
        key, _, number = part.partition("=")
        if number:
            found[key] = int(number)
    return found


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
    found |= {
        "optimizer": {"type": "CoatAdamW", "params": params},
        "coat": {"optimizer": {}, "activation": activation(parts)},
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

    kind, sizes = MODELS[case["model"]]
    config = transformers.AutoConfig.for_model(
        kind,
        **sizes | case.get("shape", {}),
        max_position_embeddings=case["sequence"],
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    return partial(getattr(transformers, CLASSES[kind]), config)


def build(parts: set[str], case: dict[str, Any], device: torch.device) -> Any:
    """The engine of a variant."""
    import deepspeed

    if "liger" in parts:
        import liger_kernel.transformers as liger

        getattr(liger, f"apply_liger_kernel_to_{MODELS[case['model']][0]}")()
    ds = settings(parts, case["stage"], case["accumulation"])
    make = untrained(case)
    context: Any = device  # a processor takes a minute to draw 8 B weights
    if case["stage"] == 3:
        context = deepspeed.zero.Init(config_dict_or_path=ds, dtype=torch.bfloat16)
    with context:
        model = make()
    if case["stage"] < 3:
        model = model.to(torch.bfloat16)
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
    mpu = None
    if case.get("sp_size", 1) > 1:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model, "sdpa", case["sp_size"], micro_batch_size=case["sizes"][0][0]
        )
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds, mpu=mpu
    )[0]


def inputs(tokens: torch.Tensor, sp_size: int) -> dict[str, torch.Tensor]:
    """What a model is given of tokens ``[rows, length]``: this rank's part of each row where
    ``sp_size`` ranks share it.
    """
    if sp_size == 1:
        return {"input_ids": tokens, "labels": tokens}
    given = {
        "input_ids": tokens,
        "labels": F.pad(tokens[:, 1:], (0, 1), value=-100),
        "position_ids": torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens),
    }
    part = torch.distributed.get_rank() % sp_size
    given = {name: t.chunk(sp_size, 1)[part].contiguous() for name, t in given.items()}
    return given | {"shift_labels": given["labels"]}


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
    gpu = device.type == "cuda"
    times, losses = [], []
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
    mean = torch.stack(losses)
    peak = torch.tensor(torch.cuda.max_memory_allocated() if gpu else 0, device=device)
    torch.distributed.all_reduce(mean)
    torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    seconds = median(times[warm_up:] or times)
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_second_per_gpu": tokens / seconds,
        "peak_gib": int(peak) / 2**30,
        "losses": (mean / torch.distributed.get_world_size()).tolist(),
    }


def random_tokens(
    generator: torch.Generator,
    case: dict[str, Any],
    size: tuple[int, int],
    vocabulary: int,
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """Batches of tokens ``[rows, length]`` for all steps of a case, drawn on the CPU."""
    for _ in range(case["warm_up"] + case["steps"]):
        yield torch.randint(vocabulary, size, generator=generator).to(device)


def measured(
    step: Callable[[Any], torch.Tensor],
    generator: torch.Generator,
    case: dict[str, Any],
    size: tuple[int, int],
    vocabulary: int,
    device: torch.device,
) -> dict[str, Any]:
    """:func:`timed_steps` on random tokens, with the first and the last loss."""
    drawn = random_tokens(generator, case, size, vocabulary, device)
    tokens = case.get("accumulation", 1) * math.prod(size) / case.get("sp_size", 1)
    found = timed_steps(step, drawn, tokens, case["warm_up"], device)
    losses = found.pop("losses")
    return found | {"first_loss": losses[0], "last_loss": losses[-1]}


def noisy_text(seed: int, rows: int, length: int, vocabulary: int) -> torch.Tensor:
    """Tokens that a model can learn, down to a loss of log(16): each is the one before plus one
    of 16 numbers.
    """
    generator, kinds = torch.Generator().manual_seed(seed), min(vocabulary, 1024)
    start = torch.randint(kinds, (rows, 1), generator=generator)
    return (start + torch.randint(3, 19, (rows, length), generator=generator).cumsum(1)) % kinds


def measure(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """A record for each micro-batch and length of a variant."""
    import deepspeed

    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    engine = build(set(case["variant"].split("+")), case, device)
    generator = torch.Generator()
    generator.manual_seed(1 + torch.distributed.get_rank() // case["sp_size"])
    vocabulary = MODELS[case["model"]][1]["vocab_size"]

    def step(tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(case["accumulation"]):
            loss = engine(**inputs(tokens, case["sp_size"])).loss
            engine.backward(loss)
            engine.step()
        return loss

    for size in case["sizes"]:
        found = measured(step, generator, case, size, vocabulary, device)
        yield {"micro_batch": size[0], "sequence": size[1], **found}


def _size(step: dict[str, Any]) -> tuple[int, int]:
    return step["micro_batch"], step["sequence"]


def compare(variants: Sequence[dict[str, Any]]) -> None:
    """Add each step's ratio to the best peer at the same size, and print all."""
    peers: dict[Any, float] = {}
    for one in variants:
        if "flow" in one["variant"]:
            continue
        for step in one["steps"]:
            size, speed = _size(step), step["tokens_per_second_per_gpu"]
            peers[size] = max(peers.get(size, 0.0), speed)
    for one in variants:
        for step in one["steps"]:
            best = peers.get(_size(step))
            step["to_best_peer"] = step["tokens_per_second_per_gpu"] / best if best else None
            show(
                one["variant"],
                step,
                micro_batch="d",
                sequence="d",
                step_ms=".1f",
                tokens_per_second_per_gpu=",.0f",
                to_best_peer=".3f",
                peak_gib=".1f",
                first_loss=".4f",
                last_loss=".4f",
            )
        ends = {k: v for k, v in one.items() if k not in ("variant", "steps")}
        print(f"{one['variant']:<28} {ends or 'all micro-batches'}", flush=True)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__,
        ranks=1,
        sp_size=1,
        sequence=[2048],
        micro_batches=[8],
        accumulation=1,
        steps=11,
        limit=300.0,
        name="hf",
    )
    parser.add_argument("--warm-up", type=int_from_0, default=5, help="steps that are not timed")
    parser.add_argument("--model", choices=list(MODELS), default="llama-1b")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, metavar="PARTS")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=2)
    parser.add_argument(
        "--gpu-memory", type=positive_float, default=None, metavar="GIB", help="as on a smaller GPU"
    )
    arguments = parser.parse_args(given)
    for variant in arguments.variants:
        if unknown := {part.split("=")[0] for part in variant.split("+")} - PARTS:
            parser.error(
                f"--variants: got {unknown.pop()!r}, accepted: {', '.join(sorted(PARTS))}, joined "
                "by +"
            )
    return arguments


def main() -> None:
    arguments = parse()
    case = options(arguments, "variants", "limit", "sequence", "micro_batches")
    case["sequence"] = max(arguments.sequence)
    case["sizes"] = list(itertools.product(arguments.micro_batches, arguments.sequence))
    found = []
    for variant in arguments.variants:
        print(f"== {variant}", flush=True)
        found.append(
            run_variant(case | {"variant": variant}, arguments.limit, "benchmarks.speed.hf")
        )
        compare(found)
        write_result(
            f"speed/{arguments.name}",
            {"settings": options(arguments), "variants": found},
            arguments.output,
        )


if __name__ == "__main__":
    as_rank(measure)
    main()
