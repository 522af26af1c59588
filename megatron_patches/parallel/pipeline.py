"""Pipeline parallelism under DeepSpeed: Megatron's schedules run a step's micro-batches,
DeepSpeed's ZeRO-1 steps.

The engine of each rank holds one stage (or several chunks of the model, with interleaved stages).
:func:`train_batch` is a whole step: Megatron's schedule, tied embeddings, ZeRO's reduction,
``engine.step()``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import nn

from coat_dist.checkpoint.names import in_whole
from coat_dist.config import CoatConfigError
from coat_dist.deepspeed.parallel.pipeline import accumulate, accumulated, reduce_gradients
from coat_dist.ops.dispatch import use_kernels

from ..patch.blocks import pipelined

ForwardStep = Callable[[Any, Any], tuple[torch.Tensor, Callable[[torch.Tensor], Any]]]


def train_batch(
    engine: Any,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    forward_step_func: ForwardStep,
    *,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    before_step: Callable[[], None] | None = None,
) -> torch.Tensor:
    """One optimizer step: ``gradient_accumulation_steps`` micro-batches through all stages, then
    ``engine.step()``.

    Call it on every rank, in place of ``engine(...)``, ``engine.backward`` and ``engine.step``. It
    also works with one stage, where it does just these.

    Args:
        engine: of :func:`megatron_patches.initialize`.
        data_iterator: gives micro-batches to ``forward_step_func``; None on stages that need none.
            With interleaved stages one for each model chunk, or a single one, whose micro-batches
            every chunk then gets.
        forward_step_func: Megatron's: ``(data_iterator, model) -> (output, loss_func)``.
            ``loss_func(output)`` is the mean loss of a micro-batch, a tuple that begins with it, or
            three values that begin with the sum of losses and the number of tokens. The mean is
            divided by the number of micro-batches here.
        seq_length, micro_batch_size: of the hidden states that stages send one another (default:
            the model's ``max_sequence_length``, and the engine's
            ``train_micro_batch_size_per_gpu``).
        before_step: called when all gradients are there and ``engine.step()`` is about to be
            called.

    Returns:
        Mean loss over the micro-batches of this rank's pipeline: fp64 scalar, on its device, the
            same on all stages.

    Raises:
        CoatConfigError: the schedule would send or drop tensors wrongly; names the field of the
            model's configuration.
    """
    count, chunks = engine.gradient_accumulation_steps(), chunks_of(engine.module)
    run = Losses(forward_step_func, count)
    if not _several_stages():
        iterator = data_iterator[0] if isinstance(data_iterator, Sequence) else data_iterator
        for index in range(count):
            output, loss_func = run.step(iterator, engine)
            engine.backward(loss_func(output)[0])
            if index == count - 1 and before_step is not None:
                before_step()
            engine.step()
        return run.mean(engine)
    tied = _TiedGradient(chunks)
    try:
        run_schedule(
            engine, chunks, data_iterator, run, seq_length, micro_batch_size, forward_only=False
        )
    finally:
        tied.stop_collecting()
    tied.sum()
    reduce_gradients(engine)
    if before_step is not None:
        before_step()
    engine.step()
    return run.mean(engine)


@torch.no_grad()
def eval_batch(
    engine: Any,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    forward_step_func: ForwardStep,
    *,
    num_microbatches: int | None = None,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
) -> torch.Tensor:
    """Mean loss over micro-batches, without gradients; ``engine.eval()`` and ``engine.train()`` are
    the caller's.

    Args:
        num_microbatches: from 1; default ``gradient_accumulation_steps``.
        others: as in :func:`train_batch`, which also says what is returned.
    """
    run = Losses(forward_step_func, num_microbatches or engine.gradient_accumulation_steps())
    if not _several_stages():
        iterator = data_iterator[0] if isinstance(data_iterator, Sequence) else data_iterator
        for _ in range(run.count):
            output, loss_func = run.step(iterator, engine)
            loss_func(output)
        return run.mean(engine)
    run_schedule(
        engine,
        chunks_of(engine.module),
        data_iterator,
        run,
        seq_length,
        micro_batch_size,
        forward_only=True,
    )
    return run.mean(engine)


class Losses:
    """A forward step whose losses are summed."""

    def __init__(self, forward_step: ForwardStep, count: int) -> None:
        self._forward_step, self.count, self._sum = forward_step, count, None

    def step(
        self, data_iterator: Any, model: Any
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        output, loss_func = self._forward_step(data_iterator, model)
        return output, functools.partial(self._loss, loss_func)

    def _loss(
        self, loss_func: Callable[[torch.Tensor], Any], output: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        loss = loss_func(output)
        if isinstance(loss, tuple):
            loss = loss[0] / torch.as_tensor(loss[1]).clamp(min=1) if len(loss) == 3 else loss[0]
        # A copy, as the schedule divides the loss in place.
        value = loss.detach().to(torch.float64, copy=True)
        self._sum = value if self._sum is None else self._sum + value
        return loss, None

    def mean(self, engine: Any) -> torch.Tensor:
        total = (
            torch.zeros((), dtype=torch.float64, device=engine.device)
            if self._sum is None
            else self._sum
        )
        if _several_stages():
            # Zeros, but for one stage.
            dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        return total / self.count


def _several_stages() -> bool:
    return parallel_state.get_pipeline_model_parallel_world_size() > 1


def run_schedule(
    engine: Any,
    chunks: list[nn.Module],
    data_iterator: Any,
    run: Losses,
    seq_length: int | None,
    micro_batch_size: int | None,
    forward_only: bool,
) -> None:
    """Megatron's schedule alone: gradients are left in the parameters, each stage's own part of
    them.
    """
    config = get_model_config(chunks[0])
    _check(config, len(chunks))
    if len(chunks) > 1 and not isinstance(data_iterator, Sequence):
        if data_iterator is None:
            data_iterator = [None] * len(chunks)
        else:
            data_iterator = list(
                itertools.tee(itertools.islice(data_iterator, run.count), len(chunks))
            )
    if seq_length is None:
        seq_length = get_attr_wrapped_model(chunks[0], "max_sequence_length")
    get_forward_backward_func()(
        forward_step_func=run.step,
        data_iterator=data_iterator,
        model=chunks,
        num_microbatches=run.count,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size or engine.train_micro_batch_size_per_gpu(),
        forward_only=forward_only,
    )


def _check(config: Any, chunks: int) -> None:
    if (
        chunks > 1
        and parallel_state.get_pipeline_model_parallel_world_size() == 2
        and not config.overlap_p2p_comm
    ):
        raise CoatConfigError(
            "config.overlap_p2p_comm: got False with two interleaved stages, accepted: True, with "
            "batch_p2p_comm=False "
            "(in one batch, what goes to the next stage and to the one before could not be told "
            "apart)"
        )
    if config.overlap_p2p_comm and config.deallocate_pipeline_outputs:
        raise CoatConfigError(
            "config.deallocate_pipeline_outputs: got True with overlap_p2p_comm, accepted: False "
            "(Megatron's schedule "
            "would drop outputs while they are being sent, and stages would receive other numbers)"
        )


class _TiedGradient:
    """The gradient of an embedding that the first stage reads and the last multiplies with, summed
    over both copies.

    It is taken after the last micro-batch; in definitions (``COAT_REFERENCE=1``, or no GPU) after
    each, in the order of one stage: the same bits as with one.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._weight = next(
            (p for c in chunks for p in c.parameters() if getattr(p, "shared_embedding", False)),
            None,
        )
        self._gradients: list[torch.Tensor] = []
        self._hook = None
        if (
            self._weight is not None
            and self._weight.requires_grad
            and not use_kernels(self._weight)
        ):
            self._weight.coat_collected = True  # type: ignore[attr-defined]
            self._hook = self._weight.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, weight: torch.Tensor) -> None:
        assert weight.grad is not None
        self._gradients.append(weight.grad)
        weight.grad = None

    def stop_collecting(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            del self._weight.coat_collected  # type: ignore[union-attr]

    def sum(self) -> None:
        weight = self._weight
        if weight is None or not weight.requires_grad:
            return
        group = parallel_state.get_embedding_group()
        if self._hook is None:
            dist.all_reduce(accumulated(weight), group=group)
            return
        for gradient in self._gradients:
            dist.all_reduce(gradient, group=group)
            accumulate(weight, gradient)


def chunks_of(model: nn.Module) -> list[nn.Module]:
    """The model chunks of a rank: of interleaved stages several, else the model itself."""
    return list(model) if isinstance(model, nn.ModuleList) else [model]


def whole_names(model: nn.Module) -> dict[str, str]:
    """Names of parameters in the whole model by those of this pipeline stage, or of its chunks."""
    rename = in_whole({"pipeline": {"prefixes": prefixes_in_whole(model)}})
    return {name: rename(name) for name, _ in model.named_parameters()}


def prefixes_in_whole(model: nn.Module) -> dict[str, str]:
    """How names of layers, and of everything in a chunk, begin in the whole model, by how they
    begin here.
    """
    several = isinstance(model, nn.ModuleList)
    found = {f"{i}.": "" for i, _ in enumerate(chunks_of(model))} if several else {}
    for name, layer in model.named_modules():
        if hasattr(layer, "layer_number") and name.split(".")[-2:-1] == ["layers"]:
            path = (name.partition(".")[2] if several else name).rpartition(".")[0]
            found[f"{name}."] = f"{path}.{layer.layer_number - 1}."
    return found


def mark_stage(model: nn.Module) -> None:
    """Mark what the last stage holds a second time: DeepSpeed's gradient norm leaves it out."""
    if pipelined(model):
        for parameter in model.parameters():
            if getattr(parameter, "shared_embedding", False) and getattr(
                parameter, "shared", False
            ):
                parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]
