"""Fits find latency, bandwidth and overlap where they are known, and say truly how well they know them."""

import numpy as np
import pytest

from coat_dist import CoatConfigError
from launch.scale.fit import Sample, fit, fit_overlap, solve
from launch.scale.links import KINDS, SHAPES, Group, Link, hops, parse_links, share
from launch.scale.network import of_records
from launch.scale.steps import Cost, Point, Range, fit_steps, spread_of
from tests.launch.scale.cluster import two_links

SIZES = tuple(2.0**k for k in range(10, 31, 2))


def seconds(kind, ranks, size, shape, latency=20e-6, bandwidth=50e9):
    return hops(kind, ranks, shape) * latency + size * share(kind, ranks) / bandwidth


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_latency_and_bandwidth_are_found(kind, shape):
    ranks = (2,) if kind == "p2p" else (2, 4, 8)
    found = fit(Sample(kind, n, s, seconds(kind, n, s, shape)) for n in ranks for s in SIZES)
    assert kind == "p2p" or found.shape == shape
    assert found.latency == pytest.approx(20e-6, rel=1e-6) and found.bandwidth == pytest.approx(50e9, rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_intervals_hold_the_truth_as_often_as_they_say(shape):
    random, latency, bandwidth, further = np.random.default_rng(3), 0, 0, 0
    for _ in range(100):
        noise = np.exp(random.normal(0, 0.1, 3 * len(SIZES) + 1))
        cases = [(n, s) for n in (2, 4, 8) for s in SIZES]
        found = fit(
            Sample("all_gather", n, s, t * seconds("all_gather", n, s, shape))
            for (n, s), t in zip(cases, noise, strict=False)
        )
        latency += abs(found.latency - 20e-6) <= found.latency_error
        bandwidth += abs(found.bandwidth - 50e9) <= found.bandwidth_error
        further += found.seconds(16, 2**24).holds(noise[-1] * seconds("all_gather", 16, 2**24, shape))
    assert min(latency, bandwidth, further) >= 88, (latency, bandwidth, further)
    assert found.bandwidth_error < 0.2 * found.bandwidth


@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_leave_the_growth_of_latency_open(shape):
    found = fit(Sample("all_reduce", 2, s, seconds("all_reduce", 2, s, shape)) for s in SIZES)
    assert len(found.fits) == 3
    small, large = found.seconds(64, 2**10), found.seconds(64, 2**30)
    assert small.holds(seconds("all_reduce", 64, 2**10, shape)) and large.holds(seconds("all_reduce", 64, 2**30, shape))
    assert small.high / small.low > 10 and large.high / large.low < 1.2  # latency is open, bandwidth is not


@pytest.mark.parametrize(("part", "lost"), [(0.0, 0.0), (0.35, 0.0), (0.7, 60e-6), (1.0, 60e-6)])
def test_overlap_is_found(part, lost):
    alone = [(c, m) for c in (1e-3, 4e-3) for m in (0.5e-3, 1e-3, 2e-3)]
    found = fit_overlap(alone, [c + m - part * min(c, m) + lost for c, m in alone])
    assert found.part == pytest.approx(part, abs=1e-9) and found.lost == pytest.approx(lost, abs=1e-12)
    assert part == 0 or found.error < 0.06


def test_no_factor_is_negative():
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    factors, covariance, _ = solve(columns, np.array([3.0, 2.0, 1.0]))
    assert factors.tolist() == pytest.approx([2.0, 0.0]) and covariance[1, 1] == 0


def test_too_few_measurements_are_refused():
    with pytest.raises(ValueError, match="accepted: two or more of one kind"):
        fit([Sample("p2p", 2, 1024, 1e-5)])


def test_steps_tell_computing_from_the_update_and_from_communication():
    def cost(ranks, accumulation):
        return Cost(ranks, Range(*(3 * (0.05 * (ranks - 1) / ranks,))))

    def truth(ranks, accumulation):
        return 0.2 * accumulation + 0.04 / ranks + 0.5 * cost(ranks, 1).communication.middle

    points = [Point(n, a, truth(n, a), 0.01, 10) for n in (1, 2) for a in (1, 2)]
    found = fit_steps(points, cost)
    assert [found.micro, found.update, found.shows] == pytest.approx([0.2, 0.04, 0.5], rel=1e-6)
    said = found.seconds(4, 1)
    assert said.middle == pytest.approx(truth(4, 1)) and said.holds(truth(4, 1)) and said.high < 1.3 * said.middle


def test_one_disturbed_step_is_no_spread():
    assert spread_of([1.0] * 9 + [20.0]) == 0


def test_a_group_on_several_nodes_has_the_cards_of_all_its_ranks():
    network, _ = two_links()
    size = 8e9
    across = network.seconds("all_gather", Group(64, 8), size).middle
    alone = network.seconds("all_gather", Group(8, 1), size).middle
    assert across == pytest.approx(size * 63 / 64 / 200e9 + 7 * 10e-6 + 56 * 1e-6)  # 8 x 50 > 200: NVLink's
    assert alone == pytest.approx(size * 7 / 8 / 50e9 + 7 * 10e-6)
    assert network.group(16, stride=4) == Group(16, 2) and network.group(4) == Group(4, 4)


def test_groups_with_a_rank_on_each_node_measure_the_link_between_nodes():
    def record(ranks, a_node, link):
        samples = [
            {"kind": "all_gather", "ranks": ranks, "size": s, "seconds": link.seconds("all_gather", ranks, s)}
            for s in SIZES
        ]
        return {"ranks": ranks, "a_node": a_node, "samples": samples, "overlaps": []}

    inside, between = Link("i", 200e9, 2e-6), Link("b", 40e9, 9e-6)
    mixed = record(4, 2, Link("both", 1e9, 1.0))
    found = of_records([record(2, 2, inside), record(2, 1, between), mixed], 2, {})
    assert found.inside["all_gather"].bandwidth == pytest.approx(200e9, rel=1e-6)
    assert found.between["all_gather"].bandwidth == pytest.approx(40e9, rel=1e-6)
    given = of_records([record(2, 2, inside)], 2, {"between": between})
    assert given.seconds("all_gather", given.group(4), 1e9).middle > 0
    with pytest.raises(CoatConfigError, match="--link: nothing known between nodes, accepted: nic=BANDWIDTH for 4"):
        of_records([record(2, 2, inside)], 2, {}).seconds("all_gather", Group(4, 2), 1e9)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["wire=1GB/s"], "--link: got 'wire=1GB/s', accepted: nvlink, "),
        (["nic=fast"], "--link: got 'nic=fast', accepted: nic=BANDWIDTH[,LATENCY]"),
        (["nic=0GB/s"], "--link: got 'nic=0GB/s', accepted"),
        (["nic=1GB/s,5"], "--link: got 'nic=1GB/s,5', accepted"),
        (["nic=1GB/s", "ib=2GB/s"], "--link: got 'ib=2GB/s' after 'nic', accepted: one link between nodes"),
    ],
)
def test_links_that_cannot_be_read(given, said):
    with pytest.raises(CoatConfigError) as problem:
        parse_links(given)
    assert str(problem.value).startswith(said)


def test_links_are_bytes_and_bits():
    found = parse_links(["nvlink=450GB/s,3us", "nic=400Gb/s"])
    assert (found["inside"].bandwidth, found["inside"].latency) == (450e9, pytest.approx(3e-6))
    assert found["between"].bandwidth == 50e9
