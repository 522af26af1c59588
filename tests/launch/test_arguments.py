"""The command line of ``pretrain.py``."""

import pytest

from coat_dist import CoatConfigError
from launch.train.arguments import parse

REQUIRED = ["--deepspeed_config", "x.json", "--model", "m.json", "--data", "d", "--train-steps", "100"]


def test_launchers_arguments_are_taken():
    args = parse(["--local_rank=3", "--deepspeed", *REQUIRED])
    assert args.local_rank == 3 and args.lr is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--train-steps", "0"], "--train-steps: got 0, accepted: an integer >= 1"),
        (["--tensor-parallel", "0"], "--tensor-parallel: got 0"),
        (["--stop-at-step", "101"], "--stop-at-step: got 101, accepted: 1 to the run's last step"),
        (["--save-interval", "5"], "--save-interval: got 5, accepted: 0 without --save"),
        (["--load", "auto"], "--load: got 'auto', accepted: auto only with --save"),
        (["--sequence-parallel"], "--sequence-parallel: got True, accepted: only with --tensor-parallel 2"),
        (["--warmup-steps", "-1"], "--warmup-steps: got -1"),
    ],
)
def test_impossible_arguments(more, message):
    with pytest.raises(CoatConfigError, match=message):
        parse([*REQUIRED, *more])


def test_abbreviations_and_unknown_arguments_are_refused(capsys):
    for wrong in ("--train-step", "--nonsense"):
        with pytest.raises(SystemExit) as leaving:
            parse([*REQUIRED, wrong, "1"])
        assert leaving.value.code == 2 and wrong in capsys.readouterr().err
