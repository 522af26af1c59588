"""Families of transformers models, some layers of the real shape: the block beside BF16 and what
users can put together.

    python -m benchmarks.speed.families  # all families and variants, an hour
    python -m benchmarks.speed.families --families llama3-8b gemma3-4b --variants bf16 liger coat

Each variant has a process of its own, which builds one family after the other and takes steps of
two sequences of random tokens: forward, backward, SGD. The vocabulary has 32 000 tokens in all
families. Variants are ``bf16`` (transformers, sdpa, experts as grouped products), ``liger`` (Liger-
Kernel), ``compile`` (torch.compile of each layer with dynamic shapes), ``ao`` (torchao's float8),
joined by "+", and ``coat``, the block alone, also with its own ``"compile"``. Saved bytes a token
are what the allocator holds between forward and backward, logits included. Ratios of times are to
BF16 and to the best variant without ``coat`` of the same family and run. A family that fails is a
row with its error; a variant whose package is not installed, or whose key the block refuses, is
left out with a line, as is a family that Liger or this transformers has not. Writes
``speed/families.json`` after each variant; give parts of it other names by ``--name``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

import coat_dist
from benchmarks.arguments import argument_parser, check_multiples, positive_int
from benchmarks.common import options, show, write_result
from benchmarks.ranks import as_rank, run
from benchmarks.speed.hf import random_tokens, shape, timed_steps
from coat_dist import CoatConfig, CoatConfigError


class Family(NamedTuple):
    """transformers' type of a model, how many layers are measured, and what its configuration has
    besides its type's defaults.
    """

    kind: str
    layers: int
    values: dict[str, Any]


VOCABULARY = 32000
GROUPED: dict[str, Any] = {"experts_implementation": "grouped_mm"}


def family(kind: str, layers: int, *sizes: int, **more: Any) -> Family:
    """A family whose ``sizes`` are those of :func:`benchmarks.speed.hf.shape`: hidden and FFN
    sizes, heads, heads of keys and values.
    """
    hidden, ffn, heads, kv_heads = sizes
    return Family(kind, layers, shape(hidden, ffn, layers, heads, kv_heads, VOCABULARY, **more))


FAMILIES = {
    "llama3-8b": family("llama", 4, 4096, 14336, 32, 8),
    "gemma3-4b": family("gemma3_text", 6, 2560, 10240, 8, 4, sliding_window=1024),
    "olmo2-7b": family("olmo2", 4, 4096, 11008, 32, 32),
    "phi3-mini": family("phi3", 4, 3072, 8192, 32, 32),
    "glm4-9b": family("glm4", 4, 4096, 13696, 32, 2, attention_bias=False),
    "ministral3-8b": family("ministral3", 4, 4096, 14336, 32, 8),
    "gemma4-like": family(
        "gemma4_text", 6, 2304, 9216, 8, 4, vocab_size_per_layer_input=VOCABULARY
    ),
    "qwen3-30b-a3b": family(
        "qwen3_moe",
        4,
        2048,
        6144,
        32,
        4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        **GROUPED,
    ),
    "mixtral-8x7b": family("mixtral", 2, 4096, 14336, 32, 8, **GROUPED),
    "moonlight-like": family(
        "deepseek_v3",
        4,
        2048,
        11264,
        16,
        16,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        routed_scaling_factor=2.446,
        **GROUPED,
    ),
    # Its attention has sinks, which sdpa has not.
    "gpt-oss-20b": family(
        "gpt_oss",
        4,
        2880,
        2880,
        64,
        8,
        num_local_experts=32,
        attn_implementation="eager",
        **GROUPED,
    ),
    "qwen3.5-9b": family("qwen3_5_text", 4, 4096, 12288, 16, 4),
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "vocab_size": 256,
    "vocab_size_per_layer_input": 256,
}
"""Sizes of ``--tiny``, as far as a family has them."""
VARIANTS = ["bf16", "liger", "compile", "liger+compile", "ao+compile", "coat", "coat+compile"]
PACKAGES = {"liger": "liger_kernel", "ao": "torchao"}
"""Packages of a variant's parts."""


def block(variant: str) -> dict[str, Any]:
    """The "activation" of a variant's block."""
    return {"compile": True} if variant == "coat+compile" else {}


