"""Everything here that depends on the version of megatron-core: which versions are supported, and
every workaround.

Each workaround says which versions need it. When the oldest supported version (:data:`SUPPORTED`)
passes the last of them, the workaround goes. How the fields of ``TransformerConfig`` are treated is
in ``config/fields.py``, for all versions.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .cpu import answer_for_cuda, dispatch_tokens, gather_unevenly

SUPPORTED = ">=0.14,<0.17"
"""Versions of megatron-core. Pre-releases count as the version before which they are: NVIDIA's
containers ship them.
"""

_prepared = False


def check_version() -> str:
    """The installed megatron-core version; raises ImportError where it is missing or outside
    :data:`SUPPORTED`.
    """
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise ImportError(f"megatron-core: not installed, accepted: {SUPPORTED}") from None
    if Version(version).base_version not in SpecifierSet(SUPPORTED):
        raise ImportError(f"megatron-core: got {version}, accepted: {SUPPORTED}")
    return version


def older_than(version: str) -> bool:
    """Whether the installed megatron-core is older than ``version``, such as "0.16", and its
    release candidates.
    """
    return Version(metadata.version("megatron-core")) < Version(f"{version}rc0")


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Import megatron-core without its warnings, one a module, that Transformer Engine and Apex are
    missing.

    Every supported version warns, and nothing here needs either package.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*(Transformer Engine|Apex)", category=UserWarning
        )
        yield


def reset_counts(config: Any, model: torch.nn.Module) -> None:
    """Reset what routers count for one step, as ``finalize_model_grads`` does. Before 0.16 the
    bias' update does it.
    """
    module = import_module("megatron.core.distributed.finalize_model_grads")
    if reset := getattr(module, "reset_model_temporary_tensors", None):
        reset(config, [model])


@functools.cache
def loss_scalers() -> tuple[Any, ...]:
    """Classes that add a loss inside backward: for routers, multi-token prediction and, since
    0.16, DSA's indexer.
    """
    moe = import_module("megatron.core.transformer.moe.moe_utils")
    predictions = import_module("megatron.core.transformer.multi_token_prediction")
    found = [moe.MoEAuxLossAutoScaler, predictions.MTPLossAutoScaler]
    if find_spec("megatron.core.transformer.experimental_attention_variant"):
        dsa = import_module("megatron.core.transformer.experimental_attention_variant.dsa")
        found.append(dsa.DSAIndexerLossAutoScaler)
    return tuple(found)


def define_missing_names() -> None:
    """Define names that megatron-core 0.16 uses on every machine, and that only Transformer Engine
    makes it define.

    Its router compares one with None, and selective recompute of ``layernorm`` asks whether FP8 is
    on.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not hasattr(random, "FP8GlobalStateManager"):
        random.FP8GlobalStateManager = _NoTransformerEngine
        random.activation_recompute_forward = random.fp8_autocast = lambda **_: nullcontext()


class _NoTransformerEngine:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def other_quick_gelus() -> tuple[Callable[..., Any], ...]:
    """From 0.15 on: a second ``quick_gelu`` of megatron-core, which computes the same as
    ``activations.quick_gelu``.
    """
    from megatron.core.fusions import fused_bias_geglu

    other = getattr(fused_bias_geglu, "quick_gelu", None)
    return () if other is None else (other,)


def fc1_params(config: Any) -> dict[str, Any]:
    """Arguments of fc1's constructor that have gate and up initialized as two weights, as from 0.16
    on.

    Older versions split the two as one matrix, and a model would start differently at each
    tensor-parallel size.
    """
    return {"stride": 2} if config.gated_linear_unit and older_than("0.16") else {}


def rope_mscale(config: Any) -> float:
    """The factor on cosines and sines that Megatron's self-attention takes from ``config``
    (YaRN): 1 before 0.15.
    """
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    factor = getattr(yarn, "_yarn_get_concentration_factor_from_config", None)
    return 1.0 if factor is None else float(factor(config))


def set_rope_mscale(config: Any, factor: float) -> None:
    """Have every self-attention of a model multiply cosines and sines by ``factor``; see
    :func:`rope_mscale`.

    From 0.15 on Megatron derives the factor from three attributes that are no fields.

    Raises:
        ValueError: a factor other than 1 with a Megatron that multiplies by none.
    """
    if factor != 1.0:
        config.yarn_rotary_scaling_factor = math.e
        config.yarn_mscale, config.yarn_mscale_all_dim = 10 * (factor - 1), 0.0
    if not math.isclose(rope_mscale(config), factor, rel_tol=1e-12):
        raise ValueError(
            f"attention factor of RoPE: got {factor}, accepted: 1 with megatron-core before 0.15"
        )


def prepare_cpu() -> bool:
    """Let megatron-core build and train models on the CPU (gloo), with any tensor-parallel size.

    Every supported version allocates on ``torch.cuda.current_device()`` and keeps the random states
    of its tensor-parallel regions in the CUDA generator. This replaces the functions of
    ``torch.cuda`` that it uses by their CPU counterparts, and has those of Megatron's own loop that
    ask for CUDA by name find the CPU (``cpu.py``). Safe to call more than once. Models need
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
    torch.cuda.manual_seed = lambda seed: (
        torch.random.default_generator.manual_seed(int(seed)) and None
    )  # type: ignore[assignment]
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_state  # type: ignore[assignment]
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = set_state  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_args, **_kwargs: None  # saving a checkpoint waits for the GPU
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    logging.getLogger(random.__name__).addFilter(_not_about_shared_generator)
    # Advice about overlapping CUDA streams, which is of no use here.
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
    with quiet_imports():
        answer_for_cuda()
        dispatch_tokens()
        gather_unevenly()
    _prepared = True
    return True


def _not_about_shared_generator(record: logging.LogRecord) -> bool:
    """Drop the warning that a tensor-parallel region drew from the CPU generator: here there is
    no other.
    """
    return "CPU RNG state changed" not in record.getMessage()
