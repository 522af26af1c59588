"""One training step as a list of what is allocated and freed, and the moment at which most is held.

Forward adds what each layer saves; backward takes it back, layer by layer, while gradients go through DeepSpeed's
buckets; the step reads gradients. Everything is counted that is larger than a few MiB. Memory of DeepSpeed's second
stream is kept apart: the allocator never gives what one stream has freed to another, so what it reserves is the sum of
both streams' peaks, which need not be at the same time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil

from .layer import backward_moments, saved
from .run import Parameter, Run, parameters
from .zero import BUCKET, GROUPS, States, local_elements, states

__all__ = ["Peak", "kept_for_backward", "simulate"]

_CHUNK = 2**26
"""Logits of a chunk (``coat_dist/flow/blocks/loss.py``)."""
_WORKSPACE = 2 * 32 * 2**20
"""cuBLAS's on Hopper, of two streams; torch allocates it."""
_BESIDE_FP32 = "BF16 gradients beside fp32 sums"
"""ZeRO-1: parameters keep them, filled with zeros after each pass, until the step."""
_RETURNED = {"gradient of proj": "mlp.", "gradient of qkv": "self_attention.linear_proj"}
"""Of a patched layer, whose gradients are complete when a moment comes: those of functions that have returned."""
_MADE = {"gradient of fc2": "mlp.linear_fc2", "gradient of fc1": "mlp.linear_fc1"}
_MADE["gradient of proj"] = "self_attention.linear_proj"
"""Of a BF16 layer, whose gradient is complete after a moment."""
_SIDE = ("gradients", "DeepSpeed's reduction")
"""Allocated on DeepSpeed's second stream."""


@dataclass(frozen=True)
class Peak:
    """The moment at which most is held."""

    moment: str
    held: dict[str, int]
    """Bytes by what they are for; the sum is what torch has allocated."""
    reserved: int
    """What torch's allocator needs for it: each stream's own peak."""
    other_peaks: dict[str, int]
    """The largest sum of other phases: forward, backward, step, building the engine."""

    @property
    def allocated(self) -> int:
        return sum(self.held.values())


class _Timeline:
    """What is held now, and the largest sums so far."""

    def __init__(self, run: Run) -> None:
        own_stream = run.overlap and not run.fp32_gradients_whole
        self.side = _SIDE if own_stream and run.stage == 2 else _SIDE[1:] if own_stream else ()
        self.held: Counter[str] = Counter()
        self.at: dict[str, int] = {}
        self.moment, self.main, self.aside = "", 0, 0
        self.phases: Counter[str] = Counter()

    def look(self, phase: str, moment: str, **temporary: int) -> None:
        """Note this moment if nothing larger has been seen; ``temporary`` is held at it alone."""
        now = self.held + Counter({key.replace("_", " "): size for key, size in temporary.items() if size > 0})
        if "reduction" in now:
            now["DeepSpeed's reduction"] = now.pop("reduction")
        total = sum(now.values())
        aside = sum(now[key] for key in self.side)
        self.main, self.aside = max(self.main, total - aside), max(self.aside, aside)
        self.phases[phase] = max(self.phases[phase], total)
        if total > sum(self.at.values()):
            self.at, self.moment = {k: v for k, v in now.items() if v}, f"{phase}: {moment}"


