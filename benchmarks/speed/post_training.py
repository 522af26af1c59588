"""Updates of GRPO and DPO: the block beside TRL with Liger-Kernel, both with 8-bit moments.

    python -m benchmarks.speed.post_training  # Qwen3-8B's shape, 12 layers, 4 x 8192 tokens
    python -m benchmarks.speed.post_training --loss dpo --sequence 2048

Each variant has a process of its own, which trains a model with random weights under DeepSpeed's
ZeRO-2. Nothing is generated: a step is the update on random completions, which fill each sequence
but for its first token. Log-probabilities are those of TRL's output layer
(``trl.trainer.utils.add_fused_lm_head``), which makes logits in tiles; of a variant with ``direct``
those of ``coat_dist.log_probs``. GRPO's ratios are to the log-probabilities of the same step. DPO
compares with a frozen reference model: BF16, or with ``flow`` patched, with weights in FP8. The
first half of a batch is chosen, the second rejected. Parts of a variant are otherwise those of
``benchmarks.speed.hf``; ratios are to the first variant. Writes ``speed/post-training-LOSS.json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import coat_dist
from benchmarks.arguments import argument_parser, positive_int
from benchmarks.common import options, show, write_result
from benchmarks.ranks import as_rank, run_variant, show_failed
from benchmarks.speed.hf import MODELS, build, measured, untrained

VARIANTS = ["coat+liger", "coat+flow", "coat+flow+direct"]
REFERENCE = {"coat": {"activation": {"evaluation": "flow", "frozen_weights": "fp8"}}}
BETA, CLIP = 0.1, 0.2
LogProbs = Callable[[torch.Tensor], torch.Tensor]


def reference(case: dict[str, Any], policy: Any, flow: bool, device: torch.device) -> Any:
    """A frozen copy of a model, in eval mode."""
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = untrained(case)()
    torch.set_default_dtype(torch.float32)
    model.load_state_dict(policy.state_dict())
    for own, its in zip(model.buffers(), policy.buffers(), strict=True):
        own.data = its.clone()  # frequencies of the rotation, which build() has rounded to BF16
    model.requires_grad_(False).eval()
    if flow:
        coat_dist.patch_model(model, REFERENCE)
    return model


def scored(model: Any, module: Any, direct: bool) -> LogProbs:
    """Log-probabilities ``[b, s - 1]`` of the next tokens; ``module`` is the model without an
    engine around it.
    """
    if direct:
        return lambda tokens: coat_dist.log_probs(model, tokens)
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(module)
    return lambda tokens: model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs


def grpo(policy: LogProbs, _: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Clipped policy gradients with advantages of a group whose rewards are evenly spaced."""
    logs = policy(tokens)
    ratios = (logs - logs.detach()).exp()
    advantages = torch.linspace(-1, 1, len(tokens) + 2, device=tokens.device)[1:-1, None]
    clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
    return -torch.min(ratios * advantages, clipped * advantages).mean()


def dpo(policy: LogProbs, reference: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The sigmoid loss of pairs; log 2 in the first step, where both models are one function."""
    with torch.no_grad():
        base = reference(tokens)
    chosen, rejected = (policy(tokens) - base).sum(1).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


LOSSES = {"grpo": grpo, "dpo": dpo}


def measure(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """The record of a variant."""
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    parts = set(case["variant"].split("+"))
    direct = "direct" in parts
    engine = build(parts - {"direct"}, case, device)
    base = None
    if case["loss"] == "dpo":
        frozen = reference(case, engine.module, "flow" in parts, device)
        base = scored(frozen, frozen, direct)
    policy = scored(engine, engine.module, direct)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = LOSSES[case["loss"]](policy, base, tokens)
        engine.backward(loss)
        engine.step()
        return loss

    size = case["micro_batch"], case["sequence"]
    vocabulary = MODELS[case["model"]][1]["vocab_size"]
    generator = torch.Generator().manual_seed(1)
    yield measured(step, generator, case, size, vocabulary, device)


def compare(variants: Sequence[dict[str, Any]]) -> None:
    """Add ratios to the first variant, and print all."""
    first = variants[0]["steps"]
    for one in variants:
        for step in one["steps"]:
            if first:
                for key in ("tokens_per_second_per_gpu", "peak_gib"):
                    step[f"{key}_ratio"] = step[key] / (first[0][key] or 1.0)
            show(
                one["variant"],
                step,
                step_ms=".1f",
                tokens_per_second_per_gpu=",.0f",
                tokens_per_second_per_gpu_ratio=".3f",
                peak_gib=".1f",
                peak_gib_ratio=".3f",
                first_loss=".4f",
                last_loss=".4f",
            )
    show_failed(variants)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__,
        sequence=8192,
        micro_batch=4,
        warm_up=3,
        steps=5,
        limit=300.0,
    )
    parser.add_argument("--loss", choices=list(LOSSES), default="grpo")
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-8b")
    parser.add_argument("--layers", type=positive_int, default=12)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, metavar="PART+PART")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    case = options(arguments, "variants", "limit")
    case |= {"ranks": 1, "stage": 2, "accumulation": 1}
    case["sizes"] = [arguments.micro_batch]
    case["shape"] = {"num_hidden_layers": arguments.layers}
    found = []
    for variant in arguments.variants:
        own = case | {"variant": variant}
        found.append(run_variant(own, arguments.limit, "benchmarks.speed.post_training"))
    compare(found)
    name = f"speed/post-training-{arguments.loss}"
    write_result(name, {"settings": options(arguments), "variants": found}, arguments.output)


if __name__ == "__main__":
    as_rank(measure)
    main()
