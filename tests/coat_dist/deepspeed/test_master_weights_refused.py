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
    ("settings", "remainder", "as_instance", "key"),
    [
        ({"bf16": {"enabled": True}}, True, False, "bf16.bf16_optimizer_states: got null"),
        ({"bf16": BF16}, False, True, "bf16.bf16_master_weights_and_grads: got true"),
        ({"bf16": {"enabled": True}}, None, True, "master_weights: got 'bf16_remainder'"),
    ],
)
def test_options_that_do_not_agree_are_refused(settings, remainder, as_instance, key):
    settings = {"zero_optimization": {"stage": 2}, **settings}
    for message in run_ranks(2, failing, settings, remainder, as_instance):
        assert key in message, message
