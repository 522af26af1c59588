"""RoPE scaling: rotary frequencies of a model whose context was extended, as Hugging Face's
configurations say it.

``rope_scaling`` is the object of that name in a ``config.json``. Frequencies and attention factors
are those of transformers (``ROPE_INIT_FUNCTIONS``), in fp32.

Sources: "linear": Chen et al. (arXiv 2306.15595); "yarn": Peng et al. (arXiv 2309.00071), equations
17 to 22; "llama3": the Llama 3.1 release.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from coat_dist import CoatConfigError

_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""By ``rope_type``: the keys that it needs, and those that it may have."""


def checked_rope_scaling(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """``rope_scaling`` as it is kept: with ``rope_type``, without nulls; None where nothing is
    scaled ("default").

    Args:
        given: an object in Hugging Face's layout; ``type`` is the older name of ``rope_type``.

    Raises:
        ValueError: a type, key or value that is not accepted, or a key that is missing; names it.
    """
    if given is None:
        return None
    values = {key: value for key, value in given.items() if value is not None}
    old = values.pop("type", None)
    kind = values.pop("rope_type", old)
    if kind not in _KEYS:
        raise ValueError(f"rope_type: got {json.dumps(kind)}, accepted: {', '.join(_KEYS)}")
    needed, optional = _KEYS[kind]
    for key in needed:
        if key not in values:
            raise ValueError(f'{key}: missing, accepted: a value (rope_type "{kind}" needs one)')
    for key, value in values.items():
        if key not in needed + optional:
            raise ValueError(
                f'{key}: unknown key with rope_type "{kind}", accepted: '
                f"{', '.join(needed + optional)}"
            )
        if (
            isinstance(value, bool) != (key == "truncate")
            or not isinstance(value, int | float)
            or value < 0
        ):
            accepted = "true or false" if key == "truncate" else "a number of at least 0"
            raise ValueError(f"{key}: got {json.dumps(value)}, accepted: {accepted}")
    return None if kind == "default" else {"rope_type": kind, **values}


def rope_frequencies(
    scaling: dict[str, Any] | None, base: float, dim: int
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, fp32 ``[dim / 2]`` in radians a position, and the factor on cosines and
    sines.

    Args:
        scaling: from :func:`checked_rope_scaling`.
        base: ``rotary_base``, called theta elsewhere.
        dim: channels of a head.
    """
    periods = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    usual = 1.0 / periods
    if scaling is None:
        return usual, 1.0
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return usual / factor, 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(usual, scaling), 1.0

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    attention = grown(1.0)
    if mscale and all_dim:
        attention = grown(mscale) / grown(all_dim)
    yarn = _yarn(usual, 1.0 / (factor * periods), scaling, base, dim)
    return yarn, float(scaling.get("attention_factor", attention))


def _llama3(usual: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Wavelengths above ``context / low_freq_factor`` grow by the factor; between the two
    bounds, by a part of it.
    """
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / usual
    kept = (context / wavelength - low) / (high - low)  # the share of the usual frequency
    between = (1 - kept) * usual / factor + kept * usual
    scaled = torch.where(wavelength > context / low, usual / factor, between)
    return torch.where(wavelength < context / high, usual, scaled)


def _yarn(
    usual: torch.Tensor, stretched: torch.Tensor, scaling: dict[str, Any], base: float, dim: int
) -> torch.Tensor:
    """Channels that turn more than ``beta_fast`` times in the old context stay, those below
    ``beta_slow`` stretch.
    """
    context = scaling["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = (
        channel(scaling.get(key, turns)) for key, turns in (("beta_fast", 32), ("beta_slow", 1))
    )
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    return stretched * (1 - kept) + usual * kept


def scale_rope(built: Any, scaling: dict[str, Any] | None, base: float) -> None:
    """Give a built Megatron ``GPTModel`` the frequencies and the attention factor of ``scaling``,
    patched or not.

    Raises:
        CoatConfigError: an attention factor with a megatron-core that has none.
    """
    if scaling is None:
        return
    from megatron_patches.compat import set_rope_mscale

    frequencies, factor = rope_frequencies(scaling, base, built.config.kv_channels)
    rope = built.rotary_pos_emb
    rope.inv_freq = frequencies.to(rope.inv_freq.device)
    try:
        set_rope_mscale(built.config, factor)
    except ValueError as problem:
        raise CoatConfigError(f"model.rope_scaling: {problem}") from None
