"""A model in the frameworks that train it, with AdamW and with the block: tokens/s, peak, losses,
on one GPU.

    python -m benchmarks.speed.frameworks  # options and variants are those of benchmarks.speed.hf
    python -m benchmarks.speed.frameworks trl lightning  # these two

Nothing is recomputed; ``trl`` is its SFTTrainer. Frameworks that are not installed are left out.
One that needs other releases of its packages is run by itself, with them first on ``PYTHONPATH``.
Writes ``speed/frameworks.json``.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers

from benchmarks.common import options, write_result
from benchmarks.ranks import as_rank, run_variant
from benchmarks.speed import hf
from benchmarks.timing import median

FRAMEWORKS = {
    "trainer": "transformers",
    "trl": "trl",
    "accelerate": "accelerate",
    "lightning": "pytorch_lightning",
    "llamafactory": "llamafactory",
    "axolotl": "axolotl",
}
"""Frameworks and their packages."""


class Steps(transformers.TrainerCallback):
    """Losses, and when each was there: reading it has waited for the GPU."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs:
            self.seen.append((float(logs["loss"]), time.perf_counter()))


def train(
    name: str, model: Any, ds: dict[str, Any], rows: torch.Tensor, steps: Steps, folder: str
) -> None:
    batch = ds["train_micro_batch_size_per_gpu"]
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=batch)  # type: ignore[arg-type]
    if name == "accelerate":
        import accelerate

        accelerator = accelerate.Accelerator(
            deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=ds)
        )
        dummy = accelerate.utils.DummyOptim(model.parameters(), lr=1e-4)
        model, optimizer, loader = accelerator.prepare(model, dummy, loader)
        for ids in loader:
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps.on_log(logs={"loss": loss})
    elif name == "lightning":
        import pytorch_lightning as pl

        module = pl.LightningModule()
        module.model = model
        module.training_step = lambda ids: model(input_ids=ids, labels=ids).loss
        module.on_train_batch_end = lambda outputs, *_: steps.on_log(logs=outputs)
        module.configure_optimizers = lambda: None
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        strategy = pl.strategies.DeepSpeedStrategy(config=ds)
        pl.Trainer(max_epochs=1, devices=1, precision="bf16-true", strategy=strategy, **quiet).fit(
            module, loader
        )
    else:
        settings: dict[str, Any] = {
            "deepspeed": ds,
            "bf16": True,
            "per_device_train_batch_size": batch,
            "max_steps": len(rows) // batch,
            "learning_rate": 1e-4,
            "adam_beta2": 0.95,
            "weight_decay": 0.1,
            "use_cpu": not torch.cuda.is_available(),
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "disable_tqdm": True,
            "report_to": [],
            "save_strategy": "no",
            "output_dir": f"{folder}/out",
        }
        transformers.trainer.DEFAULT_CALLBACKS.append(steps)  # type: ignore[arg-type]
        if name == "trainer":
            data: Any = [{"input_ids": row, "labels": row} for row in rows]
            transformers.Trainer(
                model, transformers.TrainingArguments(**settings), train_dataset=data
            ).train()
            return
        import datasets
        from tokenizers import Tokenizer, models

        words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))  # pads alone
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="a", pad_token="b"
        )
        columns = {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}
        data = datasets.Dataset.from_dict({key: values.tolist() for key, values in columns.items()})
        if name == "trl":
            import trl

            arguments = trl.SFTConfig(**settings, max_length=rows.shape[1])
            trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer).train()
            return
        model.save_pretrained(folder)
        model.to("meta")  # and out of the GPU's memory
        tokenizer.save_pretrained(folder)
        data.save_to_disk(f"{folder}/rows")
        if name == "llamafactory":
            from llamafactory.train.tuner import run_exp

            own = {
                "model_name_or_path": folder,
                "stage": "pt",
                "do_train": True,
                "finetuning_type": "full",
                "dataset": "rows",
                "tokenized_path": f"{folder}/rows",
                "cutoff_len": rows.shape[1],
                "disable_gradient_checkpointing": True,
            }
            run_exp(settings | own)
        else:
            from axolotl.cli import args, config
            from axolotl.cli.train import do_train
            from axolotl.utils.dict import DictDefault

            own = {
                "base_model": folder,
                "datasets": [{"path": f"{folder}/rows"}],
                "sequence_len": rows.shape[1],
                "skip_prepare_dataset": True,
                "dataset_prepared_path": f"{folder}/prepared",
                "seed": 1,
                "micro_batch_size": batch,
                "gradient_accumulation_steps": 1,
                "optimizer": "adamw_torch",
            }
            do_train(config.load_cfg(DictDefault(settings | own)), args.TrainerCliArgs())


def measure(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """The record of a framework with a variant."""
    name, *parts = case["variant"].split("+")
    kind, shape = hf.MODELS[case["model"]]
    (batch,) = case["sizes"]
    config = transformers.AutoConfig.for_model(
        kind, **shape, max_position_embeddings=case["sequence"], use_cache=False
    )
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    count = (case["warm_up"] + case["steps"]) * batch
    rows = torch.randint(0, shape["vocab_size"], (count, case["sequence"]))
    steps, ds = Steps(), hf.settings(set(parts), case["stage"])
    ds["train_micro_batch_size_per_gpu"] = batch
    del ds["gradient_accumulation_steps"]  # Lightning refuses it
    # axolotl's log would, in each step.
    unchanged = mock.patch.object(torch.cuda, "reset_peak_memory_stats")
    with tempfile.TemporaryDirectory() as folder, unchanged:
        train(name, model, ds, rows, steps, folder)
    losses = [loss for loss, _ in steps.seen]
    ends = [end for _, end in steps.seen]
    times = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
    seconds = median(times[case["warm_up"] - 1 :])
    yield {
        "micro_batch": batch,
        "sequence": case["sequence"],
        "step_ms": 1e3 * seconds,
        "tokens_per_second_per_gpu": batch * case["sequence"] / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,  # 0 without a GPU
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def parse(given: list[str]) -> argparse.Namespace:
    names = [name for name in FRAMEWORKS if name in given]
    rest = [argument for argument in given if argument not in FRAMEWORKS]
    found = hf.parse(
        ["--variants", "adamw", "coat+flow", "--name", "frameworks", "--steps", "15", *rest]
    )
    found.frameworks, found.sequence = names or list(FRAMEWORKS), max(found.sequence)
    return found


def main() -> None:
    arguments = parse(sys.argv[1:])
    found: dict[str, list[dict[str, Any]]] = {}
    case = options(arguments, "variants", "limit", "micro_batches")
    case["sizes"] = arguments.micro_batches
    offline = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    for name in arguments.frameworks:
        if not importlib.util.find_spec(FRAMEWORKS[name]):
            print(f"{name}: no package {FRAMEWORKS[name]}")
            continue
        found[name] = []
        for variant in arguments.variants:
            own = case | {"variant": f"{name}+{variant}"}
            program = "benchmarks.speed.frameworks"
            found[name].append(run_variant(own, arguments.limit, program, offline))
        hf.compare(found[name])
        write_result(
            f"speed/{arguments.name}", {"settings": options(arguments), **found}, arguments.output
        )


if __name__ == "__main__":
    as_rank(measure)
    main()