class _Buckets:
    """DeepSpeed's buckets during one backward pass."""

    def __init__(self, line: _Timeline, run: Run, found: States, rank: int) -> None:
        self.line, self.run, self.states = line, run, found
        self.waiting: list[Parameter] = []
        self.begun = False
        self.local = local_elements(run, rank)

    def take(self, p: Parameter) -> None:
        """A parameter's gradient is complete: it goes into a bucket, and what was in there before is reduced."""
        line, run, found = self.line, self.run, self.states
        if run.fp32_gradients_whole:
            if not run.keeps_gradients:
                line.held[_BESIDE_FP32] += 2 * p.numel
            return
        if not self.begun:
            self.begun = True
            if run.stage < 3:
                line.held["DeepSpeed's buckets"] += found.bucket_bytes
        if found.full_gradients and not run.overlap:  # ZeRO-1 reduces when backward is over
            if not run.keeps_gradients:
                line.held["gradients"] += 2 * p.numel
            return
        if sum(one.numel for one in self.waiting) + p.numel > found.bucket:
            self.flush()
        if p.numel > found.bucket:
            line.held["gradients outside of the buckets"] += 2 * p.numel
        self.waiting.append(p)

    def flush(self) -> None:
        """Reduce what waits: a copy of it, and the largest one in the dtype of the sum."""
        if not self.waiting:
            return
        line, run, found = self.line, self.run, self.states
        sizes = [one.numel for one in self.waiting]
        together = 2 * sum(sizes) if len(sizes) > 1 else 0
        if run.stage == 3:
            together += ceil(4 * sum(sizes) / run.dp) if found.gradients > 2 * found.shard else 0
        elif largest := max(self.local.get(one.name, 0) for one in self.waiting):
            # The rank's own gradients are allocated when the first of them is reduced.
            if not line.held["gradients"]:
                line.held["gradients"] += found.gradients
            together += 4 * largest if run.fp32_gradients else 0
        line.look("backward", "gradients are reduced", reduction=together)
        line.held["gradients outside of the buckets"] = 0
        self.waiting = []

    def end(self) -> None:
        """Backward is over."""
        self.flush()
        line, found = self.line, self.states
        if self.run.fp32_gradients_whole:
            line.look("backward", "gradients are reduced", reduction=_reduction_of_whole_gradients(self.run))
        elif found.full_gradients and not self.run.overlap:
            line.look("backward", "gradients are reduced", gradients_of_this_rank=found.gradients)
            line.held["gradients"] = found.gradients
        if self.run.stage < 3:
            line.held["DeepSpeed's buckets"] = 0


def _reduction_of_whole_gradients(run: Run) -> int:
    """What is sent of fp32 gradients, bytes. Each group's are one tensor, reduced alone if it is larger than a bucket:
    then there is its copy in the dtype of communication alone. Smaller ones are put together before."""
    sent = 0 if run.settings.get("communication_data_type") == "fp32" else 2
    matrices, vectors = (sum(p.numel for p in parameters(run) if p.matrix is matrix) for matrix in GROUPS)
    if matrices > BUCKET or not vectors:
        return sent * matrices
    return (4 + sent) * (matrices + vectors)


def simulate(run: Run, rank: int | None = None) -> Peak:
    """The largest moment of a training step, not of the first one, which lacks moments while it runs.

    Args:
        rank: data-parallel rank. Under ZeRO-2 they differ: the last one has the last layers' gradients, which come
            first, while the activations of all other layers are still there; rank 0 allocates its own much later.
            None = the last, which needs most.
    """
    line, found, model = _Timeline(run), states(run), run.model
    every = parameters(run)
    tokens, stream = run.tokens, 2 * model.hidden_size * run.tokens // run.shared
    _build(line, run, found)
    held = line.held
    held["parameters"], held["master weights"], held["moments"] = found.weights, found.master, found.moments
    held["tables, batch, workspaces"] = _WORKSPACE + 28 * tokens + 12 * model.seq_length * model.head_channels
    if run.stage == 3:
        held["DeepSpeed's buckets"] = found.bucket_bytes
        held["gradients"] = found.gradients
        held["gathered parameters"] = found.gathered
    elif run.fp32_gradients_whole:
        held["gradients"] = found.gradients
        held[_BESIDE_FP32] = found.full_gradients if run.keeps_gradients else 0
    elif run.keeps_gradients:
        held["gradients"] = found.full_gradients or found.gradients
    if run.flow is not None and run.flow.weights == "cached":
        held["cached FP8 weights"] = sum(p.numel for p in every if p.matrix and p.layer is not None)
    kept = _forward(line, run, stream)
    _loss(line, run, stream)
    buckets = _Buckets(line, run, found, run.dp - 1 if rank is None else rank)
    _backward(buckets, every, kept, stream)
    _step(line, run, found)
    return Peak(line.moment, dict(line.at), line.main + line.aside, dict(line.phases))


