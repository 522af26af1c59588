"""A transformers model under the Trainer, in BF16 and with the block alone: pretraining of 60 M
parameters, then LoRA.

    python -m benchmarks.convergence.hf [--steps 1000] [--seeds 0 1] [--text PREFIX \\
        --lora-text PREFIX]
    python -m benchmarks.convergence.hf --kinds bf16 again optimizer flow coat \\
        --lora-steps 0  # what a gap comes from

A Llama of 16 layers and 512 hidden units reads steps of 32 x 512 tokens of Python source; every
50th sequence is held out, so that it is of every package: the loss of one package alone differs by
0.6 % between runs that rounding parts. From the weights of the first BF16 run PEFT's LoRA then
learns C and C++ headers. All runs of a phase share the GPUs. A run is this file as a program
without a word of coat_dist in it, started by ``python -m coat_dist``; runs differ by their
DeepSpeed configuration alone. "again" is BF16 with a learning rate larger by 1e-5 of itself: what
chaos does to a run. Writes ``convergence/hf.json``: losses, seconds, and the gaps of the last
held-out losses to the first kind's in percent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
import torch

from benchmarks.arguments import argument_parser, int_from_0
from benchmarks.common import (
    ROOT,
    options,
    prepare_text,
    python_path,
    show,
    write_result,
)
from benchmarks.convergence.pairs_run import NUDGE
from benchmarks.speed.hf import shape
from coat_dist.nodes import free_port

SEQUENCE, BATCH, HELD_OUT = 512, 32, 50
KINDS = {
    "bf16": (False, False),
    "again": (False, False),
    "optimizer": (True, False),
    "flow": (False, True),
    "coat": (True, True),
    "boundaries": (True, True),
    "frozen": (True, True),
}
"""Kinds of runs: whether the optimizer is CoatAdamW, and whether layers run the flow. "boundaries"
is "coat" with all layers recomputed from 8-bit inputs; "frozen", in the LoRA phase alone, is "coat"
with frozen weights in FP8.
"""
MORE: dict[str, dict[str, Any]] = {
    "boundaries": {"boundaries": "fp8", "recompute": 999},
    "frozen": {"frozen_weights": "fp8"},
}
ADAPTERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Windows(torch.utils.data.Dataset):
    """Sequences of a token file: what is trained on, or what is held out."""

    def __init__(self, prefix: str, held_out: bool, most: int | None = None) -> None:
        kind = numpy.dtype(json.loads(Path(f"{prefix}.json").read_text())["dtype"])
        tokens = numpy.fromfile(f"{prefix}.bin", kind)
        windows = tokens[: len(tokens) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)
        self.windows = windows[(numpy.arange(len(windows)) % HELD_OUT == 0) == held_out][:most]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.windows[i].astype("int64"))
        return {"input_ids": tokens, "labels": tokens}


def train(case: dict[str, Any]) -> None:
    """One run under the Trainer."""
    import transformers

    torch.manual_seed(case["seed"])
    if case["base"]:
        model: Any = transformers.LlamaForCausalLM.from_pretrained(
            case["base"], dtype=torch.float32
        )
    else:
        config = transformers.LlamaConfig(
            **case["model"], max_position_embeddings=SEQUENCE, tie_word_embeddings=True
        )
        model = transformers.LlamaForCausalLM(config)
    if case["lora"]:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, target_modules=ADAPTERS, task_type="CAUSAL_LM")
        )
    arguments = transformers.TrainingArguments(
        case["folder"],
        deepspeed=case["deepspeed"],
        bf16=True,
        max_steps=case["steps"],
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=case["lr"],
        weight_decay=0.1,
        adam_beta2=0.95,
        lr_scheduler_type="cosine",
        warmup_steps=case["steps"] // 20,
        eval_strategy="steps",
        eval_steps=max(1, case["steps"] // 4),
        logging_steps=max(1, case["steps"] // 20),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=case["seed"],
        use_cpu=not torch.cuda.is_available(),
    )
    held_out = Windows(case["text"], True, case["evaluation"])
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Windows(case["text"], False), eval_dataset=held_out
    )
    trainer.train()
    history = trainer.state.log_history
    report = getattr(trainer.model_wrapped, "coat_patch_report", None)
    result = {
        "held_out_losses": [
            round(entry["eval_loss"], 4) for entry in history if "eval_loss" in entry
        ],
        "training_losses": [round(entry["loss"], 4) for entry in history if "loss" in entry],
        "seconds": next(entry["train_runtime"] for entry in history if "train_runtime" in entry),
        "patched_blocks": 0 if report is None else len(report.patched),
    }
    if case["save"]:
        model.save_pretrained(case["save"])
    Path(case["folder"], "result.json").write_text(json.dumps(result))


def deepspeed_settings(kind: str, **activation: Any) -> dict[str, Any]:
    """The configuration of a run. ``bf16`` is DeepSpeed's: weights in BF16 with fp32 masters."""
    optimizer, flow = KINDS[kind]
    params: dict[str, Any] = {"lr": "auto", "betas": "auto", "weight_decay": "auto"}
    if not optimizer:
        params["torch_adam"] = True
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "CoatAdamW" if optimizer else "AdamW", "params": params},
    }
    if optimizer or flow:
        found["coat"] = {"activation": {"enabled": flow, **MORE.get(kind, {}), **activation}}
    return found


