"""The planner's command line, its answers, and `pretrain.py --dry-run`, which gives the same ones."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.common import ROOT
from coat_dist import CoatConfigError
from launch import planner, pretrain
from launch.model.gpt import load_model_config, parameter_count
from launch.plan.allocator import expandable_segments
from launch.plan.gpus import GPUS, find_gpu, memory_bytes
from launch.plan.run import parameters
from tests.launch.plan.engines import MODEL, planned, settings_of
from tests.launch.pretrain_runs import command, configuration

SEVEN = ["--model", "llama2-7b", "--gpus", "8", "--gpu", "h100"]


def say(capsys, *argv) -> dict:
    assert planner.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_says_what_json_says(capsys) -> None:
    said = say(capsys, *SEVEN)
    assert planner.main(SEVEN) == 0
    table = capsys.readouterr().out
    gib = 2**30
    assert f"{said['peak']['allocated_bytes'] / gib:.2f}" in re.search("= peak allocated by torch +(.*)", table)[1]
    assert sum(said["peak"]["held_bytes"].values()) == said["peak"]["allocated_bytes"]
    assert said["states_bytes"]["parameters"] == 2 * 6738415616
    assert said["fits"] and "fits: needs" in table and "with the block" in table
    coat, plain = said["with_block"], said["without_block"]
    assert coat["largest_micro_batch"] == said["largest_micro_batch"] > plain["largest_micro_batch"]
    assert coat["needed_bytes"] < plain["needed_bytes"] and len(said["savings"]) == 3


def test_a_row_that_does_not_fit_has_no_speed(capsys) -> None:
    assert planner.main([*SEVEN, "--gpu-memory", "60GiB"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^with the block .* yes +\d+ +\d+ ms +[\d,]+ +[\d,]+$", table, re.M)
    assert re.search(r"^without .* no +1 +- +- +[\d,]+$", table, re.M), "with micro-batch 1 it would fit"
    assert planner.main([*SEVEN, "--gpu-memory", "4GiB"]) == 0
    assert " ms" not in capsys.readouterr().out


def test_the_largest_micro_batch_fits_and_the_next_does_not(capsys) -> None:
    said = say(capsys, *SEVEN, "--micro-batch", "auto")
    assert said["fits"] and said["micro_batch"] == said["largest_micro_batch"]
    assert not say(capsys, *SEVEN, "--micro-batch", str(said["micro_batch"] + 1))["fits"]


@pytest.mark.parametrize(("batch", "accumulation"), [({}, 1), ({"train_batch_size": 64}, 8)])
def test_where_nothing_fits_a_step_has_its_samples_all_the_same(tmp_path, capsys, batch, accumulation) -> None:
    config = configuration(tmp_path, 2, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None, **batch)
    options = ["--deepspeed_config", config, "--micro-batch", "auto", "--gpu-memory", "4GiB"]
    said = say(capsys, *SEVEN, *options)
    assert not said["fits"] and said["largest_micro_batch"] == 0
    assert (said["micro_batch"], said["gradient_accumulation_steps"]) == (1, accumulation)


@pytest.mark.parametrize(
    ("options", "larger"),
    [
        (["--zero-stage", "3"], False),
        (["--zero-stage", "1"], True),
        (["--recompute-granularity", "full"], False),
        (["--attention", "fp8"], False),
        (["--loss", "plain", "--micro-batch", "8"], True),
        (["--tensor-parallel", "2", "--sequence-parallel"], False),
        (["--deepspeed_config", "zero2-bf16"], True),
        (["--seq-length", "8192"], True),
    ],
)
def test_settings_change_the_peak(capsys, options, larger) -> None:
    base = [*SEVEN, *(options[-2:] if "--micro-batch" in options else [])]
    before, after = (say(capsys, *argv)["peak"]["needed_bytes"] for argv in (base, [*SEVEN, *options]))
    assert (after > before) is larger and after != before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "v100"], "--gpu: got 'v100', accepted: h200, h100, "),
        (["--gpu-memory", "80 apples"], "--gpu-memory: got '80 apples', accepted: a size such as 80GiB"),
        (["--model-override", "vocab_size=null"], "model.vocab_size: got null, accepted: a number, or --vocab-size"),
        (["--tensor-parallel", "3"], "--tensor-parallel: got 3, accepted: a divisor of --gpus (8)"),
        (["--attention", "fp8", "--deepspeed_config", "zero2-bf16"], "--attention: got fp8, accepted: only with a"),
        (["--model-override", "num_layers=2001"], "model.num_layers: got 2001, accepted: up to 2000 here"),
        (["--recompute-method", "block"], "accepted: only with --recompute-granularity full"),
        (["--model", "tiny-moe", "--vocab-size", "500"], "model.num_moe_experts: got 8, accepted: null"),
    ],
)
def test_errors_name_what_was_given(capsys, options, said) -> None:
    assert planner.main([*SEVEN, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_the_model_may_be_a_folder_of_weights(tmp_path, capsys) -> None:
    pytest.importorskip("transformers")
    from tests.launch.hf.folders import make

    make("llama3", tmp_path / "hf")
    from launch.weights import open_weights

    model = open_weights(tmp_path / "hf").model
    of = ("--model", str(tmp_path / "hf"), "--seq-length")
    said = say(capsys, *of, "16", "--gpu", "h200")
    assert said["states_bytes"]["parameters"] == 2 * parameter_count(model) and said["notes"] == []
    longer = str(2 * model.seq_length)
    assert say(capsys, *of, "16", "--gpu", "h100")["notes"] == []
    (rates,) = say(capsys, *of, "16", "--gpu", "a100")["notes"]
    assert rates == "rates of a100 follow from a measured H200 by the ratio of data sheets"
    (nodes,) = say(capsys, *of, "16", "--gpu", "h100", "--gpus", "16")["notes"]
    assert nodes.startswith("times are those of links within one node") and "`launch/scaling.py --paper`" in nodes
    assert say(capsys, *of, "16", "--gpu", "h100", "--gpus", "8")["notes"] == []
    (note,) = say(capsys, *of, longer, "--gpu", "h200")["notes"]
    assert note.startswith(f"model.seq_length: got {longer}, more than the {model.seq_length} that ")
    assert planner.main(["--model", str(tmp_path / "hf"), "--seq-length", "16", "--micro-batch", "2"]) == 0
    assert " 0.0 MiB" not in capsys.readouterr().out  # of a model so small
    (tmp_path / "empty").mkdir()
    assert planner.main(["--model", str(tmp_path / "empty")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'empty'}: holds no weights, accepted: a Hugging Face folder ")


def test_a_config_json_alone_is_enough(tmp_path, capsys, work) -> None:
    """In a folder or by its name, and for a dry run that starts from such a folder; other files are told."""
    pytest.importorskip("transformers")
    from tests.launch.hf.folders import make

    make("llama3", tmp_path / "hf", vocab_size=300)
    options = ("--seq-length", "16", "--gpu", "h200")
    whole = say(capsys, "--model", str(tmp_path / "hf"), *options)
    config = configuration(tmp_path, 2)
    argv = ["--init-from", str(tmp_path / "hf"), "--model-override", "seq_length=16"]
    argv += ["--deepspeed_config", config, "--gpus", "2", "--data", str(work / "data"), "--train-steps", "5"]
    argv += ["--dry-run", "--json"]
    assert pretrain.main(argv) == 0
    dry = capsys.readouterr().out
    for file in (tmp_path / "hf").iterdir():
        if file.name != "config.json":
            file.unlink()
    assert say(capsys, "--model", str(tmp_path / "hf"), *options) == whole
    assert say(capsys, "--model", str(tmp_path / "hf" / "config.json"), *options) == whole
    assert pretrain.main(argv) == 0 and capsys.readouterr().out == dry

    other = tmp_path / "model.safetensors"
    other.write_bytes(b"\xff\xfe\x00")
    (tmp_path / "theirs.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    (tmp_path / "hf" / "adapter_config.json").write_text("{}")
    for given, told in (
        (
            other,
            "--model: .*model.safetensors is not JSON: .*, accepted: a model's description .JSON., config.json, or",
        ),
        (
            tmp_path / "theirs.json",
            "--model: .*theirs.json describes no model, accepted: an object with num_layers, or",
        ),
        (tmp_path / "hf", ".*adapter_config.json: holds an adapter .LoRA. apart from the model, accepted: the merged"),
    ):
        assert planner.main(["--model", str(given)]) == 2
        said = capsys.readouterr().err
        assert re.match(f"error: {told}", said) and said.count("\n") == 1


def test_misspelt_options_are_answered_with_ours(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        planner.main(["--model", "llama2-7b", "--num-gpus", "8"])
    assert "did you mean --gpus?" in capsys.readouterr().err


def test_a_dry_run_says_the_same_without_a_launcher(work, tmp_path, capsys, monkeypatch) -> None:
    config = configuration(tmp_path, 2)
    argv = command(work, tmp_path / "run", config, "--dry-run", "--json", "--gpus", "4", "--gpu", "h100")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert pretrain.main(argv) == 0
    dry = json.loads(capsys.readouterr().out)
    options = ["--model", str(work / "model.json"), "--deepspeed_config", config, "--vocab-size", "250"]
    assert dry == say(capsys, *options, "--gpus", "4", "--gpu", "h100")
    # Also where nothing fits.
    config = configuration(tmp_path, 2, train_batch_size=64, gradient_accumulation_steps=None)
    more = ["--gpus", "4", "--micro-batch", "auto", "--gpu-memory", "1GiB"]
    assert pretrain.main(command(work, tmp_path / "run", config, "--dry-run", "--json", *more)) == 0
    dry = json.loads(capsys.readouterr().out)
    assert dry == say(capsys, *options[:2], "--deepspeed_config", config, *options[4:], *more) and not dry["fits"]
    assert dry["gradient_accumulation_steps"] == 16
    assert not (tmp_path / "run").exists()


def test_the_program_prints_nothing_but_its_answer() -> None:
    line = [sys.executable, "launch/planner.py", "--model", "tiny", "--vocab-size", "500", "--json"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["ranks"]["gpus"] == 1


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "olmo-1b", "llama-30b"])
def test_parameters_are_those_of_the_model(name) -> None:
    model = load_model_config(name)
    run = planned(model.model_dump(exclude_unset=True), settings_of(2, {}))
    assert sum(p.numel for p in parameters(run)) == parameter_count(model)
    assert sum(p.numel for p in parameters(planned({**MODEL, "qk_norm": True}, settings_of(2, {}), tp=2))) > 0


def test_gpus_by_every_name() -> None:
    names = {
        "H100": "h100",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "a100-80": "a100",
        "NVIDIA H200": "h200",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA H100 NVL": "h100-nvl",
        "a100-40g": "a100-40",
        "h100sxm": "h100",
        "NVIDIA GH200 480GB": "gh200",
        "NVIDIA H20": "h20",
        "NVIDIA GH200 96GB": "gh200",
        "L40S 48GB": "l40s",
    }
    assert {given: find_gpu(given).name for given in names} == names
    for unknown in ("h1000", "ah100", "h20-3e"):
        with pytest.raises(CoatConfigError, match=f"--gpu: got '{unknown}', accepted: "):
            find_gpu(unknown)
    for other in ("NVIDIA A100-SXM-64GB", "H100 64GB", "H100 96 GB", "GH200 144G HBM3e"):
        with pytest.raises(CoatConfigError, match=f"--gpu: got '{other}', accepted: .* with --gpu-memory for other"):
            find_gpu(other)
        assert find_gpu(other, any_memory=True).name in ("a100", "h100", "gh200")
    assert memory_bytes("80GiB") == 80 * 2**30 and memory_bytes("141 GB") == 141 * 10**9 == memory_bytes("141g")
    assert all(gpu.memory > 0 and gpu.bf16 <= gpu.fp8 for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, None),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"},
        ),
    ],
)
def test_segments_are_expandable_unless_the_user_has_said(before, after) -> None:
    environment = dict(before)
    expandable_segments(environment)
    assert environment == (before if after is None else after)


def dry(capsys, tmp_path, *argv):
    """The answer of ``pretrain.py --dry-run``, without its data's vocabulary."""
    data = tmp_path / "mix.json"
    if not data.exists():
        np.asarray([5, 6, 50279] * 9, np.uint16).tofile(tmp_path / "a.npy")
        source = {"name": "a", "files": ["a.npy"]}
        data.write_text(json.dumps({"vocab_size": 50280, "eos": 50279, "dtype": "uint16", "sources": [source]}))
    status = pretrain.main([*argv, "--data", str(data), "--train-steps", "5", "--dry-run", "--json"])
    said = capsys.readouterr()
    return status, said.out or said.err


