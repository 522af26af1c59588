"""From nothing to a fine-tuned model that calls a calculator, checked question by question.

    python examples/finetune_demo/run.py

Makes a small Llama with random weights and its tokenizer in Hugging Face's layout, generates
conversations, converts the model, fine-tunes it with a "coat" block, and asks what came out, loaded
by transformers, questions that it has not seen; the calculator is run for it. Ends with status 1
where it is right less often than --pass, or a program that it starts fails, and 2 for a wrong
option. Without a GPU it starts two processes; with one, `--size 300m --block both` trains 309
million parameters in BF16 and with the block.

Needs transformers: pip install '/path/to/coat_dist[hf]'.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # also where this project is not installed

from launch.command_line import Parser, local_path, number, whole_number  # noqa: E402

# The rate falls to a tenth of --lr at the end. Batches are sequences of a step, of all ranks.
RUNS = {
    "tiny": {
        "steps": 280,
        "batch": 16,
        "seq_length": 256,
        "lr": 4e-3,
        "conversations": 6000,
        "questions": 150,
    },
    "300m": {
        "steps": 600,
        "batch": 32,
        "seq_length": 1024,
        "lr": 3e-4,
        "conversations": 60000,
        "questions": 500,
    },
}


def deepspeed_config(block: str, batch: int) -> dict:
    config: dict = {
        "train_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {
            "type": "CoatAdamW" if block == "coat" else "AdamW",
            "params": {"betas": [0.9, 0.95], "weight_decay": 0.01},
        },
    }
    return {**config, "coat": {}} if block == "coat" else config


def start(gpu: bool, *command: str) -> None:
    """Run a program of launch/, whose output is shown."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        # Suppresses DeepSpeed's warnings about a missing GPU.
        **({} if gpu else {"DS_ACCELERATOR": "cpu"}),
    }
    done = subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"finetune_demo: {command[0]} ended with status {done.returncode}")


def show(chat: list[dict]) -> None:
    for message in chat:
        calls = [json.dumps(call["function"]) for call in message.get("tool_calls", [])]
        print(f"    {message['role']}: {message.get('content') or ''.join(calls)}")


def parse() -> argparse.Namespace:
    parser = Parser(
        prefix="finetune_demo: ",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", type=local_path, default="runs/finetune-demo", help="folder, made anew"
    )
    parser.add_argument("--size", choices=list(RUNS), default="tiny")
    parser.add_argument("--block", choices=["coat", "bf16", "both"], default="coat")
    parser.add_argument(
        "--ranks", type=whole_number, help="processes (default: 1 on a GPU, 2 elsewhere)"
    )
    parser.add_argument("--steps", type=whole_number, help="optimizer steps")
    parser.add_argument("--questions", type=whole_number, help="how many to ask")
    parser.add_argument(
        "--pass", type=number, default=90.0, dest="enough", help="per cent of right answers wanted"
    )
    args = parser.parse_args()
    args.output = Path(args.output).resolve()
    for name in ("ranks", "steps", "questions"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name}: got {value}, accepted: 1 or more")
    if find_spec("transformers") is None:
        parser.error("needs transformers: pip install '/path/to/coat_dist[hf]'")
    try:
        if (
            args.output.exists()
            and not (args.output / "demo.json").exists()
            and any(args.output.iterdir())
        ):
            parser.error(
                f"--output: got {args.output}, which holds something else, accepted: another folder"
            )
        shutil.rmtree(args.output, ignore_errors=True)
        args.output.mkdir(parents=True)
    except OSError as problem:  # a file, or no permission
        parser.error(
            f"--output: got {args.output}, accepted: a folder to write to ({problem.strerror})"
        )
    return args


def main() -> int:
    args = parse()
    import ask
    import model
    import task
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    began, run, gpu = time.monotonic(), RUNS[args.size], torch.cuda.is_available()
    output, ranks = args.output, args.ranks or (1 if gpu else 2)
    (output / "demo.json").write_text(json.dumps({"size": args.size}))

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    held_out = task.problems(args.questions or run["questions"], seed=1)
    trained = task.problems(
        run["conversations"], seed=2, without={question for question, *_ in held_out}
    )
    task.write(output / "train.jsonl", trained)
    task.write(output / "held-out.jsonl", held_out)
    say(f"{len(trained)} conversations; one of them:")
    show(task.conversation(*next(one for one in trained if len(one[1]) == 2)))

    chats = (task.conversation(*one) for one in itertools.islice(trained, 1000))
    model.make(
        output / "model", map(model.spoken, itertools.chain.from_iterable(chats)), args.size, seed=0
    )
    say(f"{output / 'model'}: a Llama with random weights")
    start(
        gpu,
        "launch/convert_hf.py",
        "--from",
        str(output / "model"),
        "--to",
        str(output / "weights"),
    )

    accuracy = {}
    for block in ["bf16", "coat"] if args.block == "both" else [args.block]:
        folder, config = output / block, output / f"{block}.json"
        config.write_text(json.dumps(deepspeed_config(block, run["batch"]), indent=1))
        steps = args.steps or run["steps"]
        say(
            f"fine-tuning, {block}: {steps} steps, {ranks} rank{'s' * (ranks > 1)} on "
            f"{'GPUs' if gpu else 'the CPU'}"
        )
        options = {
            "deepspeed_config": config,
            "model": output / "weights",
            "data": output / "train.jsonl",
            "valid": output / "held-out.jsonl",
            "data-cache": output / "prepared",
            "seq-length": run["seq_length"],
            "train-steps": steps,
            "warmup-steps": min(20, steps // 2),
            "eval-interval": 50,
            "lr": run["lr"],
            "min-lr": run["lr"] / 10,
            "output": folder,
        }
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks))
        start(
            gpu,
            *launcher,
            "launch/finetune.py",
            *(f"--{name}={value}" for name, value in options.items()),
        )
        say(f"asking {folder / 'hf'} {len(held_out)} questions")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
        trained_model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "hf", dtype=torch.bfloat16
        )
        trained_model = trained_model.to("cuda").eval() if gpu else trained_model.float().eval()
        answered = ask.answers(trained_model, tokenizer, [question for question, *_ in held_out])
        correct = [
            ask.right(chat, result) for chat, (*_, result) in zip(answered, held_out, strict=True)
        ]
        accuracy[block] = 100 * sum(correct) / len(correct)
        show(answered[0])
        for chat in [chat for chat, good in zip(answered, correct, strict=True) if not good][:2]:
            print("    wrong:")
            show(chat)
        say(f"{block}: {sum(correct)} of {len(correct)} right, {accuracy[block]:.1f} %")
        del trained_model
    (output / "demo.json").write_text(json.dumps({"size": args.size, "accuracy": accuracy}) + "\n")
    found = ", ".join(f"{block} {percent:.1f} %" for block, percent in accuracy.items())
    say(f"{found} (at least {args.enough:g} %)")
    return 0 if min(accuracy.values()) >= args.enough else 1


if __name__ == "__main__":
    sys.exit(main())
