"""Layer specification for GPT models that need neither Transformer Engine nor Apex.

Like megatron-core's local spec, except for what that lacks: norms that work under sequence
parallelism (the final one too) or have no parameters, and SDPA as core attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.parallel_state import get_expert_model_parallel_rank
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from ..compat import check_version, fc1_params
from ..config.config_check import why_not_built
from .attention import CompactSelfAttention
from .core_attention import SDPA
from .grouped import GroupedExperts
from .norm import AllHeadsNorm, Norm
from .post_norm import PostNormTransformerLayer


def gpt_layer_spec(
    config: TransformerConfig,
    *,
    affine: bool = True,
    vp_stage: int | None = None,
    norm_placement: Literal["pre", "post"] = "pre",
    norm_all_heads: bool = False,
    attention_output_bias: bool = False,
    attn_mask_type: AttnMaskType = AttnMaskType.causal,
) -> ModuleSpec:
    """The ``transformer_layer_spec`` of a ``GPTModel``, dense or with experts; or of a block of
    such layers.

    Args:
        config: every field is honoured, refused, or has no meaning here:
            :mod:`megatron_patches.config.fields`. Experts are a ``SequentialMLP``, or with
            ``moe_grouped_gemm`` a ``GroupedMLP`` that needs no other package
            (:class:`~megatron_patches.layers.grouped.GroupedExperts`).
        affine: False for norms without parameters (OLMo). Query and key norms always have them.
        vp_stage: as in Megatron, with interleaved pipeline stages.
        norm_placement: "post" for norms after attention and MLP, x + norm(f(x)) (OLMo-2), in place
            of those before.
        norm_all_heads: RMSNorm on queries and keys over all heads together (OLMo-2).
            ``config.qk_layernorm``, from which Megatron concludes that their weights are
            replicated, stays False.
        attention_output_bias: a bias of linear_proj alone; ``config.add_bias_linear`` gives all
            linears one.
        attn_mask_type: ``AttnMaskType.no_mask`` for attention in both directions, as in a vision
            transformer: ``TransformerBlock(config, gpt_layer_spec(config, attn_mask_type=...))`` is
            its layers and final norm.

    Raises:
        ValueError: a field of ``config`` that would be ignored, by its key; another
            ``norm_placement``.
    """
    check_version()
    if (reason := why_not_built(config)) is not None:
        raise ValueError(reason)
    if norm_placement not in ("pre", "post"):
        raise ValueError(f"norm_placement: got {norm_placement!r}, accepted: 'pre', 'post'")
    norm = ModuleSpec(module=Norm, params={"affine": affine})
    layer = _layer(norm, affine, norm_placement)
    layer.submodules.self_attention = _attention(
        config, attn_mask_type, norm_all_heads, attention_output_bias
    )
    fc1 = ModuleSpec(module=ColumnParallelLinear, params=fc1_params(config))
    dense = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=RowParallelLinear)
    )
    mlps = [_experts(config) if moe else dense for moe in _expert_layers(config, vp_stage)]
    # A block instead of a layer, because a bare layer spec leaves the final norm to Megatron's
    # choice.
    layers = [_with_mlp(layer, mlp) for mlp in mlps]
    return ModuleSpec(
        module=TransformerBlock,
        submodules=TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm),
    )


def _experts(config: TransformerConfig) -> ModuleSpec:
    spec = get_moe_module_spec(
        use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False
    )
    if config.moe_grouped_gemm:
        spec.submodules.experts = ModuleSpec(module=GroupedExperts)
    if config.expert_model_parallel_size > 1 and config.use_cpu_initialization:
        spec.submodules.experts.module = _OfAllExperts
    return spec


class _OfAllExperts:
    """Builds all experts and keeps those of this rank: on the CPU models of all expert-parallel
    sizes start equal.
    """

    def __new__(
        cls, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any
    ) -> Any:
        kind = GroupedExperts if config.moe_grouped_gemm else SequentialMLP
        built = kind(config.num_moe_experts, config, *args, **kwargs)
        rank, ranks = get_expert_model_parallel_rank(), config.num_moe_experts // num_local_experts
        if not config.moe_grouped_gemm:
            built.local_experts = built.local_experts[rank * num_local_experts :][
                :num_local_experts
            ]
        for weight, dim in (
            ((built.weight1, 1), (built.weight2, 0)) if config.moe_grouped_gemm else ()
        ):
            shape = list(weight.shape)
            shape[dim] //= ranks
            weight.data = weight.data.reshape(-1).chunk(ranks)[rank].clone().view(shape)
        built.num_local_experts = num_local_experts
        return built


def _expert_layers(config: TransformerConfig, vp_stage: int | None) -> list[bool]:
    """For each layer built on this rank, whether it has experts."""
    count, frequency = get_num_layers_to_build(config, vp_stage), config.moe_layer_freq
    if config.num_moe_experts is None:
        return [False] * count
    everywhere = (
        frequency
        if isinstance(frequency, list)
        else [i % frequency == 0 for i in range(config.num_layers)]
    )
    if len(everywhere) != config.num_layers:
        raise ValueError(
            f"moe_layer_freq: got {len(everywhere)} layers, accepted: {config.num_layers}"
        )
    first = get_transformer_layer_offset(config, vp_stage)
    return [bool(moe) for moe in everywhere[first : first + count]]


def _attention(
    config: TransformerConfig, mask: AttnMaskType, norm_all_heads: bool, output_bias: bool
) -> ModuleSpec:
    """Self-attention with SDPA, and the norms on queries and keys that are asked for."""
    l2 = getattr(config, "qk_l2_norm", False)
    head_norms: list[Any] = [Norm if config.qk_layernorm else IdentityOp] * 2
    if l2:  # Llama 4's: RMSNorm without a weight; it wins over qk_layernorm
        head_norms = [
            ModuleSpec(module=Norm, params={"affine": False, "normalization": "RMSNorm"})
        ] * 2
    if norm_all_heads:
        if config.qk_layernorm or l2:
            raise ValueError(
                "qk_layernorm, qk_l2_norm: got True, accepted: False with norm_all_heads"
            )
        counts = config.num_attention_heads, config.num_query_groups
        head_norms = [ModuleSpec(module=AllHeadsNorm, params={"heads": count}) for count in counts]
    return ModuleSpec(
        module=CompactSelfAttention,
        params={"attn_mask_type": mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=SDPA,
            linear_proj=_WithBias if output_bias else RowParallelLinear,
            q_layernorm=head_norms[0],
            k_layernorm=head_norms[1],
        ),
    )


class _WithBias:
    """Builds a :class:`RowParallelLinear` that has a bias, whatever the configuration says of
    all linears.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return RowParallelLinear(*args, **kwargs | {"bias": True})


def _layer(norm: ModuleSpec, affine: bool, placement: str) -> ModuleSpec:
    """A layer without attention and MLP."""
    if placement == "post":
        before, layer = (
            IdentityOp,
            ModuleSpec(module=PostNormTransformerLayer, params={"affine": affine}),
        )
    else:
        before, layer = norm, ModuleSpec(module=TransformerLayer)
    layer.submodules = TransformerLayerSubmodules(
        input_layernorm=before,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=before,
        mlp_bda=get_bias_dropout_add,
    )
    return layer


def _with_mlp(layer: ModuleSpec, mlp: ModuleSpec) -> ModuleSpec:
    # Names of norms in Megatron's distributed checkpoints, for exchange with Transformer Engine
    # models.
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if mlp.module is MLP:  # a router's norm has its own name there as well
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    submodules = replace(layer.submodules, mlp=mlp, sharded_state_dict_keys_map=names)
    return replace(layer, submodules=submodules)
