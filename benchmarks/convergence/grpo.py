"""A small model under TRL's GRPOTrainer, in BF16 and with the block alone: its rewards beside
BF16's.

    python -m benchmarks.convergence.grpo [--steps 400] [--seeds 0 1 2]
    python -m benchmarks.convergence.grpo --kinds bf16 optimizer flow coat  # what a gap comes from

A Llama first learns in BF16 to add two numbers of two digits, until about 30 % of its sampled
answers are right. All runs start from these weights, and GRPO goes on: 8 answers to a question are
sampled by transformers' ``generate``, a right digit earns a third, a right answer 1 more. Four
optimizer steps follow a generation, so their ratios to old log-probabilities are clipped. Runs
share the GPUs, and differ by their DeepSpeed configuration alone, as those of
``benchmarks.convergence.hf``. Writes ``convergence/grpo.json``: the mean reward of each generation,
at most 2; of each run its mean over the last quarter of them ("last"), and the part of 4000
questions that the trained model answers right without sampling ("greedy"); of both the mean and the
standard deviation over seeds, and the gaps to the first kind with their standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.arguments import argument_parser
from benchmarks.common import options, show, write_result
from benchmarks.convergence.hf import KINDS, MORE, deepspeed_settings, phase
from benchmarks.speed.hf import shape

ANSWERS, STEPS_PER_GENERATION = 8, 4
CHARACTERS = "0123456789+="
EOS = len(CHARACTERS)


def questions(count: int, generator: torch.Generator) -> list[tuple[str, str]]:
    """Random questions, all of one length, and their answers."""
    pairs = torch.randint(100, (count, 2), generator=generator).tolist()
    return [(f"{a:02}+{b:02}=", f"{a + b:03}") for a, b in pairs]


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward of a whole answer."""
    return [float(a == b) for a, b in zip(completions, answer, strict=True)]