def build(name: str, case: dict[str, Any], device: torch.device) -> Any:
    """The model of a family in a case's variant, on ``device`` in BF16."""
    import transformers

    kind, _, values = FAMILIES[name]
    if case["layers"]:
        values = values | {"num_hidden_layers": case["layers"]}
    if case["tiny"]:
        values = {key: SMALL.get(key, value) for key, value in values.items()}
    parts = set(case["variant"].split("+"))
    if "liger" in parts:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        MODEL_TYPE_TO_APPLY_LIGER_FN[kind]()
    values = {"attn_implementation": "sdpa"} | values
    config = transformers.AutoConfig.for_model(kind, **values, use_cache=False, pad_token_id=None)
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if "ao" in parts:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=in_float8)
    if "coat" in parts:
        print(coat_dist.patch_model(model, {"coat": {"activation": block(case["variant"])}}))
    elif "compile" in parts:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    return model


def in_float8(module: Any, name: str) -> bool:
    """Whether torchao converts a linear layer: not the head, and none whose sizes its products
    refuse.
    """
    return "lm_head" not in name and all(size % 16 == 0 for size in module.weight.shape)


def measure(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """A record for each family, with its name, in which an error is the last line of one."""
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for name in case["families"]:
        try:
            yield {"family": name} | measure_one(name, case, device)
        except Exception as problem:
            traceback.print_exc()
            yield {"family": name, "error": str(problem).strip().splitlines()[0]}
        torch.compiler.reset()
        gc.collect()


def measure_one(name: str, case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Times, memory and losses of a family."""
    model = build(name, case, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    saved = [0]

    def step(tokens: torch.Tensor) -> torch.Tensor:
        before = torch.cuda.memory_allocated()
        loss = model(input_ids=tokens, labels=tokens).loss
        saved[0] = torch.cuda.memory_allocated() - before
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    generator = torch.Generator().manual_seed(1)
    size, vocabulary = (2, case["tokens"] // 2), model.config.vocab_size
    drawn = random_tokens(generator, case, size, vocabulary, device)
    found = timed_steps(step, drawn, case["tokens"], case["warm_up"], device)
    return found | {"saved_bytes_per_token": saved[0] / case["tokens"]}


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add ratios of times to BF16 and to the best peer of a family, and print all."""
    times = {row["variant"]: row["step_ms"] for row in rows if "step_ms" in row}
    best = min((ms for name, ms in times.items() if "coat" not in name), default=None)
    for row in rows:
        if "error" in row:
            print(f"{row['variant']:<28} {row['error']}", flush=True)
            continue
        if "bf16" in times:
            row["to_bf16"] = row["step_ms"] / times["bf16"]
        if best is not None:
            row["to_best_peer"] = row["step_ms"] / best
        show(
            row["variant"],
            row,
            step_ms=".1f",
            saved_bytes_per_token=",.0f",
            to_bf16=".3f",
            to_best_peer=".3f",
            peak_gib=".1f",
        )


def left_out(variant: str) -> str | None:
    """Why a variant is not measured: a package that is not installed, or a key of the block that
    does not exist. None if it is.
    """
    for part in variant.split("+"):
        if part in PACKAGES and importlib.util.find_spec(PACKAGES[part]) is None:
            return f"no package {PACKAGES[part]}"
    try:
        CoatConfig.parse({"activation": block(variant)})
    except CoatConfigError as problem:
        return str(problem)
    return None


def known(name: str, variant: str) -> bool:
    """Whether this transformers, and Liger where it takes part, have a family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = FAMILIES[name].kind
    if "liger" in variant:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        return kind in MODEL_TYPE_TO_APPLY_LIGER_FN
    return kind in CONFIG_MAPPING_NAMES


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__, tokens=8192, warm_up=5, steps=11, limit=600.0, name="families", tiny=False
    )
    parser.add_argument(
        "--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="NAME"
    )
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--layers", type=positive_int, help="of each model (default: as listed)")
    arguments = parser.parse_args(given)
    check_multiples(parser, "--tokens", [arguments.tokens], 2)
    return arguments


def main() -> None:
    arguments = parse()
    case = options(arguments, "variants", "limit") | {"ranks": 1}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.families}
    for variant in arguments.variants:
        if why := left_out(variant):
            print(f"{variant}: left out, {why}", flush=True)
            continue
        families = [name for name in arguments.families if known(name, variant)]
        own = case | {"variant": variant, "families": families}
        records, statuses, log = run(own, arguments.limit, "benchmarks.speed.families")
        if len(records) < len(families):
            print(f"{variant}: {len(records)} of {families}, ended with {statuses}: {log[-900:]}")
        for record in records:
            found[record.pop("family")].append({"variant": variant} | record)
        result = {"settings": options(arguments), "families": found}
        write_result(f"speed/{arguments.name}", result, arguments.output, nan=True)
    for name, rows in found.items():
        print(f"== {name}", flush=True)
        compare(rows)
    write_result(f"speed/{arguments.name}", result, arguments.output, nan=True)


if __name__ == "__main__":
    as_rank(measure)
    main()
