"""Which megatron-core this package knows, and what lets megatron-core run without a GPU.

megatron-core assumes CUDA in a handful of places: it allocates on ``torch.cuda.current_device()`` and keeps the random
states of its tensor-parallel regions in the CUDA generator. :func:`prepare_cpu` points those at the CPU. It does
nothing on a machine with a GPU.
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version

__all__ = ["SUPPORTED", "check_version", "prepare_cpu", "rope_mscale"]

SUPPORTED = ("0.14", "0.17")
"""Supported megatron-core versions: from the first (inclusive) to the second (exclusive)."""

_prepared = False


def check_version(version: str | None = None) -> str:
    """The installed megatron-core version.

    Args:
        version: checked instead of the installed one.

    Raises:
        ImportError: megatron-core is missing or outside :data:`SUPPORTED`; the message names both versions.
    """
    accepted = f">={SUPPORTED[0]},<{SUPPORTED[1]}"
    if version is None:
        try:
            version = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            raise ImportError(f"megatron-core: not installed, accepted: {accepted}") from None
    found = Version(version)
    # Pre-releases of the lower bound count as that version: NVIDIA's containers ship them.
    if Version(found.base_version) < Version(SUPPORTED[0]) or Version(found.base_version) >= Version(SUPPORTED[1]):
        raise ImportError(f"megatron-core: got {version}, accepted: {accepted}")
    return version


def rope_mscale(config: Any) -> float:
    """The factor on cosines and sines that Megatron's self-attention takes from ``config`` (YaRN): 1 before 0.15."""
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    factor = getattr(yarn, "_yarn_get_concentration_factor_from_config", None)
    return 1.0 if factor is None else float(factor(config))


def prepare_cpu() -> bool:
    """Let megatron-core build and train models on the CPU (gloo), with any tensor-parallel size.

    Replaces ``torch.cuda.current_device``, ``torch.cuda.manual_seed`` and the CUDA random-state accessors that
    megatron-core uses by their CPU counterparts. Safe to call more than once. Models need
    ``TransformerConfig(use_cpu_initialization=True)``.

    Returns:
        Whether the CPU stands in for the GPU; False, with nothing touched, where there is a GPU.
    """
    global _prepared
    if torch.cuda.is_available():
        return False
    if _prepared:
        return True
    from megatron.core.tensor_parallel import layers, random

    cpu = torch.device("cpu")

    def get_state(*_args: object, **_kwargs: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
        torch.set_rng_state(new_state)

    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.manual_seed = lambda seed: torch.random.default_generator.manual_seed(int(seed)) and None  # type: ignore[assignment]
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_state  # type: ignore[assignment]
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = set_state  # type: ignore[assignment]
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    logging.getLogger(random.__name__).addFilter(_not_about_shared_generator)
    # Advice about overlapping CUDA streams, which is of no use here.
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
    _prepared = True
    return True


def _not_about_shared_generator(record: logging.LogRecord) -> bool:
    """Drop the warning that a tensor-parallel region drew from the CPU generator: here there is no other."""
    return "CPU RNG state changed" not in record.getMessage()
