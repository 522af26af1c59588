"""The one list of what is replaced on the objects that ``deepspeed.initialize`` returns, and in
which order.

Always on instances: DeepSpeed's classes stay as they are. Nothing else in this project replaces a
method of DeepSpeed (``hook.py`` changes one function, ``deepspeed.initialize``); a test compares
real engines with this list. ``engine.coat_attached`` holds the names of what was attached.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from ..checkpoint.names import divided_experts, info_of
from ..checkpoint.read.load_checks import load_whole_checkpoints
from ..checkpoint.read.native_check import check_native_loads
from ..checkpoint.save import save_whole_checkpoints
from ..checkpoint.universal.load import enable_universal_load
from ..checkpoint.zero_partitions import base_optimizer
from ..config import CoatConfig, refuse
from ..flow.core.weights import invalidate_after, invalidate_weights
from ..optim import CoatAdamW
from ..ranks import rank_and_world
from . import heartbeat
from .parallel import experts, pipeline, pipeline_module
from .step import accessors, fp8_gather, master_weights, offload_states, step, step_gradients

FOR_NEW_ENGINES: list[tuple[Callable[[Any], bool], Callable[[Any], None]]] = []
"""What rooms above attach to a new engine: whether it applies, and what does it.
``megatron_patches`` puts the functions of its ``step_jobs.py`` here.
"""


class Built:
    """What ``deepspeed.initialize`` has built, and the facts on which attachments depend.

    Args:
        engine: DeepSpeed's.
        coat: the parsed block.
        evaluates: it was built without the CoatAdamW that the configuration names (stage 0).
    """

    def __init__(self, engine: Any, coat: CoatConfig | None, evaluates: bool) -> None:
        from deepspeed.runtime.base_optimizer import ZeROOptimizer

        self.engine, self.module, self.coat, self.evaluates = (
            engine,
            engine.module,
            coat,
            evaluates,
        )
        zero = self.zero = engine.optimizer
        """DeepSpeed's ZeRO optimizer; where there is no ZeRO another optimizer, or None."""
        self.is_zero = isinstance(zero, ZeROOptimizer)
        inside = base_optimizer(zero)
        self.ours = self.is_zero and inside is not None
        """ZeRO drives a CoatAdamW, wherever that came from: JSON, an object, a callable."""
        self.any_coat = coat is not None or isinstance(zero, CoatAdamW) or inside is not None
        """There is a "coat" block or a CoatAdamW, with ZeRO or without."""
        self.stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
        """ZeRO-3, whose accessors are methods of the optimizer; at other stages they are methods of
        each parameter.
        """
        torchs = self.is_zero and isinstance(zero.optimizer, torch.optim.Adam)  # AdamW is an Adam
        self.universal = self.ours or (torchs and bool(engine.load_universal_checkpoint()))
        """Universal checkpoints can be loaded: into CoatAdamW always, into torch's Adam and AdamW
        where asked for.
        """
        self.staged = pipeline.stages(engine.mpu) > 1
        """The model is one stage of a pipeline."""
        self.divided = divided_experts(info_of(engine))[0] > 1
        """Other ranks hold other experts."""
        self.engine_reduces = hasattr(zero, "get_grads_for_reduction")
        """BF16_Optimizer, whose gradients the engine reduces."""
        self.remainders = self.ours and master_weights.keeps_remainders(zero)
        self.passes = step.may_leave_out_passes(zero)
        """Passes of ZeRO's step may be left out."""
        self.bf16 = self.passes and zero.dtype == torch.bfloat16
        self.uncounted = self.bf16 and self.staged and step.some_are_not_counted(zero)
        """The norm does not count some gradients."""
        self.copies = self.passes and not zero.low_precision_master_weights_and_grads
        """ZeRO copies its fp32 partition to a 16-bit one after the step."""
        # Only with contiguous buckets, whose reduction first waits for the stream that computes.
        self.overlaps = (
            self.passes
            and zero.reduction_stream is not None
            and zero.overlap_comm
            and zero.contiguous_gradients
        )
        """Gradients are reduced on a second stream."""
        self.readers = self.stage3 and any(
            hasattr(type(m), "coat_flow_weights") for m in engine.module.modules()
        )
        """Patched modules read weights that ZeRO-3 gathers."""


