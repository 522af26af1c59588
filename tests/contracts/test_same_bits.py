"""The contract of equal bits: two ways of taking the same steps that must not differ in any bit of
parameters, master weights or states.

A row is the options of an optimizer, two ways, and why they agree. Every run takes six steps on the
same gradients; a way may build, step or replace the optimizer differently.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from coat_dist.optim import CoatAdamW, export_master, host, plan
from tests.coat_dist.optim.common import equal_bytes

SHAPES = {
    "matrix": (16, 16),
    "rows": (13, 20),
    "vector": (128,),
    "odd": (129,),
    "empty": (0,),
    "chunks": (128 * 16 + 5,),
    "small": (48,),
    "tiny": (7,),
    "scalar": (),
}
FP32 = ("small", "tiny", "scalar")
"""Parameters whose moments are fp32."""
STEPS = 6


class Run:
    """Parameters by name and their optimizer, or several optimizers."""

    def __init__(self, options: Mapping[str, Any], order: Callable = list, apart: bool = False):
        halves = options.get("master_weights") == "bf16_remainder"
        dtype = torch.bfloat16 if halves else torch.float32
        self.params = {}
        for i, (name, shape) in enumerate(SHAPES.items()):
            start = torch.randn(shape, generator=torch.Generator().manual_seed(i)).bfloat16()
            self.params[name] = torch.nn.Parameter(start.to(dtype))
        groups = []
        for moments in ("fp8", "fp32"):
            named = [
                (name, p)
                for name, p in order(list(self.params.items()))
                if (name in FP32) == (moments == "fp32")
            ]
            for pairs in [[pair] for pair in named] if apart else [named]:
                groups.append({"params": pairs, "moments": moments})
        options = {"lr": 0.1, "weight_decay": 0.1, **options}
        each = [[group] for group in groups] if apart else [groups]
        self.optimizers = [CoatAdamW(mine, **options) for mine in each]

    def step(self, i: int, gaps: bool) -> None:
        for j, p in enumerate(self.params.values()):
            generator = torch.Generator().manual_seed(100 * i + j)
            grad = (torch.randn(p.shape, generator=generator) ** 3).bfloat16()
            # Parameters of one group then differ in the steps they have taken.
            p.grad = None if gaps and (i + j) % 3 == 0 else grad.to(p.dtype)
        for optimizer in self.optimizers:
            optimizer.step()

    def bits(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, p in zip(group["param_names"], group["params"], strict=True):
                    state = optimizer.state.get(p) or {}
                    found[name] = export_master(p, state)
                    found |= {f"{name} {k}": v for k, v in state.items() if k != "coat_p_low"}
        return found


class Way(NamedTuple):
    """How steps are taken."""

    build: Callable[..., Run] = Run
    between: Callable[[Run, int], Run] = lambda run, i: run
    """Called before each step; gives what is stepped from there on."""
    patch: Callable[[pytest.MonkeyPatch], None] = lambda monkeypatch: None
    options: Mapping[str, Any] = {}


def resumed_from_a_file(run: Run, i: int) -> Run:
    """At half of the steps a new optimizer, which has taken other steps, loads a file."""
    if i != STEPS // 2:
        return run
    file = io.BytesIO()
    (optimizer,) = run.optimizers
    torch.save((optimizer.state_dict(), {n: p.detach() for n, p in run.params.items()}), file)
    file.seek(0)
    saved, weights = torch.load(file)
    again = Run({k: v for k, v in optimizer.defaults.items() if k in OPTIONS})
    again.step(77, False)
    again.optimizers[0].load_state_dict(saved)
    for name, p in again.params.items():
        p.data.copy_(weights[name])
    return again


OPTIONS = (
    *("lr", "betas", "maximize", "first_moment", "second_moment", "normalize", "group_size"),
    *("stochastic_rounding", "master_weights", "state_device", "weight_decay"),
)


def copied(make: Callable[[Any], Any]) -> Callable[[Run, int], Run]:
    return lambda run, i: make(run) if i == STEPS // 2 else run


def rate_in_group(run: Run, i: int) -> Run:
    """A schedule that writes the rate into groups."""
    for group in run.optimizers[0].param_groups:
        rate = 0.1 / (1 + i)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = torch.tensor(rate).item()
    return run


def betas_in_group(run: Run, i: int) -> Run:
    for group in run.optimizers[0].param_groups:
        group["betas"] = (0.9, 0.999 if 2 <= i < 4 else 0.95)
    return run


def moved(run: Run, i: int) -> Run:
    """States and weights are replaced by equal ones elsewhere in memory."""
    (optimizer,) = run.optimizers
    for p in run.params.values():
        p.data = p.data.clone()
        if p in optimizer.state:
            optimizer.state[p] = copy.deepcopy(dict(optimizer.state[p]))
    return run


class Compiled(Run):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        (optimizer,) = self.optimizers
        self.compiled = torch.compile(optimizer.step, backend="eager")

    def step(self, i: int, gaps: bool) -> None:
        (optimizer,), self.optimizers = self.optimizers, []
        super().step(i, gaps)
        self.compiled()
        self.optimizers = [optimizer]


def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.Plans, "learn", lambda *_: None)


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(host, "CHUNK", 16 * 64)
    monkeypatch.setattr(host, "_lanes", {})


def places_change(run: Run, i: int) -> Run:
    """A resident run and a hosted one load each other's state dicts; the place stays."""
    if i == STEPS // 2:
        (optimizer,) = run.optimizers
        saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
        for group in saved["param_groups"]:
            group["state_device"] = "parameter"
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["state_device"] == "cpu"
    return run


