"""Pairs of training runs with equal seeds: how far a variant's held-out loss is from BF16's.

    python -m benchmarks.convergence.pairs --budget 540 --pairs 16 --variants bf16 coat
    python -m benchmarks.convergence.pairs --budget 540 --pairs 8 --variants all --peers DIR
    python -m benchmarks.convergence.pairs_report --plot docs/figures/convergence-pairs.png

A Llama of transformers (7 M parameters outside the embedding) learns Python source as tokens of a
BPE, 10 tokens a parameter, in a plain torch loop on one GPU. The learning rate rises for 5 % of the
steps and falls to zero as a cosine. Runs of one seed have the same initial weights and the same
batches in the same order. The model is in BF16 with fp32 master weights beside it: gradients are
cast to fp32, clipped there, and the optimizer updates the masters. So variants differ by the part
that they name alone. "bf16 again" has a learning rate larger by 1e-5 of itself: what chaos does to
a run.

**Held-out loss**: every 50th window of the text is not trained on. After the last step their mean
loss is taken with the variant's own forward, and in BF16 layers from the same master weights.

**Speed**: a step reads batch and learning rate from the GPU by a counter that lies there, so one
CUDA graph holds the whole step. Optimizers of peers take their step outside of it, and Transformer
Engine runs without a graph. A variant whose capture fails is trained without a graph. Each GPU is
shared by ``--processes`` runs.

**Continuing**: `convergence/pairs.json` is written after every run, and has all runs of earlier
calls, those in the repository too; a run that is in it is not repeated. With ``--budget`` no run
begins that would not end in time. One that is under way at the end is saved in ``--folder``, where
the text is too, and a later call on the same machine continues it. A result has runs of one set of
settings and one text; give others another ``--name``.

``--preset 303m`` is a Llama of 270 M parameters outside the embedding that reads 184 M tokens: 12
to 18 minutes of one H200 a run.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy
import torch

from benchmarks.arguments import argument_parser, one_line, positive_float
from benchmarks.common import (
    commit,
    gpus,
    prepare_text,
    read_json,
    result_path,
    show,
    write_result,
)
from benchmarks.convergence.pairs_report import BF16, report, show_rows

__all__ = ["NUDGE", "VARIANTS", "Run", "Variant", "settings"]

NUDGE = 1e-5
"""Relative increase of the learning rate in "bf16 again"."""
HELD_OUT = 50
"""Every so many windows one is held out."""
WARM_UP = 3
"""Steps on a side stream before a capture, as torch documents; they train."""
LOOK = 1_500_000
"""Tokens between two looks at the clock, for which the host waits for a graph to end."""
SAVING = 60
"""Seconds after the end of the budget in which a run saves itself or takes its last loss."""
POINTS = 8
"""Points of a run's training curve; each is a mean."""
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0


class Variant(NamedTuple):
    """What differs from BF16."""

    flow: dict[str, Any] | None = None
    """The "activation" of the block; None: BF16 layers."""
    moments: dict[str, Any] | None = None
    """Options of CoatAdamW; None: another optimizer."""
    start: float = 0.0
    """Share of the steps before the flow begins."""
    lr: float = 1.0
    """Factor of the learning rate."""
    dtype: torch.dtype = torch.bfloat16
    peer: str = ""
    """The package that the variant needs."""
    recipe: str = ""
    """Of Transformer Engine's or torchao's FP8 linears."""


VARIANTS = {
    BF16: Variant(),
    "bf16 again": Variant(lr=1 + NUDGE),
    "fp32": Variant(dtype=torch.float32),
    "coat": Variant({}, {}),
    "moments": Variant(moments={}),
    "flow": Variant({}),
    "flow quantized": Variant({"forward": "quantized"}),
    "coat e5m2": Variant({"grad_format": "e5m2"}, {}),
    "coat log8": Variant({}, {"second_moment": "log8"}),
    "coat int8": Variant({}, {"first_moment": "int8"}),
    "coat from 2%": Variant({}, {}, start=0.02),
    "coat from 5%": Variant({}, {}, start=0.05),
    "coat from 10%": Variant({}, {}, start=0.1),
    "coat bf16 edges": Variant({"bf16_layers": [0, -1]}, {}),
    "torchao float8 rowwise": Variant(peer="torchao", recipe="rowwise"),
    "torchao 8-bit AdamW": Variant(peer="torchao"),
    "bitsandbytes 8-bit AdamW": Variant(peer="bitsandbytes"),
    "te current": Variant(peer="transformer_engine", recipe="Float8CurrentScaling"),
    "te delayed": Variant(peer="transformer_engine", recipe="DelayedScaling"),
}
SLOW = ("fp32",)
"""Variants that "all" leaves out."""
PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    "303m": {
        "layers": 21,
        "hidden": 1024,
        "sequence": 1024,
        "batch": 256,
        "micro_batch": 32,
        "steps": 700,
        "lr": 6e-4,
        "vocabulary": 16384,
        "text_bytes": "4G",
    },
}


