"""Transformers models in the flow under ZeRO-1, 2 and 3, DDP and FSDP2: the same bits in the first step."""

import pytest
import torch

from coat_dist.hf import patch_model
from tests.support import run_ranks

from .tiny import tiny, tokens

BLOCK = {"activation": {}, "optimizer": {"stochastic_rounding": False}}


def config(stage, **changes):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-2}},
        "coat": BLOCK,
        **changes,
    }


def losses_of(call, rank, steps=4):
    return [call(tokens(seed=rank)) for _ in range(steps)]


def under_zero(rank, world, name, stage, built_in_shards):
    import deepspeed

    settings = config(stage)
    if built_in_shards:
        with deepspeed.zero.Init(config_dict_or_path={k: v for k, v in settings.items() if k != "coat"}):
            model = tiny(name, torch.bfloat16, pad_token_id=None)
    else:
        model = tiny(name, torch.bfloat16, pad_token_id=None)
    if built_in_shards:  # weights are drawn otherwise there, and DeepSpeed rounds rotary frequencies to BF16
        whole = tiny(name, torch.bfloat16, pad_token_id=None)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if rank == 0:
                model.load_state_dict(whole.state_dict())
        for buffer, right in zip(model.buffers(), whole.buffers(), strict=True):
            buffer.data = right
    if stage == 1:  # the others by the block alone
        patch_model(model, settings)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    assert len(engine.coat_patch_report.patched) == 4

    def step(ids):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    losses = losses_of(step, rank)
    shapes = {tuple(p.shape) for p in engine.module.parameters()}
    engine.module.eval()
    with torch.no_grad():
        logits = engine(input_ids=tokens()).logits
    return losses, shapes, logits.float()


def under_torch(rank, world, name, how):
    import coat_dist

    model = tiny(name, torch.bfloat16, pad_token_id=None)
    patch_model(model, {"coat": BLOCK})
    if how == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = coat_dist.CoatAdamW(model.parameters(), lr=1e-2, stochastic_rounding=False)

    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return losses_of(step, rank)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_first_steps_are_the_same_and_training_goes_on(name):
    runs = {f"zero-{stage}": run_ranks(2, under_zero, name, stage, False) for stage in (1, 2, 3)}
    runs["zero-3 in shards"] = run_ranks(2, under_zero, name, 3, True)
    first = [losses[0] for losses, *_ in runs["zero-2"]]
    for how, found in runs.items():
        assert [losses[0] for losses, *_ in found] == first, how
        for (losses, shapes, _), (wanted, *_) in zip(found, runs["zero-2"], strict=True):
            assert losses == pytest.approx(wanted, rel=0.03), how
            assert "zero-3" not in how or shapes == {(0,)}, f"{how}: something stays gathered"
        assert found[0][0][-1] < first[0]
    for how in ("ddp", "fsdp2"):
        found = run_ranks(2, under_torch, name, how)
        assert [losses[0] for losses in found] == first, how
        assert found[0][-1] < first[0]
