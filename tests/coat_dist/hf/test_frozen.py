"""``frozen_weights: "fp8"``: frozen weights are FP8 codes alone, with the losses of codes that are
made on use.
"""

import copy
import gc
import io
import json
import weakref
from functools import partial
from itertools import accumulate

import pytest
import torch
import transformers
from torch import nn
from torch.nn.modules import module
from torch.profiler import profile
from transformers import AutoModelForCausalLM

from coat_dist import FrozenWeightsConfig, convert_to_universal
from coat_dist.config import ActivationConfig, CoatConfigError
from coat_dist.flow.core.frozen import FrozenWeight, digest_of
from coat_dist.hf import patch_model, unpatch_model
from coat_dist.optim import CoatAdamW
from tests.coat_dist.deepspeed.small_engine import settings
from tests.support import equal, run_ranks

from .test_experts import FAMILIES, mixture
from .tiny import relative, step, tiny, tokens

FP8 = ActivationConfig(frozen_weights="fp8")
BLOCK = {"coat": {"activation": {"frozen_weights": "fp8"}}}
five = pytest.mark.skipif(transformers.__version__ < "5", reason="needs transformers 5")
EACH = pytest.mark.parametrize("name", ["llama", "gpt_oss"])


def lora(seed=0, config=FP8, **more):
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], **more)
    model = peft.get_peft_model(tiny(dtype=torch.bfloat16, seed=seed), adapters).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.1)
    if config is not None:
        patch_model(model, config)
    return model


def body(name="llama", seed=0, config=FP8, **changes):
    """A model that trains its embedding alone."""
    make = mixture if name in FAMILIES else tiny
    model = make(name, dtype=torch.bfloat16, seed=seed, **changes).requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    if config is not None:
        patch_model(model, config)
    return model


def partly(config=FP8):
    """A model in which some weights of a product train."""
    model = body(config=None)
    for layer in model.model.layers:
        layer.self_attn.k_proj.requires_grad_(True)
    patch_model(model, config)
    return model


def frozen(model):
    return [p for p in model.parameters() if isinstance(p, FrozenWeight)]


@pytest.mark.parametrize(
    "make",
    [
        lora,
        partly,
        *(partial(body, name) for name in ("llama", "olmo2", "gemma", "qwen3_moe", "gpt_oss")),
    ],
)
def test_losses_and_gradients(make):
    model, on_use = make(), make(config=ActivationConfig())
    (loss, grads), (expected, wanted) = step(model), step(on_use)
    assert torch.equal(loss, expected) and grads.keys() == wanted.keys()
    for key in grads:  # codes that are subnormal are rounded once more for dgrad
        assert relative(grads[key], wanted[key]) < 0.01, key
    weights = frozen(model)
    assert len(weights) in (12, 14) and model.lm_head.weight.dtype == torch.bfloat16
    assert all(w.packed.nbytes == w.numel() + 4 * w.q8.scales.numel() + 4 for w in weights)
    checkpointed = make()
    checkpointed.gradient_checkpointing_enable()
    checkpointed.enable_input_require_grads()
    assert equal(step(checkpointed), (loss, grads))


@five
@EACH
def test_loading_makes_the_codes_of_patching(name, monkeypatch, tmp_path):
    """From one weight after the other, and what is not frozen as it was."""
    body(name, config=None).save_pretrained(tmp_path)
    load = partial(AutoModelForCausalLM.from_pretrained, tmp_path, dtype=torch.bfloat16)
    whole, seen, quantize = load(), [], FrozenWeight.of

    def of(values, *given):
        assert all(earlier() is None for earlier in seen)
        seen.append(weakref.ref(values))
        return quantize(values, *given)

    with monkeypatch.context() as patched:
        patched.setattr(FrozenWeight, "of", of)
        model = load(quantization_config=FrozenWeightsConfig(BLOCK))
    assert len(frozen(model)) == len(seen) > 0 and not model.is_quantized
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert equal(trained, {n: whole.get_parameter(n) for n in trained})
    for one in (model, whole):
        patch_model(one.requires_grad_(False), FP8)
    assert digest_of(model) == digest_of(whole)
    with pytest.raises(CoatConfigError, match="while a model is loaded"):
        FrozenWeightsConfig({"coat": {}})


