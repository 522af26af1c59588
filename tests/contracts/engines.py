"""Kinds of engines that save and load, by name, and what their groups hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from coat_dist.reference.master import split
from tests.coat_dist.deepspeed.small_engine import FP32, REMAINDERS
from tests.coat_dist.deepspeed.zero_runs import BUCKETS

STAGES, DP, TP = (1, 2, 3), (1, 2, 4), (1, 2)
HALVES = {"master_weights": "bf16_remainder"}
# Whole shape and the dimension that tensor parallelism divides. "a": rows of 128 elements at every
# layout; "o": of no layout. One element: most ranks' shards of its group are padding.
SHAPES = {
    "a_column": ((64, 64), 0),
    "a_row": ((32, 128), 1),
    "a_replicated": ((16, 64), None),
    "o_column": ((14, 17), 0),
    "o_row": ((13, 10), 1),
    "o_replicated": ((3, 7), None),
    "scale": ((1,), None),
    "vector": ((5,), None),
    "frozen": ((4, 6), 0),
}


@dataclass(frozen=True)
class Kind:
    """An engine, and the processes that it runs in."""

    stage: int = 2
    dp: int = 2
    tp: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    """Keys of "zero_optimization" besides."""
    config: dict[str, Any] = field(default_factory=dict)
    """Other keys of the configuration."""
    coat: dict[str, Any] | None = field(default_factory=dict)
    """The block's "optimizer"; None: plain DeepSpeed with torch's AdamW."""
    given: bool = False
    """The program gives its own optimizer instead of naming it in the configuration."""

    @property
    def processes(self) -> tuple[int, int]:
        return self.dp, self.tp

    @property
    def remainders(self) -> bool:
        return (self.coat or {}).get("master_weights") == "bf16_remainder"

    def rounded(self, master: torch.Tensor) -> torch.Tensor:
        """What a bfloat16 weight is, given its fp32 master weight."""
        return split(master)[0] if self.remainders else master.bfloat16()


def layout(stage: int, dp: int, tp: int) -> str:
    return f"z{stage}d{dp}t{tp}"


KINDS = {
    layout(s, d, t): Kind(s, d, t, config={} if s == 1 else FP32)
    for t in TP
    for d in DP
    for s in STAGES
}
KINDS |= {
    "BF16_Optimizer": Kind(1, config=FP32),
    "round robin": Kind(1, zero={"round_robin_gradients": True}),
    "bf16 sums, overlap, scattered, round robin": Kind(
        2,
        zero={
            "overlap_comm": True,
            "contiguous_gradients": False,
            "round_robin_gradients": True,
        },
    ),
    "sub-groups": Kind(3, zero={"sub_group_size": 1000}),
    "remainders, stage 2": Kind(2, config=REMAINDERS, coat=HALVES),
    "remainders, stage 2, round robin": Kind(
        2, zero={"round_robin_gradients": True}, config=REMAINDERS | FP32, coat=HALVES
    ),
    "remainders, stage 3": Kind(3, config=REMAINDERS, coat=HALVES),
    "remainders, persistent sub-groups": Kind(
        3,
        zero={"sub_group_size": 5000, "stage3_param_persistence_threshold": 100_000},
        config=REMAINDERS,
        coat=HALVES,
    ),
    "m by itself, stage 2": Kind(2, config=FP32, coat={"normalize": False}),
    "m by itself, stage 3": Kind(3, coat={"normalize": False}),
    "groups of 64": Kind(1, coat={"group_size": 64}),
    "stochastic": Kind(2, config=FP32, coat={"stochastic_rounding": True}),
    "int8 and log8": Kind(3, coat={"first_moment": "int8", "second_moment": "log8"}),
    "fp32, stage 0": Kind(0, 1, config={"bf16": {"enabled": False}}),
    "fp32, stage 2": Kind(2, 1, config={"bf16": {"enabled": False}}),
    "torch's older format": Kind(
        2, 1, config=FP32 | {"checkpoint": {"checkpoint_serialization": False}}
    ),
    "the program's CoatAdamW": Kind(2, 1, given=True),
    "AdamW, stage 1": Kind(1, coat=None),
    "AdamW, stage 3, one rank": Kind(3, 1, coat=None),
}


def cut(name: str, whole: torch.Tensor, tp_rank: int, tp: int) -> torch.Tensor:
    """A tensor-parallel rank's part; buffers are whole."""
    dim = SHAPES.get(name, (None, None))[1]
    return whole if dim is None else whole.chunk(tp, dim)[tp_rank].contiguous()