class Attachment(NamedTuple):
    """One line of the list. The comment above its name is the reason of its place in the order."""

    name: str
    applies: Callable[[Built], Any]
    replaces: Mapping[str, Callable | None]
    """Methods: "engine.", "zero." (engine.optimizer) or "param." (every parameter), the name; each
    with the function that takes its place, or None where ``attach`` puts it there.
    """
    attach: Callable[[Built], object] | None = None


def put(*names: str) -> dict[str, Callable | None]:
    """Methods that an attachment's function replaces."""
    return dict.fromkeys(names)


def drop_when_weights_change(engine: Any) -> None:
    """Drop cached FP8 weights now, since DeepSpeed has just broadcast the weights, and after each
    call that writes any.

    DeepSpeed writes weights through flat buffers, which leaves no trace in the parameters: a cache
    that looks at them alone would keep old codes (``flow/core/weights.py``).
    """
    invalidate_weights()
    invalidate_after(engine, "load_checkpoint", "load_module_state_dict")
    invalidate_after(engine.optimizer, "step", "load_state_dict", "update_lp_params")


def refuse_training(engine: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """In place of methods that train, of an engine that has no optimizer."""
    given = "got 0, at which an engine with CoatAdamW only evaluates"
    refuse("zero_optimization.stage", given, "1, 2 or 3 to train")


def make_checkpoints_whole(b: Built) -> None:
    """Let checkpoints be written atomically, and verified before they are loaded."""
    save_whole_checkpoints(b.engine)
    load_whole_checkpoints(b.engine)


def attach_for_rooms_above(b: Built) -> None:
    """Call the functions of :data:`FOR_NEW_ENGINES` that apply."""
    for applies, work in FOR_NEW_ENGINES:
        if applies(b.engine):
            work(b.engine)


ATTACHMENTS = (
    Attachment(
        # First: everything below asks where parameters lie; right for any optimizer.
        "places under round_robin_gradients",
        lambda b: accessors.deals_out(b.zero),
        put("zero._link_all_hp_params"),
        lambda b: accessors.relink(b.zero),
    ),
    Attachment(
        # Before DeepSpeed's accessors, which are answered by ours; of another optimizer it
        # forgets the parameters.
        "safe_get_full_moment and its companions",
        lambda b: b.is_zero,
        {},
        lambda b: accessors.register(b.zero),
    ),
    Attachment(
        # Before anything for CoatAdamW is replaced: it may refuse.
        "master_weights fit what ZeRO hands over",
        lambda b: b.ours,
        {},
        lambda b: master_weights.check_master_weights(b.zero),
    ),
    Attachment(
        # Before the accessors: parameters are then linked anew, to the shared memory.
        "one memory for weights and master weights",
        lambda b: b.remainders,
        {"zero._restore_from_bit16_weights": master_weights.restore_from_bit16_weights},
        lambda b: master_weights.share_memory(b.zero),
    ),
    Attachment(
        # Anywhere: nothing else is put around these.
        "states are moved to host memory and back",
        lambda b: b.ours and hasattr(b.zero, "offload_states"),
        {
            "zero.offload_states": offload_states.offload_states,
            "zero.reload_states": offload_states.reload_states,
        },
    ),
    Attachment(
        # After the places: whenever ZeRO links parameters, places are corrected first and
        # accessors put on them next.
        "DeepSpeed's accessors, stages 1 and 2",
        lambda b: b.ours and not b.stage3,
        put("zero._link_all_hp_params", "param.get_full_hp_param", "param.set_full_hp_param"),
        lambda b: accessors.after_linking(b.zero, accessors.answer_on_parameters),
    ),
    Attachment(
        # As at stages 1 and 2; nothing is linked here.
        "DeepSpeed's accessors, stage 3",
        lambda b: b.ours and b.stage3,
        put(
            "zero.get_full_hp_param",
            "zero.set_full_hp_param",
            "zero.get_local_fp32_param",
            "zero.set_local_hp_param",
        ),
        lambda b: accessors.answer_on_optimizer(b.zero),
    ),
    Attachment(
        # Before all below that add their checks to loading; nothing else is put around saving.
        "checkpoints that are whole",
        lambda b: b.any_coat,
        put("engine.save_checkpoint", "engine.load_checkpoint"),
        make_checkpoints_whole,
    ),
    Attachment(
        # After the places, which it compares; before the universal loader, whose check is asked
        # second.
        "checks of DeepSpeed's own checkpoints",
        lambda b: b.ours,
        put("engine.load_checkpoint"),
        lambda b: check_native_loads(b.engine),
    ),
    Attachment(
        # After the places, which say what part of a parameter this rank loads.
        "universal checkpoints",
        lambda b: b.universal,
        put("engine.load_checkpoint", "zero._load_universal_checkpoint"),
        lambda b: enable_universal_load(b.engine),
    ),
    Attachment(
        # Anywhere: nothing else is put around it.
        "experts are reduced with BF16_Optimizer",
        lambda b: (
            b.engine_reduces
            and getattr(b.zero, "expert_gradients", None)
            and not b.engine.has_moe_layers
        ),
        {"engine.buffered_allreduce_fallback": experts.reduce_experts},
    ),
    Attachment(
        # Anywhere: nothing else is put around these.
        "experts or layers of other ranks are missed",
        lambda b: b.staged or b.divided,
        {
            "engine.save_16bit_model": experts.refuse_single_file,
            "engine.save_fp16_model": experts.refuse_single_file,
        },
    ),
    Attachment(
        # Anywhere before the last: needs nothing from above.
        "step: infinities are found by the gradient norm",
        lambda b: b.bf16 and not b.uncounted,
        {"zero.check_overflow": step.leave_to_the_norm},
    ),
    Attachment(
        # With the one before it, which relies on it where some gradients are not counted.
        "step: the gradient norm reads gradients once",
        lambda b: b.bf16 and not b.staged,
        {"zero.get_grad_norm_direct": step.gradient_norm},
    ),
    Attachment(
        # Instead of the two before it, never with them.
        "step: infinities are looked for where the norm does not count",
        lambda b: b.uncounted,
        {"zero.has_overflow_partitioned_grads_serial": step.overflow_outside_the_norm},
    ),
    Attachment(
        # Anywhere: needs nothing from above.
        "step: gradients are added without a copy",
        lambda b: b.passes,
        {
            "zero._add_to_grad_partition_buffer": step_gradients.add_without_a_copy,
            "zero._build_compact_grad_partition_buffer": step_gradients.build_zeros,
        },
    ),
    Attachment(
        # After the one before it, by whose sum it adds.
        "step: buckets are reduced where they are",
        lambda b: b.passes,
        {
            "zero.average_tensor": step_gradients.average_later,
            "zero.allreduce_and_copy_with_multiple_ranks": step_gradients.reduce_in_place,
        },
    ),
    Attachment(
        # Anywhere: nothing else is put around it.
        "step: the host does not wait for reductions",
        lambda b: b.overlaps,
        {"zero.independent_gradient_partition_epilogue": step_gradients.wait_on_the_gpu},
    ),
    Attachment(
        # Anywhere before the last: needs nothing from above.
        "step: CoatAdamW unscales and clips",
        lambda b: b.passes,
        {"zero.unscale_and_clip_grads": step.unscale_and_clip_in_the_step},
    ),
    Attachment(
        # Before the last, which wraps `step`: it would be lost here.
        "step: CoatAdamW writes the 16-bit weights",
        lambda b: b.copies and b.zero.dtype in (torch.bfloat16, torch.float16),
        {"zero._optimizer_step": step.step_with_copy, "zero.step": step.step_and_restore},
    ),
    Attachment(
        # Before Megatron's jobs, which wrap `step`.
        "a pipeline stage, driven by a schedule",
        lambda b: b.is_zero and b.staged,
        {
            "engine.forward": partial(pipeline.refuse_part, "forward"),
            "engine.backward": partial(pipeline.refuse_part, "backward"),
            "engine.step": pipeline.step_reduced_gradients,
        },
        lambda b: pipeline.attach_stage(b.engine),
    ),
    Attachment(
        # Anywhere: nothing else is put around it.
        "gradient norm over pipeline stages",
        lambda b: b.is_zero and b.staged and pipeline.has_groups_of_norms(b.zero),
        put("zero.scaled_global_norm"),
        lambda b: pipeline.norm_over_stages(b.engine),
    ),
    Attachment(
        # Anywhere: never with the one before it.
        "gradient norm of a PipelineModule with other groups on other stages",
        lambda b: b.ours and pipeline_module.groups_differ(b.engine),
        put("zero.scaled_global_norm"),
        lambda b: pipeline_module.call_norms_alike(b.engine),
    ),
    Attachment(
        # After the checks of a pipeline stage's calls: jobs are done where a call is accepted.
        "Megatron's jobs around a step's micro-batches",
        lambda b: any(applies(b.engine) for applies, _ in FOR_NEW_ENGINES),
        put("engine.forward", "engine.backward", "engine.step"),
        attach_for_rooms_above,
    ),
    Attachment(
        # Anywhere: nothing else is put around these.
        "an engine of stage 0 evaluates",
        lambda b: b.evaluates,
        {"engine.backward": refuse_training, "engine.step": refuse_training},
    ),
    Attachment(
        # Anywhere: replaces nothing.
        "ranks hear of one another",
        lambda b: (b.ours or b.coat is not None) and rank_and_world()[1] > 1,
        {},
        lambda b: heartbeat.start(b.engine),
    ),
    Attachment(
        # Anywhere: replaces nothing.
        "ZeRO-3 fetches weights for the patched modules that read them",
        lambda b: b.readers,
        {},
        lambda b: fp8_gather.fetch_for_readers(b.module),
    ),
    Attachment(
        # Anywhere: needs nothing from above, and nothing else replaces what fetches parameters.
        "ZeRO-3 gathers weights of the flow as FP8 codes",
        lambda b: b.readers and fp8_gather.flow_weights(b.module),
        put("param.all_gather_coalesced", "param.all_gather", "param.partition"),
        lambda b: fp8_gather.gather_codes(b.module),
    ),
    Attachment(
        # Last: it wraps methods as they stand, replaced or not.
        "cached FP8 weights are dropped",
        lambda b: (
            b.coat is not None
            and b.coat.activation.enabled
            and b.coat.activation.weights == "cached"
        ),
        put(
            "engine.load_checkpoint",
            "engine.load_module_state_dict",
            "zero.step",
            "zero.load_state_dict",
            "zero.update_lp_params",
        ),
        lambda b: drop_when_weights_change(b.engine),
    ),
)


def attach(engine: Any, coat: CoatConfig | None = None, evaluates: bool = False) -> None:
    """Attach to a new engine what applies to it; ``engine.coat_attached`` has the names.

    Args:
        engine: DeepSpeed's.
        coat: the parsed block.
        evaluates: as in :class:`Built`.
    """
    built, names = Built(engine, coat, evaluates), []
    for one in ATTACHMENTS:
        if one.applies(built):
            for name, function in one.replaces.items():
                owner, _, method = name.partition(".")
                if function is not None:
                    instance = getattr(built, owner)
                    setattr(instance, method, types.MethodType(function, instance))
            if one.attach is not None:
                one.attach(built)
            names.append(one.name)
    engine.coat_attached = tuple(names)
