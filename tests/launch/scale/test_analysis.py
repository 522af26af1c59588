"""Larger clusters from smaller ones, where the truth is known; what is refused; the paper."""

import json

import pytest

from coat_dist import CoatConfig, CoatConfigError
from launch import scaling
from launch.model.gpt import load_model_config
from launch.planning.run import Run
from launch.scale.analysis import analyse
from launch.scale.links import SHAPES, parse_links
from launch.scale.report import markdown
from launch.scale.traffic import data_parallel
from launch.training.settings import load_settings
from tests.launch.scale.cluster import Cluster


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shows", [0.0, 0.4, 1.0])
def test_four_ranks_from_one_and_two(shape, shows):
    """The held-out size lies in the stated range, which says something."""
    inside = every = 0
    for seed in range(5):
        truth = Cluster(shape, shows=shows, noise=0.02, seed=seed)
        found = analyse(truth.measured(1, 2), predict=[4], hold_out=None)
        for row in found["predictions"]:
            seconds = truth.step(row["variant"], 4, 1)
            every += 1
            inside += row["seconds"]["low"] <= seconds <= row["seconds"]["high"]
            assert row["seconds"]["high"] < 1.5 * row["seconds"]["low"]
    assert inside == every


@pytest.mark.parametrize(("shows", "told"), [(0.0, False), (1.0, False), (4.0, True)])
def test_more_than_all_of_communication_cannot_show(shows, told):
    """Ranks that slow each other otherwise: the page says that predictions do not hold."""
    for seed in range(5):
        found = analyse(Cluster(shows=shows, noise=0.02, seed=seed).measured(1, 2, 4), predict=[8])
        lines = [line for line in markdown(found).splitlines() if line.startswith("Steps, ")]
        assert len(lines) == 2
        assert all(("ranks slow each other" in line and "do not hold" in line) is told for line in lines), lines


def test_the_held_out_size_is_measured_and_not_used():
    truth = Cluster("tree", seed=7)
    there = truth.measured(1, 2, 4)
    found = analyse(there)
    rows = found["held_out"]
    assert {row["ranks"] for row in rows} == {4} and all(row["inside"] for row in rows)
    assert {row["what"] for row in rows} >= {"all_gather, 268435456 bytes", "step, coat, 1 micro-batches"}
    for record in there["records"]:
        if record["ranks"] == 4:  # other machines would have been there
            for one in record.get("steps", []):
                one["seconds"] = [3 * s for s in one["seconds"]]
    worse = [row for row in analyse(there)["held_out"] if row["what"].startswith("step")]
    before = [row for row in rows if row["what"].startswith("step")]
    assert [row["predicted"] for row in worse] == [row["predicted"] for row in before]
    assert not any(row["inside"] for row in worse) and "| NO |" in markdown(analyse(there))


def test_efficiency_is_against_the_fewest_ranks():
    truth = Cluster(noise=1e-6)
    rows = analyse(truth.measured(1, 2, 4))["steps"]
    weak = {row["ranks"]: row for row in rows if (row["variant"], row["mode"]) == ("coat", "weak")}
    strong = {row["ranks"]: row for row in rows if (row["variant"], row["mode"]) == ("coat", "strong")}
    assert weak[4]["efficiency"] == pytest.approx(truth.step("coat", 1, 1) / truth.step("coat", 4, 1), rel=1e-3)
    assert strong[2]["efficiency"] == pytest.approx(truth.step("coat", 1, 4) / truth.step("coat", 2, 2) / 2, rel=1e-3)
    assert weak[2]["tokens_per_second"] == pytest.approx(2 * 2 * 4096 / truth.step("coat", 2, 1), rel=1e-3)


def test_strong_scaling_is_of_one_batch():
    there = Cluster().measured(1, 2, 4)
    for record in there["records"]:  # as left by a call with two ranks at most
        if record["ranks"] == 2 and record["key"]["what"] == "training":
            record["key"]["most"] = 2
    strong = {row["ranks"] for row in analyse(there)["steps"] if row["mode"] == "strong"}
    assert strong == {1, 4}


def test_weights_that_travel_in_fp8_are_counted_so():
    settings, coat = load_settings("zero3", tp=1)
    run = Run(model=load_model_config("llama2-7b"), settings=settings, coat=coat, dp=8)
    block = {"activation": {"fp8_weight_gather": True}}
    on = data_parallel(run.but(coat=CoatConfig.parse(block)))
    assert on == data_parallel(run, fp8_weights=True) != data_parallel(run) == data_parallel(run, fp8_weights=False)
    gathered = [sum(p.size * p.count for p in parts if p.kind == "all_gather") for parts in (on, data_parallel(run))]
    assert 0.5 < gathered[0] / gathered[1] < 0.53  # the embedding and the output layer stay BF16


