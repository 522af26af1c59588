"""The table of DeepSpeed settings that CoatAdamW or the flow cannot honour, each with its reason.

``refusals.py`` walks it. A reason that helps the user is part of the message; others stand beside the rule.
"""

from __future__ import annotations

from collections.abc import Callable

from .refusal_facts import Facts, Rule

__all__ = ["RULES"]


def _on(key: str) -> Callable[[Facts], object]:
    return lambda f: f.compressed and f[key]


def _elsewhere(key: str) -> Callable[[Facts], bool]:
    return lambda f: f[key] not in (None, "none")


_ANY = (
    Rule(
        "optimizer.type",
        '"CoatAdamW" when the block has "coat.optimizer" (remove one of the two)',
        lambda f: (
            f.coat is not None
            and "optimizer" in f.coat.model_fields_set
            and f["optimizer.type"] not in (None, "CoatAdamW")
            and f.ours is None
        ),
    ),
    Rule(
        "fp16.enabled",
        "false beside {bf16}.enabled true",
        lambda f: f["fp16.enabled"] and f["{bf16}.enabled"] and not f.flow,
    ),
    # Both would split the same weights.
    Rule(
        "tensor_parallel.autotp_size",
        "0 or 1 with Megatron tensor parallelism {tp}",
        lambda f: (f["tensor_parallel.autotp_size"] or 0) > 1 and f.tp > 1,
    ),
    # CoatAdamW has a loader of its own.
    Rule(
        "checkpoint.load_universal",
        "false with zero_optimization.stage 3 and tensor parallelism {tp}: DeepSpeed does not slice universal "
        "checkpoints over TP there; use stage 1 or 2, or CoatAdamW",
        lambda f: f["checkpoint.load_universal"] and f.stage == 3 and f.tp > 1 and not f.compressed,
    ),
)

_HPZ = "zero_optimization.zero_hpz_partition_size"

# ZeRO++ and what came before it. Its formats round what is rounded here already, by kernels compiled on first use.
_ZERO_PLUS_PLUS = (
    Rule(
        "zero_optimization.zero_quantized_weights",
        "false: weights would be rounded to INT8, by way of FP16, before they are used; coat.activation."
        "fp8_weight_gather gathers as many bytes and changes no result",
        lambda f: f["zero_optimization.zero_quantized_weights"],
    ),
    Rule(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "false: frozen weights would be kept in INT8, and checkpoints would have no others",
        lambda f: f["zero_optimization.zero_quantized_nontrainable_weights"],
    ),
    Rule(
        "zero_optimization.zero_quantized_gradients",
        "false: gradients would be rounded to INT4 within a node and INT8 between nodes before they are summed",
        lambda f: f["zero_optimization.zero_quantized_gradients"],
    ),
    *(
        Rule(
            f"zero_optimization.{key}",
            "absent: DeepSpeed has removed MiCS; zero_hpz_partition_size keeps a second shard of weights in each node",
            lambda f, key=key: f[f"zero_optimization.{key}"] is not None,  # type: ignore[misc]
        )
        for key in ("mics_shard_size", "mics_hierarchical_params_gather")
    ),
    Rule(
        _HPZ,
        "1, or zero_optimization.stage 3: other stages divide no weights",
        lambda f: (f[_HPZ] or 1) > 1 and f.stage != 3,
    ),
    # DeepSpeed's groups are consecutive ranks, whatever they hold.
    Rule(
        _HPZ,
        "1 with tensor parallelism {tp}, whose ranks hold other parts of the model",
        lambda f: (f[_HPZ] or 1) > 1 and f.stage == 3 and f.tp > 1,
    ),
    Rule(
        _HPZ,
        "1, or a divisor of the number of ranks ({world})",
        lambda f: (f[_HPZ] or 1) > 1 and f.stage == 3 and f.tp == 1 and f.world % min(f[_HPZ], f.world) != 0,
    ),
)

# Their files are written behind a save's back, and may be incomplete when it returns.
_CHECKPOINTS = (
    Rule(
        "checkpoint.writer",
        "absent: checkpoints are written by torch.save, with checksums, and are on disk when save_checkpoint returns",
        lambda f: f["checkpoint.writer"] is not None,
    ),
    Rule(
        "checkpoint.use_node_local_storage",
        "false with tensor parallelism {tp}: DeepSpeed then writes the model states of each node's first rank alone",
        lambda f: f["checkpoint.use_node_local_storage"] and f.tp > 1,
    ),
    Rule(
        "checkpoint.use_node_local_storage",
        "true or false",
        lambda f: f["checkpoint.use_node_local_storage"] not in (None, True, False),
    ),
    Rule(
        "datastates_ckpt",
        "absent: checkpoints are written by torch.save, with checksums, and are on disk when save_checkpoint returns",
        lambda f: f["datastates_ckpt"] not in (None, False),
    ),
)