PLAIN, HALVES = Way(), {"master_weights": "bf16_remainder"}
HOSTED = Way(patch=small_chunks, options={"state_device": "cpu"})
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "to nearest": {"stochastic_rounding": False},
    "stochastic, maximized": {"stochastic_rounding": True, "maximize": True},
    "int8 and log8": {"first_moment": "int8", "second_moment": "log8", "betas": (0.9, 0.95)},
    "m by itself, groups of 64": {"normalize": False, "group_size": 64},
    "two halves": HALVES,
}
PAIRS = {
    "with plans and without": (PLAIN, Way(patch=no_plans), "a plan takes over what was checked"),
    "resumed": (PLAIN, Way(between=resumed_from_a_file), "a state dict holds all"),
    "deepcopy": (PLAIN, Way(between=copied(copy.deepcopy)), "a copy holds all"),
    "pickle": (
        PLAIN,
        Way(between=copied(lambda run: pickle.loads(pickle.dumps(run)))),
        "a copy holds all",
    ),
    "moved": (PLAIN, Way(between=moved), "a plan sees other addresses"),
    "each alone": (
        PLAIN,
        Way(build=lambda options: Run(options, apart=True)),
        "noise goes by names, bias correction by the parameter's own steps",
    ),
    "reversed": (
        PLAIN,
        Way(build=lambda options: Run(options, order=lambda pairs: pairs[::-1])),
        "noise goes by names",
    ),
    "in host memory": (PLAIN, HOSTED, "chunks are numbered as parts of the whole"),
    "in host memory, copied": (PLAIN, HOSTED._replace(between=copied(copy.deepcopy)), "a copy"),
    "in host memory, loaded": (PLAIN, HOSTED._replace(between=places_change), "a state dict"),
}
ROWS = [
    pytest.param(options, one, other, id=f"{pair}, {variant}: {why}")
    for variant, options in VARIANTS.items()
    for pair, (one, other, why) in PAIRS.items()
]
RATES = Way(between=rate_in_group)
ROWS += [
    pytest.param({}, RATES, RATES._replace(options={"lr": torch.tensor(0.1)}), id="rates"),
    pytest.param({}, PLAIN, Way(build=Compiled), id="torch.compile leaves a step out of its graph"),
    pytest.param(
        {},
        Way(between=betas_in_group),
        Way(between=lambda run, i: betas_in_group(resumed_from_a_file(run, i), i)),
        id="resumed between changes of betas",
    ),
    *(
        pytest.param(options, Way(options=HALVES), PLAIN, id=f"two halves and fp32, {variant}")
        for variant, options in VARIANTS.items()
        if variant != "two halves"
    ),
]


def take(monkeypatch: pytest.MonkeyPatch, options: Mapping[str, Any], way: Way, gaps: bool) -> dict:
    with monkeypatch.context() as patches:
        way.patch(patches)
        run = way.build({**options, **way.options})
        for i in range(STEPS):
            run = way.between(run, i)
            run.step(i, gaps)
        return run.bits()


@pytest.mark.parametrize("gaps", [False, True], ids=["", "gaps"])
@pytest.mark.parametrize(("options", "one", "other"), ROWS)
def test_two_ways_have_the_same_bits(monkeypatch, options, one, other, gaps):
    first, second = (take(monkeypatch, options, way, gaps) for way in (one, other))
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, torch.Tensor):
            assert equal_bytes(value, second[key]), key
        else:
            assert value == second[key], key