class Model(torch.nn.Module):
    """Every element has a target of its own, so tensor-parallel shards need no communication."""

    def __init__(self, tp_rank: int, tp: int) -> None:
        super().__init__()
        self.tp_rank, self.tp = tp_rank, tp
        for name, (shape, dim) in SHAPES.items():
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
            p = torch.nn.Parameter(cut(name, whole, tp_rank, tp), requires_grad=name != "frozen")
            p.tensor_model_parallel, p.partition_dim = dim is not None, dim
            self.register_parameter(name, p)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        loss = torch.zeros(())
        for name, (shape, _) in SHAPES.items():
            target = cut(name, torch.randn(shape, generator=generator), self.tp_rank, self.tp)
            if name != "frozen":
                loss = loss + (getattr(self, name).float() - target).square().sum()
        return loss


def start(tp: int) -> Any:
    """Process groups; called once in a process."""
    from megatron_patches import MPUAdapter, initialize_model_parallel

    initialize_model_parallel(tp)
    return MPUAdapter()


def build(kind: Kind, mpu: Any, universal: bool = False) -> Any:
    """An engine of this kind, around a model that nothing has trained."""
    from tests.coat_dist.deepspeed.small_engine import quiet_deepspeed

    deepspeed = quiet_deepspeed()
    import coat_dist
    from coat_dist.checkpoint.universal.load import enable_universal_load
    from megatron_patches import universal_checkpoint_info

    model = Model(mpu.get_tensor_model_parallel_rank(), kind.tp)
    model.universal_checkpoint_info = universal_checkpoint_info(model)
    ours = kind.coat is not None
    groups: list[dict[str, Any]] = [
        {"params": [model.a_column, model.a_row, model.a_replicated]},
        {"params": [model.o_column, model.o_row], "lr": 0.02},
        # Never in one 128-element group with tensor-parallel shards.
        {"params": [model.o_replicated]},
        {"params": [model.scale], "weight_decay": 0.0},
        {"params": [model.vector], **({"moments": "fp32"} if ours else {})},
    ]
    zero = BUCKETS | {"stage": kind.stage, "stage3_param_persistence_threshold": 0} | kind.zero
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero if kind.stage else {"stage": 0},
        **kind.config,
    }
    if universal:
        config["checkpoint"] = {"load_universal": True}
    if not ours:
        engine = deepspeed.initialize(
            model=model,
            model_parameters=groups,
            optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
            config=config | {"zero_allow_untested_optimizer": True},
            mpu=mpu,
        )[0]
        enable_universal_load(engine)
        return engine
    options: dict[str, Any] = {"model_parameters": groups}
    if kind.given:
        options = {"optimizer": coat_dist.CoatAdamW(groups, lr=0.01)}
    else:
        config = {"optimizer": {"type": "CoatAdamW", "params": {"lr": 0.01}}} | config
        config["coat"] = {"optimizer": kind.coat, "activation": {"enabled": False}}
    return coat_dist.initialize(model=model, config=config, mpu=mpu, **options)[0]


def train(engine: Any, mpu: Any, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(
            engine(
                1000 * step + 10 * engine.zero_optimization_stage() + mpu.get_data_parallel_rank()
            )
        )
        engine.step()


def stepped(engine: Any) -> Any:
    """The optimizer that steps: inside of ZeRO's, or itself."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def codes(engine: Any) -> dict[tuple[str, str, int], torch.Tensor]:
    """This rank's groups of the parameters "a": {(parameter, key, index of the group in the
    parameter): bytes}.
    """
    from coat_dist.checkpoint.zero_partitions import partitions

    found = {}
    for part in partitions(engine.optimizer):
        size = part.group.get("group_size", 128)
        for f in part.fragments:
            name = engine.param_names[f.param]
            if not name.startswith("a_"):
                continue
            assert f.first % 128 == f.start % 128 == f.numel % 128 == 0, (name, f)
            for key, value in stepped(engine).state[part.flat].items():
                if key.startswith("coat_") and isinstance(value, torch.Tensor):
                    for i in range(f.numel // size):
                        row = value[f.start // size + i].clone()
                        found[name, key, f.first // size + i] = row
    return found


def unlinked(engine: Any) -> list[str]:
    """Parameters whose fp32 moments DeepSpeed would hand out from a state of before."""
    kept = set()
    for state in stepped(engine).state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                kept.add(value.untyped_storage().data_ptr())
    wrong = []
    for name, p in engine.module.named_parameters():
        mapping = getattr(p, "_hp_mapping", None)
        for value in {} if mapping is None else mapping.optim_fragment.values():
            if value.untyped_storage().data_ptr() not in kept:
                wrong.append(f"{name} is linked to a state of before")
    return wrong
