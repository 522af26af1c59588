"""AdamW with FP8 moments in the Trainer of transformers, alone or with DeepSpeed.

    python examples/trainer.py
    deepspeed --num_gpus 2 examples/trainer.py --deepspeed

Needs transformers and accelerate: pip install '/path/to/coat_dist[hf]'. A small Llama learns to continue sequences of
numbers, on GPUs where there are some. With DeepSpeed, optimizer and block are part of DeepSpeed's configuration, as in
any other program; the Trainer fills in what is "auto" from its arguments.
"""

import argparse
import tempfile

import torch
import transformers

import coat_dist

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--deepspeed", action="store_true", help="ZeRO-2, with the block in its configuration")
parser.add_argument("--local_rank", type=int, help="given by the deepspeed command")
with_deepspeed = parser.parse_args().deepspeed
gpu = torch.cuda.is_available()


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        text = (7 * i + 3 * torch.arange(32)) % 64  # every number is 3 more than the one before
        return {"input_ids": text, "labels": text}


torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))

config, optimizers = None, (None, None)
if with_deepspeed:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "coat": {"activation": {"enabled": False}},
    }
else:
    optimizer = coat_dist.CoatAdamW(coat_dist.param_groups(model, weight_decay=0.1), lr=0.01)
    optimizers = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))

with tempfile.TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=30, per_device_train_batch_size=8, learning_rate=0.01, weight_decay=0.1,
        max_grad_norm=1.0, logging_steps=5, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not gpu,
        bf16=with_deepspeed, deepspeed=config,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Numbers(), optimizers=optimizers)
    trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    for number, loss in enumerate(losses, 1):
        print(f"step {5 * number}: loss {loss:.4f}", flush=True)
