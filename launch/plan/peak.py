"""One training step as a list of what is allocated and freed, and the moment at which most is held.

Forward adds what each layer saves; backward takes it back, layer by layer, while gradients go
through DeepSpeed's buckets; the step reads gradients. Everything is counted that is larger than a
few MiB. Memory of DeepSpeed's second stream is kept apart: the allocator never gives what one
stream has freed to another, so what it reserves is the sum of both streams' peaks, which need not
be at the same time.
"""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import NamedTuple

from .layer import MLP, moments, saved
from .run import Parameter, Run, parameters
from .zero import BUCKET, states

__all__ = ["Peak", "Step", "peak_of"]

_CHUNK = 2**26  # logits of a chunk (coat_dist/flow/blocks/loss.py)
_WORKSPACE = 2 * 32 * 2**20  # cuBLAS's on Hopper, of two streams; torch allocates it
_PROJ = "self_attention.linear_proj", "self_attn.o_proj"  # Megatron's name, and transformers'
_BUCKETS, _COPIES, _UNBUCKETED = (
    "DeepSpeed's buckets",
    "DeepSpeed's copies of a bucket",
    "gradients outside of the buckets",
)
# ZeRO-1: parameters keep them, filled with zeros after each pass, until the step.
_BESIDE_FP32 = "BF16 gradients beside fp32 sums"


class Peak(NamedTuple):
    """The moment at which most is held."""

    moment: str
    held: dict[str, int]  # bytes by what they are for; the sum is what torch has allocated
    reserved: int  # what torch's allocator needs for it: each stream's own peak

    @property
    def allocated(self) -> int:
        return sum(self.held.values())


