"""CoatAdamW inside Megatron's distributed optimizer: FP8 moments, sharded over data-parallel ranks,
in its checkpoints.

Megatron builds its optimizer with AdamW over the fp32 shards that this rank owns.
:func:`get_megatron_optimizer` puts a CoatAdamW over the same shards in its place, before there are
moments. To Megatron's checkpoints moments stay ``exp_avg`` and ``exp_avg_sq`` in fp32, which AdamW
and other numbers of ranks can load. Rounding them again would not give the same codes; so codes are
saved beside, and a run that has the same shards takes them over.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import nn

from coat_dist.config import CoatConfigError
from coat_dist.config import OptimizerConfig as MomentsConfig
from coat_dist.deepspeed.parallel.replicated_grads import SUMMED
from coat_dist.optim import CoatAdamW
from coat_dist.optim.moments import export_moments, import_moments
from coat_dist.optim.state import LAYOUT_KEYS, check_state, ensure_state
from coat_dist.patching.report import check_settings, is_patched
from coat_dist.patching.settings import REFUSED, Config, check_honoured, coat_block
from coat_dist.ranks import gather

_COMPUTED_OTHERWISE = (
    *(
        "amsgrad",
        "bias_correction",
        "capturable",
        "decoupled_weight_decay",
        "differentiable",
        "foreach",
        "fused",
    ),
    *("maximize", "params", "step"),
)
"""Keys of a parameter group that say how another AdamW computes, or that CoatAdamW sets itself."""
_CODES = "coat_codes"
"""The key of codes in checkpoints; also in ``metadata``, where False leaves them out."""


def get_megatron_optimizer(
    config: Any,
    model_chunks: Sequence[nn.Module],
    *args: Any,
    coat: Config | MomentsConfig,
    **kwargs: Any,
) -> Any:
    """``megatron.core.optimizer.get_megatron_optimizer`` with FP8 moments in its distributed
    optimizer.

    Parameter groups are Megatron's. A group that holds vectors only (by default all biases and
    norms, which do not decay) keeps fp32 moments.

    Args:
        config: Megatron's ``OptimizerConfig``, with ``use_distributed_optimizer`` and
            ``optimizer="adam"``.
        model_chunks, args, kwargs: as Megatron takes them; the chunks are patched already where
            ``coat`` asks for it.
        coat: what :func:`~megatron_patches.patch_model` takes; its ``"optimizer"`` is used. Or that
            part alone, as ``coat_dist.config.OptimizerConfig``.

    Returns:
        Megatron's optimizer; the distributed optimizers in it are
        :class:`CoatDistributedOptimizer`.

    Raises:
        CoatConfigError: a setting of Megatron's with which moments cannot be in FP8, by its name; a
            wrong ``coat``, or one whose ``"activation"`` is not what all chunks were patched with.
    """
    _check_config(config, model_chunks)
    moments = _moments(coat, model_chunks)
    _check_tied(model_chunks, moments)
    built = megatron_optimizer.get_megatron_optimizer(config, model_chunks, *args, **kwargs)
    for index, optimizer in enumerate(getattr(built, "chained_optimizers", [built])):
        if not optimizer.is_stub_optimizer:
            _convert(optimizer, moments, index)
    if isinstance(built, ChainedOptimizer):
        built.__class__ = _Chain
    return built


def _check_config(config: Any, model_chunks: Sequence[nn.Module]) -> None:
    ddp = model_chunks[0].ddp_config
    fsdp = getattr(ddp, "use_megatron_fsdp", False) or getattr(ddp, "use_custom_fsdp", False)
    for key, given, accepted, why in (
        ("optimizer", config.optimizer, "adam", "CoatAdamW then stands in the place of AdamW"),
        (
            "use_distributed_optimizer",
            config.use_distributed_optimizer,
            True,
            "only its shards get FP8 moments",
        ),
        (
            "decoupled_weight_decay",
            getattr(config, "decoupled_weight_decay", True),
            True,
            "CoatAdamW is AdamW",
        ),
        (
            "use_precision_aware_optimizer",
            config.use_precision_aware_optimizer,
            False,
            "Transformer Engine's moments",
        ),
        (
            "optimizer_cpu_offload",
            config.optimizer_cpu_offload,
            False,
            "FP8 moments stay on the GPU",
        ),
        ("use_megatron_fsdp", fsdp, False, "its shards are not those of the distributed optimizer"),
    ):
        if given != accepted:
            raise CoatConfigError(
                f"{key}: got {given!r}, accepted with CoatAdamW: {accepted!r} ({why})"
            )
    hooked = [
        n
        for chunk in model_chunks
        for n, p in chunk.named_parameters()
        if getattr(p, SUMMED, False)
    ]
    if hooked:
        raise CoatConfigError(
            f"model_chunks: got replicated-gradient hooks (on {hooked[0]}), accepted: none, as "
            "Megatron's loop sums "
            "these gradients itself"
        )


def _moments(coat: Config | MomentsConfig, model_chunks: Sequence[nn.Module]) -> MomentsConfig:
    if isinstance(coat, MomentsConfig):
        moments = coat
    else:
        block = coat_block(coat, "coat")
        found = [is_patched(chunk) for chunk in model_chunks]
        patched = all(found) if block.activation.enabled else any(found)
        if block.activation.enabled != patched:
            given = f"got {str(block.activation.enabled).lower()} for a model that is"
            if patched:
                why = f"{given} patched; accepted: true"
            else:
                why = (
                    f"{given} not patched; accepted: false, or call megatron_patches.patch_model "
                    "before the model is wrapped"
                )
            raise CoatConfigError(f"coat.activation.enabled: {why}")
        if patched:
            check_honoured(REFUSED["Megatron's optimizer"], block.activation)
            for chunk in model_chunks:
                check_settings(chunk, block.activation)
        moments = block.optimizer
    if moments.master_weights != "parameter":
        raise CoatConfigError(
            f'coat.optimizer.master_weights: got "{moments.master_weights}", accepted: "parameter" '
            "in Megatron's "
            "distributed optimizer, whose shards are fp32"
        )
    return moments


def _check_tied(model_chunks: Sequence[nn.Module], moments: MomentsConfig) -> None:
    """Refuse FP8 moments where copies of a tied embedding on the first and the last stage would
    drift apart.

    Their gradients are the same. But they draw other noise, and lie elsewhere in their stage's
    buffer, so that shards of data-parallel ranks cut them into other groups of moments. One rank's
    groups are the same.
    """
    shares, stages = (
        "share_embeddings_and_output_weights",
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if stages == 1 or not any(
        getattr(m, shares, False) for chunk in model_chunks for m in chunk.modules()
    ):
        return
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if moments.stochastic_rounding is not False or ranks > 1:
        raise CoatConfigError(
            f"{shares}: got True with pipeline stages and FP8 moments on {ranks} data-parallel "
            "ranks, where copies of "
            "the embedding would drift apart; accepted: False; or one data-parallel rank with "
            '"stochastic_rounding": '
            "false; or megatron_patches.initialize and train_batch (DeepSpeed's ZeRO-1), which "
            "keep them equal"
        )


def _convert(optimizer: Any, moments: MomentsConfig, index: int) -> None:
    old = optimizer.optimizer.param_groups
    matrices = [any(p.dim() > 1 for p in ranges["params"]) for ranges in optimizer.opt_group_ranges]
    everyone = gather(matrices, optimizer.data_parallel_group)
    groups = [
        {
            **{key: value for key, value in group.items() if key not in _COMPUTED_OTHERWISE},
            "params": group["params"],
            "moments": "fp8" if any(of_rank[i] for of_rank in everyone) else "fp32",
        }
        for i, group in enumerate(old)
    ]
    optimizer.optimizer = _Inner(groups, **moments.model_dump())
    optimizer.__class__ = CoatDistributedOptimizer
    # Transformer Engine's have another way.
    if not optimizer._get_fp8_params_and_shard_fp32_from_fp8()[0]:
        shards = zip(
            optimizer.shard_fp32_from_float16_groups, optimizer.shard_float16_groups, strict=True
        )
        optimizer.optimizer.copies = {
            p: low for both in shards for p, low in zip(*both, strict=True)
        }
    optimizer.coat_index, optimizer.coat_codes_elsewhere = index, False


class _Inner(CoatAdamW):
    """CoatAdamW with the state dict that Megatron's distributed optimizer expects: options and the
    count of steps.

    Moments take another way, :class:`CoatDistributedOptimizer`.
    """

    def steps(self) -> int:
        return max((state["step"] for state in self.state.values() if state), default=0)

    def state_dict(self) -> dict[str, Any]:
        whole, step = super().state_dict(), self.steps()
        indices = [i for group in whole["param_groups"] for i in group["params"]] or [0]
        groups = [{**group, "step": step} for group in whole["param_groups"]]
        return {
            "state": {i: {"step": torch.tensor(float(step))} for i in indices},
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over options but for those that say how moments are stored, and the count of
        steps.
        """
        saved = state_dict["param_groups"]
        for group, new in zip(self.param_groups, saved, strict=True):
            group.update(
                {k: v for k, v in new.items() if k in group and k not in (*LAYOUT_KEYS, "params")}
            )
            for p in group["params"]:
                ensure_state(self.state, p, group)["step"] = int(new["step"])


