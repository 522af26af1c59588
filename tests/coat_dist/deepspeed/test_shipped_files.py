"""DeepSpeed files that LLaMA-Factory, axolotl and Accelerate ship: with the block added each
trains.

Keys and values as of November 2026, after these programs have put numbers in place of "auto".
"""

import copy

import pytest
import torch

from tests.coat_dist.deepspeed.small_engine import model, quiet_deepspeed, train
from tests.support import run_ranks

BATCH = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
}
BATCH |= {"gradient_clipping": 1.0}
SCALES = {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
BF16 = {"bf16": {"enabled": True}, "fp16": {"enabled": False, "initial_scale_power": 16, **SCALES}}
OVERLAPPED = {"overlap_comm": True, "contiguous_gradients": True}
MONITORS = {
    "comms_config": {"verbose": False},
    "monitor_config": {
        "enabled": True,
        "tag": "DeepSpeedMonitor",
        "csv_monitor": {"enabled": False},
    },
}
SIZES = {
    "reduce_bucket_size": 4096,
    "stage3_prefetch_bucket_size": 3686,
    "stage3_param_persistence_threshold": 640,
}
BILLIONS = {
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
TEMPLATE = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True, "adam_w_mode": True},
}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": 0,
        "warmup_max_lr": 1e-3,
        "warmup_num_steps": 1,
        "total_num_steps": 10,
    },
}
FILES = {
    "LLaMA-Factory ds_z2_config.json": {
        **BATCH,
        **BF16,
        **MONITORS,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 5e8,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "contiguous_gradients": True,
            "round_robin_gradients": True,
        },
    },
    "LLaMA-Factory ds_z3_config.json": {
        **BATCH,
        **BF16,
        **MONITORS,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            **SIZES,
            **BILLIONS,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
    "axolotl zero3_bf16.json": {
        **BATCH,
        "bf16": {"enabled": True},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 3,
            **OVERLAPPED,
            "sub_group_size": 0,
            "reduce_bucket_size": 4096,
            "prefetch_bucket_size": 3686,
            "param_persistence_threshold": 640,
            "max_live_parameters": 0,
            "max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True,
        },
    },
    "accelerate zero_stage2_config.json": {
        **BATCH,
        **BF16,
        "optimizer": TEMPLATE,
        "scheduler": DECAY,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            **OVERLAPPED,
            "reduce_scatter": True,
            "reduce_bucket_size": 4096,
        },
    },
    "axolotl zero2.json": {
        **BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, **OFFLOAD, **OVERLAPPED},
    },
}
for stage in (2, 3):
    plain = FILES[f"LLaMA-Factory ds_z{stage}_config.json"]
    FILES[f"LLaMA-Factory ds_z{stage}_offload_config.json"] = {
        **plain,
        "zero_optimization": {**plain["zero_optimization"], **PINNED},
    }


def with_the_block(file):
    config = copy.deepcopy(file)
    config["optimizer"] = {**config.get("optimizer", {"params": {"lr": 1e-3}}), "type": "CoatAdamW"}
    return config | {"coat": {"activation": {"enabled": False}}}


def some_steps(rank, world):
    deepspeed = quiet_deepspeed()
    for name, file in FILES.items():
        engine, *_ = deepspeed.initialize(model=model(), config=with_the_block(file))
        assert type(engine.optimizer.optimizer).__name__ == "CoatAdamW", name
        losses = train(engine, rank, 6)
        assert losses[-1] < losses[0] and torch.tensor(losses).isfinite().all(), (name, losses)
        engine.destroy()


@pytest.mark.filterwarnings("ignore")
def test_shipped_files_train_with_the_block():
    run_ranks(1, some_steps)
