"""ZeRO's options with CoatAdamW: what only moves data changes no bit; all else leaves every
moment where it belongs.
"""

import pytest

from tests.coat_dist.checkpoint.universal_runs import build, load_and_compare, train_and_save
from tests.coat_dist.deepspeed.small_engine import FP32
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.coat_dist.deepspeed.zero_runs import run, snapshot
from tests.support import run_ranks


def zero(stage, *, top=FP32, **options):
    """Settings of a stage. Threshold 0: ZeRO-3 would keep parameters of tests' sizes whole on
    every rank.
    """
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **options},
        **top,
    }


MOVES = {
    "overlap_comm": {"overlap_comm": True},
    "contiguous_gradients": {"contiguous_gradients": False},
    "buckets": {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
}
MOVES_BY_STAGE = {
    1: MOVES,
    2: MOVES | {"reduce_scatter": {"reduce_scatter": False}},
    3: MOVES
    | {
        "persistent": {"stage3_param_persistence_threshold": 10**6},
        "hpz": {"zero_hpz_partition_size": 2},
    },
}


def four_steps(rank, world, stage, cases):
    found = {}
    for name, options in {"": {}, **cases}.items():
        engine = build(zero(stage, top={} if stage == 1 else FP32, **options))
        found[name] = run(engine, rank, 0, 4), snapshot(engine)
        engine.destroy()
    losses, state = found.pop("")
    return {
        name: changes(state, other) + ["losses"] * (losses != more)
        for name, (more, other) in found.items()
    }


@pytest.mark.parametrize("stage", MOVES_BY_STAGE)
def test_zero_options_that_move_data_change_no_bit(stage):
    for found in run_ranks(2, four_steps, stage, MOVES_BY_STAGE[stage]):
        assert found == dict.fromkeys(MOVES_BY_STAGE[stage], [])


PLACES = {
    "1, round robin": zero(1, top={}, round_robin_gradients=True),
    "2, round robin": zero(2, round_robin_gradients=True),
    "3, sub-groups": zero(3, sub_group_size=1000),
}


def load_natively(rank, world, folder, cases):
    """What loading ``folder/plain`` as it is says, and whether anything changed."""
    found = {}
    for name, settings in cases.items():
        engine = build(settings)
        run(engine, rank, 0, 1)
        before = snapshot(engine)
        try:
            engine.load_checkpoint(folder, tag="plain")
            found[name] = "loaded"
        except ValueError as error:
            found[name] = f"{'changed: ' * bool(changes(before, snapshot(engine)))}{error}"
    return found


def test_round_robin_gradients_checkpoints_convert_and_load(tmp_path):
    from coat_dist import convert_to_universal

    saved = run_ranks(2, train_and_save, PLACES["2, round robin"], str(tmp_path))[0]
    convert_to_universal(tmp_path / "plain", tmp_path / "universal")
    for settings in (zero(2, parameter_alignment=True), PLACES["1, round robin"], zero(3)):
        assert run_ranks(2, load_and_compare, settings, str(tmp_path), saved) == [[], []]
    cases = {"same": PLACES["2, round robin"], "stage": PLACES["1, round robin"], "order": zero(2)}
    for found in run_ranks(2, load_natively, str(tmp_path), cases):
        assert found["same"] == found["stage"] == "loaded"
        assert "optim_states.pt: zero_optimization.round_robin_gradients or" in found["order"]
        assert "checkpoint has [" in found["order"] and "this run has [" in found["order"]
        assert not found["order"].startswith("changed")


def save_without_us(rank, world, folder):
    """Plain DeepSpeed, whose files name wrong places with this option."""
    from tests.coat_dist.deepspeed.zero_runs import build as plain

    engine = plain(PLACES["2, round robin"])
    run(engine, rank, 0, 1)
    engine.save_checkpoint(folder, tag="plain")


def test_convert_to_universal_refuses_wrong_places_of_round_robin(tmp_path):
    from coat_dist import convert_to_universal

    run_ranks(2, save_without_us, str(tmp_path))
    with pytest.raises(
        ValueError,
        match="zero_optimization.round_robin_gradients: got true, and places .* are wrong",
    ):
        convert_to_universal(tmp_path / "plain", tmp_path / "universal")


def sub_groups(rank, world, folder):
    engine = build(PLACES["3, sub-groups"])
    run(engine, rank, 0, 1)
    engine.save_checkpoint(folder, tag="plain")
    count = len(engine.optimizer.fp32_partitioned_groups_flat)
    return count, load_natively(rank, world, folder, {"one": zero(3)})["one"]


def test_load_checkpoint_refuses_other_sub_groups(tmp_path):
    for count, message in run_ranks(2, sub_groups, str(tmp_path)):
        assert count == 5  # three matrices, the vectors, and one element
        assert (
            "zero_optimization.sub_group_size, " in message
            and "elements of sub-groups: checkpoint has [" in message
        )
        assert not message.startswith("changed") and "to_universal" in message
