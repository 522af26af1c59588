"""Each example on the CPU: by the very commands that its first lines give, from inside on two gloo
ranks, with its checkpoints, and with wrong arguments. ``tests/gpu/test_examples.py`` has GPUs.

Of every example one command starts its processes from nothing; those of a second one are forked.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re

import pytest
import torch

from megatron_patches.compat import older_than
from tests.examples.run import CHECKED, EXAMPLES, commands, in_a_rank, names_of, start
from tests.support import run_ranks
from tests.support.programs import CPU

MOMENTS = r"^moments: 2\.[01]\d* bytes a parameter$"
PATCHED = "FP8 flow: 4 of 4 blocks patched"
PRINTED = {
    "deepspeed_any_model": MOMENTS,
    "fine_tuning": PATCHED,
    "megatron_deepspeed": PATCHED,
    "megatron_loop": PATCHED,
    "torch_loop": MOMENTS,
    "trainer": PATCHED,
    "vision_language": r"(?s)FP8 flow: 8 of 8 blocks patched.*captions of pictures that are new",
}
NEEDED = {
    "fine_tuning": ("transformers", "accelerate", "trl", "datasets", "peft"),
    "trainer": ("transformers", "accelerate"),
}
QUICK = f"{commands('fine_tuning')[0]} --questions 3 --steps 12"
SELDOM = (
    *commands("fine_tuning"),  # minutes
    "torchrun --nproc_per_node 2 examples/megatron_loop.py",
    "deepspeed --num_gpus 2 examples/deepspeed_any_model.py",
    "deepspeed --num_gpus 2 examples/megatron_deepspeed.py",
)
COMMANDS = [("fine_tuning", QUICK)]
for name in sorted(path.stem for path in EXAMPLES.glob("*.py")):
    for command in commands(name):
        marks = [pytest.mark.slow] if command in SELDOM else []
        COMMANDS.append(pytest.param(name, command, marks=marks))


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_command(name, command, tmp_path) -> None:
    for package in NEEDED.get(name, ()):
        if importlib.util.find_spec(package) is None:  # imported, some would take seconds
            pytest.skip(f"no package {package}")
    printed = start(command, tmp_path, ranks=command != commands(name)[0], limit=1500, **CPU)
    losses = re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)
    falling([float(loss) for loss in losses], 6)
    assert re.search(PRINTED[name], printed, re.MULTILINE), printed
    if name == "fine_tuning":
        right = re.search(r"^(\d+) of (\d+) answers are right$", printed, re.MULTILINE)
        assert right and (command == QUICK or int(right[1]) >= 0.95 * int(right[2])), printed


@pytest.mark.parametrize("name", CHECKED)
def test_learns_with_what_it_claims(name) -> None:
    results = run_ranks(2, in_a_rank, name)
    if name == "megatron_deepspeed":
        assert results[0] == results[1], "tensor-parallel ranks have one loss"


@pytest.mark.skipif(
    older_than("0.15"), reason="megatron-core 0.14 saves in this format with numpy 1 only"
)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_loop_goes_on_from_its_last_save_on_one_rank(ranks, tmp_path) -> None:
    ((whole,), *_) = run_ranks(ranks, in_a_rank, "megatron_loop", [str(tmp_path)])
    (tmp_path / "latest").write_text("step20")
    ((rest,),) = run_ranks(1, in_a_rank, "megatron_loop", [str(tmp_path)])
    assert len(rest) == len(whole) - 20
    if ranks == 1:
        assert rest == whole[20:]
    else:
        assert rest[0] < sum(whole[15:20]) / 5, "weights, moments and schedule of the last save"


def falling(losses: list[float], steps: int) -> list[float]:
    assert len(losses) == steps and losses[-1] < 0.8 * losses[0], losses
    return losses


@pytest.mark.slow
def test_vision_language_goes_on_from_its_checkpoint(tmp_path) -> None:
    output = tmp_path / "results.json"
    both = ["--zero", "3", "--checkpoint", str(tmp_path / "saved"), "--output", str(output)]
    more = [*both, "--steps", "12", "--block", "coat"]
    calls = [[*both, "--steps", "10"], [*both, "--steps", "10"], more, [*more, "--zero", "2"]]
    for first, again, later, refused in run_ranks(2, in_a_rank, "vision_language", *calls):
        assert refused == 2, "a checkpoint of another ZeRO stage"
        bf16, coat = (falling(first[block]["losses"], 10) for block in ("bf16", "coat"))
        assert coat != bf16 and coat == pytest.approx(bf16, rel=0.05)
        assert again["coat"]["losses"] == []
        assert again["coat"]["held_out"] == first["coat"]["held_out"]
        falling([coat[0], *later["coat"]["losses"]], 3)
    assert len(json.loads(output.read_text())["results"]["coat"]["losses"]) == 2


@pytest.mark.slow
def test_vision_language_over_tensor_parallel_ranks_and_frozen(tmp_path) -> None:
    """Two ranks share every layer, also behind a frozen tower, which is the one that the first
    run has trained.
    """
    common = ["--tp", "2", "--steps", "8", "--block", "coat", "--zero"]
    saved = ["2", "--checkpoint", str(tmp_path)]
    calls = [
        [*common, *saved],
        [*common, "3", "--attention", "fp8"],
        [*common, *saved, "--vision", "frozen"],
    ]
    ranks = run_ranks(2, in_a_rank, "vision_language", *calls)
    zero2, zero3, _ = [falling(result["coat"]["losses"], 8) for result in ranks[0]]
    assert zero2 == ranks[1][0]["coat"]["losses"], "tensor-parallel ranks have one loss"
    assert zero2 != zero3 and zero2 == pytest.approx(zero3, rel=0.1)
    file = "global_step8/mp_rank_00_model_states.pt"
    trained, frozen = (
        torch.load(tmp_path / name / file, weights_only=False)["module"]
        for name in ("coat", "coat_frozen")
    )
    for key, value in trained.items():
        if torch.is_tensor(value):
            assert torch.equal(value, frozen[key]) == key.startswith("vision."), key


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["trained", "frozen"])
def test_vision_language_describes_new_pairs(vision, tmp_path) -> None:
    output = tmp_path / "results.json"
    program = "python examples/vision_language.py --size small"
    start(f"{program} --vision {vision} --output {output}", limit=3600, **CPU)
    for result in json.loads(output.read_text())["results"].values():
        assert result["held_out"]["captions"] >= 0.85, result["held_out"]


def test_held_out_pairs_never_occur_in_training() -> None:
    shapes = importlib.import_module("examples.vision.shapes")
    pairs = []
    for held_out in (True, False):
        scenes = shapes.sample(20000, torch.Generator().manual_seed(1), held_out)
        pairs.append({tuple(sorted(scene[:2])) for scene in scenes.tolist()})
    assert [len(one) for one in pairs] == [37, 263] and not pairs[0] & pairs[1]


def test_pictures_show_the_colours_of_their_captions() -> None:
    shapes = importlib.import_module("examples.vision.shapes")
    generator = torch.Generator()
    scenes = shapes.sample(200, generator)
    images = shapes.draw(scenes, 28, generator)
    channels = {"red": [1, 0, 0], "green": [0, 1, 0], "blue": [0, 0, 1], "yellow": [1, 1, 0]}
    for image, tokens in zip(images, shapes.captions(scenes), strict=True):
        words = shapes.sentence(tokens).split()
        halves = image.split(14, dim=2 if "left" in words else 1)
        for half, colour in zip(halves, (words[2], words[-2]), strict=True):
            bright = (half > 0.3).flatten(1).sum(1)
            assert [int(n > 10) for n in bright] == channels[colour], words


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("megatron_loop", "--help", commands("megatron_loop")[-1]),
        ("megatron_loop", "--steps", "unrecognized arguments: --steps"),
        ("torch_loop", "--steps", "unrecognized arguments: --steps"),
        ("vision_language", "--steps 0", "--steps: got 0, accepted: 1 or more"),
        ("vision_language", "--tp 2", "--tp: got 2, accepted: a divisor of the number of ranks, 1"),
        ("vision_language", "--block bf16 --attention fp8", "got fp8 with --block bf16, accepted:"),
        ("vision_language", "--output .", "--output: got ., a folder, accepted: a JSON file"),
        ("vision_language", f"--checkpoint {__file__}", "accepted: a place to write to"),
    ],
)
def test_wrong_arguments(name, arguments, message, monkeypatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        names_of(name, *arguments.split())
    said = capsys.readouterr()
    assert ended.value.code == (0 if arguments == "--help" else 2)
    assert message in said.out + said.err
