"""Universal checkpoints from torch's AdamW to CoatAdamW and back."""

import pytest
import torch

from tests.coat_dist.checkpoint.universal_runs import WithBuffer, build, contents, wrong_codes
from tests.coat_dist.deepspeed.zero_runs import CASES, run
from tests.support import run_ranks

MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


def adamw(rank, world, settings, folder, load):
    """A run of plain DeepSpeed with torch's AdamW, saved after five steps; or one that loads
    what CoatAdamW saved.
    """
    import deepspeed

    from coat_dist.checkpoint.universal.load import enable_universal_load
    from tests.coat_dist.deepspeed.small_engine import quiet_deepspeed

    quiet_deepspeed()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": load},
        **settings,
    }
    with deepspeed.zero.Init(
        config_dict_or_path=config, enabled=settings["zero_optimization"]["stage"] == 3
    ):
        model = WithBuffer()
    # The same groups as build() has, in the same order.
    named = {n: p for n, p in model.named_parameters() if p.requires_grad and n != "scale"}
    groups = [
        {
            "params": [p for p in named.values() if len(getattr(p, "ds_shape", p.shape)) > 1],
            "weight_decay": 0.1,
        }
    ]
    groups += [{"params": [p for p in named.values() if len(getattr(p, "ds_shape", p.shape)) < 2]}]
    groups += [{"params": [model.scale]}]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups,
        optimizer=lambda g: torch.optim.AdamW(g, lr=0.01),
        config=config,
    )
    if load:
        enable_universal_load(engine)
        engine.load_checkpoint(folder, tag="universal")
    else:
        run(engine, rank, 0, 5)
        engine.save_checkpoint(folder, tag="plain")
    from deepspeed.utils import safe_get_full_fp32_param

    from coat_dist.checkpoint.zero_partitions import partitions

    trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    everything = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(everything, enabled=hasattr(everything[0], "ds_id")):
        weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    moments = {
        w: {n: torch.zeros(getattr(p, "ds_shape", p.shape)) for n, p in trained.items()}
        for w in MOMENTS
    }
    for part in partitions(engine.optimizer):
        for f in part.fragments:
            for which, key in MOMENTS.items():
                mine = engine.optimizer.optimizer.state[part.flat][key][f.start : f.start + f.numel]
                moments[which][engine.param_names[f.param]].view(-1)[
                    f.first : f.first + f.numel
                ] = mine
    for value in (v for one in moments.values() for v in one.values()):
        torch.distributed.all_reduce(value)
    return {
        "fp32": {n: safe_get_full_fp32_param(p).clone() for n, p in trained.items()},
        **moments,
        "weights": weights,
        "steps": sorted({int(s["step"]) for s in engine.optimizer.optimizer.state.values()}),
    }


def migrated(rank, world, settings, folder, there):
    """CoatAdamW loads what AdamW saved, and saves it in turn."""
    engine = build(settings, universal=True)
    run(engine, rank, 20, 21)
    engine.load_checkpoint(folder, tag="universal")
    engine.save_checkpoint(there, tag="plain")
    return contents(engine), wrong_codes(engine, torch.load(f"{folder}/saved.pt"))


@pytest.mark.parametrize(
    ("source", "ranks", "target", "to"), [("zero-1", 2, "zero-3", 1), ("zero-3", 1, "zero-2", 2)]
)
def test_from_torchs_adamw_and_back(source, ranks, target, to, tmp_path):
    """A BF16 run of plain DeepSpeed goes on with FP8 moments, at another size and stage, and
    with AdamW again.
    """
    from coat_dist import convert_to_universal

    saved = run_ranks(ranks, adamw, CASES[source], str(tmp_path), False)[0]
    torch.save(saved, tmp_path / "saved.pt")
    convert_to_universal(tmp_path / "plain", tmp_path / "universal")
    assert not list(tmp_path.glob("universal/zero/*/codes.coat"))
    ours, wrong = run_ranks(to, migrated, CASES[target], str(tmp_path), str(tmp_path / "ours"))[0]
    assert wrong == [] and ours["steps"] == saved["steps"] == [5]
    for kind in ("fp32", "weights", "first", "second"):
        for name, value in saved[kind].items():  # all but FP8 moments to the bit
            assert torch.equal(ours[kind][name], value) or (
                kind in ("first", "second") and value.ndim > 1
            ), (
                kind,
                name,
            )
    convert_to_universal(tmp_path / "ours" / "plain", tmp_path / "ours" / "universal")
    back = run_ranks(ranks, adamw, CASES[source], str(tmp_path / "ours"), True)[0]
    for kind in ("fp32", "weights", "first", "second"):
        for name, value in back[kind].items():
            assert torch.equal(ours[kind][name], value), (kind, name)
    assert back["steps"] == [5]


def follow_the_page(rank, world, folder):
    """What docs/from-deepspeed.md says in steps 2 and 4, in its words: losses, and what moved
    over.
    """
    import contextlib
    import io
    import re
    from pathlib import Path

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
    same = [all(map(torch.equal, weights[2], one)) for one in weights[:2]]
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
