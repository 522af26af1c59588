"""What autograd keeps of a call, and how many bytes of it are planned."""

import torch


def saved(call, *known):
    """Storages that autograd keeps for ``call``, as {address: bytes}; those of ``known`` tensors
    left out.
    """
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        out = call()
    assert out.requires_grad
    known_addresses = {t.untyped_storage().data_ptr() for t in known}
    # On a GPU a scale may be a word of a buffer that many share; it counts alone.
    parts = [t if t.is_cuda and not t.dim() else t.untyped_storage() for t in held]
    storages = {
        part.data_ptr(): part.nbytes if isinstance(part, torch.Tensor) else part.nbytes()
        for part in parts
    }
    return {address: size for address, size in storages.items() if address not in known_addresses}


def scale_bytes(n, config):
    return -(-n // config.group_size) * (1 if config.scale == "e8m0" else 2)


def normed_bytes(h, config):
    """Per token: x8, its group scales and rstd, of both norms."""
    return h + scale_bytes(h, config) + 4


def pre_bytes(f, config):
    """Per token: a gated pre-activation, its parts apart, and its scales."""
    return 2 * (f + scale_bytes(f, config))
