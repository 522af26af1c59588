"""Collectives of tensor-parallel ranks in a layer: how many, and of how many bytes.

    torchrun --nproc_per_node 2 -m benchmarks.speed.collectives [--presets llama2-13b \\
        llama3-8b] [--tokens 16384]

Runs Megatron layers with sequence parallelism, as BF16 and patched. Collectives are counted as
torch.distributed dispatches them, so that nothing is left out; their bytes are those of the whole
tensor: what a gather makes, what a reduction reads. ``step.py`` says how long they take.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.arguments import argument_parser, check_multiples
from benchmarks.common import options, write_result
from benchmarks.speed.layer import SEQUENCE, VARIANTS, stack
from coat_dist import CoatConfig
from coat_dist.flow.core import products
from coat_dist.flow.parallel.peer_memory import PeerMemory
from launch.model.gpt import load_model_config
from megatron_patches import initialize_model_parallel, patched

KINDS = {
    "_allgather_base_": "gather",
    "allgather_": "gather",
    "allgather_into_tensor_coalesced_": "gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "sum",
    "allreduce_coalesced_": "sum",
    "broadcast_": "broadcast",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}
"""torch.distributed's operations by what they do; an all-reduce for a maximum is called "max"."""
COPIES = " by copies"
"""Marks what :mod:`coat_dist.flow.parallel.peer_memory` moves."""


NCCL_ONLY = " over NCCL"
TP_VARIANTS = [*VARIANTS, *(name + NCCL_ONLY for name in VARIANTS)]
"""What can be measured: the variants of ``layer.py``, and each without memory that ranks read
from each other.
"""


@contextmanager
def variant(gpt: torch.nn.Module, name: str) -> Iterator[None]:
    """The layers patched as one of :data:`TP_VARIANTS` says."""
    settings = CoatConfig.parse({"activation": VARIANTS[name.removesuffix(NCCL_ONLY)]}).activation
    way = {"COAT_PEER_MEMORY": "0"} if name.endswith(NCCL_ONLY) else {}
    with mock.patch.dict(os.environ, way), patched(gpt, settings):
        yield


class Collective(NamedTuple):
    """One call: what it does, bytes of its whole tensor, and the largest tensor's dtype."""

    kind: str
    nbytes: int
    dtype: str