class _Chain(ChainedOptimizer):
    """Megatron's chain, whose optimizers clip gradients as the step reads them; gradients stay as
    they were.

    The step is started before the host waits for the norm, which :meth:`step` returns: the GPU has
    work meanwhile.
    """

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        if self.prepare_grads():
            return False, None, None
        norm, limit = (
            self._norm(),
            self.config.clip_grad if self.config.clip_grad > 0.0 else math.inf,
        )
        on_host = torch.empty_like(norm, device="cpu", pin_memory=norm.is_cuda).copy_(
            norm, non_blocking=True
        )
        arrived = torch.cuda.current_stream().record_event() if norm.is_cuda else None
        # 1 for a norm that is not a number.
        factor = torch.fmin(limit / (norm + 1e-6), torch.ones_like(norm)).float()
        for optimizer in self.chained_optimizers:
            if optimizer.get_parameters():  # a rank may have none
                optimizer.optimizer.grad_factor = factor
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        done = self.step_with_ready_grads()
        if arrived is not None:
            arrived.synchronize()
        return done, on_host.item(), zeros

    def _norm(self) -> torch.Tensor:
        """What ``get_grad_norm`` returns, in fp64 on the device."""
        own = self.chained_optimizers
        shared = len(own) == 1 or self.grads_states_parallel_group_is_shared()
        parts = [own] if shared else [[optimizer] for optimizer in own]
        squares, device = [], "cuda" if torch.cuda.is_available() else "cpu"
        for part in parts:
            grads = [
                grad for optimizer in part for grad in optimizer.get_main_grads_for_grad_norm()
            ]
            square = (
                torch.nn.utils.get_total_norm(grads).square()
                if grads
                else torch.zeros((), device=device)
            )
            dist.all_reduce(square, group=part[0].get_grad_stats_parallel_group())
            squares.append(square.double())
        return torch.stack(squares).sum().sqrt()


class CoatDistributedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer over a CoatAdamW; made by :func:`get_megatron_optimizer`.

    The step writes 16-bit weights too, for which Megatron has a pass of its own, as for clipping;
    and the norm of gradients does not wait for the GPU at every parameter, as Megatron's does
    without Transformer Engine and Apex.
    """

    def _copy_main_params_to_model_params(self) -> None:
        if not self.optimizer.copies:  # else the step has written them
            super()._copy_main_params_to_model_params()

    def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """The norm of them, in their place: its norm is theirs."""
        grads = super().get_main_grads_for_grad_norm()
        return [torch.nn.utils.get_total_norm(grads).reshape(1)] if grads else []

    def _get_main_param_and_optimizer_states(
        self, model_param: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        p, group = self._shard(model_param)
        first, second = export_moments(p, ensure_state(self.optimizer.state, p, group), group)
        return {"param": p, "exp_avg": first, "exp_avg_sq": second}

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(
        self, model_param: torch.Tensor, tensors: dict[str, Any]
    ) -> None:
        p, group = self._shard(model_param)
        p.copy_(tensors["param"])
        moments = (tensors["exp_avg"].float(), tensors["exp_avg_sq"].float())
        self.optimizer.state[p] = import_moments(p, group, *moments, step=self.optimizer.steps())

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any] | None = None,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """As Megatron's, and ``"coat_codes"``: this rank's codes, which only the same shards can
        load.

        To load a checkpoint of another number of data-parallel ranks, or of another AdamW, pass
        ``metadata={..., "coat_codes": False}`` here: moments are then rounded from fp32.
        """
        self.coat_codes_elsewhere = True
        try:
            state_dict = super().sharded_state_dict(
                model_sharded_state_dict or {}, is_loading, sharding_type, metadata
            )
        finally:
            self.coat_codes_elsewhere = False
        if (metadata or {}).get(_CODES, True):
            group = self.data_parallel_group
            state_dict[_CODES] = ShardedObject(
                f"optimizer.{_CODES}_{self.coat_index}.dp_group_idx_{self.data_parallel_group_idx}.dp_{group.size()}",
                self._codes(),
                (group.size(),),
                (group.rank(),),
                replica_id=self.distributed_optimizer_instance_id,
            )
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != _CODES})
        self._load_codes(state_dict.get(_CODES))

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> dict[Any, Any] | None:
        """As Megatron's, with the codes of all data-parallel ranks on the first one."""
        state = super().get_parameter_state_dp_zero(*args, **kwargs)
        if not self.coat_codes_elsewhere:
            group = self.data_parallel_group_gloo
            everyone: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
            dist.gather_object(
                self._codes(), everyone, dst=dist.get_global_rank(group, 0), group=group
            )
            if state is not None:
                state[_CODES] = everyone
        return state

    def load_parameter_state_from_dp_zero(self, state_dict: Any, **options: Any) -> None:
        super().load_parameter_state_from_dp_zero(state_dict, **options)
        group = self.data_parallel_group_gloo
        everyone = (state_dict or {}).get(_CODES) or []
        saved = len(everyone) or group.size()
        everyone = everyone if len(everyone) == group.size() else [None] * group.size()
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, everyone, src=dist.get_global_rank(group, 0), group=group)
        if saved != group.size():
            _warn_rounded(f"{saved} data-parallel ranks, here are {group.size()}")
        self._load_codes(mine[0])

    def _shard(self, model_param: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """The fp32 shard of a parameter that this rank owns, and its group."""
        index, order = self.model_param_group_index_map[model_param]
        group = self.optimizer.param_groups[index]
        return group["params"][order], group

    def _shards(self) -> Iterator[tuple[list[int], torch.Tensor, dict[str, Any]]]:
        """What each shard is of its parameter (elements of that, first, end), the shard, its
        group.
        """
        for model_param in self.model_param_gbuf_map:
            place = self._get_model_param_range_map(model_param)["param"]
            yield [model_param.numel(), place.start, place.end], *self._shard(model_param)

    def _layout(self) -> list[Any]:
        """What has to be equal where codes are taken over."""
        return [
            [*place, *(group[key] for key in LAYOUT_KEYS)] for place, _, group in self._shards()
        ]

    def _codes(self) -> dict[str, Any]:
        states = [ensure_state(self.optimizer.state, p, group) for _, p, group in self._shards()]
        plain = [
            {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
            for state in states
        ]
        return {"layout": self._layout(), "states": plain}

    def _load_codes(self, codes: dict[str, Any] | None) -> None:
        if codes is None:
            return
        if codes["layout"] != self._layout():
            _warn_rounded("other shards or formats")
            return
        for i, (saved, (_, p, group)) in enumerate(
            zip(codes["states"], self._shards(), strict=True)
        ):
            check_state(saved, p, group, f"{_CODES}: shard {i}")
            self.optimizer.state[p] = {
                k: v.to(p.device, copy=True) if isinstance(v, torch.Tensor) else v
                for k, v in saved.items()
            }


def _warn_rounded(why: str) -> None:
    warnings.warn(
        f"the checkpoint's codes are of {why}: moments were rounded again from fp32", stacklevel=3
    )
