"""How long a training step takes, from rates of matrix products, attention, copies and links.

A sum of parts, none of which overlap: products of layers (FP8 or BF16), attention, element-wise
passes, output layer and loss, what ZeRO moves, the update. Under `overlap_comm` half of the
reduction is taken to be hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from .gpus import GPU
from .layer import Sizes
from .run import Run
from .zero import states

__all__ = ["StepTime", "step_time"]

_PASSES = {"FP8": 58.5, "BF16": 92.0, "transformers": 180.0}
"""Bytes of element-wise traffic a token and channel of h and f, forward and backward: what a
measured Llama-2-7B layer takes beyond products and attention (docs/flow.md#speed), times the rate
of passes; in BF16, those of transformers by the 1.3 B model of docs/hugging-face.md.
"""
_HOST = {"FP8": 2.2e-3, "BF16": 1.3e-3}
"""Seconds in which the host starts a layer's kernels, forward and backward: a layer is never
faster.
"""
_HOST_BUS = 45e9
"""Bytes a second of each direction between a GPU and its host. benchmarks/speed/offload.py measured
43 to 46e9 on an H100 and 50e9 on an H200.
"""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    parts: dict[str, float]
    tokens: int  # of all ranks
    gpus: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.gpus


def step_time(run: Run, gpu: GPU) -> StepTime:
    """The parts of a step of ``run`` on ``gpu``."""
    m, tokens, found = run.model, run.tokens, states(run)
    sizes = Sizes.of(m, run.tp, run.shared)
    weights = sizes.h * (sizes.q + sizes.w + sizes.wide + sizes.f)
    # Two products forward, five backward, half of the keys.
    attention = 7 * tokens * m.seq_length * sizes.q
    again = _recomputed(run)
    layers = host_bound = 0.0
    for i in range(m.num_layers):
        kind = "BF16" if i in run.bf16_layers else "FP8"
        rate = gpu.bf16 if kind == "BF16" else gpu.fp8
        one = 6 * tokens * weights / rate + attention / gpu.attention
        passes = _PASSES["transformers" if run.library is not None and kind == "BF16" else kind]
        one += passes * tokens * (sizes.h / sizes.share + sizes.f) / gpu.passes
        one *= 1 + again / 3
        layers += one
        host_bound += max(0.0, _HOST[kind] * (1 + again / 3) - one)
    head = sizes.h * m.padded_vocab // run.tp
    products = 8 if run.chunked and not run.keeps_logits else 6
    loss = products * tokens * head / gpu.bf16 + 20 * tokens * m.padded_vocab / run.tp / gpu.copy
    micro = {"layers": layers, "host": host_bound, "loss": loss}
    micro["tensor parallelism"] = _tensor_parallel(run, sizes, gpu)
    micro["gradients"] = 12 * found.elements / gpu.copy
    if run.dp > 1 and run.stage > 1:
        micro["data parallelism"] = _reduction(run, found.elements, gpu)
    parts = {key: value * run.accumulation for key, value in micro.items() if value}
    if run.dp > 1:
        if run.stage == 1:
            parts["data parallelism"] = _reduction(run, found.elements, gpu)
        parts["gathering weights"] = (
            2 * found.elements / gpu.link * (2 * run.accumulation if run.stage == 3 else 1)
        )
    parts["step"] = found.shard * _step_of_a_parameter(run) * 4.27e12 / gpu.passes
    parts["step"] = max(parts["step"], found.hosted / _HOST_BUS)
    return StepTime(parts, tokens * run.dp * run.accumulation, run.dp * run.tp)


def _step_of_a_parameter(run: Run) -> float:
    """Seconds that an H200 takes, the norm included: docs/results.md, "Optimizer"."""
    if not run.fp8_moments:
        return 24.9e-12
    # Where DeepSpeed's passes are not left out.
    every_pass = run.stage == 3 or (run.stage == 1 and run.fp32_gradients)
    return 13.0e-12 if every_pass else 6.1e-12


def _recomputed(run: Run) -> float:
    """Parts of a forward pass that are computed again."""
    if run.recompute.get("recompute_granularity") == "full":
        if run.recompute["recompute_method"] == "block":
            return int(run.recompute["recompute_num_layers"]) / run.model.num_layers
        return 1.0
    share = {"mlp": 0.6, "core_attn": 0.15, "layernorm": 0.03}
    return sum(share.get(name, 0.0) for name in run.recompute.get("recompute_modules", ()))


def _reduction(run: Run, elements: int, gpu: GPU) -> float:
    # ZeRO-1 and 2 of DeepSpeed reduce buckets on all ranks, twice what a scatter moves.
    whole = 2 * elements / gpu.link * (1 if run.stage == 3 else 2)
    return whole / 2 if run.overlap else whole


def _tensor_parallel(run: Run, sizes: Sizes, gpu: GPU) -> float:
    """Gathers and scatters of the residual stream: four each way and layer."""
    if run.tp == 1:
        return 0.0
    width = 1.5 if run.flow is not None and run.flow.fp8_gather and run.sequence_parallel else 2.0
    return run.model.num_layers * 8 * width * sizes.h * run.tokens / gpu.link / 2
