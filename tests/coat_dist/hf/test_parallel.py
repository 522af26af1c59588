"""Transformers models in the flow under ZeRO-1, 2 and 3, DDP and FSDP2: the same bits in the
first step.
"""

import os
from contextlib import nullcontext

import pytest
import torch

from coat_dist.hf import patch_model
from tests.coat_dist.deepspeed.small_engine import settings
from tests.support import run_ranks
from tests.support.gathers import values

from .tiny import relative, same, tiny, tokens

BLOCK = {
    "activation": {"boundaries": "fp8", "recompute": 1},
    "optimizer": {"stochastic_rounding": False},
}


def config(stage, **changes):
    adamw = {"type": "CoatAdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    given = settings(stage, optimizer=adamw, gradient_clipping=0.0, coat=BLOCK) | changes
    given["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return given


def built(name):
    family, *with_adapters = name.split(", ")
    model = tiny(family, torch.bfloat16, pad_token_id=None)
    if with_adapters:
        from .test_adapters import adapted

        model = adapted(model).to(torch.bfloat16)
    return model


def run(call, weights, rank):
    """Losses of four steps, and what the first made of the weights."""
    losses = [call(tokens(seed=rank))]
    first = {name: w.clone() for name, w in weights().items()}
    return losses + [call(tokens(seed=rank)) for _ in range(3)], first


def under_zero(rank, world, name, stage, built_in_shards):
    import deepspeed

    given = config(stage)
    of_zero = {k: v for k, v in given.items() if k != "coat"}
    with deepspeed.zero.Init(config_dict_or_path=of_zero) if built_in_shards else nullcontext():
        model = built(name)
    # Weights are drawn otherwise there, and DeepSpeed rounds rotary frequencies to BF16.
    if built_in_shards:
        whole = tiny(name, torch.bfloat16, pad_token_id=None)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if rank == 0:
                model.load_state_dict(whole.state_dict())
        for buffer, right in zip(model.buffers(), whole.buffers(), strict=True):
            buffer.data = right
    if stage == 1:  # the others by the block alone
        patch_model(model, given)
    engine, *_ = deepspeed.initialize(model=model, config=given)
    assert len(engine.coat_patch_report.patched) == 4

    def step(ids):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    engine.module.eval()
    # ZeRO-3 fetches weights here for the modules that hold them, later for those that read them.
    with torch.no_grad():
        engine(input_ids=tokens(seed=rank))
    engine.module.train()
    losses, first = run(step, lambda: values(engine), rank)
    shapes = {tuple(p.shape) for p in engine.module.parameters()}
    state = engine.module.eval().state_dict()
    if stage == 3:
        state = engine._zero3_consolidated_16bit_state_dict()
    with torch.no_grad():
        logits = engine(input_ids=tokens()).logits
        if rank == 0:  # what is saved is the model that was evaluated
            saved = built(name)
            saved.load_state_dict(state)
            assert torch.equal(saved.eval()(tokens()).logits, logits)
    return losses, first, shapes


def under_torch(rank, world, name, how):
    import coat_dist

    model = built(name)
    inner, _ = model, patch_model(model, {"coat": BLOCK})
    if how == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in next(m.layers for m in model.modules() if hasattr(m, "layers")):
            fully_shard(layer)
        fully_shard(model)
    optimizer = coat_dist.CoatAdamW(
        model.parameters(), lr=1e-2, weight_decay=0.0, stochastic_rounding=False
    )

    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run(
        step,
        lambda: {
            n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in inner.named_parameters()
        },
        rank,
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "llama, adapters"])
def test_training_under_zero_ddp_and_fsdp2(name):
    runs = {f"zero-{stage}": run_ranks(2, under_zero, name, stage, False) for stage in (1, 2, 3)}
    if "adapters" not in name:
        runs["zero-3 in shards"] = run_ranks(2, under_zero, name, 3, True)
    runs |= {how: run_ranks(2, under_torch, name, how) for how in ("ddp", "fsdp2")}
    for how, found in runs.items():
        for (losses, first, *rest), (wanted, weights, *_) in zip(
            found, runs["zero-2"], strict=True
        ):
            assert losses[0] == wanted[0] and same(first, weights), how
            assert losses == pytest.approx(wanted, rel=0.03) and losses[-1] < losses[0], how
            assert "zero-3" not in how or rest[0] == {(0,)}, f"{how}: something stays gathered"


def accumulates(rank, world, name, stage, folder):
    """Weights after each of two steps of two micro-batches, saved, or those of a loaded engine;
    and the next loss.
    """
    import deepspeed

    changes = {"gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": "fp32"}}
    changes |= {"checkpoint": {"load_universal": True}} if world == 1 else {}
    model = tiny(name, torch.bfloat16, seed=world, pad_token_id=None)
    engine, *_ = deepspeed.initialize(model=model, config=config(stage, **changes))
    found = []
    if world == 1:
        engine.load_checkpoint(folder, tag="universal")
        found.append(values(engine))
    for micro in range(4 if world > 1 else 0):
        engine.backward(engine(input_ids=(ids := tokens(seed=2 * micro + rank)), labels=ids).loss)
        engine.step()
        found += [values(engine)] if micro % 2 else []
    if world > 1:
        engine.save_checkpoint(folder, tag="two-ranks")
    loss = engine(input_ids=(ids := tokens(seed=9)), labels=ids).loss
    engine.backward(loss)
    engine.step()
    return *found, loss.item()


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_universal_checkpoints_after_accumulation(name, tmp_path):
    from coat_dist import convert_to_universal

    first = {}
    for stage in (2, 3):
        folder = tmp_path / str(stage)
        first[stage], weights, loss = run_ranks(2, accumulates, name, stage, str(folder))[0]
        convert_to_universal(folder / "two-ranks", folder / "universal")
        ((loaded, again),) = run_ranks(1, accumulates, name, 5 - stage, str(folder))
        assert same(loaded, weights) and again == loss
        assert not same(first[stage], weights)
    assert same(first[2], first[3])


