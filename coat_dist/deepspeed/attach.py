"""The one list of what is replaced on the objects that ``deepspeed.initialize`` returns, and in
which order.

Always on instances: DeepSpeed's classes stay as they are. Nothing else in this project replaces a
method of DeepSpeed (``hook.py`` changes one function, ``deepspeed.initialize``); a test compares
real engines with this list. ``engine.coat_attached`` holds the names of what was attached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..checkpoint.names import divided_experts
from ..checkpoint.read.load_checks import load_whole_checkpoints
from ..checkpoint.read.native_check import check_native_loads, refuse_compressed_moments
from ..checkpoint.save import save_whole_checkpoints
from ..checkpoint.universal.load import enable_universal_load
from ..checkpoint.zero_partitions import base_optimizer, is_zero
from ..config import CoatConfig, CoatConfigError, Problem
from ..flow.core.weights import invalidate_after, invalidate_weights
from ..optim import CoatAdamW
from . import expert_parallel, heartbeat
from .build import pipeline, pipeline_module, round_robin
from .step import accessors, fp8_gather, master_weights, offload_states, step, step_gradients

__all__ = ["ATTACHMENTS", "FOR_NEW_ENGINES", "Attachment", "Built", "attach"]

FOR_NEW_ENGINES: list[tuple[Callable[[Any], bool], Callable[[Any], None]]] = []
"""What rooms above attach to a new engine: whether it applies, and what does it.
``megatron_patches`` puts the functions of its ``step_jobs.py`` here.
"""


class Built(NamedTuple):
    """What ``deepspeed.initialize`` has built."""

    engine: Any
    # engine.optimizer: one of DeepSpeed's ZeRO optimizers or something else, such as None.
    zero: Any
    coat: CoatConfig | None
    evaluates: bool = False  # built without the CoatAdamW that the configuration names (stage 0)

    @property
    def ours(self) -> bool:
        """ZeRO drives a CoatAdamW, wherever that came from: JSON, an object, a callable."""
        return is_zero(self.zero) and base_optimizer(self.zero) is not None

    @property
    def any_coat(self) -> bool:
        """There is a "coat" block or a CoatAdamW, with ZeRO or without."""
        return (
            self.coat is not None
            or isinstance(self.zero, CoatAdamW)
            or base_optimizer(self.zero) is not None
        )

    @property
    def stage3(self) -> bool:
        """ZeRO-3, whose accessors are methods of the optimizer; at other stages they are methods
        of each parameter.
        """
        return hasattr(self.zero, "fp32_partitioned_groups_flat")

    @property
    def universal(self) -> bool:
        """Universal checkpoints can be loaded: into CoatAdamW always, into torch's Adam and
        AdamW where asked for.
        """
        # AdamW is an Adam.
        torchs = is_zero(self.zero) and isinstance(self.zero.optimizer, torch.optim.Adam)
        return self.ours or (torchs and bool(self.engine.load_universal_checkpoint()))


class Attachment(NamedTuple):
    """One line of the list."""

    name: str
    applies: Callable[[Built], bool]
    attach: Callable[[Built], object]
    # Methods: "engine.", "zero." (engine.optimizer) or "param." (every parameter), the name.
    replaces: tuple[str, ...]
    why_here: str  # the reason of its place in the order
    # Also for a call of deepspeed.initialize that has nothing of this project.
    every_engine: bool = False


def drop_when_weights_change(engine: Any) -> None:
    """Drop cached FP8 weights now, since DeepSpeed has just broadcast the weights, and after each
    call that writes any.

    DeepSpeed writes weights through flat buffers, which leaves no trace in the parameters: a cache
    that looks at them alone would keep old codes (``flow/core/weights.py``).
    """
    invalidate_weights()
    invalidate_after(engine, "load_checkpoint", "load_module_state_dict")
    invalidate_after(engine.optimizer, "step", "load_state_dict", "update_lp_params")


def refuse_training(engine: Any) -> None:
    """Let an engine that has no optimizer say why."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        given = "got 0, at which an engine with CoatAdamW only evaluates"
        raise CoatConfigError(Problem("zero_optimization.stage", given, "1, 2 or 3 to train"))

    engine.backward = engine.step = refuse


