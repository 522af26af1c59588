"""What the planner needs to know of a run; nothing of it needs a device, data or Megatron."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from coat_dist import CoatConfig, CoatConfigError
from coat_dist.config import ActivationConfig
from launch.common.settings import look_up
from launch.model.model_config import ModelConfig
from launch.model.sizes import parameter_shapes

_DIVIDED = re.compile(
    r"word_embeddings|output_layer|linear_qkv|linear_fc1|linear_(proj|fc2)\.weight"
)
"""Parameters of which each tensor-parallel rank has a part; with ``qk_norm`` "full" also those
of :data:`_QK_NORM`.
"""
_QK_NORM = re.compile(r"\.[qk]_layernorm\.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One configuration of one model on so many GPUs."""

    model: ModelConfig
    settings: Mapping[str, Any]  # the DeepSpeed configuration
    coat: CoatConfig | None
    dp: int = 1  # data-parallel ranks
    tp: int = 1
    sequence_parallel: bool = False
    micro: int = 1  # samples of a forward pass on one rank
    accumulation: int = 1
    # Arguments of Megatron's ``TransformerConfig``.
    recompute: Mapping[str, Any] = field(default_factory=dict)
    library: Any = None  # ``paper.OnPaper`` of a model that transformers builds

    def __post_init__(self) -> None:
        if (experts := self.model.num_moe_experts) is not None:
            raise CoatConfigError(
                f"--model: got a model with {experts} experts, accepted: one without (what experts "
                "keep depends on the tokens that are routed to them)"
            )

    @classmethod
    def of_plan(cls, p: Any, library: Any = None) -> Run:
        """What the planner needs of a ``launch.train`` plan; CoatConfigError names a key that it
        cannot plan.
        """
        if (stages := p.args.pipeline_parallel) > 1:
            raise CoatConfigError(
                f"--pipeline-parallel: got {stages}, accepted: 1 with --dry-run and --micro-batch "
                "auto (the planner knows runs of one stage)"
            )
        recompute = p.recompute
        if library is not None and p.coat is not None and p.coat.activation.recompute is not None:
            recompute = {"recompute_num_layers": p.coat.activation.recompute}
        return cls(
            model=p.model,
            settings=p.settings,
            coat=p.coat,
            dp=p.dp,
            tp=p.args.tensor_parallel,
            sequence_parallel=p.args.sequence_parallel,
            micro=p.batch.micro,
            accumulation=p.batch.accumulation,
            recompute=recompute,
            library=library,
        )

    def get(self, key: str) -> Any:
        """A value of the DeepSpeed configuration by its dotted key."""
        return look_up(self.settings, key)

    def zero(self, key: str, default: int) -> int:
        """A number or flag of ``zero_optimization``."""
        given = self.get(f"zero_optimization.{key}")
        return default if given is None else int(given)

    @property
    def flow(self) -> ActivationConfig | None:
        """Settings of the FP8 flow; None where layers are BF16."""
        if self.coat is None or not self.coat.activation.enabled:
            return None
        return self.coat.activation

    @property
    def bf16_layers(self) -> set[int]:
        """Indices of layers that the flow leaves in BF16."""
        n = self.model.num_layers
        return set(range(n)) if self.flow is None else {i % n for i in self.flow.bf16_layers}

    @property
    def by_library(self) -> Any:
        """What transformers saves of one sequence: ``paper.Saved``."""
        return self.library.saved(self.flow, self.model.seq_length)

    @property
    def frozen(self) -> int:
        """Bytes of weights on this rank that do not train."""
        if self.library is None or not self.library.lora:
            return 0
        return self.by_library.frozen // (self.dp if self.stage == 3 else 1)

    @property
    def chunked(self) -> bool:
        """Whether the loss is computed in chunks of logits."""
        if self.flow is None or self.library is None:
            return self.flow is not None and self.flow.loss != "plain"
        return self.by_library.chunked

    @property
    def fp8_moments(self) -> bool:
        return self.get("optimizer.type") == "CoatAdamW"

    @property
    def remainder(self) -> bool:
        """Whether master weights are bfloat16 weights and remainders."""
        given = self.get("optimizer.params.master_weights")
        return "bf16_remainder" in (given, self.coat and self.coat.optimizer.master_weights)

    @property
    def hosted(self) -> bool:
        """Whether moments and remainders of matrices are in host memory."""
        return self.fp8_moments and self.get("zero_optimization.offload_optimizer.device") == "cpu"

    @property
    def stage(self) -> int:
        return self.zero("stage", 0)

    @property
    def overlap(self) -> bool:
        """Whether gradients are reduced on a stream of their own."""
        return bool(self.zero("overlap_comm", self.stage == 3))

    @property
    def fp32_gradients(self) -> bool:
        return self.get("data_types.grad_accum_dtype") in ("fp32", "float32", "float")

    @property
    def fp32_gradients_whole(self) -> bool:
        """Whether every rank sums all gradients in fp32: DeepSpeed's ``BF16_Optimizer``, ZeRO-1
        with such sums.
        """
        return self.stage == 1 and self.fp32_gradients

    @property
    def tokens(self) -> int:
        """Tokens of a forward pass on one rank, before sequence parallelism shares them."""
        return self.micro * self.model.seq_length

    @property
    def shared(self) -> int:
        """Ranks over which the residual stream is shared."""
        return self.tp if self.sequence_parallel else 1


class Parameter(NamedTuple):
    """A parameter as one rank holds it before ZeRO shards it."""

    name: str
    numel: int
    matrix: bool
    layer: int | None = None
    experts: int = 0
    """Experts whose weights it holds together."""

    def within(self, prefixes: tuple[str, ...]) -> bool:
        """Whether its name within the layer begins with one of these."""
        return self.name.split(".", 3)[3].startswith(prefixes)


def parameters(run: Run) -> list[Parameter]:
    """The parameters of one tensor-parallel rank, in the order of the model."""
    shapes = parameter_shapes(run.model) if run.library is None else run.library.shapes
    found = []
    for name, shape in shapes.items():
        divided = _DIVIDED.search(name) or (run.model.qk_norm == "full" and _QK_NORM.search(name))
        layer = int(name.split(".")[2]) if ".layers." in name else None
        numel = prod(shape) // (run.tp if divided else 1)
        experts = shape[0] if ".experts." in name and len(shape) > 2 else 0
        found.append(Parameter(name, numel, len(shape) > 1, layer, experts))
    return found
