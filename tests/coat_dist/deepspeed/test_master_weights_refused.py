"""Settings of DeepSpeed and ``master_weights`` that do not agree are refused on every rank, however they are given."""

import pytest

from tests.coat_dist.deepspeed.remainders import BF16, Given
from tests.support import run_ranks


def failing(rank, world, settings, remainder, as_instance):
    import deepspeed

    import coat_dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    net = Given().bfloat16()
    option = {"master_weights": "bf16_remainder"} if remainder else {}
    config = {"train_micro_batch_size_per_gpu": 2, **settings, "coat": {"activation": {"enabled": False}}}
    optimizer = None
    if remainder is None:  # in one group of two
        first, *others = net.parameters()
        remainders = {"params": others, "master_weights": "bf16_remainder"}
        optimizer = coat_dist.CoatAdamW([{"params": [first]}, remainders])
    elif as_instance:
        optimizer = coat_dist.CoatAdamW(net.parameters(), **option)
    else:
        config["optimizer"] = {"type": "CoatAdamW", "params": {"lr": 0.01}}
        config["coat"]["optimizer"] = option
    try:
        coat_dist.initialize(model=net, optimizer=optimizer, config=config)
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("settings", "remainder", "as_instance", "words"),
    [
        (
            {"bf16": {"enabled": True}},
            True,
            False,
            ["bf16.bf16_master_weights_and_grads: got null, accepted: true", "bf16.bf16_optimizer_states: got null"],
        ),
        ({"bf16": BF16}, False, False, ["bf16_master_weights_and_grads: got true, accepted: false with CoatAdamW"]),
        (
            {"bf16": BF16},
            False,
            True,
            ['got true, accepted: false with CoatAdamW, or true with CoatAdamW master_weights "bf16_remainder"'],
        ),
        (
            {"bf16": {"enabled": True}},
            True,
            True,
            ['bf16_master_weights_and_grads: got null, accepted: true with CoatAdamW master_weights "bf16_remainder"'],
        ),
        ({"bf16": {"enabled": True}}, None, True, ["master_weights: got 'bf16_remainder'", "torch.float32 from"]),
        (
            {"bf16": BF16, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
            True,
            True,
            ['data_types.grad_accum_dtype: got "fp32", accepted: "bf16" with CoatAdamW master_weights'],
        ),
    ],
)
def test_options_that_do_not_agree_are_refused(settings, remainder, as_instance, words):
    settings = {"zero_optimization": {"stage": 2}, **settings}
    for message in run_ranks(2, failing, settings, remainder, as_instance):
        for word in words:
            assert word in message, message
