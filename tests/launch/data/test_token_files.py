"""Dolma's token files, read where they lie: the order of samples, weights, the index, and what
is refused.
"""

import json
import os

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from launch import prepare_data
from launch.common.errors import DataError
from launch.data import token_files
from launch.data.endless import EndlessBlend
from launch.train import pretrain_options
from launch.train.plan import plan
from tests.launch.pretrain_runs import configuration
from tests.launch.tiny_data import make, rows, train
from tests.support import run_ranks

EOS, VOCAB = 7, 1000


def tokens(documents, seed, low=10, high=VOCAB, end=True):
    """Documents of 1 to 60 random ids, each with eos behind it (``end``: the last one too)."""
    rng = np.random.default_rng(seed)
    parts = [np.append(rng.integers(low, high, rng.integers(0, 60)), EOS) for _ in range(documents)]
    whole = np.concatenate(parts)
    return whole if end else np.append(whole, rng.integers(low, high, 11))


def write(path, values, dtype="uint16"):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.asarray(values, np.uint16)) if dtype is None else np.asarray(
        values, dtype
    ).tofile(path)
    return path


def describe(folder, sources, name="mix.json", **top):
    top = {"eos": EOS, "vocab_size": VOCAB, "dtype": "uint16", **top}
    (folder / name).write_text(json.dumps({**top, "sources": sources}))
    return str(folder / name)


@pytest.fixture
def two(tmp_path):
    """A description of two sources whose ids tell them apart: "low" of three files in uint16,
    "high" in uint32.
    """
    for number in range(3):
        write(tmp_path / f"low/part-{number}.npy", tokens(40, number, high=400, end=number != 1))
    write(tmp_path / "high.npy", tokens(150, 9, low=500), "uint32")
    return [
        {"name": "low", "weight": 1, "files": ["low/part-*.npy"]},
        {"name": "high", "weight": 3, "files": "high.npy", "dtype": "uint32"},
    ]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", None])  # None: a header of NumPy
def test_samples_are_those_of_megatrons_own_files(tmp_path, dtype):
    """Also of a file that does not end with eos: an eos is put behind it."""
    parts = [tokens(40, n, end=n != 1) for n in range(3)]
    for number, part in enumerate(parts):
        write(tmp_path / f"part-{number}.npy", part, dtype)
    path = describe(tmp_path, [{"name": "all", "files": ["part-*.npy"]}], dtype=dtype)
    builder = IndexedDatasetBuilder(f"{tmp_path}/copy.bin", dtype=np.uint16)
    whole = np.concatenate([parts[0], parts[1], [EOS], parts[2]])
    for document in np.split(whole, np.flatnonzero(whole == EOS) + 1)[:-1]:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{tmp_path}/copy.idx")
    (tmp_path / "copy.json").write_text(json.dumps({"vocab_size": VOCAB, "eod": EOS}))
    ours, theirs = train(path, 300), train(f"{tmp_path}/copy", 300)
    assert ours.epoch_samples == theirs.epoch_samples < 300
    assert rows(ours, 300) == rows(theirs, 300)
    assert all((ours[i]["labels"] == theirs[i]["labels"]).all() for i in range(100))


def test_nothing_is_copied(two, tmp_path):
    dataset = train(describe(tmp_path, two), 20)
    sources = [part.dataset for part in dataset.datasets]
    assert [type(s).__name__ for s in sources] == ["TokenFiles"] * 2
    big = int(sources[1].sequence_lengths.argmax())
    got = sources[1].get(big)
    assert isinstance(got.base, np.memmap) and got.dtype == np.uint32 and not got.flags.writeable
    written = sum(f.stat().st_size for f in (tmp_path / "mix.json.cache").iterdir())
    assert (
        not any(f.suffix == ".bin" for f in (tmp_path / "mix.json.cache").iterdir())
        and written < 100_000
    )


@pytest.mark.parametrize(("weights", "share"), [((1, 3), 0.75), ((0.5, 0.5), 0.5)])
def test_weights_are_shares_of_the_samples_at_every_point(two, tmp_path, weights, share):
    for source, weight in zip(two, weights, strict=True):
        source["weight"] = weight
    path = describe(tmp_path, two)
    dataset = train(path, 400)
    high = np.cumsum([bool((dataset[i]["tokens"] >= 500).any()) for i in range(400)])
    for samples in (40, 100, 400):  # beyond an epoch of the smaller source too
        assert abs(high[samples - 1] - share * samples) <= 1
    assert rows(train(path, 40), 40) == rows(dataset, 40)  # not of the run's length
    assert rows(train(path, 400, seed=8), 40) != rows(dataset, 40)


def test_a_mixture_goes_on_without_a_longer_table(two, tmp_path):
    ours = train(describe(tmp_path, two), 300)
    short = EndlessBlend(ours.datasets, [1, 3], 300, block=40)
    assert rows(short, 40) == rows(ours, 40)
    drawn = [short[i]["dataset_id"] for i in range(300)]
    assert drawn == drawn[:40] * 7 + drawn[:20] and drawn[:40].count(1) == 30
    for which in (0, 1):  # each source in its own order, without a hole
        mine = [tuple(short[i]["tokens"].tolist()) for i in range(300) if drawn[i] == which]
        assert mine == rows(ours.datasets[which], len(mine))