def phase(program: str, cases: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run a program for all cases at the same time; the results that it wrote."""
    started = []
    for i, case in enumerate(cases):
        own = folder / f"{case['name']}-{case['seed']}"
        own.mkdir()
        given = json.dumps(case | {"folder": str(own)})
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        variables |= {"MASTER_PORT": str(free_port() + 7 * i), "PYTHONPATH": python_path(ROOT)}
        if gpus := torch.cuda.device_count():
            variables["CUDA_VISIBLE_DEVICES"] = str(i % gpus)
        line = [sys.executable, "-m", "coat_dist", program, "--run", given]
        with (own / "log").open("w") as log:
            process = subprocess.Popen(
                line, cwd=ROOT, env=os.environ | variables, stdout=log, stderr=log
            )
        started.append((case, own, process))
    found = []
    for case, own, process in started:
        if process.wait():
            sys.exit(
                f"error: {case['name']} ended with "
                f"{process.returncode}\n{(own / 'log').read_text()[-3000:]}"
            )
        result = json.loads((own / "result.json").read_text())
        found.append({"name": case["name"], "seed": case["seed"], **result})
        print(json.dumps(found[-1]), flush=True)
    return found


def gaps(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Gaps of the last held-out losses to those of the phase's first kind, in percent of means over
    seeds.
    """
    means: dict[str, float] = {}
    for name in {run["name"]: None for run in runs}:
        means[name] = fmean(run["held_out_losses"][-1] for run in runs if run["name"] == name)
    found: dict[str, float] = {}
    firsts: dict[str, float] = {}
    for name, mean in means.items():
        own_phase = name.partition("-")[0]
        if own_phase in firsts:
            found[name] = 100 * (mean / firsts[own_phase] - 1)
        else:
            firsts[own_phase] = mean
    return found


def prepare(folder: Path, tiny: bool) -> list[str]:
    """Python source and headers as tokens of one BPE; the prefixes."""
    torchs = Path(torch.__file__).parent
    python, headers = folder / "python", folder / "headers"
    inputs, vocabulary = ["stdlib", str(torchs.parent)], "bpe:16384"
    learnt, most, most_headers = "20M", "60M", "12M"
    if tiny:
        inputs, vocabulary = ["stdlib"], "bpe:512"
        learnt, most, most_headers = "200K", "300K", "300K"
    limits = ["--train-bytes", learnt, "--max-bytes", most]
    prepare_text(python, vocabulary, inputs, "--glob", "*.py", *limits)
    tokenizer, include = f"hf:{python}.tokenizer.json", [str(torchs / "include")]
    prepare_text(headers, tokenizer, include, "--glob", "*.h", "--max-bytes", most_headers)
    return [str(python), str(headers)]


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program. ``--text`` and ``--lora-text`` are prefixes of prepared tokens
    of one tokenizer.
    """
    parser = argument_parser(__doc__, steps=1000, text=None, lora_text=None, tiny=False)
    parser.add_argument("--lora-steps", type=int_from_0, default=300, help="0: pretraining alone")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=list(KINDS),
        default=["bf16", "coat", "frozen"],
        help="gaps are to the first, LoRA starts from it",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    return parser.parse_args(given)


def main() -> None:
    a = parse()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        text, headers = (a.text, a.lora_text) if a.text else prepare(folder, a.tiny)
        layers, width = (2, 256) if a.tiny else (16, 512)
        heads, base = width // 64, str(folder / "base")
        shared = {
            "model": shape(width, 3 * width, layers, heads, heads, 16384),
            "base": None,
            "lora": False,
            "save": None,
            "evaluation": 16 if a.tiny else 512,
            "steps": a.steps,
            "text": text,
        }
        cases = []
        for seed in a.seeds:
            for kind in a.kinds:
                lr = 1e-3 * (1 + NUDGE * (kind == "again"))
                own = {"name": f"pretraining-{kind}", "kind": kind, "seed": seed, "lr": lr}
                cases.append(shared | own | {"deepspeed": deepspeed_settings(kind)})
        cases[0]["save"] = base
        runs = phase(__file__, [case for case in cases if case["kind"] != "frozen"], folder)
        if a.lora_steps:
            tuned = {"base": base, "lora": True, "save": None, "lr": 5e-4, "text": headers}
            tuned["steps"] = a.lora_steps
            named = [case | tuned | {"name": f"lora-{case['kind']}"} for case in cases]
            runs += phase(__file__, named, folder)
    found = gaps(runs)
    show("gaps of held-out losses in %", found, **dict.fromkeys(found, "+.3f"))
    result = {"settings": options(a, "text", "lora_text"), "gaps_percent": found, "runs": runs}
    write_result("convergence/hf" + "-tiny" * a.tiny, result, a.output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        train(json.loads(sys.argv[2]))
    else:
        main()
