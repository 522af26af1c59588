"""Predictions: collectives, what a step sends, more ranks from a measured run whose truth is
known.
"""

import pytest

from coat_dist import CoatConfig
from launch.model.gpt import load_model_config
from launch.plan.run import Run
from launch.plan.search import with_block
from launch.plan.zero import states
from launch.scale.predict import Link, Network, data_parallel, network_of, predictions
from launch.train.settings import load_settings

INSIDE, BETWEEN = Link(200e9, 1e-6), Link(50e9, 10e-6)
NETWORK = Network(INSIDE, BETWEEN, 8)


def run_of(config="zero2", **changes):
    settings, coat = load_settings(config, tp=1)
    run = Run(
        model=load_model_config("llama2-7b", ["num_layers=4"]),
        settings=settings,
        coat=coat,
        micro=2,
    )
    return run.but(**changes)


def test_a_collective_takes_latency_and_bytes():
    inside = NETWORK.seconds("all_gather", 8, 1, 8e9)
    assert inside == pytest.approx(7 * 1e-6 + 7e9 / 200e9)
    # Two nodes: all eight cards of a node, 400 GB/s, and NVLink is slower; one hop between nodes.
    assert NETWORK.seconds("all_gather", 16, 1, 16e9) == pytest.approx(14e-6 + 10e-6 + 15e9 / 200e9)
    # One card.
    assert NETWORK.seconds("all_reduce", 2, 8, 1e9) == pytest.approx(2 * 10e-6 + 1e9 / 50e9)
    assert NETWORK.seconds("all_reduce", 2, 8, 1e9, 2.0) == pytest.approx(2 * 10e-6 + 1e9 / 100e9)


@pytest.mark.parametrize(
    ("stage", "passes", "expected"), [(0, 3, 2), (1, 3, 3), (2, 3, 7), (3, 3, 9)]
)
def test_stages_send_what_they_send(stage, passes, expected):
    """In units of all BF16 weights: an all-reduce counts 2, ZeRO-3 gathers twice and scatters
    once a micro-batch.
    """
    run = run_of(dp=8, accumulation=passes)
    run = run.but(
        settings={
            **run.settings,
            "zero_optimization": {**run.settings["zero_optimization"], "stage": stage},
        }
    )
    size = 2 * states(run).elements
    sent = sum(
        (2 if one.kind == "all_reduce" else 1) * one.size * one.often for one in data_parallel(run)
    )
    assert sent == pytest.approx(size * expected)
    assert not data_parallel(run.but(dp=1))


def test_weights_that_travel_in_fp8_take_half():
    run = run_of("zero3", dp=8)
    block = CoatConfig.parse({"activation": {"fp8_weight_gather": True}})
    fp8, bf16 = (
        sum(one.size * one.often for one in data_parallel(each) if one.kind == "all_gather")
        for each in (run.but(coat=block), run)
    )
    assert 0.5 < fp8 / bf16 < 0.7  # the embedding and the output layer stay BF16


def cluster(*sizes, shows=0.5, update=0.02, micro=0.06):
    """A measured run of a cluster that obeys the model: ``measured.json`` of it, and its step on
    any ranks.
    """
    run, records = with_block(run_of()), []

    def step(ranks, passes):
        sent = data_parallel(run.but(dp=ranks, accumulation=passes))
        hidden = [one for one in sent if one.hides]
        took = sum(one.often * NETWORK.seconds(one.kind, ranks, 1, one.size) for one in sent)
        took -= (1 - shows) * sum(
            one.often * NETWORK.seconds(one.kind, ranks, 1, one.size) for one in hidden
        )
        return passes * micro + update / ranks + took

    for ranks in sizes:
        about = {"ranks": ranks, "a_node": ranks}
        steps = [
            {"accumulation": passes, "seconds": [step(ranks, passes)] * 8} for passes in (1, 2)
        ]
        records.append({"key": {"variant": "coat"}, **about, "steps": steps})
        if ranks > 1:
            common = {"kind": "all_reduce", "ranks": ranks}
            times = {size: NETWORK.seconds("all_reduce", ranks, 1, size) for size in (4096, 2**32)}
            records.append(
                {
                    **about,
                    "samples": [{**common, "size": k, "seconds": v} for k, v in times.items()],
                }
            )
    identity = {
        "model": run.model.model_dump(exclude_defaults=True, mode="json"),
        "settings": {"coat": dict(run.settings)},
        "tensor_parallel": 1,
        "micro_batch": 2,
        "accumulation": 1,
        "nodes": 1,
        "gpus_per_node": 8,
    }
    return {"identity": identity, "records": records}, step


@pytest.mark.parametrize("shows", [0.0, 0.5, 1.0])
def test_eight_ranks_from_two(shows):
    there, step = cluster(1, 2, shows=shows)
    check, eight = predictions(there, [8])["rows"]
    assert (check["from"], check["ranks"], check["measured"]) == (1, 2, step(2, 1))
    assert (eight["from"], eight["ranks"], eight["measured"]) == (2, 8, None)
    for row in (check, eight):
        low, middle, high = row["seconds"]
        assert low < step(row["ranks"], 1) < high < 2 * low
        if shows == 0.5 and row is eight:  # the middle case is the truth
            assert middle == pytest.approx(step(8, 1), rel=1e-3)
        speeds = row["tokens_per_second_per_gpu"]
        assert speeds == pytest.approx([2 * 4096 / one for one in (high, middle, low)])
        assert row["efficiency"] == pytest.approx([step(1, 1) / one for one in (high, middle, low)])


def test_noise_is_no_update():
    """Two micro-batches that were faster than one by noise predict no step that takes nothing."""
    there, _ = cluster(1, 2)
    for one in there["records"]:
        if "steps" in one:
            one["steps"][1]["seconds"] = [0.9 * seconds for seconds in one["steps"][0]["seconds"]]
    for row in predictions(there, [8, 1024])["rows"]:
        assert row["seconds"][0] > 0.4 * there["records"][0]["steps"][0]["seconds"][0]


def test_links_are_measured_or_assumed():
    there, _ = cluster(1, 2)
    network = network_of(there["records"], 8)
    assert network.inside.bandwidth == pytest.approx(INSIDE.bandwidth, rel=1e-2)
    assert network.inside.latency == pytest.approx(INSIDE.latency, rel=0.05)
    assert [link.source for link in network[:2]] == ["measured", "assumed"]
    assert network_of([], 8).describe().count("(assumed)") == 2