@five
def test_loading_leaves_what_a_checkpoint_lacks(tmp_path):
    """A new layer begins as without codes and trains; a load that fails leaves no hook."""
    body(config=None).save_pretrained(tmp_path)
    config = FrozenWeightsConfig(BLOCK)
    load = partial(AutoModelForCausalLM.from_pretrained, tmp_path, quantization_config=config)
    model = load(num_hidden_layers=3)
    assert len(frozen(model)) == 14 and json.loads(config.to_json_string(use_diff=False))
    for p in model.model.layers[2].parameters():
        assert p.requires_grad and p.float().std() < 0.1
    with pytest.raises((CoatConfigError, RuntimeError)):
        load(vocab_size=96)
    gc.collect()
    assert not module._global_parameter_registration_hooks


@EACH
def test_evaluation_reads_the_codes(name):
    model = body(name, num_hidden_layers=1)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens()).logits
    weights = frozen(model)
    values = [w.decoded() for w in weights]
    unpatch_model(model)
    assert not frozen(model) and all(type(w) is nn.Parameter for w in weights)
    assert equal(weights, values)
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens()).logits, logits)


def memory(run, *given, **options):
    """What ``run`` returns, and the most bytes that it allocates and those that it leaves."""
    with torch.no_grad(), profile(profile_memory=True) as measured:
        out = run(*given, **options)
    events = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return out, max(accumulate(sizes)), sum(sizes)


def test_memory_of_experts():
    """One byte a parameter; less than one weight more while patching, one expert in evaluation."""
    model, most, left = memory(body, "qwen3_moe", num_local_experts=64)
    sizes = [p.nbytes for p in model.parameters()]
    packed = sum(sizes) + sum(w.packed.nbytes - w.nbytes for w in frozen(model))
    assert most < sum(sizes) + max(sizes) and packed < 0.6 * sum(sizes)
    assert left - packed in range(1000)
    model.eval().set_experts_implementation("eager")
    assert memory(model, tokens())[1] < max(sizes)


@EACH
def test_modules_move_codes(name):
    model = body(name)
    digest, loss = digest_of(model), step(model)[0]
    assert digest_of(copy.deepcopy(model)) == digest
    weight = frozen(model)[0]
    model.float()
    assert frozen(model)[0] is weight and weight.dtype == torch.float32
    model.bfloat16()
    assert digest_of(model) == digest and frozen(model)[0] is weight
    weight.data = weight.data.float()
    assert digest_of(model) == digest and weight.dtype == torch.float32
    weight.data = weight.data.bfloat16()
    with torch.device("meta"):
        later = body(name)
    assert all(w.packed.is_meta for w in frozen(later))
    later.to_empty(device="cpu")
    source = body(name, config=None)
    for mine, theirs in zip(later.buffers(), source.buffers(), strict=True):
        mine.copy_(theirs)
    for name, values in source.state_dict().items():  # one after the other
        later.load_state_dict({name: values}, strict=False)
    assert digest_of(later) == digest and torch.equal(step(later)[0], loss)


def test_decoded_values_have_the_same_codes():
    values = torch.randn(64, 32, dtype=torch.bfloat16) * torch.logspace(-20, 20, 64)[:, None]
    values[:, 0] = torch.linspace(224, 232, 64)  # these are rounded to half of the largest code
    for transposed in (False, True):
        for given in (values.bfloat16(), values.float(), torch.zeros(64, 32)):
            weight = FrozenWeight.of(given.view(4, 16, 32), "e4m3", transposed)
            again = FrozenWeight.of(weight.decoded(), "e4m3", transposed)
            assert torch.equal(again.digest(), weight.digest())
            assert torch.equal(weight[1], weight.decoded()[1])


@EACH
def test_checkpoints_hold_checksums(name, tmp_path):
    model = body(name)
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    trained = sum(p.nbytes for p in model.parameters() if not isinstance(p, FrozenWeight))
    assert saved.tell() < trained + 20_000
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    body(name).load_state_dict(state)
    for other in (body(name, seed=1), body(name, config=None)):
        with pytest.raises(RuntimeError, match="coat.activation.frozen_weights"):
            other.load_state_dict(state)
    model.save_pretrained(tmp_path)  # decoded
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    patch_model(loaded.requires_grad_(False).train(), FP8)
    assert digest_of(loaded) == digest_of(model)


