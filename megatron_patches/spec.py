"""Layer specification for GPT models that need neither Transformer Engine nor Apex.

Like megatron-core's local spec, except for what that lacks: norms that work under sequence parallelism (the final one
too) or have no parameters, and SDPA as core attention.
"""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from packaging.version import Version

from .attention import SDPA, CompactSelfAttention
from .compat import check_version
from .norm import Norm

__all__ = ["gpt_layer_spec"]


def gpt_layer_spec(config: TransformerConfig, *, affine: bool = True, vp_stage: int | None = None) -> ModuleSpec:
    """The ``transformer_layer_spec`` of a dense ``GPTModel``.

    Args:
        config: ``normalization``, ``qk_layernorm`` and the sizes are read from it.
        affine: False for norms without parameters (OLMo). Query and key norms always have them.
        vp_stage: as in Megatron, with interleaved pipeline stages.

    Raises:
        ValueError: experts or multi-latent attention, by the configuration key.
    """
    version = check_version()
    for key, accepted in (("num_moe_experts", None), ("multi_latent_attention", False)):
        given = getattr(config, key, accepted)
        if given != accepted:
            raise ValueError(f"{key}: got {given!r}, accepted: {accepted!r} (use Megatron's own spec)")
    norm = ModuleSpec(module=Norm, params={"affine": affine})
    head_norm = Norm if config.qk_layernorm else IdentityOp
    fc1 = ColumnParallelLinear
    if config.gated_linear_unit and Version(version) < Version("0.16rc0"):
        # Gate and up are initialized as two weights, as later versions do: a model starts the same at every TP size.
        fc1 = ModuleSpec(module=ColumnParallelLinear, params={"stride": 2})
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=CompactSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=SDPA,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=RowParallelLinear)),
            mlp_bda=get_bias_dropout_add,
            # Names of norms in Megatron's distributed checkpoints, for exchange with Transformer Engine models.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )
    # A block instead of a layer, because a bare layer spec leaves the final norm to Megatron's choice.
    layers = [layer] * get_num_layers_to_build(config, vp_stage)
    return ModuleSpec(
        module=TransformerBlock, submodules=TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
    )
