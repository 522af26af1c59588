"""ZeRO-3 gathers the weights of patched layers as codes: half the bytes, and training to the
same bits.
"""

from __future__ import annotations

import pytest
import torch

import megatron_patches as mp
from tests.support import run_ranks, slow
from tests.support.gathers import AHEAD, KEPT, LET_GO, check_gathered, compared

from .tiny import FULL, NARROW, tiny_batch, tiny_gpt, tiny_loss
from .training import drive, engine_config


def _config(gather, zero=None, **activation):
    return engine_config(
        3,
        gradient_accumulation_steps=2,
        zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 200, **(zero or {})},
        coat={"activation": {"fp8_weight_gather": gather, **activation}},
    )


def _engine(config, **changes):

    return mp.initialize(model=tiny_gpt(**NARROW | changes), config=config)[0]


def _run(engine, world, rank, steps=3):
    losses = []
    for step in range(2 * steps):
        batch = tiny_batch(world * step + rank)
        losses += drive(engine, [batch])
        # Forward without backward: weights stay, until somebody asks for their values.
        if step == 3:
            with torch.no_grad():
                losses.append(tiny_loss(engine, batch).item())
    return losses


def _compared(rank, world, names):
    mp.initialize_model_parallel(1)

    def build(name, gather):
        changes, zero, activation = CASES[name]
        return _engine(_config(gather, zero, **activation), **changes)

    return compared(names, build, lambda engine, steps: _run(engine, world, rank, steps))


CASES = {
    "rows": ({}, LET_GO, {}),
    "rows, kept from forward to backward": ({}, KEPT, {}),
    "in advance": ({}, AHEAD, {}),
    "tensors": ({}, LET_GO, {"forward_scales": "tensor", "forward": "quantized"}),
    "recomputed": (FULL, LET_GO, {}),
    "invariant": ({}, KEPT, {"tp_invariant": True}),
    "experts": (
        dict(
            num_moe_experts=2,
            moe_token_dispatcher_type="allgather",
            moe_router_topk=1,
            moe_router_pre_softmax=True,
        ),
        LET_GO,
        {},
    ),
    "hpZ": ({}, LET_GO | {"zero_hpz_partition_size": 2}, {}),
    "a layer in BF16": ({}, LET_GO, {"bf16_layers": [0], "attention": "fp8"}),
}
SHARES = {
    "invariant": 0,
    "in advance": None,
    # What forward and backward multiply, gathered once for both.
    "rows, kept from forward to backward": 1,
}
SHORT = ("rows", "in advance")


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, SHORT),
        slow(2, [n for n in CASES if n not in SHORT]),
        # Between nodes values travel, of which DeepSpeed makes the second shards.
        slow(4, ["hpZ"]),
    ],
)
def test_fp8_weight_gather_trains_to_the_same_bits(world, names):
    for found in run_ranks(world, _compared, names):
        check_gathered(found, lambda name: SHARES.get(name, 0.5))


def _asked_for_values(rank, world, folder):
    """Values are read and written, also of weights that are held as codes; nothing is stale
    afterwards.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    mp.initialize_model_parallel(1)
    found = []
    for gather in (False, True):
        engine, told = _engine(_config(gather, KEPT)), []

        def evaluate(engine=engine, told=told):
            with torch.no_grad():
                told.append(tiny_loss(engine, tiny_batch(rank)).item())

        told += _run(engine, world, rank, steps=1)
        engine.save_checkpoint(f"{folder}/{gather}")
        after = _run(engine, world, rank, steps=1)
        evaluate()
        layer = engine.module.decoder.layers[0]
        weight, fc1, fc2 = (
            layer.self_attention.linear_qkv.weight,
            layer.mlp.linear_fc1.weight,
            layer.mlp.linear_fc2.weight,
        )
        codes = [
            p for p in engine.module.parameters() if getattr(p, "coat_gathered", None) is not None
        ]
        assert bool(codes) == gather and all(
            p.isnan().all() and p.untyped_storage().nbytes() == 2 for p in codes
        )
        with deepspeed.zero.GatheredParameters([weight]):
            told.append(weight.float().sum().item())
        evaluate()
        with deepspeed.zero.GatheredParameters([weight, fc2], modifier_rank=0):
            if rank == 0:
                weight.data.mul_(2)
                fc2.data.add_(0.125)
        evaluate()
        safe_set_full_fp32_param(fc1, safe_get_full_fp32_param(fc1) * 0.5)
        evaluate()
        assert len(set(told[-4:-1])) == 3
        state = engine._zero3_consolidated_16bit_state_dict()
        told += [{n: t.double().sum().item() for n, t in state.items()}] if rank == 0 else []
        engine.load_checkpoint(f"{folder}/{gather}")
        told += _run(engine, world, rank, steps=1)
        assert told[-2:] == after
        evaluate()
        mp.unpatch_model(engine.module)  # its layers read values again
        evaluate()
        evaluate()
        assert torch.isfinite(torch.tensor(told[-2:])).all() and told[-1] == told[-2] != told[-3], (
            told
        )
        engine.destroy()
        found.append(told)
    return found[0] == found[1]


def test_fp8_weight_gather_values_are_read_and_written(tmp_path):
    assert run_ranks(2, _asked_for_values, str(tmp_path)) == [True, True]


def _compiled(rank, world):
    """Losses eager, compiled from the first step on, and from the second on: compiled code sees
    neither what ZeRO-3 fetches when Python reads it, nor codes in place of a weight.
    """
    mp.initialize_model_parallel(1)
    found = []
    for gather, zero, compiled_at in [
        (False, LET_GO, None),
        (False, LET_GO, 0),
        (True, LET_GO, 0),
        (True, KEPT, 1),
    ]:
        torch._dynamo.reset()
        engine, losses = _engine(_config(gather, zero)), []
        for start in range(2):
            if start == compiled_at:
                engine.compile(backend="eager")
            losses += _run(engine, world, rank, steps=1)
        engine.destroy()
        found.append(losses)
    assert found == [found[0]] * 4 and torch.tensor(found).isfinite().all()


@pytest.mark.slow
def test_fp8_weight_gather_with_a_compiled_engine():
    run_ranks(2, _compiled)
