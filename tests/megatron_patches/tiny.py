"""GPT models small enough for tests, their losses and gradients, and how two of these compare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from coat_dist import flow
from megatron_patches import gpt_layer_spec, tensor_parallel

HIDDEN, HEADS, FFN, VOCAB, SEQ, BATCH = 256, 4, 256, 512, 32, 2
BLOCKS = [f"decoder.layers.{i}.{b}" for i in range(2) for b in ("self_attention", "mlp")]
"""What there is to patch in a model of two layers."""


TINY: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    ffn_hidden_size=FFN,
    gated_linear_unit=True,
    activation_func=F.silu,
    add_bias_linear=False,
    normalization="RMSNorm",
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    use_cpu_initialization=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    persist_layer_norm=False,
    layernorm_epsilon=1e-5,
)


NARROW: dict[str, Any] = dict(hidden_size=128, ffn_hidden_size=128)
SMALL: dict[str, Any] = NARROW | dict(gpt={"vocab_size": 64})
"""Changes for tests of equal bits that train many models: a fifth of the parameters, and every
token of a batch.
"""


FP32: dict[str, Any] = dict(bf16=False, params_dtype=torch.float32, pipeline_dtype=torch.float32)
FULL: dict[str, Any] = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
OLMO2: dict[str, Any] = {"spec": {"norm_placement": "post", "norm_all_heads": True}}
"""Norms after attention and MLP, and on queries and keys over all heads."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": dict(
        normalization="LayerNorm",
        gated_linear_unit=False,
        activation_func=F.gelu,
        add_bias_linear=True,
        hidden_dropout=0.2,
        attention_dropout=0.2,
        gpt={"share_embeddings_and_output_weights": True},
    ),
    "experts": dict(num_moe_experts=4, moe_router_topk=2, moe_shared_expert_intermediate_size=64),
    "olmo2": OLMO2,
}


def selective(*modules: str) -> dict[str, Any]:
    """Recomputation of these modules."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def tiny_config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**TINY | changes)


def tiny_gpt(
    *,
    megatron_spec: bool = False,
    affine: bool = True,
    seed: int = 5,
    gpt: dict | None = None,
    spec: dict | None = None,
    later: dict | None = None,
    **changes: Any,
):
    """A model, on the GPU where there is one. Weights depend on ``seed``, not on the
    tensor-parallel size.

    ``gpt`` and ``spec`` are further arguments of ``GPTModel`` and ``gpt_layer_spec``. ``later`` is
    set on the built configuration, whose own checks refuse some values together.
    """
    config = tiny_config(**changes)
    for name, value in (later or {}).items():
        setattr(config, name, value)
    if megatron_spec:
        layers = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            qk_l2_norm=getattr(config, "qk_l2_norm", False),
            normalization=config.normalization,
        )
    else:
        layers = gpt_layer_spec(config, affine=affine, **spec or {})
    torch.manual_seed(seed)
    options: dict[str, Any] = dict(
        vocab_size=VOCAB, max_sequence_length=SEQ, position_embedding_type="rope"
    )
    model = GPTModel(config, layers, **options | (gpt or {})).to(config.params_dtype)
    with torch.no_grad():
        # Norms start as ones, biases as zeros: a mix-up would go unseen.
        for parameter in model.parameters():
            if parameter.dim() == 1 and not getattr(parameter, "tensor_model_parallel", False):
                parameter.add_(torch.randn(parameter.shape).mul_(0.2))
    return model.cuda() if torch.cuda.is_available() else model


def tiny_batch(
    seed: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions, each [BATCH, SEQ]: sequences in which the next token can be
    learnt.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 64, (BATCH, 1), generator=generator)
    step = torch.randint(1, 8, (BATCH, 1), generator=generator)
    text = (start + step * torch.arange(SEQ + 1)) % 64
    return (
        text[:, :-1].to(device),
        text[:, 1:].to(device),
        torch.arange(SEQ, device=device).expand(BATCH, -1),
    )


def tiny_loss(
    model: torch.nn.Module, batch: tuple[torch.Tensor, ...], megatron_spec: bool = False
) -> torch.Tensor:
    """Mean loss. Megatron's own core attention wants the causal mask spelled out."""
    tokens, labels, positions = batch
    mask = None
    if megatron_spec:
        mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool, device=tokens.device).triu(1)
    logits = model(tokens, positions, mask)
    tp = tensor_parallel(getattr(model, "module", model).output_layer)
    return flow.vocab_parallel_cross_entropy(logits, labels, tp).mean()


Gradients = dict[str, torch.Tensor | None]


def labelled_loss(
    model: torch.nn.Module, batch: tuple[torch.Tensor, ...], _: bool = False
) -> torch.Tensor:
    """Mean of the losses that the model computes itself, given labels: the chunked loss replaces
    them.
    """
    tokens, labels, positions = batch
    return model(tokens, positions, None, labels=labels).mean()


def gradients(
    model: torch.nn.Module,
    batch: tuple[torch.Tensor, ...],
    megatron_spec: bool = False,
    loss_of: Any = tiny_loss,
) -> tuple[float, Gradients]:
    """Loss, and gradients by name, whole ones of sharded parameters. Dropout is always drawn
    from the same state.
    """
    model_parallel_cuda_manual_seed(3)
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, batch, megatron_spec)
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
    return loss.item(), {n: None if g is None else g.clone() for n, g in whole.items()}


def assert_equal(found: tuple[float, Gradients], expected: tuple[float, Gradients]) -> None:
    """The same loss and, on the CPU, gradients to the bit: a GPU's attention backward is not
    deterministic.
    """
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, wanted in expected[1].items():
        gradient = found[1][name]
        assert (gradient is None) == (wanted is None), name
        assert gradient is None or gradient.is_cuda or torch.equal(gradient, wanted), name


def assert_close(
    found: tuple[float, Gradients], expected: tuple[float, Gradients], cosine: float = 0.97
) -> None:
    """What docs/megatron.md promises of FP8: loss within 0.5 % of BF16, gradients within 14
    degrees.
    """
    assert found[0] == pytest.approx(expected[0], rel=5e-3)
    assert found[1].keys() == expected[1].keys()
    for name, wanted in expected[1].items():
        gradient = found[1][name]
        assert gradient is not None and wanted is not None and gradient.dtype == wanted.dtype, name
        a, b = gradient.flatten().double(), wanted.flatten().double()
        assert F.cosine_similarity(a, b, dim=0) > cosine and 0.8 < a.norm() / b.norm() < 1.25, name


def state(model: torch.nn.Module) -> list[Any]:
    """All that patching might change: classes and attributes of every module."""
    return [(type(m), dict(vars(m))) for m in model.modules()]
