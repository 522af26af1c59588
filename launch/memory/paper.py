"""A transformers model on fake tensors: its parameters, and what it saves for backward, found by
its own code without its memory.

The whole model runs once, and each layer counts what was saved while it ran. So the bytes hold for
every family, tier and version of transformers, patched or not, and for layers that differ.
Attention counts as a kernel that saves queries, keys, values, output and a number a row, unless
transformers chooses its eager one for the family. Experts of the flow count with the rows that a
GPU lays out for any choice of a router.
"""

from __future__ import annotations

import copy
import functools
import warnings
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from coat_dist import CoatConfigError
from coat_dist.config import ActivationConfig
from coat_dist.flow.blocks import grouped
from coat_dist.flow.core.frozen import FrozenWeight
from coat_dist.flow.saved import saved_for_backward
from coat_dist.hf.patch import layer_lists, patch_model
from coat_dist.reference.grouped import BLOCK, ExpertRows, most_rows

_ATTENTION = "coat_on_paper"
_RECOMPUTED = {"boundaries": "bf16", "boundaries_device": "layer", "recompute": None}
"""Values with which no layer recomputes: what recomputed layers keep is counted elsewhere."""
_MASKS = "transformers.masking_utils"
_CHOSEN = "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"


class Saved(NamedTuple):
    """Bytes of one sequence."""

    layers: tuple[int, ...]
    """Bytes of each layer, in the order of the model."""
    rest: int
    """Bytes of what is around the layers, without output layer and loss."""
    loss: int
    """Bytes of output layer and loss, where the loss is not chunked."""
    chunked: bool
    """Whether the loss is computed without all logits."""
    frozen: int
    """Bytes of weights that do not train, whatever the number of sequences."""


class OnPaper:
    """A model of transformers that reads tokens, trained in BF16 on texts.

    Args:
        path: a Hugging Face folder, or its ``config.json``; weights are not needed. Its
            ``architectures`` name the class; without them it is a causal language model.
        lora: rank of PEFT's adapters on all linears of the layers; None trains all weights.

    Raises:
        OSError, ValueError: of transformers, where it does not know such a model.
    """

    def __init__(self, path: str | PathLike, lora: int | None = None) -> None:
        from transformers import AutoConfig

        self.lora = lora

        self.config: Any = AutoConfig.from_pretrained(Path(path).resolve(strict=True))
        with torch.device("meta"):
            model = self._build()
        if model.main_input_name != "input_ids":
            raise ValueError(f"{type(model).__name__} reads {model.main_input_name}")
        names = [name for stack in layer_lists(model).values() for name, _ in stack]
        self.layers = len(names)
        """Layers of all lists together."""
        self.text: Any = copy.copy(self.config.get_text_config())
        """Of the model of texts; a size that differs between layers is the usual one."""
        self.text.allow_global_per_layer_attribute_access = True
        found = (getattr(self.text, key, None) for key in _CHOSEN)
        self.chosen: int = next(filter(None, found), 1)
        """Experts of a token."""
        self.shapes = {}
        """Shapes of parameters that train by name, the embedding of tokens first; a tied one counts
        once, a frozen one has no rows. Layers are ``model.layers.0`` and on, whatever the model
        calls them.
        """
        self.all_shapes = {}
        """The same of all parameters."""
        embedding = model.get_input_embeddings().weight
        first = sorted(model.named_parameters(), key=lambda named: named[1] is not embedding)
        for name, p in first:
            for i, layer in enumerate(names):
                if name.startswith(f"{layer}."):
                    name = f"model.layers.{i}{name.removeprefix(layer)}"
                    break
            self.all_shapes[name] = tuple(p.shape)
            if p.requires_grad:
                self.shapes[name] = tuple(p.shape)
            elif p is embedding:
                self.shapes[name] = (0, *p.shape[1:])
        self.tied = model.get_output_embeddings() is None or (
            model.get_output_embeddings().weight is embedding
        )
        """Whether there is no weight of an output layer beside the embedding."""

    def _build(self, **given: Any) -> Any:
        import transformers

        named = getattr(transformers, (self.config.architectures or [""])[0], None)
        if named is None:
            model = transformers.AutoModelForCausalLM.from_config(self.config, **given)
        else:
            model = named._from_config(self.config, **given)
        if self.lora:
            from peft import LoraConfig, get_peft_model

            # Fake parameters cannot be moved; all are on one device.
            with mock.patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):
                get_peft_model(model, LoraConfig(r=self.lora, target_modules="all-linear"))
        return model

    @functools.cache  # noqa: B019  a program has one or two models
    def saved(self, settings: ActivationConfig | None, tokens: int) -> Saved:
        """What one sequence of ``tokens`` saves, with the flow or, where ``settings`` are None, as
        the model is.

        Raises:
            CoatConfigError: nothing of the model can be patched, or its code does not run without
                values.
        """
        try:
            with (
                FakeTensorMode(),
                warnings.catch_warnings(),
                mock.patch.object(grouped, "route", _route),
                # Without values every sequence looks like several.
                mock.patch(f"{_MASKS}.find_packed_sequence_indices", return_value=None),
                _no_init_weights(),
            ):
                warnings.simplefilter("ignore")  # FP8 attention compares addresses
                return self._run(settings, tokens)
        except CoatConfigError:
            raise
        except Exception as problem:  # whatever the code of a model raises
            why = f"{type(problem).__name__}: {problem}".partition("\n")[0]
            raise CoatConfigError(
                f"--model: got a {self.config.model_type}, accepted: a model whose forward runs on "
                f"tokens alone, without their values ({why})"
            ) from problem

    def _run(self, settings: ActivationConfig | None, tokens: int) -> Saved:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(_ATTENTION, _attention)
        AttentionMaskInterface.register(_ATTENTION, _mask)
        model = self._build(dtype=torch.bfloat16).train()
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", "eager") != "eager":
                config._attn_implementation = _ATTENTION
            if hasattr(config, "use_cache"):
                config.use_cache = False
        chunked = False
        if settings is not None:
            report = patch_model(model, settings.model_copy(update=_RECOMPUTED))
            chunked = any(not how.startswith("plain") for how in report.loss.values())
        layers = [layer for stack in layer_lists(model).values() for _, layer in stack]
        with saved_for_backward(model) as found:
            counts = [0] * len(layers)
            for i, layer in enumerate(layers):
                _count(layer, i, counts, found)
            body = [0]
            _count(model.base_model, 0, body, found)
            given = {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}
            if chunked:
                model.base_model(**given)
            else:
                one = type(model).__name__.endswith("ForSequenceClassification")
                model(**given, labels=given["input_ids"][:, 0] if one else given["input_ids"])
        # Some models call the parts of their base model, and not that.
        rest = (body[0] or sum(found.values())) - sum(counts)
        frozen = 0
        for p in model.parameters():
            if not p.requires_grad:
                frozen += (p.packed if isinstance(p, FrozenWeight) else p).nbytes
        loss = sum(found.values()) - rest - sum(counts)
        return Saved(tuple(counts), rest, loss, chunked, frozen)


