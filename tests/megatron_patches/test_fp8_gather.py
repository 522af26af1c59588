"""ZeRO-3 gathers the weights of patched layers as codes: half the bytes, and training to the same bits."""

from __future__ import annotations

import pytest
import torch

from tests.support import run_ranks

from .tiny import NARROW


def _config(gather, zero=None, **activation):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 200, **(zero or {})},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 3e-3}},
        "coat": {"activation": {"fp8_weight_gather": gather, **activation}},
    }


def _engine(config, **changes):
    import megatron_patches
    from tests.megatron_patches.tiny import tiny_gpt

    return megatron_patches.initialize(model=tiny_gpt(**NARROW | changes), config=config)[0]


def _run(engine, world, rank, steps=3):
    from tests.megatron_patches.tiny import tiny_batch, tiny_loss

    losses = []
    for step in range(2 * steps):
        batch = tiny_batch(world * step + rank)
        loss = tiny_loss(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 3:  # forward without backward: weights stay, until somebody asks for their values
            with torch.no_grad():
                losses.append(tiny_loss(engine, batch).item())
    return losses


def _values(engine):
    from deepspeed import zero

    found = {}
    for name, p in engine.module.named_parameters():
        with zero.GatheredParameters([p]):
            found[name] = p.detach().clone()
    return found


class _Sent:
    """What the wrapped collectives send, in bytes, by dtype."""

    def __enter__(self):
        import torch.distributed as dist

        self.bytes = {}
        self._names = [n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n)]
        self._whole = {name: getattr(dist, name) for name in self._names}
        return self

    def __exit__(self, *_):
        pass


def _compared(rank, world, cases):
    from coat_dist.flow import gathered

    import megatron_patches

    megatron_patches.initialize_model_parallel(1)
    sent = []
    original = gathered.gather_into

    def counted(out, payload, group):
        sent.append(payload.numel())
        return original(out, payload, group)

    gathered.gather_into = counted
    found = []
    for changes, zero, activation in cases:
        runs, counts = [], []
        for gather in (False, True):
            engine = _engine(_config(gather, zero, **activation), **changes)
            sent.clear()
            losses = _run(engine, world, rank)
            counts.append(len(sent))
            codes = [p for p in engine.module.parameters() if getattr(p, "coat_gathered", None) is not None]
            values = _values(engine)
            runs.append((losses, values))
            engine.destroy()
        (plain, before), (losses, after) = runs
        different = [n for n, p in before.items() if not torch.equal(p, after[n])]
        found.append((plain == losses, different, counts, len(codes)))
    return found


KEPT = {"stage3_max_reuse_distance": 10**9}
LET_GO = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 70_000}
MORE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = {
    "rows": ({}, LET_GO, {}),
    "rows, kept from forward to backward": ({}, KEPT, {}),
    "tensors": ({}, LET_GO, {"forward_scales": "tensor", "forward": "quantized"}),
    "recomputed": (MORE, LET_GO, {}),
    "invariant": ({}, KEPT, {"tp_invariant": True}),
    "experts": (dict(num_moe_experts=2, moe_token_dispatcher_type="allgather", moe_router_topk=1), LET_GO, {}),
    "a layer in BF16": ({}, LET_GO, {"bf16_layers": [0], "attention": "fp8"}),
}
SHORT = ("rows", "rows, kept from forward to backward", "invariant")


def _check(names):
    for results in run_ranks(2, _compared, [CASES[name] for name in names]):
        for name, (same, different, (without, with_codes), _) in zip(names, results, strict=True):
            assert same and not different, name
            assert without == 0 and (with_codes == 0) == (name == "invariant"), name


def test_training_is_the_same_to_the_bit():
    _check(SHORT)


@pytest.mark.slow
def test_training_is_the_same_to_the_bit_in_every_mode():
    _check([name for name in CASES if name not in SHORT])
