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
EOS, VOCAB = 250, 251
TINY = [
    "num_layers=2",
    "hidden_size=64",
    "ffn_hidden_size=128",
    "num_attention_heads=2",
    "num_query_groups=2",
]


def shards(folder):
    """150 documents of each of two sources, in three files of uint16 and in one of uint32."""
    documents = np.tile(np.append(np.arange(30), EOS), 50)
    (folder / "up").mkdir(parents=True)
    for number in range(3):
        documents.astype(np.uint16).tofile(folder / f"up/part-{number}-00000.npy")
    np.tile(documents, 3).astype(np.uint32).tofile(folder / "down.npy")


@pytest.fixture(scope="module")
def olmo(tmp_path_factory):
    """A folder with shards, their description, and OLMo-1B's configuration with small batches."""
    folder = tmp_path_factory.mktemp("olmo")
    shards(folder)
    sources = [
        {"name": "up", "weight": 2, "files": ["up/*.npy"], "dtype": "uint16"},
        {"name": "down", "weight": 1, "files": ["down.npy"], "dtype": "uint32"},
    ]
    (folder / "dolma.json").write_text(
        json.dumps({"eos": EOS, "vocab_size": VOCAB, "sources": sources})
    )
    settings = read_config("", "olmo-1b", "deepspeed")
    settings |= {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    (folder / "olmo.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("name", "lr", "warmup", "schedule", "steps"),
    [("olmo-1b", 4e-4, 2000, "cosine", 739328), ("olmo-7b", 3e-4, 5000, "linear", 476837)],
)
def test_the_commands_of_the_docs(olmo, tmp_path, monkeypatch, name, lr, warmup, schedule, steps):
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
        words[words.index("--deepspeed_config") + 1] = str(olmo / "olmo.json")
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


def test_prepare_data_index_prints_what_is_there(olmo, tmp_path, capsys):
    cache = ["--data-cache", str(tmp_path / "cache")]
    assert prepare_data.main(["--index", str(olmo / "dolma.json"), *cache]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in out[1:]] == [["up", "3", "150"], ["down", "1", "150"]]
    assert [line.split()[-1] for line in out[1:]] == ["0.6667", "0.3333"]
    assert (
        prepare_data.main(["--index", str(olmo / "dolma.json"), *cache, "--log-level", "warning"])
        == 0
    )
    assert capsys.readouterr().out == ""
    assert prepare_data.main(["--index", str(tmp_path / "no.json")]) == 2
    assert capsys.readouterr().err.startswith(
        f"prepare_data: error: data: {tmp_path}/no.json: No such file"
    )
