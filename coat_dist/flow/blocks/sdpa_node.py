"""Attention, of one document or of several, and its own node of the autograd graph without the
tensors that it saved.

Here tensors are as SDPA takes them: ``[b, heads, s, d]``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from .documents import Documents, flash_documents, why_no_flash


def attend(
    values: Sequence[torch.Tensor], documents: Documents | None, options: dict[str, Any]
) -> torch.Tensor:
    """Attention of q, k, v ``[b, heads, s, d]``."""
    if documents is None:
        return plain_sdpa(*values, **options)
    if why_no_flash(*values) is None:
        q, k, v = (_tokens_first(t) for t in values)
        return _heads_first(flash_documents(q, k, v, documents, **options))
    return _join(
        [plain_sdpa(*(t[:, :, part] for t in values), **options) for part in _parts(documents)]
    )


def node_of(
    values: Sequence[torch.Tensor], documents: Documents | None, options: dict[str, Any]
) -> Node | DocumentNodes:
    """What computes :func:`attend` of such values, and its backward."""
    if documents is None:
        return Node(functools.partial(plain_sdpa, **options))
    return (DocumentNodes if why_no_flash(*values) else _FlashNode)(documents, options)


class Node:
    """SDPA's own node of the autograd graph, without the tensors that it saved.

    PyTorch decides which kernel runs, what it keeps and how its backward is called. Of what it
    saves, queries, keys, values and output are dropped here, and given back while backward runs.
    The rest, ``extras`` (logarithms of sums, random state), the caller saves.
    """

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        """``attend``: of q, k, v; its output has the shape of q."""
        self._attend, self._saved = attend, _Saved()

    def forward(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output and the extras, of which nothing stays here."""
        with torch.enable_grad():
            anchor = torch.zeros((), requires_grad=True)
            inputs = [_GradientEdge.apply(v, anchor) for v in values]
            with saved_tensors_hooks(self._saved.pack, self._saved.unpack):
                out = self._attend(*inputs)
        self._input_edges = [get_gradient_edge(i) for i in inputs]
        self._output_edge = get_gradient_edge(out)
        out = out.detach()
        return out, self._saved.release([*values, out])

    def backward(
        self, dout: torch.Tensor, values: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Gradients of q, k, v. ``values``: q, k, v and the output, shaped as in forward."""
        with self._saved.given_back(values, extras):
            return torch.autograd.grad(
                [self._output_edge], self._input_edges, [dout], retain_graph=True
            )


class _Saved:
    """Stands in SDPA's node for the tensors that it saved. Not part of :class:`Node`, whose
    references to the graph, which refers to this, would close a cycle that Python cannot collect.
    """

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._places: list[tuple[int, tuple[int, ...] | None]] = []

    def pack(self, t: torch.Tensor) -> int:
        self._tensors.append(t)
        return len(self._tensors) - 1

    def release(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Forget all tensors; those that are none of ``values`` are returned."""
        extras: list[torch.Tensor] = []
        for t in self._tensors:
            same = (
                t.shape == v.shape and t.dtype == v.dtype and t.data_ptr() == v.data_ptr()
                for v in values
            )
            found = next((i for i, is_it in enumerate(same) if is_it), None)
            if found is None:
                self._places.append((len(values) + len(extras), None))
                extras.append(t)
            else:
                self._places.append((found, t.stride()))
        self._tensors = []
        return extras

    @contextmanager
    def given_back(
        self, values: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        self._tensors = [*values, *extras]
        try:
            yield
        finally:
            self._tensors = []

    def unpack(self, index: int) -> torch.Tensor:
        i, stride = self._places[index]
        t = self._tensors[i]
        if stride is None or t.stride() == stride:
            return t
        # As the kernel had it in forward: the output need not be laid out like the queries.
        return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)


class _GradientEdge(torch.autograd.Function):
    """Identity: the edge at which gradients are read. A leaf would do, were it not kept alive by
    the graph.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        raise AssertionError("gradients are read before this node")


class _FlashNode(Node):
    """The node of :func:`flash_documents`, in :func:`plain_sdpa`'s layout."""

    def __init__(self, documents: Documents, options: dict[str, Any]) -> None:
        super().__init__(functools.partial(flash_documents, documents=documents, **options))

    def forward(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        out, extras = super().forward([_tokens_first(t) for t in values])
        return _heads_first(out), extras

    def backward(self, dout, values, extras):  # type: ignore[no-untyped-def]
        grads = super().backward(_tokens_first(dout), [_tokens_first(t) for t in values], extras)
        return [_heads_first(g) for g in grads]


class DocumentNodes:
    """A :class:`Node` for each document, with the methods of one, in :func:`plain_sdpa`'s
    layout.
    """

    def __init__(self, documents: Documents, options: dict[str, Any]) -> None:
        attend = functools.partial(plain_sdpa, **options)
        self._parts = [(Node(attend), part) for part in _parts(documents)]
        self._counts: list[int] = []

    def forward(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        outs, extras = [], []
        for node, part in self._parts:
            out, own = node.forward([t[:, :, part] for t in values])
            outs.append(out)
            extras += own
            self._counts.append(len(own))
        return _join(outs), extras

    def backward(
        self, dout: torch.Tensor, values: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        grads, given = [], iter(extras)
        for (node, part), count in zip(self._parts, self._counts, strict=True):
            own = list(itertools.islice(given, count))
            grads.append(node.backward(dout[:, :, part], [t[:, :, part] for t in values], own))
        return [_join(g) for g in zip(*grads, strict=True)]


def _parts(documents: Documents) -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise(documents.bounds) if a < b]


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts ``[1, heads, some of s, d]`` as one, laid out as ``[s, heads, d]``."""
    return torch.cat([t.permute(2, 0, 1, 3) for t in parts]).permute(1, 2, 0, 3)


def _tokens_first(t: torch.Tensor) -> torch.Tensor:
    return t.squeeze(0).transpose(0, 1)


def _heads_first(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1).unsqueeze(0)


# Causal, 4096 tokens, H200: cuDNN 535 TFLOP/s forward and 466 backward, PyTorch's flash backend 299
# and 257.
_HOPPER_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def plain_sdpa(q, k, v, *, causal: bool, scale: float | None, dropout: float = 0.0) -> torch.Tensor:
    # cuDNN's answer to no sequences at all is None (torch 2.11); the plain products take any
    # number.
    with _preferred_backend(q.device) if q.numel() else sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


_HOPPER_NUMBERS = [int(backend) for backend in _HOPPER_ORDER]  # type: ignore[call-overload]
_get_order: Any = torch._C._get_sdp_priority_order
_set_order: Any = torch._C._set_sdp_priority_order


@contextmanager
def _preferred_backend(device: torch.device) -> Iterator[None]:
    if device.type != "cuda" or not _is_hopper(device):
        yield
    elif torch.compiler.is_compiling():
        with sdpa_kernel(_HOPPER_ORDER, set_priority=True):
            yield
    else:
        # The order alone, by what sdpa_kernel calls: it also switches each backend on and off
        # again, one by one, which is as much host time as several launches. Backends that the user
        # has switched off stay off. As there, the order is the process's: attention from several
        # threads at a time may leave it changed.
        before = _get_order()
        _set_order([*_HOPPER_NUMBERS, *(b for b in before if b not in _HOPPER_NUMBERS)])
        try:
            yield
        finally:
            _set_order(before)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
