"""What people type wrong: one line, from one rank, before anything is read or built."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from launch import prepare_data
from launch.common import command_line
from launch.common.command_line import Parser, local_path, number, whole_number
from launch.common.errors import DataError
from launch.data.blend import parse_blend, read_info, without_suffix
from launch.model.gpt import load_model_config
from launch.train.plan import plan
from launch.train.pretrain_options import parse, parser
from tests.launch.data.prepare_runs import argv, run
from tests.launch.pretrain_runs import REQUIRED, SEVEN
from tests.launch.tiny_data import make

STAGES = "--dry-run --data one --deepspeed_config zero1 --pipeline-parallel"
EXPERT = "--dry-run --data one --gpus 2 --model tiny-moe --expert-parallel"
REFUSED = {
    "pretrain": {
        "-lr 1": "unrecognized arguments: -lr 1",
        "--clip-grad 1": "--clip-grad: no such option, accepted: what pretrain.py --help lists",
        "--lr": "--lr: expected one argument",
        "--overwrite=1": "--overwrite: ignored explicit argument '1'",
        "--lr-schedule cosin": "--lr-schedule: got 'cosin', accepted: cosine, linear",
        "--lr nan": "--lr: got 'nan', accepted: a number, such as 3e-4",
        "--save=": "--save: got '', accepted: a path",
        "--overwrite junk": "unrecognized arguments: junk",
        "--profile-steps 12-10": "--profile-steps: got '12-10', accepted: FIRST-LAST",
        "--lr -1e-4": "--lr: got -0.0001, accepted: a number >= 0",
        "--lr-decay-steps 0": "--lr-decay-steps: got 0, accepted: an integer >= 1",
        "--warmup-steps 101": r"--warmup-steps: got 101, accepted: 0 to the end \(100\)",
        "--warmup-steps -1": "--warmup-steps: got -1",
        "--load x --init-from y": "--init-from: got 'y', accepted: absent with --load x, which",
        "--save-interval 5": "--save-interval: got 5, accepted: 0 without --save",
        "--load auto": "--load: got 'auto', accepted: auto only with --save",
        "--eval-only": "--eval-only: got True, accepted: only with --load or --init-from",
        "--dry-run --model bad.json": "--model: .*bad.json is not JSON",
        "--tran-steps 4": r"--tran-steps: no such option \(did you mean --train-steps\?\)",
        "--train-step=4": r"--train-step: no such option \(did you mean --train-steps\?\)",
        "--train_steps 4": r"--train_steps: no such option \(did you mean --train-steps\?\)",
        "--train-steps 1e6": "--train-steps: got '1e6', accepted: a whole number in digits, below",
        f"--train-steps {'9' * 30}": "--train-steps: got '9{30}', accepted: a whole number in",
        "--stop-at-step 101": "--stop-at-step: got 101, accepted: 1 to the run's last step",
        "--load auto --save s --overwrite": "--overwrite: got True, accepted: not with --load auto",
        "--sequence-parallel": "--sequence-parallel: got True, accepted: only with --tensor-para",
        "--profile-steps 10-12": r"--profile-steps: got \(10, 12\), accepted: only with --output",
        "--dry-run --model tinny": "--model: got tinny, accepted: a file, or one of .*tiny-moe",
        "--dry-run --model data.json": "--model: data.json describes no model, accepted: an obj",
        "--dry-run --model empty.json": "--model: empty.json holds nothing, accepted: a JSON obj",
        "--dry-run --deepspeed_config zero4": "--deepspeed_config: got zero4, .*zero2-bf16",
        "--dry-run --deepspeed_config bad.json": "--deepspeed_config: .*bad.json is not JSON",
        "--dry-run --data one two": "--data: two was made with another tokenizer than one: with ",
        "--dry-run --data one --min-lr 1": "--min-lr: got 1.0, accepted: 0 to the peak learning",
        "--dry-run --data one --gpus 2 --tensor-parallel 3": "--tensor-parallel: got 3, accepted",
        f"{STAGES} 0 --gpus 2": "--pipeline-parallel: got 0, accepted: an integer >= 1",
        f"{STAGES} 2 --gpus 3": r"--pipeline-parallel: got 2, accepted: a divisor of .* \(3\)",
        f"{STAGES} 1 --virtual-stages 2": "--virtual-stages: got 2, accepted: 1 with one pipeline",
        f"{STAGES} 2 --virtual-stages 2 --gpus 2": r".*a divisor of the layers of a stage \(1\)",
        f"{STAGES} 2 --expert-parallel 2 --gpus 4": "--expert-parallel: got 2, accepted: 1 with -",
        f"{STAGES} 2 --gpus 2": "--pipeline-parallel: got 2, accepted: 1",
        f"{STAGES} 2 --gpus 2 --deepspeed_config quickstart": "zero_optimization.stage: got 2",
        f"{EXPERT} 3": r"--expert-parallel: got 3, .*a divisor of model.num_moe_experts \(8",
        f"{EXPERT} 2 --deepspeed_config zero3": "zero_optimization.stage: got 3, accepted: 1 or 2",
        f"{EXPERT} 2 --model tiny": "--expert-parallel: got 2, .*model.num_moe_experts .1. and of",
        "--dry-run --data none": "--data: none.bin does not exist, accepted: ",
    },
    "planner": {
        "--tensor-parallel 3": r"--tensor-parallel: got 3, accepted: a divisor of .* \(8\)",
        "--model-override vocab_size=null": "model.vocab_size: got null, accepted: a number, or ",
        "--gpu v100": "--gpu: got 'v100', accepted: h200, h100, ",
        "--recompute-method block": ".*accepted: only with --recompute-granularity full",
        "--model tiny-moe --vocab-size 500": "--model: got a model with 8 experts, accepted: one w",
        "--pipeline-parallel 2": "--pipeline-parallel: got 2, accepted: 1",
        "--num-gpus 8": ".*did you mean --gpus?",
        "--gpu-memory 80apples": "--gpu-memory: got '80apples', accepted: a size such as",
        "--zero-stage 3": "--zero-stage: no such option",
        "--micro-batch Auto": "--micro-batch: got 'Auto', accepted: a whole number from",
    },
    "scaling": {
        "--steps 0": "--steps: got 0, accepted: an integer >= 1",
        "--predict 64": "--predict: no such option",
    },
    "prepare_data": {
        "--tokeniser x": r"--tokeniser: no such option \(did you mean --t",
        "": "--input: missing, accepted: a value",
        # Outputs are tried before inputs are read, in a way that stops root, too.
        "--input stdlib --tokenizer bytes --output bad.json/x": "--output: .*accepted: a folder",
        "--max-files 0": "--max-files: got '0', accepted: a whole number from 1",
    },
    "plot": {
        "": "the following arguments are required: RUN",
    },
    "convert_hf": {
        "--dtype fp8": "--dtype: got 'fp8', accepted: bfloat16, float16, float32",
        "--max-shard-size 5XB": "--max-shard-size: got '5XB', accepted: a size such as",
        "": "meta-llama: is no folder",
    },
    "to_universal": {
        "--load x": "one of the arguments --output --output_folder",
    },
}
"""Of each program: arguments, and a pattern with which the error begins."""
GIVEN = {
    "pretrain": REQUIRED,
    "planner": SEVEN,
    "scaling": ["--model", "tiny"],
    "convert_hf": ["--from", "meta-llama", "--to", "y"],
}
"""What comes before a row's arguments."""


