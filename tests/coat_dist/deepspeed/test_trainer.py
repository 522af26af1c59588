"""CoatAdamW and the block in the Trainer of transformers, alone and with DeepSpeed, and under
Accelerate; skipped where they are not installed.
"""

import importlib.util

import pytest
import torch

from coat_dist.optim import CoatAdamW, param_groups
from tests.coat_dist.deepspeed.small_engine import NO_FLOW, quiet_deepspeed, settings
from tests.support import equal, run_ranks

MISSING = [
    name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

OPTIMIZER = {"type": "CoatAdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
BLOCK = {"optimizer": {"first_moment": "int8", "second_moment": "log8"}, **NO_FLOW}
STAGES = {
    "zero-1": {"zero_optimization": {"stage": 1}},
    "zero-2": {"zero_optimization": {"stage": 2}, "coat": BLOCK},
    # Threshold 0: parameters of these sizes would stay whole on every rank.
    "zero-3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
}


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = (i + torch.arange(16)) % 61
        return {"input_ids": x, "labels": x}


def llama():
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
    }
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def trainer(folder, steps, deepspeed=None, make=llama):
    """``make`` is called when the Trainer's arguments are there, which ``zero.Init`` reads."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        learning_rate=0.01,
        weight_decay=0.1,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=5,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        max_grad_norm=1.0,
        deepspeed=deepspeed,
        bf16=deepspeed is not None,
    )
    model, data = make(), {"train_dataset": Tokens(), "eval_dataset": Tokens()}
    if deepspeed is not None:  # the Trainer makes the scheduler and DeepSpeed the optimizer
        return transformers.Trainer(model=model, args=arguments, **data)
    optimizer = CoatAdamW(param_groups(model, 0.1), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    return transformers.Trainer(
        model=model, args=arguments, **data, optimizers=(optimizer, schedule)
    )


def losses_of(t):
    return [entry["loss"] for entry in t.state.log_history if "loss" in entry]


def ten_or_five_and_five(rank, world, folder, stage):
    deepspeed = None
    if stage is not None:
        quiet_deepspeed()
        deepspeed = settings(
            train_micro_batch_size_per_gpu=4,
            gradient_clipping=1.0,
            **{"optimizer": OPTIMIZER, **STAGES[stage]},
        )
    whole = trainer(folder, 10, deepspeed)
    whole.train()
    resumed = trainer(folder, 10, deepspeed)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-5")
    straight, again = losses_of(whole), losses_of(resumed)
    assert len(straight) == 10 and straight[-1] < 0.8 * straight[0]
    assert again[-5:] == straight[-5:]
    assert equal(list(resumed.model.parameters()), list(whole.model.parameters()))

    engine, inner = resumed.model_wrapped, resumed.optimizer
    assert bool(getattr(engine, "coat_attached", ())) == (stage is not None)
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    assert isinstance(inner, CoatAdamW)
    assert {"coat_m_q" in state for state in inner.state.values()} == {True, False}
    formats = {(g["first_moment"], g["second_moment"]) for g in inner.param_groups}
    assert formats == {("int8", "log8") if stage == "zero-2" else ("e4m3", "e4m3")}


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_trainer_trains_and_resumes(stage, tmp_path):
    run_ranks(1 if stage is None else 2, ten_or_five_and_five, str(tmp_path), stage)