def sharded_parts(rank, world, how):
    """Three steps with some parts sharded by themselves: near BF16, and the report says why a block
    is not patched.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh, found = init_device_mesh("cpu", (world,)), []
    for patched in (False, True):
        model = tiny("qwen3", num_hidden_layers=1)
        plan = {}
        for name, _ in model.model.named_modules():
            if name.endswith(("gate_proj", "up_proj")):
                plan[name] = ColwiseParallel()
            if name.endswith("down_proj"):
                plan[name] = RowwiseParallel()
        if how == "tensor parallel":
            parallelize_module(model.model, mesh, plan)
        if patched:
            patch_model(model, {"coat": BLOCK})
        if how != "tensor parallel":
            kinds = {"linears": "Linear", "norms": "Qwen3RMSNorm", "MLPs": "Qwen3MLP"}
            for module in [m for m in model.modules() if type(m).__name__ == kinds[how]]:
                fully_shard(module, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(input_ids=tokens(), labels=tokens()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found[3:] == pytest.approx(found[:3], rel=5e-3)
    report = model.coat_patch_report
    why = {
        "linears": "DTensor as weight of gate_proj",
        "tensor parallel": "a DTensor as weight",
    }
    assert why.get(how, "") in (report.unfused | report.left).get("model.layers.0.mlp", "")
    assert ("model.layers.0.self_attn" in report.unfused) == (how in ("linears", "norms"))


@pytest.mark.long
@pytest.mark.parametrize("how", ["linears", "norms", "MLPs", "tensor parallel"])
def test_modules_that_are_sharded_alone(how):
    run_ranks(2, sharded_parts, how)


def over_the_sequence(rank, world, attention):
    """Losses of two steps under Accelerate, whose ranks have a part of each sequence if there are
    several, and the first gradients.
    """
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, ParallelismConfig
    from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig as Ulysses
    from deepspeed.utils import safe_get_full_grad

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    block = {"activation": {"attention": attention}, "optimizer": {"stochastic_rounding": False}}
    ulysses = Ulysses(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parts = ParallelismConfig(sp_size=world, sp_backend="deepspeed", sp_handler=ulysses)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(
            hf_ds_config=config(3, coat=block, train_micro_batch_size_per_gpu=1)
        ),
        parallelism_config=parts if world > 1 else None,
    )
    rows = [{"input_ids": row, "labels": row, "position_ids": torch.arange(24)} for row in tokens()]
    model = tiny(dtype=torch.bfloat16)
    optimizer = DummyOptim(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(rows[:1] * world)
    engine, _, data = accelerator.prepare(model, optimizer, data)
    assert len(engine.coat_patch_report.patched) == 4
    engine.train()
    losses, grads = [], {}
    for batch in list(data)[:2] * (2 // world):
        if world > 1:
            batch["labels"] = batch["shift_labels"]
        loss = engine(**batch, use_cache=False).loss
        if world > 1:  # the last token has no label
            first, second = torch.distributed.nn.functional.all_gather(loss)
            loss = (12 * first + 11 * second) / 23
        engine.backward(loss)
        losses.append(loss.item())
        named = engine.module.named_parameters()
        grads = grads or {name: safe_get_full_grad(p).clone() for name, p in named}
        engine.step()
    return losses, grads


def test_sequence_parallelism_of_accelerate():
    """DeepSpeed's Ulysses: attention is its own, which takes the place of FP8 attention. (With
    ZeRO-2, DeepSpeed 0.19.8 doubles gradients here, those of BF16 models too.)
    """
    pytest.importorskip("accelerate")
    (alone,) = run_ranks(1, over_the_sequence, "bf16")
    for attention in ("bf16", "fp8"):
        for losses, grads in run_ranks(2, over_the_sequence, attention):
            assert losses[0] == pytest.approx(alone[0][0], rel=1e-6)
            assert losses == pytest.approx(alone[0], rel=0.01) and losses[1] < losses[0]
            for name, right in alone[1].items():
                assert relative(grads[name], right) < 0.1, name
