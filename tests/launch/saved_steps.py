"""A stand-in for an engine, and progress, for checkpoints that need no training."""

import os
import shutil

import torch
import torch.distributed as dist


class Writer:
    zipfile_serialization = True

    def makedirs(self, path, exist_ok):
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state, path):
        torch.save(state, path)


class Engine:
    """Writes what DeepSpeed would, by the same methods: one file a rank under ``folder/tag``,
    and a script.
    """

    optimizer = None
    global_steps, seq_dp_world_size, mp_world_size = 0, 1, 1

    def __init__(self):
        self.checkpoint_engine = Writer()
        self.module = torch.nn.Module()

    def zero_optimization_stage(self):
        return 0

    def use_node_local_storage(self):
        return False

    def managed_gradient_accumulation(self):
        return False

    def save_checkpoint(self, folder, tag, client_state, save_latest, exclude_frozen_parameters):
        assert not save_latest
        self.checkpoint_engine.makedirs(f"{folder}/{tag}", exist_ok=True)
        self.checkpoint_engine.save(torch.arange(1000), f"{folder}/{tag}/rank{dist.get_rank()}.pt")
        if dist.get_rank() == 0:
            self._copy_recovery_script(f"{folder}/{tag}")
        dist.barrier()

    def _save_checkpoint(self):
        pass

    _save_zero_checkpoint = _save_checkpoint

    def _copy_recovery_script(self, path):
        shutil.copyfile(__file__, f"{path}/script.py")


def start(tp=1):
    from megatron_patches import initialize_model_parallel

    initialize_model_parallel(tp)


def progress(step):
    return {"step": step, "consumed_samples": 8 * step}
