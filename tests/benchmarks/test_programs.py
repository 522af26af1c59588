"""Each program of benchmarks/ once: with its smallest arguments where a CPU can run it, and its
``--help`` where it needs a GPU or minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from benchmarks.common import ROOT
from tests.support import Program
from tests.support.programs import CPU

SMALL = (
    "--model-override hidden_size=64 ffn_hidden_size=128 num_attention_heads=4 num_query_groups=2 "
    "seq_length=32 vocab_size=256 "
)
HF = "--sequence 32 --warm-up 1 --steps 3"
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node "
# Program, launcher, arguments, its result, and a ratio or measure that the result must have.
RUNS = [
    ("convergence.grpo", "", "--tiny --batch 16 --steps 4 --seeds 0", "grpo-tiny",
     "patched_blocks"),
    ("convergence.pairs", "", "--layers 1 --hidden 256 --sequence 16 --batch 2 --steps 4 --pairs 2 "
     "--vocabulary 300 --text-bytes 300K --processes 1 --folder OUT --name tiny", "tiny", "gap_se"),
    ("speed.whole_report", "", "--plot OUT/w.png", None, "| both | "),
    ("speed.collectives", "2", "--presets llama2-7b --tokens 64 --sequence 32 --layers 1 " + SMALL,
     "collectives", "gathered_bytes"),
    ("speed.families", "", "--tiny --tokens 64 --warm-up 1 --steps 1 --families llama3-8b "
     "qwen3-30b-a3b --variants bf16 coat", "families", "to_best_peer"),
    ("speed.frameworks", "", f"trainer --model tiny --micro-batches 2 {HF}",
     "frameworks", "to_best_peer"),
    ("speed.fsdp", "", "--model tiny --sequence 32 --micro-batch 2 --steps 3 --trunk 2 "
     "--variants CoatAdamW", "fsdp", "same_states"),
    ("speed.hf", "", f"--model tiny --variants adamw coat+flow --stage 3 --micro-batches 1 2 {HF}",
     "hf", "to_best_peer"),
    ("speed.lora", "", f"--model tiny-moe --micro-batch 2 {HF} --variants peft coat+fp8+checkpoint",
     "lora", "tokens_per_second_per_gpu"),
    ("speed.megatron_loop", "", "--ranks 2 --tensor-parallel 2 --layers 1 --steps 3 --variants "
     f"bf16 coat --resume-ranks 1 {SMALL}", "megatron-loop-2-ranks", "tokens_per_second_ratio"),
    ("speed.post_training", "", f"--model tiny --layers 1 --loss dpo --micro-batch 2 {HF} "
     "--variants coat+direct coat+flow+direct", "post-training-dpo", "first_loss"),
    ("speed.pipeline", "2", "--layers 2 --seq-length 32 --micro-batches 2 --virtual-stages 1 "
     f"--kinds coat --repeats 1 --vocabulary 256 {SMALL}", "pipeline-2-stages", "ratio"),
    ("speed.planner_check", "", "--tiny --only 7b-zero2-coat-mlp-recompute-mb4",
     "planner-check", "held: activations"),
    ("speed.save_checkpoint", "1", "--millions 1 --repeat 1", "save-checkpoint", "to DeepSpeed"),
    ("speed.saved_bytes", "", "--presets tiny --plot OUT/s.png", "saved-bytes", "bytes_per_token"),
    ("speed.step", "1", f"--layers 1 --steps 1 {SMALL}", "step", "wall_ms"),
    ("speed.whole", "", f"--models tiny --ranks 2 --variants both --micro-batches 1 2 {SMALL}",
     "whole", "tokens_per_second_per_gpu"),
]  # fmt: skip
HELP = [
    "accuracy.trajectories",
    "convergence.hf",
    "convergence.pairs_report",
    "speed.engine_step",
    "speed.experts",
    "speed.flow_kernels",
    "speed.layer",
    "speed.offload",
    "speed.optimizer",
    "speed.tp_layer",
    "speed.train",
]


def entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Keys of all objects in a JSON value, with what they hold."""
    if isinstance(value, dict):
        yield from value.items()
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from entries(one)


@pytest.mark.parametrize(("name", "ranks", "arguments", "result", "wanted"), RUNS)
def test_program(name, ranks, arguments, result, wanted, tmp_path) -> None:
    if name == "convergence.grpo":
        pytest.importorskip("trl")
    launcher = f"{TORCHRUN}{ranks} " if ranks else ""
    line = f"{launcher}-m benchmarks.{name} {arguments.replace('OUT', str(tmp_path))}"
    if result:
        line += f" --output {tmp_path}"
    program = Program(line.split(), tmp_path, ROOT, **CPU)
    printed, _ = program.communicate(300)
    assert program.returncode == 0, printed
    if "--plot" in line:
        (picture,) = tmp_path.glob("*.png")
        assert picture.stat().st_size > 5000
    if result is None:
        assert wanted in printed
        return
    room = name.partition(".")[0]
    found = json.loads((tmp_path / room / f"{result}.json").read_text())
    about = found.pop("environment")
    assert about["command"].startswith(f"python -m benchmarks.{name} ")
    assert about["commit"] and about["versions"]["torch"] and about["gpus"] == []
    values = list(entries(found))
    assert not [value for key, value in values if "error" in key], printed
    assert [value for key, value in values if key == wanted and value], printed


@pytest.mark.parametrize("name", HELP)
def test_help(name, monkeypatch, capsys) -> None:
    module = import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0 and module.__doc__.splitlines()[0][:30] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "given", "words"),
    [
        ("speed.hf", "--steps 0", "--steps: got 0, accepted: an integer >= 1"),
        ("speed.hf", "--variants coat+fp9", "--variants: got 'fp9', accepted: adamw, ao, "),
        ("speed.layer", "--tokens 5", "--tokens: got 5, accepted: a multiple of 4096"),
        ("speed.layer", "--presets tiny-moe", "num_moe_experts: got 8, accepted: null"),
        ("speed.layer", "--presets olmo-1b --peers .", "--peers: got the preset 'olmo-1b' with"),
        ("speed.optimizer", "--output setup.py/new", "--output: got setup.py/new, accepted: a"),
        ("speed.train", "--configs zero9", "--configs: got 'zero9', accepted: a name of configs"),
        ("speed.train", "--peers .", "--peers: got '.' with 0 archives, accepted: a folder"),
        ("speed.train", "--peers . --accumulation 2", "--accumulation: got 2 with a peer in FP8"),
        ("speed.whole", "--ranks 1", "--name: got a result of "),
        ("convergence.pairs_report", "--results none.json", "none.json: got "),
        ("convergence.pairs", "--micro-batch 7", "--micro-batch: got 7, accepted: a divisor of 64"),
    ],
)
def test_wrong_options_end_a_program_before_it_measures(
    program, given, words, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", [program, *given.split()])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{program}").main()
    assert ended.value.code == 2 and words in capsys.readouterr().err
