"""ZeRO-3 models that are built in shards: weights as without, never whole anywhere, training to
the same bits.
"""

from __future__ import annotations

import pytest
import torch

import megatron_patches as mp
from tests.support import run_ranks, slow

from .tiny import SMALL, tiny_batch, tiny_gpt, tiny_loss
from .training import drive, engine_config

CONFIG = engine_config(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})


def _model(**changes):
    from launch.model.gpt import build_model
    from launch.model.model_config import ModelConfig

    model = ModelConfig(
        num_layers=16, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, seq_length=32,
        vocab_size=128, normalization="layernorm", linear_bias=True,
    )  # fmt: skip
    return build_model(model, **changes)


def _peak(build):
    """What ``build`` returns, and the most bytes that torch's allocator held for it at a time."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        built = build()
    events = profiler.profiler.kineto_results.events()
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return built, most


def _built(rank, world, tp):

    mp.initialize_model_parallel(tp, seed=3)
    state = mp.rng_state()
    plain, whole = _peak(lambda: _model(tp=tp))
    after = torch.get_rng_state()

    def build():
        mp.set_rng_state(state)
        with mp.zero_init(CONFIG) as divided:
            assert divided
            return _model(tp=tp)

    # Gloo's threads let go of what they have sent when they find time: the least of some builds is
    # what one needs.
    (sharded, _), *_ = built = [_peak(build) for _ in range(4)]
    peak = min(most for _, most in built)
    assert torch.equal(after, torch.get_rng_state())
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        part, dp = q.ds_tensor.numel(), torch.distributed.get_rank(q.ds_process_group)
        mine = p.detach().reshape(-1)[part * dp :][:part]
        assert q.numel() == 0 and p.dtype == q.ds_tensor.dtype, name
        assert torch.equal(mine, q.ds_tensor[: mine.numel()]), name
        assert vars(p) == {k: getattr(q, k) for k in vars(p)}
    bytes_ = [p.numel() * p.element_size() for p in plain.parameters()]
    assert whole > sum(bytes_)  # what is measured does notice a whole model
    # Its shards, one weight as it was drawn (fp32, of all tensor-parallel ranks) and as it is cast
    # and divided.
    shards = sum(bytes_) / (world // tp)
    assert peak < shards + (2 * tp + 6) * max(bytes_) + 100_000 < 0.9 * sum(bytes_)


@pytest.mark.parametrize(("world", "tp"), [(2, 1), slow(4, 2)])
def test_zero_init_shards_without_a_whole_model(world, tp):
    run_ranks(world, _built, tp)


def _trained(rank, world, kinds, tp):
    import deepspeed

    mp.initialize_model_parallel(tp, seed=3)
    plain = {key: value for key, value in CONFIG.items() if key != "coat"}
    contexts = {
        "whole": lambda: mp.zero_init({}),
        "divided": lambda: mp.zero_init(CONFIG),
        "DeepSpeed's": lambda: deepspeed.zero.Init(config_dict_or_path=plain),
    }
    runs, state = [], mp.rng_state()
    for kind in kinds:
        mp.set_rng_state(state)
        with contexts[kind]():
            model = _model(tp=tp)
        engine, *_ = mp.initialize(model=model, config=CONFIG)
        batches = (tiny_batch(world * step + rank // tp)[:2] for step in range(3))
        runs.append(
            drive(engine, ((tokens % 128, labels % 128, None) for tokens, labels in batches))
        )
        engine.destroy()
    return runs


@pytest.mark.slow
def test_zero_init_trains_to_the_same_losses():
    """DeepSpeed's own context makes rotary tables BF16, so losses are near; at TP 2 x DP 2 they
    are equal.
    """
    for whole, divided, near in run_ranks(2, _trained, ("whole", "divided", "DeepSpeed's"), 1):
        assert divided == whole and near == pytest.approx(whole, rel=1e-2)
    assert all(
        divided == whole for whole, divided in run_ranks(4, _trained, ("whole", "divided"), 2)
    )


def _second_shards(rank, world, folder):
    """With hpZ, whatever writes weights is seen by the next forward pass, also where they are
    not trained.
    """
    from coat_dist import convert_to_universal
    from coat_dist.deepspeed.zero_init import copy_into

    mp.initialize_model_parallel(1, seed=3)
    zero = CONFIG["zero_optimization"] | {"zero_hpz_partition_size": 2}
    batch = tiny_batch(rank)

    def built(seed, universal=False, filled=None):
        config = CONFIG | {"zero_optimization": zero, "checkpoint": {"load_universal": universal}}
        with mp.zero_init(config):
            model = tiny_gpt(seed=seed, **SMALL)
        for parameter in model.decoder.layers[0].parameters():
            parameter.requires_grad_(False)
        for parameter, whole in zip(
            model.parameters(), filled.parameters() if filled else (), strict=bool(filled)
        ):
            copy_into(parameter, whole.detach())
        return mp.initialize(model=model, config=config)[0]

    def loss(engine):
        with torch.no_grad():
            return tiny_loss(engine, batch).item()

    whole = tiny_gpt(seed=5, **SMALL)
    engine = built(5, filled=whole)
    expected = loss(engine)
    found = [loss(built(6, filled=whole))]
    engine.backward(tiny_loss(engine, batch))
    engine.step()
    engine.save_checkpoint(folder, tag="saved")
    if rank == 0:
        convert_to_universal(f"{folder}/saved", f"{folder}/universal")
    torch.distributed.barrier()
    trained = loss(engine)
    for universal, tag in ((False, "saved"), (True, "universal")):
        other = built(7, universal)
        loss(other)
        other.load_checkpoint(folder, tag)
        found.append(loss(other))
    return found, [expected, trained, trained]


def test_hpz_shards_are_never_older_than_the_first(tmp_path):
    for found, expected in run_ranks(2, _second_shards, str(tmp_path)):
        assert found == expected
