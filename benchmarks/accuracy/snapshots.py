"""Moments of a real training run, and how far encodings of them change the optimizer's update.

Written for `benchmarks/accuracy/moments.py`. m and v are the first and the second moment, as in the formulas of the
paper and in the results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from benchmarks.accuracy.encodings import Encoding
from benchmarks.small_gpt import BETAS, GPT, Shape, fp32_adamw, train

__all__ = ["EPS", "EXACT", "Snapshot", "Study", "capture"]

EPS = 1e-8
SHARES = (0.04, 0.2, 0.5, 0.99)
"""Of the steps of training, those after which a snapshot is taken."""
EXACT = Encoding(lambda x: x, 4.0)
METRICS = ("table1", "next", "table1_no_embedding", "next_no_embedding")
MOMENTS = {"m": "first_moment", "v": "second_moment"}


class Snapshot(NamedTuple):
    """Moments after one step and the gradient of the next step, each fp32 [n]: all matrices one after the other, the
    embedding first; ``bounds`` are the offsets where a matrix ends."""

    first_moment: torch.Tensor
    second_moment: torch.Tensor
    gradient: torch.Tensor
    bounds: list[int]


def capture(steps: int, tokens: torch.Tensor, seed: int = 0, lr: float = 3e-3) -> dict[int, Snapshot]:
    """Train for ``steps`` steps with fp32 AdamW; {step: Snapshot} at the steps of :data:`SHARES`."""
    shape = Shape()
    model = GPT(shape, seed).to(tokens.device)
    optimizer = fp32_adamw(model)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    bounds = torch.tensor([p.numel() for p in matrices]).cumsum(0).tolist()
    wanted = {max(1, min(steps - 1, round(steps * share))) for share in SHARES}
    moments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    taken: dict[int, Snapshot] = {}

    def after_step(step: int) -> None:
        if step - 1 in moments:
            gradient = torch.cat([_flat(p.grad) for p in matrices])
            taken[step - 1] = Snapshot(*moments.pop(step - 1), gradient, bounds)
        if step in wanted:
            states = [optimizer.state[p] for p in matrices]
            m, v = (torch.cat([_flat(s[key]) for s in states]) for key in ("exp_avg", "exp_avg_sq"))
            moments[step] = m, v

    train(model, optimizer, tokens, shape, steps=steps, seed=seed, lr=lr, after_step=after_step)
    return taken


def _flat(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None  # every matrix takes part in every step
    return x.detach().reshape(-1)


class Study:
    """Errors of encodings over snapshots."""

    def __init__(self, snapshots: dict[int, Snapshot]) -> None:
        self.snapshots = snapshots
        self._kept: dict[str, list[torch.Tensor]] = {}

    def decoded(self, which: str, encoding: Encoding, keep: str | None = None) -> list[torch.Tensor]:
        """Moment ``which`` ("m" or "v") of each snapshot, encoded and decoded matrix by matrix.

        With a name in ``keep`` it is kept under that name, and not computed again.
        """
        key = f"{which} {keep}"
        if key in self._kept:
            return self._kept[key]
        out = []
        for s in self.snapshots.values():
            parts = getattr(s, MOMENTS[which]).tensor_split(s.bounds[:-1])
            out.append(torch.cat([encoding.round_trip(part) for part in parts]))
        if keep:
            self._kept[key] = out
        return out

    def errors(self, ms: list[torch.Tensor], vs: list[torch.Tensor]) -> dict[str, float]:
        """Relative mean square errors of the two metrics, over all matrices and without the embedding."""
        total = dict.fromkeys(METRICS, 0.0)
        for s, m, v in zip(self.snapshots.values(), ms, vs, strict=True):
            pairs = {
                "table1": (_update(m, v), _update(s.first_moment, s.second_moment)),
                "next": (
                    _update(*_after(m, v, s.gradient)),
                    _update(*_after(s.first_moment, s.second_moment, s.gradient)),
                ),
            }
            for name, (got, exact) in pairs.items():
                for metric, first in ((name, 0), (f"{name}_no_embedding", s.bounds[0])):
                    square = (got[first:] - exact[first:]).double().square().mean()
                    total[metric] += (square / exact[first:].double().square().mean()).item() / len(self.snapshots)
        return total

    def pair(self, name: str, m: Encoding, v: Encoding) -> dict[str, Any]:
        """A row of the result: errors of a pair, B/param, and how many non-zero second moments became zero."""
        ms, vs = self.decoded("m", m), self.decoded("v", v)
        lost = [
            ((new == 0) & (s.second_moment >= 2.0**-126)).double().mean()
            for new, s in zip(vs, self.snapshots.values(), strict=True)
        ]
        row = {"name": name, "bytes": round(m.bytes + v.bytes, 4), "v_lost": max(lost).item(), **self.errors(ms, vs)}
        print(
            f"{name:<44} {row['bytes']:.3f} B  "
            + "  ".join(f"{row[k]:.3e}" for k in METRICS)
            + f"  {row['v_lost']:.1e}",
            flush=True,
        )
        return row

    def sweep(self, which: str, make: Any, ranges: list[float]) -> dict[str, Any]:
        """Error over the range of one moment's encoding while the other moment stays exact."""
        exact = {"m": self.decoded("m", EXACT, "exact"), "v": self.decoded("v", EXACT, "exact")}
        rows = []
        for log2_range in ranges:
            exact_or_not = {**exact, which: self.decoded(which, make(log2_range))}
            rows.append({"log2_range": log2_range, **self.errors(exact_or_not["m"], exact_or_not["v"])})
        return {"moment": which, "rows": rows, "best": min(rows, key=lambda r: r["table1"])["log2_range"]}


def _after(m: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments after one more step."""
    beta1, beta2 = BETAS
    return beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2


def _update(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What a step takes from a parameter, over the learning rate."""
    return m / (v.sqrt() + EPS)
