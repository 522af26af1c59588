"""A cluster that obeys a known cost model: what ``measured.json`` would hold of it, and the truth to compare with."""

import numpy as np

from launch.model.gpt import load_model_config
from launch.planning.run import Run
from launch.planning.search import with_block, without_block
from launch.scale.links import KINDS, Group, Link, Network, hops, share
from launch.scale.traffic import data_parallel
from launch.training.settings import load_settings

MICRO, SIZES = 2, tuple(2**k for k in range(12, 29, 4))


class Cluster:
    """Nodes of ``node`` ranks, latencies and bandwidths that are known, relative noise of every measurement."""

    def __init__(self, shape="ring", latency=8e-6, bandwidth=100e9, shows=0.6, noise=0.01, node=8, seed=0):
        self.shape, self.link = shape, Link("truth", bandwidth, latency)
        self.shows, self.noise, self.node = shows, noise, node
        self.random = np.random.default_rng(seed)
        settings, coat = load_settings("zero2", tp=1)
        self.model = load_model_config("llama2-7b", ["num_layers=4"])
        run = Run(model=self.model, settings=settings, coat=coat, micro=MICRO)
        self.runs = {"coat": with_block(run), "bf16": without_block(run)}
        self.micro, self.update = {"coat": 0.06, "bf16": 0.1}, 0.02

    def collective(self, kind, ranks, size):
        return hops(kind, ranks, self.shape) * self.link.latency + size * share(kind, ranks) / self.link.bandwidth

    def step(self, variant, ranks, accumulation):
        parts = data_parallel(self.runs[variant].but(dp=ranks, accumulation=accumulation))
        sent = sum(part.count * self.collective(part.kind, ranks, part.size) for part in parts)
        return accumulation * self.micro[variant] + self.update / ranks + self.shows * sent

    def _seen(self, seconds):
        return float(seconds * np.exp(self.random.normal(0, self.noise)))

    def measured(self, *sizes):
        """What the program would write."""
        records = []
        for ranks in sizes:
            about = {"ranks": ranks, "a_node": min(ranks, self.node)}
            if ranks > 1:
                samples = [
                    {"kind": k, "ranks": n, "size": s, "seconds": self._seen(self.collective(k, n, s))}
                    for k in KINDS
                    for n in (2 if k == "p2p" else ranks,)
                    for s in SIZES
                ]
                key = {"what": "collectives", "group": list(range(ranks)), "sizes": []}
                records.append({"key": key, **about, "samples": samples, "overlaps": [], "missing": {}})
            for variant in self.runs:
                key = {"what": "training", "variant": variant, "most": max(sizes), "strong": True}
                steps = [
                    {"accumulation": a, "seconds": [self._seen(self.step(variant, ranks, a)) for _ in range(8)]}
                    for a in sorted({1, 2, max(sizes) // ranks})
                ]
                records.append({"key": key, **about, "steps": steps, "peak_memory_bytes": 2**30})
        identity = {
            "model_name": "llama2-7b", "model": self.model.model_dump(exclude_defaults=True, mode="json"),
            "settings": {name: dict(run.settings) for name, run in self.runs.items()}, "options": [],
            "tensor_parallel": 1, "micro_batch": MICRO, "accumulation": 1, "world": max(sizes), "nodes": 1,
            "gpus_per_node": self.node, "device": "known GPU", "backend": "nccl", "cores": 2, "threads": 1,
            "versions": {"torch": "2"},
        }  # fmt: skip
        return {"format": 1, "identity": identity, "records": records}


def two_links():
    """A network of nodes of 8 with round numbers."""
    return Network(Link("nvlink", 200e9, 1e-6), Link("nic", 50e9, 10e-6), 8), Group
