"""Pretraining over pipeline stages on gloo ranks: the numbers of one stage, checkpoints,
refusals.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from coat_dist import CoatConfigError
from launch.train.metrics import read_metrics
from tests.launch.pretrain_runs import FP32_GRADIENTS, command, configuration, losses, rank_main
from tests.support import run_ranks

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


def weights_after(rank, world, argv):
    """Whole names and values of this rank's weights at the end of a run."""
    from launch import pretrain
    from launch.train import pretrain_options, runtime
    from megatron_patches.parallel.pipeline import whole_names

    kept = []
    device = runtime.start(rank)
    p = pretrain.plan(pretrain_options.parse(argv), world)
    pretrain.train(p, device, interfere=lambda loop: kept.append(loop.engine.module))
    names = whole_names(kept[0])
    return {names[name]: value.detach().clone() for name, value in kept[0].named_parameters()}


def planned(argv, world=2):
    from launch import pretrain
    from launch.train import pretrain_options

    return pretrain.plan(pretrain_options.parse(argv), world)


def trained(work, run, config, world, *more, steps=4):
    found = {}
    for one in run_ranks(
        world, weights_after, command(work, run, config, *DROP_NOTHING, *more, steps=steps)
    ):
        found.update(one)
    return losses(run), found


BF16_OPTIMIZER = {**FP32_GRADIENTS, "gradient_clipping": 0}
TIED = ("tie_embeddings=true",)