class Step:
    """A training step of one rank: what is held at the moment, and the largest sums so far."""

    def __init__(self, run: Run) -> None:
        self.run, self.states, self.parameters = run, states(run), parameters(run)
        # Bytes of the residual stream.
        self.stream = 2 * run.model.hidden_size * run.tokens // run.shared
        self.layers = [self.layer_bytes(i) for i in range(run.model.num_layers)]
        # Layers that run as CUDA graphs: what they save and compute is in memory that nothing else
        # can use.
        graphs = run.flow is not None and run.flow.cuda_graphs
        self.graphed = set(range(len(self.layers))) - run.bf16_layers if graphs else set()
        self.held: Counter[str] = Counter()
        self.most: dict[str, int] = {}
        self.moment, self.main, self.aside = "", 0, 0
        self.waiting: list[Parameter] = []  # whose gradients are in a bucket
        self.buckets = 0
        if run.zero("contiguous_gradients", True) and not run.fp32_gradients_whole:
            self.buckets = 2 * self.states.bucket * (2 if run.overlap and run.stage < 3 else 1)
        # Whether gradients are reduced when backward is over.
        self.late = run.stage == 1 and (run.fp32_gradients or not run.overlap)
        # ZeRO-2's BF16 gradients of a pass are added to the earlier ones when backward is over.
        self.twice = run.stage == 2 and run.accumulation > 1 and not run.fp32_gradients

    def look(self, moment: str, temporary: int = 0, reduction: int = 0) -> None:
        """Note this moment if nothing larger has been seen.

        Args:
            temporary: bytes that are held at it alone.
            reduction: the same, of DeepSpeed's reduction.
        """
        now = self.held + Counter({"temporary": temporary, _COPIES: reduction})
        total, aside = now.total(), 0
        if self.run.overlap and not self.run.fp32_gradients_whole:  # on a stream of their own
            aside = reduction + (self.run.stage == 2) * now["gradients"]
        self.main, self.aside = max(self.main, total - aside), max(self.aside, aside)
        if total > sum(self.most.values()):
            self.most, self.moment = dict(now), moment

    def begin(self) -> None:
        """Building the engine; then what is held between steps, and gradients of earlier
        micro-batches.
        """
        run, found, held = self.run, self.states, self.held
        if run.stage == 3:  # zeros of a first step, then this rank's share of gradients
            beside = (2 if run.remainder else 4) * found.shard
            beside += max(4 * found.sub_group, found.gradients)
        else:  # weights before they are laid out flat, or the copy that becomes master weights
            beside = max(2 * found.elements, 6 * found.shard)
        held["parameters"] = found.weights
        self.look("building the engine", beside)
        held["master weights"], held["moments"] = found.master, found.moments
        per_position = 12 * run.model.seq_length * run.model.head_channels
        held["tables, batch, workspaces"] = _WORKSPACE + 28 * run.tokens + per_position
        if run.stage == 3 or run.fp32_gradients_whole:
            held["gradients"] = found.gradients
        elif run.accumulation > 1:
            held["gradients"] = 2 * found.elements if run.stage == 1 else found.gradients
        if run.fp32_gradients_whole:
            held[_BESIDE_FP32] = 2 * found.elements * (run.accumulation > 1)
        if run.stage == 3:
            held[_BUCKETS] = self.buckets
        held["gathered parameters"] = found.gathered
        if run.flow is not None and run.flow.weights == "cached":
            inner = [p.numel for p in self.parameters if p.matrix and p.layer is not None]
            held["cached FP8 weights"] = sum(inner)

    def layer_bytes(self, layer: int) -> int:
        """Bytes that a layer saves, with its tables."""
        patched, run = layer not in self.run.bf16_layers, self.run
        if run.library is not None:
            return run.micro * run.by_library(run.flow if patched else None).layer
        # Cosines and sines of queries and keys, in BF16, by Megatron's own rotation.
        own_tables = not patched or run.model.qk_norm
        tables = 8 * run.model.seq_length * run.model.head_channels if own_tables else 0
        return round(sum(saved(run, patched)) * run.tokens) + tables

    def final_norm(self) -> int:
        """Bytes of the final norm's input, output and statistics."""
        run = self.run
        if run.library is not None:  # tables of the rotation, too
            return run.micro * run.by_library(run.flow).rest + self.stream
        per_token = 8 if run.model.normalization == "layernorm" else 4
        return 2 * self.stream + per_token * run.tokens // run.shared

    def units(self) -> list[tuple[range, bool]]:
        """Layers that are computed again together, and whether they are."""
        n, options = len(self.layers), self.run.recompute
        size = int(options.get("recompute_num_layers", 0))
        if options.get("recompute_method") == "uniform":
            return [(range(i, min(i + size, n)), True) for i in range(0, n, size)]
        return [(range(i, i + 1), i < size) for i in range(n)]

    def forward(self) -> None:
        if self.graphed:  # and the most that one's backward takes, its input, its output's gradient
            most = max(one.bytes for one in moments(self.run, True))
            saved = sum(self.layers[i] for i in self.graphed)
            self.held["CUDA graphs"] = saved + most + 2 * self.stream
            self.layers = [0 if i in self.graphed else n for i, n in enumerate(self.layers)]
        for unit, again in self.units():
            self.held["activations"] += self.stream if again else sum(self.layers[i] for i in unit)
        self.held["activations"] += self.final_norm()

    def loss(self) -> None:
        """Output layer and loss; afterwards the gradient of the residual stream exists."""
        run = self.run
        columns, dx = run.model.padded_vocab // run.tp, 2 * run.model.hidden_size * run.tokens
        weight, logits = 2 * columns * run.model.hidden_size, columns * run.tokens
        gathered = dx if run.shared > 1 else 0
        if run.chunked:
            held = 2 * dx if logits > _CHUNK else dx  # of several chunks in fp32
            if run.flow is not None and run.flow.loss == "kept":
                held += 2 * logits
            held += max(2 * min(_CHUNK, logits) + gathered, dx)
        else:
            held = 4 * logits + dx + gathered
            if run.library is not None:  # in fp32, with two gradients of that size
                held += 4 * logits + run.micro * run.by_library(run.flow).loss
        self.look("loss", held + weight)
        self.held["gradient of the residual stream"] = self.stream

    def backward(self) -> None:
        """Gradients of all parameters, from the last to the first, and their reduction."""
        run, held, found, tied = self.run, self.held, self.states, self.run.model.tie_embeddings
        embedding, *others = self.parameters
        if tied:  # autograd holds it until the embedding's part is there
            held[_UNBUCKETED] += 2 * embedding.numel
        for p in reversed([p for p in others if p.layer is None]):
            self.take(p)
        held["activations"] -= self.final_norm()
        for unit, again in reversed(self.units()):
            held["activations"] += again * sum(self.layers[i] for i in unit)
            for layer in reversed(unit):
                self.layer_backward(layer)
            held["activations"] -= again * self.stream
        self.look("backward, embedding", 2 * embedding.numel)
        if tied:
            held[_UNBUCKETED] = 0
        self.take(embedding)
        held["gradient of the residual stream"] = 0
        self.flush()
        if run.fp32_gradients_whole:
            # Each group's are one tensor, reduced alone if it is larger than a bucket: then there
            # is its copy in BF16 alone. Smaller ones are put together before.
            matrices = sum(p.numel for p in self.parameters if p.matrix)
            copies = 2 * matrices if matrices > BUCKET else 6 * found.elements
            self.look("gradients are reduced", reduction=copies)
        elif self.late:
            self.look("gradients are reduced", found.gradients)
        if self.late or self.twice:
            held["gradients"] = found.gradients
        if run.stage < 3:
            held[_BUCKETS] = 0

    def layer_backward(self, layer: int) -> None:
        """Backward of one layer, by its largest moments."""
        own = {p.name.split(".", 3)[3]: p for p in self.parameters if p.layer == layer}
        if layer in self.graphed:
            gradients = 2 * sum(p.numel for p in own.values())
            self.look(f"backward, graph of layer {layer}", self.stream + gradients)
        else:
            for one in moments(self.run, layer not in self.run.bf16_layers):
                self.hand_over(own, one.complete)
                self.look(f"backward of layer {layer}, {one.name}", one.bytes)
        self.hand_over(own, MLP + _PROJ)
        self.held["activations"] -= self.layers[layer]
        self.hand_over(own, ("",))

    def hand_over(self, own: dict[str, Parameter], prefixes: tuple[str, ...]) -> None:
        """Take gradients of a layer's parameters, the last first, out of ``own``."""
        for name in [name for name in reversed(own) if name.startswith(prefixes)]:
            self.take(own.pop(name))

    def take(self, p: Parameter) -> None:
        """A parameter's gradient is complete: it goes into a bucket, and what was in there
        before is reduced.
        """
        run, bucket = self.run, self.states.bucket
        self.held[_BUCKETS] = self.buckets  # allocated for the first gradient
        if self.late:
            if run.accumulation == 1:
                self.held[_BESIDE_FP32 if run.fp32_gradients else "gradients"] += 2 * p.numel
            return
        if sum(one.numel for one in self.waiting) + p.numel > bucket:
            self.flush()
        if p.numel > bucket:
            self.held[_UNBUCKETED] += 2 * p.numel
        self.waiting.append(p)

    def flush(self) -> None:
        """Reduce what waits: a copy of it, and the largest one in the dtype of the sum."""
        if not self.waiting:
            return
        run, found = self.run, self.states
        elements = sum(one.numel for one in self.waiting)
        copies = 2 * elements if len(self.waiting) > 1 else 0
        if run.stage == 3:
            copies += run.fp32_gradients * ceil(4 * elements / run.dp)
        elif largest := max(found.last[one.name] for one in self.waiting):
            # The rank's own gradients are allocated when the first of them is reduced.
            self.held["gradients"] = max(self.held["gradients"], (1 + self.twice) * found.gradients)
            copies += 4 * largest * run.fp32_gradients
        self.look("gradients are reduced", reduction=copies)
        self.held[_UNBUCKETED] = 0
        self.waiting = []

    def update(self) -> None:
        """The gradient norm, and gradients that are put together."""
        run, found = self.run, self.states
        if run.fp32_gradients:
            each = 4 if run.stage == 3 else 2 * run.remainder
        else:
            each = 2 if run.remainder else 6
        self.look("the optimizer's step", max(8 * found.largest, each * found.sub_group))


def peak_of(run: Run) -> Peak:
    """The largest moment of a training step, not of the first one, which lacks moments while it
    runs.

    Under ZeRO-2 the last data-parallel rank needs most, and is simulated: it has the last layers'
    gradients, which come first, while the activations of all other layers are still there.
    """
    step = Step(run)
    step.begin()
    step.forward()
    step.loss()
    step.backward()
    step.update()
    return Peak(step.moment, step.most, step.main + step.aside)
