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

from .layer import grouped, moments, saved
from .run import Parameter, Run, parameters
from .zero import BUCKET, states

_CHUNK = 2**26  # logits of a chunk (coat_dist/flow/blocks/loss.py)
_WORKSPACE = 2 * 32 * 2**20  # cuBLAS's on Hopper, of two streams; torch allocates it
_FIRST = "mlp.", "self_attention.linear_proj", "self_attn.o_proj"
"""Parameters whose gradients are complete before a layer's activations are released: Megatron's
names, and transformers'.
"""
_BUCKETS, _COPIES = "DeepSpeed's buckets", "DeepSpeed's copies of a bucket"
_UNBUCKETED, _STREAM = "gradients outside of the buckets", "gradient of the residual stream"
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


def _stream(run: Run) -> int:
    """Bytes of the residual stream."""
    return 2 * run.model.hidden_size * run.tokens // run.shared


def _boundary(run: Run) -> int:
    """Bytes from which a layer is recomputed: its input, or codes of it, or none on the GPU."""
    if run.flow is None or run.flow.boundaries == "bf16":
        return _stream(run)
    if run.flow.boundaries_device == "cpu":
        return 0
    return grouped(run.model.hidden_size * run.tokens // run.shared, run.flow)


def _layer(run: Run, layer: int) -> int:
    """Bytes that a layer saves, with its tables."""
    if run.library is not None:
        return run.micro * run.by_library.layers[layer]
    patched = layer not in run.bf16_layers
    # Cosines and sines of queries and keys, in BF16, by Megatron's own rotation.
    own_tables = not patched or run.model.qk_norm
    tables = 8 * run.model.seq_length * run.model.head_channels if own_tables else 0
    return round(sum(saved(run, patched)) * run.tokens) + tables


def _units(run: Run) -> list[tuple[range, bool]]:
    """Layers that are computed again together, and whether they are."""
    n, size = run.model.num_layers, int(run.recompute.get("recompute_num_layers", 0))
    if run.recompute.get("recompute_method") == "uniform":
        return [(range(i, min(i + size, n)), True) for i in range(0, n, size)]
    return [(range(i, i + 1), i < size) for i in range(n)]


def _final_norm(run: Run) -> int:
    """Bytes of the final norm's input, output and statistics."""
    if run.library is not None:  # tables of the rotation, too
        return run.micro * run.by_library.rest + _stream(run)
    statistics = 8 if run.model.normalization == "layernorm" else 4
    return 2 * _stream(run) + statistics * run.tokens // run.shared


def activations(run: Run) -> int:
    """Bytes that are kept for backward, without the loss's."""
    kept = _final_norm(run)
    for unit, again in _units(run):
        if again:
            kept += _boundary(run)
        else:
            kept += sum(_layer(run, i) for i in unit)
    return kept


def _loss(run: Run) -> int:
    """Bytes of the output layer and the loss."""
    columns, dx = run.model.padded_vocab // run.tp, 2 * run.model.hidden_size * run.tokens
    weight, logits = 2 * columns * run.model.hidden_size, columns * run.tokens
    gathered = dx if run.shared > 1 else 0
    if not run.chunked:
        held = weight + 4 * logits + dx + gathered
        if run.library is not None:  # in fp32, with two gradients of that size
            held += 4 * logits + run.micro * run.by_library.loss
        return held
    held = weight + (2 if logits > _CHUNK else 1) * dx  # of several chunks in fp32
    if run.flow is not None and run.flow.loss == "kept":
        held += 2 * logits
    return held + max(2 * min(_CHUNK, logits) + gathered, dx)


class Step:
    """A training step of one rank: what is held at the moment, and the largest sums so far."""

    def __init__(self, run: Run) -> None:
        self.run, self.states = run, states(run)
        self.held: Counter[str] = Counter()
        self.most: dict[str, int] = {}
        self.moment, self.main, self.aside = "", 0, 0
        self.waiting: list[Parameter] = []  # whose gradients are in a bucket
        self.buckets = 2 * self.states.bucket * (2 if run.overlap and run.stage < 3 else 1)
        self.buckets *= not run.fp32_gradients_whole
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

    def take(self, found: list[Parameter]) -> None:
        """Gradients are complete, the last first: they go into a bucket, and what was in there
        before is reduced.
        """
        run, held, bucket = self.run, self.held, self.states.bucket
        for p in reversed(found):
            held[_BUCKETS] = self.buckets  # allocated for the first gradient
            if self.late:
                if run.accumulation == 1:
                    held[_BESIDE_FP32 if run.fp32_gradients else "gradients"] += 2 * p.numel
                continue
            if sum(one.numel for one in self.waiting) + p.numel > bucket:
                self.flush()
            if p.numel > bucket:
                held[_UNBUCKETED] += 2 * p.numel
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


def peak_of(run: Run) -> Peak:
    """The largest moment of a training step, not of the first one, which lacks moments while it
    runs.

    Under ZeRO-2 the last data-parallel rank needs most, and is simulated: it has the last layers'
    gradients, which come first, while the activations of all other layers are still there.
    """
    step, found, model = Step(run), states(run), run.model
    held, look, take = step.held, step.look, step.take
    embedding, *others = parameters(run)

    # Building the engine: zeros of a first step, then this rank's share of gradients; or weights
    # before they are laid out flat, or the copy that becomes master weights.
    held["parameters"] = found.weights + run.frozen
    beside = max(2 * found.elements, 6 * found.shard)
    if run.stage == 3:
        beside = max(4 * found.sub_group, found.gradients) + (4 - 2 * run.remainder) * found.shard
    look("building the engine", beside)

    # Between steps, with gradients of earlier micro-batches.
    held["master weights"], held["moments"] = found.master, found.moments
    per_position = 12 * model.seq_length * model.head_channels
    held["tables, batch, workspaces"] = _WORKSPACE + 28 * run.tokens + per_position
    several = run.accumulation > 1
    if run.fp32_gradients_whole:
        held[_BESIDE_FP32] = 2 * found.elements * several
    if run.stage == 3 or run.fp32_gradients_whole:
        held["gradients"] = found.gradients
    elif several:
        held["gradients"] = 2 * found.elements if run.stage == 1 else found.gradients
    if run.stage == 3:
        held[_BUCKETS], held["gathered parameters"] = step.buckets, found.gathered

    # Forward, the loss, and the gradient of the residual stream that it leaves.
    graphs = run.flow is not None and run.flow.cuda_graphs
    stream, layers = _stream(run), [_layer(run, i) for i in range(model.num_layers)]
    held["activations"] = activations(run)
    if graphs:  # their memory is nothing else's: what one's backward takes, its input and gradient
        held["CUDA graphs"] = max(one.bytes for one in moments(run, True, [])) + 2 * stream
    look("loss", _loss(run))
    held[_STREAM] = stream

    # Backward: gradients of all parameters, from the last to the first, and their reduction.
    tied = 2 * embedding.numel * model.tie_embeddings
    held[_UNBUCKETED] += tied  # autograd holds it until the embedding's part is there
    take([p for p in others if p.layer is None])
    held["activations"] -= _final_norm(run)
    for unit, again in reversed(_units(run)):
        held["activations"] += again * sum(layers[i] for i in unit)
        for layer in reversed(unit):
            patched, own = layer not in run.bf16_layers, [p for p in others if p.layer == layer]
            rest = [p for p in own if not p.within(_FIRST)]
            if patched and graphs:
                look(f"graph of layer {layer}", stream + 2 * sum(p.numel for p in own))
                take(own)
                continue
            done: tuple[str, ...] = ()
            for name, complete, size in moments(run, patched, own):
                take([p for p in own if p.within(complete)])
                look(f"backward of layer {layer}, {name}", size)
                done += complete
            take([p for p in own if p.within(_FIRST) and not p.within(done)])
            held["activations"] -= layers[layer]
            take(rest)
        held["activations"] -= again * _boundary(run)
    look("backward of the embedding", 2 * embedding.numel)
    held[_UNBUCKETED] -= min(tied, held[_UNBUCKETED])
    take([embedding])
    held[_STREAM] = 0
    step.flush()
    if run.fp32_gradients_whole:
        # Each group's are one tensor, reduced alone if it is larger than a bucket: then there is
        # its copy in BF16 alone. Smaller ones are put together before.
        matrices = sum(p.numel for p in (embedding, *others) if p.matrix)
        copies = 2 * matrices if matrices > BUCKET else 6 * found.elements
        look("gradients are reduced", reduction=copies)
    elif step.late:
        look("gradients are reduced", found.gradients)
    if step.late or step.twice:
        held["gradients"] = found.gradients
    if run.stage < 3:
        held[_BUCKETS] = 0

    # The gradient norm, and gradients that are put together.
    each = 2 if run.remainder else 6
    if run.fp32_gradients:
        each = 4 if run.stage == 3 else 2 * run.remainder
    look("the optimizer's step", max(8 * found.largest, each * found.sub_group))
    return Peak(step.moment, step.most, step.main + step.aside)
