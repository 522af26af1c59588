"""``launch/to_universal.py``: runs continue at other data- and tensor-parallel sizes, ZeRO
stages and optimizers.
"""

import pytest

from coat_dist.checkpoint.manifest import read_manifest
from launch import to_universal
from launch.train.metrics import read_metrics
from tests.launch.pretrain_runs import FP32_GRADIENTS, command, configuration, losses, rank_main
from tests.support import run_ranks

NO_DROPOUT = ["--model-override", "hidden_size=256", "hidden_dropout=0.0"]


def train(files, folder, name, world, config, *more, steps=20, overrides=()):
    argv = command(files, folder / name, config, *NO_DROPOUT, *overrides, *more, steps=steps)
    return run_ranks(world, rank_main, argv)[0]


def convert(source, target):
    assert to_universal.main(["--load", str(source), "--output", str(target)]) == 0


# Rank counts, ZeRO stages, tensor-parallel sizes and CoatAdamW or not, in three legs. A step is 8
# samples in all. tests/coat_dist/checkpoint/test_matrix.py has what the slow ones do in small.
LEGS = {
    "stages 1, 3, 2 and TP 1, 2, 1": [(2, 1, 1, True), (2, 3, 2, True), (1, 2, 1, True)],
    "OLMo-2, TP 2, 1, 2": [(2, 2, 2, True), (1, 2, 1, True), (2, 1, 2, True)],
    "fp32 moments, FP8, fp32": [(2, 2, 1, False), (2, 2, 1, True), (1, 3, 1, False)],
}
OFTEN = ("stages 1, 3, 2 and TP 1, 2, 1",)


@pytest.mark.parametrize(
    "case", [c if c in OFTEN else pytest.param(c, marks=pytest.mark.slow) for c in LEGS]
)
def test_three_legs_are_one_run(work, tmp_path, case):
    """Twelve steps, converted after the fourth and eighth: the losses of a run without a break."""
    straight, overrides = None, ["norm_placement=post", "qk_norm=full"] if "OLMo-2" in case else []
    for i, (world, stage, tp, coat) in enumerate(LEGS[case]):
        settings = {"optimizer": {}, "activation": {"enabled": False}} if coat else False
        accumulation = 4 * tp // world
        config = configuration(
            tmp_path, stage, settings, gradient_accumulation_steps=accumulation, **FP32_GRADIENTS
        )
        more = ["--tensor-parallel", tp, "--save", tmp_path / f"leg{i}", "--save-interval", "4"]
        if i == 0:
            assert "finished 12" in train(
                work, tmp_path, "straight", world, config, *more, steps=12, overrides=overrides
            )
            straight = losses(tmp_path / "straight")
        else:
            before = tmp_path / f"leg{i - 1}" / f"step{4 * i:08d}"
            convert(before, tmp_path / f"universal{i}")
            go_on = ["--load", tmp_path / f"universal{i}", "--stop-at-step", 4 * (i + 1)]
            end = train(
                work,
                tmp_path,
                f"part{i}",
                world,
                config,
                *more,
                *go_on,
                steps=12,
                overrides=overrides,
            )
            assert "step 8" in end or "finished 12" in end, end
    legs = [r for i in (1, 2) for r in losses(tmp_path / f"part{i}")]
    assert [(step, lr) for step, _, _, lr in legs] == [
        (step, lr) for step, _, _, lr in straight[4:]
    ]
    worst = max(abs(a[1] - b[1]) / b[1] for a, b in zip(legs, straight[4:], strict=True))
    print(f"{case}: losses differ by at most {worst:.2e}")
    assert worst < 4e-4  # data are drawn anew: up to 1.1e-4 seen; moments off by a tenth give 7e-4


def test_what_cannot_be_converted_is_named(work, tmp_path, capsys):
    config, save = configuration(tmp_path, 2, **FP32_GRADIENTS), tmp_path / "save"
    assert "finished 2" in train(work, tmp_path, "run", 2, config, "--save", save, steps=2)

    def refused(load, output=tmp_path / "out"):
        assert to_universal.main(["--load", str(load), "--output", str(output)]) == 2
        return capsys.readouterr().err

    convert(save, tmp_path / "universal")
    assert "is universal already" in refused(tmp_path / "universal")

    step = tmp_path / "universal" / "step00000002"
    assert read_manifest(step)["universal"]
    assert "universal" not in read_manifest(save / "step00000002")
    go_on = ["--load", tmp_path / "universal"]
    bigger = [*go_on, "--model-override", "ffn_hidden_size=384", "hidden_size=256"]
    assert "model.ffn_hidden_size: checkpoint has 256" in train(
        work, tmp_path, "run", 1, config, *bigger, steps=4
    )
    moment = next(step.glob("zero/*linear_fc1.weight/exp_avg.pt"))
    whole = moment.read_bytes()
    moment.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    assert "linear_fc1.weight/exp_avg.pt: damaged" in train(
        work, tmp_path, "run", 1, config, *go_on, steps=4
    )
    moment.write_bytes(whole)
    assert "finished 3" in train(work, tmp_path, "run", 1, config, *go_on, steps=3)
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [1, 2, 3]

    next((save / "step00000002").glob("*zero_pp_rank_1*optim_states.pt")).unlink()
    assert "_optim_states.pt: missing" in refused(save)
    assert not list((tmp_path / "out").glob("*"))
