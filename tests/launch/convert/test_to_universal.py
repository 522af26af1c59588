"""``launch/to_universal.py``: runs continue at other data- and tensor-parallel sizes, ZeRO
stages and optimizers.
"""

from coat_dist.checkpoint.manifest import read_manifest
from launch import to_universal
from launch.train.metrics import read_metrics
from tests.launch.pretrain_runs import FP32_GRADIENTS, command, configuration, rank_main
from tests.support import run_ranks

NO_DROPOUT = ["--model-override", "hidden_size=256", "hidden_dropout=0.0"]


def train(files, folder, name, world, config, *more, steps=20, overrides=()):
    argv = command(files, folder / name, config, *NO_DROPOUT, *overrides, *more, steps=steps)
    return run_ranks(world, rank_main, argv)[0]


def convert(source, target):
    assert to_universal.main(["--load", str(source), "--output", str(target)]) == 0


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