@pytest.mark.parametrize(
    ("batch", "micro"),
    [
        ({"train_batch_size": 64}, ["--micro-batch", "4"]),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, ["--micro-batch", "auto"]),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, ["--micro-batch", "4"]),
        ({"train_batch_size": 62, "train_micro_batch_size_per_gpu": "auto"}, []),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4}, []),
        ({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 3}, []),
    ],
)
def test_the_planner_and_a_dry_run_take_the_same_batch(capsys, tmp_path, batch, micro) -> None:
    settings = json.loads((ROOT / "configs/deepspeed/zero2.json").read_text())
    keys = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({k: v for k, v in settings.items() if k not in keys} | batch))
    argv = ["--model", "olmo-1b", "--deepspeed_config", str(config), "--gpus", "4", "--gpu", "h200", *micro]
    status = planner.main([*argv, "--json"])
    said = capsys.readouterr()
    assert (status, said.out or said.err) == dry(capsys, tmp_path, *argv)


def test_remainders_are_offered_as_their_file_has_them(capsys) -> None:
    """Where states are what does not fit; as much as is saved with that file."""
    one = ["--model", "llama2-13b", "--gpus", "1", "--gpu", "h200"]
    now = say(capsys, *one, "--deepspeed_config", "zero2")
    then = say(capsys, *one, "--deepspeed_config", "zero2-remainder")
    assert not now["fits"] and then["fits"]
    (saved,) = (found["bytes"] for found in now["savings"] if "bf16_remainder" in found["setting"])
    assert saved == now["peak"]["needed_bytes"] - then["peak"]["needed_bytes"]
    assert not any("bf16_remainder" in found["setting"] for found in then["savings"])