def said(capsys, call, *words):
    """The one line that a program prints, with status 2."""
    capsys.readouterr()
    try:
        status = call(list(words))
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    assert status == 2 and not out and err.count("\n") == 1 and "usage" not in err, err
    return err.rstrip("\n")


@pytest.mark.parametrize(
    ("program", "words", "message"), [(p, *row) for p in REFUSED for row in REFUSED[p].items()]
)
@pytest.mark.usefixtures("no_launcher")
def test_refused_arguments_are_one_line(capsys, tmp_path, monkeypatch, program, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "data.json").write_text('{"tokens": 4, "documents": 1, "settings": {}}')
    make(tmp_path / "one", tokenizer="bpe:512")
    make(tmp_path / "two", tokenizer="hf:org/name", tokenizer_digest="e" * 64)
    before = sorted(tmp_path.iterdir())
    main = importlib.import_module(f"launch.{program}").main
    line = said(capsys, main, *GIVEN.get(program, []), *words.split())
    assert re.match(f"(prepare_data: )?error: {message}", line), line
    assert sorted(tmp_path.iterdir()) == before


PROGRAMS = [
    "convert_hf",
    "planner",
    "plot",
    "prepare_data",
    "pretrain",
    "scaling",
    "to_universal",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_misspelt_option_is_refused_before_torch_is_imported(program, tmp_path):
    """Workers of prepare_data.py import the program again, each of them."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}"}
    line = [sys.executable, Path(launch.__file__).with_name(f"{program}.py"), "--qqq"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert (
        done.returncode == 2 and "error: --qqq: no such option, accepted: what " in done.stderr
    ), done.stderr


def test_a_misspelt_option_that_is_needed_is_named_and_not_the_missing_one(capsys):
    line = said(capsys, parse, *REQUIRED[:-2], "--tran-steps", "4")
    assert line == "error: --tran-steps: no such option (did you mean --train-steps?)"
    missing = said(capsys, parse, *REQUIRED[2:])
    assert missing.startswith("error: the following arguments are required: --deepspeed_config")


def test_help_says_a_default_once_and_none_where_there_is_none():
    said = " ".join(parser().format_help().split())
    assert "None)" not in said and ") (default" not in said and "(default: 1)" in said


def test_other_ranks_wait_for_rank_0_and_print_no_help(capsys, monkeypatch):
    slept = []
    monkeypatch.setattr(command_line.time, "sleep", slept.append)
    monkeypatch.setenv("RANK", "3")
    assert said(capsys, parse, *REQUIRED, "--nonsense").startswith(
        "rank 3: error: --nonsense"
    ) and slept == [10]
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "--train-steps" in capsys.readouterr().out


def test_torchrun_repeats_the_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    line = said(capsys, parse, *REQUIRED, "--nonsense")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == line


def test_overrides_given_twice_all_count():
    given = "--model-override num_layers=1 --model-override seq_length=8 num_layers=3"
    args = parse([*REQUIRED, *given.split()])
    model = load_model_config(args.model, args.model_override)
    assert (model.num_layers, model.seq_length) == (3, 8)


def test_values_that_begin_with_a_dash():
    p = Parser()
    p.add_argument("--x", type=number)
    p.add_argument("--n", type=whole_number)
    p.add_argument("--split")
    args = p.parse_args(["--x", "-1e-4", "--n", "-3", "--split", "-1,2"])
    assert (args.x, args.n, args.split) == (-1e-4, -3, "-1,2")


def test_a_home_folder_also_behind_an_equals_sign(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    args = parse([*REQUIRED, "--save=~/runs", "--data", "~/d.bin"])
    assert args.save == "/home/somebody/runs" and args.data == ["/home/somebody/d"]
    with pytest.raises(argparse.ArgumentTypeError):
        local_path("a\0b")


def test_launchers_arguments_are_taken():
    args = parse(["--local_rank=3", "--deepspeed", *REQUIRED])
    assert args.local_rank == 3 and args.lr is None


def test_files_of_a_data_set_are_its_prefix(tmp_path, monkeypatch):
    prefix = make(tmp_path / "a dätaset")
    for suffix in ("", ".bin", ".idx", ".json"):
        assert parse_blend([prefix + suffix]) == ([prefix], None)
        assert parse_blend([f"0.3 {prefix}{suffix}"]) == ([prefix], [0.3])
        assert parse_blend(["0.3", prefix + suffix]) == ([prefix], [0.3])
        assert without_suffix(f"2 {prefix}{suffix}") == f"2 {prefix}"
    with pytest.raises(DataError, match="every prefix once"):
        parse_blend([prefix, f"{prefix}.bin"])
    with pytest.raises(DataError, match="every prefix once"):
        parse_blend([prefix, str(tmp_path / ".." / tmp_path.name / "a dätaset")])
    really = make(tmp_path / "x.bin")  # a prefix that ends so
    assert parse_blend([really]) == ([really], None) and parse_blend([f"{really}.idx"]) == (
        [really],
        None,
    )
    with pytest.raises(DataError, match=r"data: .*b\.bin does not exist"):
        read_info(str(tmp_path / "b"))


def test_a_learning_rate_of_zero_is_noted(tmp_path):
    one = make(tmp_path / "one")
    fine = plan(parse([*REQUIRED, "--data", f"{one}.bin"]), 1)
    assert fine.identity()["data"]["paths"] == [one] and fine.warning is None
    idle = plan(parse([*REQUIRED, "--data", one, "--lr", "0"]), 1)
    assert idle.warning == "note: --lr: 0, with which no weight changes"


def test_tokenizers_by_the_name_of_a_model(tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants, file_download

    (tmp_path / "a.txt").write_text("hello world " * 30)
    run(tmp_path / "a.txt", tmp_path / "x", tokenizer="bpe:260")
    given = argv(tmp_path / "a.txt", tmp_path / "y", "--quiet", tokenizer="hf:org/name")
    cache = tmp_path / "hub"
    for module in (constants, file_download.constants):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(cache))
    line = said(capsys, prepare_data.main, *given)
    assert line.startswith("prepare_data: error: --tokenizer: got hf:org/name, accepted: ")
    assert "hf download org/name tokenizer.json" in line
    snapshot = cache / "models--org--name/snapshots/0123"
    snapshot.mkdir(parents=True)
    (cache / "models--org--name/refs").mkdir()
    (cache / "models--org--name/refs/main").write_text("0123")
    (snapshot / "tokenizer.json").write_bytes((tmp_path / "x.tokenizer.json").read_bytes())
    assert prepare_data.main(given) == 0
    assert (tmp_path / "y.bin").read_bytes() == (tmp_path / "x.bin").read_bytes()


def test_ctrl_c_while_preparing(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_data, "tokenize", interrupted)
    (tmp_path / "a.txt").write_text("text")
    assert prepare_data.main(argv(tmp_path / "a.txt", tmp_path / "x")) == 130
    assert capsys.readouterr().err == "prepare_data: interrupted; the same command continues\n"
