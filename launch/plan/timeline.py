"""One training step as a list of what is allocated and freed, and the moment at which most is held.

Forward adds what each layer saves; backward takes it back, layer by layer, while gradients go
through DeepSpeed's buckets; the step reads gradients. Everything is counted that is larger than a
few MiB. Memory of DeepSpeed's second stream is kept apart: the allocator never gives what one
stream has freed to another, so what it reserves is the sum of both streams' peaks, which need not
be at the same time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil

from .layer import backward_moments, saved
from .run import Parameter, Run, parameters
from .zero import BUCKET, GROUPS, local_elements, states

__all__ = ["Peak", "Step", "simulate"]

_CHUNK = 2**26  # logits of a chunk (coat_dist/flow/blocks/loss.py)
_WORKSPACE = 2 * 32 * 2**20  # cuBLAS's on Hopper, of two streams; torch allocates it
# ZeRO-1: parameters keep them, filled with zeros after each pass, until the step.
_BESIDE_FP32 = "BF16 gradients beside fp32 sums"
_PROJ = "self_attention.linear_proj", "self_attn.o_proj"  # Megatron's name, and transformers'
_RETURNED = {"gradient of proj": ("mlp.",), "gradient of qkv": _PROJ}
"""Of a patched layer, whose gradients are complete when a moment comes: those of functions that
have returned.
"""
_MADE = {
    "gradient of fc2": ("mlp.linear_fc2", "mlp.down"),
    "gradient of fc1": ("mlp.",),
    "gradient of proj": _PROJ,
}
"""Of a BF16 layer, whose gradient is complete after a moment."""
_SIDE = ("gradients", "DeepSpeed's reduction")  # allocated on DeepSpeed's second stream


@dataclass(frozen=True)
class Peak:
    """The moment at which most is held."""

    moment: str
    held: dict[str, int]  # bytes by what they are for; the sum is what torch has allocated
    reserved: int  # what torch's allocator needs for it: each stream's own peak
    # The largest sum of other phases: forward, backward, step, building the engine.
    other_peaks: dict[str, int]

    @property
    def allocated(self) -> int:
        return sum(self.held.values())


class Step:
    """A training step of one rank: what is held at the moment, and the largest sums so far."""

    def __init__(self, run: Run) -> None:
        self.run, self.states, self.parameters = run, states(run), parameters(run)
        self.local = local_elements(run, run.dp - 1)
        # Bytes of the residual stream.
        self.stream = 2 * run.model.hidden_size * run.tokens // run.shared
        self.units = _units(run)
        self.again = {layer for unit in self.units for layer in unit}
        # Layers that run as CUDA graphs: what they save and compute is in memory that nothing else
        # can use.
        on = run.flow is not None and run.flow.cuda_graphs
        self.graphed = set(range(run.model.num_layers)) - run.bf16_layers if on else set()
        own_stream = run.overlap and not run.fp32_gradients_whole
        self.side = _SIDE if own_stream and run.stage == 2 else _SIDE[1:] if own_stream else ()
        self.held: Counter[str] = Counter()
        self.at: dict[str, int] = {}
        self.moment, self.main, self.aside = "", 0, 0
        self.phases: Counter[str] = Counter()
        # Bytes that each layer has saved, 0 for those that are recomputed or in graphs.
        self.kept: list[int] = []
        self.waiting: list[Parameter] = []  # whose gradients are in a bucket
        # ZeRO-2's BF16 gradients of a pass are added to the earlier ones when backward is over.
        self.twice = run.stage == 2 and run.accumulation > 1 and not run.fp32_gradients

    def look(self, phase: str, moment: str, **temporary: int) -> None:
        """Note this moment if nothing larger has been seen; ``temporary`` is held at it alone."""
        now = self.held + Counter(
            {key.replace("_", " "): size for key, size in temporary.items() if size > 0}
        )
        if "reduction" in now:
            now["DeepSpeed's reduction"] = now.pop("reduction")
        total = sum(now.values())
        aside = sum(now[key] for key in self.side)
        self.main, self.aside = max(self.main, total - aside), max(self.aside, aside)
        self.phases[phase] = max(self.phases[phase], total)
        if total > sum(self.at.values()):
            self.at, self.moment = {k: v for k, v in now.items() if v}, f"{phase}: {moment}"

    def build(self) -> None:
        """Weights before and after they are laid out, and the copy that becomes the master
        weights.
        """
        run, found, phase = self.run, self.states, "building the engine"
        shard, weights = found.shard, found.weights
        master = 2 * shard if run.remainder else 4 * shard
        if run.stage == 3:  # in shards, whole one parameter at a time
            largest = max(p.numel for p in self.parameters)
            self.look(phase, "the model", parameters=2 * shard + 2 * largest)
            # Zeros of a first step, then this rank's share.
            gradients = max(4 * found.sub_group, found.gradients)
            self.look(
                phase,
                "copies of the shards",
                parameters=weights,
                master_weights=master,
                gradients=gradients,
            )
            return
        self.look(phase, "weights are laid out flat", parameters=2 * found.elements + weights)
        self.look(phase, "master weights", parameters=weights, master_weights=6 * shard)
        self.look(
            phase, "states are tried", parameters=weights, master_weights=master, gradients=master
        )

    def begin(self) -> None:
        """What is held between steps, and gradients of earlier micro-batches."""
        run, found, held = self.run, self.states, self.held
        held["parameters"], held["master weights"], held["moments"] = (
            found.weights,
            found.master,
            found.moments,
        )
        per_position = 12 * run.model.seq_length * run.model.head_channels
        held["tables, batch, workspaces"] = _WORKSPACE + 28 * run.tokens + per_position
        if run.stage == 3:
            held["DeepSpeed's buckets"] = found.bucket_bytes
        if run.stage == 3 or run.fp32_gradients_whole:
            held["gradients"] = found.gradients
        elif run.accumulation > 1:
            held["gradients"] = found.full_gradients or found.gradients
        if run.stage == 3:
            held["gathered parameters"] = found.gathered
        if run.fp32_gradients_whole and run.accumulation > 1:
            held[_BESIDE_FP32] = found.full_gradients
        if run.flow is not None and run.flow.weights == "cached":
            held["cached FP8 weights"] = sum(
                p.numel for p in self.parameters if p.matrix and p.layer is not None
            )

    def layer_bytes(self, layer: int) -> int:
        """Bytes that a layer saves, with its tables."""
        patched, run = layer not in self.run.bf16_layers, self.run
        if run.library is not None:
            return run.micro * run.saved_by_library(run.flow if patched else None).layer
        # Cosines and sines of queries and keys, in BF16, by Megatron's own rotation.
        own_tables = not patched or run.model.qk_norm
        tables = 8 * run.model.seq_length * run.model.head_channels if own_tables else 0
        return round(sum(saved(run, patched)) * run.tokens) + tables

    def in_graphs(self) -> int:
        """Bytes that graphs need besides what layers save: the most that one's backward takes, with
        all its gradients, its input and the gradient of its output.
        """
        moments = backward_moments(self.run, True)
        return max(one.gradients + one.made - one.released for one in moments) + 2 * self.stream

    def final_norm(self) -> int:
        """Bytes of the final norm's input, output and statistics."""
        if self.run.library is not None:  # tables of the rotation, too
            return self.run.micro * self.run.saved_by_library(self.run.flow).rest + self.stream
        per_token = 8 if self.run.model.normalization == "layernorm" else 4
        return 2 * self.stream + per_token * self.run.tokens // self.run.shared

    def forward(self) -> None:
        last = self.run.model.num_layers - 1
        self.kept = [0 if i in self.again else self.layer_bytes(i) for i in range(last + 1)]
        if self.graphed:
            self.held["CUDA graphs"] = sum(self.kept[i] for i in self.graphed) + self.in_graphs()
            self.kept = [0 if i in self.graphed else size for i, size in enumerate(self.kept)]
        self.held["activations"] += sum(self.kept) + len(self.units) * self.stream
        moments = backward_moments(self.run, last not in self.run.bf16_layers)
        widest = max(one.made for one in moments) if self.again else 0
        self.look("forward", "the last layer", temporary=2 * self.stream + widest // 2)
        self.held["activations"] += self.final_norm()

    def loss(self) -> None:
        """Output layer and loss; afterwards the gradient of the residual stream exists."""
        run = self.run
        columns, dx = run.model.padded_vocab // run.tp, 2 * run.model.hidden_size * run.tokens
        weight = 2 * columns * run.model.hidden_size
        gathered = dx if run.shared > 1 else 0
        if run.chunked:
            chunk = 2 * min(_CHUNK, run.tokens * columns)
            sums = 2 * dx if run.tokens * columns > _CHUNK else dx  # of several chunks in fp32
            sums += 2 * columns * run.tokens * run.keeps_logits
            self.look(
                "loss",
                "logits of a part of the vocabulary",
                logits=chunk + sums + weight + gathered,
            )
            self.look("loss", "gradient of the last layer's output", logits=sums + weight + dx)
        else:
            logits = 4 * columns * run.tokens
            if run.library is not None:  # in fp32, with two gradients of that size
                logits = 2 * logits + run.micro * run.saved_by_library(run.flow).loss
            self.look("loss", "logits and their gradient", logits=logits)
            self.look(
                "loss", "gradient of the output layer", logits=logits + dx + weight + gathered
            )
        self.held["temporary"] = self.stream

    def backward(self) -> None:
        """Gradients of all parameters, from the last to the first, and their reduction."""
        run, held, tied, embedding = (
            self.run,
            self.held,
            self.run.model.tie_embeddings,
            self.parameters[0],
        )
        if tied:  # autograd holds it until the embedding's part is there
            held["gradients outside of the buckets"] += 2 * embedding.numel
        for p in reversed([p for p in self.parameters[1:] if p.layer is None]):
            self.take(p)
        held["activations"] -= self.final_norm()
        first, last = ({unit[end]: unit for unit in self.units} for end in (0, -1))
        for layer in reversed(range(run.model.num_layers)):
            for i in last.get(layer, ()):  # forward again
                self.kept[i] = self.layer_bytes(i)
                held["activations"] += self.kept[i]
            if layer in last:
                self.look("backward", f"layer {layer} is computed again", computing=self.stream)
            self.layer_backward(layer)
            if layer in first:
                held["activations"] -= self.stream
        self.look("backward", "embedding", computing=2 * embedding.numel)
        if tied:
            held["gradients outside of the buckets"] = 0
        self.take(embedding)
        held["temporary"] = 0
        self.end_reduction()

    def layer_backward(self, layer: int) -> None:
        """Backward of one layer, by its largest moments."""
        patched = layer not in self.run.bf16_layers
        own = {p.name.split(".", 3)[3]: p for p in self.parameters if p.layer == layer}
        if layer in self.graphed:
            gradients = 2 * sum(p.numel for p in own.values())
            self.look("backward", f"layer {layer}'s graph", computing=self.stream + gradients)
        for one in () if layer in self.graphed else backward_moments(self.run, patched):
            if patched and one.name in _RETURNED:
                self.hand_over(own, _RETURNED[one.name])
            released = min(one.released, self.kept[layer])
            self.held["activations"] -= released
            self.look("backward", f"layer {layer}, {one.name}", computing=one.own + one.made)
            self.held["activations"] += released
            if not patched and one.name in _MADE:
                self.hand_over(own, _MADE[one.name])
        self.held["activations"] -= self.kept[layer]
        self.hand_over(own, "")

    def hand_over(self, own: dict[str, Parameter], prefix: str | tuple[str, ...]) -> None:
        """Take gradients of a layer's parameters, the last first, out of ``own``."""
        for name in [name for name in reversed(own) if name.startswith(prefix)]:
            self.take(own.pop(name))

    def take(self, p: Parameter) -> None:
        """A parameter's gradient is complete: it goes into a bucket, and what was in there
        before is reduced.
        """
        run, found = self.run, self.states
        if run.stage < 3 and not run.fp32_gradients_whole:  # allocated for the first gradient
            self.held["DeepSpeed's buckets"] = found.bucket_bytes
        # Reduced when backward is over.
        if run.fp32_gradients_whole or (found.full_gradients and not run.overlap):
            if run.accumulation == 1:
                self.held[_BESIDE_FP32 if run.fp32_gradients_whole else "gradients"] += 2 * p.numel
            return
        if sum(one.numel for one in self.waiting) + p.numel > found.bucket:
            self.flush()
        if p.numel > found.bucket:
            self.held["gradients outside of the buckets"] += 2 * p.numel
        self.waiting.append(p)

    def flush(self) -> None:
        """Reduce what waits: a copy of it, and the largest one in the dtype of the sum."""
        if not self.waiting:
            return
        run, found = self.run, self.states
        elements = sum(one.numel for one in self.waiting)
        together = 2 * elements if len(self.waiting) > 1 else 0
        if run.stage == 3:
            together += ceil(4 * elements / run.dp) if found.gradients > 2 * found.shard else 0
        elif largest := max(self.local.get(one.name, 0) for one in self.waiting):
            # The rank's own gradients are allocated when the first of them is reduced.
            self.held["gradients"] = max(self.held["gradients"], (1 + self.twice) * found.gradients)
            together += 4 * largest if run.fp32_gradients else 0
        self.look("backward", "gradients are reduced", reduction=together)
        self.held["gradients outside of the buckets"] = 0
        self.waiting = []

    def end_reduction(self) -> None:
        self.flush()
        run, found = self.run, self.states
        if run.fp32_gradients_whole:
            self.look(
                "backward", "gradients are reduced", reduction=_reduction_of_whole_gradients(run)
            )
        elif found.full_gradients and not run.overlap:
            self.look("backward", "gradients are reduced", gradients_of_this_rank=found.gradients)
            self.held["gradients"] = found.gradients
        elif self.twice:
            self.held["gradients"] = found.gradients
        if run.stage < 3:
            self.held["DeepSpeed's buckets"] = 0

    def update(self) -> None:
        run, found, moment = self.run, self.states, "gradients are put together"
        self.look("step", "gradient norm", computing=8 * found.largest)
        if run.stage == 3:
            flat = found.gradients // max(found.shard, 1) * found.sub_group
            fp32 = 4 * found.sub_group if flat < 4 * found.sub_group and not run.remainder else 0
            self.look("step", moment, computing=flat + fp32)
        elif run.fp32_gradients_whole:
            self.look("step", "update")
        elif not run.fp32_gradients or run.remainder:
            self.look("step", moment, computing=(2 if run.remainder else 6) * found.shard)


def simulate(run: Run) -> Peak:
    """The largest moment of a training step, not of the first one, which lacks moments while it
    runs.

    Under ZeRO-2 the last data-parallel rank needs most, and is simulated: it has the last layers'
    gradients, which come first, while the activations of all other layers are still there.
    """
    step = Step(run)
    step.build()
    step.begin()
    step.forward()
    step.loss()
    step.backward()
    step.update()
    return Peak(step.moment, dict(step.at), step.main + step.aside, dict(step.phases))


def _units(run: Run) -> list[list[int]]:
    """Layers that are computed again together; a layer that is not is in none."""
    n, options = run.model.num_layers, run.recompute
    if options.get("recompute_granularity") != "full":
        return []
    size = int(options["recompute_num_layers"])
    if options["recompute_method"] == "block":
        return [[i] for i in range(size)]
    return [list(range(i, min(i + size, n))) for i in range(0, n, size)]


def _reduction_of_whole_gradients(run: Run) -> int:
    """Bytes sent of fp32 gradients. Each group's are one tensor, reduced alone if it is larger than
    a bucket: then there is its copy in the dtype of communication alone. Smaller ones are put
    together before.
    """
    sent = 0 if run.settings.get("communication_data_type") == "fp32" else 2
    matrices, vectors = (
        sum(p.numel for p in parameters(run) if p.matrix is matrix) for matrix in GROUPS
    )
    if matrices > BUCKET or not vectors:
        return sent * matrices
    return (4 + sent) * (matrices + vectors)
