"""SIGKILL at random points of saving: the last finished checkpoint is always there, whole, and
continues.
"""

import random
import time
from pathlib import Path

from coat_dist.checkpoint.manifest import read_manifest
from coat_dist.checkpoint.write.durable import write_text
from coat_dist.checkpoint.write.publish import find
from launch.train import checkpoint
from tests.launch.pretrain_runs import configuration
from tests.support import start_ranks

KILLS = 20


def save_for_ever(rank, world, folder, config):
    """Continue from the latest checkpoint and save one step after the other; a file says which
    are done.
    """
    import coat_dist
    from megatron_patches import initialize_model_parallel

    import deepspeed  # isort: skip
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    initialize_model_parallel(1)
    torch.manual_seed(0)
    engine, *_ = coat_dist.initialize(model=torch.nn.Linear(256, 256), config=config)
    step, found = 0, find(folder)
    if found is not None:
        progress = checkpoint.restore(engine, checkpoint.examine(found, {}))  # verifies every file
        step = progress["step"]
        if digest(engine) != progress["digest"]:  # to the byte what was saved, on this rank too
            raise RuntimeError(f"rank {rank}: {found} does not hold what was saved")
    x = torch.randn(2, 256).bfloat16()
    write_text(Path(folder, f"loaded{rank}"), str(step))
    while True:
        engine.backward(engine(x).float().square().mean())
        engine.step()
        step += 1
        checkpoint.save(engine, folder, {}, {"step": step, "digest": digest(engine)}, keep_last=2)
        write_text(Path(folder, f"done{rank}"), str(step))


def digest(engine):
    """CRC-32 of all ranks' master weights, FP8 states and 16-bit weights."""
    import zlib

    import torch
    import torch.distributed as dist

    tensors = [p for g in engine.optimizer.optimizer.param_groups for p in g["params"]]
    tensors += [
        t
        for p in tensors
        for t in engine.optimizer.optimizer.state[p].values()
        if isinstance(t, torch.Tensor)
    ]
    tensors += list(engine.module.parameters())
    mine = 0
    for t in tensors:
        mine = zlib.crc32(
            t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), mine
        )
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def number(path):
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0


def test_kills_lose_no_finished_checkpoint(tmp_path):
    chance = random.Random()
    config = configuration(
        tmp_path, 2, {"activation": {"enabled": False}}, gradient_accumulation_steps=1
    )
    done, interrupted = 0, set()
    for kill in range(KILLS):
        for name in ("loaded0", "loaded1"):
            (tmp_path / name).unlink(missing_ok=True)
        out = tmp_path / f"ranks{kill}"
        out.mkdir()
        ranks = start_ranks(2, save_for_ever, str(tmp_path), config, out=str(out))
        give_up, came_back = time.monotonic() + 120, 0.0
        while number(tmp_path / "done0") <= done:  # one step and save more than before
            failed = [(out / f"{r}.pt").exists() for r in range(2)]
            assert not any(failed) and time.monotonic() < give_up, (
                f"kill {kill}: ranks did not come back: {failed}"
            )
            if not came_back and (tmp_path / "loaded0").exists():
                came_back = time.monotonic()
            time.sleep(0.005)
        assert number(tmp_path / "loaded0") >= done, f"kill {kill}: a finished checkpoint was lost"
        # Any point of the next step and save.
        time.sleep(chance.uniform(0, time.monotonic() - came_back))
        for process in ranks:
            process.kill()
            process.join()
        done = max(number(tmp_path / f"done{r}") for r in range(2))
        interrupted |= {(p.name, p.stat().st_ctime_ns) for p in tmp_path.glob(".unfinished-*")}
        found = find(tmp_path)
        assert found is not None and read_manifest(found)["progress"]["step"] >= done
    assert done >= KILLS
    assert len(interrupted) >= 2, "too few kills in the middle of a save to mean anything"
    print(f"{done} checkpoints, {len(interrupted)} of {KILLS} kills in the middle of writing one")
