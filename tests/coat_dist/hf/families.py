"""A toy model of every family of the installed transformers, made by one rule.

:data:`SIZES` sets each size that a configuration has; names differ, their meaning does not. Sizes
are the smallest at which the linears of a layer run in FP8: both sizes at least 256, multiples of
16. :data:`CHANGES` lists families in which the rule contradicts itself, and :data:`UNBUILT` those
that it cannot build, with the reason.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

WIDTH, HEADS, HEAD, LAYERS, VOCABULARY, PATCH = 256, 4, 64, 2, 256, 14

# fmt: off
_KEYS = (
    (WIDTH,
        "hidden_size n_embd d_model dim_model emb_dim input_embedding_size embedding_size "
        "output_embedding_size word_embed_proj_dim lru_width attention_hidden_size mamba_d_ssm "
        "intermediate_size intermediate_size_mlp moe_intermediate_size dense_intermediate_size "
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size embed_dim n_inner "
        "shared_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size dff "
        "ffn_dim dim_ff d_ff ffn_hidden_size feed_forward_size decoder_ffn_dim encoder_ffn_dim "
        "d_inner embedding_dim q_lora_rank kv_lora_rank o_lora_rank router_hidden_size "
        "projection_dim hidden_size_global out_hidden_size"),
    (HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
        "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "swa_num_attention_heads index_n_heads num_key_value_heads num_kv_heads "
        "swa_num_key_value_heads num_query_groups linear_num_key_heads linear_num_value_heads "
        "linear_num_heads"),
    (HEAD,
        "head_dim attention_head_dim swa_head_dim kv_channels d_kv dim_head d_head index_head_dim "
        "linear_key_head_dim linear_value_head_dim linear_head_dim qk_nope_head_dim v_head_dim "
        "attention_head_size rotary_dim"),
    (LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
        "num_encoder_layers num_decoder_layers num_blocks depth"),
    (VOCABULARY,
        "vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input "
        "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length "
        "original_max_position_embeddings max_source_positions max_target_positions"),
    (32, "qk_rope_head_dim time_step_rank mamba_dt_rank"),
    (16,
        "chunk_size mamba_chunk_size sliding_window window_size attention_window_size "
        "sliding_window_size local_attention ssm_state_size state_size mamba_d_state "
        "mamba_n_heads mamba_num_heads n_mamba_heads mamba_head_dim mamba_d_head mamba_headdim"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "type_vocab_size"),
    (1,
        "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group n_groups "
        "first_k_dense_replace num_dense_layers num_expert_group decoder_sparse_step "
        "mamba_n_groups mamba_ngroups num_nextn_predict_layers num_mtp_layers expand "
        "mamba_expand bos_token_id decoder_start_token_id"),
    (0, "pad_token_id"),
    (3, "eos_token_id"),
    (5, "image_token_id image_token_index"),
    (6, "video_token_id"),
    (7, "vision_start_token_id boi_token_id boi_token_index"),
    (8, "vision_end_token_id eoi_token_id eoi_token_index"),
    (PATCH, "patch_size"),
    (4 * PATCH, "image_size"),
)
# fmt: on
_NOISE = re.compile("drop|jitter")
FLAGS = {"is_decoder": True, "use_cache": False}
SIZES = {key: size for size, keys in _KEYS for key in keys.split()}

GROUPED = {"head_dim": 2 * HEAD, "num_key_value_heads": HEADS // 2}
"""Where heads may be wider than a share of the width, two of them have one key."""
LATENT = {"head_dim": 32, "qk_head_dim": HEAD + 32}
"""Attention with latent keys and values, where 32 channels of each head rotate."""

NARROW = {"head_dim": HEAD, "num_key_value_heads": HEADS}
"""Of families that compute the width of a head from the model's."""
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
SHARED_ATTENTION = {
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
    "num_hidden_layers": 6,
    "hybrid_layer_ids": [2, 5],
    "attention_hidden_size": 2 * WIDTH,
    "attention_head_dim": 2 * HEAD,
}
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 256,
        "patcher_config": NARROW,
        "encoder_config": NARROW,
        "decoder_config": NARROW,
        "global_config": NARROW,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTARY}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": HEAD + 32},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "helium": NARROW,
    "internvl": {"vision_config": {"image_size": [4 * PATCH] * 2, "patch_size": [PATCH] * 2}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 4, "moe_topk": 8, "num_experts_per_tok": 8},
    "mamba2": {"num_heads": 16, "head_dim": 16},
    "mistral3": {"vision_config": NARROW},
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": {**ROTARY, "mrope_section": [8, 12, 12]}},
        "vision_config": {"window_size": 4 * PATCH},
    },
    "qwen4_exp_text": {
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 2 * HEAD,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
    },
    "recurrent_gemma": {"intermediate_size": 2 * WIDTH},
    "reformer": {"axial_pos_embds_dim": (128, 128), "axial_pos_shape": (4, 8)},
    "smolvlm": {"scale_factor": 2},
    "t5": {"decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "zamba": SHARED_ATTENTION,
    "zamba2": SHARED_ATTENTION,
    "zaya": {"num_experts_per_tok": 1},
}
"""What the rule gets wrong."""
UNBUILT = {
    "dots3_note": "its language model is dots3_note_text",
    "gemma3n": "needs timm",
    "gemma4_assistant": "reads keys and values of another model",
    "gemma4_unified_assistant": "reads keys and values of another model",
    "git": "has a loss for texts with an image only",
    "musicgen": "reads codes of audio",
    "musicgen_melody": "reads codes of audio",
}
SHARP = ("gemma4",)
"""Beginnings of families whose products of queries and keys are not divided by their size: without
smaller norms, attention at random weights turns over at every rounding.
"""
FLOAT32 = {"reformer", "xlnet", "xlstm"}
"""Families whose own code fails in BF16."""

CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
)
"""Number of experts for each token."""


def sizes(config: Any, changes: dict[str, Any], chosen: int) -> dict[str, Any]:
    """What the rule gives to a configuration like this one, inner configurations included."""
    known = {**config.to_dict(), **dict.fromkeys(getattr(config, "attribute_map", ()))}
    rule = SIZES | dict.fromkeys(CHOSEN, chosen)
    if "kv_lora_rank" in known:
        rule |= LATENT
    elif "head_dim" in known:
        rule |= GROUPED
    if "layer_types" in known:
        rule |= {key: 4 for key in rule if rule[key] == LAYERS and "layers" in key}
    given = {key: size for key, size in rule.items() if key in known}
    given |= {key: 0.0 for key, value in known.items() if _NOISE.search(key) and value}
    given |= {key: value for key, value in FLAGS.items() if key in known}
    if known.get("layer_types"):
        kinds = list(dict.fromkeys(known["layer_types"]))
        given["layer_types"] = [kinds[i % len(kinds)] for i in range(4)]
    given |= changes
    for key in getattr(config, "sub_configs", {}):
        inner = getattr(config, key, None)
        if inner is not None:
            own = {**CHANGES.get(inner.model_type, {}), **changes.get(key, {})}
            given[key] = {"model_type": inner.model_type, **sizes(inner, own, chosen)}
    return given


IMAGES = {
    "gemma3": 4,
    "internvl": 4,
    "llava": 16,
    "mistral3": 4,
    "qwen2_5_vl": 4,
    "qwen3_5": 4,
    "qwen3_vl": 4,
    "smolvlm": 4,
}
"""Families that read images with texts, and the tokens of an image of 4 x 4 patches."""
OTHERS = {
    **dict.fromkeys(("bert", "modernbert", "roberta"), "SequenceClassification"),
    **dict.fromkeys(("clip", "siglip", "vit"), "ImageClassification"),
    **dict.fromkeys(("bart", "t5"), "Seq2SeqLM"),
    "whisper": "SpeechSeq2Seq",
}
"""Families that are no decoders alone, and what their models are for."""
FAMILIES = (
    *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    *(f"{family}:ImageTextToText" for family in IMAGES),
    *(f"{family}:{purpose}" for family, purpose in OTHERS.items()),
)


def toy(family: str, chosen: int = 2) -> Any:
    """A model in training, in which each token goes to so many of four experts, and a batch for it.

    ``family`` is a name of :data:`FAMILIES`.
    """
    name, _, purpose = family.partition(":")
    cls = CONFIG_MAPPING[name]
    config = cls(**sizes(cls(), CHANGES.get(name, {}), chosen))
    dtype = torch.float32 if name in FLOAT32 else torch.bfloat16
    torch.manual_seed(0)
    auto = getattr(transformers, f"AutoModelFor{purpose or 'CausalLM'}")
    model = auto.from_config(config, dtype=dtype).train()
    for key, p in model.named_parameters():
        if "q_norm" in key and name.startswith(SHARP):
            p.data.mul_(0.02)
    ids = torch.randint(10, VOCABULARY, (2, 32))
    batch = {model.main_input_name: ids, "labels": ids}
    if purpose.endswith("Classification"):
        # Of two classes the gradients of two alike inputs would cancel, and rounding remain.
        batch["labels"] = torch.tensor([1, 1])
    if purpose == "SpeechSeq2Seq":
        batch["input_features"] = torch.randn(2, config.num_mel_bins, 2 * VOCABULARY, dtype=dtype)
    if purpose.startswith("Image"):
        batch |= _images(name, config, dtype)
    if purpose == "ImageTextToText":
        ids[:, 4 : 4 + IMAGES[name]] = 5
        image = ids == 5
        batch["labels"] = ids.masked_fill(image, -100)
        if name in ("gemma3", "qwen3_5", "qwen3_vl"):
            batch["token_type_ids" if name == "gemma3" else "mm_token_type_ids"] = image.long()
    return model, batch


def _images(family: str, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    vision = getattr(config, "vision_config", config)
    size = 4 * PATCH
    if family.startswith("qwen"):
        patches = torch.randn(2 * 16, 3 * vision.temporal_patch_size * PATCH**2, dtype=dtype)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    shape = (2, 1, 3, size, size) if family == "smolvlm" else (2, 3, size, size)
    given = {"pixel_values": torch.randn(shape, dtype=dtype)}
    if family == "mistral3":
        given["image_sizes"] = torch.tensor([[size, size]] * 2)
    return given
