"""Optimizers under FSDP2: a transformers model with fp32 weights and BF16 layers, beside torch's
AdamW; a checkpoint.

    python -m benchmarks.speed.fsdp  # a Llama of 1.3 B on two GPUs, 200 steps

Each variant has processes of its own, with the same weights, text and ``fully_shard`` of every
layer and the rest. bitsandbytes does not know DTensors: it steps on tensors that share their
memory. The text is the standard library's, a byte a token. Weights come from ``--trunk`` steps of
torch's AdamW, past those in which the slightest difference makes losses part; optimizers begin
anew. The last variant, if it is CoatAdamW's, then trains a model of two layers, which
``torch.distributed.checkpoint`` saves and one rank loads; the bytes of weights and states are
compared. Ratios and gaps are to the first variant. Writes ``speed/fsdp.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as torch_states

from benchmarks.arguments import argument_parser, int_from_0
from benchmarks.common import loss_gaps, options, show, write_result
from benchmarks.ranks import as_rank, run_variant
from benchmarks.speed.hf import MODELS, timed_steps, untrained
from benchmarks.speed.optimizer import candidates

VARIANTS = [
    "torch fused AdamW",
    "torchao AdamWFp8",
    "bitsandbytes AdamW8bit",
    "CoatAdamW",
    "CoatAdamW + layers",
]
LAYERS = " + layers"
SMALL: dict[str, Any] = {"shape": {"num_hidden_layers": 2}, "steps": 10}
WARM_UP = 20  # steps of the learning rate, which are not timed either


def sharded(case: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """The model of a variant."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import coat_dist

    make = untrained(case)
    with device:  # 1.3 B random numbers take a CPU half a minute
        model = make().train()
    if case["variant"].endswith(LAYERS):
        coat_dist.patch_model(model, {"coat": {}})  # before fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def on_shards(groups: list[dict[str, Any]], build: Any) -> torch.optim.Optimizer:
    """An optimizer of parameters that share the memory of this rank's shards; each step takes
    their gradients.
    """
    own = {p: torch.nn.Parameter(p.to_local().detach()) for g in groups for p in g["params"]}
    optimizer = build([g | {"params": [own[p] for p in g["params"]]} for g in groups])

    def take(*_: Any) -> None:
        for shared, mine in own.items():
            mine.grad = shared.grad.to_local()

    optimizer.register_step_pre_hook(take)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    return optimizer


def parts(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors of a state: what a DTensor, or a subclass with codes and scales, is made
    of.
    """
    if isinstance(value, dict):
        for one in value.values():
            yield from parts(one)
    elif hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from parts(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> float:
    """Bytes of this rank's states for each of its parameters; what several states share counts
    once.
    """
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in parts(dict(optimizer.state))
    }
    return sum(storages.values()) / sum(x.numel() for p in parameters for x in parts(p))


def states(model: Any, optimizer: Any, **how: Any) -> dict[str, Any]:
    """What ``torch.distributed.checkpoint`` saves and loads."""
    found = torch_states.get_state_dict(
        model, optimizer, options=torch_states.StateDictOptions(**how)
    )
    return dict(zip(("model", "optimizer"), found, strict=True))


def digests(model: Any, optimizer: Any) -> dict[str, str]:
    """Hashes of all weights, and of all optimizer states, as whole tensors. Only the first
    rank's are complete.
    """
    found, whole = {}, states(model, optimizer, full_state_dict=True, cpu_offload=True)
    for key, values in (
        ("weights", whole["model"]),
        ("states", whole["optimizer"].get("state", {})),
    ):
        total = hashlib.sha256()
        for name, held in sorted(values.items()):
            for inner, value in sorted(held.items() if isinstance(held, dict) else [("", held)]):
                is_tensor = isinstance(value, torch.Tensor)
                total.update(
                    f"{name} {inner} {tuple(value.shape) if is_tensor else value}".encode()
                )
                if is_tensor:
                    total.update(
                        value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                    )
        found[key] = total.hexdigest()
    return found


def texts(case: dict[str, Any]) -> Iterator[torch.Tensor]:
    """This rank's text of each step."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    whole = torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    ).long()
    for step in range(first := case.get("first", 0), first + case["steps"]):
        generator = torch.Generator().manual_seed(case["ranks"] * step + dist.get_rank())
        starts = torch.randint(
            len(whole) - case["sequence"], (case["micro_batch"],), generator=generator
        )
        yield torch.stack([whole[start : start + case["sequence"]] for start in starts])


def measure(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """The record of a variant's training, with its digests if it is saved; or the digests of
    what was loaded.
    """
    from coat_dist.optim import param_groups

    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = sharded(case, device)
    if case.get("begin"):
        # Into its parameters.
        dcp.load(torch_states.get_model_state_dict(model), checkpoint_id=case["begin"])
    build = candidates()[case["variant"].removesuffix(LAYERS)]
    groups = param_groups(model, 0.1)
    if "CoatAdamW" not in case["variant"]:
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups]
    optimizer = on_shards(groups, build) if "bitsandbytes" in case["variant"] else build(groups)
    if case.get("load"):
        held = states(model, optimizer)
        dcp.load(held, checkpoint_id=case["folder"])
        loaded = {"model_state_dict": held["model"], "optim_state_dict": held["optimizer"]}
        torch_states.set_state_dict(model, optimizer, **loaded)
        yield digests(model, optimizer)
        return
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / WARM_UP))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
        return loss

    tokens = case["micro_batch"] * case["sequence"]
    found = timed_steps(step, (text.to(device) for text in texts(case)), tokens, WARM_UP, device)
    yield found | {"state_bytes_per_parameter": state_bytes(optimizer, list(model.parameters()))}
    if "save_weights" in case:
        dcp.save(torch_states.get_model_state_dict(model), checkpoint_id=case["save_weights"])
    if "folder" in case:
        began = time.perf_counter()
        dcp.save(states(model, optimizer), checkpoint_id=case["folder"])
        yield {"save_s": time.perf_counter() - began, **digests(model, optimizer)}


