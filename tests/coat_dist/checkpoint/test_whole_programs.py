"""Whole checkpoints under what others wrote: DeepSpeed's pipelines, transformers' Trainer."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from tests.coat_dist.checkpoint.test_loading import on_rank_0
from tests.coat_dist.checkpoint.test_whole import flip, told
from tests.support import run_ranks


def pipeline(rank, world, folder):
    """Two stages, each writing its layers."""
    import deepspeed

    import coat_dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(64, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 64),
        torch.nn.Linear(64, 64),
    ]
    net = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 0.01}},
    }
    engine = coat_dist.initialize(model=net, config=config)[0]
    data = [(torch.ones(2, 64).bfloat16(), torch.zeros(2, 64).bfloat16())] * 100
    engine.train_batch(iter(data))
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.save_checkpoint(folder)
    engine.train_batch(iter(data))
    engine.load_checkpoint(folder)
    same = all(map(torch.equal, before, engine.module.parameters()))
    files = json.loads(Path(folder, "global_step1", "manifest.json").read_text())["files"]
    layer = next(Path(folder, "global_step1").glob("layer_02*"))
    on_rank_0(rank, lambda: flip(layer))
    return same, sorted(files), told(engine.load_checkpoint, folder)


def test_a_pipelines_layers_are_summed_and_verified(tmp_path):
    for same, files, said in run_ranks(2, pipeline, str(tmp_path)):
        assert (
            same
            and [f for f in files if f.startswith("layer_02")]
            and f"{tmp_path}/global_step1/layer_02" in said
        )
        assert said.startswith("CheckpointError: ")


def trained(rank, world, folder):
    """Rotation, the best model, and resuming from the newest."""
    import transformers

    from tests.coat_dist.deepspeed.test_trainer import OPTIMIZER, Tokens, trainer

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": OPTIMIZER,
        "coat": {"activation": {"enabled": False}},
    }

    def make(steps):
        t = trainer(folder, steps, config)
        a = t.args
        a.save_steps, a.save_total_limit, a.eval_strategy, a.eval_steps = 2, 2, "steps", 2
        a.load_best_model_at_end, a.metric_for_best_model, a.greater_is_better = (
            True,
            "eval_loss",
            False,
        )
        t.eval_dataset = torch.utils.data.Subset(Tokens(), range(8))
        t.add_callback(
            transformers.trainer_callback.EarlyStoppingCallback(early_stopping_patience=100)
        )
        return t

    first = make(6)
    first.train()
    left = sorted(p.name for p in Path(folder).glob("checkpoint-*"))
    newest = Path(folder, left[-1])
    manifest = [p.parent.name for p in newest.glob("*/manifest.json")]
    os.makedirs(newest / ".unfinished-global_step9")
    again = make(8)
    again.train(resume_from_checkpoint=True)
    return left, manifest, again.state.global_step, again.state.best_model_checkpoint


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="not installed: transformers"
)
def test_the_trainers_rotation_resume_and_best_model(tmp_path):
    left, manifest, steps, best = run_ranks(1, trained, str(tmp_path))[0]
    assert len(left) == 2 and left[-1] == "checkpoint-6" and steps == 8 and best
    assert manifest == ["global_step6"]