def test_accumulation_in_place_of_the_configurations(capsys) -> None:
    olmo = ["--model", "olmo-1b", "--deepspeed_config", "olmo-1b", "--gpus", "4", "--gpu", "h200"]
    for micro in ([], ["--micro-batch", "2"], ["--micro-batch", "auto"]):
        assert say(capsys, *olmo, "--accumulation", "3", *micro)["gradient_accumulation_steps"] == 3


@pytest.mark.parametrize("option", ["--gpu-memory", "--other-memory"])
def test_a_size_without_its_unit_is_refused(capsys, option) -> None:
    assert planner.main([*SEVEN, option, "80"]) == 2
    assert capsys.readouterr().err == f"error: {option}: got '80', accepted: a size with its unit, such as 80GiB\n"


@pytest.mark.parametrize(
    ("config", "override", "module", "accepted"),
    [
        ("zero2-bf16", [], "layernorm", "core_attn, mlp"),
        ("zero2-bf16", ["--model-override", "linear_bias=true"], "mlp", "core_attn"),
    ],
)
def test_parts_that_megatron_cannot_compute_again_in_bf16_are_refused(
    capsys, tmp_path, config, override, module, accepted
) -> None:
    argv = ["--model", "olmo-1b", *override, "--recompute-granularity", "selective", "--recompute-modules", module]
    assert planner.main([*argv, "--deepspeed_config", "zero2"]) == 0
    capsys.readouterr()
    assert planner.main([*argv, "--deepspeed_config", config]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --recompute-modules: got {module}, accepted: {accepted}; in BF16 layers")
    assert dry(capsys, tmp_path, *argv, "--deepspeed_config", config) == (2, said)


def test_the_stage_is_that_of_the_option_also_where_the_file_has_none(tmp_path, capsys) -> None:
    settings = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-3}},
        "coat": {},
    }
    for zero in (None, {"stage": 0}, {"stage": 1}):
        (tmp_path / "ds.json").write_text(json.dumps(settings | ({} if zero is None else {"zero_optimization": zero})))
        of = ["--model", "llama2-7b", "--deepspeed_config", str(tmp_path / "ds.json"), "--gpus", "4", "--gpu", "h100"]
        assert [say(capsys, *of, "--zero-stage", str(stage))["zero_stage"] for stage in (1, 2, 3)] == [1, 2, 3]
    (tmp_path / "ds.json").write_text(json.dumps(settings | {"zero_optimization": 2}))
    assert planner.main([*of, "--zero-stage", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: zero_optimization: got 2, accepted: ")


def test_a_micro_batch_beyond_all_bounds_is_told_the_bound(capsys) -> None:
    with pytest.raises(SystemExit):
        planner.main(["--model", "llama2-7b", "--micro-batch", "9" * 17])
    assert f"got '{'9' * 17}', accepted: a whole number from 1, below 1e+12, or auto" in capsys.readouterr().err