def test_without_weights_tokens_count_and_yaml_says_the_same(two, tmp_path):
    for source in two:
        del source["weight"]
    low = [os.path.getsize(file) / 2 for file in (tmp_path / "low").iterdir()]
    sizes = [sum(low), os.path.getsize(tmp_path / "high.npy") / 4]
    dataset = train(describe(tmp_path, two), 200)
    assert abs(sum(dataset[i]["dataset_id"] for i in range(200)) - 200 * sizes[1] / sum(sizes)) <= 1
    (tmp_path / "mix.yaml").write_text(
        f"eos: {EOS}   # ends documents\n_one: &one {{dtype: uint16}}\nvocab_size: "
        f"{VOCAB}\nsources:\n"
        "  - {name: low, <<: *one, files: [low/part-0.npy, low/part-1.npy, low/part-2.npy]}\n"
        "  - name: high\n    dtype: uint32\n    files: high.npy\n"
    )
    assert rows(train(str(tmp_path / "mix.yaml"), 50), 50) == rows(dataset, 50)


def test_a_blend_with_a_prepared_data_set(two, tmp_path):
    more = make(tmp_path / "more", eod=EOS, vocab_size=VOCAB)
    dataset = train([f"0.5 {describe(tmp_path, two)}", f"0.5 {more}"], 160)
    assert [sum(dataset[i]["dataset_id"] == which for i in range(160)) for which in range(3)] == [
        20,
        60,
        80,
    ]


def test_index_is_built_once_and_anew_for_a_file_that_has_changed(two, tmp_path, monkeypatch):
    path = describe(tmp_path, two)
    expected, read = rows(train(path, 30), 30), []
    real = token_files._index_file
    monkeypatch.setattr(
        token_files, "_index_file", lambda *a: (read.append(os.path.basename(a[2])), real(*a))[1]
    )
    assert rows(train(path, 30), 30) == expected and read == []
    write(tmp_path / "low/part-1.npy", tokens(60, 77, high=400))
    assert rows(train(path, 30), 30) != expected and read == ["part-1.npy"]


def test_a_killed_index_goes_on(two, tmp_path, monkeypatch):
    path, real, read = describe(tmp_path, two), token_files._index_file, []

    def dies(*arguments):
        read.append(os.path.basename(arguments[2]))
        if len(read) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(token_files, "_index_file", dies)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        train(path, 10)
    assert not list((tmp_path / "mix.json.cache").glob("*.documents.npy"))
    train(path, 10)
    assert sorted(set(read)) == sorted(["part-0.npy", "part-1.npy", "part-2.npy", "high.npy"])
    assert read.count(read[0]) == 1 and not list((tmp_path / "mix.json.cache").glob("*.tmp*"))


def on_rank(rank, world, path):
    try:
        return rows(train(path, 50), 50)
    except DataError as problem:
        return str(problem)


def test_ranks_agree_on_samples_and_errors(two, tmp_path):
    path = describe(tmp_path, two)
    first, second = run_ranks(2, on_rank, path)
    assert first == second == rows(train(path, 50), 50)
    write(tmp_path / "high.npy", [1, 2, VOCAB, EOS] * 5, "uint32")
    first, second = run_ranks(2, on_rank, path)
    assert first == second and "token 2 is 1000" in first


def test_sources_of_the_same_name_in_two_descriptions_are_both_kept_in_checkpoints(tmp_path):
    paths = []
    for number, name in enumerate(("a.json", "b.json")):
        write(tmp_path / f"{name}.npy", tokens(50 + number, number))
        paths.append(describe(tmp_path, [{"name": "web", "files": f"{name}.npy"}], name))
    config = configuration(tmp_path, 2)
    argv = ["--deepspeed_config", config, "--model", "tiny", "--train-steps", "1", "--data"]
    both = plan(pretrain_options.parse([*argv, *paths]), 1).data_identity()["sources"]
    assert [source["bytes"] for source in both.values()] == [
        os.path.getsize(p + ".npy") for p in paths
    ]
    assert list(both) == [f"{p}#web" for p in paths]
    assert list(plan(pretrain_options.parse([*argv, paths[0]]), 1).data_identity()["sources"]) == [
        "web"
    ]


def test_prepare_data_index_prints_what_is_there(two, tmp_path, capsys):
    index = ["--index", describe(tmp_path, two)]
    assert prepare_data.main(index) == 0
    rows_of_sources = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:3] for row in rows_of_sources] == [["low", "3", "121"], ["high", "1", "150"]]
    assert [row[-1] for row in rows_of_sources] == ["0.2500", "0.7500"]
    assert prepare_data.main([*index, "--log-level", "warning"]) == 0
    assert capsys.readouterr().out == ""
    assert prepare_data.main(["--index", str(tmp_path / "no.json")]) == 2
    said = f"prepare_data: error: data: {tmp_path}/no.json: No such file"
    assert capsys.readouterr().err.startswith(said)
