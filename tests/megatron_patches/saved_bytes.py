"""How many bytes autograd saves of a model, and of one layer."""

from __future__ import annotations

import torch

from megatron_patches import patch_model

from .tiny import tiny_batch, tiny_gpt, tiny_loss


class Saved:
    """Bytes of the storages that autograd saves, parameters left out."""

    def __init__(self, model):
        self.ignore = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __enter__(self):
        def pack(t):
            storage = t.untyped_storage()
            if storage.data_ptr() not in self.ignore:
                self.storages[storage.data_ptr()] = storage
            return t

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        self.hooks.__enter__()
        return self

    def __exit__(self, *args):
        self.hooks.__exit__(*args)
        self.bytes = sum(s.nbytes() for s in self.storages.values())


def layer_bytes(settings, **options):
    """Saved bytes of one more layer."""
    sizes = []
    for layers in (1, 2):
        model = tiny_gpt(num_layers=layers, **options)
        if settings is not None:
            patch_model(model, settings)
        with Saved(model) as saved:
            tiny_loss(model, tiny_batch(0)).backward()
        sizes.append(saved.bytes)
    return sizes[1] - sizes[0]