def _no_init_weights() -> Any:
    """A context in which models are built without initial values, some of which depend on
    values.
    """
    from transformers import modeling_utils

    with suppress(ImportError):  # transformers 4 has it in modeling_utils
        from transformers import initialization

        return initialization.no_init_weights()
    return modeling_utils.no_init_weights()  # type: ignore[attr-defined]


def _count(module: torch.nn.Module, i: int, counts: list[int], found: dict[int, int]) -> None:
    """Add to ``counts[i]`` the bytes that come to ``found`` in each forward of a module."""

    def before(*_: Any) -> None:
        counts[i] -= sum(found.values())

    def after(*_: Any) -> None:
        counts[i] += sum(found.values())

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _attention(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    return _Attention.apply(q, k, v, mask), None


_attention.__module__ = "transformers"  # whose attention FP8 may take the place of


def _mask(
    *,
    kv_length: int,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **given: Any,
) -> torch.Tensor | None:
    """None where attention knows by itself which tokens see which."""
    from transformers.masking_utils import sdpa_mask

    if allow_is_causal_skip and (local_size is None or kv_length < local_size):
        return None
    return sdpa_mask(kv_length=kv_length, allow_is_causal_skip=False, **given)


class _Attention(torch.autograd.Function):
    """Saves what attention of ``[b, heads, s, d]`` saves, a learnt bias included."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        b, heads, s, _ = q.shape
        out = q.new_empty(b, s, heads, v.shape[-1])
        bias = mask if ctx.needs_input_grad[3] else None
        ctx.save_for_backward(q, k, v, out, q.new_empty(b, heads, s, dtype=torch.float32), bias)
        return out


def _route(index: torch.Tensor, experts: int) -> ExpertRows:
    """As many rows as any choices could need, as :func:`coat_dist.kernels.routing.route`."""
    choices = index.numel()
    total = most_rows(choices, experts)
    blocks = total // BLOCK
    sizes = total, choices, blocks, experts
    source, place, of_blocks, ends = index.new_empty(sum(sizes), dtype=torch.int32).split(sizes)
    known = (BLOCK * (blocks * (i + 1) // experts) for i in range(experts))
    return ExpertRows(source, place, of_blocks, ends, tuple(known))
