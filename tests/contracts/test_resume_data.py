"""A run that continues with another batch size goes on in the data where it was: nothing is read
twice.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from launch.train.data_source import Progress, TokenData
from tests.launch.tiny_data import make, rows, train

SEQ = 16


def plan(data, micro, dp, accumulation, train_steps):
    """What ``TokenData`` asks of a plan for its data."""
    args = {"data": data, "split": "90,10,0", "seed": 7, "data_cache": None, "num_workers": 0}
    args |= {"train_steps": train_steps, "eval_interval": 0, "eval_steps": 1, "eval_only": False}
    return SimpleNamespace(
        args=SimpleNamespace(**args),
        batch=SimpleNamespace(
            micro=micro, accumulation=accumulation, total=micro * accumulation * dp
        ),
        model=SimpleNamespace(seq_length=SEQ),
        dp=dp,
        eod=None,
    )


def read(p, begun, steps):
    """The samples of each of the next ``steps`` steps, in the order of their positions, of all
    ranks.
    """
    ranks = [
        TokenData(p, begun, rank).batches("train", begun.consumed_samples) for rank in range(p.dp)
    ]
    found = []
    for _ in range(steps):
        micro_batches = [
            next(rank)["tokens"] for _ in range(p.batch.accumulation) for rank in ranks
        ]
        found.append([tuple(row.tolist()) for tokens in micro_batches for row in tokens])
    return found


@pytest.mark.parametrize("sets", ["one", "blend"])
@pytest.mark.parametrize("train_steps", [14, 200])
@pytest.mark.parametrize(
    ("micro", "dp", "accumulation"), [(2, 1, 1), (1, 2, 1), (8, 1, 1), (2, 2, 4)]
)
def test_samples_follow_those_of_another_batch_size(
    tmp_path, sets, train_steps, micro, dp, accumulation
):
    """8 steps of 8 samples, continued with 2, 8 and 16: of the data in their order, these come
    next.
    """
    data = [make(tmp_path / "x")]
    if sets == "blend":
        data = ["0.3", *data, "0.7", make(tmp_path / "y", seed=1)]
    total, steps = micro * dp * accumulation, 6
    order = rows(train(data, 64 + steps * 16, seq=SEQ), 64 + steps * 16)
    assert len(set(order[:80])) > 70, "samples tell where they are from"
    before = read(plan(data, 8, 1, 1, train_steps), Progress(), 8)
    assert list(itertools.chain(*before)) == order[:64]
    after = read(
        plan(data, micro, dp, accumulation, train_steps),
        Progress(step=8, consumed_samples=64),
        steps,
    )
    assert list(itertools.chain(*after)) == order[64 : 64 + steps * total]