_ELASTIC = (
    Rule(
        "elasticity",
        "absent, DeepSpeed has removed it: train_batch_size, torchrun --max-restarts and a run that continues from its "
        "checkpoints, as launch/pretrain.py --load auto does on any number of ranks",
        lambda f: f["elasticity"] is not None,
    ),
)

_COAT_ADAMW = (
    Rule(
        "zero_optimization.elastic_checkpoint",
        "false with CoatAdamW: it merges raw optimizer state across ranks",
        _on("zero_optimization.elastic_checkpoint"),
    ),
    Rule(
        "zero_optimization.offload_optimizer.device",
        '"none" with CoatAdamW: compressed moments are small enough to stay on the GPU',
        lambda f: f.compressed and _elsewhere("zero_optimization.offload_optimizer.device")(f),
    ),
    # These three keep the optimizer's states on the CPU.
    Rule(
        "zero_optimization.offload_optimizer.super_offload",
        "false with CoatAdamW",
        _on("zero_optimization.offload_optimizer.super_offload"),
    ),
    Rule("zero_optimization.cpu_offload", "false with CoatAdamW", _on("zero_optimization.cpu_offload")),
    Rule(
        "zero_optimization.zenflow",
        "absent with CoatAdamW",
        lambda f: f.compressed and f["zero_optimization.zenflow"] is not None,
    ),
    Rule(
        "zero_optimization.stage",
        "1, 2 or 3 with {half}.enabled: {why_not_stage_0}",
        lambda f: f.compressed and (f.ours is not None or f.pipeline) and f.stage == 0 and f.half is not None,
    ),
)

# ``master_weights`` and DeepSpeed's keys have to say the same: each alone would lose the lower 16 bits.
_MASTER_WEIGHTS = (
    Rule(
        "{bf16}.bf16_master_weights_and_grads",
        "false with CoatAdamW, or true with {option}: bfloat16 alone loses small updates",
        lambda f: _on("{bf16}.bf16_master_weights_and_grads")(f) and not f.remainder,
    ),
    Rule(
        "{bf16}.enabled",
        "true with {option}",
        lambda f: f.remainder and not _on("{bf16}.enabled")(f),
    ),
    Rule(
        "{bf16}.bf16_master_weights_and_grads",
        "true with {option}",
        lambda f: f.remainder and not _on("{bf16}.bf16_master_weights_and_grads")(f),
    ),
    Rule(
        "{bf16}.bf16_optimizer_states",
        "true with {option} (moments stay FP8; without it DeepSpeed wants CPU offload)",
        lambda f: f.remainder and not _on("{bf16}.bf16_optimizer_states")(f),
    ),
    Rule(
        "data_types.grad_accum_dtype",
        '"bf16" with {option} at zero_optimization.stage 1, where fp32 sums mean fp32 weights (BF16_Optimizer); or '
        "stage 2 or 3",
        lambda f: (
            f.remainder
            and f.stage == 1
            and f["data_types.grad_accum_dtype"] in ("fp32", "float32", "float", "torch.float32")
        ),
    ),
    Rule(
        "zero_optimization.offload_param.device",
        '"none" with {option}: weights and remainders are one master weight, on one device',
        lambda f: f.remainder and _elsewhere("zero_optimization.offload_param.device")(f),
    ),
    *(
        Rule(key, "false with {option}", lambda f, key=key: f.remainder and f[key])  # type: ignore[misc]
        for key in ("zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params")
    ),
)

_FLOW = (
    Rule(
        "fp16.enabled",
        "false with coat.activation.enabled: the flow runs in bf16",
        lambda f: f.flow and f["fp16.enabled"],
    ),
    Rule(
        "coat.activation.weights",
        '"on_use" with zero_optimization.stage 3: a cache would hold whole weights on every rank',
        lambda f: f.flow and f.coat.activation.weights == "cached" and f.stage == 3,  # type: ignore[union-attr]
    ),
    Rule(
        "coat.activation.cuda_graphs",
        "false with zero_optimization.stage 3: graphs read weights where they lie, and these come and go",
        lambda f: f.flow and f.coat.activation.cuda_graphs and f.stage == 3,  # type: ignore[union-attr]
    ),
    Rule(
        "coat.activation.wgrad",
        '"grad" under DeepSpeed, whose parameters have no main_grad',
        lambda f: f.flow and f.coat.activation.wgrad == "main_grad",  # type: ignore[union-attr]
    ),
)

RULES = (*_ANY, *_ZERO_PLUS_PLUS, *_CHECKPOINTS, *_ELASTIC, *_COAT_ADAMW, *_MASTER_WEIGHTS, *_FLOW)
