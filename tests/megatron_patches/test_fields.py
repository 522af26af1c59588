"""Every field of TransformerConfig, set to something else.

Honoured: what Megatron's own local spec computes. Refused: an error that names it. Without meaning:
no bit changes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.moe_utils import RandomSTE

from coat_dist.config import ActivationConfig
from megatron_patches import gpt_layer_spec, patch_model, patched
from megatron_patches.compat import older_than
from megatron_patches.config import config_check
from megatron_patches.config.fields import ACCEPTED, KNOWN, WITHOUT_MEANING
from megatron_patches.layers.core_attention import SDPA

from .samples import (
    CORE,
    DECLARED,
    EFFECT,
    EXPERTS,
    INERT,
    KERNELS,
    SELECTIVE,
    SEQ,
    SIZES,
    VOCAB,
)
from .tiny import FULL, tiny_config, tiny_gpt

NEWEST = not older_than("0.16")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 3e-6 if DEVICE == "cpu" else 1e-4  # fp32; a GPU may round products


def build(changes: dict[str, Any], **more: Any) -> GPTModel:
    gpt = {"vocab_size": VOCAB, "max_sequence_length": SEQ} | changes.get("gpt", {})
    model = tiny_gpt(**SIZES | changes | {"gpt": gpt}, **more)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero as they are built
                parameter.normal_()
    return model


@torch.no_grad()
def logits(model: GPTModel) -> torch.Tensor:
    """Logits of a model in training mode; dropout and noise are drawn from the same state each
    time.
    """
    model_parallel_cuda_manual_seed(3)
    torch.manual_seed(11)
    # Of moe_router_force_load_balancing; it would go on where another model stopped.
    RandomSTE.generator = None
    tokens, positions = (
        torch.randint(0, VOCAB, (2, SEQ)).to(DEVICE),
        torch.arange(SEQ, device=DEVICE).expand(2, -1),
    )
    if model.position_embedding_type == "mrope":
        positions = torch.stack([positions, positions // 2, positions // 3])
    core = model.decoder.layers[0].self_attention.core_attention
    mask = (
        None
        if isinstance(core, SDPA)
        else torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool, device=DEVICE).triu(1)
    )
    return model(tokens, positions, mask).float()


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def settable(name: str, accepted: tuple[Any, ...] = ()) -> Any:
    """Something that the field is not by default, and none of ``accepted``."""
    usual = (DECLARED[name].default, *accepted)
    return next(
        v for v in (True, False, "other", 7) if v not in usual and str(v) not in map(str, usual)
    )


def test_fields_table_has_every_field():
    """The table is the recorded list of fields: one that a new Megatron adds, or drops, fails here.

    What to do is in CONTRIBUTING.md. Fields that a supported version still has stay in
    fields.py.
    """
    assert not set(DECLARED) - KNOWN, "fields without a treatment"
    assert not NEWEST or not KNOWN - set(DECLARED)
    assert not {*EFFECT, *CORE, *INERT, *FULL, *SELECTIVE} - KNOWN


def known(table: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, changes in table.items() if set(changes) <= {*DECLARED, "gpt"}]


@pytest.mark.long
@pytest.mark.parametrize("name", known(EFFECT))
def test_gpt_layer_spec_honours_a_field(name):
    """fp32: our spec computes what Megatron's local spec does. Patched, the model changes with
    it.
    """
    changes = EFFECT[name]
    base = EXPERTS if name.startswith("moe_") and changes is not EXPERTS else {}
    plain, theirs, usual = (
        logits(build(changes)),
        logits(build(changes, megatron_spec=True)),
        logits(build(base)),
    )
    # SDPA's kernels draw other noise than a dropout of scores.
    if name != "attention_dropout" or DEVICE == "cpu":
        assert apart(plain, theirs) < (2e-2 if changes.get("bf16") else CLOSE)
    assert apart(plain, usual) > 5e-3, "no effect: nothing was tested"
    model, usual_model = build(changes), build(base)
    for m in (model, usual_model):
        patch_model(m, ActivationConfig())
    flow = logits(model)
    assert apart(flow, logits(usual_model)) > 5e-3
    errors = [apart(flow, plain)]
    # Tokens that take other experts in FP8 are many with one model in twenty.
    if model.config.num_moe_experts:
        for seed in (6, 7):
            model = build(changes, seed=seed)
            plain = logits(model)
            patch_model(model, ActivationConfig())
            errors.append(apart(logits(model), plain))
    assert sorted(errors)[len(errors) // 2] < 0.35, errors  # FP8 with these weights: 0.04 to 0.25


@pytest.mark.parametrize("name", known(CORE))
def test_patch_model_keeps_core_attention(name):
    if name.startswith("window") and DEVICE == "cpu":
        pytest.skip("Megatron makes the mask of its own attention on a GPU")
    plain, usual = (
        logits(build(CORE[name], megatron_spec=True)),
        logits(build({}, megatron_spec=True)),
    )
    assert apart(plain, usual) > 0.05, "no effect: nothing was tested"
    model, other = build(CORE[name], megatron_spec=True), build({}, megatron_spec=True)
    for m in (model, other):
        assert len(patch_model(m, ActivationConfig()).patched) == 4
    assert apart(logits(model), plain) < 0.2
    assert apart(logits(model), logits(other)) > 0.05
    with pytest.raises(ValueError, match="window_size|softmax_type"):
        build(CORE[name])


@pytest.mark.parametrize("recompute", [FULL, SELECTIVE], ids=["full", "selective"])
def test_fields_that_change_nothing_on_one_rank(recompute):
    """All at once, with experts: what Megatron's local spec computes, and what it is without
    them.
    """
    inert = {k: v for k, v in INERT.items() if k in DECLARED} | recompute
    plain = logits(build(inert))
    assert torch.equal(plain, logits(build(EXPERTS)))
    assert apart(plain, logits(build(inert, megatron_spec=True))) < CLOSE
    with (
        patched(model := build(inert), ActivationConfig()),
        patched(usual := build(EXPERTS), ActivationConfig()),
    ):
        assert torch.equal(logits(model), logits(usual))


@pytest.mark.parametrize("where", ["built", "patched"])
def test_fields_without_meaning_change_no_bit(where, monkeypatch):
    """All at once, in a built and in a patched model."""
    # Which Megatron makes itself.
    names = WITHOUT_MEANING[where] & DECLARED.keys() - {"_cpu_offloading_context"}
    values = {n: AttnBackend.unfused if n == "attention_backend" else settable(n) for n in names}
    usual = build({})
    for key in KERNELS:
        monkeypatch.delenv(key, raising=False)
    model = build({}, later=values if where == "built" else None)
    if where == "patched":
        for name, value in values.items():
            setattr(model.config, name, value)
        for m in (model, usual):
            patch_model(m, ActivationConfig())
    assert torch.equal(logits(model), logits(usual))
    for key in KERNELS:
        monkeypatch.delenv(key, raising=False)


@pytest.mark.parametrize("name", [n for n in ACCEPTED["built"] if n in DECLARED])
def test_gpt_layer_spec_refuses_a_field_by_name(name):
    config = tiny_config(**EXPERTS)
    setattr(config, name, settable(name, ACCEPTED["built"][name]))
    with pytest.raises(
        ValueError, match=rf"^{name}: got .*, accepted: .* \(use Megatron's own spec\)$"
    ):
        gpt_layer_spec(config)


def test_patch_model_refuses_a_field_by_name():
    """Nothing is patched, and the reason names the field."""
    model = build({})
    names = [n for n in ACCEPTED["patched"] if n in DECLARED]
    assert len(names) > 5
    for name in names:
        before = getattr(model.config, name)
        setattr(model.config, name, value := settable(name, ACCEPTED["patched"][name]))
        with pytest.raises(ValueError, match="nothing to patch") as error:
            patch_model(model, ActivationConfig())
        assert f"config.{name}={value}" in str(error.value)
        setattr(model.config, name, before)
    patch_model(model, ActivationConfig())


@pytest.mark.parametrize(("name", "value"), [("softmax_scale", 0.5), ("num_query_groups", 2)])
def test_unknown_field_is_refused_where_it_is_set(name, value, monkeypatch):
    """As a field of a newer Megatron would be. Its default is accepted, also where other fields
    determine it.
    """
    monkeypatch.setattr(config_check, "KNOWN", KNOWN - {name})
    build({})
    config = tiny_config()
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"^{name}: got .*, accepted: .* not known here"):
        gpt_layer_spec(config)
    model = build({})
    setattr(model.config, name, value)
    with pytest.raises(ValueError, match="nothing to patch") as error:
        patch_model(model, ActivationConfig())
    assert f"config.{name}={value} is not known here" in str(error.value)
