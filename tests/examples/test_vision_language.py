"""The vision-language example on two ranks (gloo): ranks that divide data or layers, ZeRO-2 and 3,
frozen towers, checkpoints; and, in minutes (``slow``), that it learns what it claims.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.examples.run import EXAMPLES, ROOT, start
from tests.support import run_ranks

CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
BLOCKS = [
    f"{stack}.decoder.layers.{i}.{block}"
    for stack in ("vision", "language")
    for i in range(2)
    for block in ("self_attention", "mlp")
]


def example(rank, world, *calls):
    """What the program returns for each list of arguments, one after the other in one process."""
    from megatron.core import parallel_state

    os.chdir(ROOT)
    results = []
    with (
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
    ):
        captions = importlib.import_module("vision.captions")
        # Most of a run's time, a word after the other: of fewer pictures here.
        evaluate = captions.evaluate
        few = mock.patch.object(
            captions, "evaluate", lambda engine, n, *a, **k: evaluate(engine, n // 4, *a, **k)
        )
        few.start()
        for arguments in calls:
            program = str(EXAMPLES / "vision_language.py")
            with mock.patch.object(sys, "argv", [program, "--size", "tiny", *arguments]):
                try:
                    results.append(runpy.run_path(program, run_name="__main__")["results"])
                except SystemExit as ended:
                    results.append(ended.code)
            parallel_state.destroy_model_parallel()
    return results


def falls(losses, steps):
    assert len(losses) == steps and losses[-1] < 0.8 * losses[0], losses


@pytest.mark.slow
def test_data_parallel_with_checkpoints(tmp_path):
    """A run that has ended is loaded whole; one that is to take more steps goes on where it
    ended.
    """
    both = [
        "--zero",
        "3",
        "--checkpoint",
        str(tmp_path / "saved"),
        "--output",
        str(tmp_path / "results.json"),
    ]
    other = [*both, "--zero", "2", "--steps", "12", "--block", "coat"]
    calls = (
        [*both, "--steps", "10"],
        [*both, "--steps", "10"],
        [*both, "--steps", "12", "--block", "coat"],
        other,
    )
    for first, again, more, refused in run_ranks(2, example, *calls):
        assert refused == 2, "a checkpoint of another ZeRO stage"
        assert list(first) == ["bf16", "coat"] and list(more) == ["coat"]
        for block, result in first.items():
            falls(result["losses"], 10)
            assert again[block]["losses"] == []
            assert all(
                again[block][pictures] == result[pictures] for pictures in ("held_out", "trained")
            )
        assert (
            first["coat"]["patched"] == BLOCKS
            and first["coat"]["left"] == {}
            and "patched" not in first["bf16"]
        )
        assert first["coat"]["losses"] != first["bf16"]["losses"]
        assert first["coat"]["losses"] == pytest.approx(first["bf16"]["losses"], rel=0.05)
        assert (
            len(more["coat"]["losses"]) == 2
            and max(more["coat"]["losses"]) < 0.8 * first["coat"]["losses"][0]
        )
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["device"] == "CPU" and len(written["results"]["coat"]["losses"]) == 2


@pytest.mark.slow
def test_tensor_parallel_and_frozen(tmp_path):
    """Two ranks share every layer, also behind a frozen tower, which is the one that the first
    run has trained.
    """
    common = ["--tp", "2", "--steps", "8", "--block", "coat"]
    frozen = [*common, "--vision", "frozen", "--zero", "2", "--checkpoint", str(tmp_path)]
    calls = (
        [*common, "--zero", "2", "--checkpoint", str(tmp_path)],
        [*common, "--zero", "3", "--attention", "fp8"],
        frozen,
    )
    ranks = run_ranks(2, example, *calls)
    for (zero2, zero3, frozen), (other, *_) in zip(ranks, ranks[::-1], strict=True):
        for result in (zero2, zero3, frozen):
            falls(result["coat"]["losses"], 8)
            assert result["coat"]["patched"] == BLOCKS
        assert zero2["coat"]["losses"] == other["coat"]["losses"], (
            "tensor-parallel ranks have one loss"
        )
        assert zero2["coat"]["losses"] != zero3["coat"]["losses"]
        assert zero2["coat"]["losses"] == pytest.approx(zero3["coat"]["losses"], rel=0.1)
    states = [
        torch.load(
            tmp_path / name / "global_step8" / f"mp_rank_0{rank}_model_states.pt",
            weights_only=False,
        )["module"]
        for name in ("coat", "coat_frozen")
        for rank in range(2)
    ]
    for trained, behind in zip(states[:2], states[2:], strict=True):
        same = {
            name
            for name, t in trained.items()
            if torch.is_tensor(t) and torch.equal(t, behind[name])
        }
        assert {name.split(".")[0] for name in same} == {"vision"}
        assert same == {
            name for name, t in trained.items() if name.startswith("vision.") and torch.is_tensor(t)
        }


@pytest.fixture(scope="module")
def shapes():
    return importlib.import_module("examples.vision.shapes")


def test_pairs_that_are_held_out_never_occur_in_training(shapes):
    def pairs(held_out):
        scenes = shapes.sample(20000, torch.Generator().manual_seed(1), held_out)
        return {tuple(sorted(scene[:2])) for scene in scenes.tolist()}

    assert len(pairs(True)) == 37 and len(pairs(False)) == 263 and not pairs(True) & pairs(False)


def test_pictures_are_the_seeds_and_show_their_captions(shapes):
    """Each thing is where the caption says, in its colour, and a large one covers more."""
    generator = torch.Generator().manual_seed(3)
    scenes = shapes.sample(200, generator)
    state = generator.get_state()
    images = shapes.draw(scenes, 28, generator)
    assert images.shape == (200, 3, 28, 28)
    assert torch.equal(images, shapes.draw(scenes, 28, generator.set_state(state)))
    for image, tokens in zip(images, shapes.captions(scenes), strict=True):
        words = shapes.sentence(tokens).split()
        assert len(words) == (10 if "left" in words else 9) and tokens[len(words)] == shapes.END
        halves = image.split(14, dim=2 if "left" in words else 1)
        covered = []
        for half, (size, colour) in zip(halves, (words[1:3], words[-3:-1]), strict=True):
            bright = (half > 0.3).flatten(1)
            channels = {
                "red": (1, 0, 0),
                "green": (0, 1, 0),
                "blue": (0, 0, 1),
                "yellow": (1, 1, 0),
            }[colour]
            assert tuple(int(n > 10) for n in bright.sum(1)) == channels, words
            covered.append((size == "large", int(bright.any(0).sum())))
        if covered[0][0] != covered[1][0]:
            assert sorted(covered)[0][1] < sorted(covered)[1][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: got 0, accepted: 1 or more"),
        (["--tp", "2"], "--tp: got 2, accepted: a divisor of the number of ranks, 1, and of heads"),
        (
            ["--block", "bf16", "--attention", "fp8"],
            "--attention: got fp8 with --block bf16, accepted: bf16",
        ),
        (["--block", "fp8"], "--block: got 'fp8', accepted: coat, bf16, both"),
        (["--step", "3"], "--step: no such option (did you mean --steps?)"),
        (["--output", "."], "--output: got ., a folder, accepted: a JSON file"),
        (
            ["--checkpoint", __file__],
            f"--checkpoint: got {__file__}, accepted: a place to write to",
        ),
    ],
)
def test_wrong_arguments(arguments, message, monkeypatch, capsys):
    program = str(EXAMPLES / "vision_language.py")
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(program, run_name="__main__")
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["trained", "frozen"])
def test_captions_of_pairs_that_are_new_are_right(vision, tmp_path):
    output = tmp_path / "results.json"
    start(
        f"python examples/vision_language.py --size small --vision {vision} --output {output}",
        limit=3600,
        **CPU,
    )
    for block, result in json.loads(output.read_text())["results"].items():
        assert result["held_out"]["captions"] >= 0.85, (block, result["held_out"])