@pytest.mark.parametrize("safe", [True, False])
def test_accelerate(safe, tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def prepared(seed):
        model = lora(seed)
        optimizer = CoatAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        accelerator = accelerate.Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(model, optimizer)

    def losses(model, optimizer):
        found = []
        for _ in range(2):
            found.append(step(model)[0])
            optimizer.step()
        return found

    accelerator, *trained = prepared(0)
    losses(*trained)
    accelerator.save_state(tmp_path, safe_serialization=safe)
    expected = losses(*trained)
    accelerator, *resumed = prepared(0)
    accelerator.load_state(tmp_path)
    assert losses(*resumed) == expected


MERGING = {
    "add_": lambda model, weight: model.merge_and_unload(),
    "other data": lambda model, weight: setattr(weight, "data", torch.zeros(64, 64)),
    "an assignment to a part": lambda model, weight: weight.data.__setitem__(0, 1.0),
    "normal_": lambda model, weight: nn.init.normal_(weight),
    "to train after all": lambda model, weight: step(
        copy.deepcopy(model.requires_grad_(True).float())
    ),
    "reads memory": lambda model, weight: weight.is_contiguous(),
}


@pytest.mark.parametrize("what", MERGING)
def test_refused_by_name(what):
    model = lora()
    with pytest.raises(CoatConfigError, match=f"^coat.activation.frozen_weights: .*{what}"):
        MERGING[what](model, frozen(model)[0])


@pytest.mark.parametrize(
    ("model", "changes"), [(tiny, {}), (lambda: body(config=None), {"forward_scales": "tensor"})]
)
def test_refused_settings(model, changes):
    with pytest.raises(ValueError, match="frozen_weights"):
        patch_model(model(), ActivationConfig(frozen_weights="fp8", **changes))


OPTIMIZERS = {  # by stage
    1: {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    2: {"type": "CoatAdamW", "params": {"lr": 1e-2}},
    3: {"type": "CoatAdamW", "params": {"lr": 1e-2}},
}


def train(rank, world, stage, folder):
    import deepspeed

    block = {"activation": {"frozen_weights": "fp8"}}

    def engine(seed, stage=stage):
        given = settings(stage, optimizer=OPTIMIZERS[stage])
        model = lora(seed, None)
        return deepspeed.initialize(model=model, config=given | {"coat": block})[0]

    def steps(engine, count):
        found = []
        for i in range(count):
            ids = tokens(seed=i * world + rank)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found

    mine = lora(rank)
    for weight in frozen(mine):
        torch.distributed.broadcast(weight.data, 0)
    assert digest_of(mine) == digest_of(lora(0))
    with pytest.raises(CoatConfigError, match="allreduce_ with a frozen weight"):
        torch.distributed.all_reduce(weight.data)
    one = engine(rank)  # DeepSpeed broadcasts rank 0's
    assert len(frozen(one.module)) == 14
    steps(one, 3)
    for exclude in (False, True):
        one.save_checkpoint(folder, f"exclude-{exclude}", exclude_frozen_parameters=exclude)
    expected = steps(one, 2)
    for exclude in (False, True):
        other = engine(0)
        other.load_checkpoint(folder, f"exclude-{exclude}", load_module_strict=not exclude)
        assert digest_of(other.module) == digest_of(one.module) and steps(other, 2) == expected
        with pytest.raises(ValueError, match="coat.activation.frozen_weights"):
            engine(1).load_checkpoint(folder, f"exclude-{exclude}", load_module_strict=not exclude)
    with pytest.raises(CoatConfigError, match=r"coat\.activation\.frozen_weights.*stage 3"):
        engine(0, stage=3)


def resumed(rank, world, stage, folder, seed):
    """Checksum of the frozen weights of another number of ranks, after a universal checkpoint."""
    import deepspeed

    given = settings(stage, optimizer=OPTIMIZERS[stage])
    given |= BLOCK
    given["checkpoint"] = {"load_universal": True}
    engine = deepspeed.initialize(model=lora(seed, None).float(), config=given)[0]
    engine.load_checkpoint(folder, "universal")
    return digest_of(engine.module)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed(stage, tmp_path):
    pytest.importorskip("deepspeed")
    run_ranks(2, train, stage, str(tmp_path))
    convert_to_universal(tmp_path / "exclude-False", tmp_path / "universal")
    assert run_ranks(1, resumed, stage, str(tmp_path), 0) == [digest_of(lora())]
    with pytest.raises(AssertionError, match="coat.activation.frozen_weights"):
        run_ranks(1, resumed, stage, str(tmp_path), 1)
