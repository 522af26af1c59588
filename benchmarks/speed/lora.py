"""LoRA on all linears of a transformers model by PEFT: the block beside Liger-Kernel.

    python -m benchmarks.speed.lora  # Llama-3-8B, rank 16, 4 x 2048 tokens, one GPU

Each variant has a process of its own, which trains adapters on q, k, v, o, gate, up and down (in
models with experts on q, k, v and o) of a model with random frozen weights, by torch's AdamW, on
random tokens. Parts of a variant are joined by "+": ``peft`` (nothing else), ``liger``
(Liger-Kernel), ``nf4`` (frozen weights in torchao's NF4), ``coat`` (the block's "activation"),
``fp8`` (its ``"frozen_weights": "fp8"``), ``checkpoint`` (recomputed layers), ``fp32`` (adapters in
fp32, PEFT's own default, instead of BF16). Ratios of tokens/s and peak are to ``liger``. Writes
``speed/lora.json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import coat_dist
from benchmarks.arguments import argument_parser, positive_int
from benchmarks.common import options, show, write_result
from benchmarks.ranks import as_rank, run_variant, show_failed
from benchmarks.speed.hf import MODELS, measured, untrained

VARIANTS = [
    "peft",
    "liger",
    "liger+checkpoint",
    "liger+nf4",
    "coat",
    "coat+fp8",
    "coat+fp8+checkpoint",
]
PARTS = {"peft", "liger", "nf4", "coat", "fp8", "checkpoint", "fp32"}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def build(parts: set[str], case: dict[str, Any], device: torch.device) -> Any:
    """The model of a variant with its adapters, in training mode."""
    import peft

    if "liger" in parts:
        import liger_kernel.transformers as liger

        getattr(liger, f"apply_liger_kernel_to_{MODELS[case['model']][0]}")()
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = untrained(case)()
    torch.set_default_dtype(torch.float32)
    config = peft.LoraConfig(
        r=case["rank"],
        lora_alpha=2 * case["rank"],
        target_modules=ATTENTION if hasattr(model.config, "num_experts") else ATTENTION + MLP,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, config, autocast_adapter_dtype="fp32" in parts).train()
    if "nf4" in parts:
        from torchao.quantization.quantize_.workflows import to_nf4

        for name, module in model.named_modules():
            if name.endswith("base_layer"):
                weight = to_nf4(module.weight.detach())
                module.weight = torch.nn.Parameter(weight, requires_grad=False)
    if "checkpoint" in parts:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if "coat" in parts:
        frozen = {"frozen_weights": "fp8"} if "fp8" in parts else {}
        print(coat_dist.patch_model(model, {"coat": {"activation": frozen}}), flush=True)
    return model


def measure(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """The record of a variant."""
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = build(set(case["variant"].split("+")), case, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    generator = torch.Generator().manual_seed(1)
    size, vocabulary = (case["micro_batch"], case["sequence"]), model.config.vocab_size
    yield measured(step, generator, case, size, vocabulary, device)


def compare(variants: Sequence[dict[str, Any]]) -> None:
    """Add ratios to Liger-Kernel, and print all."""
    named = {one["variant"]: one["steps"][0] for one in variants if one["steps"]}
    peer = named.get("liger")
    for name, step in named.items():
        if peer is not None:
            for key in ("tokens_per_second_per_gpu", "peak_gib"):
                step[f"{key}_to_liger"] = step[key] / peer[key]
        show(
            name,
            step,
            step_ms=".1f",
            tokens_per_second_per_gpu=",.0f",
            tokens_per_second_per_gpu_to_liger=".3f",
            peak_gib=".1f",
            peak_gib_to_liger=".3f",
            last_loss=".4f",
        )
    show_failed(variants)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__,
        sequence=2048,
        micro_batch=4,
        rank=16,
        warm_up=4,
        steps=7,
        limit=300.0,
        name="lora",
    )
    parser.add_argument("--model", default="llama3-8b", choices=list(MODELS))
    parser.add_argument("--variants", nargs="+", default=VARIANTS, metavar="PART+PART")
    parser.add_argument("--layers", type=positive_int, help="of the model (default: all)")
    arguments = parser.parse_args(given)
    for variant in arguments.variants:
        if not set(variant.split("+")) <= PARTS:
            parser.error(f"--variants: got {variant!r}, accepted: parts of {sorted(PARTS)}")
    return arguments


def main() -> None:
    arguments = parse()
    case = options(arguments, "variants", "limit") | {"ranks": 1}
    case["sizes"] = [arguments.micro_batch]
    if arguments.layers:
        case["shape"] = {"num_hidden_layers": arguments.layers}
    found = []
    for variant in arguments.variants:
        own = case | {"variant": variant}
        found.append(run_variant(own, arguments.limit, "benchmarks.speed.lora"))
        compare(found[-1:])
    compare(found)
    result = {"settings": options(arguments), "variants": found}
    write_result(f"speed/{arguments.name}", result, arguments.output, nan=True)


if __name__ == "__main__":
    as_rank(measure)
    main()