def digits(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The part of an answer's digits that are right."""
    pairs = zip(completions, answer, strict=True)
    return [sum(map(str.__eq__, a, b)) / len(b) for a, b in pairs]


def tokenizer() -> Any:
    """A token a character."""
    import tokenizers
    import transformers

    vocabulary = {text: i for i, text in enumerate([*CHARACTERS, "<eos>", "<pad>"])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<pad>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    library.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def part_right(model: Any, asked: list[tuple[str, str]], **sampling: Any) -> float:
    """The part of questions that a model answers right."""
    characters = tokenizer()
    given = characters([question for question, _ in asked], return_tensors="pt").to(model.device)
    with torch.no_grad():
        made = model.eval().generate(
            given["input_ids"], max_new_tokens=4, pad_token_id=EOS + 1, **sampling
        )
    model.train()
    texts = characters.batch_decode(
        made[:, given["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return fmean(exact(texts, [answer for _, answer in asked]))


def prepare(base: str, layers: int, width: int, enough: float) -> float:
    """Train a model on right answers until a part of its sampled ones is right, which is returned,
    and save it.
    """
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **shape(width, 3 * width, layers, width // 64, width // 64, 16),
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS + 1,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    generator, characters, right = torch.Generator().manual_seed(0), tokenizer(), 0.0
    for step in range(2000):
        asked = questions(256, generator)
        if step % 10 == 0:
            right = part_right(model, asked, do_sample=True)
            if right >= enough:
                break
        texts = [question + answer + "<eos>" for question, answer in asked]
        ids = characters(texts, return_tensors="pt")["input_ids"].to(device)
        labels = ids.clone()
        labels[:, : len(asked[0][0])] = -100
        with torch.autocast(device, torch.bfloat16):
            model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(base)
    return right


def train(case: dict[str, Any]) -> None:
    """One run under the GRPOTrainer."""
    import datasets
    import transformers
    import trl

    datasets.disable_progress_bars()
    model = transformers.AutoModelForCausalLM.from_pretrained(case["base"], dtype=torch.float32)
    arguments = trl.GRPOConfig(
        case["folder"],
        deepspeed=case["deepspeed"],
        bf16=True,
        max_steps=case["steps"],
        per_device_train_batch_size=case["batch"],
        num_generations=ANSWERS,
        steps_per_generation=STEPS_PER_GENERATION,
        max_completion_length=4,
        gradient_checkpointing=False,
        learning_rate=case["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        logging_steps=STEPS_PER_GENERATION,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=case["seed"],
        use_cpu=not torch.cuda.is_available(),
    )
    rewards: list[Any] = [exact, digits]
    asked = questions(20_000, torch.Generator().manual_seed(case["seed"]))
    trainer = trl.GRPOTrainer(
        model,
        rewards,
        arguments,
        datasets.Dataset.from_list([{"prompt": q, "answer": a} for q, a in asked]),
        processing_class=tokenizer(),
    )
    trainer.train()
    held_out = questions(case["held_out"], torch.Generator().manual_seed(-1))
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    total = [round(entry["reward"], 4) for entry in logged]
    report = getattr(trainer.model_wrapped, "coat_patch_report", None)
    result = {
        "last": fmean(total[-max(1, len(total) // 4) :]),
        "greedy": part_right(trainer.accelerator.unwrap_model(trainer.model_wrapped), held_out),
        "seconds": trainer.state.log_history[-1]["train_runtime"],
        "patched_blocks": 0 if report is None else len(report.patched),
        "rewards": total,
        "right": [round(entry["rewards/exact/mean"], 4) for entry in logged],
        "clipped": [round(entry["clip_ratio/region_mean"], 4) for entry in logged],
    }
    Path(case["folder"], "result.json").write_text(json.dumps(result))


def compare(runs: Sequence[dict[str, Any]], measure: str) -> list[dict[str, Any]]:
    """By kind: a measure over seeds, and its gap to the first kind, seed by seed: runs of one seed
    are asked the same questions.
    """
    found: list[dict[str, Any]] = []
    first = [run[measure] for run in runs if run["name"] == runs[0]["name"]]
    for name in {run["name"]: None for run in runs}:
        values = [run[measure] for run in runs if run["name"] == name]
        gaps = [value - base for value, base in zip(values, first, strict=True)]
        one = {"kind": name, "mean": fmean(values), "gap": fmean(gaps)}
        if len(values) > 1:
            one |= {"deviation": stdev(values), "gap_se": stdev(gaps) / math.sqrt(len(gaps))}
        found.append(one)
        show(f"{measure} {name}", one, mean=".4f", deviation=".4f", gap="+.4f", gap_se=".4f")
    return found


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__, steps=400, layers=4, hidden=512, batch=512, lr=1e-4, tiny=False
    )
    kinds = [kind for kind in KINDS if kind not in {"again", *MORE}]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=["bf16", "coat"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    return parser.parse_args(given)


def main() -> None:
    a = parse()
    with tempfile.TemporaryDirectory() as made:
        base = f"{made}/base"
        layers, width, enough, count = a.layers, a.hidden, 0.3, 4000
        if a.tiny:
            layers, width, enough, count = 1, 256, 0.01, 100
        right = prepare(base, layers, width, enough)
        print(f"{100 * right:.0f} % of answers are right before GRPO", flush=True)
        cases = []
        for seed in a.seeds:
            for kind in a.kinds:
                case = {"name": kind, "seed": seed, "base": base, "batch": a.batch, "lr": a.lr}
                case["held_out"] = count
                case |= {"steps": a.steps, "deepspeed": deepspeed_settings(kind, evaluation="flow")}
                cases.append(case)
        runs = phase(__file__, cases, Path(made))
    found = {measure: compare(runs, measure) for measure in ("last", "greedy")}
    result = {"settings": options(a), "right": right, **found, "runs": runs}
    write_result("convergence/grpo" + "-tiny" * a.tiny, result, a.output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        train(json.loads(sys.argv[2]))
    else:
        main()
