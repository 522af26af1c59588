"""Pretraining over pipeline stages on gloo ranks: the numbers of one stage, checkpoints, refusals."""

import pytest
import torch

from launch.training.metrics import read_metrics
from tests.launch.pretrain_runs import command, configuration, losses
from tests.support import run_ranks

NO_NOISE = {"optimizer": {"stochastic_rounding": False}, "activation": {}}
DROP_NOTHING = ["--model-override", "hidden_dropout=0", "num_layers=4"]


def weights_after(rank, world, argv):
    """Whole names and values of this rank's weights at the end of a run."""
    from launch import pretrain
    from launch.training import arguments, runtime
    from megatron_patches.pipeline import whole_names

    kept = []
    device = runtime.start(rank)
    p = pretrain.plan(arguments.parse(argv), world)
    pretrain.train(p, device, interfere=lambda loop: kept.append(loop.engine.module))
    names = whole_names(kept[0])
    return {names[name]: value.detach().clone() for name, value in kept[0].named_parameters()}


def trained(work, run, config, world, *more, steps=4):
    found = {}
    for one in run_ranks(world, weights_after, command(work, run, config, *DROP_NOTHING, *more, steps=steps)):
        found.update(one)
    return losses(run), found


@pytest.mark.parametrize(
    ("model", "stages", "settings"),
    [
        ((), ["--pipeline-parallel", "2"], {}),
        (("tie_embeddings=true",), ["--pipeline-parallel", "2", "--virtual-stages", "2"], {}),
    ],
)
def test_two_stages_are_one_to_the_bit(work, tmp_path, model, stages, settings):
    """Losses, gradient norms (clipped at each step) and all weights; evaluation, too."""
    config = configuration(tmp_path, 1, NO_NOISE, gradient_clipping=0.3, **settings)
    evaluate = ["--eval-interval", "2", "--eval-steps", "2"]
    one = trained(work, tmp_path / "one", config, 1, *model, *evaluate)
    two = trained(work, tmp_path / "two", config, 2, *model, *evaluate, *stages)
    assert one[0] == two[0] and len(one[0]) == 4 and all(norm > 0.3 for _, _, norm, _ in one[0])
    valid = [[r.get("valid_loss") for r in read_metrics(tmp_path / name)] for name in ("one", "two")]
    assert valid[0] == valid[1] and valid[0][1] is not None
    tied = {"output_layer.weight"} if model else set()
    assert two[1].keys() - one[1].keys() == tied
    for name, value in one[1].items():
        assert torch.equal(value, two[1][name]), name
    if model:
        assert torch.equal(two[1]["output_layer.weight"], one[1]["embedding.word_embeddings.weight"])
