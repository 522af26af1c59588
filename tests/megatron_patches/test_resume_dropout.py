"""Dropout after a resume under DeepSpeed, in a program of one's own, as docs/checkpoints.md
shows it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megatron_patches as mp
from tests.support import run_ranks

from .tiny import SMALL, labelled_loss, tiny_batch, tiny_gpt
from .training import drive, engine_config

STEPS, SAVED_AFTER = 4, 2


def _start(stage):

    model = tiny_gpt(**SMALL, hidden_dropout=0.1, attention_dropout=0.1)
    return mp.initialize(model=model, config=engine_config(stage))[0]


def _train(engine, steps):
    return drive(engine, (tiny_batch(2 * step + dist.get_rank()) for step in steps), labelled_loss)


def _resumes(rank, world, folder, stage):
    """The rest of a run whose ranks have random states of their own, and of it when it was
    resumed in three ways.
    """
    from coat_dist.checkpoint.save import Extras
    from megatron_patches import initialize_model_parallel, rng_state, set_rng_state

    initialize_model_parallel()

    def write_random(folder):
        torch.save(rng_state(), folder / f"random_{dist.get_rank()}.pt")

    def read_random(path):
        return torch.load(Path(path).parent / f"random_{dist.get_rank()}.pt", weights_only=True)

    engine = _start(stage)
    torch.manual_seed(100 + rank)
    _train(engine, range(SAVED_AFTER))
    engine.save_checkpoint(
        folder, client_state={"rng": rng_state()}, extras=Extras(add_files=write_random)
    )
    rest, resumed = _train(engine, range(SAVED_AFTER, STEPS)), {}
    for way in ("nothing", "client_state", "a file a rank"):
        engine = _start(stage)
        path, state = engine.load_checkpoint(folder)
        if way != "nothing":
            set_rng_state(state["rng"] if way == "client_state" else read_random(path))
        resumed[way] = _train(engine, range(SAVED_AFTER, STEPS)) == rest
    return resumed


@pytest.mark.parametrize("stage", [2, 3])
def test_resume_of_dropout_by_a_file_a_rank(tmp_path, stage):
    """``client_state`` below ZeRO-3 gives every rank the first one's state, and a plain resume
    restores none.
    """
    for resumed in run_ranks(2, _resumes, tmp_path, stage):
        assert resumed == {"nothing": False, "client_state": stage == 3, "a file a rank": True}
