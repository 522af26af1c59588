"""Universal checkpoints of engines that hold pipeline stages: frozen parameters, buffers, extra
states, other names.
"""

import shutil

import pytest
import torch
from torch import nn

import megatron_patches as mp
from megatron_patches.parallel.pipeline import chunks_of, whole_names
from tests.support import equal, run_ranks

from .test_pipeline_engine import CONFIG, batches, build, forward_step


class Note(nn.Module):
    """Has an extra state."""

    value = 0

    def get_extra_state(self):
        return {"value": self.value}

    def set_extra_state(self, state):
        self.value = state["value"]


def noted(chunk, sign):
    """A chunk with frozen layers' weights, a buffer and an extra state in each layer, and a
    buffer of its own.
    """
    chunk.register_buffer("common", torch.tensor([7 * sign]))
    for layer in chunk.decoder.layers:
        layer.mlp.linear_fc2.weight.requires_grad_(False)
        layer.mlp.linear_fc2.weight.data.mul_(1 + sign)
        layer.register_buffer("seen", torch.tensor([sign * layer.layer_number]))
        layer.note = Note()
        layer.note.value = sign * layer.layer_number


def engine_of(rank, stages, parts, sign, load):

    model = build(rank, stages, parts)
    for chunk in chunks_of(model) if parts is None else model:
        noted(chunk, sign)
    config = {**CONFIG, "checkpoint": {"load_universal": load}}
    return mp.initialize(model=model, config=config, dist_init_required=False)[0]


def held(engine):
    """What this rank has of everything, by whole names."""
    from deepspeed.utils import safe_get_full_fp32_param

    import coat_dist

    names, found = whole_names(engine.module), {}
    for name, p in engine.module.named_parameters():
        found[names[name]] = [p.detach().clone()]
        if p.requires_grad:
            both = [coat_dist.safe_get_full_moment(p, which) for which in ("first", "second")]
            found[names[name]] += [safe_get_full_fp32_param(p).clone(), *both]
    for chunk in chunks_of(engine.module):
        found["common"] = [chunk.common.clone()]
        for layer in chunk.decoder.layers:
            found[f"layer {layer.layer_number}"] = [
                layer.seen.clone(),
                torch.tensor(layer.note.value),
            ]
    return found


def programs(rank, world, folder):
    import torch.distributed as dist

    from coat_dist import convert_to_universal

    engine = engine_of(rank, 2, 2, 1, False)
    mp.train_batch(engine, batches(), forward_step)
    engine.save_checkpoint(folder, "two")
    found = [held(engine)]
    if rank == 0:
        convert_to_universal(folder / "two", folder / "universal")
        shutil.copytree(folder / "universal", folder / "strange")
        fp32 = folder / "strange" / "zero" / "decoder.final_layernorm.weight"
        shutil.copytree(fp32, fp32.with_name("decoder.layers.9.weight"))
    dist.barrier()
    strange = "got decoder.layers.9.weight, accepted: what this model holds"
    for stages in (2, 1):
        engine = engine_of(rank, stages, None, -1, True)
        with pytest.raises(ValueError, match=strange):
            engine.load_checkpoint(folder, "strange")
        engine.load_checkpoint(folder, "universal")
        found.append(held(engine))
    engine = engine_of(rank, 1, None, -1, False)
    for weights_only in (False, True):
        with pytest.raises(ValueError, match="pipeline stages: checkpoint has 2, this run has 1"):
            engine.load_checkpoint(folder, "two", load_module_only=weights_only)
    return found


def test_universal_checkpoint_of_pipeline_stages(tmp_path):
    first, second = run_ranks(2, programs, tmp_path)
    saved = first[0] | second[0]
    assert saved["common"][0] == 7
    for i in range(1, 5):
        assert saved[f"layer {i}"] == [torch.tensor([i]), torch.tensor(i)]
    assert len(saved["decoder.layers.3.mlp.linear_fc2.weight"]) == 1  # frozen
    for loaded in (first[1] | second[1], first[2], second[2]):
        assert loaded.keys() == saved.keys()
        for name, tensors in loaded.items():
            assert equal(tensors, saved[name]), name