def _build(line: _Timeline, run: Run, found: States) -> None:
    """The engine is built: weights before and after they are laid out, the copy that becomes the master weights."""
    dense, shard = 2 * found.elements, found.shard
    if run.stage == 3:
        # Built in shards, whole one parameter at a time.
        largest = max(p.numel for p in parameters(run))
        line.look("building the engine", "the model", parameters=2 * shard + 2 * largest)
        line.look(
            "building the engine",
            "fp32 copies of the shards",
            parameters=found.weights,
            master_weights=4 * shard,
            gradients=max(4 * found.sub_group, found.gradients),  # zeros of a first step, then this rank's share
        )
        return
    line.look("building the engine", "weights are laid out flat", parameters=dense + found.weights)
    line.look("building the engine", "master weights", parameters=found.weights, master_weights=6 * shard)
    master = 4 * shard if not run.remainder else 2 * shard
    line.look(
        "building the engine", "states are tried", parameters=found.weights, master_weights=master, gradients=master
    )


def _units(run: Run) -> list[list[int]]:
    """Layers that are computed again together; a layer that is not is a unit without layers."""
    n, options = run.model.num_layers, run.recompute
    if options.get("recompute_granularity") != "full":
        return []
    size = int(options["recompute_num_layers"])
    if options["recompute_method"] == "block":
        return [[i] for i in range(size)]
    return [list(range(i, min(i + size, n))) for i in range(0, n, size)]


def _graphed(run: Run) -> set[int]:
    """Layers that run as CUDA graphs: what they save and compute lies in memory that nothing else can use."""
    on = run.flow is not None and run.flow.cuda_graphs
    return set(range(run.model.num_layers)) - run.bf16_layers if on else set()


def _in_graphs(run: Run, stream: int) -> int:
    """What a graph needs besides what layers save: the most that one's backward takes, with all its gradients, its
    input and the gradient of its output."""
    return max(one.gradients + one.made - one.released for one in backward_moments(run, True)) + 2 * stream


def _layer_bytes(run: Run, layer: int) -> int:
    """What a layer saves, with its tables: bytes."""
    patched = layer not in run.bf16_layers
    # Cosines and sines of queries and keys, in BF16, by Megatron's own rotation.
    tables = 0 if patched and not run.model.qk_norm else 8 * run.model.seq_length * run.model.head_channels
    return round(sum(saved(run, patched)) * run.tokens) + tables