def settings(a: argparse.Namespace, text: dict[str, Any]) -> dict[str, Any]:
    """What all runs of a result have in common."""
    names = "layers hidden sequence batch micro_batch lr vocabulary"
    found = {name: getattr(a, name) for name in names.split()}
    found["micro_batch"] = a.micro_batch or a.batch
    found["ffn"] = -(-8 * a.hidden // 3 // 128) * 128
    parameters = a.layers * a.hidden * (4 * a.hidden + 3 * found["ffn"])
    tokens = a.batch * a.sequence
    found["steps"] = a.steps or max(2, round(a.tokens_per_parameter * parameters / tokens))
    trained = found["steps"] * tokens
    found |= {"parameters": parameters, "tokens": trained, "text": text["digest"]}
    return found | {"epochs": round(trained / text["tokens"] * HELD_OUT / (HELD_OUT - 1), 3)}


def llama(s: dict[str, Any]) -> Any:
    """An untrained model, in fp32 on the CPU: its numbers are the same for every device."""
    import transformers

    config = transformers.LlamaConfig(  # type: ignore[call-arg]
        vocab_size=s["vocabulary"],
        hidden_size=s["hidden"],
        intermediate_size=s["ffn"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["hidden"] // 64,
        num_key_value_heads=s["hidden"] // 64,
        max_position_embeddings=s["sequence"],
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


@functools.cache
def windows(prefix: str, sequence: int, device: torch.device) -> torch.Tensor:
    """The text on the device, a row for each window of ``sequence`` tokens."""
    tokens = numpy.fromfile(
        f"{prefix}.bin", json.loads(Path(f"{prefix}.json").read_text())["dtype"]
    )
    rows = tokens[: len(tokens) // sequence * sequence].reshape(-1, sequence)
    return torch.from_numpy(rows.astype("int32")).to(device)


class Run:
    """One run: the model, its fp32 master weights and the optimizer.

    Args:
        job: ``variant``, ``seed``, ``settings``, ``text`` (a prefix), ``graph`` (whether to capture
            steps), ``gpu`` (its number), ``peers`` (the folder of Transformer Engine), ``saved``
            (a file for a run that is continued later).
    """

    def __init__(self, job: dict[str, Any]) -> None:
        s = self.settings = job["settings"]
        self.job, self.variant = job, VARIANTS[job["variant"]]
        gpu, self.device = torch.cuda.is_available(), torch.device("cpu")
        if gpu:
            torch.cuda.set_device(job["gpu"])
            self.device = torch.device("cuda", job["gpu"])
        self.graph = job["graph"] and gpu and self.variant.peer != "transformer_engine"
        self.context: Callable[[], Any] = nullcontext
        torch.manual_seed(job["seed"])
        self.masters = llama(s).to(self.device)
        self.model = self.layers_of_peer(self.cast(self.variant.dtype))
        named = dict(self.model.named_parameters())
        self.weights = list(self.masters.parameters())
        self.params = [named[name] for name, _ in self.masters.named_parameters()]
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)
        self.grads = [weight.grad for weight in self.weights]
        text = windows(job["text"], s["sequence"], self.device)
        held_out = torch.arange(len(text), device=self.device) % HELD_OUT == 0
        self.fp8_share = 0.0
        self.text, (self.held_out,) = text, held_out.nonzero(as_tuple=True)
        steps, self.done = s["steps"], 0
        order = self.order((~held_out).nonzero(as_tuple=True)[0].cpu())
        self.rows = order.view(steps, -1, s["micro_batch"]).to(self.device)
        self.rates = [self.variant.lr * s["lr"] * rate(i, steps) for i in range(steps)]
        self.schedule = torch.tensor(self.rates, device=self.device)
        self.losses = torch.zeros(steps, device=self.device)
        self.at = torch.zeros(1, dtype=torch.long, device=self.device)
        self.lr = torch.zeros((), device=self.device)
        self.optimizer, self.updates_in_graph = self.build_optimizer()

    def cast(self, dtype: torch.dtype) -> Any:
        """The model with its master weights in ``dtype``. Buffers stay fp32: rotations need it."""
        model = copy.deepcopy(self.masters)
        for p in model.parameters():
            p.data, p.grad = p.data.to(dtype), None
        return model

    def order(self, rows: torch.Tensor) -> torch.Tensor:
        """The windows of all steps: one random order of them after the other."""
        generator = torch.Generator().manual_seed(self.job["seed"])
        wanted = self.settings["steps"] * self.settings["batch"]
        epochs = [
            rows[torch.randperm(len(rows), generator=generator)]
            for _ in range(-(-wanted // len(rows)))
        ]
        return torch.cat(epochs)[:wanted]

    def layers_of_peer(self, model: Any) -> Any:
        """``model`` with the FP8 linears of the variant's peer, where it has some."""
        v = self.variant
        if v.peer == "torchao" and v.recipe:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name(v.recipe)
            convert_to_float8_training(model.model.layers, config=config)
        if v.peer == "transformer_engine":
            from benchmarks.speed import te_layer

            te = te_layer.load(Path(self.job["peers"]))
            recipe = getattr(
                importlib.import_module("transformer_engine.common.recipe"), v.recipe
            )()
            self.context = functools.partial(te.autocast, enabled=True, recipe=recipe)
            for block in [m for layer in model.model.layers for m in (layer.self_attn, layer.mlp)]:
                for name, linear in list(block.named_children()):
                    if isinstance(linear, torch.nn.Linear):
                        sizes = linear.in_features, linear.out_features
                        new = te.Linear(*sizes, bias=False, params_dtype=v.dtype, device="cuda")
                        new.weight.data.copy_(linear.weight)
                        setattr(block, name, new)
        return model

    def build_optimizer(self) -> tuple[torch.optim.Optimizer, bool]:
        """The variant's optimizer of the master weights, and whether a graph can hold its step."""
        from coat_dist import CoatAdamW, param_groups

        v, groups = self.variant, param_groups(self.masters, weight_decay=WEIGHT_DECAY)
        shared: dict[str, Any] = {
            "lr": self.lr,
            "betas": BETAS,
            "capturable": self.device.type == "cuda",
        }
        if v.moments is not None:
            return CoatAdamW(groups, **shared, **v.moments), True
        plain = [{key: group[key] for key in ("params", "weight_decay")} for group in groups]
        if v.peer == "torchao" and not v.recipe:
            from torchao.optim import AdamW8bit

            return AdamW8bit(plain, lr=0.0, betas=BETAS), False
        if v.peer == "bitsandbytes":
            import bitsandbytes

            return bitsandbytes.optim.AdamW8bit(plain, lr=0.0, betas=BETAS), False
        return torch.optim.AdamW(plain, fused=True, **shared), True

    def loss(self, model: Any, rows: torch.Tensor) -> torch.Tensor:
        """The mean loss of some windows."""
        tokens = self.text.index_select(0, rows).long()
        return model(input_ids=tokens, labels=tokens).loss

    def gradients(self) -> None:
        """Forward and backward of a step, clipped fp32 gradients, the learning rate. All that
        differs between steps is read at the counter.
        """
        batch = self.rows.index_select(0, self.at)[0]
        total = torch.zeros(1, device=self.device)
        torch._foreach_zero_(self.grads)
        for rows in batch:
            with self.context():
                loss = self.loss(self.model, rows) / len(batch)
            loss.backward()
            torch._foreach_add_(self.grads, [p.grad for p in self.params])
            for p in self.params:
                p.grad = None
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.weights, CLIP)
        self.losses.index_copy_(0, self.at, total)
        self.lr.copy_(self.schedule.index_select(0, self.at)[0])
        self.at += 1

    def update(self) -> None:
        """The optimizer's step, and the model's weights from their masters."""
        if not self.updates_in_graph:
            for group in self.optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(self.rates[self.done])
                else:
                    group["lr"] = self.rates[self.done]
        self.optimizer.step()
        self.copy_weights()

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Round the master weights to the model's."""
        torch._foreach_copy_(self.params, self.weights)

    def step(self) -> None:
        """A step without a graph."""
        self.gradients()
        self.update()

    def captured(self) -> Callable[[], None]:
        """A step whose GPU work is started as one graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.gradients()
            if self.updates_in_graph:
                self.update()

        def advance() -> None:
            graph.replay()
            if not self.updates_in_graph:
                self.update()

        return advance

    def steps_to(self, end: int, deadline: float) -> bool:
        """Train up to step ``end``; whether it came so far before ``deadline``."""
        advance, look = self.step, 1
        if self.graph and end - self.done > WARM_UP:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self.step()
                    self.done += 1
            torch.cuda.current_stream().wait_stream(side)
            advance = self.captured()
            look = max(1, LOOK * self.settings["steps"] // self.settings["tokens"])
        while self.done < end:
            advance()
            self.done += 1
            if self.done % look == 0:
                self.synchronize()
                if time.monotonic() > deadline:
                    return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def train(self, deadline: float) -> bool:
        """Train to the last step; False where ``deadline`` came before, and the run is saved."""
        v, saved = self.variant, Path(self.job["saved"])
        if saved.exists():
            self.load(torch.load(saved, map_location=self.device, weights_only=False))
        steps = self.settings["steps"]
        switch = round(v.start * steps)
        ended = True
        if v.flow is not None:
            if self.done < switch:
                ended = self.steps_to(switch, deadline)
            if ended:
                self.patch()
        ended = ended and self.steps_to(steps, deadline)
        if not ended:
            torch.save(self.state(), f"{saved}.part")
            os.replace(f"{saved}.part", saved)
        return ended

    def patch(self) -> None:
        """Let the flow begin."""
        import coat_dist

        block = {"activation": dict(self.variant.flow or {})}
        self.fp8_share = coat_dist.patch_model(self.model, {"coat": block}).fp8_share

    def state(self) -> dict[str, Any]:
        """What a run needs to be continued."""
        return {
            "settings": self.settings,
            "done": self.done,
            "masters": self.masters.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state` was taken; a run of other settings begins anew."""
        if state["settings"] != self.settings:
            return
        self.done = state["done"]
        self.at.fill_(self.done)
        self.losses.copy_(state["losses"])
        self.masters.load_state_dict(state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            if self.updates_in_graph:
                group["lr"] = self.lr
        self.copy_weights()

    @torch.no_grad()
    def held_out_loss(self, model: Any) -> float:
        """The mean loss of a model in training mode over the held-out windows."""
        size = min(self.settings["micro_batch"], len(self.held_out))
        losses = []
        for rows in self.held_out[: len(self.held_out) // size * size].split(size):
            with self.context() if model is self.model else nullcontext():
                losses.append(self.loss(model, rows).double())
        return float(torch.stack(losses).mean())

    def result(self) -> dict[str, Any]:
        """Losses of a finished run."""
        self.copy_weights()  # replays do not tell caches of codes that weights have changed
        losses = self.losses.tolist()
        last = max(1, len(losses) // 20)
        points = [len(losses) * i // POINTS for i in range(POINTS + 1)]
        curve = [losses[a:b] for a, b in zip(points, points[1:], strict=False) if b > a]
        return {
            "held_out_loss": round(self.held_out_loss(self.model), 6),
            "held_out_loss_bf16": round(self.held_out_loss(self.cast(torch.bfloat16)), 6),
            "training_loss": round(fmean(losses[-last:]), 6),
            "curve": [round(fmean(part), 3) for part in curve],
            "graph": self.graph,
            "fp8_share": round(self.fp8_share, 3),
        }


def rate(step: int, steps: int) -> float:
    """The learning rate of a step as a share of the largest: linear for 5 % of the steps, then a
    cosine that falls to zero.
    """
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train one run; its record, or ``stopped`` with the steps that are done."""
    began = time.monotonic()
    gc.collect()  # an earlier run's graph holds memory that other processes may need
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    run = Run(job)
    if not run.train(job["deadline"]):
        return {"stopped": run.done}
    named = {key: job[key] for key in ("variant", "seed")}
    result = run.result()
    Path(job["saved"]).unlink(missing_ok=True)
    about = {"commit": commit(), "torch": torch.__version__, "gpu": (gpus() or ["CPU"])[0]}
    return named | result | {"seconds": round(time.monotonic() - began, 1)} | about


def serve(pipe: Any) -> None:
    """A process that trains one run after the other; ends with its parent."""
    from transformers.models.llama import modeling_llama

    # None means causal attention over whole rows, and rows are whole. transformers waits for the
    # GPU to find that out; in a capture it makes a mask instead, which takes another kernel.
    modeling_llama.create_causal_mask = lambda *args, **kwargs: None  # type: ignore[assignment]
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(train(job))
        except Exception:
            pipe.send({"error": traceback.format_exc()[-3000:]})


class Worker:
    """A process that trains runs; its memory and CUDA context are its own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def train(self, job: dict[str, Any], seconds: float | None) -> dict[str, Any]:
        """The record of a run; ``error`` where it failed, or took longer than ``seconds``."""
        self.pipe.send(job)
        if not self.pipe.poll(seconds):
            return {"error": f"no end after {seconds:.0f} s"}
        try:
            return self.pipe.recv()
        except EOFError:
            return {"error": f"the process ended with {self.process.exitcode}"}

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


class Study:
    """Runs that wait and runs that are done. Threads take one run after the other, each with a
    process of its own, and write the result after each.
    """

    def __init__(
        self,
        a: argparse.Namespace,
        shared: dict[str, Any],
        runs: list[dict[str, Any]],
        began: float,
    ) -> None:
        self.arguments, self.shared, self.runs = a, shared, runs
        self.deadline = began + (a.budget or math.inf)
        there = {(run["variant"], run["seed"]) for run in runs}
        # Seed by seed, so that there are pairs early.
        self.waiting = [
            shared | {"variant": variant, "seed": seed, "graph": True}
            for seed in range(a.pairs)
            for variant in a.variants
            if (variant, seed) not in there
        ]
        self.seconds: dict[str, float] = {}
        """Of the last run of this call, by variant: the first ones also compile kernels."""
        self.failed: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def fits(self, variant: str) -> bool:
        """Whether a run of a variant would end in time; what is not known counts as the longest."""
        needed = self.seconds.get(variant, max(self.seconds.values(), default=0.0))
        return time.monotonic() + needed < self.deadline

    def next(self) -> dict[str, Any] | None:
        """The first waiting run that would end in time."""
        with self.lock:
            for i, job in enumerate(self.waiting):
                if self.fits(job["variant"]):
                    return self.waiting.pop(i)
        return None

    def work(self, gpu: int) -> None:
        """Train runs on a GPU until none is left that would end in time."""
        worker: Worker | None = None
        while (job := self.next()) is not None:
            saved = Path(job["folder"]) / f"{self.arguments.name}-{job['variant']}-{job['seed']}.pt"
            job |= {"saved": str(saved), "deadline": self.deadline, "gpu": gpu}
            worker = worker or Worker()
            left = None
            if self.deadline < math.inf:
                left = max(0.0, self.deadline - time.monotonic()) + SAVING
            found = worker.train(job, left)
            if "error" in found:
                worker.stop()
                worker = None
            with self.lock:
                self.settle(job, found)
        if worker is not None:
            worker.stop()

    def settle(self, job: dict[str, Any], found: dict[str, Any]) -> None:
        """Keep what came of a run. If one fails, its variant is trained without graphs; if one
        fails so, the others of its variant are left out.
        """
        name = f"{job['variant']}, seed {job['seed']}"
        if "stopped" in found:
            print(f"{name}: saved after {found['stopped']} steps", flush=True)
            self.waiting.append(job)
        elif "error" not in found:
            self.runs.append(found)
            self.runs.sort(key=lambda run: (list(VARIANTS).index(run["variant"]), run["seed"]))
            self.seconds[job["variant"]] = found["seconds"]
            show(name, found, held_out_loss=".4f", training_loss=".4f", seconds=".1f", graph="d")
            self.write()
        else:
            print(f"{name} failed: {found['error']}", flush=True)
            if job["graph"] and torch.cuda.is_available():
                self.waiting.insert(0, job)
                for one in self.waiting:
                    if one["variant"] == job["variant"]:
                        one["graph"] = False
            else:
                self.failed.append({"run": name, "error": found["error"].splitlines()[-1]})
                self.waiting = [one for one in self.waiting if one["variant"] != job["variant"]]

    def write(self) -> None:
        """Write all runs, earlier ones too."""
        result = {
            "settings": self.shared["settings"],
            "processes": self.arguments.processes,
            "gaps": report(self.runs),
            "runs": self.runs,
        }
        write_result(f"convergence/{self.arguments.name}", result, self.arguments.output, nan=True)


def prepare(a: argparse.Namespace) -> dict[str, Any]:
    """Prefix, number and digest of the tokens; made where they are not there. The text is what a
    machine without a network has: Python sources of the standard library and of the packages beside
    torch.
    """
    prefix = a.text or str(a.folder / f"text-{a.vocabulary}-{a.text_bytes}")
    if not Path(f"{prefix}.json").exists():
        inputs = ["stdlib", str(Path(torch.__file__).parents[1])]
        more = ["--glob", "*.py", "--train-bytes", "5M", "--max-bytes", a.text_bytes]
        prepare_text(Path(prefix), f"bpe:{a.vocabulary}", inputs, *more)
    with open(f"{prefix}.bin", "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    summary = json.loads(Path(f"{prefix}.json").read_text())
    return {"prefix": prefix, "tokens": summary["tokens"], "digest": digest}


def earlier(a: argparse.Namespace, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of earlier calls: of the repository, and of ``--output``.

    Raises:
        ValueError: they were made with other settings.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    name = f"convergence/{a.name}"
    for path in {result_path(name), result_path(name, a.output)}:
        if not path.exists():
            continue
        result = read_json(path, "settings", "runs")
        for key, value in wanted.items():
            if result["settings"].get(key) != value:
                raise ValueError(
                    f"--name: {path}: {key}: got {result['settings'].get(key)}, accepted: this "
                    f"call's {value}, or another --name"
                )
        found |= {(run["variant"], run["seed"]): run for run in result["runs"]}
    return list(found.values())


def available(variants: Sequence[str], peers: str | None) -> list[str]:
    """The variants that can run here; prints why another one is left out."""
    found = []
    for name in variants:
        peer, why = VARIANTS[name].peer, None
        if peer == "transformer_engine":
            if peers is None or not torch.cuda.is_available():
                why = "no --peers, or no GPU"
        elif peer and importlib.util.find_spec(peer) is None:
            why = f"no package {peer}"
        if why is None:
            found.append(name)
        else:
            print(f"{name}: left out: {why}")
    return found


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program. A preset changes the defaults."""
    parser = argument_parser(
        __doc__,
        layers=4,
        hidden=384,
        sequence=512,
        batch=64,
        tokens_per_parameter=10.0,
        lr=1.5e-3,
        vocabulary=4096,
        text_bytes="250M",
        processes=3,
        pairs=16,
        text=None,
        peers=None,
        name="pairs",
    )
    parser.add_argument("--micro-batch", type=int, help="windows of a backward (default: --batch)")
    parser.add_argument("--steps", type=int, help="instead of --tokens-per-parameter")
    parser.add_argument("--preset", choices=list(PRESETS), default="small")
    parser.add_argument("--variants", nargs="+", choices=["all", *VARIANTS], default=[BF16, "coat"])
    parser.add_argument(
        "--budget", type=positive_float, metavar="SECONDS", help="of a call, preparation included"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/pairs"), help="where text and saved runs are"
    )
    first, _ = parser.parse_known_args(given)
    parser.set_defaults(**PRESETS[first.preset])
    a = parser.parse_args(given)
    if "all" in a.variants:
        a.variants = [name for name in VARIANTS if name not in SLOW]
    if a.batch % (a.micro_batch or a.batch):
        parser.error(f"--micro-batch: got {a.micro_batch}, accepted: a divisor of {a.batch}")
    return a


def main() -> None:
    began, a = time.monotonic(), parse()
    a.folder.mkdir(parents=True, exist_ok=True)
    text = prepare(a)
    print(f"text in {time.monotonic() - began:.0f} s: {text['tokens']:,} tokens", flush=True)
    shared = {"settings": settings(a, text), "text": text["prefix"], "folder": str(a.folder)}
    with one_line():
        runs = earlier(a, shared["settings"])
    a.variants = available(a.variants, a.peers)
    with tempfile.TemporaryDirectory() as unpacked:
        if any(VARIANTS[name].peer == "transformer_engine" for name in a.variants):
            from benchmarks.speed import te_layer

            shared["peers"] = str(te_layer.unpack(a.peers, unpacked))
        study = Study(a, shared, runs, began)
        each = [gpu for gpu in range(max(1, len(gpus()))) for _ in range(a.processes)]
        threads = [threading.Thread(target=study.work, args=(gpu,), daemon=True) for gpu in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    show_rows(report(study.runs))
    print(f"{len(study.waiting)} runs wait for a later call; failed: {study.failed or 'none'}")


if __name__ == "__main__":
    main()
