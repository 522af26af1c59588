"""Checkpoints of coat engines in other programs: DeepSpeed's pipelines, sequence parallelism and
tools, transformers' Trainer, the page for DeepSpeed programs.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.coat_dist.checkpoint.small_saves import (
    BF16,
    build,
    flip,
    on_rank_0,
    small,
    step,
    told,
    weights,
)
from tests.coat_dist.checkpoint.universal_runs import train_and_save
from tests.coat_dist.deepspeed.test_pipeline_module import build as build_pipeline
from tests.coat_dist.deepspeed.test_pipeline_module import settings as pipeline_settings
from tests.coat_dist.deepspeed.test_pipeline_module import train as train_pipeline
from tests.coat_dist.deepspeed.zero_runs import CASES, run, snapshot
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.support import equal, run_ranks


def pipeline(rank, world, folder):
    """Two stages, each writing its layers."""
    layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), *(torch.nn.Linear(64, 64) for _ in "ab")]
    engine = build_pipeline(layers, pipeline_settings())
    train_pipeline(engine, 1)
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.save_checkpoint(folder)
    train_pipeline(engine, 1)
    engine.load_checkpoint(folder)
    same = equal(before, engine.module.parameters())
    files = json.loads(Path(folder, "global_step1", "manifest.json").read_text())["files"]
    layer = next(Path(folder, "global_step1").glob("layer_02*"))
    on_rank_0(rank, lambda: flip(layer))
    return same, sorted(files), told(engine.load_checkpoint, folder)


def test_a_pipelines_layers_are_summed_and_verified(tmp_path):
    for same, files, said in run_ranks(2, pipeline, str(tmp_path)):
        assert (
            same
            and [f for f in files if f.startswith("layer_02")]
            and f"{tmp_path}/global_step1/layer_02" in said
        )
        assert said.startswith("CheckpointError: ")


def trained(rank, world, folder):
    """Rotation, the best model, and resuming from the newest."""
    import transformers

    from tests.coat_dist.deepspeed.test_trainer import OPTIMIZER, Tokens, trainer

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": OPTIMIZER,
        "coat": {"activation": {"enabled": False}},
    }

    def make(steps):
        t = trainer(folder, steps, config)
        a = t.args
        a.save_steps, a.save_total_limit, a.eval_strategy, a.eval_steps = 2, 2, "steps", 2
        a.load_best_model_at_end, a.metric_for_best_model, a.greater_is_better = (
            True,
            "eval_loss",
            False,
        )
        t.eval_dataset = torch.utils.data.Subset(Tokens(), range(8))
        t.add_callback(
            transformers.trainer_callback.EarlyStoppingCallback(early_stopping_patience=100)
        )
        return t

    first = make(6)
    first.train()
    left = sorted(p.name for p in Path(folder).glob("checkpoint-*"))
    newest = Path(folder, left[-1])
    manifest = [p.parent.name for p in newest.glob("*/manifest.json")]
    os.makedirs(newest / ".unfinished-global_step9")
    again = make(8)
    again.train(resume_from_checkpoint=True)
    return left, manifest, again.state.global_step, again.state.best_model_checkpoint


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="not installed: transformers"
)
def test_the_trainers_rotation_resume_and_best_model(tmp_path):
    left, manifest, steps, best = run_ranks(1, trained, str(tmp_path))[0]
    assert len(left) == 2 and left[-1] == "checkpoint-6" and steps == 8 and best
    assert manifest == ["global_step6"]


def natively(rank, world, folder):
    """Save, train on, load what was saved with sequence parallelism; whatever is not as it was."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    wrong = []
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not built: gloo does
    deepspeed.init_distributed("gloo")
    parallel_state_sp.initialize_sequence_parallel(2)
    for case in ("zero-1", "zero-2"):
        engine = build(CASES[case], mpu=parallel_state_sp, sequence_parallel_size=2)
        run(engine, rank, 0, 2)
        before = snapshot(engine)
        engine.save_checkpoint(f"{folder}/{case}", tag="x")
        run(engine, rank, 2, 3)
        path, _ = engine.load_checkpoint(Path(folder, case), tag="x")
        wrong += changes(before, snapshot(engine)) + ["nothing loaded"] * (path is None)
        engine.destroy()
    return wrong


