"""Pretraining a model of OLMo's kind on Dolma's token files, as docs/olmo.md says."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from launch import prepare_data
from launch.common.find_config import read_config
from launch.data.blend import read_info
from launch.train import pretrain_options
from launch.train.plan import plan
from tests.launch.pretrain_runs import rank_main
from tests.support import run_ranks

ROOT = Path(__file__).parents[3]
TINY = [
    "num_layers=2",
    "hidden_size=64",
    "ffn_hidden_size=128",
    "num_attention_heads=2",
    "num_query_groups=2",
]


@pytest.mark.parametrize(
    ("name", "lr", "warmup", "schedule", "steps"),
    [("olmo-1b", 4e-4, 2000, "cosine", 739328), ("olmo-7b", 3e-4, 5000, "linear", 476837)],
)
def test_the_commands_of_the_docs(tmp_path, monkeypatch, name, lr, warmup, schedule, steps):
    """Word for word, on 256 ranks; the 1B's runs for two steps, with a tiny model and batch."""
    page = (ROOT / "docs" / "olmo.md").read_text(encoding="utf-8")
    (line,) = [
        c for c in re.findall(r"^deepspeed .*?[^\\]$", page, re.M | re.S) if f"--model {name} " in c
    ]
    words = shlex.split(line.replace("\\\n", " "))
    assert words[:2] == ["deepspeed", "launch/pretrain.py"]
    (code,) = re.findall(r"^```json\n(.*?)^```$", page, re.M | re.S)
    description = json.loads(code)
    monkeypatch.chdir(tmp_path)
    for source in description["sources"]:
        for pattern in source["files"]:
            file = tmp_path / "dolma" / pattern.replace("*", "000-00000")
            file.parent.mkdir(parents=True, exist_ok=True)
            np.asarray(
                [*range(1000, 1100), 50279] * 1100, source.get("dtype", description["dtype"])
            ).tofile(file)
    (tmp_path / "dolma" / "dolma.json").write_text(code)
    assert prepare_data.main(["--index", "dolma/dolma.json"]) == 0
    p = plan(pretrain_options.parse(words[2:]), 256)
    assert (p.batch.total, p.batch.micro * p.batch.accumulation, p.model.seq_length) == (
        2048,
        8,
        2048,
    )
    assert (p.schedule.lr, p.schedule.warmup_steps, p.schedule.kind) == (lr, warmup, schedule)
    assert (p.schedule.decay_steps, p.schedule.min_lr) == (steps, pytest.approx(lr / 10))
    assert (read_info("dolma/dolma.json").eod, p.model.vocab_size) == (50279, 50304)
    if name == "olmo-1b":
        settings = read_config("", "olmo-1b", "deepspeed")
        settings |= {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
        (tmp_path / "olmo.json").write_text(json.dumps(settings))
        words[words.index("--deepspeed_config") + 1] = "olmo.json"
        small = [
            *TINY,
            "seq_length=32",
            "--train-steps",
            "2",
            "--warmup-steps",
            "1",
            "--eval-steps",
            "1",
        ]
        end = run_ranks(1, rank_main, [*words[2:], "--model-override", *small])[0]
        assert end.startswith("finished 2 steps; checkpoint runs/olmo-1b")