def test_more_nodes_need_their_link():
    there = Cluster(node=2).measured(1, 2)
    with pytest.raises(CoatConfigError, match="--link: nothing known between nodes, accepted: nic=BANDWIDTH"):
        analyse(there, predict=[64])
    slow, fast = (
        analyse(there, predict=[64], links=parse_links([f"nic={rate}Gb/s"]))["predictions"] for rate in (50, 800)
    )
    assert all(a["seconds"]["middle"] > b["seconds"]["middle"] for a, b in zip(slow, fast, strict=True))
    alone = {**there, "records": [one for one in there["records"] if one["key"]["what"] == "collectives"]}
    with pytest.raises(CoatConfigError, match="--predict: got 4, 8, accepted: only of measured training steps"):
        analyse(alone, predict=[4, 8])
    with pytest.raises(CoatConfigError, match="--hold-out: got 3, accepted: a measured number of ranks .*2"):
        analyse(there, hold_out=3)


def test_a_measurement_that_failed_is_said_and_the_rest_is_there():
    there = Cluster().measured(1, 2)
    failed = next(one for one in there["records"] if one["key"].get("variant") == "bf16" and one["ranks"] == 2)
    failed.pop("steps")
    failed["failed"] = "rank 1 on a: out of memory"
    text = markdown(analyse(there, predict=[4]))
    assert "Failed: training bf16 on 2 ranks: rank 1 on a: out of memory" in text
    assert text.count("| coat | 2 |") == 2 and "| bf16 | 4 |" in text


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shows", [0.0, 1.0])
def test_one_size_leaves_open_how_much_communication_shows(ranks, shows):
    truth = Cluster(shows=shows, bandwidth=20e9)
    given = parse_links(["nvlink=20GB/s,8us"])
    for row in analyse(truth.measured(ranks), predict=[4], links=given)["predictions"]:
        assert row["seconds"]["low"] < truth.step(row["variant"], 4, 1) < row["seconds"]["high"]


@pytest.mark.parametrize("broken", [(2,), (2, 4)])
def test_collectives_that_failed_take_no_table_of_training_away(broken, tmp_path, capsys):
    there = Cluster().measured(1, 2, 4)
    for record in there["records"]:
        if record["key"]["what"] == "collectives" and record["ranks"] in broken:
            record.pop("samples")
            record["failed"] = "rank 1 on a: out of memory"
    text = markdown(analyse(there))
    assert (
        "| coat | 4 |" in text and "Left out: bf16, the check on 4 ranks: --link: nothing known within a node" in text
    )
    assert ("Steps, coat" in text) == (broken == (2,)) == ("Left out: coat, what steps are made of" not in text)
    # What was asked for and cannot be said is an error, after all else.
    (tmp_path / "measured.json").write_text(json.dumps(there))
    asked = ["--predict", "8"] if broken == (2, 4) else ["--hold-out", "4"]
    assert scaling.main(["--measured", str(tmp_path), *asked, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert (
        "| coat | 4 |" in said.out
        and said.err.startswith("error: --link: nothing known")
        and (tmp_path / "out").exists()
    )


def test_earlier_measurements_are_predicted_from(tmp_path, capsys):
    (tmp_path / "measured.json").write_text(json.dumps(Cluster().measured(1, 2)))
    assert scaling.main(["--measured", str(tmp_path), "--predict", "4,8", "--output", str(tmp_path / "out")]) == 0
    assert "| coat | 8 |" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"scaling.md", "scaling.json", "scaling.png"}
    said = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert [row["ranks"] for row in said["predictions"]] == [4, 8, 4, 8]
    whole = (tmp_path / "measured.json").read_text()
    nameless = json.dumps({**json.loads(whole), "identity": {}})
    for damaged in (whole[: len(whole) // 2], nameless, whole.replace('"micro_batch"', '"micro"')):
        (tmp_path / "measured.json").write_text(damaged)
        assert scaling.main(["--measured", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert "is no whole measured.json, accepted" in said or f"{tmp_path}/measured.json lacks identity." in said
    assert scaling.main(["--measured", str(tmp_path / "none")]) == 2
    assert "accepted: a folder in which scaling.py has written measured.json" in capsys.readouterr().err


def test_the_paper_finds_layouts_that_fit(tmp_path, capsys):
    options = ["--model", "llama2-7b", "--predict", "8,64", "--output", str(tmp_path)]
    assert scaling.main(["--paper", *options]) == 0
    rows = json.loads((tmp_path / "paper.json").read_text())["rows"]
    assert [(row["gpus"], row["variant"]) for row in rows] == [(8, "coat"), (8, "bf16"), (64, "coat"), (64, "bf16")]
    for row in rows:
        assert row["tensor"] * row["pipeline"] * row["data"] == row["gpus"]
        assert row["tokens"] == 2**22 and row["memory_bytes"] < 80 * 2**30
        assert row["seconds"]["low"] < row["seconds"]["middle"] < row["seconds"]["high"]
    text = capsys.readouterr().out
    # Two GPUs of a node, 64 MiB: the measured 161 and 91 us that the link's numbers are made of.
    assert "| 2 GPUs of a node | 64 MiB | 0.161 | 0.091 |" in text
