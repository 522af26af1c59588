"""Each example, started on the CPU by the very commands that its first lines give.

Of every example one command starts its processes from nothing; those of a second one are forked.
"""

import importlib.util
import re
import runpy
import sys

import pytest

from tests.examples.run import EXAMPLES, commands, start

CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    # No process imports torch.compile's backends, which Megatron asks for.
    "TORCHDYNAMO_DISABLE": "1",
}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
NEEDED = {
    "trainer": ("transformers", "accelerate"),
    "fine_tuning": ("transformers", "accelerate", "trl", "datasets"),
}


def test_all_are_here():
    assert NAMES == [
        "deepspeed_any_model",
        "fine_tuning",
        "megatron_deepspeed",
        "megatron_loop",
        "torch_loop",
        "trainer",
        "vision_language",
    ]


SELDOM = (
    *commands("fine_tuning"),  # minutes
    "torchrun --nproc_per_node 2 examples/megatron_loop",
    *(
        f"deepspeed --num_gpus 2 examples/{name}"
        for name in ("deepspeed_any_model", "megatron_deepspeed")
    ),
)
CASES = [
    pytest.param(name, command, marks=pytest.mark.slow if command.startswith(SELDOM) else ())
    for name in NAMES
    for command in commands(name)
] + [("fine_tuning", f"{commands('fine_tuning')[0]} --questions 3 --steps 12")]


@pytest.mark.parametrize(("name", "command"), CASES)
def test_command(name, command, tmp_path):
    if missing := [one for one in NEEDED.get(name, ()) if importlib.util.find_spec(one) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    printed = start(command, tmp_path, ranks=command != commands(name)[0], limit=1500, **CPU)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0], printed
    if name in ("torch_loop", "deepspeed_any_model"):
        taken = re.search(r"^moments: (\S+) bytes a parameter$", printed, re.MULTILINE)
        assert taken and 2.0 < float(taken[1]) < 2.2, printed
    if "megatron" in name or name in NEEDED:
        assert "FP8 flow: 4 of 4 blocks patched" in printed, printed
    if name == "fine_tuning":
        right = re.search(r"^(\d+) of (\d+) answers are right$", printed, re.MULTILINE)
        assert right and ("--steps" in command or int(right[1]) >= 0.95 * int(right[2])), printed
    if name == "vision_language":
        assert "FP8 flow: 8 of 8 blocks patched" in printed, printed
        assert "captions of pictures that are new" in printed, printed


@pytest.mark.parametrize("name", ["megatron_loop", "torch_loop"])
def test_what_it_is_not_told_to_do_is_refused(name, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    for argument, status, words in (
        ("--help", 0, commands(name)[-1]),
        ("--steps", 2, "unrecognized arguments: --steps"),
    ):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", argument])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        said = capsys.readouterr()
        assert ended.value.code == status and words in said.out + said.err