@pytest.mark.parametrize(
    ("model", "stages", "settings"),
    [
        pytest.param((), TWO, {}, marks=pytest.mark.slow),
        (TIED, PARTS, {}),
        pytest.param(TIED, TWO, BF16_OPTIMIZER, marks=pytest.mark.slow),
        pytest.param(EXPERTS, TWO, {}, marks=pytest.mark.slow),
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
    tied = {"output_layer.weight"} if "tie_embeddings=true" in model else set()
    assert two[1].keys() - one[1].keys() == tied
    for name, value in one[1].items():
        assert torch.equal(value, two[1][name]), name
    if tied:
        assert torch.equal(
            two[1]["output_layer.weight"], one[1]["embedding.word_embeddings.weight"]
        )


def test_checkpoints_of_stages_name_what_they_hold_and_other_layouts_are_refused(work, tmp_path):
    config, save = configuration(tmp_path, 1), tmp_path / "save"
    stages = ["--model-override", "tie_embeddings=true", "num_layers=4", "--pipeline-parallel", "2"]
    parts = [*stages, "--virtual-stages", "2"]
    both = [*parts, "--save", save, "--load", "auto"]
    run_ranks(
        2,
        rank_main,
        command(work, tmp_path / "parts", config, *both, "--stop-at-step", "2", steps=4),
    )
    folder = save / "step00000002"
    listed = json.loads((folder / "manifest.json").read_text())
    assert {"mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"} <= listed["files"].keys()
    assert {k: listed["engine"][k] for k in ("tensor_parallel", "pipeline_stages")} == {
        "tensor_parallel": 1,
        "pipeline_stages": 2,
    }
    told = [
        torch.load(folder / f"mp_rank_0{i}_model_states.pt", weights_only=False) for i in (0, 1)
    ]
    stage = [one["universal_checkpoint_info"]["pipeline"] for one in told]
    assert [(s["stage"], s["stages"], s["virtual_stages"]) for s in stage] == [(0, 2, 2), (1, 2, 2)]
    assert (
        stage[1]["names"]["1.decoder.layers.0.mlp.linear_fc1.weight"]
        == "decoder.layers.3.mlp.linear_fc1.weight"
    )
    assert set(stage[0]["names"]) == {name for group in told[0]["param_shapes"] for name in group}
    ends = run_ranks(
        2, rank_main, command(work, tmp_path / "other", config, *stages, "--load", save, steps=4)
    )
    assert all("parallel.virtual_stages" in end and "launch/to_universal.py" in end for end in ends)


def poisoned_run(rank, world, argv):
    """A run whose last stage has an infinite loss in step 2 and whose first stage has a NaN
    gradient in step 3.
    """
    from launch import pretrain
    from launch.train import pretrain_options, runtime

    changed = []

    def interfere(loop):
        inner, steps = loop.steps.loss, loop._step

        def loss(model, batch):
            output = inner(model, batch)
            now = loop.progress.step + 1
            if now == 3 and model.pre_process:
                output.register_hook(lambda gradient: gradient * float("nan"))
            if now == 2 and model.post_process:
                return output * float("inf")
            return output

        def step():
            before = [p.detach().clone() for p in loop.engine.module.parameters()]
            record = steps()
            after = loop.engine.module.parameters()
            changed.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
            return record

        loop.steps.loss, loop._step = loss, step

    device = runtime.start(rank)
    pretrain.train(pretrain.plan(pretrain_options.parse(argv), world), device, interfere=interfere)
    return changed


def test_a_bad_number_on_one_stage_skips_the_step_on_all(work, tmp_path):
    config = configuration(tmp_path, 1)
    more = ["--pipeline-parallel", "2", "--model-override", "num_layers=2"]
    ends = run_ranks(2, poisoned_run, command(work, tmp_path / "run", config, *more, steps=5))
    assert ends == [[True, False, False, True, False]] * 2  # the last step has a learning rate of 0
    records = read_metrics(tmp_path / "run")
    assert [r.get("skipped") for r in records] == [
        None,
        "non-finite loss",
        "non-finite gradient norm",
        None,
        None,
    ]
    table = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert table["activations"]["bytes"] > 0 and table["gradients"]["elements"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [("tie_embeddings=true",), ("num_layers=4", "--separate-documents")]
)
def test_pipeline_tensor_sequence_and_data_parallel(work, tmp_path, kinds):
    """PP 2 x TP 2 with SP x DP 2 on eight ranks is TP 2 with SP x DP 2 on four, and a resume is
    exact.

    Norms are sums over shards of other parameters, so their last bits differ, and gradients are not
    clipped here.
    """
    adamw = {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.1}}
    config = configuration(tmp_path, 1, {"activation": {}}, optimizer=adamw, gradient_clipping=0)
    both = [*kinds, "--tensor-parallel", "2", "--sequence-parallel"]
    stages = [*both, "--pipeline-parallel", "2", "--save", tmp_path / "save", "--load", "auto"]
    four = trained(work, tmp_path / "four", config, 4, *both)
    trained(work, tmp_path / "eight", config, 8, *stages, "--stop-at-step", "2")
    names = {p.name for p in (tmp_path / "save" / "step00000002").iterdir()}
    assert {f"mp_rank_0{i}_model_states.pt" for i in range(4)} <= names
    eight = trained(work, tmp_path / "eight", config, 8, *stages)
    assert [r[:2] for r in four[0]] == [r[:2] for r in eight[0]] and len(four[0]) == 4
    assert [r[2] for r in four[0]] == pytest.approx([r[2] for r in eight[0]], rel=1e-6)
    for name, value in four[1].items():  # of the last data- and tensor-parallel rank of each stage
        assert torch.equal(value, eight[1][name]), name


STAGE_2 = {"zero_optimization": {"stage": 2, "overlap_comm": True}}


@pytest.mark.parametrize(
    ("world", "more", "changes", "said"),
    [
        (2, "--pipeline-parallel 0", {}, "--pipeline-parallel: got 0, accepted: an integer >= 1"),
        (3, TWO, {}, r"--pipeline-parallel: got 2, accepted: a divisor of .* \(3\)"),
        (3, "--pipeline-parallel 3", {}, r"accepted: a divisor of the model's layers \(2\)"),
        (
            2,
            "--virtual-stages 2",
            {},
            "--virtual-stages: got 2, accepted: 1 with one pipeline stage",
        ),
        (2, PARTS, {}, r"a divisor of the layers of a stage \(1\)"),
        (4, f"{TWO} --expert-parallel 2", {}, "--expert-parallel: got 2, accepted: 1 with --p"),
        (
            2,
            f"{PARTS} --model-override num_layers=4",
            {"gradient_accumulation_steps": 3},
            r"gradient_accumulation_steps: got 3, accepted: a multiple of --pipeline-parallel "
            r"\(2\)",
        ),
        (
            2,
            TWO,
            STAGE_2,
            "(?s)zero_optimization.stage: got 2, accepted: 1 with.*zero_optimization.overlap_comm: "
            "got true",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(work, tmp_path, world, more, changes, said):
    config = configuration(tmp_path, 1, **changes)
    with pytest.raises(CoatConfigError, match=said):
        planned(command(work, tmp_path / "run", config, *more.split()), world)


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


def test_programs_that_know_one_stage_say_so(work, tmp_path, capsys):
    from launch import planner, pretrain

    config = configuration(tmp_path, 1)
    dry = [*command(work, tmp_path / "run", config, *TWO.split()), "--dry-run", "--gpus", "2"]
    plan = ["--model", "tiny", "--gpus", "2"]
    for main, line in (
        (pretrain.main, dry),
        (planner.main, [*plan, *PARTS.split()]),
    ):
        assert main(line) == 2
        assert "--pipeline-parallel: got 2, accepted: 1" in capsys.readouterr().err


def test_a_checkpoint_of_stages_is_no_checkpoint_of_tensor_parallel_ranks():
    """Two ranks that divide the layers, two that share every layer: their manifests differ."""
    from coat_dist.checkpoint.save import describe

    for info, sizes in (({"pipeline": {"stages": 2}}, (1, 2)), ({}, (2, 1))):
        engine = SimpleNamespace(
            mp_world_size=2, optimizer=None, module=SimpleNamespace(universal_checkpoint_info=info)
        )
        found = describe(engine)
        assert (found["tensor_parallel"], found["pipeline_stages"]) == sizes
