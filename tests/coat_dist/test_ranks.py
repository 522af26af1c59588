"""What ranks that were started differently are told: keys, values, ranks."""

import concurrent.futures
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from coat_dist import ranks
from coat_dist.config import CoatConfigError
from tests.support import run_ranks


def compare(monkeypatch, *everyone):
    """The message on every rank of a world whose ranks hold these values; the exchanges are
    played in lockstep.
    """
    barrier, box = threading.Barrier(len(everyone)), {}
    local = threading.local()

    def gather(mine):
        local.round = getattr(local, "round", 0) + 1
        box[local.round, local.rank] = mine
        barrier.wait(10)
        return [box[local.round, rank] for rank in range(len(everyone))]

    def run(rank):
        local.rank = rank
        with pytest.raises(CoatConfigError) as error:
            ranks.check_same_on_all_ranks(everyone[rank])
        return str(error.value)

    monkeypatch.setattr(ranks, "gather", gather)
    with concurrent.futures.ThreadPoolExecutor(len(everyone)) as pool:
        messages = set(pool.map(run, range(len(everyone))))
    (message,) = messages
    assert message.startswith("ranks were started differently: ")
    return message.removeprefix("ranks were started differently: ")


def test_keys_values_and_ranks(monkeypatch):
    base = {"gradient_clipping": 1.0, "optimizer": {"params": {"betas": [0.9, 0.95], "lr": 1e-3}}}
    other = {
        "gradient_clipping": 1.0,
        "optimizer": {"params": {"betas": [0.9, 0.99], "lr": 1e-3}},
        "more": True,
    }
    assert compare(monkeypatch, base, base, other, base) == (
        "optimizer.params.betas: [0.9, 0.95] on ranks 0-1, 3, [0.9, 0.99] on rank 2; "
        "more: absent on ranks 0-1, 3, true on rank 2"
    )
    assert compare(monkeypatch, {"zero": {}}, {"zero": {"stage": 1}}) == (
        "zero: {} on rank 0, absent on rank 1; zero.stage: absent on rank 0, 1 on rank 1"
    )


def test_the_first_parameter_that_differs(monkeypatch):
    layers = [[f"{i}.weight", [64, 64], "torch.float32", True] for i in range(1000)]
    others = [*layers[:7], ["7.weight", [64, 32], "torch.float32", True], *layers[8:500]]
    assert compare(monkeypatch, {"parameters": layers}, {"parameters": others}) == (
        'parameters[7]: ["7.weight", [64, 64], "torch.float32", true] on rank 0, '
        '["7.weight", [64, 32], "torch.float32", true] on rank 1'
    )


def test_the_message_is_of_bounded_length(monkeypatch):
    world = [{f"key {i}": str(rank) * 10_000 for i in range(100)} for rank in range(8)]
    message = compare(monkeypatch, *world)
    assert "and 92 more" in message and "and 4 more" in message and len(message) < 8 * 5 * 160


def patient_rank(rank, world):
    """Collectives fail after five seconds here. A busy machine needs longer to connect ranks: the
    timeout is shortened once all are.
    """
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5), dist.group.WORLD)

    def long():
        time.sleep(8)
        return "done"

    def wrong():
        raise ValueError("no")

    found = [ranks.on_rank_0(long, patient=True)]
    try:
        ranks.on_rank_0(wrong, patient=True)
    except ValueError as problem:
        found.append(str(problem))
    return found


def test_patience_is_longer_than_the_timeout_of_collectives():
    assert run_ranks(2, patient_rank) == [["done", "no"]] * 2


def errors_of_a_team(rank, world):
    """What each method of a team raises on this rank, where rank 1 alone is at fault."""

    def on_rank_1(problem):
        if rank == 1:
            raise problem

    def error_of(method, *args):
        with pytest.raises(CoatConfigError) as error:
            method(*args)
        return str(error.value)

    team = ranks.Team(CoatConfigError)
    return {
        "each": error_of(team.each, lambda: on_rank_1(ValueError("x: got 1"))),
        "doing": error_of(team.each, lambda: on_rank_1(OSError("full")), "cannot write"),
        "on rank 0": error_of(team.on_rank_0, lambda: [][rank]),
        "agree": error_of(team.agree, lambda: {"a": 1, "b": rank}),
        "refuse": error_of(team.refuse, lambda: ["of all", f"of {rank}"], "first", "last"),
        "raised": error_of(team.refuse, lambda: on_rank_1(ValueError("one")) or []),
        "many": error_of(team.refuse, lambda: [f"{rank}.{i}" for i in range(5)]),
    }


def test_team_raises_what_one_rank_raises_on_all():
    first, second = run_ranks(2, errors_of_a_team)
    assert (
        first
        == second
        == {
            "each": "x: got 1",
            "doing": "cannot write: rank 1: OSError: full",
            "on rank 0": "IndexError: list index out of range",
            "agree": "b: got 0 on rank 0, 1 on rank 1, accepted: the same on all ranks",
            "refuse": "first\nof all\nof 0\nof 1\nlast",
            "raised": "one",
            "many": "\n".join(
                ["0.0", "0.1", "0.2", "0.3", "0.4", "1.0", "1.1", "1.2", "and 2 more"]
            ),
        }
    )


def team_that_works(rank, world):
    team = ranks.Team()
    team.agree(lambda: {"same": 1})
    team.refuse(lambda: [])
    return team.each(lambda: rank), team.on_rank_0(lambda: f"of {rank}"), ranks.share([1, 2, 3])


def test_team_returns_what_ranks_return():
    first, second = run_ranks(2, team_that_works)
    assert first == ([0, 1], "of 0", [1, 3]) and second == ([0, 1], "of 0", [2])


def test_what_comes_from_another_rank():
    text = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24466"
    assert ranks.of_another_rank(RuntimeError(text)) and ranks.of_another_rank(
        dist.DistBackendError("NCCL")
    )
    assert not ranks.of_another_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
