"""Small Hugging Face folders of every family, with random weights; and a conversion that fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from launch import convert_hf
from launch.convert.weights import Weights

SIZES = dict(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
SMALL = dict(
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=2,
    seq_length=16,
)
"""A model as Megatron describes it."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _rope(theta: float, **scaling) -> dict:
    return {"rope_type": "default", **scaling, "rope_theta": theta}


CASES = {
    "llama2": ("LlamaConfig", dict(num_key_value_heads=4, rms_norm_eps=1e-5)),
    "llama3": ("LlamaConfig", dict(rms_norm_eps=1e-5, rope_parameters=_rope(500000.0, **LLAMA3))),
    "llama_tied": ("LlamaConfig", dict(tie_word_embeddings=True, head_dim=32)),
    "llama_biases": ("LlamaConfig", dict(attention_bias=True, mlp_bias=True, hidden_act="gelu")),
    "llama_attention_bias": ("LlamaConfig", dict(attention_bias=True)),
    "llama_linear": (
        "LlamaConfig",
        dict(rope_parameters=_rope(10000.0, rope_type="linear", factor=2.0)),
    ),
    "mistral": (
        "MistralConfig",
        dict(sliding_window=None, head_dim=16, rope_parameters=_rope(1000000.0)),
    ),
    "mistral_window": ("MistralConfig", dict(sliding_window=16)),
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=True, rope_parameters=_rope(1000000.0))),
    "qwen2_yarn": (
        "Qwen2Config",
        dict(
            rope_parameters=_rope(
                1000000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=16
            )
        ),
    ),
    "qwen3": ("Qwen3Config", dict(head_dim=32, rope_parameters=_rope(1000000.0))),
    "olmo": (
        "OlmoConfig",
        dict(num_key_value_heads=4, tie_word_embeddings=True, pad_token_id=1, eos_token_id=2),
    ),
    "qwen2_heads": ("Qwen2Config", dict(head_dim=8)),
    "olmo2_heads": ("Olmo2Config", dict(head_dim=24, pad_token_id=1, eos_token_id=2)),
    "olmo2": ("Olmo2Config", dict(rms_norm_eps=1e-6, pad_token_id=1, eos_token_id=2)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, rope_parameters=_rope(1000000.0))),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        dict(
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=80,
        )
        | dict(mlp_only_layers=[0]),
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            norm_topk_prob=True,
            head_dim=32,
        ),
    ),
    "qwen3_moe_sums": (
        "Qwen3MoeConfig",
        dict(
            num_experts=4,
            num_experts_per_tok=1,
            moe_intermediate_size=48,
            norm_topk_prob=False,
            num_hidden_layers=4,
        )
        | dict(decoder_sparse_step=2),
    ),
}
"""Configuration classes of transformers, and what differs from ``SIZES``."""


def make(name: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB", **more):
    """Save a model with random weights, none of which is zero or one; returns transformers'
    model.
    """
    import transformers

    kind, options = CASES[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, kind)(**{**SIZES, **options, **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms begin as ones and biases as zeros: a mix-up would go unseen.
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"made": "for a test"}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "special_tokens_map.json").write_text("{}")
    return model


class Given(Weights):
    """Weights from a dict."""

    kind = "a dict"

    def __init__(self, model, tensors, manifest=None):
        self.path, self.model, self.tensors = Path("here"), model, tensors
        self.manifest = manifest or {}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def dtype(self, name):
        return self.tensors[name].dtype

    def read(self, name):
        return self.tensors[name]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder, by the library itself."""
    from safetensors.torch import load_file

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, **values) -> Path:
    """Change keys of config.json."""
    (folder / "config.json").write_text(json.dumps({**config(folder), **values}))
    return folder


def meaning(folder: Path) -> dict:
    """What transformers reads in a config.json, whatever spelling it has."""
    import transformers

    read = transformers.AutoConfig.from_pretrained(folder).to_dict()
    return {k: v for k, v in read.items() if k not in ("transformers_version", "_name_or_path")}


def convert(source, target, *more, status=0):
    argv = ["--from", str(source), "--to", str(target), *map(str, more)]
    assert convert_hf.main(argv) == status


def fails(capsys, source, target, *more):
    """The error, after which nothing is left."""
    capsys.readouterr()
    before = sorted(p.name for p in target.parent.iterdir())
    convert(source, target, *more, status=2)
    assert sorted(p.name for p in target.parent.iterdir()) == before
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("error:") == 1
    return err


def copied(sharded, tmp_path, which):
    return Path(shutil.copytree(sharded / which, tmp_path / which))