class recorded(TorchDispatchMode):  # noqa: N801 - used as a context
    """Collectives that are called inside, backward's too, in order: ``with recorded() as seen``
    gives their list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []
        self._maximum = False
        self._all_reduce = dist.all_reduce

    def __enter__(self) -> list[Collective]:
        super().__enter__()
        gather, product = PeerMemory.gather, products.scattered_product

        def noting_gather(peers: PeerMemory, tensors: list[torch.Tensor]) -> Any:
            self._note(
                "gather" + COPIES, peers.size * sum(t.nbytes for t in tensors), tensors[0].dtype
            )
            return gather(peers, tensors)

        def noting_product(
            peers: PeerMemory, a: Any, multiply: Any, n: int, dtype: torch.dtype
        ) -> Any:
            self._note("reduce-scatter" + COPIES, a.codes.shape[0] * n * dtype.itemsize, dtype)
            return product(peers, a, multiply, n, dtype)

        self._patches = ExitStack()
        self._patches.enter_context(mock.patch.object(dist, "all_reduce", self._noting_maximum))
        self._patches.enter_context(mock.patch.object(PeerMemory, "gather", noting_gather))
        self._patches.enter_context(
            mock.patch.object(products, "scattered_product", noting_product)
        )
        return self.seen

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _note(self, kind: str, nbytes: int, dtype: torch.dtype) -> None:
        self.seen.append(Collective(kind, nbytes, str(dtype).removeprefix("torch.")))

    def _noting_maximum(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *rest: Any, **named: Any
    ) -> Any:
        """``all_reduce``; what is dispatched holds the operation in an object that Python cannot
        open.
        """
        self._maximum = op == dist.ReduceOp.MAX
        try:
            return self._all_reduce(tensor, op, *rest, **named)
        finally:
            self._maximum = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen.append(_collective(func, args, self._maximum))
        return func(*args, **(kwargs or {}))


def _collective(func: Any, args: Sequence[Any], maximum: bool) -> Collective:
    name = func._schema.name.split("::")[1]
    kind = "max" if maximum else KINDS.get(name, name)
    outputs = list(_tensors(args[0])) if args else []
    inputs = list(_tensors(args[1])) if len(args) > 1 else []
    whole = max(outputs, inputs, key=lambda ts: sum(t.nbytes for t in ts))
    largest = max(whole, key=lambda t: t.nbytes, default=None)
    dtype = "" if largest is None else str(largest.dtype).removeprefix("torch.")
    return Collective(kind, sum(t.nbytes for t in whole), dtype)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def table(seen: Sequence[Collective], layers: int = 1) -> list[dict[str, Any]]:
    """Equal collectives together: ``{"kind", "dtype", "bytes", "count"}``, the count a layer,
    large ones first.
    """
    rows = [{**one._asdict(), "count": n / layers} for one, n in Counter(seen).items()]
    return sorted(
        ({"bytes": r.pop("nbytes"), **r} for r in rows), key=lambda r: (-r["bytes"], r["kind"])
    )


def count(forward: Callable[[], torch.Tensor], layers: int) -> dict[str, Any]:
    """Collectives of one forward and one backward, a layer, and the sum of gathered bytes."""
    with recorded() as first:
        y = forward()
    dy = torch.ones_like(y)
    with recorded() as second:
        y.backward(dy)
    gathered = sum(c.nbytes for c in (*first, *second) if c.kind.startswith("gather"))
    return {
        "forward": table(first, layers),
        "backward": table(second, layers),
        "calls": (len(first) + len(second)) / layers,
        "gathered_bytes": gathered / layers,
    }


def show(name: str, one: dict[str, Any]) -> None:
    """Print one variant's collectives."""
    print(f"{name}: {one['calls']:g} collectives a layer, {one['gathered_bytes']:,.0f} B gathered")
    for part in ("forward", "backward"):
        rows = [f"{r['count']:g} x {r['kind']} {r['bytes']:,} B {r['dtype']}" for r in one[part]]
        print(f"  {part}: {'; '.join(rows) or 'none'}")


def start_ranks() -> int:
    """Join the ranks of torchrun, on GPUs where there are any; the number of ranks."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if gpu else "gloo")
    initialize_model_parallel(dist.get_world_size(), create_gloo_process_groups=False)
    return dist.get_world_size()


def measure(
    preset: str,
    tokens: int,
    sequence: int,
    variants: Sequence[str],
    layers: int,
    overrides: Sequence[str],
):
    """Collectives of one model's layers on all ranks, by variant."""
    ranks = dist.get_world_size()
    model = load_model_config(preset, [f"num_layers={layers}", *overrides])
    forward, gpt, _ = stack(model, tokens, ranks, sequence)

    def one() -> dict[str, Any]:
        forward().sum().backward()
        return count(forward, layers)

    found = {"bf16": one()}
    for name in variants:
        with variant(gpt, name):
            found[name] = one()
    return found


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__,
        presets=["llama2-13b", "llama3-8b"],
        tokens=16384,
        sequence=SEQUENCE,
        layers=4,
        model_override=[],
        name="collectives",
    )
    parser.add_argument("--variants", nargs="+", default=["coat"], choices=TP_VARIANTS)
    arguments = parser.parse_args(given)
    check_multiples(parser, "--tokens", [arguments.tokens], arguments.sequence)
    return arguments


def main() -> None:
    arguments = parse()
    ranks = start_ranks()
    results = []
    for preset in arguments.presets:
        found = measure(
            preset,
            arguments.tokens,
            arguments.sequence,
            arguments.variants,
            arguments.layers,
            arguments.model_override,
        )
        results.append({"preset": preset, "ranks": ranks, "runs": found})
        if dist.get_rank() == 0:
            print(f"== {preset}, {arguments.tokens} tokens, {ranks} ranks")
            for name, one in found.items():
                show(name, one)
                ratio = one["gathered_bytes"] / found["bf16"]["gathered_bytes"]
                print(f"  gathered bytes: {ratio:.4f} of BF16's", flush=True)
    if dist.get_rank() == 0:
        settings = {"settings": options(arguments), "results": results}
        print("wrote", write_result(f"speed/{arguments.name}", settings, arguments.output))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
