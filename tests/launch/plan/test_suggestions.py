"""What the planner suggests, put into the file or on the command line: it is accepted, and saves
what was said.
"""

import copy
import json
import re

import pytest

from benchmarks.common import ROOT
from launch import planner
from launch.plan import report, search
from launch.plan.arguments import parse
from launch.train.settings import load_settings

RUN = ["--model", "llama2-7b", "--model-override", "num_layers=3", "--gpu", "h100"]


@pytest.fixture(autouse=True)
def all_of_them(monkeypatch) -> None:
    monkeypatch.setattr(report, "savings", lambda run: search.savings(run, 99))


def config(name, **changes):
    """A configuration of ours with other values by dotted keys; None removes one."""
    found = json.loads((ROOT / f"configs/deepspeed/{name}.json").read_text())
    for key, value in changes.items():
        *path, last = key.split("__")
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
        inner.pop(last, None)
        if value is not None:
            inner[last] = value
    return found


def answer(capsys, tmp_path, settings, *argv):
    """What the planner says of settings that training accepts too."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    load_settings(str(file), tp=1)
    capsys.readouterr()  # what DeepSpeed says when it is first imported
    assert planner.main([*RUN, "--deepspeed_config", str(file), *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def pasted(settings, argv, text):
    """Settings and options with what a suggestion says."""
    settings, argv = copy.deepcopy(settings), list(argv)
    if text.startswith("--"):
        return settings, [*argv, *text.partition(" (")[0].split()]
    if 'the "coat" block' in text:
        settings["coat"] = {}
    if '"type": "CoatAdamW"' in text:
        settings["optimizer"]["type"] = "CoatAdamW"
    if "with gradients in bf16" in text:
        settings["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        settings.pop("data_types", None)
    for key in re.findall(r"bf16\.(\w+)", text.partition("without")[2]):
        del settings["bf16"][key]
    keys = r"((?:coat|optimizer|zero_optimization)\.[\w.]+|train_\w+|gradient_\w+)"
    for key, value in re.findall(keys + r' (\d+|true|\[\]|"\w+")', text):
        *path, last = key.split(".")
        inner = settings
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = json.loads(value)
    return settings, argv


BF16_STATES = {
    "enabled": True,
    "bf16_master_weights_and_grads": True,
    "bf16_optimizer_states": True,
}
FILES = {
    "coat": config("zero2"),
    "plain": config("zero1-bf16"),
    "plain, with DeepSpeed's bf16 states": config("zero2-bf16", bf16=BF16_STATES, data_types=None),
    "remainders": config("zero2-remainder"),
    "optimizer only": config("zero2", coat__activation={"enabled": False}),
    "optimizer only, no block": config("zero2", coat=None),
    "remainders, no block": config(
        "zero2-remainder", coat=None, optimizer__params__master_weights="bf16_remainder"
    ),
    "options of the optimizer beside the flow's block": config(
        "zero2", coat={"activation": {"bf16_layers": [0]}}, optimizer__params__group_size=64
    ),
    "flow only": config(
        "zero2", optimizer__type="AdamW", coat={"activation": {"loss": "plain", "bf16_layers": [0]}}
    ),
    "a micro-batch of five": config("zero2", train_micro_batch_size_per_gpu=5, train_batch_size=5),
    "ZeRO-1 with fp32 sums": config("zero2", zero_optimization__stage=1),
    "cached weights": config("zero1", coat={"activation": {"weights": "cached"}}),
    "CUDA graphs": config("zero2", coat={"activation": {"cuda_graphs": True}}),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("gpus", ["1", "5"])
def test_suggestions_save_what_they_say(capsys, tmp_path, name, gpus) -> None:
    settings, argv = FILES[name], ["--gpus", gpus]
    if "train_batch_size" in settings:
        settings = settings | {"train_batch_size": 5 * int(gpus), "gradient_accumulation_steps": 1}
    before = answer(capsys, tmp_path, settings, *argv)
    assert before["savings"]
    for one in before["savings"]:
        changed, options = pasted(settings, argv, one["setting"])
        after = answer(capsys, tmp_path, changed, *options)
        saved = before["peak"]["needed_bytes"] - after["peak"]["needed_bytes"]
        assert saved == one["bytes"], one["setting"]
        samples = [x["micro_batch"] * x["gradient_accumulation_steps"] for x in (before, after)]
        assert samples[0] == samples[1], one["setting"]


@pytest.mark.parametrize("name", FILES)
def test_what_stands_beside_is_the_users_own_configuration_with_and_without_us(
    tmp_path, name
) -> None:
    """Training accepts both; the run itself is the one with the block where it has all."""
    (tmp_path / "config.json").write_text(json.dumps(FILES[name]))
    run, _, _ = parse([*RUN, "--deepspeed_config", str(tmp_path / "config.json")])
    for variant in (search.with_block(run), search.without_block(run)):
        (tmp_path / "variant.json").write_text(json.dumps(dict(variant.settings)))
        _, coat = load_settings(str(tmp_path / "variant.json"), tp=1)
        assert coat == variant.coat
    full = search.with_block(run)
    assert full.flow is not None and full.fp8_moments and full.remainder == run.remainder
    assert (full == run) == (run.flow is not None and run.fp8_moments)
    assert run.flow in (None, full.flow)