def _forward(line: _Timeline, run: Run, stream: int) -> list[int]:
    """Saved bytes by layer, 0 for those that are computed again."""
    units = _units(run)
    again = {i for unit in units for i in unit}
    kept = [0 if i in again else _layer_bytes(run, i) for i in range(run.model.num_layers)]
    if graphed := _graphed(run):
        line.held["CUDA graphs"] = sum(kept[i] for i in graphed) + _in_graphs(run, stream)
        kept = [0 if i in graphed else size for i, size in enumerate(kept)]
    line.held["activations"] += sum(kept) + len(units) * stream
    last = run.model.num_layers - 1
    moments = backward_moments(run, last not in run.bf16_layers)
    widest = max(one.made for one in moments) if again else 0
    line.look("forward", "the last layer", temporary=2 * stream + widest // 2)
    # The final norm's input and output, and statistics.
    line.held["activations"] += 2 * stream + _statistics(run)
    return kept


def _statistics(run: Run) -> int:
    """Of the final norm."""
    return (8 if run.model.normalization == "layernorm" else 4) * run.tokens // run.shared


def kept_for_backward(run: Run) -> int:
    """Bytes that one forward pass keeps for backward, the loss's included, without parameters."""
    line, stream = _Timeline(run), 2 * run.model.hidden_size * run.tokens // run.shared
    _forward(line, run, stream)
    graphs = line.held["CUDA graphs"] - _in_graphs(run, stream) if _graphed(run) else 0
    logits = 0 if run.chunked else 2 * (run.model.padded_vocab // run.tp) * run.tokens
    again = {i for unit in _units(run) for i in unit}
    shared = set(range(run.model.num_layers)) - again - run.bf16_layers and not run.model.qk_norm
    # Frequencies, which a layer that is computed again keeps, and their cosines and sines, which patched layers share.
    per_position = (4 if again else 0) + (8 if shared else 0)
    tables = per_position * run.model.seq_length * run.model.head_channels
    return line.held["activations"] + graphs + logits + tables + 28 * run.tokens


def _loss(line: _Timeline, run: Run, stream: int) -> None:
    """Output layer and loss; afterwards the gradient of the residual stream exists."""
    h, columns, tokens = run.model.hidden_size, run.model.padded_vocab // run.tp, run.tokens
    weight = 2 * columns * h
    gathered = 2 * h * tokens if run.shared > 1 else 0
    if run.chunked:
        chunk = 2 * min(_CHUNK, tokens * columns)
        several = tokens * columns > _CHUNK
        dx = 4 * h * tokens if several else 2 * h * tokens
        line.look("loss", "logits of a part of the vocabulary", logits=chunk + dx + weight + gathered)
        line.look("loss", "gradient of the last layer's output", logits=dx + weight + 2 * h * tokens)
    else:
        logits = 2 * columns * tokens
        line.look("loss", "logits and their gradient", logits=2 * logits)
        line.look("loss", "gradient of the output layer", logits=2 * logits + 2 * h * tokens + weight + gathered)
    line.held["temporary"] = stream


def _backward(buckets: _Buckets, every: list[Parameter], kept: list[int], stream: int) -> None:
    line, run = buckets.line, buckets.run
    tied = run.model.tie_embeddings
    embedding = every[0]
    if tied:  # autograd holds it until the embedding's part is there
        line.held["gradients outside of the buckets"] += 2 * embedding.numel
    elif every[-1].name.startswith("output_layer"):
        buckets.take(every[-1])
    for p in every:
        if p.name.startswith("decoder.final"):
            buckets.take(p)
    line.held["activations"] -= 2 * stream + _statistics(run)
    units, graphed = _units(run), _graphed(run)
    first = {unit[0]: unit for unit in units}
    last = {unit[-1]: unit for unit in units}
    for layer in reversed(range(run.model.num_layers)):
        patched = layer not in run.bf16_layers
        if layer in last:  # forward again
            for i in last[layer]:
                kept[i] = _layer_bytes(run, i)
                line.held["activations"] += kept[i]
            line.look("backward", f"layer {layer} is computed again", computing=stream)
        own = {p.name.split(".", 3)[3]: p for p in every if p.layer == layer}
        done: set[str] = set()
        if layer in graphed:
            line.look("backward", f"layer {layer}'s graph", computing=stream + 2 * sum(p.numel for p in own.values()))
        for one in () if layer in graphed else backward_moments(run, patched):
            # Gradients of functions that have returned are in the buckets.
            if patched and one.name in _RETURNED:
                _hand_over(buckets, own, done, _RETURNED[one.name])
            released = min(one.released, kept[layer])
            line.held["activations"] -= released
            line.look("backward", f"layer {layer}, {one.name}", computing=one.own + one.made)
            line.held["activations"] += released
            if not patched and one.name in _MADE:
                _hand_over(buckets, own, done, _MADE[one.name])
        line.held["activations"] -= kept[layer]
        _hand_over(buckets, own, done, "")
        if layer in first:
            line.held["activations"] -= stream
    line.look("backward", "embedding", computing=2 * embedding.numel)
    if tied:
        line.held["gradients outside of the buckets"] = 0
    buckets.take(embedding)
    line.held["temporary"] = 0
    buckets.end()


def _hand_over(buckets: _Buckets, own: dict[str, Parameter], done: set[str], prefix: str) -> None:
    for name, p in reversed(own.items()):
        if name not in done and name.startswith(prefix):
            done.add(name)
            buckets.take(p)


def _step(line: _Timeline, run: Run, found: States) -> None:
    line.look("step", "gradient norm", computing=8 * found.largest)
    shard = found.shard
    if run.stage == 3:
        flat = found.gradients // max(shard, 1) * found.sub_group
        fp32 = 4 * found.sub_group if flat < 4 * found.sub_group and not run.remainder else 0
        line.look("step", "gradients are put together", computing=flat + fp32)
    elif run.fp32_gradients_whole:
        line.look("step", "update")
    elif not run.fp32_gradients or run.remainder:
        line.look("step", "gradients are put together", computing=2 * shard + (0 if run.remainder else 4 * shard))