def compare(one: dict[str, Any], base: dict[str, Any]) -> None:
    """Add ratios and gaps of losses to those of another variant, and print them."""
    for step in one["steps"]:
        other = (base["steps"] or one["steps"])[0]
        last, last_other = fmean(step["losses"][-20:]), fmean(other["losses"][-20:])
        step["tokens_per_second_ratio"] = (
            step["tokens_per_second_per_gpu"] / other["tokens_per_second_per_gpu"]
        )
        step |= {"last_twenty": last, "last_twenty_gap": last / last_other - 1}
        step["mean_gap"] = sum(step["losses"]) / sum(other["losses"]) - 1
        step["largest_loss_gap"] = loss_gaps(step["losses"], other["losses"])["largest_loss_gap"]
        show(
            one["variant"],
            step,
            tokens_per_second_per_gpu=",.0f",
            tokens_per_second_ratio=".3f",
            peak_gib=".1f",
            state_bytes_per_parameter=".2f",
            last_twenty=".4f",
            last_twenty_gap="+.3%",
            mean_gap="+.3%",
            largest_loss_gap=".3%",
        )
    if ends := {k: v for k, v in one.items() if k not in ("variant", "steps")}:
        print(ends, flush=True)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__, ranks=2, sequence=2048, micro_batch=4, steps=200, limit=300.0, name="fsdp"
    )
    parser.add_argument("--model", choices=list(MODELS), default="llama-1b")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="NAME")
    parser.add_argument(
        "--trunk",
        type=int_from_0,
        default=100,
        metavar="STEPS",
        help="of torch's AdamW, before variants",
    )
    return parser.parse_args(given)


def checkpoint_of(variant: str, folder: str, go: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Whether one rank loads the bytes that all ranks of a small model saved, and how long saving
    took.
    """
    small = SMALL | {"folder": f"{folder}/{variant}"}
    saved = go(variant, **small)
    loaded = go(variant, **small, load=True, ranks=1)
    found: dict[str, Any] = {}
    digests = []
    for end in (saved, loaded):
        digests.append(end["steps"][-1] if end["steps"] else {})
        if "error" in end:
            found.setdefault("checkpoint_error", end["error"])
    first, second = digests
    for key in ("weights", "states"):
        found[f"same_{key}"] = key in first and first[key] == second.get(key)
    return found | {"save_s": first.get("save_s")}


def main() -> None:
    arguments = parse()
    case = options(arguments, "variants", "limit", "trunk")
    case["sizes"] = [arguments.micro_batch]
    found, installed = [], candidates()

    def go(variant: str, **more: Any) -> dict[str, Any]:
        own = case | {"variant": variant} | more
        return run_variant(own, arguments.limit, "benchmarks.speed.fsdp")

    with tempfile.TemporaryDirectory() as folder:
        begin = None
        if arguments.trunk:
            begin = f"{folder}/trunk"
            before = go(VARIANTS[0], steps=arguments.trunk, save_weights=begin)
            if not before["steps"]:
                sys.exit(f"error: no trunk: {before}")
            losses = before["steps"][0]["losses"]
            print(f"{arguments.trunk} steps before: loss {losses[0]:.4f} to {losses[-1]:.4f}")
        variants = [v for v in arguments.variants if v.removesuffix(LAYERS) in installed]
        for variant in variants:
            print(f"== {variant}", flush=True)
            one = go(variant, begin=begin, first=arguments.trunk)
            if "CoatAdamW" in variant and variant == variants[-1]:
                one |= checkpoint_of(variant, folder, go)
            found.append(one)
            compare(one, found[0])
            result = {"settings": options(arguments), "variants": found}
            write_result(f"speed/{arguments.name}", result, arguments.output, nan=True)


if __name__ == "__main__":
    as_rank(measure)
    main()
