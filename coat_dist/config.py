"""The ``"coat"`` block of a DeepSpeed configuration.

Every problem is reported as one :class:`CoatConfigError` that names the key, what was given and
what is accepted, before anything is built. Keys and defaults are the fields below. Which of
DeepSpeed's own settings are refused beside the block is the table in ``settings.py``.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .config_errors import Problem, explain, got, keys_of
from .formats import ALWAYS_EXPANDED, FirstMomentFormat, SecondMomentFormat

__all__ = [
    "ActivationConfig",
    "CoatConfig",
    "CoatConfigError",
    "OptimizerConfig",
    "explain",
    "load_json",
    "refuse",
]
__all__ += [
    "COMMENTS",
    "Problem",
    "decode_base64",
    "letters_of",
    "misspells_coat",
    "without_comments",
]

COMMENTS = ("_", "#", "/", "$")
"""What keys begin with that nobody reads, such as "_comment" and "$schema"."""


class CoatConfigError(ValueError):
    """A configuration that cannot be run: one :class:`Problem` a key, or a complete text."""

    @property
    def problems(self) -> tuple[Problem | str, ...]:
        """What is wrong."""
        return self.args

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


def refuse(key: str, given: str, accepted: str) -> NoReturn:
    """Raise the CoatConfigError of one key."""
    raise CoatConfigError(Problem(key, given, accepted))


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _refuse(key: str, given: str, accepted: str) -> NoReturn:
    raise ValueError(Problem(key, f"got {given}", accepted))


class OptimizerConfig(_Block):
    """How CoatAdamW stores its moments."""

    first_moment: FirstMomentFormat = "e4m3"
    """Format of the first moment m."""
    second_moment: SecondMomentFormat = "e4m3"
    """Format of the second moment v; "log8" is an 8-bit logarithm."""
    expand: bool = True
    """Dynamic range expansion: store (x / amax)^k, so that a group fills the format's range
    (COAT section 4).
    """
    normalize: bool = True
    """Store the first moment divided by the root of the second; false stores it by itself, as
    COAT does.
    """
    group_size: Literal[64, 128, 256] = 128
    """Consecutive elements that share one amax and one exponent."""
    stochastic_rounding: Literal[True, False, "auto"] = "auto"
    """Round codes up or down at random, without bias: of both moments, or ("auto") of the second
    and an int8 first.
    """
    master_weights: Literal["parameter", "bf16_remainder"] = "parameter"
    """"parameter": ZeRO's fp32 shard. "bf16_remainder": the bfloat16 weight and the 16 bits it
    lacks, the same number to the bit; needs DeepSpeed's ``bf16.bf16_master_weights_and_grads`` and
    ``bf16.bf16_optimizer_states``.
    """
    state_device: Literal["parameter", "cpu"] = "parameter"
    """"cpu": moments and remainders in host memory, as DeepSpeed's ``offload_optimizer`` asks
    for, too.
    """

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if self.second_moment in ALWAYS_EXPANDED and not self.expand:
            given = f'false with second_moment "{self.second_moment}"'
            _refuse("expand", given, "true (its codes always span a group's range)")
        return self


class ActivationConfig(_Block):
    """The FP8 precision flow of transformer layers."""

    enabled: bool | Literal["auto"] = True
    """Patch the layers. False keeps BF16 layers and only the optimizer is compressed; "auto" does
    the same, with a warning, for a model in which nothing can be patched.
    """
    forward: Literal["exact", "quantized"] = "exact"
    """"quantized" (the paper): norm and activation read the FP8 tensor that is saved. "exact": they
    read the BF16 tensor, and only backward reads the FP8 one.
    """
    forward_scales: Literal["row", "tensor"] = "row"
    """Scales of forward's FP8 operands: one a row (token, output feature), or one a tensor (the
    paper's), which takes two passes where rows take one, and a reduction over ranks. Backward's are
    per tensor.
    """
    format: Literal["e4m3", "e5m2"] = "e4m3"
    """FP8 format of the operands of products: activations and weights."""
    grad_format: Literal["e4m3", "e5m2"] = "e4m3"
    """FP8 format of gradients."""
    saved_format: Literal["mixed", "e3m4", "int8", "e4m3", "e5m2"] = "mixed"
    """Of tensors saved for backward; "mixed": "int8" before activation functions, else "e3m4".
    The paper has e4m3.
    """
    group_size: Literal[16, 32, 64, 128] = 32
    """Elements along the hidden dimension that share one scale in tensors saved for backward."""
    scale: Literal["e8m0", "bf16"] = "e8m0"
    """Type of those scales: 1-byte power of two (OCP MX) or bfloat16."""
    fp8_gather: bool = True
    """Send FP8 instead of BF16 when sequence parallelism gathers activations and gradients."""
    fp8_weight_gather: bool = False
    """Under ZeRO-3, gather patched layers' weights as FP8 codes: half the bytes, equal bits; not
    with tp_invariant.
    """
    expert_dispatch: Literal["auto", "fp8", "bf16"] = "auto"
    """What tokens are on the way to experts of other ranks: codes and row scales, or BF16. "auto":
    FP8 where ``forward_scales`` is "row", which changes nothing of what an expert's forward
    multiplies.
    """
    expert_dispatch_grad: Literal["bf16", "fp8"] = "bf16"
    """What their gradients are on the way back, where tokens travel in FP8."""
    tp_invariant: bool = False
    """Reduce every scale over tensor-parallel ranks and sum exactly, so that losses do not
    depend on the TP size.
    """
    weights: Literal["on_use", "cached"] = "on_use"
    """Weights of grouped experts: quantize them on every use, or keep their codes until they
    change, 1 byte a parameter and rank. Other weights are quantized on every use.
    """
    frozen_weights: Literal["bf16", "fp8"] = "bf16"
    """Weights that never train of linears and experts in the flow, as under LoRA: leave them as
    they are, or ("fp8") keep FP8 codes alone, 1 byte a parameter.
    """
    wgrad: Literal["grad", "main_grad"] = "grad"
    """Weight gradients: given to autograd, or added to ``weight.main_grad``
    (``gradient_accumulation_fusion``).
    """
    cuda_graphs: bool = False
    """Train patched layers as CUDA graphs: for small ones with few tokens, which the host starts
    too slowly.
    """
    compile: bool = False
    """Let torch.compile fuse what a transformers layer computes around its blocks in FP8, each
    layer by itself. Layers that run in one piece, such as Llama's, stay as they are.
    """
    attention: Literal["bf16", "fp8"] = "bf16"
    """What attention keeps of q, k, v and its output; "fp8" rounds them by groups, and forward
    computes from that.
    """
    boundaries: Literal["bf16", "fp8"] = "bf16"
    """What gradient checkpointing keeps of a layer: its input as it is, or ("fp8") as codes by
    groups, from which backward recomputes the layer. Forward computes from the input itself.
    Layers that route tokens to experts keep their input as it is.
    """
    boundaries_device: Literal["layer", "cpu"] = "layer"
    """Where these codes are: "cpu" keeps them in pinned host memory, and loads those of a layer
    while backward is at the next.
    """
    recompute: int | None = Field(default=None, ge=0)
    """How many layers gradient checkpointing recomputes: the first ones of each stack; the others
    keep what backward needs. A number turns it on by itself; null recomputes all layers where the
    program turns it on.
    """
    tiles: int = Field(default=1, ge=1)
    """In how many pieces of tokens (multiples of 128) an MLP runs, one after the other, so that the
    tensors inside an MLP exist for one piece at a time: for long sequences. Results keep their
    bits; backward multiplies the output's gradient by fc2's weight twice. An MLP runs in one piece
    with adapters, in grouped experts, over tensor-parallel ranks and with ``forward_scales``
    "tensor"; its backward also where a bias of fc1 trains.
    """
    loss: Literal["chunked", "kept", "plain"] = "chunked"
    """A model's own loss: "chunked" never holds all logits and makes them again in backward; "kept"
    computes it like that, but keeps them; "plain" leaves the loss unchanged.
    """
    z_loss: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """In training, adds ``z_loss * log(sum(exp(logits)))**2`` to a token's chunked loss (PaLM
    used 1e-4).
    """
    evaluation: Literal["plain", "flow"] = "plain"
    """What a transformers model runs in eval mode: its own forward, or ("flow") patched layers
    where no cache of keys and values is given. For programs that take log-probabilities in eval
    mode and compare them with training's.
    """
    bf16_layers: tuple[int, ...] = Field(default=(), strict=False)
    """Layers left in BF16: 0-based indices, negative ones count from the last."""

    @property
    def dispatches_fp8(self) -> bool:
        """Whether tokens travel to experts of other ranks in FP8."""
        return self.expert_dispatch == "fp8" or (
            self.expert_dispatch == "auto" and self.forward_scales == "row"
        )

    @model_validator(mode="after")
    def _consistent(self) -> ActivationConfig:
        if self.tp_invariant and not self.fp8_gather:
            _refuse(
                "tp_invariant", "true with fp8_gather false", "tp_invariant needs fp8_gather true"
            )
        if self.frozen_weights == "fp8" and self.forward_scales == "tensor":
            _refuse("frozen_weights", '"fp8" with forward_scales "tensor"', '"bf16"')
        if self.expert_dispatch == "fp8" and self.forward_scales == "tensor":  # would round twice
            _refuse("expert_dispatch", '"fp8" with forward_scales "tensor"', '"auto" or "bf16"')
        if self.expert_dispatch_grad == "fp8" and not self.dispatches_fp8:
            _refuse("expert_dispatch_grad", '"fp8" where tokens travel in BF16', '"bf16"')
        for key, needed in (("weights", "on_use"), ("wgrad", "grad"), ("tp_invariant", False)):
            if self.cuda_graphs and (given := getattr(self, key)) != needed:
                _refuse(
                    "cuda_graphs",
                    f"true with {key} {json.dumps(given)}",
                    f"{key} {json.dumps(needed)}, or false",
                )
        if self.z_loss and (self.loss == "plain" or not self.enabled):
            why = 'loss "plain"' if self.enabled else "enabled false"
            _refuse(
                "z_loss",
                f"{self.z_loss} with {why}",
                '0, or loss "chunked" or "kept" with enabled true',
            )
        if self.boundaries_device == "cpu" and self.boundaries == "bf16":
            _refuse("boundaries_device", '"cpu" with boundaries "bf16"', 'boundaries "fp8"')
        if len({*self.bf16_layers}) < len(self.bf16_layers):
            _refuse("bf16_layers", json.dumps(self.bf16_layers), "each layer once")
        return self


class CoatConfig(_Block):
    """The whole block. A missing sub-block means its defaults."""

    optimizer: OptimizerConfig = OptimizerConfig()
    activation: ActivationConfig = ActivationConfig()

    @classmethod
    def from_deepspeed(cls, config: str | os.PathLike | Mapping[str, Any]) -> CoatConfig | None:
        """The block of a DeepSpeed configuration (path, dict or base64 of JSON); None where it has
        none.

        Raises:
            CoatConfigError: the configuration cannot be read, or the block or its name is wrong.
        """
        settings = config if isinstance(config, Mapping) else load_json(config)
        if wrong := [key for key, block in settings.items() if misspells_coat(key, block)]:
            raise CoatConfigError(
                *(Problem(key, 'unknown key (did you mean "coat"?)', '"coat"') for key in wrong)
            )
        return cls.parse(settings["coat"]) if "coat" in settings else None

    @classmethod
    def parse(cls, block: Any) -> CoatConfig:
        """Validate the content of a ``"coat"`` block; one that has been validated is returned as it
        is.

        Raises:
            CoatConfigError: lists every wrong key with its value and what is accepted.
        """
        if isinstance(block, CoatConfig):
            return block
        if not isinstance(block, Mapping):
            accepted = f"an object with keys {keys_of(cls)}, or no such key"
            refuse("coat", got(block), accepted)
        try:
            return cls.model_validate(without_comments(block))
        except ValidationError as error:
            raise CoatConfigError(*(explain("coat", cls, e) for e in error.errors())) from None


def without_comments(value: Any) -> Any:
    """A configuration, or a part of one, less the keys that begin with one of :data:`COMMENTS`,
    at every level.
    """
    if not isinstance(value, Mapping):
        return value
    return {
        key: without_comments(v) for key, v in value.items() if not str(key).startswith(COMMENTS)
    }


def letters_of(name: str) -> str:
    """Letters and digits of a key, in lower case: what a misspelling is compared by."""
    return "".join(c for c in name.lower() if c.isalnum())


def misspells_coat(key: Any, block: Any) -> bool:
    """Whether a key is nearly "coat": in other letters ("Coat"), with more of them ("coat_config"),
    two exchanged ("caot") or, of an object that could be the block, with one letter wrong.
    """
    letters = letters_of(str(key))
    if key == "coat" or str(key).startswith(COMMENTS):
        return False
    if letters.startswith("coat") or sorted(letters) == sorted("coat"):
        return True
    near = difflib.SequenceMatcher(None, letters, "coat").ratio() >= 0.75
    if not near or not isinstance(block, Mapping):
        return False
    return not block or not block.keys().isdisjoint(CoatConfig.model_fields)


def load_json(config: str | os.PathLike | Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of a DeepSpeed configuration given as dict, path of a JSON file, or base64 of
    JSON; CoatConfigError for all else.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    accepted = "a dict or the path of a JSON file"
    if not isinstance(config, str | os.PathLike):
        refuse("config", f"got {type(config).__name__}", accepted)
    given = os.fspath(config)
    try:
        loaded = _parse(decode_base64(given) or Path(given).read_text(encoding="utf-8-sig"))
    except OSError as problem:
        why = f"cannot read {given!r} ({problem.strerror})"
    except (UnicodeDecodeError, json.JSONDecodeError) as problem:
        why = f"{given} is not JSON: {problem}"
    else:
        if isinstance(loaded, dict):
            return loaded
        why = f"{given} holds {'nothing' if loaded is None else type(loaded).__name__}"
        accepted = "a JSON object"
    refuse("config", why, accepted)


def _parse(text: str) -> Any:
    """JSON, or what DeepSpeed reads beyond it, HJSON's comments and trailing commas; None where
    the text is empty.
    """
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as problem:
        try:
            import hjson
        except ModuleNotFoundError:  # nor is DeepSpeed installed
            raise problem from None

        with contextlib.suppress(hjson.HjsonDecodeError):
            if isinstance(loaded := hjson.loads(text, object_pairs_hook=_no_duplicates), dict):
                return loaded or None
        raise problem


def decode_base64(given: str) -> str | None:
    """The text of JSON that a string holds in base64, as DeepSpeed's autotuner passes it; None
    where it holds none.
    """
    try:
        text = base64.urlsafe_b64decode(given).decode()
        return None if _parse(text) is None else text
    except CoatConfigError:  # for load_json to refuse
        return text
    except ValueError:
        return None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            refuse("config", f"key {key!r} is given twice", "once")
        seen[key] = value
    return seen
