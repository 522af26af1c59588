"""Training of one run of ``pairs.py``: the variants, the loop, and the process that runs it."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy
import torch

from benchmarks.common import commit, gpus
from benchmarks.convergence.pairs_report import BF16

NUDGE = 1e-5
"""Relative increase of the learning rate in "bf16 again"."""
HELD_OUT = 50
"""Every so many windows one is held out."""
WARM_UP = 3
"""Steps on a side stream before a capture, as torch documents; they train."""
LOOK = 1_500_000
"""Tokens between two looks at the clock, for which the host waits for a graph to end."""
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
    end: float = 1.0
    """Share of the steps after which it ends."""
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
    "coat until 80%": Variant({}, {}, end=0.8),
    "coat until 90%": Variant({}, {}, end=0.9),
    "coat bf16 edges": Variant({"bf16_layers": [0, -1]}, {}),
    "coat bf16 first": Variant({"bf16_layers": [0]}, {}),
    "coat bf16 last": Variant({"bf16_layers": [-1]}, {}),
    "coat boundaries": Variant({"boundaries": "fp8", "recompute": 999}, {}),
    "torchao float8 rowwise": Variant(peer="torchao", recipe="rowwise"),
    "torchao 8-bit AdamW": Variant(peer="torchao"),
    "bitsandbytes 8-bit AdamW": Variant(peer="bitsandbytes"),
    "te current": Variant(peer="transformer_engine", recipe="Float8CurrentScaling"),
    "te delayed": Variant(peer="transformer_engine", recipe="DelayedScaling"),
}


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
            for layer in model.model.layers:
                layer.compile()  # as its page says
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

            manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
            manager.pid2config.clear()  # it knows tensors by their addresses, of earlier runs too
            embedding = self.masters.get_input_embeddings().weight
            manager.override_config(embedding, "optim_bits", 32)  # as its page asks
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
        self.optimizer.step()
        self.copy_weights()

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Round the master weights to the model's."""
        torch._foreach_copy_(self.params, self.weights)

    def in_graph(self) -> None:
        """The part of a step that a graph can hold."""
        self.gradients()
        if self.updates_in_graph:
            self.update()

    def outside(self) -> None:
        """The rest of a step. bitsandbytes' kernels run on the default stream, whichever is the
        current one: so that has to be the default stream.
        """
        if self.updates_in_graph:
            return
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self.rates[self.done])
            else:
                group["lr"] = self.rates[self.done]
        self.update()

    def step(self) -> None:
        """A step without a graph."""
        self.in_graph()
        self.outside()

    def captured(self) -> Callable[[], None]:
        """A step whose GPU work is started as one graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.in_graph()

        def advance() -> None:
            graph.replay()
            self.outside()

        return advance

    def steps_to(self, end: int, deadline: float) -> bool:
        """Train up to step ``end``; whether it came so far before ``deadline``."""
        advance, look = self.step, 1
        if self.graph and end - self.done > WARM_UP:
            side = torch.cuda.Stream()
            for _ in range(WARM_UP):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    self.in_graph()
                torch.cuda.current_stream().wait_stream(side)
                self.outside()
                self.done += 1
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
        steps, ended = self.settings["steps"], True
        parts = [(steps, False)]
        if v.flow is not None:
            parts = [(round(v.start * steps), False), (round(v.end * steps), True), *parts]
        for end, in_flow in parts:
            if ended and self.done < end:
                self.set_flow(in_flow)
                ended = self.steps_to(end, deadline)
        if not ended and v.peer != "transformer_engine":  # its scales are not in the state
            torch.save(self.state(), f"{saved}.part")
            os.replace(f"{saved}.part", saved)
        return ended

    def set_flow(self, on: bool) -> None:
        """Let the flow begin or end."""
        import coat_dist
        from coat_dist.patching.report import is_patched

        if on:
            block = {"activation": dict(self.variant.flow or {})}
            self.fp8_share = coat_dist.patch_model(self.model, {"coat": block}).fp8_share
        elif is_patched(self.model):
            coat_dist.unpatch_model(self.model)

    def state(self) -> dict[str, Any]:
        """What a run needs to be continued."""
        return {
            "settings": self.settings,
            "done": self.done,
            "masters": self.masters.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "fp8_share": self.fp8_share,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state` was taken; a run of other settings begins anew."""
        if state["settings"] != self.settings:
            return
        self.done, self.fp8_share = state["done"], state["fp8_share"]
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

    def flow_forward(self, bf16: float) -> dict[str, float]:
        """What the flow's forward adds to ``bf16``, the held-out loss of the weights in BF16
        layers, in percent: in all layers, in the first and in the last one alone.
        """
        import coat_dist

        last = self.settings["layers"] - 1
        others = {"all": [], "first": [*range(1, last + 1)], "last": [*range(last)]}
        found = {}
        for where, kept in others.items():
            model = self.cast(torch.bfloat16)
            coat_dist.patch_model(model, {"coat": {"activation": {"bf16_layers": kept}}})
            found[where] = round(100 * (self.held_out_loss(model) / bf16 - 1), 4)
        return found

    def result(self) -> dict[str, Any]:
        """Losses of a finished run."""
        self.copy_weights()  # replays do not tell caches of codes that weights have changed
        losses = self.losses.tolist()
        last = max(1, len(losses) // 20)
        points = [len(losses) * i // POINTS for i in range(POINTS + 1)]
        curve = [losses[a:b] for a, b in zip(points, points[1:], strict=False) if b > a]
        bf16 = self.held_out_loss(self.cast(torch.bfloat16))
        in_fp8 = self.variant.flow is not None or self.variant.recipe
        plain = not in_fp8 and self.variant.dtype is torch.bfloat16
        return {
            "held_out_loss": round(bf16 if plain else self.held_out_loss(self.model), 6),
            "held_out_loss_bf16": round(bf16, 6),
            "flow_forward": {} if in_fp8 else self.flow_forward(bf16),
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
