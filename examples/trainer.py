"""The Trainer of transformers with FP8 moments and FP8 layers: one more import, and a DeepSpeed
configuration.

    python examples/trainer.py
    deepspeed --num_gpus 2 examples/trainer.py

Needs transformers and accelerate: pip install '/path/to/coat_dist[deepspeed,hf]'. Start it from the
root of this repository: examples/trainer.json, which names the optimizer and has the "coat" block,
is read from there. The Trainer fills in what is "auto". A small Llama learns to continue sequences
of numbers, on GPUs where there are some; the last lines say what ran in FP8.
"""

import tempfile

import torch
import transformers

import coat_dist  # noqa: F401  from here on, deepspeed.initialize honours the "coat" block, and the Trainer calls it


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        text = (7 * i + 3 * torch.arange(32)) % 64  # every number is 3 more than the one before
        return {"input_ids": text, "labels": text}


torch.manual_seed(0)
sizes = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes)
)
options = dict(
    max_steps=30,
    per_device_train_batch_size=8,
    learning_rate=0.01,
    weight_decay=0.1,
    save_strategy="no",
)
options |= dict(
    logging_steps=5, report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available()
)
output = tempfile.TemporaryDirectory()

arguments = transformers.TrainingArguments(
    output.name, bf16=True, deepspeed="examples/trainer.json", **options
)
trainer = transformers.Trainer(model, arguments, train_dataset=Numbers())
trainer.train()

if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for number, loss in enumerate(losses, 1):
        print(f"step {5 * number}: loss {loss:.4f}", flush=True)
    print(model.coat_patch_report)  # which layers run in FP8, which stay BF16, and why
