"""Pretraining over pipeline stages on gloo ranks: the numbers of one stage, checkpoints,
refusals.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from coat_dist import CoatConfigError
from launch.train import pretrain_options
from launch.train.metrics import read_metrics
from launch.train.plan import plan
from tests.launch.pretrain_runs import (
    FP32_GRADIENTS,
    command,
    configuration,
    losses,
    pretrain_on,
    weights_of,
)
from tests.support import equal, run_ranks, slow

NO_NOISE = {"optimizer": {"stochastic_rounding": False}, "activation": {}}
EXPERTS = (
    *(
        "num_moe_experts=4",
        "moe_router_topk=2",
        "moe_ffn_hidden_size=128",
        "moe_aux_loss_coeff=0.1",
    ),
    "moe_token_dispatcher_type=allgather",
)
TWO = "--pipeline-parallel 2"
PARTS = f"{TWO} --virtual-stages 2"
DROP_NOTHING = ["--model-override", "hidden_dropout=0", "num_layers=4"]


def trained(work, run, config, world, *more, steps=4):
    """Losses, and the weights of each rank."""
    argv = command(work, run, config, *DROP_NOTHING, *more, steps=steps)
    weights = [after for _, _, after in run_ranks(world, weights_of, argv)]
    return losses(run), weights


BF16_OPTIMIZER = {**FP32_GRADIENTS, "gradient_clipping": 0}
TIED = ("tie_embeddings=true",)


@pytest.mark.parametrize(
    ("model", "stages", "settings"),
    [
        slow((), TWO, {}),
        (TIED, PARTS, {}),
        slow(TIED, TWO, BF16_OPTIMIZER),
        slow(EXPERTS, TWO, {}),
    ],
)
def test_two_stages_are_one_to_the_bit(work, tmp_path, model, stages, settings):
    """Losses, gradient norms (clipped at each step) and all weights; evaluation, too.

    BF16_Optimizer sums the squares of a rank's gradients in fp32, which rounds otherwise where a
    rank has others.
    """
    config = configuration(tmp_path, 1, NO_NOISE, **{"gradient_clipping": 0.3, **settings})
    evaluate = ["--eval-interval", "2", "--eval-steps", "2"]
    one = trained(work, tmp_path / "one", config, 1, *model, *evaluate)
    two = trained(work, tmp_path / "two", config, 2, *model, *evaluate, *stages.split())
    assert len(one[0]) == 4 and all(norm > 0.3 for _, _, norm, _ in one[0])
    if "data_types" in settings:
        assert [r[2] for r in one[0]] == pytest.approx([r[2] for r in two[0]], rel=1e-6)
        assert [r[:2] for r in one[0]] == [r[:2] for r in two[0]]
    else:
        assert one[0] == two[0]
    valid = [
        [r.get("valid_loss") for r in read_metrics(tmp_path / name)] for name in ("one", "two")
    ]
    assert valid[0] == valid[1] and valid[0][1] is not None
    if model == EXPERTS:
        routers = [
            [r["load_balancing_loss"] for r in read_metrics(tmp_path / name)]
            for name in ("one", "two")
        ]
        assert routers[0] == pytest.approx(routers[1], rel=1e-6) and min(routers[0]) > 0
    (whole,), (first, last) = one[1], two[1]  # both have a tied embedding
    assert equal(first | last, whole) and equal(last | first, whole)


def test_non_finite_steps_of_a_stage_are_skipped_by_all(work, tmp_path):
    """An infinite loss on the last stage in step 2, a NaN gradient on the first one in step 3."""
    poisoned = [(2, "loss", 1), (3, "gradient", 0)]
    given = work, tmp_path / "run", configuration(tmp_path, 1), *TWO.split()
    ends = pretrain_on(2, *given, steps=5, poisoned=poisoned)
    assert all(end.startswith("finished 5") for end in ends)
    records = read_metrics(tmp_path / "run")
    why = {2: "non-finite loss", 3: "non-finite gradient norm"}
    assert {r["step"]: r["skipped"] for r in records if "skipped" in r} == why
    assert [r["changed"] for r in records] == [True, False, False, True, True]
    table = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert table["activations"]["bytes"] > 0 and table["gradients"]["elements"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [TIED, ("num_layers=4", "--separate-documents")])
def test_pipeline_tensor_sequence_and_data_parallel(work, tmp_path, kinds):
    """PP 2 x TP 2 with SP x DP 2 on eight ranks is TP 2 with SP x DP 2 on four.

    Norms are sums over shards of other parameters, so their last bits differ, and gradients are not
    clipped here.
    """
    adamw = {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.1}}
    config = configuration(tmp_path, 1, {"activation": {}}, optimizer=adamw, gradient_clipping=0)
    both = [*kinds, "--tensor-parallel", "2", "--sequence-parallel"]
    four = trained(work, tmp_path / "four", config, 4, *both)
    eight = trained(work, tmp_path / "eight", config, 8, *both, *TWO.split())
    assert [r[:2] for r in four[0]] == [r[:2] for r in eight[0]] and len(four[0]) == 4
    assert [r[2] for r in four[0]] == pytest.approx([r[2] for r in eight[0]], rel=1e-6)
    for rank, held in enumerate(eight[1]):
        for name, value in held.items():
            assert torch.equal(value, four[1][rank % 4][name]), name


@pytest.mark.parametrize(
    ("world", "stages", "said"),
    [
        (3, "--pipeline-parallel 3", r"accepted: a divisor of the model's layers \(4\)"),
        (2, PARTS, "gradient_accumulation_steps: got 3, accepted: a multiple of --pipeline-paral"),
    ],
)
def test_plan_refuses_what_stages_cannot_share(work, tmp_path, world, stages, said):
    config = configuration(tmp_path, 1, gradient_accumulation_steps=3)
    argv = command(work, tmp_path / "run", config, *DROP_NOTHING, *stages.split())
    with pytest.raises(CoatConfigError, match=said):
        plan(pretrain_options.parse(argv), world)


def test_stages_drop_other_elements_after_a_universal_checkpoint(one_rank, monkeypatch):
    from megatron.core import parallel_state

    from launch.train.runtime import get_random_state, reseed, set_random_state

    before, drawn = get_random_state(), []
    for stage in (0, 1, 0):
        monkeypatch.setattr(
            parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage
        )
        reseed(7)
        drawn.append(torch.rand(4).tolist())
    set_random_state(before)
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_checkpoint_of_stages_is_no_checkpoint_of_tensor_parallel_ranks():
    """Two ranks that divide the layers, two that share every layer: their manifests differ."""
    from coat_dist.checkpoint.save import describe

    for info, sizes in (({"pipeline": {"stages": 2}}, (1, 2)), ({}, (2, 1))):
        module = torch.nn.Module()
        module.universal_checkpoint_info = info
        engine = SimpleNamespace(
            mp_world_size=2,
            seq_dp_world_size=1,
            global_steps=0,
            zero_optimization_stage=lambda: 0,
            optimizer=None,
            module=module,
        )
        found = describe(engine)
        assert (found["tensor_parallel"], found["pipeline_stages"]) == sizes