def test_a_run_with_sequence_parallelism_loads_what_it_wrote(tmp_path):
    assert run_ranks(2, natively, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
def test_deepspeeds_own_converter_names_ours_and_ends(case, tmp_path):
    from deepspeed.checkpoint import ds_to_universal

    run_ranks(2, train_and_save, CASES[case], str(tmp_path))
    given = [
        "--input_folder",
        f"{tmp_path}/plain",
        "--output_folder",
        f"{tmp_path}/out",
        "--inject_missing_state",
    ]
    with mock.patch("sys.argv", ["ds_to_universal", *given]):
        arguments = ds_to_universal.parse_arguments()
    with pytest.raises(
        KeyError, match="exp_avg: CoatAdamW's moments are .* convert .* launch/to_universal.py"
    ):
        ds_to_universal.main(arguments)


def tools(rank, world, folder):
    """What DeepSpeed makes of a checkpoint, and what an engine makes of it without a manifest."""
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    wrong = []
    engine = small(BF16)
    step(engine)
    engine.save_checkpoint(folder, tag="tools")
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    masters = deepspeed.utils.safe_get_full_fp32_param(engine.module.weight)
    wrong.extend(["zero_to_fp32"] * (not torch.equal(state["weight"], masters)))
    wrong.extend(["script"] * (not os.access(f"{folder}/zero_to_fp32.py", os.X_OK)))
    before = weights(engine)
    step(engine)
    type(engine).load_checkpoint(engine, folder)  # DeepSpeed's own
    wrong.extend(["DeepSpeed's own loading"] * (not equal(before, weights(engine))))
    os.remove(f"{folder}/tools/manifest.json")  # as of plain DeepSpeed
    with contextlib.redirect_stderr(io.StringIO()) as notes:
        engine.load_checkpoint(folder)
    note = f"note: {folder}/tools has no manifest.json: it is loaded unverified\n"
    wrong.extend(["note"] * (notes.getvalue().count(note) != 1))
    wrong.extend(["unverified"] * (not equal(before, weights(engine))))
    return wrong


def test_deepspeeds_own_tools_read_what_an_engine_saved(tmp_path):
    assert run_ranks(1, tools, str(tmp_path)) == [[]]


def without_frozen(rank, world, folder):
    """Names in the model's file, with and without frozen parameters."""
    net = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
    net[0].requires_grad_(False)
    engine = small(BF16, net)
    names = []
    for exclude in (False, True):
        engine.save_checkpoint(folder, tag="x", exclude_frozen_parameters=exclude)
        names.append(
            sorted(
                torch.load(f"{folder}/x/mp_rank_00_model_states.pt", weights_only=False)["module"]
            )
        )
    return names


def test_frozen_parameters_are_left_out(tmp_path):
    trained = ["1.bias", "1.weight"]
    assert run_ranks(1, without_frozen, str(tmp_path)) == [
        [["0.bias", "0.weight", *trained], trained]
    ]


def follow_the_page(rank, world, folder):
    """What docs/from-deepspeed.md says in steps 2 and 4, in its words: losses, and what moved
    over.
    """
    from launch import to_universal
    from tests.coat_dist.deepspeed.small_engine import quiet_deepspeed

    deepspeed = quiet_deepspeed()
    # The same optimizer, without a minute of compiling DeepSpeed's.
    deepspeed.ops.adam.FusedAdam = lambda params, adam_w_mode, **options: torch.optim.AdamW(
        params, **options
    )
    page = (Path(__file__).parents[3] / "docs" / "from-deepspeed.md").read_text(encoding="utf-8")
    (program, load), (before, after, key) = (
        re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)
        for language in ("python", "json")
    )
    (folder_now,) = re.findall(r"save into another folder,\s+`(\"[\w-]+\")`", page)
    (arguments,) = re.findall(r"^python -m launch\.to_universal (.*)$", page, re.M)
    printed, after_program = (
        io.StringIO(),
        "import coat_dist\n" + program.replace('"out"', folder_now),
    )
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        there, here = {}, {}
        for code, config, values in ((program, before, there), (after_program, after, here)):
            Path("ds.json").write_text(config)
            exec(code, values)
        status = to_universal.main(arguments.split())
        Path("ds.json").write_text(after.rstrip().removesuffix("}").rstrip() + ",\n" + key + "}")
        loading = after_program.replace("\ndata =", f"\n{load}\ndata =")
        exec(loading.replace("range(20)", "range(0)").partition("\nprint(")[0], now := {})
    weights = [[p.detach() for p in values["model"].parameters()] for values in (there, here, now)]
    same = [equal(weights[2], one) for one in weights[:2]]
    return (
        re.findall(r"^loss (\S+)$", printed.getvalue(), re.M),
        status,
        same,
        now["engine"].global_steps,
    )


def test_the_page_for_deepspeed_programs_can_be_followed_word_for_word(tmp_path):
    losses, status, same, steps = run_ranks(1, follow_the_page, str(tmp_path))[0]
    assert len(losses) == 2 and status == 0 and steps == 20
    assert same == [True, False], "the old run's checkpoint is what is converted"