ATTACHMENTS = (
    Attachment(
        "places under round_robin_gradients",
        lambda b: round_robin.deals_out(b.zero),
        lambda b: round_robin.relink(b.zero),
        ("zero._link_all_hp_params",),
        "first: everything below asks where parameters lie; right for any optimizer",
    ),
    Attachment(
        "safe_get_full_moment and its companions",
        lambda b: is_zero(b.zero),
        lambda b: accessors.register(b.zero),
        (),
        "before DeepSpeed's accessors, which are answered by ours; of another optimizer it forgets "
        "the parameters",
    ),
    Attachment(
        "master_weights fit what ZeRO hands over",
        lambda b: b.ours,
        lambda b: master_weights.check_master_weights(b.zero),
        (),
        "before anything for CoatAdamW is replaced: it may refuse",
    ),
    Attachment(
        "one memory for weights and master weights",
        lambda b: b.ours and master_weights.keeps_remainders(b.zero),
        lambda b: master_weights.share_memory(b.zero),
        ("zero._restore_from_bit16_weights",),
        "before the accessors: parameters are then linked anew, to the shared memory",
    ),
    Attachment(
        "states are moved to host memory and back",
        lambda b: b.ours and hasattr(b.zero, "offload_states"),
        lambda b: offload_states.move_states_by_ours(b.zero),
        ("zero.offload_states", "zero.reload_states"),
        "anywhere: nothing else is put around these",
    ),
    Attachment(
        "DeepSpeed's accessors, stages 1 and 2",
        lambda b: b.ours and not b.stage3,
        lambda b: accessors.answer_on_parameters(b.zero),
        ("zero._link_all_hp_params", "param.get_full_hp_param", "param.set_full_hp_param"),
        "after the places: whenever ZeRO links parameters, places are corrected first and "
        "accessors put on them next",
    ),
    Attachment(
        "DeepSpeed's accessors, stage 3",
        lambda b: b.ours and b.stage3,
        lambda b: accessors.answer_on_optimizer(b.zero),
        (
            "zero.get_full_hp_param",
            "zero.set_full_hp_param",
            "zero.get_local_fp32_param",
            "zero.set_local_hp_param",
        ),
        "as at stages 1 and 2; nothing is linked here",
    ),
    Attachment(
        "checkpoints that are whole: saving",
        lambda b: b.any_coat,
        lambda b: save_whole_checkpoints(b.engine),
        ("engine.save_checkpoint",),
        "anywhere: nothing else is put around saving",
    ),
    Attachment(
        "checkpoints that are whole: loading",
        lambda b: b.any_coat,
        lambda b: load_whole_checkpoints(b.engine),
        ("engine.load_checkpoint",),
        "before all below that add their checks to it",
    ),
    Attachment(
        "checks of DeepSpeed's own checkpoints",
        lambda b: b.ours,
        lambda b: check_native_loads(b.engine),
        ("engine.load_checkpoint",),
        "after the places, which it compares; before the universal loader, whose check is asked "
        "second",
    ),
    Attachment(
        "checkpoints of CoatAdamW are refused",
        lambda b: is_zero(b.zero) and not b.ours,
        lambda b: refuse_compressed_moments(b.engine),
        ("engine.load_checkpoint",),
        "after what finds and verifies the checkpoint: where that is there, this is one more check "
        "of it",
        every_engine=True,
    ),
    Attachment(
        "universal checkpoints",
        lambda b: b.universal,
        lambda b: enable_universal_load(b.engine),
        ("engine.load_checkpoint", "zero._load_universal_checkpoint"),
        "after the places, which say what part of a parameter this rank loads",
    ),
    Attachment(
        "experts are reduced with BF16_Optimizer",
        lambda b: expert_parallel.left_unreduced(b.engine),
        lambda b: expert_parallel.reduce_experts(b.engine),
        ("engine.buffered_allreduce_fallback",),
        "anywhere: nothing else is put around it",
    ),
    Attachment(
        "experts or layers of other ranks are missed",
        lambda b: (
            pipeline.is_stage(b.engine)
            or divided_experts(getattr(b.engine.module, "universal_checkpoint_info", None))[0] > 1
        ),
        lambda b: expert_parallel.refuse_single_files(b.engine),
        ("engine.save_16bit_model", "engine.save_fp16_model"),
        "anywhere: nothing else is put around these",
    ),
    Attachment(
        "step: infinities are found by the gradient norm",
        lambda b: step.norm_finds_all(b.zero, pipeline.is_stage(b.engine)),
        lambda b: step.leave_all_to_the_norm(b.zero),
        ("zero.check_overflow",),
        "anywhere before the last: needs nothing from above",
    ),
    Attachment(
        "step: the gradient norm reads gradients once",
        lambda b: step.norm_is_ours(b.zero, pipeline.is_stage(b.engine)),
        lambda b: step.read_gradients_once(b.zero),
        ("zero.get_grad_norm_direct",),
        "with the one before it, which relies on it where some gradients are not counted",
    ),
    Attachment(
        "step: infinities are looked for where the norm does not count",
        lambda b: step.norm_leaves_out(b.zero, pipeline.is_stage(b.engine)),
        lambda b: step.check_what_the_norm_leaves_out(b.zero),
        ("zero.has_overflow_partitioned_grads_serial",),
        "instead of the two before it, never with them",
    ),
    Attachment(
        "step: gradients are added without a copy",
        lambda b: step.may_leave_out_passes(b.zero),
        lambda b: step_gradients.add_without_a_copy(b.zero),
        ("zero._add_to_grad_partition_buffer", "zero._build_compact_grad_partition_buffer"),
        "anywhere: needs nothing from above",
    ),
    Attachment(
        "step: buckets are reduced where they are",
        lambda b: step.may_leave_out_passes(b.zero),
        lambda b: step_gradients.reduce_where_they_are(b.zero),
        ("zero.average_tensor", "zero.allreduce_and_copy_with_multiple_ranks"),
        "after the one before it, by whose sum it adds",
    ),
    Attachment(
        "step: the host does not wait for reductions",
        lambda b: step_gradients.has_reduction_stream(b.zero),
        lambda b: step_gradients.wait_on_the_gpu(b.zero),
        ("zero.independent_gradient_partition_epilogue",),
        "anywhere: nothing else is put around it",
    ),
    Attachment(
        "step: CoatAdamW unscales and clips",
        lambda b: step.may_leave_out_passes(b.zero),
        lambda b: step.unscale_and_clip_in_the_step(b.zero),
        ("zero.unscale_and_clip_grads",),
        "anywhere before the last: needs nothing from above",
    ),
    Attachment(
        "step: CoatAdamW writes the 16-bit weights",
        lambda b: step.has_16_bit_copy(b.zero),
        lambda b: step.write_16_bit_weights_in_the_step(b.zero),
        ("zero._optimizer_step", "zero.step"),
        "before the last, which wraps `step`: it would be lost here",
    ),
    Attachment(
        "a pipeline stage, driven by a schedule",
        lambda b: is_zero(b.zero) and pipeline.is_stage(b.engine),
        lambda b: pipeline.attach_stage(b.engine),
        ("engine.forward", "engine.backward"),
        "anywhere: nothing else is put around these",
    ),
    Attachment(
        "a tied embedding draws the same noise on both stages",
        lambda b: b.ours and pipeline.is_stage(b.engine),
        lambda b: pipeline.check_noise_of_tied(b.engine),
        (),
        "anywhere: replaces nothing",
    ),
    Attachment(
        "a pipeline stage steps with reduced gradients",
        lambda b: (
            is_zero(b.zero) and pipeline.is_stage(b.engine) and hasattr(b.zero, "reduce_gradients")
        ),
        lambda b: pipeline.refuse_unreduced_steps(b.engine, b.zero, "reduce_gradients"),
        ("engine.step", "zero.reduce_gradients"),
        "anywhere: nothing else is put around these",
    ),
    Attachment(
        "a pipeline stage steps with reduced gradients (BF16_Optimizer)",
        lambda b: (
            is_zero(b.zero)
            and pipeline.is_stage(b.engine)
            and not hasattr(b.zero, "reduce_gradients")
        ),
        lambda b: pipeline.refuse_unreduced_steps(
            b.engine, b.engine, "buffered_allreduce_fallback"
        ),
        ("engine.step", "engine.buffered_allreduce_fallback"),
        "after what else is put around the fallback",
    ),
    Attachment(
        "gradient norm over pipeline stages",
        lambda b: (
            is_zero(b.zero) and pipeline.is_stage(b.engine) and pipeline.has_groups_of_norms(b.zero)
        ),
        lambda b: pipeline.norm_over_stages(b.engine),
        ("zero.scaled_global_norm",),
        "anywhere: nothing else is put around it",
    ),
    Attachment(
        "gradient norm of a PipelineModule with other groups on other stages",
        lambda b: b.ours and pipeline_module.groups_differ(b.engine),
        lambda b: pipeline_module.call_norms_alike(b.engine),
        ("zero.scaled_global_norm",),
        "anywhere: never with the one before it",
    ),
    Attachment(
        "Megatron's jobs around a step's micro-batches",
        lambda b: any(applies(b.engine) for applies, _ in FOR_NEW_ENGINES),
        lambda b: [work(b.engine) for applies, work in FOR_NEW_ENGINES if applies(b.engine)],
        ("engine.forward", "engine.backward", "engine.step"),
        "after the checks of a pipeline stage's calls: jobs are done where a call is accepted",
    ),
    Attachment(
        "an engine of stage 0 evaluates",
        lambda b: b.evaluates,
        lambda b: refuse_training(b.engine),
        ("engine.backward", "engine.step"),
        "anywhere: nothing else is put around these",
    ),
    Attachment(
        "ranks hear of one another",
        lambda b: b.ours or b.coat is not None,
        lambda b: heartbeat.start(b.engine),
        (),
        "anywhere: replaces nothing",
    ),
    Attachment(
        "ZeRO-3 fetches weights for the patched modules that read them",
        lambda b: (
            b.stage3
            and any(hasattr(type(m), "coat_flow_weights") for m in b.engine.module.modules())
        ),
        lambda b: fp8_gather.fetch_for_readers(b.engine.module),
        (),
        "anywhere: replaces nothing",
        every_engine=True,
    ),
    Attachment(
        "ZeRO-3 gathers weights of the flow as FP8 codes",
        lambda b: fp8_gather.has_flow_weights(b.engine.module),
        lambda b: fp8_gather.gather_codes(b.engine.module),
        ("param.all_gather_coalesced", "param.all_gather", "param.partition"),
        "anywhere: needs nothing from above, and nothing else replaces what fetches parameters",
    ),
    Attachment(
        "cached FP8 weights are dropped",
        lambda b: (
            b.coat is not None
            and b.coat.activation.enabled
            and b.coat.activation.weights == "cached"
        ),
        lambda b: drop_when_weights_change(b.engine),
        (
            *("engine.load_checkpoint", "engine.load_module_state_dict"),
            *("zero.step", "zero.load_state_dict", "zero.update_lp_params"),
        ),
        "last: it wraps methods as they stand, replaced or not",
    ),
)


def attach(
    engine: Any, coat: CoatConfig | None = None, ours: bool = True, evaluates: bool = False
) -> tuple[str, ...]:
    """Attach to a new engine what applies to it; the names, also ``engine.coat_attached``. A second
    time nothing is changed.

    Args:
        engine: DeepSpeed's.
        coat: the parsed block.
        ours: False for an engine of a call in which there was nothing of this project.
        evaluates: as in :class:`Built`.
    """
    if "coat_attached" not in vars(engine):
        built, names = Built(engine, engine.optimizer, coat, evaluates), []
        for attachment in ATTACHMENTS:
            if (ours or attachment.every_engine) and attachment.applies(built):
                attachment.attach(built)
                names.append(attachment.name)
        engine.coat_attached = tuple(names)
    return engine.coat_attached
